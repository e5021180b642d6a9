"""The number of labels of each row, predicted from its features: ``--k predicted``.

A ridge regression of log(1 + count) on the features, fitted beside the model. It has no part in the training of the
model, so that the order of the labels is that of ``--k auto``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lastlayer.runs import RunError, RunFolder
from lastlayer.runs.files import damaged

FILE = "count.safetensors"
PENALTIES = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
INTERCEPT = 10.0  # the value of a constant feature: so large that the penalty on its weight does not matter
STEPS = 100  # of the iterative solver; more change the last digits of a prediction


@dataclass(frozen=True)
class CountModel:
    """Predict the number of labels of a row, ``exp(bias + x @ weight) - 1``, within ``low`` and ``high``.

    Args:
        weight: One number per feature.
        bias: The intercept.
        low: The smallest number to predict; above 0, so that a projection onto it has a solution.
        high: The largest number to predict.
    """

    weight: np.ndarray
    bias: float
    low: float
    high: float

    @classmethod
    def fit(
        cls, x: Any, counts: np.ndarray, n_labels: int, *, weight: np.ndarray | None = None, seed: int = 0
    ) -> CountModel:
        """Fit to features (dense or CSR) and counts; a fifth of the rows, held out, choose the penalty.

        `weight` is how much each row counts; rows of weight 0 are left out.

        Example:
            >>> x = np.array([[0.0], [1.0]] * 50)
            >>> model = CountModel.fit(x, 1 + 3 * x[:, 0], n_labels=9)
            >>> model(np.array([[0.0], [1.0]])).round(1).tolist()
            [1.0, 4.0]
        """
        counts = np.asarray(counts, dtype=np.float64)
        if weight is not None and np.any(weight):
            used = weight > 0
            x, counts, weight = x[used], counts[used], weight[used] / weight[used].mean()
        else:
            weight = np.ones(len(counts))
        limits = 0.1 if n_labels > 1 else 0.01, 0.99 * n_labels
        held = np.random.default_rng(seed).random(len(counts)) < 0.2
        best = PENALTIES[-1]
        if held.any() and not held.all():
            trials = [cls._solve(x[~held], counts[~held], weight[~held], penalty, limits) for penalty in PENALTIES]
            errors = [np.average(np.abs(t(x[held]) - counts[held]), weights=weight[held]) for t in trials]
            best = PENALTIES[int(np.argmin(errors))]
        return cls._solve(x, counts, weight, best, limits)

    @classmethod
    def _solve(
        cls, x: Any, counts: np.ndarray, weight: np.ndarray, penalty: float, limits: tuple[float, float]
    ) -> CountModel:
        from scipy.sparse import csr_matrix, diags, hstack
        from scipy.sparse.linalg import lsqr

        target, ones = np.log1p(counts), np.full((len(counts), 1), INTERCEPT)
        mean = float(np.average(target, weights=weight))
        wide = np.hstack([x, ones]) if isinstance(x, np.ndarray) else hstack([x, csr_matrix(ones)]).tocsr()
        share = np.sqrt(weight)
        if np.any(share != 1):
            wide = wide * share[:, None] if isinstance(wide, np.ndarray) else diags(share) @ wide
        *slope, bias = lsqr(wide, share * (target - mean), damp=np.sqrt(penalty), iter_lim=STEPS)[0]
        return cls(np.array(slope, np.float32), mean + INTERCEPT * float(bias), *limits)

    def __call__(self, x: Any) -> np.ndarray:
        """Return the predicted count of each row."""
        return np.asarray(np.expm1(self.bias + x @ self.weight).clip(self.low, self.high))

    def save(self, run: RunFolder) -> None:
        """Write count.safetensors."""
        import torch

        numbers = torch.tensor([self.bias, self.low, self.high], dtype=torch.float64)
        run.write_tensors(FILE, {"weight": torch.from_numpy(self.weight), "numbers": numbers})

    @classmethod
    def load(cls, run: RunFolder, n_features: int) -> CountModel:
        """Read count.safetensors, and check that it is for rows of that many features."""
        if not (run / FILE).exists():
            raise RunError(
                f"{run.path}: was trained by version 0.1 with `k: predicted`, whose counts were wrong. Train it again."
            )
        tensors = run.read_tensors(FILE)
        try:
            (bias, low, high), weight = tensors["numbers"].tolist(), tensors["weight"].numpy()
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(run / FILE, error) from None
        if weight.shape != (n_features,) or not (np.isfinite(weight).all() and np.isfinite([bias, low, high]).all()):
            raise damaged(run / FILE, f"must hold one finite weight per feature ({n_features})")
        return cls(weight, bias, low, high)
