"""The losses of the label-set experiments by name, each as a loss per row of a batch of :mod:`experiments.tabular`.

Where a published loss divides by the number of classes it is multiplied by it, and the pairwise losses are divided by
it, so that one range of learning rates serves all.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

import lastlayer as ll
from experiments.tabular import Batch, Method, expected_count

CARDINALITIES = (2.0, 4.0, 12.0)
COUNT_WEIGHT = 0.1  # of the Poisson term that ties a predicted count to the labels


def lml(k: str, thinned: bool) -> Method:
    """LML with k tuned, guessed from the labels, or predicted for each row; Algorithm 2 or thinned."""

    def loss(batch: Batch) -> Tensor:
        cell = batch.cell
        size = batch.k if k == "tuned" else cell.guess if k == "auto" else batch.count
        rho = 0.0 if not thinned else batch.rho if k == "tuned" else batch.guessed_rho
        value = ll.lml_loss(*batch.args, size, observed=rho, reduction="none")
        if batch.count is None:
            return value
        seen = batch.target.sum(-1) * (expected_count(cell) / cell.mean if thinned else 1.0)
        return value + COUNT_WEIGHT * F.poisson_nll_loss(batch.count, seen, log_input=False, reduction="none")

    options = CARDINALITIES if k == "tuned" else (0.0,)
    return Method(loss, options, reads_cell=True, state="count" if k == "predicted" else "")


def binary_thinned(batch: Batch) -> Tensor:
    """The likelihood of thinned labels with one sigmoid per class: thinned LML without the projection."""
    x, t = batch.args
    seen, unseen = -F.logsigmoid(x), -torch.log1p(-batch.rho * x.sigmoid())
    return torch.where(t, seen, unseen).sum(-1)


def role(batch: Batch) -> Tensor:
    assert batch.estimates is not None
    value = ll.role_loss(*batch.args, batch.estimates, batch.k, reduction="none")
    return batch.logits.shape[-1] * value


def expected_positive(batch: Batch) -> Tensor:
    return batch.logits.shape[-1] * ll.expected_positive_loss(*batch.args, batch.k, reduction="none")


def weighted_negatives(batch: Batch) -> Tensor:
    weight = 1 / (batch.logits.shape[-1] - 1)
    return ll.assume_negative_loss(*batch.args, negative_weight=weight, reduction="none")


def large(batch: Batch) -> Tensor:
    """The option is the share of all entries that is dropped at the end of the training."""
    return ll.large_loss(*batch.args, rate=batch.cell.option * batch.progress, reduction="none")


def lml_of_mean(batch: Batch) -> Tensor:
    k = min(batch.cell.option * batch.cell.mean, 0.5 * batch.logits.shape[-1])
    return ll.lml_loss(*batch.args, k, reduction="none")


def truncated(batch: Batch) -> Tensor:
    k = min(max(round(batch.cell.option * batch.cell.mean), 1), batch.logits.shape[-1] - 1)
    return ll.truncated_entropy_loss(*batch.args, k, reduction="none")


PAIRS = tuple(itertools.product(CARDINALITIES, (0.1, 0.3, 0.9)))


def thinned_pair(batch: Batch) -> Tensor:
    """Thinned LML with rho tuned beside k; the option is a number of a pair."""
    k, rho = PAIRS[int(batch.cell.option)]
    return ll.lml_loss(*batch.args, min(k, 0.5 * batch.logits.shape[-1]), observed=rho, reduction="none")


def thinned_by_label(batch: Batch) -> Tensor:
    """Thinned LML with a rho for each label: its observed over its expected labels in the batch, drawn to the mean."""
    x, t = batch.args
    log_y = ll.log_lml(x, batch.cell.guess)
    y = log_y.exp()
    prior, strength = batch.guessed_rho, 10.0
    rho = (t.sum(-2, keepdim=True) + strength * prior) / (y.detach().sum(-2, keepdim=True) + strength)
    return torch.where(t, -log_y, -torch.log1p(-rho.clamp(max=0.95) * y)).sum(-1)


def thinned_at_temperature(batch: Batch) -> Tensor:
    """The option is the temperature."""
    rho = batch.guessed_rho
    return ll.lml_loss(*batch.args, batch.cell.guess, observed=rho, temperature=batch.cell.option, reduction="none")


def thinned_auto(batch: Batch) -> Tensor:
    return ll.lml_loss(*batch.args, batch.cell.guess, observed=batch.guessed_rho, reduction="none")


def thinned_from_two(batch: Batch) -> Tensor:
    """Thinned LML with k auto, but at least 2."""
    k = min(max(batch.cell.guess, 2.0), 0.5 * batch.logits.shape[-1])
    return ll.lml_loss(*batch.args, k, observed=min(batch.cell.mean / k, 0.95), reduction="none")


def in_labelled_rows(method: Method) -> Method:
    """The same without a loss in rows that have no observed label, as in Algorithm 2."""
    return method._replace(loss=lambda batch: method.loss(batch) * batch.target.any(-1))


def thinned_and_class(batch: Batch) -> Tensor:
    """Thinned LML in the rows, and the class term of the two-way loss in the columns; the option weighs the latter."""

    def of_class(x: Tensor, t: Tensor) -> Tensor:
        return ll.two_way_loss(x, t, per="class")

    column = torch.vmap(of_class)(batch.logits.flatten(0, 1), batch.target.flatten(0, 1))
    return thinned_auto(batch) + batch.cell.option * column.unflatten(0, batch.logits.shape[:2]).unsqueeze(-1)


LOSSES = {
    "assume negative": Method(lambda b: ll.binary_loss(*b.args, reduction="none"), probability="sigmoid"),
    "label smoothing": Method(
        lambda b: ll.assume_negative_loss(*b.args, label_smoothing=0.1, reduction="none"), probability="sigmoid"
    ),
    "weighted negatives": Method(weighted_negatives, probability="sigmoid"),
    "binary thinned": Method(binary_thinned, CARDINALITIES, reads_cell=True, probability="sigmoid"),
    "multi-hot softmax": Method(lambda b: ll.multihot_softmax_loss(*b.args, reduction="none")),
    "two-way": Method(lambda b: ll.two_way_loss(*b.args, reduction="none"), couples_rows=True),
    "asymmetric": Method(lambda b: ll.asymmetric_loss(*b.args, reduction="none"), probability="sigmoid"),
    "expected positive": Method(
        expected_positive, CARDINALITIES, reads_cell=True, couples_rows=True, probability="sigmoid"
    ),
    "ROLE": Method(
        role, CARDINALITIES, reads_cell=True, couples_rows=True, state="estimates", probability="sigmoid"
    ),
    "entropy maximisation": Method(
        lambda b: ll.entropy_max_loss(*b.args, alpha=b.cell.option, reduction="none"),
        (0.01, 0.1),
        reads_cell=True,
        probability="sigmoid",
    ),
    "Hill": Method(lambda b: ll.hill_loss(*b.args, reduction="none"), probability="sigmoid"),
    "SPLC": Method(
        lambda b: ll.splc_loss(*b.args, epoch=int(b.progress > 0), reduction="none"), phases=2, probability="sigmoid"
    ),
    "large loss": Method(
        large, (0.002, 0.02), reads_cell=True, couples_rows=True, phases=0, probability="sigmoid"
    ),
    "LML, k tuned": lml("tuned", thinned=False),
    "LML, k auto": lml("auto", thinned=False),
    "LML, k predicted": lml("predicted", thinned=False),
    "LML thinned, k tuned": lml("tuned", thinned=True),
    "LML thinned, k auto": lml("auto", thinned=True),
    "LML thinned, k predicted": lml("predicted", thinned=True),
    "thinned, k and rho tuned": Method(thinned_pair, tuple(map(float, range(len(PAIRS)))), reads_cell=True),
    "thinned, rho of each label": Method(thinned_by_label, reads_cell=True),
    "thinned, temperature tuned": Method(thinned_at_temperature, (0.5, 2.0), reads_cell=True),
    "thinned, start at 0": Method(thinned_auto, reads_cell=True, frequencies=False),
    "thinned, k at least 2": Method(thinned_from_two, reads_cell=True),
    "thinned, labelled rows": in_labelled_rows(lml("auto", thinned=True)),
    "thinned, labelled rows, k tuned": in_labelled_rows(lml("tuned", thinned=True)),
    "thinned, with a class term": Method(thinned_and_class, (0.3, 1.0, 3.0), reads_cell=True),
    "LML": Method(lml_of_mean, (1.0, 2.0), reads_cell=True),
    "LML Fenchel-Young": Method(lambda b: ll.lml_fenchel_young_loss(*b.args, reduction="none")),
    "truncated entropy": Method(truncated, (1.0, 2.0), reads_cell=True),
    "quasibinary": Method(
        lambda b: ll.quasibinary_loss(*b.args, reduction="none"), couples_rows=True, probability="quasibinary"
    ),
    "WARP": Method(lambda b: ll.warp_loss(*b.args, reduction="none") / b.logits.shape[-1]),
    "RML": Method(lambda b: ll.rml_loss(*b.args, reduction="none") / b.logits.shape[-1]),
}  # fmt: skip
