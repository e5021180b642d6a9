"""A threshold with a promise: conformal risk control for the share of labels that are found."""

from __future__ import annotations

from torch import Tensor

from lastlayer import _recall
from lastlayer._check import Target


def tune_recall(scores: Tensor, target: Target, recall: float = 0.9) -> Tensor:
    r"""Choose the highest threshold for :func:`decode_threshold` that promises a recall on new rows.

    .. math:: \max t \quad \text{subject to} \quad \frac{n \hat R(t) + 1}{n + 1} \le 1 - \text{recall}, \qquad
              \hat R(t) = \frac{1}{n} \sum_{i=1}^{n} \frac{|\{c \in T_i : s_{ic} \le t\}|}{|T_i|}

    This is conformal risk control (Angelopoulos et al., 2022) for the false negative rate. If the held-out rows and a
    new row are exchangeable (drawn from the same source, and the model has seen neither), the new row's recall is at
    least `recall` in expectation over both, for any model, calibrated or not. The sets are as small as
    one threshold for all classes allows; a better model makes them smaller.

    The promise is about an average over rows, not about each row or each class, and about rows that have a label. It
    is about recorded labels: if labels are missing at random, each with the same probability, the expected recall of
    all labels of a row is that of the recorded ones; if labels that are hard to find are also recorded less often, it
    is lower.

    Args:
        scores: Held-out scores, shape ``(..., n_classes)``, such as :func:`decode_threshold` will get.
        target: Multi-hot of the shape of `scores` (-1 is unknown, and no label), one class per row, or index lists
            padded with -1, which are never made dense. Rows without labels are left out.
        recall: The recall to promise, above 0 and below 1. It takes at least ``recall / (1 - recall)`` rows with
            labels: 9 for 0.9, 99 for 0.99.

    Returns:
        The threshold, a tensor of shape ``()``, of the dtype of `scores`, at least float32.

    Example:
        >>> import torch
        >>> scores = torch.tensor([[0.9, 0.6, 0.1], [0.2, 0.8, 0.3], [0.3, 0.1, 0.7]])
        >>> threshold = tune_recall(scores, torch.tensor([[0, 1], [1, -1], [0, 2]]), recall=0.6)
        >>> print(f"{threshold:.3f}")
        0.600
    """
    op = "tune_recall"
    recall = _recall.check(op, recall)
    return _recall.highest(op, _recall.label_scores(op, scores, target), recall)
