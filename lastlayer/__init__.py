"""Everything after the logits: projections, losses, heads, decoders and metrics for label sets.

The names that most users need are here. Each room exports all of its own: :mod:`lastlayer.project`,
:mod:`lastlayer.loss`, :mod:`lastlayer.head`, :mod:`lastlayer.decode`, :mod:`lastlayer.metrics`, :mod:`lastlayer.data`.
Importing the package imports nothing else; a name is imported, and torch with it, on first use.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lastlayer import data as data
    from lastlayer import decode as decode
    from lastlayer import head as head
    from lastlayer import hierarchy as hierarchy
    from lastlayer import loss as loss
    from lastlayer import metrics as metrics
    from lastlayer import project as project
    from lastlayer import report as report
    from lastlayer import shard as shard
    from lastlayer import train as train
    from lastlayer._check import label_lists as label_lists
    from lastlayer.decode import *  # noqa: F403
    from lastlayer.head import *  # noqa: F403
    from lastlayer.hierarchy import LabelTree as LabelTree
    from lastlayer.hierarchy import TreeStatistics as TreeStatistics
    from lastlayer.installation import show_config as show_config
    from lastlayer.loss import *  # noqa: F403
    from lastlayer.metrics import *  # noqa: F403
    from lastlayer.project import *  # noqa: F403
    from lastlayer.shard import ClassShard as ClassShard
    from lastlayer.train.estimator import LabelSetClassifier as LabelSetClassifier
    from lastlayer.train.serve import load as load

__version__ = "0.2.0"

# The door: what `dir(lastlayer)` and the documentation show, by the module that has it.
_DOOR = {
    "_check": ("label_lists",),
    "decode": (
        "decode_graph",
        "decode_reject",
        "decode_threshold",
        "decode_top_k",
        "decode_tree",
        "suggest_labels",
        "tune_recall",
        "tune_thresholds",
    ),
    "hierarchy": ("LabelTree",),
    "installation": ("show_config",),
    "loss": (
        "AsymmetricLoss",
        "BinaryLoss",
        "LMLFenchelYoungLoss",
        "LMLLoss",
        "TwoWayLoss",
        "asymmetric_loss",
        "binary_loss",
        "linear_lml_loss",
        "lml_fenchel_young_loss",
        "lml_loss",
        "two_way_loss",
    ),
    "metrics": ("ndcg_at_k", "precision_at_k", "recall_at_k"),
    "project": (
        "LML",
        "LMLAtMost",
        "LMLBalanced",
        "capped_softmax",
        "capped_sparsemax",
        "lml",
        "lml_at_most",
        "lml_balanced",
        "lml_balanced_duals",
        "lml_threshold",
        "log_lml",
        "sample_subset",
        "subset_marginals",
    ),
    "shard": ("ClassShard",),
    "train.estimator": ("LabelSetClassifier",),
    "train.serve": ("load",),
}
_PLACES = {name: place for place, names in _DOOR.items() for name in names}
_ROOMS = ("data", "decode", "head", "hierarchy", "loss", "metrics", "project", "report", "shard", "train")
__all__ = sorted((*_PLACES, *_ROOMS))


def _find(name: str) -> Any:
    if name in _ROOMS or name == "_native":
        return import_module(f"lastlayer.{name}")
    if name in _PLACES:
        value = globals()[name] = getattr(import_module(f"lastlayer.{_PLACES[name]}"), name)
        return value
    if name.startswith("_") or find_spec(f"lastlayer.{name}"):  # a module, which the import system finds by itself
        raise AttributeError(f"module 'lastlayer' has no attribute {name!r}")
    for room in ("project", "loss", "head", "decode", "metrics", "hierarchy"):  # as version 0.1 named them
        module = import_module(f"lastlayer.{room}")
        if name in module.__all__:
            return getattr(module, name)
    raise AttributeError(f"module 'lastlayer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


if not TYPE_CHECKING:  # so that type checkers report a name that does not exist
    __getattr__ = _find
