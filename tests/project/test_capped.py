"""Capped softmax and sparsemax: laws, a sort-based oracle, a solver, derivatives, edges, messages, tracing."""

import pytest
import torch
from tools import DEVICE, slow

from lastlayer import CappedSoftmax, CappedSparsemax, capped_softmax, capped_sparsemax

F64 = torch.float64
BOTH = pytest.mark.parametrize("project", [capped_softmax, capped_sparsemax])


def sparsemax(x):
    """The sparsemax of Martins and Astudillo (2016), by sorting."""
    z = x.sort(-1, descending=True).values
    rank = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype)
    size = (1 + rank * z > z.cumsum(-1)).sum(-1, keepdim=True)
    tau = (z.cumsum(-1).gather(-1, size - 1) - 1) / size
    return (x - tau).clamp(min=0)


def by_bisection(project, x, k):
    """The row of y for the threshold where the sum is k, by 200 halvings."""
    shape = (lambda u: u.clamp(max=0).exp()) if project is capped_softmax else (lambda u: u.clamp(0, 1))
    middle = x.nan_to_num(neginf=0).mean(-1, keepdim=True)
    x = x - middle
    finite = x.isfinite()
    lo = torch.where(finite, x, torch.inf).amin(-1, keepdim=True) - 60
    hi = x.amax(-1, keepdim=True) + 60
    for _ in range(200):
        mid = (lo + hi) / 2
        more = shape(x - mid).sum(-1, keepdim=True) > k
        lo, hi = torch.where(more, mid, lo), torch.where(more, hi, mid)
    return shape(x - hi)


KINDS = {
    "normal": lambda x: x,
    "small": lambda x: 0.01 * x,
    "wide": lambda x: 30 * x,
    "constant": lambda x: 0 * x,
    "ties": lambda x: x.round(),
    "heavy tail": lambda x: x.sign() * x.abs() ** 5,
    "steps": lambda x: -torch.arange(x.shape[-1]).to(x).expand_as(x) / 3,
    "power law": lambda x: -torch.arange(1, x.shape[-1] + 1).to(x).log().expand_as(x),
    "offset": lambda x: x + 1e4,
    "gap": lambda x: x + 1e3 * (torch.arange(x.shape[-1]) < 3),
    "half out": lambda x: x.masked_fill(torch.arange(x.shape[-1]) % 2 == 1, -torch.inf),
}


@BOTH
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, slow(F64)])
def test_accuracy(project, kind, dtype):
    for n in (2, 10, 1000):
        x = KINDS[kind](torch.randn(4, n, dtype=F64)).to(dtype)
        limit = n // 2 if kind == "half out" else n
        for k in (0.3, 1, 2.5, n / 2, n - 0.5):
            if not 0 < k < limit:
                continue
            y = project(x.to(DEVICE), k).cpu()
            tolerance = 1e-6 if dtype == torch.float32 else 1e-12
            assert (y.double().sum(-1) - k).abs().max() <= tolerance * max(k, 1)
            torch.testing.assert_close(y.double(), by_bisection(project, x.double(), k), rtol=0, atol=10 * tolerance)


def test_by_hand():
    x = torch.tensor([3.0, 2.0, 1.0, 0.0], dtype=F64).log()  # exponentials 3, 2, 1, 0
    # k = 2: 3 s is capped, (2 + 1) s = 1.
    torch.testing.assert_close(capped_softmax(x, 2), torch.tensor([1, 2 / 3, 1 / 3, 0], dtype=F64))
    z = torch.tensor([2.0, 0.5, 0.1, -3.0], dtype=F64)  # 2 is at 1; 0.5 and 0.1 share 1: tau = -0.2
    torch.testing.assert_close(capped_sparsemax(z, 2), torch.tensor([1, 0.7, 0.3, 0], dtype=F64))


def test_one_label():
    x = 2 * torch.randn(20, 30, dtype=F64)
    torch.testing.assert_close(capped_softmax(x), x.softmax(-1))
    torch.testing.assert_close(capped_sparsemax(x), sparsemax(x))


@BOTH
@pytest.mark.parametrize("k", [1, 2.5, 4])
def test_solver_finds_the_same(project, k):
    cvxpy = pytest.importorskip("cvxpy")
    x = torch.randn(6, dtype=F64)
    y = cvxpy.Variable(6)
    value = x.numpy() @ y
    if project is capped_softmax:
        objective = cvxpy.Maximize(value + cvxpy.sum(cvxpy.entr(y)))
    else:
        objective = cvxpy.Minimize(cvxpy.sum_squares(y - x.numpy()))
    cvxpy.Problem(objective, [y >= 0, y <= 1, cvxpy.sum(y) == k]).solve()
    torch.testing.assert_close(project(x, k), torch.as_tensor(y.value), rtol=0, atol=1e-4)


@BOTH
def test_laws(project):
    x = torch.randn(5, 12, dtype=F64)
    y = project(x, 3.5)
    torch.testing.assert_close(project(x + 7, 3.5), y)
    order = torch.randperm(12)
    torch.testing.assert_close(project(x[:, order], 3.5), y[:, order])
    assert (y.gather(1, x.argsort(-1)).diff(dim=-1) >= -1e-15).all()
    assert (project(x, 4.0) >= y - 1e-15).all()
    torch.testing.assert_close(project(x, 3.5, temperature=0.5), project(2 * x, 3.5))
    hard = project(x, 3, temperature=1e-4)
    torch.testing.assert_close(hard, torch.zeros_like(x).scatter(1, x.topk(3).indices, 1.0))


def test_sparsemax_is_its_own_complement():
    x = torch.randn(5, 12, dtype=F64)
    torch.testing.assert_close(capped_sparsemax(x, 3.5), 1 - capped_sparsemax(-x, 8.5))


@BOTH
def test_gradients(project):
    x = torch.randn(3, 6, dtype=F64, requires_grad=True)
    k = torch.tensor([1.0, 2.5, 4.0], dtype=F64, requires_grad=True)
    temperature = torch.tensor([1.0, 0.7, 2.0], dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, k: project(x, k), (x, k), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(lambda x, k: project(x, k), (x, k))
    assert torch.autograd.gradcheck(lambda x, t: project(x, 2, temperature=t), (x, temperature))


@BOTH
def test_jacobian_from_the_answer(project):
    x = torch.randn(7, dtype=F64)
    y = project(x, 3)
    h = torch.where(y < 1, y, 0) if project is capped_softmax else ((y > 0) & (y < 1)).to(F64)
    exact = h.diag() - torch.outer(h, h) / h.sum()
    torch.testing.assert_close(torch.func.jacrev(lambda x: project(x, 3))(x), exact)
    torch.testing.assert_close(torch.func.jacfwd(lambda x: project(x, 3))(x), exact)


@BOTH
def test_edges(project):
    x = torch.randn(3, 4, requires_grad=True)
    for k, value in ((0, 0.0), (4, 1.0)):
        y = project(x, k)
        assert (y == value).all()
        assert (torch.autograd.grad(y.sum(), x)[0] == 0).all()
    assert torch.equal(project(torch.zeros(2, 4), 1), torch.full((2, 4), 0.25))
    assert project(torch.tensor([5.0]), 1).tolist() == [1.0]
    torch.testing.assert_close(project(torch.tensor([[5.0]]), 0.25), torch.tensor([[0.25]]))
    assert project(torch.zeros(0, 4), 2).shape == (0, 4)
    for k in (1e-30, 1e-18, 1e-9):
        y = project(torch.tensor([[0.0, -40.0]]), torch.tensor([k]))
        torch.testing.assert_close(y.sum(-1), torch.tensor([k]), rtol=1e-5, atol=0)


@BOTH
def test_infinite_masked_and_broken_rows(project):
    x = torch.zeros(5, 4)
    x[0, 0] = torch.inf
    x[1, 1] = -torch.inf
    x[2, 2] = torch.nan
    x[3, :3] = -torch.inf
    x.requires_grad_()
    y = project(x, 2)
    torch.testing.assert_close(y[0], torch.tensor([1, 1 / 3, 1 / 3, 1 / 3]))
    torch.testing.assert_close(y[1], torch.tensor([2 / 3, 0, 2 / 3, 2 / 3]))
    assert y[2].isnan().all()
    assert y[3].isnan().all()  # two labels, one class
    torch.testing.assert_close(y[4], torch.full((4,), 0.5))
    (grad,) = torch.autograd.grad(y[[0, 1, 4]].square().sum(), x)
    assert grad[[0, 1, 4]].isfinite().all()
    assert grad[0, 0] == 0
    assert grad[1, 1] == 0
    mask = torch.tensor([True, False, True, True])
    torch.testing.assert_close(project(torch.zeros(2, 4), 2, mask=mask)[0], y[1].detach())
    k = torch.tensor([5.0, -1.0, torch.nan, 2.0])
    y = project(torch.zeros(4, 4), k)
    assert y[:3].isnan().all()
    torch.testing.assert_close(y[3], torch.full((4,), 0.5))


@BOTH
def test_dim_batch_and_dtype(project):
    x = torch.randn(3, 5, 4)
    torch.testing.assert_close(project(x, 2, dim=1), project(x.movedim(1, -1), 2).movedim(-1, 1))
    torch.testing.assert_close(project(x, torch.full((3, 1), 2)), project(x, 2))
    for dtype in (torch.float16, torch.bfloat16):
        y = project(x.to(dtype), 2)
        assert y.dtype == dtype
        torch.testing.assert_close(y, project(x.to(dtype).float(), 2).to(dtype))


@pytest.mark.slow
@BOTH
def test_compile_export_vmap(project):
    x = torch.randn(4, 9, dtype=F64)
    expected = project(x, 2.5)
    torch.testing.assert_close(torch.compile(project, fullgraph=True, backend="aot_eager")(x, 2.5), expected)
    module = CappedSoftmax(2.5) if project is capped_softmax else CappedSparsemax(2.5)
    torch.testing.assert_close(torch.export.export(module, (x,)).module()(x), expected)
    torch.testing.assert_close(torch.func.vmap(lambda row: project(row, 2.5))(x), expected)
    torch.testing.assert_close(module(x), expected)
    assert project(x.to("meta"), 2.5).shape == x.shape


@BOTH
def test_messages(project):
    op = project.__name__
    with pytest.raises(ValueError, match=rf"{op}: `k` must be between 0 and n_classes=4, got 5"):
        project(torch.zeros(2, 4), 5)
    with pytest.raises(ValueError, match=rf"{op}: `impl` must be one of 'auto', 'torch', got 'triton'"):
        project(torch.zeros(2, 4), 1, impl="triton")
    with pytest.raises(TypeError, match=rf"{op}: `logits` must be of a floating-point dtype"):
        project(torch.zeros(2, 4).long(), 1)
