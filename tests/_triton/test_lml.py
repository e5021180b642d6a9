"""The GPU kernels against plain torch: on a GPU, or in Triton's interpreter where TRITON_INTERPRET=1.

`test_interpreter.py` runs this file that way, in a process of its own.
"""

from dataclasses import replace

import pytest
import torch
from tools import DEVICE, GPU_KERNELS, INTERPRETED, assert_as_accurate

from lastlayer._triton import plan
from lastlayer.loss.lml import lml_loss
from lastlayer.project.lml import lml, lml_threshold, log_lml

pytestmark = GPU_KERNELS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def gradients(function, logits, k, impl):
    """The output and the gradients of logits and k for a fixed upstream gradient."""
    logits = logits.detach().clone().requires_grad_()
    k = k.detach().to(torch.promote_types(logits.dtype, torch.float32)).requires_grad_()
    out = function(logits, k, impl)
    generator = torch.Generator(DEVICE).manual_seed(1)
    upstream = torch.randn(out.shape, generator=generator, device=DEVICE).to(out.dtype)
    return out, *torch.autograd.grad(out, (logits, k), upstream)


def check(function, logits, k):
    """Kernel and plain torch agree in what is finite, and the kernel is as near to float64."""
    results = [gradients(function, x, k, impl) for x, impl in
               ((logits, "triton"), (logits, "torch"), (logits.double(), "torch"))]  # fmt: skip
    for kernel, plain, exact in zip(*results, strict=True):
        finite = exact.isfinite()
        for found in (kernel, plain):
            assert torch.equal(found.isnan(), exact.isnan())
            assert torch.equal(found.double()[exact.isinf()], exact[exact.isinf()])
        kernel, plain, exact = (torch.where(finite, t, 0) for t in (kernel, plain, exact))
        assert_as_accurate(kernel, plain, exact)


def rows(n, scale=1.0, dtype=torch.float32, count=4):
    logits = (scale * torch.randn(count, n, device=DEVICE)).to(dtype)
    k = torch.tensor([1.0, 0.3 * n, n - 0.5, 0.5], device=DEVICE)[:count].clamp(max=n)
    return logits, k


@pytest.fixture
def launches(monkeypatch):
    """The names of the kernels that were launched."""
    from lastlayer._triton import ahead, lml_loss
    from lastlayer._triton import lml as forward
    from lastlayer._triton.launch import launch

    names = []
    monkeypatch.setattr("lastlayer._triton.launch._ready", {})  # what is kept there is launched unseen

    def spy(kernel, *args, **options):
        names.append(kernel.fn.__module__.rsplit(".", 1)[-1] + kernel.fn.__name__)
        return launch(kernel, *args, **options)

    monkeypatch.setattr(ahead, "launch_one", spy)
    for module in (forward, lml_loss):
        monkeypatch.setattr(module, "launch", spy)
    return names


@pytest.fixture(autouse=True)
def own_kernels(monkeypatch):
    """Kernels made for the length of the rows from the first call on."""
    monkeypatch.setattr(plan, "PATIENCE", 1)


@pytest.mark.parametrize("n", [3, 31, 100, 600])
def test_kernels_that_serve_all_lengths_up_to_a_power_of_two(n, monkeypatch):
    monkeypatch.setattr(plan, "PATIENCE", 10**9)
    monkeypatch.setattr(plan, "OFTEN", 10**9)
    logits, k = rows(n)
    mask = torch.rand(n, device=DEVICE) < 0.9
    check(lambda x, k, impl: lml(x, k, impl=impl), logits, k)
    check(lambda x, k, impl: log_lml(x, k.clamp(max=mask.sum()), mask=mask, impl=impl), 30 * logits, k)
    index = torch.randint(n, (4, 2), device=DEVICE)
    dense = (torch.rand(4, n, device=DEVICE) < 0.1).float()
    for target in (index, dense):
        check(lambda x, k, impl, t=target: lml_loss(x, t, k, observed=0.4, reduction="none", impl=impl), logits, k)
        check(lambda x, k, impl, t=target: lml_loss(x, t, k, observed=0.4, reduction="sum", impl=impl), logits, k)


@pytest.mark.usefixtures("no_general_form")
def test_a_second_kernel_settles_rows_where_lengths_are_rare(monkeypatch):
    logits, _ = rows(40)
    logits[1] *= 100
    logits[2, 3], logits[3, 5] = -torch.inf, torch.inf
    index = torch.randint(6, 40, (4, 2), device=DEVICE)
    calls = [lambda x, call=call, **way: call(x, 3.0, **way) for call in (lml, log_lml, lml_threshold)]
    for target in (index, torch.zeros(4, 40, device=DEVICE).scatter_(1, index, 1.0)):
        calls.append(lambda x, t=target, **way: lml_loss(x, t, 3.0, observed=0.4, reduction="sum", **way))
    for call in calls:
        found = []
        for p in (plan.shared(40), replace(plan.shared(40))):  # a plan like that for rare lengths
            monkeypatch.setattr(plan, "plan", lambda *_, p=p: p)
            found.append(both_ways(call, logits, impl="triton"))
        for two, one in zip(*found, strict=True):
            torch.testing.assert_close(two, one, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("n", [1, 5, 37, 100, 333])
def test_short_rows(n, launches):
    check(lambda x, k, impl: lml(x, k, impl=impl), *rows(n))
    assert set(launches) == {"lml_resident", "lml_backward_resident"}


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_half_precision(dtype):
    check(lambda x, k, impl: lml(x, k, impl=impl), *rows(37, dtype=dtype))
    check(lambda x, k, impl: log_lml(x, k, impl=impl), *rows(37, dtype=dtype))


@pytest.mark.parametrize("scale", [1e-3, 5.0, 30.0])
def test_scales(scale):
    check(lambda x, k, impl: lml(x, k, impl=impl), *rows(70, scale))
    check(lambda x, k, impl: log_lml(x, k, temperature=0.5, impl=impl), *rows(70, scale))
    check(lambda x, k, impl: lml_threshold(x + 3, k, impl=impl), *rows(70, scale))  # nu away from 0


def long_rows(monkeypatch, split):
    from lastlayer._triton import lml_backward, plan

    monkeypatch.setattr(plan, "LONGEST", 1024)
    monkeypatch.setattr(lml_backward, "LONGEST", 1024)
    monkeypatch.setattr(plan, "CHUNK", 8192)
    monkeypatch.setattr(plan, "is_split", lambda rows, n: split)
    logits, k = rows(9001)
    logits[1] *= 30  # a row for `settle`
    logits[2, 7:] = -torch.inf
    k[2] = 3.5
    return logits, k


@pytest.mark.parametrize("split", [False, True])
def test_long_rows(split, monkeypatch, launches):
    check(lambda x, k, impl: lml(x, k, impl=impl), *long_rows(monkeypatch, split))
    streamed = {"long_streamed", "lml_backward_streamed"}
    parts = {"long_split_pass", "long_split_finish", "lml_backward_split_sums", "lml_backward_split_write"}
    assert set(launches) == (parts if split else streamed)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_long_rows_of_half_precision_start_anywhere(dtype, split, monkeypatch):
    logits, k = long_rows(monkeypatch, split)
    logits, k = logits.to(dtype).flatten()[9001:].view(3, 9001), k[1:]
    mask = torch.rand(logits.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE) < 0.9
    mask[:, :7] = True
    check(lambda x, k, impl: lml(x, k, mask=mask, impl=impl), logits, k)


@pytest.mark.parametrize("split", [False, True])
def test_long_rows_of_the_loss(split, monkeypatch, launches):
    logits, k = long_rows(monkeypatch, split)
    target = torch.tensor([[3, -1], [9000, 8192], [0, 6], [8191, -1]], device=DEVICE)
    check(lambda x, k, impl: lml_loss(x, target, k, reduction="none", impl=impl), logits, k)
    assert "lml_loss_known" in launches
    assert ("long_split_finish" in launches) == split


@pytest.mark.parametrize(("gap", "k"), [(40.0, 3.0), (100.0, 27.0), (1e4, 3.0)])
def test_saturated_rows(gap, k):
    logits = torch.randn(1, 30, device=DEVICE)
    logits[:, ::10] += gap
    logits = logits if k == 3 else -logits
    k = torch.tensor([k], device=DEVICE)
    check(lambda x, k, impl: log_lml(x, k, impl=impl), logits, k)
    target = torch.tensor([[10, 3]], device=DEVICE)
    check(lambda x, k, impl: lml_loss(x, target, k, reduction="none", impl=impl), logits, k)


def test_edges():
    inf, nan = torch.inf, torch.nan
    logits = torch.randn(9, 6, device=DEVICE)
    logits[3, 2], logits[4, 1], logits[5, 0], logits[6, 1:5], logits[7] = -inf, inf, nan, -inf, 2.0
    k = torch.tensor([0.0, 6.0, 7.0, 2.0, 2.0, 2.0, 3.0, 2.0, -1.0], device=DEVICE)
    for function in (lml, log_lml):
        check(lambda x, k, impl, f=function: f(x, k, impl=impl), logits, k)
    check(lambda x, k, impl: lml(x, k, impl=impl).nan_to_num() * (k >= 2)[:, None], logits, k)  # no gradient asked for
    y = lml(logits, k, impl="triton")
    assert (y[0] == 0).all()
    assert (y[1] == 1).all()
    assert y[3, 2] == 0
    assert y[4, 1] == 1
    assert (y[7] == y[7, 0]).all()
    assert y[[2, 5, 6, 8]].isnan().all()


def test_mask():
    logits, k = rows(70)
    for mask in (torch.rand(4, 70, device=DEVICE) > 0.3, torch.rand(70, device=DEVICE) > 0.3):
        check(lambda x, k, impl, m=mask: lml(x, 0.4 * k, mask=m, impl=impl), logits, k)
        assert (lml(logits, 2, mask=mask, impl="triton")[~mask.expand(4, 70)] == 0).all()


@pytest.mark.parametrize("shape", [(5, 37), (2, 3, 37), (37,)])
def test_one_k_for_all_rows(shape):
    logits = torch.randn(shape, device=DEVICE)
    target = torch.randint(37, shape[:-1], device=DEVICE)
    each = torch.full(shape[:-1], 3.0, device=DEVICE)
    assert torch.equal(lml(logits, 3, impl="triton"), lml(logits, each, impl="triton"))
    assert torch.equal(lml_loss(logits, target, 3, impl="triton"), lml_loss(logits, target, each, impl="triton"))


def test_a_kernel_compiled_for_aligned_rows_is_not_used_for_others():
    values = torch.randn(1 + 8 * 48, device=DEVICE)
    for rows in (8, 1):
        for n in (48, 47):
            aligned = values[: rows * n].clone().view(rows, n)
            shifted = values[1 : 1 + rows * n].copy_(aligned.flatten()).view(rows, n)
            for k in (2, torch.full((rows,), 2.0, device=DEVICE)):
                assert torch.equal(lml(shifted, k, impl="triton"), lml(aligned, k, impl="triton"))


def test_shapes():
    x = torch.randn(2, 3, 11, device=DEVICE)
    expected = lml(x, 2, impl="torch")
    eps = torch.finfo(x.dtype).eps
    torch.testing.assert_close(lml(x, 2, impl="triton"), expected, rtol=0, atol=4 * eps)
    other = x.movedim(-1, 0)  # not contiguous
    torch.testing.assert_close(lml(other, 2, dim=0, impl="triton").movedim(0, -1), expected, rtol=0, atol=4 * eps)
    k = torch.tensor([[1.0], [4.5]], device=DEVICE)
    torch.testing.assert_close(lml(x, k, impl="triton"), lml(x, k, impl="torch"), rtol=0, atol=4 * eps)
    assert lml(x[:0], 2, impl="triton").shape == (0, 3, 11)
    assert lml(torch.zeros(3, 0, device=DEVICE), 0, impl="triton").shape == (3, 0)


@pytest.mark.parametrize("target", ["one", "lists", "dense", "soft"])
@pytest.mark.parametrize("observed", [0.0, 0.4, 1.0])
def test_loss(target, observed, launches):
    logits, k = rows(70)
    logits[3, 1] = -torch.inf
    given = {
        "one": torch.tensor([3, 69, 0, 5]),
        "lists": torch.tensor([[3, 8, -1], [-1, -1, -1], [0, 1, 69], [1, 2, 3]]),  # one label is ruled out
        "dense": torch.randint(-1, 2, (4, 70), dtype=torch.int8),
        "soft": (3 * torch.rand(4, 70) - 1).clamp(-1, 1) * (torch.arange(70) != 1),  # not of the class ruled out
    }[target].to(DEVICE)
    check(lambda x, k, impl: lml_loss(x, given, k, observed=observed, reduction="none", impl=impl), logits, k)
    assert "lml_loss_resident" in launches


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_few_classes_of_the_loss(n, reduction):
    """Within rounding: a gradient that is 0 leaves the accuracy rule nothing to compare with."""
    logits, k = torch.randn(4, n, device=DEVICE), torch.tensor([0.0, 0.3, 0.9, n], device=DEVICE)
    for observed in (0.0, 0.4):
        for target in (
            torch.tensor([0, n - 1, -1, 0], device=DEVICE),
            torch.randint(-1, 2, (4, n), dtype=torch.int8, device=DEVICE),
        ):
            options = {"observed": observed, "reduction": reduction}
            found = [
                gradients(lambda x, k, impl, t=target, o=options: lml_loss(x, t, k, **o, impl=impl), logits, k, impl)
                for impl in ("triton", "torch")
            ]
            torch.testing.assert_close(*found, rtol=2e-6, atol=5e-7)


def test_certain_labels_of_which_all_are_observed():
    logits = torch.randn(3, 6, device=DEVICE)
    logits[1, 2] = torch.inf
    k = torch.tensor([6.0, 2.0, 0.0], device=DEVICE)
    target = torch.tensor([[0, 1, 2, 3, 4, 5], [2, 1, -1, -1, -1, -1], [-1, -1, -1, -1, -1, -1]], device=DEVICE)[:, :5]
    for lists in (target, target[:, :2]):
        found = [lml_loss(logits, lists, k, observed=1.0, reduction="none", impl=i) for i in ("triton", "torch")]
        torch.testing.assert_close(*found)
        assert not found[0].isnan().any()


def test_edges_of_the_range():
    """Scores whose neighbours are further apart than the sigmoid is wide, and a k far below 1."""
    huge = torch.tensor([[3.0, 2.0, 1.0, -1.0, -2.0], [1.0, 1.0, 1.0, -1.0, 0.5]], device=DEVICE)
    for size in (1e7, 1e10, 1e30):
        for k, expected in ((2, [[1, 1, 0, 0, 0], [2 / 3, 2 / 3, 2 / 3, 0, 0]]), (2.5, [[1, 1, 0.5, 0, 0]])):
            logits = size * huge[: len(expected)]
            y, log_y = lml(logits, k, impl="triton"), log_lml(logits, k, impl="triton")
            torch.testing.assert_close(y, torch.tensor(expected, device=DEVICE), rtol=1e-6, atol=0)
            torch.testing.assert_close(log_y.exp(), y, rtol=1e-6, atol=0)
    logits = torch.randn(2, 5, device=DEVICE) * torch.tensor([[1.0], [100.0]], device=DEVICE)
    for k in (1e-6, 1e-30):
        expected = k * logits.double().softmax(-1)
        torch.testing.assert_close(lml(logits, k, impl="triton").double(), expected, rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize("observed", [0.0, 0.4])
def test_edges_of_the_loss(observed):
    inf, nan = torch.inf, torch.nan
    logits = torch.randn(6, 6, device=DEVICE)
    logits[2, 2], logits[3, 1], logits[4, 0] = -inf, inf, nan
    k = torch.tensor([0.0, 6.0, 2.0, 2.0, 2.0, 7.0], device=DEVICE)
    target = torch.tensor([[1, 2], [1, 2], [1, 2], [1, 2], [1, 2], [-1, -1]], device=DEVICE)
    for reduction in ("none", "sum"):
        check(
            lambda x, k, impl, r=reduction: lml_loss(x, target, k, observed=observed, reduction=r, impl=impl), logits, k
        )


def test_loss_with_gradient_in_one_launch():
    from lastlayer._triton import lml as kernels

    logits, k = rows(37)
    index = torch.tensor([[3, -1], [36, 0], [1, 2], [-1, -1]], device=DEVICE)
    weight = torch.tensor([1.0, 2.0, 0.5, 1.0], device=DEVICE)
    arguments = (logits, k.unsqueeze(-1), None, 0.7, 0.0, index, None)
    loss, (center, delta, log_mass, pull), grad, _ = kernels.loss_forward_with_grad(*arguments, weight)
    expected = kernels.loss_forward(*arguments)
    assert torch.equal(loss, weight * expected[0])
    rest = (None, 0.7, 0.0, index, None, center, delta, log_mass, pull)
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(grad, kernels.loss_backward(logits, *rest, weight)[0], rtol=0, atol=8 * eps)


@pytest.mark.parametrize("rows", [0, 5, 3000, 20000])
def test_weight_of_mean(rows):
    from lastlayer._triton.lml_loss import weight_of_mean

    index = torch.full((rows, 2), -1, device=DEVICE)
    index[::3, 1] = 7
    assert weight_of_mean(index).item() == pytest.approx(1 / max(len(range(0, rows, 3)), 1), rel=1e-6)
    assert weight_of_mean(torch.full_like(index, -1)).item() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int8])
@pytest.mark.parametrize("n", [0, 1, 5, 1300, 30000])
def test_weights_of_dense(n, dtype):
    from lastlayer._triton.lml_loss import weights_of_dense

    dense = torch.randint(-1 if dtype.is_signed else 0, 2, (11, n)).to(DEVICE, dtype)
    dense[3] = 0
    if dtype.is_signed:
        dense[4] = -1
    if dtype == torch.float32 and n > 0:
        dense[5, -1] = torch.nan
    for observed in (False, True):
        top = dense.float().amax(-1) if n > 0 else torch.full((11,), -1.0, device=DEVICE)
        flag = (~(top < 0) if observed else ~(top <= 0)).float()
        torch.testing.assert_close(weights_of_dense(dense, observed, False), flag)
        torch.testing.assert_close(weights_of_dense(dense, observed, True), flag / flag.sum().clamp(min=1))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter keeps no kernels")
def test_a_kernel_that_is_kept_serves_other_rows_and_addresses():
    """After a few calls the compiled kernel is launched by a short key; what differs between calls must be in it."""
    store = torch.randn(9 * 48 + 1, device=DEVICE)
    for count, n, start in 2 * [(8, 48, 0), (9, 48, 0), (8, 48, 1)]:
        x = store[start : start + count * n].view(count, n)
        hot = (x > 0.5).float()
        check_pair(lambda x, impl: lml(x, 2.5, impl=impl), x)
        check_pair(lambda x, impl: lml_loss(x, x.argmax(-1), 2.5, impl=impl), x)
        check_pair(lambda x, impl, t=hot: lml_loss(x, t, 2.5, observed=0.3, impl=impl), x)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes no short way")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_common_call_is_the_general_one_to_the_last_bit(dtype):
    """With `impl` given every check is made; without, the common call takes a short way, also once a kernel is kept."""
    x = torch.randn(9, 200, device=DEVICE).mul(3).to(dtype)
    x[1] *= 40
    x[2, :150] = -torch.inf
    x[3] = torch.nan
    x[4, 5] = torch.inf
    calls = {
        "lml": lambda x, **way: lml(x, 5, **way),
        "one label": lambda x, **way: lml_loss(x, x.argmax(-1), 5, **way),
        "sum": lambda x, **way: lml_loss(x, x.argmax(-1), 5, reduction="sum", **way),
        "thinned": lambda x, **way: lml_loss(x, x.argmax(-1), 5.5, observed=0.5, **way),
        "multi-hot": lambda x, **way: lml_loss(x, (x > 4).float(), 5, observed=0.5, **way),
        "many rows": lambda x, **way: lml_loss(x.repeat(60, 1), x.argmax(-1).repeat(60), 5, **way),
    }
    for name, call in calls.items():
        for _ in range(5):
            long, short = (both_ways(call, x, **way) for way in ({"impl": "triton"}, {}))
            for a, b in zip(long, short, strict=True):
                torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True, msg=name)
            with torch.no_grad():
                torch.testing.assert_close(call(x), long[0], rtol=1e-6, atol=0, equal_nan=True, msg=name)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter keeps no kernels")
@pytest.mark.parametrize("hot", [False, True])
def test_a_step_that_is_kept_serves_other_numbers_and_no_other_shape(hot):
    """A training step is launched by its shape and addresses alone: another `k`, labels and logits, then other rows."""
    from lastlayer._triton import lml_loss as kernels

    store, labels = torch.randn(8 * 200 + 1, device=DEVICE), torch.arange(9, device=DEVICE)
    dense = (torch.rand(9 * 200, device=DEVICE) < 0.02).float()
    dense[:200] = 0.0
    for k, rows, start, first in 8 * [(5, 8, 0, 0), (2.5, 8, 0, 0), (5, 7, 0, 0), (5, 8, 1, 0), (5, 8, 0, 1)]:
        x, t = store[start : start + rows * 200].view(rows, 200), labels[first : first + rows]
        if hot:
            t = dense[first : first + rows * 200].view(rows, 200)
        for more in ({}, {"observed": 0.3 if k == 5 else 0.6}) if hot else ({},):
            found = []
            for way in ({"impl": "triton"}, {}):
                leaf = x.detach().requires_grad_()  # at the same address
                loss = lml_loss(leaf, t, k, **more, **way)
                found.append((loss.detach(), *torch.autograd.grad(loss, leaf)))
            for a, b in zip(*found, strict=True):
                torch.testing.assert_close(b, a, rtol=0, atol=0)
    shapes = {key[2] for key in kernels._steps if key[5].is_floating_point == hot}
    assert {(8, 200), (7, 200)} <= shapes


@pytest.mark.parametrize("rho", [None, 0.0, 0.4])
def test_unusual_backward_passes_of_a_training_step(monkeypatch, rho):
    """A second pass, second derivatives and batches of gradients are those of the loss without a step that is kept."""
    from lastlayer._threshold.dispatch import kernels
    from lastlayer.loss.lml import _step

    def take_step(held, logits, k, labels, observed):
        index, dense = (labels.unsqueeze(-1), None) if rho is None else (None, labels)
        loss, _, grad, _ = kernels("triton").loss_forward_with_grad(logits, k, None, 1.0, observed, index, dense, None)
        return loss, grad

    monkeypatch.setattr(kernels("triton"), "take_step", take_step)
    x, t = torch.randn(3, 12).to(DEVICE), torch.tensor([4, 0, -1], device=DEVICE)
    labels = t if rho is None else (torch.rand(3, 12) < 0.3).float().to(DEVICE)
    given = t.unsqueeze(-1) if rho is None else labels
    ours, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss = _step(ours, 2.5, rho or 0.0, labels, None)
    exact = lml_loss(plain, given, 2.5, observed=rho or 0.0, impl="torch")
    torch.testing.assert_close(loss, exact)
    for factor in (2.0, 0.5):
        up = torch.tensor(factor, device=DEVICE)
        (grad,) = torch.autograd.grad(loss, ours, up, retain_graph=True)
        (right,) = torch.autograd.grad(exact, plain, up, retain_graph=True)
        torch.testing.assert_close(grad, right)
        grad.zero_()
    (grad,) = torch.autograd.grad(loss, ours, torch.tensor([1.0, 3.0], device=DEVICE), True, is_grads_batched=True)
    (right,) = torch.autograd.grad(exact, plain, retain_graph=True)
    torch.testing.assert_close(grad, torch.stack([right, 3 * right]))
    seconds = []
    for value, leaf in ((_step(ours, 2.5, rho or 0.0, labels, None), ours), (exact, plain)):
        (first,) = torch.autograd.grad(value, leaf, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), leaf)[0])
    torch.testing.assert_close(*seconds)


@pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel is given the address as a pointer")
def test_center_and_delta_are_not_stored_at_address_0():
    from lastlayer._triton.lml import Rows, _resident

    x = torch.randn(5, 40)
    x[1] *= 100
    x[2, 3:] = -torch.inf
    found = []
    for kept in (True, False):
        out, center, delta = torch.empty_like(x), torch.full((5,), 7.0), torch.full((5,), 7.0)
        p = plan.shared(40)
        given = Rows(x, 2.0, None, 1.0, p.align)
        _resident[(5,)](
            *given.head, out, *((center, delta) if kept else (0, 0)), 5, *given.tail,
            **p.tiles, KIND="y", MASKED=False, TOL=given.tolerance, SETTLE=True, num_warps=p.warps,
        )  # fmt: skip
        assert (center == 7).all() != kept
        found.append(out)
    assert torch.equal(*found)


def both_ways(call, x, **way):
    """Return the value and the gradient, for an upstream gradient that is not 1."""
    leaf = x.clone().requires_grad_()
    out = call(leaf, **way)
    out.backward(torch.linspace(0.5, 1.5, out.numel(), device=DEVICE).view(out.shape).to(out.dtype))
    return out.detach(), leaf.grad


def check_pair(function, x):
    """Values and gradients of the kernel are those of plain torch."""
    found = []
    for impl in ("triton", "torch"):
        leaf = x.detach().requires_grad_()
        out = function(leaf, impl)
        (grad,) = torch.autograd.grad(out, leaf, torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape))
        found.append((out.detach(), grad))
    for kernel, plain in zip(*found, strict=True):
        torch.testing.assert_close(kernel, plain, rtol=1e-4, atol=1e-5)


def test_scale_rows():
    from lastlayer._triton.lml import scale_rows_

    grad = torch.randn(50, 7, device=DEVICE)
    factor = torch.ones(50, device=DEVICE)
    assert torch.equal(scale_rows_(grad.clone(), factor), grad)
    factor[17] = 3.0
    assert torch.equal(scale_rows_(grad.clone(), factor), grad * factor[:, None])
    assert torch.equal(scale_rows_(grad.clone(), torch.tensor(2.0, device=DEVICE)), grad * 2)
    grad[17], factor[17] = torch.nan, 0.0
    assert torch.equal(scale_rows_(grad.clone(), factor), torch.where(factor[:, None] == 0, 0, grad))
    for dtype, n in ((torch.float32, 7), (torch.bfloat16, 1 << 20), (torch.float16, (1 << 20) + 9)):
        given = torch.linspace(-1, 1, n, device=DEVICE).to(dtype)
        assert torch.equal(scale_rows_(given.clone(), torch.tensor(-0.5, device=DEVICE)), given * -0.5)
        given[1::2], given[2::3] = torch.nan, torch.inf
        assert scale_rows_(given.clone(), torch.tensor(0.0, device=DEVICE)).eq(0).all()
        assert scale_rows_(given.clone(), torch.tensor(torch.nan, device=DEVICE)).isnan().all()


@pytest.mark.parametrize("way", ["reduced", "compiled", "step"])
@pytest.mark.parametrize("with_k", [False, True])
def test_a_row_without_a_solution_has_no_gradient_where_the_loss_is_not_used(way, with_k):
    """Its gradient was nan, computed ahead of time; the upstream gradient is 0."""
    from lastlayer.loss.lml import _LMLCompiledLoss, _LMLStep

    logits, k = rows(37)
    target = torch.tensor([1, 2, 3, 4], device=DEVICE)
    if way == "step":
        logits[2] = torch.nan
    else:
        k[2] = -1
    x, k = logits.requires_grad_(), k.requires_grad_(with_k)
    if way == "reduced":
        loss = lml_loss(x, target, k, impl="triton")
    elif way == "compiled":
        loss = _LMLCompiledLoss.apply(x, k[:, None], None, 1.0, None, target[:, None], None, None, True)
    elif with_k:
        pytest.skip("a step has one number for k")
    else:
        ctx = type("Context", (), {"given": (1.5, 0.0), "saved_tensors": (x, target)})()
        ctx.grad = torch.autograd.grad(lml_loss(x, target, 1.5, impl="triton"), x)[0]
        assert ctx.grad.isnan().any()
        with torch.no_grad():
            assert _LMLStep.backward(ctx, torch.tensor(0.0, device=DEVICE))[0].eq(0).all()
        return
    assert loss.isnan()
    for _ in range(2):  # the second pass computes the gradient anew
        for grad in torch.autograd.grad(torch.nan_to_num(loss), (x, k) if with_k else (x,), retain_graph=True):
            assert grad.eq(0).all()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_reduced_loss(reduction):
    logits, k = rows(37)
    target = torch.tensor([[3, -1], [36, 0], [1, 2], [-1, -1]], device=DEVICE)  # one row does not count
    check(lambda x, k, impl: lml_loss(x, target, k, temperature=0.7, reduction=reduction, impl=impl), logits, k)


def test_the_default_dtype_does_not_show():
    x = torch.randn(3, 37, device=DEVICE, requires_grad=True)
    target, found = torch.tensor([1, 2, 3], device=DEVICE), []
    for dtype in (torch.bfloat16, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            found.append(lml_loss(x, target, 3, observed=0.3, impl="triton"))
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(*found)


def test_second_backward_pass_is_the_first():
    logits, k = rows(37)
    x = logits.requires_grad_()
    loss = 3 * lml_loss(x, torch.tensor([1, 2, 3, 4], device=DEVICE), k, impl="triton")
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(loss, x)
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(second, kept, rtol=0, atol=8 * eps)
    assert torch.equal(first, kept)  # the second pass does not write into the first one's result


def test_second_derivatives_of_the_reduced_loss():
    logits, k = rows(11)
    target = torch.tensor([1, 2, 3, 4], device=DEVICE)

    def curvature(x, impl):
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(lml_loss(x, target, k.to(x.dtype), impl=impl), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    assert_as_accurate(curvature(logits, "triton"), curvature(logits, "torch"), curvature(logits.double(), "torch"))


def test_batches_of_gradients_of_the_reduced_loss():
    logits, k = rows(11)
    x, factors = logits.requires_grad_(), torch.tensor([1.0, -2.0], device=DEVICE)
    loss = lml_loss(x, torch.tensor([1, 2, 3, 4], device=DEVICE), k, impl="triton")
    (one,) = torch.autograd.grad(loss, x, retain_graph=True)
    (both,) = torch.autograd.grad(loss, x, factors, is_grads_batched=True)
    torch.testing.assert_close(both, factors[:, None, None] * one)


def test_registered_operators():
    """What `torch.compile` calls: results that share no memory, and fake ones of the same form."""
    x, k = torch.randn(3, 9, device=DEVICE), torch.full((3, 1), 2.0, device=DEVICE)
    target = torch.tensor([[1], [2], [-1]], device=DEVICE)
    ops, tests = torch.ops.lastlayer, ("test_schema", "test_faketensor")
    arguments = (x, k, None, 1.0, 0.3, target, None, "triton")
    torch.library.opcheck(ops.lml_loss_forward, arguments, test_utils=tests)
    results = ops.lml_loss_forward(*arguments)
    assert len({value.untyped_storage().data_ptr() for value in results}) == len(results)
    more = (x, None, 1.0, 0.3, target, None, *results[1:], torch.ones(3, device=DEVICE), "triton")
    torch.library.opcheck(ops.lml_loss_backward, more, test_utils=tests)
    torch.library.opcheck(ops.lml_forward, (x, k, None, 1.0, "y", "triton"), test_utils=tests)
    weight = torch.tensor([0.5, 0.5, 0.0], device=DEVICE)
    dense = torch.eye(3, 9, device=DEVICE)
    half = torch.tensor(0.5, device=DEVICE)
    for rho, labels, given in (
        (None, (target, None), weight),
        (None, (target, None), None),
        (half, (None, dense), None),
    ):
        arguments = (x, k, None, 1.0, rho, *labels, given, True)
        torch.library.opcheck(ops.lml_reduced_loss, arguments, test_utils=tests)


@pytest.mark.parametrize("form", ["lists with weights", "lists", "one class", "multi-hot", "multi-hot, observed"])
def test_the_loss_that_is_compiled_is_the_other_one(form):
    from lastlayer.loss.lml import _LMLCompiledLoss

    x, target = torch.randn(4, 9, device=DEVICE), torch.tensor([[1, 2], [2, -1], [-1, -1], [0, 3]], device=DEVICE)
    target = target[:, :1] if form == "one class" else target
    dense = torch.zeros(4, 10, device=DEVICE).scatter_(1, target % 10, 1)[:, :9] if "hot" in form else None
    rho = 0.3 if "observed" in form else 0.0
    given = torch.tensor([1.0, 2.0, 3.0, 4.0], device=DEVICE) if form == "lists with weights" else None
    k = torch.tensor([[1.5], [2.0], [3.0], [4.0]], device=DEVICE)
    found = []
    for way in ("compiled", "other"):
        leaves = x.clone().requires_grad_(), k.clone().requires_grad_()
        if way == "compiled":
            weight = None if given is None else given * torch.tensor([1, 1, 0, 1], device=DEVICE) / 7
            labels = (target, None) if dense is None else (None, dense)
            part = torch.tensor(rho, device=DEVICE) if rho > 0 else None
            loss = _LMLCompiledLoss.apply(*leaves, None, 0.5, part, *labels, weight, True)
        else:
            labels, k_per_row = target if dense is None else dense, leaves[1].squeeze(-1)
            options = {"temperature": 0.5, "sample_weight": given, "observed": rho, "impl": "torch"}
            loss = lml_loss(leaves[0], labels, k_per_row, **options)
        found.append((loss, *torch.autograd.grad(3 * loss, leaves)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter cannot be compiled")
@pytest.mark.parametrize("form", ["multi-hot", "one class"])
def test_a_compiled_step_takes_any_number_that_is_observed(form):
    torch.compiler.reset()
    x = torch.randn(32, 100, device=DEVICE, requires_grad=True)
    target = (x.detach() > 1).float() if form == "multi-hot" else torch.randint(100, (32,), device=DEVICE)
    compiled = torch.compile(lambda x, rho, k: lml_loss(x, target, k, observed=rho), fullgraph=True)
    for i, (rho, k) in enumerate([(0.3, 2.0), (0.5, 3.0), (0.8, 4.5)]):
        with torch._dynamo.config.patch(error_on_recompile=i == 2):
            loss = compiled(x, rho, k)
        expected = lml_loss(x, target, k, observed=rho)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(*(torch.autograd.grad(value, x)[0] for value in (loss, expected)))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter cannot be compiled")
@pytest.mark.parametrize("masked", [False, True])
def test_the_compiler_launches_the_kernels(masked):
    from torch._inductor.utils import run_and_get_code

    torch.compiler.reset()
    x = torch.randn(32, 100, device=DEVICE, requires_grad=True)
    mask = torch.rand(32, 100, device=DEVICE) < 0.9 if masked else None
    compiled = torch.compile(lambda x: lml(x, 5, mask=mask), fullgraph=True)
    out, code = run_and_get_code(compiled, x)
    assert "ops.lastlayer" not in "".join(code)
    expected = lml(x, 5, mask=mask)
    upstream = torch.randn_like(x)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, upstream)[0] for y in (out, expected)))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter cannot be compiled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["one class", "lists", "multi-hot", "booleans", "observed", "weights of rows", "mask"])
def test_the_compiler_launches_the_kernel_of_the_loss(form, dtype):
    from torch._inductor.utils import run_and_get_code

    torch.compiler.reset()
    x = torch.randn(32, 100, device=DEVICE, dtype=dtype, requires_grad=True)
    target = torch.randint(100, (32,), device=DEVICE)
    target[3] = -1
    options = {}
    if form == "lists":
        target = torch.stack((target, target.flip(0)), -1)
    elif form in ("multi-hot", "booleans", "observed"):
        target = torch.rand(32, 100, device=DEVICE) < 0.05
        target = target if form == "booleans" else target.float()
        options = {"observed": 0.5} if form == "observed" else {}
    elif form == "weights of rows":
        options = {"sample_weight": torch.rand(32, device=DEVICE)}
    elif form == "mask":
        options = {"mask": torch.rand(32, 100, device=DEVICE) < 0.9}
    k = torch.full((32,), 5.0, device=DEVICE, requires_grad=True)
    compiled = torch.compile(lambda x, k: lml_loss(x, target, k, **options), fullgraph=True)
    out, code = run_and_get_code(compiled, x, k)
    assert "ops.lastlayer" not in "".join(code)
    expected = lml_loss(x, target, k, **options)
    torch.testing.assert_close(out, expected)
    for a, b in zip(*(torch.autograd.grad(3 * loss, (x, k)) for loss in (out, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_rows_that_the_compiler_may_launch_kernels_for():
    """Any number of rows, once it is known not to be 0; of classes one number."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    from lastlayer._triton import inline

    mode = FakeTensorMode(shape_env=ShapeEnv())

    def fake(*sizes):
        given = torch.empty(*(size or 32 for size in sizes))
        kinds = [DimDynamic.STATIC if size else DimDynamic.DYNAMIC for size in sizes]
        return mode.from_tensor(given, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))

    varies = None
    assert inline.fits(fake(varies, 100))
    assert inline.fits(fake(varies, varies, 100))
    assert not inline.fits(fake(varies, varies))
    assert not inline.fits(fake(varies, plan.LONGEST + 1))
    with mode:
        assert not inline.fits(torch.empty(mode.shape_env.create_unbacked_symint(), 100))
    assert inline.fits(torch.empty(1, 100))
    assert not inline.fits(torch.empty(0, 100))
    assert not inline.fits(torch.empty(3, 0))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter cannot be compiled")
@pytest.mark.parametrize("form", ["number", "per row", "masked"])
@pytest.mark.parametrize("n", [9, 100, 1000])
def test_the_compiler_launches_the_kernels_for_rows_that_vary(n, form):
    from torch._inductor.utils import run_and_get_code

    def function(x, k, mask):
        return lml(x, k, mask=mask, temperature=0.5)

    def gradients_of(function, leaves, upstream, *arguments):
        return torch.autograd.grad(function(*arguments), leaves, upstream)

    torch.compiler.reset()
    compiled, codes = torch.compile(function, fullgraph=True), []
    for i, shape in enumerate([(32, n), (7, n), (1030, n), (255, n)]):
        x = torch.randn(shape, device=DEVICE, requires_grad=True)
        k = torch.linspace(1, n - 1, shape[0], device=DEVICE, requires_grad=True) if form == "per row" else 2.5
        mask = torch.rand(shape, device=DEVICE) < 0.9 if form == "masked" else None
        leaves = (x, k) if form == "per row" else (x,)
        with torch._dynamo.config.patch(error_on_recompile=i > 1):
            upstream = torch.randn_like(x)
            grads, code = run_and_get_code(gradients_of, compiled, leaves, upstream, x, k, mask)
            torch.testing.assert_close(compiled(x, k, mask), function(x, k, mask))
        codes += code
        torch.testing.assert_close(grads, gradients_of(function, leaves, upstream, x, k, mask))
    assert "ops.lastlayer" not in "".join(codes)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter cannot be compiled")
@pytest.mark.parametrize("form", ["one class", "observed"])
def test_the_compiler_launches_the_kernel_of_the_loss_for_rows_that_vary(form):
    from torch._inductor.utils import run_and_get_code

    torch.compiler.reset()
    rho = 0.5 if form == "observed" else 0.0
    compiled, codes = torch.compile(lambda x, y: lml_loss(x, y, 5, observed=rho), fullgraph=True), []
    for i, count in enumerate([32, 7, 300, 255]):
        x = torch.randn(count, 100, device=DEVICE, requires_grad=True)
        target = torch.randint(100, (count,), device=DEVICE) if form == "one class" else (x.detach() > 1).float()
        with torch._dynamo.config.patch(error_on_recompile=i > 1):
            loss, code = run_and_get_code(compiled, x, target)
        codes += code
        expected = lml_loss(x, target, 5, observed=rho)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(*(torch.autograd.grad(value, x)[0] for value in (loss, expected)))
    assert "ops.lastlayer" not in "".join(codes)
