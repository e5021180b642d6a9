"""The balanced assignment by the GPU kernel against plain torch: on a GPU, or in Triton's interpreter."""

import contextlib
import os
import signal
import threading

import pytest
import torch
from tools import DEVICE, GPU_KERNELS, HUNG, INTERPRETED

import lastlayer as ll
from lastlayer.project import balanced as plain

pytestmark = GPU_KERNELS


@pytest.fixture
def tried(monkeypatch):
    """What the kernel was asked, and whether it found a solution."""
    from lastlayer._triton import balanced

    solve, answers = balanced.solve, []

    def watched(*arguments):
        found = solve(*arguments)
        answers.append(found[2] == 0)
        return found

    monkeypatch.setattr(balanced, "solve", watched)
    return answers


def in_processes(launches, **options):
    """Launch a kernel whose programs wait for each other, as Triton's interpreter cannot: each in its own process."""
    ((kernel, (programs,), args, constants),) = launches
    storages = {
        arg.untyped_storage().data_ptr(): arg.untyped_storage() for arg in args if isinstance(arg, torch.Tensor)
    }
    shared = {address: storage.clone().share_memory_() for address, storage in storages.items()}

    def as_shared(arg):
        if not isinstance(arg, torch.Tensor):
            return arg
        storage = shared[arg.untyped_storage().data_ptr()]
        return arg.new_empty(0).set_(storage, arg.storage_offset(), arg.size(), arg.stride())

    args = [as_shared(arg) for arg in args]
    children = []
    for program in range(programs):
        children.append(fork(kernel, args, constants, program, programs, children[0] if children else 0))
    ended = [os.waitpid(child, 0)[1] for child in children]
    assert ended == [0] * programs
    for address, storage in storages.items():
        storage.copy_(shared[address])


def fork(kernel, args, constants, program, programs, group):
    """Start a process that runs one program of a kernel; where it fails, the group ends, which waits for it."""
    from triton.runtime.interpreter import interpreter_builder

    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, group)
            signal.alarm(int(HUNG))
            interpreter_builder.set_grid_dim = lambda *_: setattr(interpreter_builder, "grid_dim", (programs, 1, 1))
            interpreter_builder.set_grid_idx = lambda *_: setattr(interpreter_builder, "grid_idx", (program, 0, 0))
            kernel[(1,)](*args, **constants)
            os._exit(0)
        finally:
            os.killpg(0, signal.SIGKILL)
    with contextlib.suppress(PermissionError, ProcessLookupError):  # where it has done so itself, and gone on
        os.setpgid(child, group)
    return child


def matrix(rows, columns, scale, bias):
    generator = torch.Generator(DEVICE).manual_seed(rows)
    x = scale * torch.randn(rows, columns, generator=generator, device=DEVICE)
    return x + bias * torch.randn(columns, generator=generator, device=DEVICE)


@pytest.mark.parametrize(
    ("rows", "columns", "k", "scale", "bias"),
    [(40, 20, 3.5, 2.0, 1.0), (33, 33, 17.0, 1.0, 1.0), (300, 16, 2.0, 1.0, 0.0)],
)
def test_is_plain_torch(tried, rows, columns, k, scale, bias):
    x = matrix(rows, columns, scale, bias)
    sizes = torch.full((rows,), k, device=DEVICE).requires_grad_()
    capacity = torch.full((columns,), rows * k / columns, device=DEVICE).requires_grad_()
    leaf = x.clone().requires_grad_()
    y = ll.lml_balanced(leaf, sizes, capacity, temperature=1.25)
    assert tried == [True]
    torch.testing.assert_close(y.double().sum(-1), sizes.double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(y.double().sum(-2), capacity.double(), rtol=1e-6, atol=0)
    exact = ll.lml_balanced(leaf.double(), sizes, capacity, temperature=1.25)
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=2e-6)
    grad = torch.linspace(-1, 1, x.numel(), device=DEVICE).reshape(x.shape)
    found = torch.autograd.grad(y, (leaf, sizes, capacity), grad)
    expected = torch.autograd.grad(exact, (leaf, sizes, capacity), grad.double())
    for value, right in zip(found, expected, strict=True):
        torch.testing.assert_close(value, right, rtol=1e-5, atol=1e-5)


def test_rows_in_turn(tried, monkeypatch):
    from lastlayer._triton import balanced

    monkeypatch.setattr(balanced, "MOST", 0)
    monkeypatch.setattr(balanced, "PER_THREAD", 1)
    balanced._plan.cache_clear()
    x = matrix(100, 20, 3.0, 2.0)
    y = ll.lml_balanced(x, 3.5, temperature=0.5)
    balanced._plan.cache_clear()
    assert tried == [True]
    torch.testing.assert_close(y.double(), ll.lml_balanced(x.double(), 3.5, temperature=0.5), rtol=0, atol=2e-6)


@pytest.mark.parametrize("rows", [67, 133, 300, 1050])
@pytest.mark.parametrize("in_turn", [False, True])
def test_full_columns(tried, monkeypatch, rows, in_turn):
    """Programs with more rows than others: in a column that is nearly full, each takes nearly all that it has."""
    from lastlayer._triton import balanced

    if in_turn:
        monkeypatch.setattr(balanced, "MOST", 0)
        monkeypatch.setattr(balanced, "PER_THREAD", 1)
    if DEVICE.type == "cpu":  # one program has all rows, and is slow
        rows //= 10
    balanced._plan.cache_clear()
    x = matrix(rows, 20, 2.0, 1.0)
    left = torch.tensor([0.0001, 0.001, 0.004, 0.01], dtype=torch.float64, device=DEVICE) * rows
    capacity = torch.cat([rows - left, left, torch.full_like(left, rows / 2), torch.full((8,), rows / 4).to(left)])
    k = float(capacity.sum() / rows)
    y = ll.lml_balanced(x, k, capacity)
    balanced._plan.cache_clear()
    assert tried == [True]
    torch.testing.assert_close(y.double().sum(-2), capacity, rtol=1e-6, atol=0)
    torch.testing.assert_close(y.double(), ll.lml_balanced(x.double(), k, capacity), rtol=0, atol=1e-5)


@pytest.mark.skipif(not INTERPRETED, reason="for Triton's interpreter")
@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize(("rows", "programs"), [(13, 2), (13, 3), (35, 3)])
def test_several_programs(tried, monkeypatch, rows, programs, in_turn):
    """The first program has more rows than the last one, all of which take the first column."""
    from lastlayer._triton import balanced

    if in_turn:
        monkeypatch.setattr(balanced, "MOST", 0)
        monkeypatch.setattr(balanced, "PER_THREAD", 1)
    monkeypatch.setattr(balanced, "_programs", lambda device: programs)
    monkeypatch.setattr(balanced, "launch_all", in_processes)
    monkeypatch.setattr(balanced, "_zeros", balanced._Zeros())
    balanced._plan.cache_clear()
    x = matrix(rows, 20, 2.0, 1.0)
    x[:8, 0] += 40
    capacity = torch.full((20,), rows * 2 / 20, dtype=torch.float64)
    capacity[0] = 8 + (rows - 8) / 2
    k = float(capacity.sum() / rows)
    y = ll.lml_balanced(x, k, capacity)
    again = [ll.lml_balanced(x, k, capacity) for _ in range(2)]  # with the zeros of the call before
    balanced._plan.cache_clear()
    assert tried == [True] * 3
    torch.testing.assert_close(y.double().sum(-2), capacity, rtol=1e-6, atol=0)
    torch.testing.assert_close(y.double(), ll.lml_balanced(x.double(), k, capacity), rtol=0, atol=2e-6)
    assert all(torch.equal(other, y) for other in again)


def assert_again(y, first):
    """The same to the last bit; on a GPU a first call is made by the kernel of the general form, which rounds apart."""
    torch.testing.assert_close(y, first, rtol=0, atol=0 if INTERPRETED else 1e-6)


def test_zeros_of_the_call_before(tried, monkeypatch):
    """Each call leaves zeros for the next one of its size, also between others, and not if it was interrupted."""
    from lastlayer._triton import balanced

    one, other = matrix(40, 20, 2.0, 1.0), matrix(24, 70, 2.0, 1.0)
    first, between = ll.lml_balanced(one, 3.5), ll.lml_balanced(other, 3.5)
    for _ in range(4):
        assert_again(ll.lml_balanced(one, 3.5), first)
        assert_again(ll.lml_balanced(other, 3.5), between)
    kept = len(balanced._zeros.kept)
    with monkeypatch.context() as patch:

        def interrupted(*arguments):
            raise KeyboardInterrupt

        patch.setattr(type(balanced._answers.take()), "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ll.lml_balanced(one, 3.5)
    assert len(balanced._zeros.kept) == kept - 1
    assert_again(ll.lml_balanced(one, 3.5), first)
    for columns in range(33, 1000, 100):  # more sizes than are kept
        torch.testing.assert_close(
            ll.lml_balanced(matrix(2, columns, 1.0, 0.0), 2.0).sum(-1), one.new_tensor([2.0, 2.0])
        )
    assert len(balanced._zeros.kept) <= balanced._zeros.MOST
    assert_again(ll.lml_balanced(one, 3.5), first)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_streams_have_zeros_of_their_own():
    x = matrix(2048, 64, 2.0, 1.0)
    right = ll.lml_balanced(x, 3.5)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found = []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(ll.lml_balanced(x, 3.5))
    torch.cuda.synchronize()
    for one in found:
        assert_again(one, right)


@pytest.mark.parametrize(("rows", "columns", "k", "scale"), [(40, 20, 3.5, 2.0), (300, 16, 2, 1.0), (64, 16, 2, 10.0)])
def test_duals_are_plain_torch(tried, rows, columns, k, scale):
    x = matrix(rows, columns, scale, 1.0)
    sizes, leaf = torch.full((rows,), float(k), device=DEVICE).requires_grad_(), x.clone().requires_grad_()
    for sums in (k, sizes):
        duals = ll.lml_balanced_duals(leaf, sums, temperature=1.25)
        exact = ll.lml_balanced_duals(leaf.double(), sums, temperature=1.25)
        grads = [torch.linspace(-1, 2, d.numel(), device=DEVICE).reshape(d.shape) for d in duals]
        for found, right in zip(duals, exact, strict=True):
            torch.testing.assert_close(found.double(), right, rtol=2e-6, atol=2e-5)
        leaves = (leaf,) if sums is k else (leaf, sizes)
        found = torch.autograd.grad(duals, leaves, grads)
        expected = torch.autograd.grad(exact, leaves, [g.double() for g in grads])
        for value, right in zip(found, expected, strict=True):
            torch.testing.assert_close(value, right.to(value.dtype), rtol=1e-4, atol=1e-4)
    assert tried == [True, True]
    assert abs(float(duals[1].detach().mean())) < 1e-5


@pytest.mark.parametrize(("rows", "columns", "k"), [(64, 16, 2.0), (32, 16, 8.0)])
def test_sharp_logits(tried, rows, columns, k):
    y = ll.lml_balanced(matrix(rows, columns, 20.0, 6.0), k)
    assert tried == [True]
    torch.testing.assert_close(y.double().sum(-1), torch.full_like(y[:, 0], k).double(), rtol=1e-6, atol=0)
    share = torch.full_like(y[0], rows * k / columns).double()
    torch.testing.assert_close(y.double().sum(-2), share, rtol=1e-6, atol=0)


def test_half_precision_and_one_number(tried):
    x = matrix(64, 16, 1.0, 1.0).bfloat16()
    y = ll.lml_balanced(x, 2)
    assert tried == [True]
    torch.testing.assert_close(y, ll.lml_balanced(x.double(), 2).bfloat16(), rtol=0.01, atol=0.01)


def test_what_has_no_solution_is_left_to_plain_torch(tried):
    x = matrix(12, 6, 1.0, 0.0)
    assert ll.lml_balanced(x, 2.0, torch.full((6,), 3.0, device=DEVICE)).isnan().all()
    x[0, 0] = -torch.inf
    torch.testing.assert_close(ll.lml_balanced(x, 2.0), ll.lml_balanced(x.double(), 2.0).float())
    assert tried == [False, False]
    ll.lml_balanced(x, 2.0, 4.0, at_most=True)
    ll.lml_balanced(x[None], 2.0)
    assert len(tried) == 2
    assert plain._by_kernel("lml_balanced", x.double(), 2.0, None, 1.0) is None


def test_second_derivatives(tried):
    x = matrix(6, 4, 1.0, 0.0).requires_grad_()
    (first,) = torch.autograd.grad(ll.lml_balanced(x, 2.0).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    assert tried == [True]
    wide = x.detach().double().requires_grad_()
    (first,) = torch.autograd.grad(ll.lml_balanced(wide, 2.0).square().sum(), wide, create_graph=True)
    torch.testing.assert_close(
        second.double(), torch.autograd.grad(first.square().sum(), wide)[0], rtol=1e-4, atol=1e-5
    )


@pytest.fixture
def nothing_at_hand(monkeypatch):
    from lastlayer._triton import ahead, balanced, plan

    asked = []
    monkeypatch.setattr(ahead, "_provided", lambda x: not plan.in_general_form())
    monkeypatch.setattr(ahead, "_absent", {})
    monkeypatch.setattr(ahead, "launch_compiled", lambda *given: None)
    monkeypatch.setattr(ahead, "at_hand", lambda kernel, args, options: asked.append(options))
    monkeypatch.setattr(balanced, "relaunch", lambda *given: False)
    monkeypatch.setattr(ahead, "PATIENCE", -1)  # nothing is compiled meanwhile
    return asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["numbers", "tensors"])
def test_the_general_form(tried, nothing_at_hand, dtype, form):
    x = matrix(45, 20, 2.0, 1.0).to(dtype)
    k, capacity = 3.5, None
    if form == "tensors":
        k = torch.linspace(1, 4, 45, dtype=torch.float64, device=DEVICE)
        capacity = k.sum() * torch.linspace(0.5, 1.5, 20, dtype=torch.float64, device=DEVICE) / 20
    leaf = x.clone().requires_grad_()
    y = ll.lml_balanced(leaf, k, capacity, temperature=1.25)
    assert tried == [True]
    assert len(nothing_at_hand) == 1
    wide = x.double().requires_grad_()
    exact = ll.lml_balanced(wide, k, capacity, temperature=1.25)
    close = {"rtol": 0, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 0.01, "atol": 0.01}
    torch.testing.assert_close(y.double(), exact, **close)
    found, right = (torch.autograd.grad(out.square().sum(), z)[0] for out, z in ((y, leaf), (exact, wide)))
    torch.testing.assert_close(
        found.double(), right, **(close if dtype != torch.float32 else {"rtol": 0, "atol": 1e-5})
    )


def test_its_own_kernel_is_compiled_meanwhile(tried, nothing_at_hand, monkeypatch):
    """Though it holds rows, which other functions have compiled when a length is met often."""
    from lastlayer._triton import ahead

    made = []

    def compile_meanwhile(key, kernel, device, args, options):
        made.append(options["HELD"])
        return threading.Thread()  # which has ended

    monkeypatch.setattr(ahead, "PATIENCE", 2)
    monkeypatch.setattr(ahead, "compile_meanwhile", compile_meanwhile)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    x = matrix(6, 4, 1.0, 0.0)
    for _ in range(3):
        ll.lml_balanced(x, 2.0)
    assert made == [True]
    assert tried == [True] * 3
