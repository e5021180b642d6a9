/* What follows nu, for one type and one instruction set: the logarithms of values, and the backward pass; after
   weighted_rows.h, whose names it uses. */

/* At the point z of class i: outer = 1 / (1 + exp(-|z|)), inner = 1 - outer, and h = width s (1 - s), where s is the sigmoid
   of z. */
#define POINT_BUDGET                                                            \
    REAL w = weight[i], width = upper[i] - lower[i];                            \
    REAL z = (x[i] + w * high) + w * low;                                       \
    z = NAME(finite)(x[i]) ? z : x[i];                                          \
    REAL e = NAME(exp)(-NAME(abs)(z), EXP_LOW, EXP_HIGH);                       \
    e = NAME(abs)(z) > -EXP_LOW ? R(0.0) : e;                                   \
    REAL outer = R(1.0) / (R(1.0) + e), inner = e * outer;                      \
    REAL h = width * (outer * inner);

/* The point of a class in double, for any nu. */
INLINE double NAME(any_point)(double x, double w, double nu) {
    return !isfinite(nu) ? NAME(end_point)(x, w, nu) : isinf(x) ? x : x + w * nu;
}

/* ---- Logarithms: log upper + log s. Lower bounds are 0. ---- */

#define SUBNORMAL (REAL_BYTES == 4 ? 0x1p-126 : 0x1p-1022)

/* The logarithm of a bound; of 0 it is -inf. */
INLINE REAL NAME(budget_log_bound)(REAL upper) {
    int tiny = upper < (REAL)SUBNORMAL;
    REAL found = NAME(log)(tiny ? upper * R(0x1p60) : upper, R(0.0)) - (tiny ? R(41.5888308335967186) : R(0.0));
    return upper > 0 ? found : -INFINITE;
}

/* For any row: from nu alone, one rounding at the end. */
FN void NAME(budget_log_any)(const NAME(given) * g, double nu, REAL *out) {
    for (int64_t i = 0; i < g->n; i++) {
        double z = NAME(any_point)(g->x[i], g->weight[i], nu);
        out[i] = nu != nu ? (REAL)NAN : (REAL)(log((double)g->upper[i]) + log_sigmoid(z));
    }
}

INLINE void NAME(budget_log)(const NAME(given) * g, double nu, REAL *restrict out, int bounded) {
    const REAL *restrict x = g->x, *restrict weight = g->weight, *restrict upper = g->upper;
    REAL high = (REAL)nu, low = (REAL)(nu - (double)high);
    PRAGMA(omp simd)
    for (int64_t i = 0; i < g->n; i++) {
        REAL z = (x[i] + weight[i] * high) + weight[i] * low;
        z = NAME(finite)(x[i]) ? z : x[i];
        REAL e = NAME(exp)(-NAME(abs)(z), EXP_LOW, EXP_HIGH);
        e = NAME(abs)(z) > -EXP_LOW ? R(0.0) : e;
        REAL found = (z < 0 ? z : R(0.0)) - NAME(log1p)(e);
        out[i] = bounded ? NAME(budget_log_bound)(upper[i]) + found : found;
    }
}

/* Solve rows for nu, and write the logarithms of their values. */
FN void NAME(weighted_log)(const struct weighted *call, int64_t index, int count, struct budget_space *space) {
    struct weighted bare = *call;
    bare.out = 0;
    space->search(&bare, index, count, space);
    for (int64_t at = index; at < index + count; at++) {
        NAME(given) g = NAME(given_row)(call, at, space);
        REAL *out = (REAL *)call->out + at * g.n;
        double nu = call->nu[at];
        if (!NAME(finite)((REAL)nu))
            NAME(budget_log_any)(&g, nu, out);
        else if (g.bounded)
            NAME(budget_log)(&g, nu, out, 1);
        else
            NAME(budget_log)(&g, nu, out, 0);
    }
}

/* ---- Backward. An upstream gradient u pulls at the point of its class by t, which is h u for values, (1 - s) u for their
   logarithms, and 0 for nu. With given = (sum w t + the upstream gradient of nu) / sum w^2 h, which is the gradient of k,
   that of x is t - w h given, and that of the weight nu (t - w h given) - y given. Those of lower and upper are
   (1 - s) (u - w given) and s (u - w given) for values, the same without u for nu, and that of upper is
   u / upper - s w given for logarithms. ---- */

/* The gradients of a row without a solution: nan if any of its values is used, else 0. */
FN void NAME(weighted_backward_none)(const struct weighted *call, const REAL *u, int64_t index, int64_t n) {
    REAL *all[] = {(REAL *)call->out, (REAL *)call->grad_weight, (REAL *)call->grad_lower, (REAL *)call->grad_upper};
    double gone = call->grad_nu && call->grad_nu[index] != 0 ? (double)NAN : 0;
    for (int64_t i = 0; i < n && u; i++) gone = u[i] != 0 ? (double)NAN : gone;
    for (int each = 0; each < 4; each++)
        for (int64_t i = 0; i < n && all[each]; i++) all[each][index * n + i] = (REAL)gone;
    if (call->grad_k) call->grad_k[index] = gone;
}

/* Where digits are missing, or nu is infinite: the same in double, with h divided by exp(peak). */
FN void NAME(weighted_backward_any)(const struct weighted *call, const NAME(given) * g, int64_t index) {
    const REAL *u = call->grad ? (const REAL *)call->grad + index * g->n : 0;
    double nu = call->nu[index], mass = 0, peak = -INFINITY, of_h = 0, rest = call->grad_nu ? call->grad_nu[index] : 0;
    int finite = isfinite(nu), kind = (int)call->kind;
    if (nu != nu) { /* no solution: what is bad in the row stays there, and out of the gradients if it is not used */
        NAME(weighted_backward_none)(call, u, index, g->n);
        return;
    }
    for (int64_t i = 0; i < g->n; i++) {
        double x = g->x[i], w = g->weight[i], width = (double)g->upper[i] - (double)g->lower[i];
        if (isfinite(x) && w != 0 && width > 0) peak = fmax(peak, -fabs(NAME(any_point)(x, w, nu)));
    }
    for (int64_t i = 0; i < g->n; i++) {
        double x = g->x[i], w = g->weight[i], width = (double)g->upper[i] - (double)g->lower[i];
        double z = NAME(any_point)(x, w, nu), tail = exp(-fabs(z)), over = 1 / (1 + tail);
        double h = isfinite(x) && finite ? exp(-fabs(z) - peak) * over * over * width : 0;
        mass += w * w * h;
        if (kind == KIND_Y) of_h += w * h * (double)u[i];
        if (kind == KIND_LOG && isfinite(x) && isfinite(z) && width > 0)
            rest += w * (z > 0 ? tail * over : over) * (double)u[i];
    }
    /* What comes with h has its factor, and `rest` has not: beyond the range of numbers there is no derivative. */
    int solved = mass > 0 && !(call->at_most && nu == 0);
    double given = solved ? of_h / mass : 0, moved = solved ? rest / mass : 0, whole = mass * exp(peak);
    given += solved && whole >= BUDGET_SMALL ? rest / whole : 0;
    for (int64_t i = 0; i < g->n; i++) {
        double x = g->x[i], w = g->weight[i], l = g->lower[i], width = (double)g->upper[i] - l;
        double z = NAME(any_point)(x, w, nu), tail = exp(-fabs(z)), over = 1 / (1 + tail);
        double s = z > 0 ? over : tail * over, o = z > 0 ? tail * over : over, v = u ? (double)u[i] : 0, slope;
        int64_t at = index * g->n + i;
        if (kind == KIND_Y) {
            v -= w * given;
            slope = isfinite(x) && isfinite(z) ? width * s * o * v : 0;
        } else {
            double h = isfinite(x) && finite ? exp(-fabs(z) - peak) * over * over * width : 0;
            slope = -w * h * moved;
            if (kind == KIND_LOG && isfinite(x) && isfinite(z) && width > 0) slope += o * v;
            v = -w * given;
        }
        ((REAL *)call->out)[at] = (REAL)(slope / call->temperature);
        if (call->grad_weight) ((REAL *)call->grad_weight)[at] = (REAL)((finite ? nu * slope : 0) - given * (l + width * s));
        if (call->grad_lower) ((REAL *)call->grad_lower)[at] = (REAL)(o * v);
        v = kind == KIND_LOG && width > 0 ? s * v + (double)u[i] / width : s * v;
        if (call->grad_upper) ((REAL *)call->grad_upper)[at] = (REAL)v;
    }
    if (call->grad_k) call->grad_k[index] = given;
}

/* What reaches the point of class i; `part` is `given`. */
INLINE REAL NAME(budget_slope)(REAL u, REAL w, REAL h, REAL miss, REAL part, int kind) {
    return kind == KIND_Y ? h * (u - w * part) : kind == KIND_LOG ? miss * u - h * (w * part) : -h * (w * part);
}

/* The upstream gradient of a class; for a logarithm, where scores and bounds leave it one. */
#define UPSTREAM (kind == KIND_NU ? R(0.0) : kind == KIND_LOG && !(NAME(finite)(x[i]) && width > 0) ? R(0.0) : u[i])
#define MISS (z > 0 ? inner : outer)

INLINE void NAME(budget_backward)(const struct weighted *call, const NAME(given) * g, int64_t at, int kind) {
    int64_t n = g->n;
    double nu = call->nu[at], mass = 0, pull = call->grad_nu ? call->grad_nu[at] : 0;
    REAL largest = 0;
    const REAL *restrict x = g->x, *restrict weight = g->weight, *restrict lower = g->lower;
    const REAL *restrict upper = g->upper, *restrict u = kind == KIND_NU ? 0 : (const REAL *)call->grad + at * n;
    REAL *restrict out = (REAL *)call->out + at * n;
    REAL high = (REAL)nu, low = NAME(finite)(high) ? (REAL)(nu - (double)high) : R(0.0);
    PRAGMA(omp simd reduction(+ : mass, pull) reduction(max : largest))
    for (int64_t i = 0; i < n; i++) {
        POINT_BUDGET
        out[i] = h;
        REAL size = NAME(abs)(w);
        double wh = (double)w * (double)h;
        mass += wh * (double)w;
        if (kind == KIND_Y) pull += wh * (double)u[i];
        if (kind == KIND_LOG) pull += (double)w * (double)(MISS * UPSTREAM);
        largest = size > largest ? size : largest;
    }
    if (!(mass > SMALLEST_SUM * (double)largest * (double)largest)) {
        NAME(weighted_backward_any)(call, g, at);
        return;
    }
    double share = call->at_most && nu == 0 ? 0 : pull / mass;
    if (call->grad_k) call->grad_k[at] = share;
    REAL part = (REAL)share, over = (REAL)(1 / call->temperature);
    if (call->grad_weight) {
        REAL *restrict by = (REAL *)call->grad_weight + at * n;
        PRAGMA(omp simd)
        for (int64_t i = 0; i < n; i++) {
            POINT_BUDGET
            REAL s = z > 0 ? outer : inner;
            by[i] = high * NAME(budget_slope)(UPSTREAM, w, h, MISS, part, kind) - part * (lower[i] + width * s);
        }
    }
    if (call->grad_lower) {
        REAL *restrict by = (REAL *)call->grad_lower + at * n;
        PRAGMA(omp simd)
        for (int64_t i = 0; i < n; i++) {
            POINT_BUDGET
            (void)h;
            by[i] = MISS * (UPSTREAM - w * part);
        }
    }
    if (call->grad_upper) {
        REAL *restrict by = (REAL *)call->grad_upper + at * n;
        PRAGMA(omp simd)
        for (int64_t i = 0; i < n; i++) {
            POINT_BUDGET
            REAL s = z > 0 ? outer : inner, own = kind == KIND_Y ? s * (u[i] - w * part) : -s * (w * part);
            by[i] = kind == KIND_LOG && width > 0 ? own + u[i] / width : own;
            (void)h;
        }
    }
    if (kind == KIND_LOG) {
        PRAGMA(omp simd)
        for (int64_t i = 0; i < n; i++) {
            POINT_BUDGET
            out[i] = NAME(budget_slope)(UPSTREAM, w, h, MISS, part, kind) * over;
        }
    } else {
        PRAGMA(omp simd)
        for (int64_t i = 0; i < n; i++)
            out[i] = NAME(budget_slope)(kind == KIND_Y ? u[i] : R(0.0), weight[i], out[i], R(0.0), part, kind) * over;
    }
}

FN void NAME(weighted_backward)(const struct weighted *call, int64_t index, int count, struct budget_space *space) {
    for (int64_t at = index; at < index + count; at++) {
        NAME(given) g = NAME(given_row)(call, at, space);
        if (!isfinite(call->nu[at]))
            NAME(weighted_backward_any)(call, &g, at);
        else if (call->kind == KIND_Y)
            NAME(budget_backward)(call, &g, at, KIND_Y);
        else if (call->kind == KIND_LOG)
            NAME(budget_backward)(call, &g, at, KIND_LOG);
        else
            NAME(budget_backward)(call, &g, at, KIND_NU);
    }
}

#undef POINT_BUDGET
#undef SUBNORMAL
#undef UPSTREAM
#undef MISS
