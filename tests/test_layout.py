"""The house rules that a machine can check: direction of imports, light imports, public names."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lastlayer as ll

ROOT = Path(ll.__file__).parent
STAGES = ("project", "loss", "head", "decode", "metrics", "train", "report")
CORE = ("_check", "_module", "shard", "_threshold", "hierarchy", "installation", *STAGES[:5], "_triton", "_native")
MAY_IMPORT = {  # by first component below lastlayer
    "_threshold": {"_check", "shard"},
    "project": {"_check", "_module", "shard", "_threshold"},
    "loss": {"_check", "_module", "shard", "_threshold", "project"},
    "head": {"_check", "_module", "shard", "_threshold", "project", "loss"},
    "decode": {"_check", "_module", "shard", "project", "hierarchy"},
    "metrics": {"_check", "_module", "shard", "hierarchy"},
}
LIGHT = {
    "torch",
    "numpy",
    "lastlayer",
    "triton",
    "torchmetrics",
}  # torchmetrics: in metrics/stream.py, loaded on demand


@functools.cache
def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def sources(part: str) -> list[Path]:
    folder = ROOT / part
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def test_types_of_operators_are_those_that_torch_2_6_reads():
    """It takes `List` for a list, without looking it up, and an operator that it refuses is an import that fails."""
    found = 0
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            calls = [one.func for one in getattr(node, "decorator_list", ()) if isinstance(one, ast.Call)]
            if isinstance(node, ast.FunctionDef) and any(getattr(call, "id", "") == "operator" for call in calls):
                types = [one.annotation for one in node.args.args] + [node.returns]
                found += len(types)
                assert not any("list[" in ast.unparse(one) for one in types), f"{path}: {node.name}"
    assert found > 30


@pytest.mark.parametrize("stage", sorted(MAY_IMPORT))
def test_stages_import_only_what_comes_before(stage):
    for path in sources(stage):
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "lastlayer" and len(parts) > 1:
                allowed = {stage, "_triton", "_native"} | MAY_IMPORT[stage]
                private = parts[1].startswith("_") and (ROOT / f"{parts[1]}.py").exists()
                assert parts[1] in allowed or private, f"{path.relative_to(ROOT)} imports {name}"


def test_report_and_runs_import_no_stage_and_nothing_imports_the_command_line():
    for path in ROOT.rglob("*.py"):
        for name in imports(path):
            if path.is_relative_to(ROOT / "report") or path.is_relative_to(ROOT / "runs"):
                assert not re.match(r"lastlayer\.(project|loss|head|decode|train)\b", name), f"{path} imports {name}"
            if not path.name.startswith(("cli", "__main__")):
                assert not name.startswith("lastlayer.cli"), f"{path} imports {name}"


def test_the_core_needs_torch_and_numpy_alone():
    for part in CORE:
        for path in sources(part):
            if not path.exists():
                continue
            for name in imports(path):
                top = name.split(".")[0]
                assert top in LIGHT or top in sys.stdlib_module_names, f"{path.relative_to(ROOT)} imports {name}"
                if top == "triton":
                    assert part == "_triton", f"{path.relative_to(ROOT)} imports triton"


def test_importing_lastlayer_loads_nothing_heavy():
    code = (
        "import sys, torch; before = set(sys.modules); import lastlayer; lastlayer.metrics.recall_at_k; "
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for name in ("sklearn", "scipy", "pytorch_lightning", "torchmetrics", "triton", "matplotlib", "yaml", "rich"):
        assert f"'{name}'" not in loaded


def test_public_names_are_documented_functions_and_classes():
    for room in (ll, ll.project, ll.loss, ll.head, ll.decode, ll.metrics, ll.data):
        for name in room.__all__:
            assert getattr(room, name).__doc__, f"{room.__name__}.{name} has no docstring"


def test_the_door_shows_its_names_and_keeps_those_of_the_rooms():
    assert dir(ll) == sorted([*ll.__all__, "__version__"])
    for room in (ll.project, ll.loss, ll.head, ll.decode, ll.metrics):
        for name in room.__all__:
            assert getattr(ll, name) is getattr(room, name), name


def test_the_names_for_type_checkers_are_those_at_run_time():
    rooms, names = set(), set()
    for node in ast.walk(ast.parse((ROOT / "__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "lastlayer":
            if node.names[0].name == "*":
                rooms.add(node.module.removeprefix("lastlayer."))
            else:
                names |= {alias.asname for alias in node.names}
    assert rooms == {"project", "loss", "head", "decode", "metrics"}
    outside = {name for name, place in ll._PLACES.items() if place not in rooms}
    assert names == {*outside, *ll._ROOMS, "TreeStatistics"}
