"""The projection with weights and bounds on the GPU: values, and their gradients.

Rows of up to `LONGEST` classes are held in registers and searched in float32, as `lastlayer/_native/weighted_rows.h`
does; longer ones are streamed. A row that float32 has too few digits for, or that has nothing to search, is left to a
last kernel, which works in float64.
"""

import functools
import struct

import torch
from torch import Tensor

from lastlayer._threshold.budget import Budget
from lastlayer._triton import INTERPRETED
from lastlayer._triton import plan as shapes
from lastlayer._triton.launch import launch
from lastlayer._triton.weighted_gradients import gradients
from lastlayer._triton.weighted_long import backward_row, forward_row
from lastlayer._triton.weighted_resident import resident
from lastlayer._triton.weighted_settle import settle
from lastlayer._triton.weighted_shared import shared

LONGEST = 16384  # classes of a row held in registers, with their weights
MOST = 1 << 22  # classes of a row; one program takes longer for more of them than plain torch
STREAM = {"C": 2048, "num_warps": 8}  # classes at a time of a longer row
LONG: dict[int, dict[str, int]] = {  # the same for its values; a row of float32 has a multiprocessor to itself
    4: {"W": 2, "C": 4096, "num_warps": 32},
    2: {"W": 2, "C": 2048, "num_warps": 8},
}
# Up to a number of classes per row, the number of them that a thread holds.
FORWARD: dict[int, shapes.Table] = {
    4: ((128, 64), (256, 32), (768, 16), (8192, 32), (LONGEST, 40)),
    2: ((128, 64), (256, 32), (768, 16), (8192, 32), (LONGEST, 40)),
}
SHARED: dict[int, shapes.Table] = {
    4: ((256, 32), (768, 16), (8192, 32), (LONGEST, 40)),
    2: ((256, 32), (768, 16), (8192, 32), (LONGEST, 40)),
}
BACKWARD: dict[int, shapes.Table] = {
    4: ((8192, 8), (LONGEST, 20)),
    2: ((8192, 8), (LONGEST, 20)),
}
HELD = 8192  # classes up to which a thread holds their weights; those of longer rows are read again from the cache
MOST_REGISTERS = 255  # of a thread
REGISTERS = 128  # of a thread where they are not held, so that a multiprocessor has two rows at once
WARPS = 32  # per multiprocessor, where programs take rows in turn


def unfit(x: Tensor, *terms: Tensor | None) -> str:
    """Why these tensors are not for the kernels; empty if they are."""
    if x.shape[-1] > MOST:
        return f"rows of weights have at most {MOST} classes"
    narrow = (torch.float32, torch.bfloat16, torch.float16)
    if any(t is not None and t.dtype not in narrow for t in terms):
        return "weights and bounds must be float32, bfloat16 or float16"
    return ""


@functools.cache
def _programs(device: int) -> int:
    return 2 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


def _tiles(plan: shapes.Plan) -> dict[str, int]:
    return {name: value for name, value in plan.tiles.items() if name != "BLOCK"}


def _lines(plan: shapes.Plan, x: Tensor) -> int:
    """A power of two that is at least the number of lines of 128 bytes that a block of rows has."""
    return max(32, shapes.power_of_2(shapes.cdiv(plan.rows * x.shape[-1] * x.element_size(), 128)))


def _registers(n: int, itemsize: int, bounded: bool, warps: int) -> int:
    """Registers per thread of `shared`, the fastest that were tried: spilled ones take long to come back.

    A row of 8,193 to 10,240 classes has a multiprocessor to itself, and registers for the scores of the next.
    """
    if n > HELD:
        wanted = MOST_REGISTERS if itemsize == 4 or bounded else REGISTERS
    else:
        wanted = 168 if bounded or n <= 1024 else REGISTERS
    return min(wanted, 65536 // (32 * warps) // 8 * 8)


def _skip(plan: shapes.Plan, n: int) -> int:
    """The first guess of `shared` is made of one class in so many, which are neighbours of one thread."""
    return min(1 if n < 1000 else 2 if n < 2048 else 4, plan.tiles["C"] // (plan.warps * 32 // plan.rows))


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
        self.inv_t = None if temperature == 1 else 1.0 / temperature
        held = [_term_of(t, x) for t in terms]
        self.pointers = [self.x if t is None else t for t, _ in held]
        self.given = {name: kind for name, (_, kind) in zip(("WEIGHT", "LOWER", "UPPER"), held, strict=True)}


def _term_of(value: Tensor | None, x: Tensor) -> tuple[Tensor | None, int]:
    """A term in an order that the kernels read, and how: 0 if it is the default, 1 if all rows share it, 2 if not."""
    if value is None:
        return None, 0
    if value.ndim < 2 or value.numel() == value.shape[-1]:
        return value.reshape(-1).expand(x.shape[-1]).contiguous(), 1
    return value.expand(x.shape).contiguous(), 2


def forward(budget: Budget, k: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return y and nu, in float64 ``(..., 1)``; `k` is one number, or float64, ``(..., 1)``."""
    logits, at_most = budget.logits, budget.at_most
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
    constants = {"MASKED": g.masked, **g.given, "AT_MOST": at_most}
    tolerance = 0.0052 if logits.dtype == torch.float32 else 0.05  # of r: the error in nu is at most 0.42 r^3
    if g.n > LONGEST:
        align = shapes.alignment(g.n)
        launch(
            forward_row, (g.rows,), g.x, g.m, k, *g.pointers, out, nu, g.n // align, *g.m_strides, *k_row,
            g.inv_t, ALIGN=align, **constants, TOL=tolerance, **LONG[logits.element_size()],
        )  # fmt: skip
    elif not g.masked and max(g.given.values()) < 2:
        p = shapes.plan(g.n, SHARED, logits.element_size())
        registers = _registers(g.n, logits.element_size(), g.given["LOWER"] + g.given["UPPER"] > 0, p.warps)
        programs = _programs(logits.get_device()) * max(1, 4 * (512 // registers) // p.warps)  # as many as fit
        launch(
            shared, (min(programs, shapes.cdiv(g.rows, p.rows)),), g.x, k, *g.pointers, out, nu, g.rows,
            g.n // p.align, *k_row, g.inv_t, **_tiles(p), **g.given, AT_MOST=at_most,
            TOL=0.002 if logits.dtype == torch.float32 else 0.02, PREFETCH=1 if registers == MOST_REGISTERS else 2,
            LINES=_lines(p, g.x), N=g.n if p.align == shapes.alignment(g.n) else 0, SKIP=_skip(p, g.n),
            num_warps=p.warps, **({} if INTERPRETED else {"maxnreg": registers}),
        )  # fmt: skip
    else:
        p = shapes.plan(g.n, FORWARD, logits.element_size())
        few = g.n > HELD and p.warps * REGISTERS <= 1024 and not INTERPRETED
        options = {"maxnreg": REGISTERS} if few else {}
        launch(
            resident, (shapes.cdiv(g.rows, p.rows),), g.x, g.m, k, *g.pointers, out, nu, g.rows, g.n // p.align,
            *g.m_strides, *k_row, g.inv_t, **_tiles(p), **constants, TOL=tolerance, HELD=g.n <= HELD,
            num_warps=p.warps, **options,
        )  # fmt: skip
    group = min(256, max(1, shapes.power_of_2(g.rows // 2048 + 1)))
    launch(
        settle, (shapes.cdiv(g.rows, group),), g.x, g.m, k, *g.pointers, out, nu, g.rows, g.n, *g.m_strides,
        *k_row, g.inv_t, GROUP=group, C=min(max(32, shapes.power_of_2(g.n)), 1024), **constants, num_warps=4,
    )  # fmt: skip
    return out, nu


def backward(
    budget: Budget, nu: Tensor, grad: Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Return the gradients of logits, k, and of those of weight, lower and upper that are wanted."""
    logits = budget.logits
    grad_x, grad_k = torch.empty_like(logits, memory_format=torch.contiguous_format), torch.empty_like(nu)
    others = [torch.empty_like(grad_x, dtype=torch.float32) if asked else None for asked in wanted]
    if logits.numel() == 0:
        return grad_x, grad_k.zero_(), others
    g = _Given(budget)
    arguments = (
        g.x, g.m, *g.pointers, nu, grad.contiguous(), grad_x, grad_k, *(grad_x if o is None else o for o in others),
    )  # fmt: skip
    constants = {"MASKED": g.masked, **g.given, "AT_MOST": budget.at_most}
    constants |= dict(zip(("BY_W", "BY_L", "BY_U"), wanted, strict=True))
    if g.n > LONGEST:
        align = shapes.alignment(g.n)
        launch(
            backward_row, (g.rows,), *arguments, g.n // align, *g.m_strides, g.inv_t, ALIGN=align, **constants, **STREAM
        )
    else:
        p = shapes.plan(g.n, BACKWARD, logits.element_size())
        # With a few registers more, a multiprocessor has one row of 16 warps at a time instead of two.
        few = p.warps == 16 and g.n <= HELD and not any(wanted) and not INTERPRETED
        launch(
            gradients, (shapes.cdiv(g.rows, p.rows),), *arguments, g.rows, g.n // p.align, *g.m_strides, g.inv_t,
            **_tiles(p), **constants, num_warps=p.warps, **({"maxnreg": 64} if few else {}),
        )  # fmt: skip
    return grad_x, grad_k, others
