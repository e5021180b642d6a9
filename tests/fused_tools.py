"""Losses and projections with their options, scores and targets: for the tests of the fused kernels, CPU and GPU."""

import torch
from tools import DEVICE

import lastlayer as ll

LOSSES = {
    "binary": (ll.binary_loss, {}),
    "binary, smoothed": (ll.binary_loss, {"label_smoothing": 0.2, "weight": "per class"}),
    "binary, weighed": (ll.binary_loss, {"pos_weight": "per class", "weight": "per entry"}),
    "asymmetric": (ll.asymmetric_loss, {}),
    "asymmetric, not whole": (
        ll.asymmetric_loss,
        {"gamma_positive": 0.5, "gamma_negative": 2.5, "weight": "per class"},
    ),
    "asymmetric, detached": (ll.asymmetric_loss, {"gamma_negative": 0.5, "detach_weight": True}),
    "asymmetric, no powers": (ll.asymmetric_loss, {"gamma_positive": 0, "gamma_negative": 0, "clip": 0.2}),
    "asymmetric, no clip": (ll.asymmetric_loss, {"gamma_positive": 3, "gamma_negative": 1.5, "clip": 0}),
    "two-way": (ll.two_way_loss, {}),
    "two-way, rows": (ll.two_way_loss, {"per": "sample", "positive_temperature": 1.0, "margin": 0.5}),
    "two-way, columns": (ll.two_way_loss, {"per": "class", "negative_temperature": 2.0, "sample_weight": "per row"}),
    "truncated 1": (ll.loss.truncated_entropy_loss, {"k": 1}),
    "truncated 4": (ll.loss.truncated_entropy_loss, {"k": 4, "weight": "per class"}),
    "truncated 90": (ll.loss.truncated_entropy_loss, {"k": 90}),
    "svm 1": (ll.loss.smooth_topk_svm_loss, {"k": 1}),
    "svm 5": (ll.loss.smooth_topk_svm_loss, {"k": 5, "weight": "per class"}),
    "svm 16": (ll.loss.smooth_topk_svm_loss, {"k": 16, "tau": 0.5, "alpha": 0.3}),
    "warp": (ll.loss.warp_loss, {"weight": "per class"}),
    "quasibinary": (ll.loss.quasibinary_loss, {"sample_weight": "per row"}),
    "quasibinary, given": (ll.loss.quasibinary_loss, {"log_normalizer": 2.0}),
    "Fenchel-Young": (ll.lml_fenchel_young_loss, {}),
    "Fenchel-Young 2.5": (ll.lml_fenchel_young_loss, {"k": 2.5}),
}
PROJECTIONS = {
    "capped softmax": (ll.capped_softmax, {}),
    "capped softmax 3.7": (ll.capped_softmax, {"k": 3.7, "temperature": 0.5}),
    "capped softmax 70": (ll.capped_softmax, {"k": 70}),
    "capped sparsemax": (ll.capped_sparsemax, {}),
    "capped sparsemax 3.7": (ll.capped_sparsemax, {"k": 3.7, "temperature": 2.0}),
    "capped sparsemax 70": (ll.capped_sparsemax, {"k": 70}),
    "marginals 1": (ll.subset_marginals, {"k": 1}),
    "marginals 5": (ll.subset_marginals, {"k": 5}),
    "marginals 16": (ll.subset_marginals, {"k": 16}),
}


def scores(rows, n, kind):
    """Return float32 scores of a kind; some classes are ruled out."""
    x = torch.randn(rows, n)
    gap = torch.where(torch.arange(n) % 20 == 3, 200.0, 0.0)  # more classes far above than any k here
    x = {"normal": 2 * x, "wide": 40 * x, "offset": x + 1e4, "ties": (2 * x).round(), "gap": x + gap}[kind]
    x[:, 1] = torch.where(torch.rand(rows) < 0.5, -torch.inf, x[:, 1])
    return x


def labels(rows, n, kind):
    """Return a target of a kind; some rows have no label, and no label is in column 1, which may be ruled out."""
    hot = (torch.rand(rows, n) < 5 / n).float()
    hot[:, 1] = 0
    hot[0] = 0
    width = min(n - 1, 20 if kind == "long lists" else 9)
    if kind == "soft":
        return hot * torch.rand(rows, n)
    if kind == "unknown":
        return torch.where(torch.rand(rows, n) < 0.2, -1.0, hot)
    if kind in ("lists", "long lists"):
        return hot.topk(width).indices.masked_fill(hot.topk(width).values == 0, -1)
    if kind == "one class":
        return torch.randint(2, n, (rows,))
    return {"hard": hot, "bool": hot.bool(), "int8": hot.to(torch.int8)}[kind]


def arguments(options, rows, n):
    """Return the options with their weights drawn."""
    shapes = {"per class": (n,), "per row": (rows,), "per entry": (rows, n)}
    return {
        name: torch.rand(shapes[v]).to(DEVICE) if isinstance(v, str) and v in shapes else v
        for name, v in options.items()
    }
