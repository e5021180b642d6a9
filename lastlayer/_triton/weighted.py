"""The projection with weights and bounds on the GPU: values, and their gradients.

Rows of up to `LONGEST` classes are held in registers and searched in float32, as `lastlayer/_native/weighted_rows.h`
does; longer ones are streamed. A row that float32 has too few digits for, or that has nothing to search, is settled in
float64: at the end of the kernels that are compiled for one length or stream a row, and after the others by one more.
"""

import functools
import struct

import torch
from torch import Tensor

from lastlayer._threshold.budget import Budget
from lastlayer._triton import INTERPRETED
from lastlayer._triton import plan as shapes
from lastlayer._triton.ahead import Absent, Launch, launch_all
from lastlayer._triton.rows import general_form
from lastlayer._triton.weighted_gradients import gradients
from lastlayer._triton.weighted_long import backward_row, forward_row
from lastlayer._triton.weighted_rare import rare
from lastlayer._triton.weighted_resident import resident
from lastlayer._triton.weighted_settle import settle
from lastlayer._triton.weighted_shared import shared

LONGEST = 16384  # classes of a row held in registers, with their weights
MOST = 1 << 22  # classes of a row; one program takes longer for more of them than plain torch
SETTLE = {"GROUP": 2048, "C": 512, "num_warps": 8}  # rows at a time that the last kernel looks at, and classes of one
STREAM = {"C": 2048, "num_warps": 8}  # classes at a time of a longer row
# The same for its values, and the classes of the first guess, by bytes per score and whether there are bounds. A row of
# float32 has a multiprocessor to itself.
LONG: dict[tuple[int, bool], dict[str, int]] = {
    (4, False): {"W": 2, "C": 4096, "SAMPLE": 4096, "num_warps": 32},
    (4, True): {"W": 2, "C": 4096, "SAMPLE": 4096, "num_warps": 32},
    (2, False): {"W": 2, "C": 2048, "SAMPLE": 4096, "num_warps": 8},
    (2, True): {"W": 4, "C": 2048, "SAMPLE": 4096, "num_warps": 8},
}
# Up to a number of classes per row, the number of them that a thread holds.
FORWARD: dict[int, shapes.Table] = {
    4: ((128, 64), (256, 32), (768, 16), (8192, 32), (LONGEST, 40)),
    2: ((128, 64), (256, 32), (768, 16), (8192, 32), (LONGEST, 40)),
}
# The same where rows share weights and bounds; then the registers of a thread, and STAGES of `shared`. These are the
# fastest that were tried: spilled registers take long to come back, and copies to shared memory help where a warp has
# several rows or little to read. With weights or bounds alone, a thread holds one number per class for them; with both,
# two. With STAGES 0 a row has a multiprocessor to itself, and registers for the next one's scores.
Fit = tuple[int, int, int, int]
FITS: dict[bool, dict[int, tuple[Fit, ...]]] = {
    False: {
        4: ((256, 32, 128, 3), (768, 16, 168, 2), (8192, 32, 168, 2), (10240, 40, 255, 0), (LONGEST, 40, 128, 1)),
        2: (
            (256, 32, 128, 3), (768, 16, 168, 3), (1024, 32, 128, 3), (8192, 64, 248, 3), (10240, 80, 255, 2),
            (LONGEST, 40, 128, 1),
        ),
    },
    True: {
        4: ((256, 32, 168, 2), (768, 16, 168, 2), (8192, 32, 168, 2), (10240, 40, 255, 0), (LONGEST, 40, 128, 1)),
        2: (
            (256, 32, 168, 2), (768, 16, 168, 2), (2048, 32, 168, 2), (8192, 32, 168, 1), (10240, 40, 255, 0),
            (LONGEST, 40, 128, 1),
        ),
    },
}  # fmt: skip
SHARED: dict[bool, dict[int, shapes.Table]] = {
    both: {itemsize: tuple((limit, per) for limit, per, _, _ in fits) for itemsize, fits in sizes.items()}
    for both, sizes in FITS.items()
}
BACKWARD: dict[int, shapes.Table] = {
    4: ((8192, 8), (LONGEST, 20)),
    2: ((512, 16), (4096, 32), (8192, 64), (10240, 80), (LONGEST, 20)),
}
BACKWARD_TO_TERMS: dict[int, shapes.Table] = {  # where weights or bounds need a gradient, too
    4: BACKWARD[4],
    2: BACKWARD[4],
}
HELD = 8192  # classes up to which a thread holds their weights; those of longer rows are read again from the cache
REGISTERS = 128  # of a thread where they are not held, so that a multiprocessor has two rows at once
# Of the last step: what the values follow to float32 rounding, or need not follow.
TOLERANCE = {torch.float32: 0.002, torch.bfloat16: 0.002, torch.float16: 0.0005}


def unfit(x: Tensor, *terms: Tensor | None) -> str:
    """Why these tensors are not for the kernels; empty if they are."""
    if x.shape[-1] > MOST:
        return f"rows of weights have at most {MOST} classes"
    narrow = (torch.float32, torch.bfloat16, torch.float16)
    if any(t is not None and t.dtype not in narrow for t in terms):
        return "weights and bounds must be float32, bfloat16 or float16"
    return ""


@functools.cache
def _processors(device: int) -> int:
    return 2 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _memory(device: int) -> int:
    """Bytes of shared memory of a multiprocessor; the least there are where torch does not know."""
    properties = None if INTERPRETED else torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_multiprocessor", 64 * 1024)


def _tiles(plan: shapes.Plan) -> dict[str, int]:
    return {name: value for name, value in plan.tiles.items() if name != "BLOCK"}


def _lines(plan: shapes.Plan, x: Tensor) -> int:
    """A power of two that is at least the number of lines of 128 bytes that a block of rows has."""
    return max(32, shapes.power_of_2(shapes.cdiv(plan.rows * x.shape[-1] * x.element_size(), 128)))


def _fit(n: int, itemsize: int, both: bool) -> tuple[int, int]:
    """Registers per thread of `shared`, and its STAGES."""
    registers, stages = next((registers, stages) for limit, _, registers, stages in FITS[both][itemsize] if n <= limit)
    if stages > 1 and shapes.vector(n, itemsize) * itemsize < 4:  # too little at once for shared memory
        stages = 1
    return registers, stages


def _programs(device: int, registers: int, warps: int, memory: int) -> int:
    """Programs that run at once. A warp has its registers in one of the four parts of a multiprocessor.

    Beside the scores on their way, shared memory has sums and a part of the system's.
    """
    most = min(16384 // (32 * registers) * 4 // warps, _memory(device) // (memory + 2048))
    return _processors(device) * min(32, max(1, most))


def _skip(plan: shapes.Plan, n: int, itemsize: int) -> int:
    """The first guess of `shared` is made of one class in so many, which are neighbours of one thread."""
    wanted = 1 if n < 1000 else 2 if n < 2048 and itemsize == 4 else 4
    return min(wanted, plan.tiles["C"] // (plan.warps * 32 // plan.rows))


def _float32(value: float) -> float:
    """The nearest float32."""
    return struct.unpack("f", struct.pack("f", value))[0]  # type: ignore[no-any-return]


class _Given:
    """Scores, weights and bounds as the kernels take them."""

    def __init__(self, budget: Budget) -> None:
        x, terms, mask, temperature, _ = budget
        self.n = x.shape[-1]
        self.rows = x.numel() // self.n
        self.x = x.contiguous().view(self.rows, self.n)
        self.m, *self.m_strides = shapes.flat_mask(mask, self.x)
        self.masked = mask is not None
        self.inv_t = shapes.inverse(temperature)
        held = [_term_of(t, x) for t in terms]
        self.pointers = [self.x if t is None else t for t, _ in held]
        self.given = {name: kind for name, (_, kind) in zip(("WEIGHT", "LOWER", "UPPER"), held, strict=True)}
        self.bounded = self.given["LOWER"] + self.given["UPPER"] > 0
        self.both = self.bounded and self.given["WEIGHT"] > 0
        self.at_most = budget.at_most
        self.constants = {"MASKED": self.masked, **self.given, "AT_MOST": self.at_most}


def _term_of(value: Tensor | None, x: Tensor) -> tuple[Tensor | None, int]:
    """A term in an order that the kernels read, and how: 0 if it is the default, 1 if all rows share it, 2 if not."""
    if value is None:
        return None, 0
    if value.ndim < 2 or value.numel() == value.shape[-1]:
        return value.reshape(-1).expand(x.shape[-1]).contiguous(), 1
    return value.expand(x.shape).contiguous(), 2


def _general(budget: Budget) -> Budget:
    """Return the same rows in the form to which all can be brought: in float32, with a mask, weights and bounds."""
    x, terms, mask, temperature, kind = budget
    held = [
        _term_of(x.new_full((), value) if t is None else t, x) for t, value in zip(terms, (1.0, 0.0, 1.0), strict=True)
    ]
    shape = x.shape if any(form == 2 for _, form in held) else x.shape[-1:]
    given = [None if t is None else t.float().expand(shape) for t, _ in held]
    x, _, mask = general_form(x, None, mask)
    return Budget(x, given, mask, temperature, kind)


def forward(budget: Budget, k: Tensor | float, wanted: tuple[bool, ...] | None = None) -> tuple[Tensor, Tensor]:
    """Return y and nu, in float64 ``(..., 1)``; `k` is one number, or float64, ``(..., 1)``.

    `wanted` is that of the backward pass, if there will be one: on a first call it is compiled meanwhile.
    """
    try:
        return _own_forward(budget, k, wanted)
    except Absent:
        x = budget.logits
        if not isinstance(k, Tensor):
            k = torch.full((), k, dtype=torch.float64, device=x.device).expand(*x.shape[:-1], 1)
        with shapes.general_form():
            out, nu = _own_forward(_general(budget), k, None)
        return out.to(x.dtype), nu


def near(x: Tensor, weight: Tensor, lower: Tensor, upper: Tensor, k: Tensor) -> Tensor:
    """Return nu ``(..., 1)`` in the digits of float32, for a search that goes on in float64; all in one shape."""
    terms = [_shared_by_rows(t).float() for t in (weight, lower, upper)]
    with shapes.general_form():  # whose kernels come with the package
        return _own_forward(_general(Budget(x.float(), terms, None, 1.0, "y")), k, None)[1]


def _shared_by_rows(value: Tensor) -> Tensor:
    """Return the one row of a tensor that was expanded to all of them, or the tensor."""
    one = all(step == 0 or size == 1 for step, size in zip(value.stride()[:-1], value.shape[:-1], strict=True))
    return value[(0,) * (value.ndim - 1)] if one and value.numel() > 0 else value


def _own_forward(budget: Budget, k: Tensor | float, wanted: tuple[bool, ...] | None) -> tuple[Tensor, Tensor]:
    logits = budget.logits
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    nu = logits.new_empty((*logits.shape[:-1], 1), dtype=torch.float64)
    if logits.numel() == 0:
        return out, nu.fill_(torch.nan)
    g = _Given(budget)
    k_row: tuple[int, float | None]  # the distance from one budget to the next, or what a float drops of the only one
    if isinstance(k, Tensor):
        one = all(s == 0 or d == 1 for s, d in zip(k.stride(), k.shape, strict=True))
        k, k_row = k if one else k.contiguous(), (0 if one else 1, None)
    else:
        high = _float32(k)
        k, k_row = high, (0, k - high)
    general = None if g.n > shapes.longest(LONGEST) else shapes.shared(g.n)

    def later() -> list[Launch]:
        others = [nu.new_empty(4, dtype=torch.float32) if asked else None for asked in wanted or ()]
        return [_backward(g, general, nu, out, out, nu, others)]

    launches = [_forward(g, general, k, k_row, out, nu)]
    kernel = launches[0].kernel
    if kernel not in (shared, forward_row):  # which settle rows themselves
        launches.append(_settle(g, k, k_row, out, nu))
    launch_all(launches, None if wanted is None else later, shared=kernel in (rare, forward_row))
    return out, nu


def _forward(
    g: _Given, general: shapes.Plan | None, k: Tensor | float, k_row: tuple[int, float | None], out: Tensor, nu: Tensor
) -> Launch:
    """The kernel that solves most rows: for long ones, for a length that is rarely met, for shared weights, or any."""
    pointers, strides = (g.x, g.m, k, *g.pointers, out, nu), (*g.m_strides, *k_row, g.inv_t)
    tolerance = 0.0052 if out.dtype == torch.float32 else 0.05  # of r: the error in nu is at most 0.42 r^3
    constants = {**g.constants, "TOL": tolerance}
    if general is None:
        align, tiles = shapes.start_of_rows(g.n), LONG[out.element_size(), g.bounded]
        constants |= {"ALIGN": align, **tiles, "V": tiles["C"] // (32 * tiles["num_warps"])}
        return Launch(forward_row, (g.rows,), (*pointers, g.n // align, *strides), constants)
    together = not g.masked and max(g.given.values()) < 2
    table = SHARED[g.both] if together else FORWARD
    p = shapes.plan(g.n, table, out.element_size())
    grid = (shapes.cdiv(g.rows, p.rows),)
    if p is general:
        constants |= {"R": p.rows, "C": p.tiles["C"], "W": p.tiles["WA"], "num_warps": p.warps}
        return Launch(rare, grid, (*pointers, g.rows, g.n, *strides), constants)
    if together:
        return _shared(g, p, k, k_row, out, nu)
    few = g.n > HELD and p.warps * REGISTERS <= 1024 and not INTERPRETED
    constants |= {**_tiles(p), "HELD": g.n <= HELD, "num_warps": p.warps, **({"maxnreg": REGISTERS} if few else {})}
    return Launch(resident, grid, (*pointers, g.rows, g.n // p.align, *strides), constants)


def _settle(g: _Given, k: Tensor | float, k_row: tuple[int, float | None], out: Tensor, nu: Tensor) -> Launch:
    """The kernel for the rows that another has left."""
    each = shapes.cdiv(g.rows, 2 * _processors(g.x.get_device()))  # rows per program: all of them run at once
    return Launch(
        settle, (shapes.cdiv(g.rows, each),),
        (g.x, g.m, k, *g.pointers, out, nu, g.rows, g.n, each, *g.m_strides, *k_row, g.inv_t),
        {**SETTLE, **g.constants},
    )  # fmt: skip


def _shared(
    g: _Given, p: shapes.Plan, k: Tensor | float, k_row: tuple[int, float | None], out: Tensor, nu: Tensor
) -> Launch:
    """Rows that share their weights and bounds: as many programs as fit, which take the same number of rows each."""
    registers, stages = _fit(g.n, out.element_size(), g.both)
    tiles = {name: p.tiles[name] for name in ("R", "C", "WA", "WB", "WC", "FULL")}
    blocks = shapes.cdiv(g.rows, p.rows)
    held = tiles["C"] * (tiles["WA"] + tiles["WB"] + tiles["WC"])
    memory = max(stages - 1, 0) * p.rows * held * out.element_size()
    most = _programs(out.get_device(), registers, p.warps, memory)
    if g.n <= 256 and not g.both:  # so short that the last ones are waited for
        most *= 2
    return Launch(
        shared, (shapes.cdiv(blocks, shapes.cdiv(blocks, most)),),
        (g.x, k, *g.pointers, out, nu, g.rows, *k_row, g.inv_t),
        {
            **tiles, **g.given, "AT_MOST": g.at_most, "TOL": TOLERANCE[out.dtype], "LIGHT": out.dtype != torch.float32,
            "LINES": _lines(p, g.x), "N": g.n, "SKIP": _skip(p, g.n, out.element_size()), "STAGES": stages,
            "STEP": 32 * p.warps, "num_warps": p.warps, **({} if INTERPRETED else {"maxnreg": registers}),
        },
    )  # fmt: skip


def backward(
    budget: Budget, nu: Tensor, grad: Tensor, wanted: tuple[bool, ...]
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Return the gradients of logits, k, and of those of weight, lower and upper that are wanted."""
    try:
        return _own_backward(budget, nu, grad, wanted)
    except Absent:
        every = (any(wanted),) * 3
        with shapes.general_form():
            grad_x, grad_k, others = _own_backward(_general(budget), nu, grad.float(), every)
        kept = [other if asked else None for other, asked in zip(others, wanted, strict=True)]
        return grad_x.to(budget.logits.dtype), grad_k, kept


def _own_backward(
    budget: Budget, nu: Tensor, grad: Tensor, wanted: tuple[bool, ...]
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    logits = budget.logits
    grad_x, grad_k = torch.empty_like(logits, memory_format=torch.contiguous_format), torch.empty_like(nu)
    others = [torch.empty_like(grad_x, dtype=torch.float32) if asked else None for asked in wanted]
    if logits.numel() == 0:
        return grad_x, grad_k.zero_(), others
    g = _Given(budget)
    table = BACKWARD_TO_TERMS if any(wanted) else BACKWARD
    p = None if g.n > shapes.longest(LONGEST) else shapes.plan(g.n, table, logits.element_size())
    own = _backward(g, p, nu, grad.contiguous(), grad_x, grad_k, others)
    launch_all([own], shared=p is None or p is shapes.shared(g.n))
    return grad_x, grad_k, others


def _backward(
    g: _Given, p: shapes.Plan | None, nu: Tensor, grad: Tensor, grad_x: Tensor, grad_k: Tensor,
    others: list[Tensor | None],
) -> Launch:  # fmt: skip
    """Launch the gradients of rows that programs hold by a plan, or of longer ones."""
    wanted = [other is not None for other in others]
    pointers = (
        g.x, g.m, *g.pointers, nu, grad, grad_x, grad_k, *(grad_x if other is None else other for other in others),
    )  # fmt: skip
    constants = g.constants | dict(zip(("BY_W", "BY_L", "BY_U"), wanted, strict=True))
    if p is None:
        align = shapes.start_of_rows(g.n)
        sizes = (g.n // align, *g.m_strides, g.inv_t)
        return Launch(backward_row, (g.rows,), (*pointers, *sizes), {"ALIGN": align, **constants, **STREAM})
    # With a few registers more, a multiprocessor has one row of 16 warps at a time instead of two.
    few = p.warps == 16 and g.n <= HELD and p is not shapes.shared(g.n) and not any(wanted) and not INTERPRETED
    # Up to 64 classes per thread; the weights of more would take registers from the scores and the upstream gradient.
    held = p.tiles["C"] * (p.tiles["WA"] + p.tiles["WB"] + p.tiles["WC"]) <= 64 * 32 * p.warps // p.rows
    options = {**_tiles(p), **constants, "HELD": held, "num_warps": p.warps, **({"maxnreg": 64} if few else {})}
    sizes = (g.rows, g.n // p.align, *g.m_strides, g.inv_t)
    return Launch(gradients, (shapes.cdiv(g.rows, p.rows),), (*pointers, *sizes), options)
