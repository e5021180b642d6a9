"""The rows with weights and bounds that the fast kernels leave: in float64, on any row."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import triton
import triton.language as tl

from lastlayer._triton.weighted_parts import budget_of, scores, term

EPS64 = tl.constexpr(2.220446049250313e-16)


@triton.jit
def _block(
    x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, cols, inv_t, MASKED: tl.constexpr, WEIGHT: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr,
):  # fmt: skip
    """Score, weight and bounds of some classes of one row, in float64; a weight of 0 beyond the row."""
    x = scores(x_ptr, m_ptr, row, m_row, m_col, n, cols, inv_t, MASKED).to(tl.float64)
    weight = term(w_ptr, row, n if WEIGHT == 2 else 0, cols, n, WEIGHT > 0, 1.0).to(tl.float64)
    lower = term(l_ptr, row, n if LOWER == 2 else 0, cols, n, LOWER > 0, 0.0).to(tl.float64)
    upper = term(u_ptr, row, n if UPPER == 2 else 0, cols, n, UPPER > 0, 1.0).to(tl.float64)
    return x, tl.where(cols < n, weight, 0.0), lower, upper


@triton.jit
def _middle(lo, hi):
    """A point between: halves the orders of magnitude of a wide bracket, else the bracket."""
    far_lo = tl.where(lo < 0, -1.0, 1.0) * tl.log(tl.abs(lo) * 1e3 + 1)
    far_hi = tl.where(hi < 0, -1.0, 1.0) * tl.log(tl.abs(hi) * 1e3 + 1)
    mean = (far_lo + far_hi) / 2
    by_order = tl.where(mean < 0, -1.0, 1.0) * (tl.exp(tl.minimum(tl.abs(mean), 700.0)) - 1) / 1e3
    return tl.where((by_order > lo) & (by_order < hi), by_order, lo / 2 + hi / 2)


@triton.jit(do_not_specialize=["rows"])
def settle(
    x_ptr, m_ptr, k_ptr, w_ptr, l_ptr, u_ptr, out_ptr, nu_ptr, rows, n, m_row, m_col, k_row, k_low, inv_t,
    GROUP: tl.constexpr, C: tl.constexpr, MASKED: tl.constexpr, WEIGHT: tl.constexpr, LOWER: tl.constexpr,
    UPPER: tl.constexpr, AT_MOST: tl.constexpr,
):  # fmt: skip
    """The rows that `resident` has left, in float64: `_solve` and `_root` of `lastlayer.project.weighted`."""
    first = tl.program_id(0).to(tl.int64) * GROUP
    seen = tl.load(nu_ptr + tl.minimum(first + tl.arange(0, GROUP), rows - 1))
    left = tl.where(tl.max((seen != seen).to(tl.int32), 0) > 0, GROUP, 0)  # as a rule none: one look at all of them
    for i in range(left):
        row = tl.minimum(first + i, rows - 1)
        found = tl.load(nu_ptr + row)
        if found != found:
            k = budget_of(k_ptr, k_low, row, k_row)
            sure = k * 0.0
            total = k * 0.0
            largest = k * 0.0
            wrong = tl.where(k == k, 0, 1)
            for start in range(0, n, C):
                cols = start + tl.arange(0, C)
                x, weight, lower, upper = _block(
                    x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, cols, inv_t,
                    MASKED, WEIGHT, LOWER, UPPER,
                )  # fmt: skip
                live = tl.abs(x) < float("inf")
                width = upper - lower
                sound = (width >= 0) & (width < float("inf")) & (tl.abs(weight) < float("inf")) & (x == x)
                bad = (cols < n) & (sound == 0)
                wrong += tl.sum(bad.to(tl.int32), 0)
                nearest = tl.where(live, tl.where(weight < 0, upper, lower), tl.where(x > 0, upper, lower))
                sure += tl.sum(tl.where(weight == 0, 0.0, weight * nearest), 0)
                total += tl.sum(tl.where(live, tl.abs(weight) * width, 0.0), 0)
                largest = tl.maximum(largest, tl.max(tl.abs(weight), 0))
            c = k - sure
            rest = total - c
            slack = (total + tl.abs(c)) * EPS64 * 4
            end = tl.where(
                tl.abs(c) <= slack, float("-inf"), tl.where(tl.abs(rest) <= slack, float("inf"), float("nan"))
            )
            nu = tl.where(wrong > 0, float("nan"), end).to(tl.float64)
            if (c > 0) & (rest > 0) & (wrong == 0):
                level = tl.log(c) - tl.log(rest)
                lo = k * 0.0 + float("inf")
                hi = k * 0.0 - float("inf")
                for start in range(0, n, C):
                    cols = start + tl.arange(0, C)
                    x, weight, lower, upper = _block(
                        x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, cols, inv_t,
                        MASKED, WEIGHT, LOWER, UPPER,
                    )  # fmt: skip
                    live = (tl.abs(x) < float("inf")) & (weight != 0) & (upper > lower)
                    size = tl.where(live, tl.abs(weight), 1.0)
                    shift = (level - tl.where(live, tl.where(weight < 0, -x, x), 0.0)) / size
                    lo = tl.minimum(lo, tl.min(tl.where(live, shift, float("inf")), 0))
                    hi = tl.maximum(hi, tl.max(tl.where(live, shift, float("-inf")), 0))
                few = c <= rest
                goal = tl.minimum(c, rest)
                nu = _middle(lo, hi)
                before = hi - lo
                step = 0
                while step < 200:
                    got = k * 0.0
                    slope = k * 0.0
                    noise = k * 0.0
                    for start in range(0, n, C):
                        cols = start + tl.arange(0, C)
                        x, weight, lower, upper = _block(
                            x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, cols, inv_t,
                            MASKED, WEIGHT, LOWER, UPPER,
                        )  # fmt: skip
                        live = tl.abs(x) < float("inf")
                        w = tl.where(live, tl.abs(weight), 0.0)
                        z = tl.where(live, tl.where(weight < 0, -x, x), 0.0)
                        d = z + w * nu
                        tail = tl.exp(-tl.minimum(tl.abs(d), 700.0))
                        outer = 1 / (1 + tail)
                        inner = tail * outer
                        y = tl.where(d > 0, outer, inner)
                        v = tl.where(d > 0, inner, outer)
                        a = w * (upper - lower)
                        got += tl.sum(a * tl.where(few, y, v), 0)
                        slope += tl.sum(w * a * (y * v), 0)
                        noise += tl.sum(a * (y * v) * (tl.abs(d) + tl.abs(z)), 0)
                    f = tl.where(few, got - goal, goal - got)
                    lo = tl.where(f <= 0, nu, lo)
                    hi = tl.where(f >= 0, nu, hi)
                    done = (tl.abs(f) <= (goal + noise) * EPS64 * 2) | (hi - lo <= tl.abs(nu) * EPS64 * 2)
                    newton = nu - tl.where(few, 1.0, -1.0) * (tl.log(got) - tl.log(goal)) * got / slope
                    kept = (newton > lo) & (newton < hi)
                    if step % 3 == 2:
                        kept = kept & (hi - lo <= before / 2)
                        before = hi - lo
                    nu = tl.where(done, nu, tl.where(kept, newton, _middle(lo, hi)))
                    step = tl.where(done, 200, step + 1)
            if AT_MOST:
                nu = tl.where((wrong == 0) & ((nu > 0) | (rest <= 0)), 0.0, nu).to(tl.float64)
            tl.store(nu_ptr + row, nu)
            for start in range(0, n, C):
                cols = start + tl.arange(0, C)
                x, weight, lower, upper = _block(
                    x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, cols, inv_t,
                    MASKED, WEIGHT, LOWER, UPPER,
                )  # fmt: skip
                move = tl.where((weight == 0) | (tl.abs(x) == float("inf")), 0.0, weight * nu)
                t = x + move
                tail = tl.exp(-tl.minimum(tl.abs(t), 700.0))
                tail = tl.where(tl.abs(t) < 700, tail, 0.0)
                small = (upper - lower) * (tail / (1 + tail))
                out = tl.where(t > 0, upper - small, lower + small)
                out = tl.where(nu == nu, out, float("nan")).to(tl.float32)
                tl.store(out_ptr + row * n + cols, out.to(out_ptr.dtype.element_ty), mask=cols < n)
