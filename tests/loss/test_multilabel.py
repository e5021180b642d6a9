"""Two-way, asymmetric, multi-hot softmax and binary losses."""

import math

import pytest
import torch
import torch.nn.functional as F

from lastlayer import asymmetric_loss, binary_loss, multihot_softmax_loss, two_way_loss


def case(rows=5, n=7, dtype=torch.float64, unknown=True):
    x = 2 * torch.randn(rows, n, dtype=dtype)
    t = torch.randint(-1 if unknown else 0, 2, (rows, n), dtype=torch.int8)
    t[:, 0] = 1
    return x, t


# two-way


def two_way_by_hand(x, t, warm, cool, margin, per):
    """Loops over rows and columns, each with Python's own numbers."""

    def one(scores, labels):
        up = [s for s, y in zip(scores, labels, strict=True) if y > 0]
        down = [s for s, y in zip(scores, labels, strict=True) if y == 0]
        if not up:
            return None
        if not down:
            return 0.0
        z = cool * math.log(sum(math.exp(s / cool) for s in down))
        z += warm * math.log(sum(math.exp(-s / warm) for s in up)) + margin
        return math.log1p(math.exp(z))

    def mean(a, b):
        found = [v for v in map(one, a.tolist(), b.tolist()) if v is not None]
        return sum(found) / max(len(found), 1)

    rows, columns = mean(x, t), mean(x.T, t.T)
    return {"sample": rows, "class": columns, "both": rows + columns}[per]


@pytest.mark.parametrize("per", ["sample", "class", "both"])
@pytest.mark.parametrize(("warm", "cool", "margin"), [(4.0, 1.0, 0.0), (1.0, 1.0, 0.7), (0.5, 2.0, -0.3)])
def test_two_way_is_the_formula(per, warm, cool, margin):
    x, t = case()
    t[2] = t[2].clamp(max=0)  # a row without positives
    t[3] = 1  # and one without negatives
    loss = two_way_loss(
        x, t, positive_temperature=warm, negative_temperature=cool, margin=margin, per=per, reduction="mean"
    )
    assert loss.item() == pytest.approx(two_way_by_hand(x, t, warm, cool, margin, per), rel=1e-12)


def test_two_way_golden():
    # Row: negatives 0, positives log 2 and log 4 with T = 1: softplus(0 + log(1/2 + 1/4)) = log(1.75).
    x = torch.tensor([[math.log(2), math.log(4), 0.0]], dtype=torch.float64)
    loss = two_way_loss(x, torch.tensor([[0, 1]]), positive_temperature=1.0, per="sample")
    assert loss.item() == pytest.approx(math.log(1.75), rel=1e-14)


def test_two_way_with_one_positive_is_cross_entropy():
    x, y = torch.randn(6, 9, dtype=torch.float64), torch.randint(9, (6,))
    loss = two_way_loss(x, y, positive_temperature=1.0, per="sample", reduction="none")
    torch.testing.assert_close(loss, F.cross_entropy(x, y, reduction="none"), rtol=1e-14, atol=1e-14)


def test_two_way_gradient_is_the_papers():
    x, t = case(unknown=False)
    x.requires_grad_()
    two_way_loss(x, t, per="sample", reduction="sum").backward()
    up, down = t > 0, t == 0
    z = x.where(down, -torch.inf).logsumexp(-1) + 4 * (-x / 4).where(up, -torch.inf).logsumexp(-1)
    s = z.sigmoid().unsqueeze(-1)
    exact = s * x.where(down, -torch.inf).softmax(-1) - s * (-x / 4).where(up, -torch.inf).softmax(-1)
    torch.testing.assert_close(x.grad, exact.nan_to_num(0.0).detach())


def test_two_way_does_not_see_a_shift():
    x, t = case()
    shift = torch.randn(5, 1, dtype=torch.float64)
    torch.testing.assert_close(two_way_loss(x + shift, t, per="sample"), two_way_loss(x, t, per="sample"))
    torch.testing.assert_close(two_way_loss(x + shift.T[:, :1], t, per="class"), two_way_loss(x, t, per="class"))


@pytest.mark.parametrize("per", ["sample", "class", "both"])
def test_two_way_gradcheck(per):
    x, t = case(4, 5)
    x[0, 1] = -torch.inf
    x.requires_grad_()
    finite = torch.where(x.isinf(), 0, x).detach().requires_grad_()
    ruled = torch.where(x.isinf(), -torch.inf, 0).detach()
    assert torch.autograd.gradcheck(lambda x: two_way_loss(x + ruled, t, per=per), finite)
    assert torch.autograd.gradgradcheck(lambda x: two_way_loss(x + ruled, t, per=per), finite)


def test_two_way_one_row_has_no_class_term():
    x, t = case(1, 4)
    assert two_way_loss(x, t, per="class") == 0
    torch.testing.assert_close(two_way_loss(x, t), two_way_loss(x, t, per="sample"))


def test_two_way_reductions():
    x, t = case()
    t[1] = 0
    rows = two_way_loss(x, t, reduction="none")
    assert rows.shape == (5,)
    assert rows[1] == 0
    torch.testing.assert_close(rows.sum(), two_way_loss(x, t, reduction="sum"))
    torch.testing.assert_close(rows.sum() / 4, two_way_loss(x, t))
    columns = two_way_loss(x, t, per="class", reduction="none")
    assert columns.shape == (7,)
    torch.testing.assert_close(columns.sum(), two_way_loss(x, t, per="class", reduction="sum"))


def test_two_way_flattens_batches():
    x, t = case(6, 5)
    torch.testing.assert_close(two_way_loss(x.view(2, 3, 5), t.view(2, 3, 5)), two_way_loss(x, t))


# asymmetric


def asymmetric_public(x, t, plus, minus, clip):
    """The formula of the paper, as it is printed."""
    p = x.sigmoid()
    m = (p - clip).clamp(min=0)
    up = (1 - p) ** plus * p.log()
    down = m**minus * (1 - m).log()
    return -torch.where(t > 0, up, torch.where(t == 0, down, 0)).sum()


@pytest.mark.parametrize(
    ("plus", "minus", "clip"), [(1.0, 4.0, 0.05), (0.0, 4.0, 0.05), (2.0, 2.0, 0.0), (0.0, 1.0, 0.2)]
)
def test_asymmetric_is_the_formula(plus, minus, clip):
    x, t = case()
    loss = asymmetric_loss(x, t, gamma_positive=plus, gamma_negative=minus, clip=clip, reduction="sum")
    torch.testing.assert_close(loss, asymmetric_public(x, t, plus, minus, clip), rtol=1e-12, atol=0)


def test_asymmetric_without_focus_is_binary():
    x, t = case(unknown=False)
    loss = asymmetric_loss(x, t, gamma_positive=0, gamma_negative=0, clip=0, reduction="sum")
    torch.testing.assert_close(loss, F.binary_cross_entropy_with_logits(x, t.double(), reduction="sum"))
    torch.testing.assert_close(loss, binary_loss(x, t, reduction="sum"))


def test_asymmetric_golden():
    # One positive at p = 1/2: log(2) / 2. One negative at p = 1/2, m = 0.45: -0.45^4 log 0.55.
    loss = asymmetric_loss(torch.zeros(1, 2, dtype=torch.float64), torch.tensor([0]))
    assert loss.item() == pytest.approx(math.log(2) / 2 - 0.45**4 * math.log(0.55), rel=1e-14)


@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 4.0])
def test_asymmetric_gradcheck(gamma, clip):
    x, t = case(3, 4)
    x.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: asymmetric_loss(x, t, gamma_positive=gamma, gamma_negative=gamma, clip=clip), x
    )
    assert torch.autograd.gradgradcheck(
        lambda x: asymmetric_loss(x, t, gamma_positive=gamma, gamma_negative=gamma, clip=clip), x
    )


@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 4.0])
def test_asymmetric_gradient_is_finite_everywhere(gamma, clip):
    edge = math.log(0.05 / 0.95)
    x = torch.tensor([-1e4, -90, -20, edge, 0, 20, 90, 1e4]).repeat(2, 1).requires_grad_()
    t = torch.tensor([[0], [1]], dtype=torch.int8).expand(2, 8)
    loss = asymmetric_loss(x, t, gamma_positive=gamma, gamma_negative=gamma, clip=clip, reduction="sum")
    (grad,) = torch.autograd.grad(loss, x)
    assert loss.isfinite()
    assert grad.isfinite().all()
    assert grad[1, 0] == -1  # a positive far off is pulled with full force, unlike with a held logarithm


@pytest.mark.parametrize("score", [3e38, -3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])  # compiled, compiled and plain
def test_asymmetric_gradient_is_finite_at_almost_the_largest_number(dtype, score):
    score = score * 1e270 if dtype == torch.float64 else score
    for label in ([0], [1]):
        x = torch.tensor([[score, 0.0]], dtype=dtype, requires_grad=True)
        options = {"gamma_positive": 2.5, "gamma_negative": 2.5, "clip": 0.0}
        (grad,) = torch.autograd.grad(asymmetric_loss(x, torch.tensor(label), **options), x)
        assert grad[0, 0].item() in (0, 1, -1)
        assert grad.isfinite().all()


def test_asymmetric_detached_weight():
    x, t = case()
    x.requires_grad_()
    (grad,) = torch.autograd.grad(asymmetric_loss(x, t, clip=0, detach_weight=True, reduction="sum"), x)
    p = x.detach().sigmoid()
    exact = torch.where(t > 0, -(1 - p) * (1 - p), torch.where(t == 0, p**4 * p, 0))
    torch.testing.assert_close(grad, exact)
    torch.testing.assert_close(asymmetric_loss(x, t, detach_weight=True), asymmetric_loss(x, t))


def test_small_clip_keeps_its_digits():
    x = torch.tensor([[30.0]], dtype=torch.float64)
    loss = asymmetric_loss(x, torch.tensor([[0]], dtype=torch.int8), gamma_negative=0, clip=1e-12)
    assert loss.item() == pytest.approx(-math.log(1e-12 + 1 / (1 + math.exp(30))), rel=1e-12)


# multi-hot softmax and binary


def test_multihot_softmax_is_cross_entropy_to_shares():
    x, t = case(unknown=False)
    share = t / t.sum(-1, keepdim=True)
    for smoothing in (0.0, 0.1, 1.0):
        loss = multihot_softmax_loss(x, t, label_smoothing=smoothing)
        torch.testing.assert_close(loss, F.cross_entropy(x, share.double(), label_smoothing=smoothing))
    y = torch.randint(7, (5,))
    loss = multihot_softmax_loss(x, y, label_smoothing=0.2)
    torch.testing.assert_close(loss, F.cross_entropy(x, y, label_smoothing=0.2))


def test_multihot_softmax_golden():
    x = torch.tensor([[0.0, 0.0, math.log(2)]], dtype=torch.float64)  # softmax 1/4, 1/4, 1/2
    assert multihot_softmax_loss(x, torch.tensor([[0, 2]])).item() == pytest.approx(1.5 * math.log(2))


def test_multihot_softmax_shares_soft_labels():
    x = torch.randn(1, 3, dtype=torch.float64)
    soft = torch.tensor([[0.2, 0.6, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(multihot_softmax_loss(x, soft), F.cross_entropy(x, soft / 0.8))


def test_multihot_softmax_leaves_unknown_out_of_the_softmax():
    x, t = torch.randn(4, 6, dtype=torch.float64), torch.tensor([1.0, 0, -1, 1, 0, -1]).expand(4, 6)
    kept = t[0] >= 0
    for smoothing in (0.0, 0.3):
        whole = multihot_softmax_loss(x, t, label_smoothing=smoothing)
        torch.testing.assert_close(whole, multihot_softmax_loss(x[:, kept], t[:, kept], label_smoothing=smoothing))


def test_binary_is_torchs():
    x, t = case(unknown=False)
    t = t.double()
    exact = F.binary_cross_entropy_with_logits(x, t, reduction="none")
    torch.testing.assert_close(binary_loss(x, t, reduction="none"), exact.sum(-1))
    torch.testing.assert_close(binary_loss(x, t), exact.mean() * 7)
    soft = torch.rand_like(x)
    exact = F.binary_cross_entropy_with_logits(x, soft, reduction="sum")
    torch.testing.assert_close(binary_loss(x, soft, reduction="sum"), exact)
    exact = F.binary_cross_entropy_with_logits(x, 0.9 * t + 0.05, reduction="sum")
    torch.testing.assert_close(binary_loss(x, t, label_smoothing=0.1, reduction="sum"), exact)


def test_soft_labels_mix_the_two_terms():
    x, soft = torch.randn(2, 3, dtype=torch.float64), torch.rand(2, 3, dtype=torch.float64)
    all_on, all_off = torch.ones(2, 3), torch.zeros(2, 3)
    on = asymmetric_loss(x.view(-1, 1), all_on.view(-1, 1), reduction="none").view(2, 3)
    off = asymmetric_loss(x.view(-1, 1), all_off.view(-1, 1), reduction="none").view(2, 3)
    torch.testing.assert_close(asymmetric_loss(x, soft, reduction="sum"), (soft * on + (1 - soft) * off).sum())


@pytest.mark.parametrize("loss", [multihot_softmax_loss, binary_loss])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_baselines_gradcheck(loss, smoothing):
    x, t = case(3, 4)
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss(x, t, label_smoothing=smoothing), x)
    assert torch.autograd.gradgradcheck(lambda x: loss(x, t, label_smoothing=smoothing), x)


@pytest.mark.parametrize("loss", [two_way_loss, asymmetric_loss, multihot_softmax_loss, binary_loss])
def test_ruled_out_is_as_if_not_there(loss):
    x, t = case(4, 6, unknown=False)
    t[:, 1] = 1
    gone = x.clone()
    gone[:, 1:3] = -torch.inf
    gone.requires_grad_()
    keep = [0, 3, 4, 5]
    torch.testing.assert_close(loss(gone, t), loss(x[:, keep], t[:, keep]))
    (grad,) = torch.autograd.grad(loss(gone, t), gone)
    assert (grad[:, 1:3] == 0).all()
    assert grad.isfinite().all()
    lists = F.pad(torch.where(t > 0, torch.arange(6), -1), (0, 1), value=-1)
    torch.testing.assert_close(loss(gone, lists), loss(gone, t))


def test_half_precision_saturates_instead_of_overflowing():
    x = torch.full((1, 20), 1e4, dtype=torch.float16, requires_grad=True)
    loss = binary_loss(x, torch.zeros(1, 20))
    (grad,) = torch.autograd.grad(loss, x)
    assert loss == torch.finfo(torch.float16).max
    assert (grad == 1).all()
    assert binary_loss(torch.full((1, 1), torch.inf, dtype=torch.float16), torch.zeros(1, 1)).isinf()


def test_nan_shows():
    x = torch.zeros(2, 3)
    x[0, 1] = torch.nan
    for loss in (two_way_loss, asymmetric_loss, multihot_softmax_loss, binary_loss):
        rows = loss(x, torch.tensor([0, 0]), reduction="none")
        assert rows[0].isnan(), loss


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, t: two_way_loss(x, t, per="row"), ValueError, "two_way_loss: `per` must be one of"),
        (lambda x, t: two_way_loss(x, t, reduction="max"), ValueError, "two_way_loss: `reduction` must be one of"),
        (
            lambda x, t: two_way_loss(x, t, positive_temperature=0),
            ValueError,
            "two_way_loss: `positive_temperature` must be positive and finite, got 0",
        ),
        (
            lambda x, t: two_way_loss(x, t, negative_temperature=-1),
            ValueError,
            "two_way_loss: `negative_temperature` must be positive and finite, got -1",
        ),
        (lambda x, t: two_way_loss(x, t, margin="a"), TypeError, "two_way_loss: `margin` must be a number, got str"),
        (
            lambda x, t: asymmetric_loss(x, t, gamma_positive=-1),
            ValueError,
            "asymmetric_loss: `gamma_positive` must be between 0",
        ),
        (
            lambda x, t: asymmetric_loss(x, t, gamma_negative=-1),
            ValueError,
            "asymmetric_loss: `gamma_negative` must be between 0",
        ),
        (lambda x, t: asymmetric_loss(x, t, clip=1), ValueError, "asymmetric_loss: `clip` must be below 1, got 1"),
        (
            lambda x, t: binary_loss(x, t, label_smoothing=2),
            ValueError,
            "binary_loss: `label_smoothing` must be between 0 and 1, got 2",
        ),
        (
            lambda x, t: multihot_softmax_loss(x, t, label_smoothing=-1),
            ValueError,
            "multihot_softmax_loss: `label_smoothing` must be between 0 and 1",
        ),
        (lambda x, t: binary_loss(x.long(), t), TypeError, "binary_loss: `logits` must be of a floating-point dtype"),
        (lambda x, t: binary_loss(x, t[0]), ValueError, "binary_loss: `target` must have shape"),
    ],
)
def test_messages(call, error, message):
    with pytest.raises(error) as caught:
        call(torch.zeros(2, 3), torch.zeros(2, 3))
    assert message in str(caught.value)


@pytest.mark.parametrize("per", ["both", "sample", "class"])
def test_two_way_gradient_of_rows_and_columns_without_a_positive_is_finite(per):
    """They have no part in the loss, even where a score is infinite or nan."""
    for value in (torch.inf, torch.nan):
        for dtype in (torch.float32, torch.float64):
            x = torch.randn(4, 5, dtype=dtype)
            x[3, 2] = value
            target = torch.zeros(4, 5, dtype=dtype)
            target[0, 0] = target[1, 1] = 1
            leaf = x.requires_grad_()
            loss = two_way_loss(leaf, target, per=per)
            assert loss.isfinite()
            assert torch.autograd.grad(loss, leaf)[0].isfinite().all()
