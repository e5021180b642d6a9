"""WARP and RML."""

import math

import pytest
import torch

from lastlayer import rml_loss, warp_loss


def case(rows=4, n=8, dtype=torch.float64, scale=1.5):
    x = scale * torch.randn(rows, n, dtype=dtype)
    t = torch.randint(-1, 2, (rows, n), dtype=torch.int8)
    t[:, 0], t[:, 1] = 1, 0
    return x, t


def harmonic(r):
    return sum(1 / j for j in range(1, r + 1))


def ramp(t, s=-0.8, beta=0.9):
    return max(0.0, 1 - t) - beta * max(0.0, s - t)


def pairs(scores, labels, function):
    """The sum over pairs of one row, in a double loop."""
    up = [s for s, y in zip(scores, labels, strict=True) if y > 0]
    down = [s for s, y in zip(scores, labels, strict=True) if y == 0]
    return sum(harmonic(sum(1 - p + n > 0 for n in down)) * sum(function(p - n) for n in down) for p in up)


def test_warp_is_the_double_loop():
    x, t = case()
    exact = [pairs(a, b, lambda d: max(0.0, 1 - d)) for a, b in zip(x.tolist(), t.tolist(), strict=True)]
    loss = warp_loss(x, t, reduction="none")
    torch.testing.assert_close(loss.cpu(), torch.tensor(exact, dtype=torch.float64))


@pytest.mark.parametrize(("start", "beta"), [(-0.8, 0.9), (0.0, 1.0), (-2.0, 0.0)])
def test_rml_is_the_double_loop(start, beta):
    x, t = case()
    exact = []
    for a, b in zip(x.tolist(), t.tolist(), strict=True):
        alone = sum(ramp(s if y > 0 else -s, start, beta) for s, y in zip(a, b, strict=True) if y >= 0)
        exact.append(5 * alone + pairs(a, b, lambda d: ramp(d, start, beta)))
    loss = rml_loss(x, t, ramp_start=start, beta=beta, reduction="none")
    torch.testing.assert_close(loss.cpu(), torch.tensor(exact, dtype=torch.float64))


def test_golden():
    # Positive at 1; negatives 2, 0.5 and -3: two within the margin, weight 1 + 1/2, hinges 2 and 0.5.
    x, y = torch.tensor([[1.0, 2.0, 0.5, -3.0]]), torch.tensor([0])
    assert warp_loss(x, y) == 3.75
    # Ramps of the pairs: 2 - 0.9 * (0.2) = 1.82, and 0.5. Alone: R(1) = R(3) = 0, R(-2) = 3 - 0.9 * 1.2, R(-0.5) = 1.5.
    assert rml_loss(x, y).item() == pytest.approx(5 * (3 - 1.08 + 1.5) + 1.5 * (1.82 + 0.5), rel=1e-6)


def test_rml_at_beta_one_is_the_papers_ramp():
    t = torch.linspace(-4, 4, 81, dtype=torch.float64).unsqueeze(-1)
    loss = rml_loss(t, torch.ones_like(t), beta=1.0, unary_weight=1.0, reduction="none")
    torch.testing.assert_close(loss, (1 - t.squeeze(-1)).clamp(0, 1.8))


def test_a_tie_at_the_margin_counts_for_nothing():
    assert warp_loss(torch.tensor([[1.0, 0.0]]), torch.tensor([0])) == 0


@pytest.mark.parametrize("loss", [warp_loss, rml_loss])
def test_gradcheck(loss):
    x, t = case()
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss(x, t), x)
    lists = torch.tensor([[0, 3], [2, -1], [5, 6], [7, 1]])
    assert torch.autograd.gradcheck(lambda x: loss(x, lists), x)


@pytest.mark.parametrize("loss", [warp_loss, rml_loss])
def test_large_scores_keep_their_digits(loss):
    x = (1e4 + torch.randn(2, 1000)).requires_grad_()
    t = torch.zeros(2, 1000, dtype=torch.int8)
    t[:, :3] = 1
    exact = loss(x.double(), t)
    torch.testing.assert_close(loss(x, t).double(), exact, rtol=1e-6, atol=0)


def test_warp_does_not_see_a_shift_and_rows_without_pairs_are_left_out():
    x, t = case()
    torch.testing.assert_close(warp_loss(x + 3, t), warp_loss(x, t))
    t[0], t[1] = 1, 0
    rows = warp_loss(x, t, reduction="none")
    assert (rows[:2] == 0).all()
    torch.testing.assert_close(warp_loss(x, t), rows[2:].mean())


def test_rml_learns_from_rows_without_positives():
    x = torch.tensor([[0.5, -2.0]])
    assert rml_loss(x, torch.zeros(1, 2)).item() == pytest.approx(5 * 1.5)


def test_sampled_draws_follow_the_law():
    """The first of V violators among N comes at draw d with probability C(N - d, V - 1) / C(N, V)."""
    n, violators, rows = 6, 2, 20000
    x = torch.full((rows, n + 1), -9.0, dtype=torch.float64)
    x[:, 0], x[:, 1 : 1 + violators] = 0.0, 1.0  # hinge 2 each
    loss = warp_loss(x, torch.zeros(rows, dtype=torch.long), exact=False, reduction="none") / 4
    chance: dict[float, float] = {}
    for draw in range(1, n - violators + 2):
        weight = harmonic(round(n / draw))
        chance[weight] = chance.get(weight, 0) + math.comb(n - draw, violators - 1) / math.comb(n, violators)
    assert sum(chance.values()) == pytest.approx(1)
    for weight, probability in chance.items():
        share = ((loss - weight).abs() < 1e-9).double().mean().item()
        assert abs(share - probability) < 5 * math.sqrt(probability * (1 - probability) / rows)


@pytest.mark.parametrize("loss", [warp_loss, rml_loss])
def test_sampled_repeats_with_its_generator(loss):
    x, t = case(8, 30)

    def draw(seed):
        return loss(x, t, exact=False, generator=torch.Generator().manual_seed(seed))

    assert draw(1) == draw(1)
    assert any(draw(1) != draw(seed) for seed in range(2, 6))


def test_the_old_name_of_the_unary_weight():
    x, y = torch.randn(3, 4), torch.tensor([0, 1, 2])
    with pytest.warns(DeprecationWarning, match="rml_loss: `class_weight` is now called `unary_weight`"):
        assert rml_loss(x, y, class_weight=2.0) == rml_loss(x, y, unary_weight=2.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unary_weight": -1}, "rml_loss: `unary_weight` must be between 0"),
        ({"ramp_start": 2}, "rml_loss: `ramp_start` must be between -inf and 1"),
        ({"beta": 1.5}, "rml_loss: `beta` must be between 0 and 1"),
        ({"reduction": "max"}, "rml_loss: `reduction` must be one of"),
    ],
)
def test_messages(options, message):
    with pytest.raises(ValueError, match=message.replace("`", "`")):
        rml_loss(torch.zeros(2, 3), torch.zeros(2, 3), **options)
