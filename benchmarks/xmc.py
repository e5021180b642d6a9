"""Label trees beside omikuji, PECOS and napkinXC: quality, calibration, processor time, size of the model.

    python -m benchmarks.xmc --data FOLDER [--peers PYTHON] [--sets NAME ...] [--json benchmarks/results/xmc.json]
    python -m benchmarks.xmc --zipf 200000 500000 10000

`benchmarks.label_sets` says what the folder holds. `PYTHON` is the interpreter of an environment with omikuji, libpecos
and napkinxc; those it lacks are left out. Every program gets the same rows, runs in a process of its own with one
thread and its defaults, and is timed by processor time. ECE@5 is the expected calibration error (ten bins) of the five
best labels of each row, with the scores as each program gives them; PSP@5 uses propensities with A = 0.55, B = 1.5.
``ECE@5 se`` is the standard error of the former: 500 draws of the test rows, of whole groups where the set has groups.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from benchmarks.label_sets import SETS, Rows, zipf
from lastlayer.train.linear.monotone import calibration_error
from lastlayer.train.linear.tree import inverse_propensity

TREES = ("lastlayer", "lastlayer_one_tree", "lastlayer_grouped", "omikuji", "pecos", "napkinxc")
LARGE = 4000  # labels from which on flat models are left out
ROOT = Path(__file__).parent.parent


def write_rows(rows: Rows, folder: Path) -> None:
    for name in ("x", "y", "xt"):
        sp.save_npz(folder / f"{name}.npz", getattr(rows, name), compressed=False)
    if rows.groups is not None:
        np.save(folder / "groups.npy", rows.groups)


def run_one(name: str, folder: Path, peers: str | None) -> dict[str, Any]:
    """Run a program in its own process; return what it measured, or why there is nothing."""
    own = name.startswith("lastlayer")
    python = sys.executable if own or peers is None else peers
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} | ({"PYTHONPATH": str(ROOT)} if own else {})
    command = [python, str(ROOT / "benchmarks" / "peers.py"), name, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"failed": last[:200]}
    found = json.loads((folder / f"{name}.json").read_text())
    with np.load(folder / f"{name}.npz") as z:
        return found | {key: z[key] for key in z.files}


def quality(rows: Rows, index: np.ndarray, score: np.ndarray) -> dict[str, float]:
    """Precision, recall, propensity-scored precision and calibration error, in percent."""
    yt, counts = rows.yt, np.diff(rows.yt.indptr)
    hit = np.asarray(yt[np.arange(len(index))[:, None], np.maximum(index, 0)].todense() > 0) & (index >= 0)
    inverse = inverse_propensity(np.asarray(rows.y.sum(0)).ravel(), rows.y.shape[0])
    weights = sp.csr_matrix((inverse[yt.indices], yt.indices, yt.indptr), shape=yt.shape)
    best = sum(np.sort(weights.data[a:b])[-5:].sum() for a, b in zip(yt.indptr, yt.indptr[1:], strict=False))
    out = {f"P@{k}": float(hit[:, :k].sum() / (k * len(hit))) for k in (1, 3, 5)}
    out["R@5"] = float((hit[:, :5].sum(1) / counts).mean())
    out["PSP@5"] = float((hit[:, :5] * inverse[np.maximum(index[:, :5], 0)]).sum() / best)
    used = index[:, :5] >= 0
    p, right = np.clip(score[:, :5][used], 0, 1), hit[:, :5][used]
    out["ECE@5"] = calibration_error(p, right)
    group = np.arange(len(hit)) if rows.test_groups is None else rows.test_groups
    out["ECE@5 se"] = error_of_calibration(p, right, np.repeat(group, used.sum(1)))
    return {name: round(100 * value, 2) for name, value in out.items()}


def error_of_calibration(p: np.ndarray, hit: np.ndarray, group: np.ndarray, draws: int = 500) -> float:
    """The standard deviation of the calibration error over draws of as many groups with replacement."""
    groups, group = np.unique(group, return_inverse=True)
    place = np.minimum((p * 10).astype(int), 9)
    gap = sp.csr_matrix((p - hit, (group, place)), shape=(len(groups), 10)).toarray()
    taken = np.random.default_rng(0).multinomial(len(groups), np.full(len(groups), 1 / len(groups)), draws)
    return float((np.abs(taken @ gap).sum(1) / (taken @ np.bincount(group))).std())


def measure(rows: Rows, name: str, folder: Path, peers: str | None) -> dict[str, Any]:
    found = run_one(name, folder, peers)
    if "failed" in found:
        return found
    if "scores" in found:
        found["index"] = np.argsort(-found["scores"], axis=1, kind="stable")[:, :10]
        found["score"] = 1 / (1 + np.exp(-np.take_along_axis(found["scores"], found["index"], 1)))
    shown = quality(rows, found["index"].astype(np.int64), found["score"])
    if "scores" in found:
        del shown["ECE@5"], shown["ECE@5 se"]  # margins are not probabilities
    return shown | {
        "train s": round(found["train"], 2),
        "predict ms per row": round(1000 * found["predict"] / rows.xt.shape[0], 3),
        "model MB": round(found["bytes"] / 1e6, 1),
        "peak MB with imports and rows": round(found["peak_mb"]),
        "peak MB of training": round(found["peak_mb"] - found["start_mb"]),
    }


def run_set(title: str, rows: Rows, programs: list[str], peers: str | None, save: Any) -> None:
    """Run the programs on one set; what others gave there before is kept."""
    shape = {"rows": rows.x.shape[0], "test rows": rows.xt.shape[0], "features": rows.x.shape[1]}
    out: dict[str, Any] = {**shape, "labels": rows.y.shape[1], "values in x": rows.x.nnz, "programs": {}}
    print(f"{title}: {out}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(rows, folder)
        for program in programs:
            if program == "lastlayer_grouped" and rows.groups is None:
                continue
            out["programs"][program] = measure(rows, program, folder, peers)
            print(f"  {program}: {out['programs'][program]}", flush=True)
            save(title, out)


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return {"cpu": (names or [platform.processor()])[0], "python": platform.python_version(), "threads": 1}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with the sets")
    parser.add_argument("--peers", help="the Python of an environment with the other programs")
    parser.add_argument("--sets", nargs="*", default=["debian dependencies", "delicious", "bibtex", "debian tags"])
    parser.add_argument("--programs", nargs="*", help="which programs run")
    parser.add_argument(
        "--zipf", type=int, nargs=3, metavar=("ROWS", "FEATURES", "LABELS"), help="a set that is made up"
    )
    parser.add_argument("--json", type=Path, help="results are merged into this file")
    arguments = parser.parse_args(argv)
    results: dict[str, Any] = {"machine": machine(), "sets": {}}
    if arguments.json is not None and arguments.json.exists():
        results["sets"] = json.loads(arguments.json.read_text())["sets"]

    def save(title: str, out: dict[str, Any]) -> None:
        before = results["sets"].get(title, {"programs": {}})["programs"]
        results["sets"][title] = {**out, "programs": before | out["programs"]}
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")

    if arguments.zipf is not None:
        title = "made up, Zipf, " + " x ".join(f"{n:,}" for n in arguments.zipf)
        run_set(title, zipf(*arguments.zipf), arguments.programs or ["lastlayer"], arguments.peers, save)
        return
    if arguments.data is None:
        parser.error("--data is needed: the folder with the sets")
    for name in arguments.sets:
        rows = SETS[name](arguments.data)
        programs = arguments.programs or [*TREES, *(["lastlayer_flat"] if rows.y.shape[1] < LARGE else [])]
        if arguments.peers is None:
            programs = [program for program in programs if program.startswith("lastlayer")]
        run_set(name, rows, programs, arguments.peers, save)


if __name__ == "__main__":
    main()
