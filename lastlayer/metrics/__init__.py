"""Metrics: functions of scores (or label sets) and target, and their streaming forms for torchmetrics."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lastlayer.metrics.angle import angular_error, rotation_error
from lastlayer.metrics.at_k import (
    f1_at_k,
    fall_out_at_k,
    ndcg_at_k,
    precision_at_k,
    propensity,
    psp_at_k,
    r_precision_at_k,
    recall_at_k,
    top_k_accuracy,
)
from lastlayer.metrics.average_precision import mean_average_precision
from lastlayer.metrics.bootstrap import Interval, bootstrap
from lastlayer.metrics.calibration import (
    ReliabilityBins,
    fit_temperature,
    label_calibration_error,
    reliability_bins,
)
from lastlayer.metrics.curves import Curve, precision_recall_curve
from lastlayer.metrics.errors import LabelSetErrors, label_set_errors
from lastlayer.metrics.graph import graph_mean_recall_at_k, graph_recall_at_k, graph_zero_shot_recall_at_k
from lastlayer.metrics.openset import auroc, mean_max_confidence
from lastlayer.metrics.ranks import coverage_error, label_ranking_loss, mean_reciprocal_rank
from lastlayer.metrics.sets import (
    exact_match,
    hamming_loss,
    label_set_f1,
    label_set_jaccard,
    label_set_precision,
    label_set_recall,
)
from lastlayer.metrics.tree import tree_accuracy, tree_specificity

if TYPE_CHECKING:
    from lastlayer.metrics.stream import (
        AUROC,
        F1AtK,
        FallOutAtK,
        LabelCalibrationError,
        MeanAveragePrecision,
        MeanMaxConfidence,
        NDCGAtK,
        PrecisionAtK,
        PSPAtK,
        RecallAtK,
        RPrecisionAtK,
        TopKAccuracy,
    )
    from lastlayer.metrics.stream_sets import (
        CoverageError,
        ExactMatch,
        HammingLoss,
        LabelRankingLoss,
        LabelSetF1,
        LabelSetJaccard,
        LabelSetPrecision,
        LabelSetRecall,
        MeanReciprocalRank,
        PrecisionRecallCurve,
        TuneRecall,
    )
    from lastlayer.metrics.stream_structures import (
        AngularError,
        GraphMeanRecallAtK,
        GraphRecallAtK,
        GraphZeroShotRecallAtK,
        LabelSetErrorsMetric,
        RotationError,
        TreeAccuracy,
        TreeSpecificity,
    )

__all__ = [
    "AUROC",
    "AngularError",
    "CoverageError",
    "Curve",
    "ExactMatch",
    "F1AtK",
    "FallOutAtK",
    "GraphMeanRecallAtK",
    "GraphRecallAtK",
    "GraphZeroShotRecallAtK",
    "HammingLoss",
    "Interval",
    "LabelCalibrationError",
    "LabelRankingLoss",
    "LabelSetErrors",
    "LabelSetErrorsMetric",
    "LabelSetF1",
    "LabelSetJaccard",
    "LabelSetPrecision",
    "LabelSetRecall",
    "MeanAveragePrecision",
    "MeanMaxConfidence",
    "MeanReciprocalRank",
    "NDCGAtK",
    "PSPAtK",
    "PrecisionAtK",
    "PrecisionRecallCurve",
    "RPrecisionAtK",
    "RecallAtK",
    "ReliabilityBins",
    "RotationError",
    "TopKAccuracy",
    "TreeAccuracy",
    "TreeSpecificity",
    "TuneRecall",
    "angular_error",
    "auroc",
    "bootstrap",
    "coverage_error",
    "exact_match",
    "f1_at_k",
    "fall_out_at_k",
    "fit_temperature",
    "graph_mean_recall_at_k",
    "graph_recall_at_k",
    "graph_zero_shot_recall_at_k",
    "hamming_loss",
    "label_calibration_error",
    "label_ranking_loss",
    "label_set_errors",
    "label_set_f1",
    "label_set_jaccard",
    "label_set_precision",
    "label_set_recall",
    "mean_average_precision",
    "mean_max_confidence",
    "mean_reciprocal_rank",
    "ndcg_at_k",
    "precision_at_k",
    "precision_recall_curve",
    "propensity",
    "psp_at_k",
    "r_precision_at_k",
    "recall_at_k",
    "reliability_bins",
    "rotation_error",
    "top_k_accuracy",
    "tree_accuracy",
    "tree_specificity",
]

# The streaming forms need torchmetrics, an optional package: they are imported when first asked for.
_STREAMS = {
    "lastlayer.metrics.stream": (
        "AUROC F1AtK FallOutAtK LabelCalibrationError MeanAveragePrecision MeanMaxConfidence NDCGAtK PSPAtK "
        "PrecisionAtK RPrecisionAtK RecallAtK TopKAccuracy"
    ),
    "lastlayer.metrics.stream_sets": (
        "CoverageError ExactMatch HammingLoss LabelRankingLoss LabelSetF1 LabelSetJaccard LabelSetPrecision "
        "LabelSetRecall MeanReciprocalRank PrecisionRecallCurve TuneRecall"
    ),
    "lastlayer.metrics.stream_structures": (
        "AngularError GraphMeanRecallAtK GraphRecallAtK GraphZeroShotRecallAtK LabelSetErrorsMetric RotationError "
        "TreeAccuracy TreeSpecificity"
    ),
}


def __getattr__(name: str) -> Any:
    for module, names in _STREAMS.items():
        if name in names.split():
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
