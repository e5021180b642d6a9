"""Whole numbers of NumPy, which a search over settings draws, are taken where those of Python are."""

import numpy as np
import pytest
import torch

import lastlayer as ll

X = torch.linspace(0, 1, 40).reshape(8, 5).sin()
Y = torch.arange(40).reshape(8, 5) % 3 == 0
INDEX, TRIPLES = torch.tensor([[0, 1, 0]]), torch.tensor([[0, 1, 0], [1, 0, 1]])
SYMMETRIC = np.eye(5) + 0.1


def streamed(metric):
    metric.update(X, Y)
    return metric.compute()


CALLS = {
    "label_calibration_error": lambda n: ll.label_calibration_error(X, Y, n_bins=n),
    "reliability_bins": lambda n: ll.metrics.reliability_bins(X, Y, n_bins=n),
    "precision_recall_curve": lambda n: ll.precision_recall_curve(X, Y, thresholds=n),
    "mean_reciprocal_rank": lambda n: ll.mean_reciprocal_rank(X, Y, k=n),
    "bootstrap": lambda n: ll.bootstrap(torch.mean, X, n_resamples=n, generator=torch.Generator().manual_seed(0)),
    "graph_mean_recall_at_k": lambda n: ll.graph_mean_recall_at_k(INDEX, TRIPLES, 1, n_predicates=n),
    "metric_surrogate_loss": lambda n: ll.metric_surrogate_loss(
        X, Y, "accuracy", anchors=n, generator=torch.Generator().manual_seed(0)
    ),
    "recall_at_k": lambda n: ll.metric_surrogate_loss(
        X, Y, ll.MetricRefactoring.recall_at_k(n), generator=torch.Generator().manual_seed(0)
    ),
    "capped_softmax": lambda n: ll.capped_softmax(X[None], 1, dim=n),
    "from_confusion": lambda n: ll.LabelTree.from_confusion(SYMMETRIC, n_clusters=n).parents,
    "MeanAveragePrecision": lambda n: streamed(ll.MeanAveragePrecision(thresholds=n, n_classes=5)),
    "AUROC": lambda n: streamed(ll.AUROC(thresholds=n, n_classes=5)),
    "MeanReciprocalRank": lambda n: streamed(ll.metrics.MeanReciprocalRank(k=n)),
    "AttentivePoolHead": lambda n: ll.AttentivePoolHead(3, 4, n_modalities=n).n_modalities,
    "AngularError": lambda n: ll.metrics.AngularError(reduction="median", bins=n).bins,
}


@pytest.mark.parametrize("name", CALLS)
def test_whole_numbers_of_numpy_are_those_of_python(name):
    for number in (np.int64(2), np.int32(2), np.uint8(2)):
        expected, found = CALLS[name](2), CALLS[name](number)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    with pytest.raises((TypeError, ValueError)):
        CALLS[name](np.float64(2.0))
