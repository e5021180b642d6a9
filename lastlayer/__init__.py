"""Everything after the logits: projections, losses, heads, decoders and metrics for label sets.

Importing the package imports nothing else; a name is imported, and torch with it, on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lastlayer._check import label_lists as label_lists
    from lastlayer.decode.graph import DecodeGraph as DecodeGraph
    from lastlayer.decode.graph import decode_graph as decode_graph
    from lastlayer.decode.recall import tune_recall as tune_recall
    from lastlayer.decode.reject import DecodeReject as DecodeReject
    from lastlayer.decode.reject import decode_reject as decode_reject
    from lastlayer.decode.reject import tune_reject as tune_reject
    from lastlayer.decode.threshold import DecodeThreshold as DecodeThreshold
    from lastlayer.decode.threshold import decode_threshold as decode_threshold
    from lastlayer.decode.threshold import tune_thresholds as tune_thresholds
    from lastlayer.decode.top_k import Decoded as Decoded
    from lastlayer.decode.top_k import DecodeTopK as DecodeTopK
    from lastlayer.decode.top_k import decode_top_k as decode_top_k
    from lastlayer.decode.tree import DecodeTree as DecodeTree
    from lastlayer.decode.tree import decode_tree as decode_tree
    from lastlayer.decode.tree import tune_darts as tune_darts
    from lastlayer.head.prototype import PrototypeHead as PrototypeHead
    from lastlayer.head.prototype import ReciprocalPointHead as ReciprocalPointHead
    from lastlayer.head.quasibinary import QuasibinaryHead as QuasibinaryHead
    from lastlayer.head.sharded import ShardedLinear as ShardedLinear
    from lastlayer.head.sphere import SphericalHead as SphericalHead
    from lastlayer.hierarchy import LabelTree as LabelTree
    from lastlayer.hierarchy import TreeStatistics as TreeStatistics
    from lastlayer.installation import show_config as show_config
    from lastlayer.loss.incomplete import AssumeNegativeLoss as AssumeNegativeLoss
    from lastlayer.loss.incomplete import EntropyMaxLoss as EntropyMaxLoss
    from lastlayer.loss.incomplete import ExpectedPositiveLoss as ExpectedPositiveLoss
    from lastlayer.loss.incomplete import HillLoss as HillLoss
    from lastlayer.loss.incomplete import LabelEstimates as LabelEstimates
    from lastlayer.loss.incomplete import ROLELoss as ROLELoss
    from lastlayer.loss.incomplete import assume_negative_loss as assume_negative_loss
    from lastlayer.loss.incomplete import entropy_max_loss as entropy_max_loss
    from lastlayer.loss.incomplete import expected_positive_loss as expected_positive_loss
    from lastlayer.loss.incomplete import hill_loss as hill_loss
    from lastlayer.loss.incomplete import role_loss as role_loss
    from lastlayer.loss.linear import linear_lml_loss as linear_lml_loss
    from lastlayer.loss.lml import LMLFenchelYoungLoss as LMLFenchelYoungLoss
    from lastlayer.loss.lml import LMLLoss as LMLLoss
    from lastlayer.loss.lml import lml_fenchel_young_loss as lml_fenchel_young_loss
    from lastlayer.loss.lml import lml_loss as lml_loss
    from lastlayer.loss.multilabel import AsymmetricLoss as AsymmetricLoss
    from lastlayer.loss.multilabel import BinaryLoss as BinaryLoss
    from lastlayer.loss.multilabel import MultihotSoftmaxLoss as MultihotSoftmaxLoss
    from lastlayer.loss.multilabel import TwoWayLoss as TwoWayLoss
    from lastlayer.loss.multilabel import asymmetric_loss as asymmetric_loss
    from lastlayer.loss.multilabel import binary_loss as binary_loss
    from lastlayer.loss.multilabel import multihot_softmax_loss as multihot_softmax_loss
    from lastlayer.loss.multilabel import two_way_loss as two_way_loss
    from lastlayer.loss.openset import OutlierMaxConfidenceLoss as OutlierMaxConfidenceLoss
    from lastlayer.loss.openset import OutlierUniformLoss as OutlierUniformLoss
    from lastlayer.loss.openset import outlier_max_confidence_loss as outlier_max_confidence_loss
    from lastlayer.loss.openset import outlier_uniform_loss as outlier_uniform_loss
    from lastlayer.loss.quasibinary import QuasibinaryLoss as QuasibinaryLoss
    from lastlayer.loss.quasibinary import quasibinary_loss as quasibinary_loss
    from lastlayer.loss.ranking import RMLLoss as RMLLoss
    from lastlayer.loss.ranking import WARPLoss as WARPLoss
    from lastlayer.loss.ranking import rml_loss as rml_loss
    from lastlayer.loss.ranking import warp_loss as warp_loss
    from lastlayer.loss.reciprocal import reciprocal_point_loss as reciprocal_point_loss
    from lastlayer.loss.relabel import LargeLoss as LargeLoss
    from lastlayer.loss.relabel import SPLCLoss as SPLCLoss
    from lastlayer.loss.relabel import large_loss as large_loss
    from lastlayer.loss.relabel import large_loss_corrections as large_loss_corrections
    from lastlayer.loss.relabel import splc_loss as splc_loss
    from lastlayer.loss.sphere import SphericalLoss as SphericalLoss
    from lastlayer.loss.sphere import spherical_loss as spherical_loss
    from lastlayer.loss.surrogate import MetricRefactoring as MetricRefactoring
    from lastlayer.loss.surrogate import MetricSurrogateLoss as MetricSurrogateLoss
    from lastlayer.loss.surrogate import metric_surrogate_loss as metric_surrogate_loss
    from lastlayer.loss.topk import SmoothTopKSVMLoss as SmoothTopKSVMLoss
    from lastlayer.loss.topk import TopKDistillationLoss as TopKDistillationLoss
    from lastlayer.loss.topk import TruncatedEntropyLoss as TruncatedEntropyLoss
    from lastlayer.loss.topk import smooth_topk_svm_loss as smooth_topk_svm_loss
    from lastlayer.loss.topk import topk_distillation_loss as topk_distillation_loss
    from lastlayer.loss.topk import truncated_entropy_loss as truncated_entropy_loss
    from lastlayer.metrics.angle import angular_error as angular_error
    from lastlayer.metrics.angle import rotation_error as rotation_error
    from lastlayer.metrics.at_k import f1_at_k as f1_at_k
    from lastlayer.metrics.at_k import ndcg_at_k as ndcg_at_k
    from lastlayer.metrics.at_k import precision_at_k as precision_at_k
    from lastlayer.metrics.at_k import propensity as propensity
    from lastlayer.metrics.at_k import psp_at_k as psp_at_k
    from lastlayer.metrics.at_k import r_precision_at_k as r_precision_at_k
    from lastlayer.metrics.at_k import recall_at_k as recall_at_k
    from lastlayer.metrics.at_k import top_k_accuracy as top_k_accuracy
    from lastlayer.metrics.average_precision import mean_average_precision as mean_average_precision
    from lastlayer.metrics.bootstrap import bootstrap as bootstrap
    from lastlayer.metrics.calibration import fit_temperature as fit_temperature
    from lastlayer.metrics.calibration import label_calibration_error as label_calibration_error
    from lastlayer.metrics.calibration import reliability_bins as reliability_bins
    from lastlayer.metrics.errors import LabelSetErrors as LabelSetErrors
    from lastlayer.metrics.errors import label_set_errors as label_set_errors
    from lastlayer.metrics.graph import graph_mean_recall_at_k as graph_mean_recall_at_k
    from lastlayer.metrics.graph import graph_recall_at_k as graph_recall_at_k
    from lastlayer.metrics.graph import graph_zero_shot_recall_at_k as graph_zero_shot_recall_at_k
    from lastlayer.metrics.openset import auroc as auroc
    from lastlayer.metrics.openset import mean_max_confidence as mean_max_confidence
    from lastlayer.metrics.stream import AUROC as AUROC
    from lastlayer.metrics.stream import F1AtK as F1AtK
    from lastlayer.metrics.stream import LabelCalibrationError as LabelCalibrationError
    from lastlayer.metrics.stream import MeanAveragePrecision as MeanAveragePrecision
    from lastlayer.metrics.stream import MeanMaxConfidence as MeanMaxConfidence
    from lastlayer.metrics.stream import NDCGAtK as NDCGAtK
    from lastlayer.metrics.stream import PrecisionAtK as PrecisionAtK
    from lastlayer.metrics.stream import PSPAtK as PSPAtK
    from lastlayer.metrics.stream import RecallAtK as RecallAtK
    from lastlayer.metrics.stream import RPrecisionAtK as RPrecisionAtK
    from lastlayer.metrics.stream import TopKAccuracy as TopKAccuracy
    from lastlayer.metrics.stream_structures import AngularError as AngularError
    from lastlayer.metrics.stream_structures import GraphMeanRecallAtK as GraphMeanRecallAtK
    from lastlayer.metrics.stream_structures import GraphRecallAtK as GraphRecallAtK
    from lastlayer.metrics.stream_structures import GraphZeroShotRecallAtK as GraphZeroShotRecallAtK
    from lastlayer.metrics.stream_structures import LabelSetErrorsMetric as LabelSetErrorsMetric
    from lastlayer.metrics.stream_structures import RotationError as RotationError
    from lastlayer.metrics.stream_structures import TreeAccuracy as TreeAccuracy
    from lastlayer.metrics.stream_structures import TreeSpecificity as TreeSpecificity
    from lastlayer.metrics.tree import tree_accuracy as tree_accuracy
    from lastlayer.metrics.tree import tree_specificity as tree_specificity
    from lastlayer.project.balanced import LMLBalanced as LMLBalanced
    from lastlayer.project.balanced import lml_balanced as lml_balanced
    from lastlayer.project.balanced import lml_balanced_duals as lml_balanced_duals
    from lastlayer.project.capped import CappedSoftmax as CappedSoftmax
    from lastlayer.project.capped import CappedSparsemax as CappedSparsemax
    from lastlayer.project.capped import capped_softmax as capped_softmax
    from lastlayer.project.capped import capped_sparsemax as capped_sparsemax
    from lastlayer.project.lml import LML as LML
    from lastlayer.project.lml import LMLAtMost as LMLAtMost
    from lastlayer.project.lml import LMLThreshold as LMLThreshold
    from lastlayer.project.lml import LogLML as LogLML
    from lastlayer.project.lml import lml as lml
    from lastlayer.project.lml import lml_at_most as lml_at_most
    from lastlayer.project.lml import lml_threshold as lml_threshold
    from lastlayer.project.lml import log_lml as log_lml
    from lastlayer.project.sphere import SphericalExp as SphericalExp
    from lastlayer.project.sphere import spherical_exp as spherical_exp
    from lastlayer.project.subset import SampleSubset as SampleSubset
    from lastlayer.project.subset import SubsetMarginals as SubsetMarginals
    from lastlayer.project.subset import sample_subset as sample_subset
    from lastlayer.project.subset import subset_log_prob as subset_log_prob
    from lastlayer.project.subset import subset_marginals as subset_marginals
    from lastlayer.shard import ClassShard as ClassShard
    from lastlayer.train.estimator import LabelSetClassifier as LabelSetClassifier
    from lastlayer.train.serve import load as load

__version__ = "0.2.0"

# Where each name is.
_PLACES = {
    "lastlayer._check": ("label_lists",),
    "lastlayer.decode.graph": (
        "DecodeGraph",
        "decode_graph",
    ),
    "lastlayer.decode.recall": ("tune_recall",),
    "lastlayer.decode.reject": (
        "DecodeReject",
        "decode_reject",
        "tune_reject",
    ),
    "lastlayer.decode.threshold": (
        "DecodeThreshold",
        "decode_threshold",
        "tune_thresholds",
    ),
    "lastlayer.decode.top_k": (
        "DecodeTopK",
        "Decoded",
        "decode_top_k",
    ),
    "lastlayer.decode.tree": (
        "DecodeTree",
        "decode_tree",
        "tune_darts",
    ),
    "lastlayer.head.prototype": (
        "PrototypeHead",
        "ReciprocalPointHead",
    ),
    "lastlayer.head.quasibinary": ("QuasibinaryHead",),
    "lastlayer.head.sharded": ("ShardedLinear",),
    "lastlayer.head.sphere": ("SphericalHead",),
    "lastlayer.hierarchy": (
        "LabelTree",
        "TreeStatistics",
    ),
    "lastlayer.installation": ("show_config",),
    "lastlayer.loss.incomplete": (
        "AssumeNegativeLoss",
        "EntropyMaxLoss",
        "ExpectedPositiveLoss",
        "HillLoss",
        "LabelEstimates",
        "ROLELoss",
        "assume_negative_loss",
        "entropy_max_loss",
        "expected_positive_loss",
        "hill_loss",
        "role_loss",
    ),
    "lastlayer.loss.linear": ("linear_lml_loss",),
    "lastlayer.loss.lml": (
        "LMLFenchelYoungLoss",
        "LMLLoss",
        "lml_fenchel_young_loss",
        "lml_loss",
    ),
    "lastlayer.loss.multilabel": (
        "AsymmetricLoss",
        "BinaryLoss",
        "MultihotSoftmaxLoss",
        "TwoWayLoss",
        "asymmetric_loss",
        "binary_loss",
        "multihot_softmax_loss",
        "two_way_loss",
    ),
    "lastlayer.loss.openset": (
        "OutlierMaxConfidenceLoss",
        "OutlierUniformLoss",
        "outlier_max_confidence_loss",
        "outlier_uniform_loss",
    ),
    "lastlayer.loss.quasibinary": (
        "QuasibinaryLoss",
        "quasibinary_loss",
    ),
    "lastlayer.loss.ranking": (
        "RMLLoss",
        "WARPLoss",
        "rml_loss",
        "warp_loss",
    ),
    "lastlayer.loss.reciprocal": ("reciprocal_point_loss",),
    "lastlayer.loss.relabel": (
        "LargeLoss",
        "SPLCLoss",
        "large_loss",
        "large_loss_corrections",
        "splc_loss",
    ),
    "lastlayer.loss.sphere": (
        "SphericalLoss",
        "spherical_loss",
    ),
    "lastlayer.loss.surrogate": (
        "MetricRefactoring",
        "MetricSurrogateLoss",
        "metric_surrogate_loss",
    ),
    "lastlayer.loss.topk": (
        "SmoothTopKSVMLoss",
        "TopKDistillationLoss",
        "TruncatedEntropyLoss",
        "smooth_topk_svm_loss",
        "topk_distillation_loss",
        "truncated_entropy_loss",
    ),
    "lastlayer.metrics.angle": (
        "angular_error",
        "rotation_error",
    ),
    "lastlayer.metrics.at_k": (
        "f1_at_k",
        "ndcg_at_k",
        "precision_at_k",
        "propensity",
        "psp_at_k",
        "r_precision_at_k",
        "recall_at_k",
        "top_k_accuracy",
    ),
    "lastlayer.metrics.average_precision": ("mean_average_precision",),
    "lastlayer.metrics.bootstrap": ("bootstrap",),
    "lastlayer.metrics.calibration": (
        "fit_temperature",
        "label_calibration_error",
        "reliability_bins",
    ),
    "lastlayer.metrics.errors": (
        "LabelSetErrors",
        "label_set_errors",
    ),
    "lastlayer.metrics.graph": (
        "graph_mean_recall_at_k",
        "graph_recall_at_k",
        "graph_zero_shot_recall_at_k",
    ),
    "lastlayer.metrics.openset": (
        "auroc",
        "mean_max_confidence",
    ),
    "lastlayer.metrics.stream": (
        "AUROC",
        "F1AtK",
        "LabelCalibrationError",
        "MeanAveragePrecision",
        "MeanMaxConfidence",
        "NDCGAtK",
        "PSPAtK",
        "PrecisionAtK",
        "RPrecisionAtK",
        "RecallAtK",
        "TopKAccuracy",
    ),
    "lastlayer.metrics.stream_structures": (
        "AngularError",
        "GraphMeanRecallAtK",
        "GraphRecallAtK",
        "GraphZeroShotRecallAtK",
        "LabelSetErrorsMetric",
        "RotationError",
        "TreeAccuracy",
        "TreeSpecificity",
    ),
    "lastlayer.metrics.tree": (
        "tree_accuracy",
        "tree_specificity",
    ),
    "lastlayer.project.balanced": (
        "LMLBalanced",
        "lml_balanced",
        "lml_balanced_duals",
    ),
    "lastlayer.project.capped": (
        "CappedSoftmax",
        "CappedSparsemax",
        "capped_softmax",
        "capped_sparsemax",
    ),
    "lastlayer.project.lml": (
        "LML",
        "LMLAtMost",
        "LMLThreshold",
        "LogLML",
        "lml",
        "lml_at_most",
        "lml_threshold",
        "log_lml",
    ),
    "lastlayer.project.sphere": (
        "SphericalExp",
        "spherical_exp",
    ),
    "lastlayer.project.subset": (
        "SampleSubset",
        "SubsetMarginals",
        "sample_subset",
        "subset_log_prob",
        "subset_marginals",
    ),
    "lastlayer.shard": ("ClassShard",),
    "lastlayer.train.estimator": ("LabelSetClassifier",),
    "lastlayer.train.serve": ("load",),
}
_NAMES = {name: place for place, names in _PLACES.items() for name in names}
_ROOMS = (
    "_native",
    "capacity",
    "data",
    "decode",
    "head",
    "hierarchy",
    "loss",
    "metrics",
    "project",
    "report",
    "runs",
    "shard",
    "train",
)


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"lastlayer.{name}")
    if name not in _NAMES:
        raise AttributeError(f"module 'lastlayer' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_NAMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})
