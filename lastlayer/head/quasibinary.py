"""A linear layer with one normaliser for all classes: probabilities that are low where nothing fits."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lastlayer import _check
from lastlayer._check import Reduction, Target
from lastlayer.loss import _rows
from lastlayer.loss.quasibinary import batch_log_normalizer, of_weight, row_loss
from lastlayer.shard import all_ranks


class QuasibinaryHead(nn.Module):
    r"""Classify into any number of labels, none included, with one normaliser for all (Liao, 2021).

    .. math:: q_k = \min(1, e^{z_k} / C), \qquad z = W f + b

    In training :math:`C` is that of the batch, and the gradient flows through it
    (:func:`~lastlayer.loss.quasibinary_loss`); :math:`\log C` is kept as a moving average for
    prediction. :meth:`loss` updates it in training mode only, over the batches of all processes where
    ``torch.distributed`` is initialised. Rows without a label are ordinary training data: they push all their
    probabilities down.

    Args:
        in_features: The size of a feature vector.
        n_classes: The number of classes.
        bias: Whether the layer has a bias.
        momentum: The weight of the newest batch in the moving average.
        sync: Whether the normaliser is that of all processes.

    Attributes:
        log_normalizer: The moving average :math:`\log C`; at first ``log(n_classes)``, its value for zero logits and
            one label per row. The first batch replaces it.
        num_batches_tracked: The number of batches in the average.

    Example:
        >>> head = QuasibinaryHead(8, 3)
        >>> features, target = torch.randn(5, 8), torch.tensor([0, 2, -1, 1, -1])  # -1: a row without a label
        >>> head.loss(features, target).backward()
        >>> head.predict(features).shape
        torch.Size([5, 3])
    """

    log_normalizer: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self, in_features: int, n_classes: int, *, bias: bool = True, momentum: float = 0.1, sync: bool = True
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, n_classes, bias=bias)
        self.momentum = _check.number("QuasibinaryHead", "momentum", momentum, 0, 1)
        self.sync = sync
        self.register_buffer("log_normalizer", torch.tensor(math.log(max(n_classes, 1))))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits, shape ``(*batch, n_classes)``."""
        logits: Tensor = self.linear(features)
        return logits

    def loss(
        self,
        features: Tensor,
        target: Target,
        *,
        sample_weight: Tensor | None = None,
        reduction: Reduction = "mean",
    ) -> Tensor:
        """Return the quasibinary loss, and in training mode include the batch in the moving average.

        In evaluation mode the normaliser is the average. A training batch without any label (on any process) has no
        normaliser: its loss is the sum of the probabilities of a row under the average, with the gradient that the row
        would have in a batch with labels; the average does not change.
        """
        op = "QuasibinaryHead.loss"
        logits = self(features)
        x, labels, live = _rows.enter(op, logits, target)
        stored = self.log_normalizer.to(x)
        if not self.training:
            loss = row_loss(x, labels, live, stored)
            return _rows.leave(op, loss, reduction, None, logits.dtype, sample_weight)
        rows = _check.weights(op, "sample_weight", sample_weight, x, x.shape[:-1], "Give one weight per row.")
        x, live = of_weight(x, live, rows)
        log_c, known = batch_log_normalizer(x, labels, live, all_ranks() if self.sync else None, rows)
        self._track(log_c.detach(), known)
        log_q = torch.where(live, x - stored, -torch.inf)
        # Linear above 1, so that large logits stay finite; the gradient at 1 is that of the line alone.
        silent = (torch.where(log_q < 0, log_q, 0).exp() + _rows.above_0(log_q)).sum(-1)
        loss = torch.where(known, row_loss(x, labels, live, log_c), silent)
        return _rows.leave(op, loss, reduction, None, logits.dtype, sample_weight)

    def predict(self, features: Tensor) -> Tensor:
        """Return probabilities between 0 and 1, shape ``(*batch, n_classes)``, in float32 or better."""
        z: Tensor = self(features)
        z = z.to(_check.work_dtype(z))
        return (z - self.log_normalizer.to(z)).clamp(max=0).exp()

    @torch.no_grad()
    def _track(self, log_c: Tensor, known: Tensor) -> None:
        old = self.log_normalizer
        new = log_c.to(old)
        if 0 < self.momentum < 1:  # the average of C, not of log C
            mixed = torch.logaddexp(old + math.log1p(-self.momentum), new + math.log(self.momentum))
        else:
            mixed = new if self.momentum else old
        mixed = torch.where(self.num_batches_tracked == 0, new, mixed)
        self.log_normalizer.copy_(torch.where(known, mixed, old))
        self.num_batches_tracked.add_(known)

    def extra_repr(self) -> str:
        """Return what is not in the linear layer."""
        return f"momentum={self.momentum}"
