"""Losses for incomplete labels, and those that relabel."""

import io
import math

import pytest
import torch
import torch.nn.functional as F

import lastlayer as ll
from lastlayer import (
    LabelEstimates,
    assume_negative_loss,
    binary_loss,
    entropy_max_loss,
    expected_positive_loss,
    hill_loss,
    large_loss,
    large_loss_corrections,
    role_loss,
    splc_loss,
)


def case(rows=4, n=6, unknown=False):
    x = 2 * torch.randn(rows, n, dtype=torch.float64)
    t = torch.randint(-1 if unknown else 0, 2, (rows, n), dtype=torch.int8)
    t[:, 0] = 1
    return x, t


def test_assume_negative_is_the_public_table():
    x, t = case()
    p = x.sigmoid()
    yes, no = -p.log(), -(1 - p).log()
    up, down = t == 1, t == 0
    an = torch.where(up, yes, no).sum()
    torch.testing.assert_close(assume_negative_loss(x, t, reduction="sum"), an)
    torch.testing.assert_close(assume_negative_loss(x, t), binary_loss(x, t))
    smooth = torch.where(up, 0.9 * yes + 0.1 * no, 0.9 * no + 0.1 * yes).sum()
    torch.testing.assert_close(assume_negative_loss(x, t, label_smoothing=0.1, reduction="sum"), smooth)
    weighted = yes[up].sum() + no[down].sum() / 5
    torch.testing.assert_close(assume_negative_loss(x, t, negative_weight=1 / 5, reduction="sum"), weighted)


def test_expected_positive_is_the_papers_number():
    x, t = case()
    p = x.sigmoid()
    exact = -p[t == 1].log().sum() / (4 * 6) + (p.sum(1).mean() - 2.5) ** 2 / 6**2
    torch.testing.assert_close(expected_positive_loss(x, t, 2.5), exact)
    torch.testing.assert_close(expected_positive_loss(x, t, torch.tensor([1.0, 2.0, 3.0, 4.0])), exact)


def test_expected_positive_golden_and_rows_without_positives():
    x = torch.zeros(1, 4, dtype=torch.float64)
    assert expected_positive_loss(x, torch.tensor([0]), 1).item() == pytest.approx(math.log(2) / 4 + 1 / 16)
    assert expected_positive_loss(x, torch.zeros(1, 4), 1).item() == pytest.approx(1 / 16)
    assert expected_positive_loss(x, torch.zeros(1, 4), 2) == 0
    x.requires_grad_()
    (grad,) = torch.autograd.grad(expected_positive_loss(x, torch.zeros(1, 4), 1), x)
    torch.testing.assert_close(grad, torch.full_like(x, 2 * 1 / 16 / 4))  # 2 (2 - 1) / n^2 times p (1 - p)


def role_public(x, t, e, k):
    p, q, n = x.sigmoid(), e.sigmoid(), x.shape[1]

    def half(p, q):
        q = q.detach()
        table = torch.where(t == 1, -p.log(), 0) - q * p.log() - (1 - q) * (1 - p).log()
        return table.mean() + (p.sum(1).mean() - k) ** 2 / n**2

    return 0.5 * half(p, q) + 0.5 * half(q, p)


def test_role_is_the_papers_number():
    (x, t), e = case(), torch.randn(4, 6, dtype=torch.float64)
    x.requires_grad_()
    e.requires_grad_()
    ours, theirs = role_loss(x, t, e, 2.0), role_public(x, t, e, 2.0)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(torch.autograd.grad(ours, (x, e)), torch.autograd.grad(theirs, (x, e)), strict=True):
        torch.testing.assert_close(a, b)


def test_role_treats_model_and_estimates_alike():
    (x, t), e = case(), torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(role_loss(x, t, e, 2.0), role_loss(e, t, x, 2.0))


def test_label_estimates():
    target = torch.tensor([[0, 2], [1, -1], [-1, -1]])
    table = LabelEstimates(3, 4, target=target, generator=torch.Generator().manual_seed(0))
    p = table.logits.detach().sigmoid()
    hot = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]) > 0
    torch.testing.assert_close(p[hot], torch.full((3,), 0.995))
    assert ((p[~hot] > 0.4) & (p[~hot] < 0.6)).all()
    again = LabelEstimates(3, 4, target=target, generator=torch.Generator().manual_seed(0))
    assert torch.equal(table.logits, again.logits)
    rows = torch.tensor([2, 0])
    role_loss(torch.zeros(2, 4), target[rows], table(rows), 1).backward()
    assert (table.logits.grad[1] == 0).all()
    assert (table.logits.grad[[0, 2]] != 0).all()
    assert repr(table) == "LabelEstimates(n_rows=3, n_classes=4)"


def test_entropy_max_is_the_formula():
    x, t = case()
    p = x.sigmoid()
    entropy = -p * p.log() - (1 - p) * (1 - p).log()
    exact = torch.where(t == 1, -p.log(), -0.3 * entropy).sum()
    torch.testing.assert_close(entropy_max_loss(x, t, alpha=0.3, reduction="sum"), exact)
    q = torch.rand_like(x)
    none = torch.rand_like(x) < 0.5
    soft = -q * p.log() - (1 - q) * (1 - p).log()
    exact = torch.where(t == 1, -p.log(), torch.where(none, -0.3 * entropy, 0.4 * soft)).sum()
    loss = entropy_max_loss(x, t, alpha=0.3, beta=0.4, pseudo_target=torch.where(none, -1, q), reduction="sum")
    torch.testing.assert_close(loss, exact)


def test_entropy_max_pushes_the_unobserved_towards_one_half():
    x = torch.tensor([[2.0, -2.0, 0.0]], requires_grad=True)
    (grad,) = torch.autograd.grad(entropy_max_loss(x, torch.zeros(1, 3)), x)
    assert grad[0, 0] > 0 > grad[0, 1]
    assert grad[0, 2] == 0


def test_hill_is_the_formula():
    x, t = case()
    p, m = x.sigmoid(), (x - 1).sigmoid()
    exact = torch.where(t == 1, -((1 - m) ** 2) * m.log(), (1.5 - p) * p**2).sum()
    torch.testing.assert_close(hill_loss(x, t, reduction="sum"), exact)
    torch.testing.assert_close(hill_loss(x, t), exact / 4)
    # The slope of a negative is 3 p (1 - p) p (1 - p): it has the shape of a hill, and ends at 0.
    x.requires_grad_()
    (grad,) = torch.autograd.grad(hill_loss(x, torch.zeros_like(x), reduction="sum"), x)
    torch.testing.assert_close(grad, 3 * (p * (1 - p)) ** 2)


def test_hill_golden():
    loss = hill_loss(torch.tensor([[1.0, 0.0]], dtype=torch.float64), torch.tensor([0]))
    assert loss.item() == pytest.approx(math.log(2) / 4 + 0.25, rel=1e-14)


def test_splc_is_the_formula_and_follows_its_epoch():
    x, t = case(8, 6)
    p, m = x.sigmoid(), (x - 1).sigmoid()
    up, down = -((1 - p) ** 2) * p.log(), -(p**2) * (1 - p).log()
    observed = -((1 - m) ** 2) * m.log()
    before = torch.where(t == 1, observed, down).sum()
    after = torch.where(t == 1, observed, torch.where(p > 0.6, up, down)).sum()
    torch.testing.assert_close(splc_loss(x, t, epoch=0, reduction="sum"), before)
    torch.testing.assert_close(splc_loss(x, t, epoch=1, reduction="sum"), after)
    torch.testing.assert_close(splc_loss(x, t, epoch=2, change_epoch=3, reduction="sum"), before)
    module = ll.SPLCLoss(epoch=0, reduction="sum")
    torch.testing.assert_close(module(x, t), before)
    module.step_epoch()
    torch.testing.assert_close(module(x, t), after)
    assert before != after


def large_public(x, t, mode, share):
    """The rule, with a full sort."""
    yes, no = -x.sigmoid().log(), -(1 - x.sigmoid()).log()
    k = math.ceil(round(x.numel() * share, 6))
    values = no[t == 0].sort(descending=True).values
    limit = values[min(k, len(values)) - 1]
    large = (t == 0) & (no >= limit)
    changed = torch.zeros_like(yes) if mode == "reject" else yes
    return torch.where(t == 1, yes, torch.where(large, changed, no)).sum(), large


@pytest.mark.parametrize("mode", ["reject", "temporary", "permanent"])
@pytest.mark.parametrize("epoch", [1, 3, 1000])
def test_large_loss_is_the_rule(mode, epoch):
    x, t = case(5, 8)
    share = 0.05 if mode == "permanent" else min(0.05 * epoch, 1)
    exact, large = large_public(x, t, mode, share)
    assert torch.equal(large_loss_corrections(x, t, mode=mode, rate=0.05, epoch=epoch), large)
    torch.testing.assert_close(large_loss(x, t, mode=mode, rate=0.05, epoch=epoch, reduction="sum"), exact)


def test_large_loss_golden():
    x = torch.tensor([[2.0, 3.0, 0.0]], dtype=torch.float64)
    rest = math.log1p(math.exp(-2)) + math.log(2)
    assert large_loss(x, torch.tensor([0])).item() == pytest.approx(rest)
    corrected = rest + math.log1p(math.exp(-3))
    assert large_loss(x, torch.tensor([0]), mode="temporary").item() == pytest.approx(corrected)


def test_large_loss_starts_with_plain_labels_and_counts_epochs():
    x, t = case()
    for mode in ("reject", "temporary", "permanent"):
        torch.testing.assert_close(large_loss(x, t, mode=mode, epoch=0), assume_negative_loss(x, t))
    module = ll.LargeLoss(epoch=0, rate=1 / 24)
    torch.testing.assert_close(module(x, t), assume_negative_loss(x, t))
    for many in (1, 2, 3):
        module.step_epoch()
        assert large_loss_corrections(x, t, rate=1 / 24, epoch=module.epoch).sum() == many
        torch.testing.assert_close(module(x, t), large_loss(x, t, rate=1 / 24, epoch=many))


def test_large_loss_takes_no_more_entries_where_losses_round_to_the_same():
    near, far = torch.tensor([[5.8922341e-06, 5.8922346e-06, -1.0]]), -100.0 - torch.arange(40.0).unsqueeze(0)
    for x, rate in ((near, 1 / 3), (far, 0.1)):
        found = large_loss_corrections(x, torch.zeros_like(x), rate=rate)
        assert found.sum() == math.ceil(rate * x.numel() - 1e-9)
        assert (x[found].min() > x[~found]).all()
    assert large_loss(far, torch.zeros_like(far), mode="temporary", rate=0.1) == pytest.approx(100 + 101 + 102 + 103)


@pytest.mark.parametrize("make", [ll.SPLCLoss, ll.LargeLoss])
def test_a_checkpoint_keeps_the_epoch(make):
    model = torch.nn.ModuleDict({"layer": torch.nn.Linear(2, 3), "loss": make(epoch=0)})
    for _ in range(3):
        model["loss"].step_epoch()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = torch.nn.ModuleDict({"layer": torch.nn.Linear(2, 3), "loss": make(epoch=0)})
    again.load_state_dict(saved)
    assert again["loss"].epoch == 3
    assert type(again["loss"].epoch) is int

    older = {name: value for name, value in saved.items() if not name.startswith("loss.")}
    resumed = torch.nn.ModuleDict({"layer": torch.nn.Linear(2, 3), "loss": make(epoch=7)})
    resumed.load_state_dict(older)  # of a version that did not keep it: what the caller says counts
    assert resumed["loss"].epoch == 7


@pytest.mark.parametrize("mode", ["reject", "temporary"])
def test_nan_does_not_change_which_entries_of_other_rows_large_loss_finds(mode):
    x = torch.tensor([[0.0, 3.0, 2.0, 1.0], [torch.nan] * 4])
    found = large_loss_corrections(x, torch.zeros_like(x), mode=mode, rate=2 / 8)
    assert torch.equal(found, torch.tensor([[False, True, True, False], [False] * 4]))
    assert large_loss(x, torch.zeros_like(x), mode=mode, rate=1.0, reduction="none").isnan().tolist() == [False, True]


def test_large_loss_count_is_not_off_by_rounding():
    x = torch.randn(10, 100)
    assert large_loss_corrections(x, torch.zeros(10, 100), rate=0.001, epoch=3).sum() == 3


@pytest.mark.parametrize(
    "loss",
    [
        assume_negative_loss,
        lambda x, t: assume_negative_loss(x, t, label_smoothing=0.2, negative_weight=0.3),
        lambda x, t: expected_positive_loss(x, t, 2),
        entropy_max_loss,
        hill_loss,
        lambda x, t: hill_loss(x, t, gamma=0.5),
        lambda x, t: splc_loss(x, t, epoch=0),
        splc_loss,
        large_loss,
        lambda x, t: large_loss(x, t, mode="temporary", rate=0.2),
    ],
)
def test_gradcheck(loss):
    x, t = case(3, 5, unknown=True)
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss(x, t), x)
    assert torch.autograd.gradgradcheck(lambda x: loss(x, t), x)


@pytest.mark.parametrize(
    "loss",
    [
        assume_negative_loss,
        lambda x, t: expected_positive_loss(x, t, 2) * x.shape[-1],
        entropy_max_loss,
        hill_loss,
        splc_loss,
    ],
)
def test_ruled_out_is_no_term(loss):
    x, t = case(4, 6)
    t[:, 1] = 1
    gone = x.clone()
    gone[:, 1:3] = -torch.inf
    gone.requires_grad_()
    lists = F.pad(torch.where(t > 0, torch.arange(6), -1), (0, 1), value=-1)
    torch.testing.assert_close(loss(gone, lists), loss(gone, t))
    (grad,) = torch.autograd.grad(loss(gone, t), gone)
    assert (grad[:, 1:3] == 0).all()
    assert grad.isfinite().all()
    hidden = t.clone()
    hidden[:, 1:3] = -1
    torch.testing.assert_close(loss(gone, t), loss(x, hidden))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda x, t: assume_negative_loss(x, t, label_smoothing=2),
            ValueError,
            "assume_negative_loss: `label_smoothing` must be between 0 and 1",
        ),
        (
            lambda x, t: assume_negative_loss(x, t, negative_weight=-1),
            ValueError,
            "assume_negative_loss: `negative_weight` must be between 0",
        ),
        (lambda x, t: expected_positive_loss(x, t, 9), ValueError, "expected_positive_loss: `k` must be between 0 and"),
        (lambda x, t: role_loss(x, t, x[0], 1), ValueError, "role_loss: `estimates` must have the shape of `logits`"),
        (lambda x, t: role_loss(x, t, None, 1), TypeError, "role_loss: `estimates` must be a tensor"),
        (lambda x, t: entropy_max_loss(x, t, alpha=-1), ValueError, "entropy_max_loss: `alpha` must be between 0"),
        (lambda x, t: entropy_max_loss(x, t, beta=-1), ValueError, "entropy_max_loss: `beta` must be between 0"),
        (
            lambda x, t: entropy_max_loss(x, t, pseudo_target=x[0]),
            ValueError,
            "entropy_max_loss: `pseudo_target` must have the shape of `logits`",
        ),
        (lambda x, t: hill_loss(x, t, gamma=-1), ValueError, "hill_loss: `gamma` must be between 0"),
        (lambda x, t: hill_loss(x, t, lamb="a"), TypeError, "hill_loss: `lamb` must be a number"),
        (lambda x, t: hill_loss(x, t, margin=None), TypeError, "hill_loss: `margin` must be a number"),
        (lambda x, t: splc_loss(x, t, threshold=2), ValueError, "splc_loss: `threshold` must be between 0 and 1"),
        (lambda x, t: splc_loss(x, t, epoch=-1), ValueError, "splc_loss: `epoch` must be between 0"),
        (lambda x, t: large_loss(x, t, mode="drop"), ValueError, "large_loss: `mode` must be one of 'reject'"),
        (lambda x, t: large_loss(x, t, rate=2), ValueError, "large_loss: `rate` must be between 0 and 1"),
        (
            lambda x, t: large_loss_corrections(x, t, epoch=-1),
            ValueError,
            "large_loss_corrections: `epoch` must be between 0",
        ),
        (lambda x, t: LabelEstimates(2, 3, target=[0]), TypeError, "LabelEstimates: `target` must be a tensor"),
    ],
)
def test_messages(call, error, message):
    with pytest.raises(error) as caught:
        call(torch.zeros(2, 3), torch.zeros(2, 3))
    assert message in str(caught.value)


def test_splc_takes_an_infinite_score_for_a_label():
    x = torch.tensor([[torch.inf, 0.0]], requires_grad=True)
    loss = splc_loss(x, torch.tensor([1]))
    (grad,) = torch.autograd.grad(loss, x)
    alone = splc_loss(torch.tensor([[0.0]]), torch.tensor([0]))
    torch.testing.assert_close(loss, alone)
    assert grad[0, 0] == 0
    assert grad.isfinite().all()


@pytest.mark.parametrize("target", [0, 1, -1])
def test_entropy_of_an_infinite_score_is_0(target):
    x = torch.tensor([[torch.inf, 0.0]], requires_grad=True)
    loss = entropy_max_loss(x, torch.tensor([[target, 0.0]]))
    (grad,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(loss, entropy_max_loss(torch.tensor([[0.0]]), torch.tensor([[0.0]])))
    assert grad.tolist() == [[0.0, 0.0]]
