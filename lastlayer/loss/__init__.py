"""Losses: from logits and labels to a number."""

from lastlayer.loss.incomplete import (
    AssumeNegativeLoss,
    EntropyMaxLoss,
    ExpectedPositiveLoss,
    HillLoss,
    LabelEstimates,
    ROLELoss,
    assume_negative_loss,
    entropy_max_loss,
    expected_positive_loss,
    hill_loss,
    role_loss,
)
from lastlayer.loss.linear import linear_lml_loss
from lastlayer.loss.lml import LMLFenchelYoungLoss, LMLLoss, lml_fenchel_young_loss, lml_loss
from lastlayer.loss.multilabel import (
    AsymmetricLoss,
    BinaryLoss,
    MultihotSoftmaxLoss,
    TwoWayLoss,
    asymmetric_loss,
    binary_loss,
    multihot_softmax_loss,
    two_way_loss,
)
from lastlayer.loss.openset import (
    OutlierMaxConfidenceLoss,
    OutlierUniformLoss,
    outlier_max_confidence_loss,
    outlier_uniform_loss,
)
from lastlayer.loss.quasibinary import QuasibinaryLoss, quasibinary_loss
from lastlayer.loss.ranking import RMLLoss, WARPLoss, rml_loss, warp_loss
from lastlayer.loss.reciprocal import reciprocal_point_loss
from lastlayer.loss.relabel import LargeLoss, SPLCLoss, large_loss, large_loss_corrections, splc_loss
from lastlayer.loss.sphere import SphericalLoss, spherical_loss
from lastlayer.loss.surrogate import MetricRefactoring, MetricSurrogateLoss, metric_surrogate_loss
from lastlayer.loss.topk import (
    SmoothTopKSVMLoss,
    TopKDistillationLoss,
    TruncatedEntropyLoss,
    smooth_topk_svm_loss,
    topk_distillation_loss,
    truncated_entropy_loss,
)

__all__ = [
    "AssumeNegativeLoss",
    "AsymmetricLoss",
    "BinaryLoss",
    "EntropyMaxLoss",
    "ExpectedPositiveLoss",
    "HillLoss",
    "LMLFenchelYoungLoss",
    "LMLLoss",
    "LabelEstimates",
    "LargeLoss",
    "MetricRefactoring",
    "MetricSurrogateLoss",
    "MultihotSoftmaxLoss",
    "OutlierMaxConfidenceLoss",
    "OutlierUniformLoss",
    "QuasibinaryLoss",
    "RMLLoss",
    "ROLELoss",
    "SPLCLoss",
    "SmoothTopKSVMLoss",
    "SphericalLoss",
    "TopKDistillationLoss",
    "TruncatedEntropyLoss",
    "TwoWayLoss",
    "WARPLoss",
    "assume_negative_loss",
    "asymmetric_loss",
    "binary_loss",
    "entropy_max_loss",
    "expected_positive_loss",
    "hill_loss",
    "large_loss",
    "large_loss_corrections",
    "linear_lml_loss",
    "lml_fenchel_young_loss",
    "lml_loss",
    "metric_surrogate_loss",
    "multihot_softmax_loss",
    "outlier_max_confidence_loss",
    "outlier_uniform_loss",
    "quasibinary_loss",
    "reciprocal_point_loss",
    "rml_loss",
    "role_loss",
    "smooth_topk_svm_loss",
    "spherical_loss",
    "splc_loss",
    "topk_distillation_loss",
    "truncated_entropy_loss",
    "two_way_loss",
    "warp_loss",
]
