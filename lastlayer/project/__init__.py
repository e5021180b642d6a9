"""Projections: from logits to a point of a label polytope."""

from lastlayer.project.balanced import LMLBalanced, lml_balanced, lml_balanced_duals
from lastlayer.project.capped import CappedSoftmax, CappedSparsemax, capped_softmax, capped_sparsemax
from lastlayer.project.lml import LML, LMLAtMost, LMLThreshold, LogLML, lml, lml_at_most, lml_threshold, log_lml
from lastlayer.project.sphere import SphericalExp, spherical_exp
from lastlayer.project.subset import SampleSubset, SubsetMarginals, sample_subset, subset_log_prob, subset_marginals

__all__ = [
    "LML",
    "CappedSoftmax",
    "CappedSparsemax",
    "LMLAtMost",
    "LMLBalanced",
    "LMLThreshold",
    "LogLML",
    "SampleSubset",
    "SphericalExp",
    "SubsetMarginals",
    "capped_softmax",
    "capped_sparsemax",
    "lml",
    "lml_at_most",
    "lml_balanced",
    "lml_balanced_duals",
    "lml_threshold",
    "log_lml",
    "sample_subset",
    "spherical_exp",
    "subset_log_prob",
    "subset_marginals",
]
