/* Rows with weights and bounds, for one type and one instruction set; after lml_rows.h and lml_tile.h, whose names it
   uses. lastlayer/project/weighted.py has the same in torch, and the reasons.

   y = lower + (upper - lower) sigmoid(x + w nu) with sum w y = k. A class of negative weight is turned around, and the
   weights are divided by a power of two, so that 0 <= w <= 1: what is left is sum a sigmoid(z + w nu) = c with
   a = w (upper - lower) and z = x or -x. As no weight is above 1, the search has the certificates of lml: after a step
   of Halley's the error in nu is at most 0.42 |r|^3, where r is Newton's step.

   Exponentials are taken at a center that REAL holds, with one rounding of z + w nu. The last step, which is short, is
   taken in y itself. A row for which REAL has too few digits is searched again in double, and one on which that does not
   end by `weighted_hard`, which holds on any row. */

#define FN TARGET static
#define INLINE __attribute__((always_inline)) TARGET static inline
#define PRAGMA(text) _Pragma(#text)
#define STEPS (VECTOR < 32 ? 8 : 32)
#define BLOCK (STEPS * LANES)
#define VEC NAME(vector)
#define EACH_LANE PRAGMA(omp simd) for (int i = 0; i < LANES; i++)

/* A row to be searched; the arrays have room for whole vectors, and a is 0 in what is not a class. */
typedef struct {
    int64_t n;
    const REAL *z;
    REAL *w, *a, *e;
    const REAL *ahead, *ahead_own; /* the scores and weights of the next row, fetched during the passes */
    int special, measured;       /* has weights of its own, or infinite scores; has its moments */
    int sampled;                 /* these are of some classes only, and no other has been looked at yet */
    int plain;                   /* y is a sigmoid of z, or rises with it from a bound that is not below 0 */
    double z1, z2, zw, farthest; /* sums of a z, a z^2 and a z w; the largest |z|, or infinity */
    struct shares shares;
    struct budget b;
} NAME(budget_row);

INLINE VEC NAME(fill)(REAL value) {
    VEC zero = {0};
    return value - zero;
}

/* 1 / d to a unit in the last place, where the processor has an estimate: by a step of Newton's, in a fraction of the time
   of a division. A `rough` one is the estimate itself, to 4e-4. */
INLINE VEC NAME(reciprocal)(VEC d, int rough) {
#if REAL_BYTES == 4 && VECTOR == 64
    VEC y = __builtin_ia32_rcp14ps512_mask(d, (VEC){0}, (unsigned short)-1);
    return rough ? y : y + y * (R(1.0) - d * y);
#elif REAL_BYTES == 4 && VECTOR == 32
    return rough ? __builtin_ia32_rcpps256(d) : R(1.0) / d;
#else
    (void)rough;
    return R(1.0) / d;
#endif
}

/* What a pass sums at a point with q = (1 - y) / y: f = sum a y or, on the side where that is the smaller, sum a (1 - y);
   and the first derivatives of sum a y, `more` than one, and all `three`. */
#define WEIGH(q, a, w, rough, more, three)                                   \
    VEC y = NAME(reciprocal)(R(1.0) + q, rough), v = q * y;                  \
    VEC h = few ? y - y * y : y * v, t = w * (a * h), t2 = w * t;            \
    f += a * SIDE(y, v);                                                     \
    s1 += t;                                                                 \
    if (more) s2 += t2 * (few ? R(1.0) - R(2.0) * y : v - y);                \
    if (three) s3 += (w * t2) * (R(1.0) - R(6.0) * h);
#define FETCH(address) __builtin_prefetch(address, 0, 2); /* a line, where short rows leave the processor no pattern */
#define FETCH_TO_WRITE(address) __builtin_prefetch(address, 1, 2);
#define THREE (REAL_BYTES == 8) /* whether later passes sum three derivatives: the first takes float near enough */
#define SAMPLE 1024             /* classes of a long row that its first guess is made of, at the least */
#define SIDE(y, v) (few ? (y) : NAME(select)(side, y, v))

/* exp(t), as at the ends of what REAL holds beyond them. */
INLINE VEC NAME(point_exp)(VEC t) {
    VEC low = NAME(fill)(EXP_LOW), high = -low;
    t = NAME(select)(t < high, t, high);
    return NAME(vector_exp)(NAME(select)(t > low, t, low));
}

/* exp(t) to 1e-4, for the first pass of a search. */
INLINE VEC NAME(rough_exp)(VEC t) {
#if REAL_BYTES == 4
    VEC shifted = t * R(1.44269504) + ROUNDER, r = t - (shifted - ROUNDER) * R(0.69314718);
    VEC p = (R(0.1651798) * r + R(0.5041304)) * (r * r) + (R(1.0001958) * r + R(1.0));
    return (VEC)((NAME(bits))p + ((NAME(bits))shifted << MANTISSA));
#else
    return NAME(vector_exp)(t);
#endif
}

/* The lesser of y and 1 - y, with a minus sign where that is 1 - y. */
INLINE VEC NAME(signed_part)(VEC y, VEC v) { return NAME(select)(y > v, -v, y); }

/* y after a step of its point by d, which is short: three terms of Taylor's. No division. */
INLINE VEC NAME(moved)(VEC y, VEC d) {
    VEC h = y - y * y;
    return y + (d * h) * (R(1.0) + d * ((R(0.5) - y) + d * (R(0.16666667) - h)));
}

/* The same for what `signed_part` gives. */
INLINE VEC NAME(moved_part)(VEC part, VEC d) {
    NAME(lanes) over = part < 0;
    VEC m = NAME(moved)(NAME(select)(over, -part, part), NAME(select)(over, -d, d));
    return NAME(select)(over, -m, m);
}

/* lower + width s from the nearer bound. */
INLINE VEC NAME(between)(VEC part, VEC lower, VEC upper) {
    return NAME(select)(part < 0, upper, lower) + (upper - lower) * part;
}

/* The same from s itself, which is as exact where no bound is below 0: the sum is then no less than either term. */
INLINE VEC NAME(above)(VEC s, VEC lower, VEC upper) {
    VEC y = lower + (upper - lower) * s;
    return NAME(select)(y < upper, y, upper);
}

/* ---- One row. ---- */

/* What a row's first guess is made of, with t = a z; and the largest |z|. A score that is not finite makes a1 so too. */
#define ADD_MOMENTS(z, t, w)                                            \
    a1 += t;                                                            \
    a2 += t * z;                                                        \
    a3 += t * w;                                                        \
    far = NAME(farther)(z, far);

/* The larger of |z| and far; any of the two where z is nan. */
INLINE VEC NAME(farther)(VEC z, VEC far) {
#if VECTOR == 64 && REAL_BYTES == 4
    return (VEC)_mm512_range_ps((__m512)z, (__m512)far, 0xb);
#elif VECTOR == 64
    return (VEC)_mm512_range_pd((__m512d)z, (__m512d)far, 0xb);
#elif VECTOR == 32 && REAL_BYTES == 4
    return (VEC)_mm256_max_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), (__m256)z), (__m256)far);
#elif VECTOR == 32
    return (VEC)_mm256_max_pd(_mm256_andnot_pd(_mm256_set1_pd(-0.0), (__m256d)z), (__m256d)far);
#else
    VEC size = NAME(select)(z < 0, -z, z);
    return NAME(select)(size > far, size, far);
#endif
}

INLINE double NAME(sum)(const double *parts) {
    double sum = 0;
    PRAGMA(omp simd reduction(+ : sum))
    for (int i = 0; i < LANES; i++) sum += parts[i];
    return sum;
}

INLINE double NAME(largest)(VEC x) {
    double found = 0;
    for (int i = 0; i < LANES; i++) found = (double)x[i] > found ? (double)x[i] : found;
    return found;
}

FN void NAME(budget_moments)(NAME(budget_row) * row) {
    double z1 = 0, z2 = 0, zw = 0;
    for (int64_t i = 0; i < row->n;) {
        int64_t end = i + BLOCK < row->n ? i + BLOCK : row->n;
        VEC a1 = {0}, a2 = {0}, a3 = {0};
        for (; i < end; i += LANES) {
            VEC z = NAME(kept)(row->z + i), a = NAME(kept)(row->a + i), w = NAME(kept)(row->w + i), t = a * z;
            a1 += t;
            a2 += t * z;
            a3 += t * w;
        }
        z1 += NAME(total)(a1), z2 += NAME(total)(a2), zw += NAME(total)(a3);
    }
    row->z1 = z1, row->z2 = z2, row->zw = zw;
}

/* The sums at nu, on the side that has the smaller sum if `few`, with `three` derivatives, or one in later passes; with
   KEEP_Y or KEEP_PART, y or what `signed_part` makes of it is kept in `e`. The first pass looks for the largest |z| of a
   sampled row, and fetches the next row and the place of y; later ones fetch the next weights. */
INLINE void NAME(budget_sums)(NAME(budget_row) * row, int limits, int few, int three, int keep) {
    struct budget *b = &row->b;
    int more = !keep || three; /* else `budget_second` makes it of what is there */
    VEC nu = NAME(fill)((REAL)b->nu);
    NAME(lanes) side = (NAME(lanes)){0} - (b->few != 0);
    double all[4][LANES] = {{0}};
    VEC far = {0}, odd = {0};
    for (int64_t i = 0; i < row->n;) {
        int64_t end = i + BLOCK < row->n ? i + BLOCK : row->n;
        VEC f = {0}, s1 = {0}, s2 = {0}, s3 = {0};
        for (; i < end; i += LANES) {
            VEC a = NAME(kept)(row->a + i), w = NAME(kept)(row->w + i), z = NAME(kept)(row->z + i);
            VEC point = -(z + w * nu);
            if (!keep) {
                far = NAME(farther)(z, far);
                odd += z * R(0.0); /* nan where z is: all else here may drop it */
                FETCH(row->ahead + i)
                FETCH_TO_WRITE(row->e + i)
            }
            VEC q = limits ? NAME(point_exp)(point) : keep ? NAME(vector_exp)(point) : NAME(rough_exp)(point);
            WEIGH(q, a, w, keep == KEEP_NONE, more, more && three)
            if (keep) FETCH(row->ahead_own + i)
            if (keep == KEEP_Y) NAME(keep)(y, row->e + i);
            if (keep == KEEP_PART) NAME(keep)(NAME(signed_part)(y, v), row->e + i);
        }
        NAME(add_lanes)(all[0], f);
        NAME(add_lanes)(all[1], s1);
        if (more) NAME(add_lanes)(all[2], s2);
        if (three) NAME(add_lanes)(all[3], s3);
    }
    struct budget was = *b;
    b->f = NAME(sum)(all[0]), b->s1 = NAME(sum)(all[1]), b->s2 = NAME(sum)(all[2]), b->s3 = NAME(sum)(all[3]);
    b->unsure = 0, b->summed = more;
    if (!keep && row->sampled) row->farthest = NAME(total)(odd) == 0 ? NAME(largest)(far) : INFINITY;
    double rise = b->few ? b->f - was.f : was.f - b->f;
    if (!more) b->s2 = budget_second(b->moved, b->f, b->s1, rise, was.s1, was.s2, was.summed, &b->unsure);
}

/* Move to the next point, and look at the sums there. */
FN void NAME(budget_pass)(NAME(budget_row) * row, int keep) {
    struct budget *b = &row->b;
    double nu = b->nu;
    b->nu = (double)(REAL)(b->nu + b->at), b->at = 0, b->moved = b->nu - nu;
    int limits = !(row->farthest + fabs(b->nu) < EXP_HIGH);
    if (limits && keep)
        NAME(budget_sums)(row, 1, 0, 1, row->plain ? KEEP_Y : KEEP_PART);
    else if (limits)
        NAME(budget_sums)(row, 1, 0, 1, KEEP_NONE);
    else if (!b->few)
        NAME(budget_sums)(row, 0, 0, 1, !keep ? KEEP_NONE : row->plain ? KEEP_Y : KEEP_PART);
    else if (!keep)
        NAME(budget_sums)(row, 0, 1, 1, KEEP_NONE);
    else if (row->plain)
        NAME(budget_sums)(row, 0, 1, THREE, KEEP_Y);
    else
        NAME(budget_sums)(row, 0, 1, THREE, KEEP_PART);
}

/* Search; whether that ended with digits to spare. */
FN int NAME(budget_search)(NAME(budget_row) * row, struct start *start) {
    struct budget *b = &row->b;
    double over = 1 / b->total;
    if (!row->measured) NAME(budget_moments)(row);
    start_prepare(start, b->c, b->total);
    b->nu = budget_guess(start->logit, start->log_p, start->quantile, row->z1 * over, row->z2 * over, row->zw * over,
                         b->w1 * over, b->w2 * over);
    if (!(fabs(b->nu) < LARGEST)) b->nu = 0;
    for (int i = 0; i < 16 && b->state == OPEN; i++) {
        NAME(budget_pass)(row, i > 0);
        if (i == 0 && row->sampled) {
            if (!(b->f <= LARGEST && row->farthest <= LARGEST)) return 0;
            row->sampled = 0;
            if (!(row->farthest + fabs(b->nu) < EXP_HIGH)) NAME(budget_pass)(row, 0);
        }
        budget_step(b, LAST_STEP, EPS, BUDGET_DIGITS, i > 0);
    }
    return b->state == CLOSE && fabs(b->at) <= SHORT;
}

#ifdef WITH_HARD

/* The sum of a over the classes that are above 1/2 at nu. */
FN double NAME(budget_above)(const double *restrict z, const double *restrict w, const double *restrict a, int64_t n,
                             double nu) {
    double sum = 0;
    PRAGMA(omp simd reduction(+ : sum))
    for (int64_t i = 0; i < n; i++) sum += z[i] + w[i] * nu > 0 ? a[i] : 0.0;
    return sum;
}

/* As `_balance` of weighted.py: a row whose classes are all but decided at nu. The tails on both sides, and what the
   classes above 1/2 add up to beyond c, are in balance where the logarithms of both sides are equal. */
FN double NAME(weighted_balance)(const double *restrict z, const double *restrict w, const double *restrict a, int64_t n,
                                 double c, double nu) {
    double total = 0, large = 0, small = 0, at = nu, lo = -INFINITY, hi = INFINITY;
    int exponent;
    for (int64_t i = 0; i < n; i++) total += a[i];
    frexp(total, &exponent);
    double grid = ldexp(1.0, exponent - 52);
    for (int64_t i = 0; i < n; i++) {
        if (!(a[i] > 0)) continue;
        double cross = -z[i] / w[i], part = rint(a[i] / grid) * grid;
        if (z[i] + w[i] * at > 0)
            lo = fmax(lo, cross), large += part, small += a[i] - part;
        else
            hi = fmin(hi, cross);
    }
    double goal = rint(c / grid) * grid, surplus = (large - goal) + (small - (c - goal));
    double more[2] = {log(fmax(surplus, 0)), log(fmax(-surplus, 0))};
    for (int step = 0; step < 120; step++) {
        double peak[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0}, pull[2] = {0, 0}, whole[2], slope = 0;
        for (int64_t i = 0; i < n; i++) {
            int side = z[i] + w[i] * at > 0;
            if (a[i] > 0) peak[side] = fmax(peak[side], -fabs(z[i] + w[i] * nu));
        }
        for (int64_t i = 0; i < n; i++) {
            if (!(a[i] > 0)) continue;
            int side = z[i] + w[i] * at > 0;
            double far = fabs(z[i] + w[i] * nu), near = -far - peak[side];
            if (near < -100) continue;
            double over = 1 / (1 + exp(-far)), e = a[i] * exp(near) * over;
            sum[side] += e, pull[side] += w[i] * e * over;
        }
        for (int side = 0; side < 2; side++) {
            double tails = peak[side] + log(sum[side]), top = fmax(tails, more[side]);
            whole[side] = top + log(exp(tails - top) + exp(more[side] - top));
            slope += pull[side] / sum[side] * exp(tails - whole[side]);
        }
        double f = whole[0] - whole[1], newton = nu - f / slope;
        if (f <= 0) lo = nu;
        if (f >= 0) hi = nu;
        if (fabs(f) <= 4 * DBL_EPSILON * (1 + fabs(whole[0])) || hi - lo <= 2 * DBL_EPSILON * fabs(nu)) break;
        nu = newton > lo && newton < hi ? newton : budget_middle(lo, hi);
    }
    return nu;
}

/* As `_root` of weighted.py, but for the start: Newton's method on the logarithm of the smaller side, between bounds. */
FN double NAME(weighted_hard)(const double *restrict z, const double *restrict w, const double *restrict a, int64_t n,
                              double c, double rest) {
    double lo = INFINITY, hi = -INFINITY, level = log(c) - log(rest), goal = fmin(c, rest), nu, before;
    int few = c <= rest;
    for (int64_t i = 0; i < n; i++) {
        if (!(a[i] > 0)) continue;
        double shift = (level - z[i]) / w[i];
        lo = fmin(lo, shift), hi = fmax(hi, shift);
    }
    double low = lo, high = hi; /* where the classes, taken one after another as nu rises, reach the sum */
    for (int i = 0; i < 60 && high - low > 0.5 + 1e-3 * fabs(low); i++) {
        double middle = budget_middle(low, high);
        if (!(middle > low && middle < high)) break;
        if (NAME(budget_above)(z, w, a, n, middle) < c)
            low = middle;
        else
            high = middle;
    }
    nu = fmin(fmax(high, lo), hi);
    before = hi - lo;
    for (int step = 0; step < 120 && lo < hi; step++) {
        double got = 0, slope = 0, noise = 0;
        PRAGMA(omp simd reduction(+ : got, slope, noise))
        for (int64_t i = 0; i < n; i++) {
            double d = z[i] + w[i] * nu, far = NAME(abs)(d), tail = NAME(exp)(-far, EXP_LOW, EXP_HIGH);
            tail = far > -EXP_LOW ? 0.0 : tail;
            double over = 1.0 / (1.0 + tail), under = tail * over, h = over * under * a[i];
            double y = d > 0 ? over : under, v = d > 0 ? under : over;
            got += a[i] * (few ? y : v);
            slope += w[i] * h;
            noise += h * (far + NAME(abs)(z[i]));
        }
        double f = few ? got - goal : goal - got;
        if (f <= 0) lo = nu;
        if (f >= 0) hi = nu;
        if (fabs(f) <= 2 * DBL_EPSILON * (goal + noise) || hi - lo <= 2 * DBL_EPSILON * fabs(nu)) break;
        double newton = nu - (few ? 1 : -1) * (log(got) - log(goal)) * got / slope;
        int bad = !(newton > lo && newton < hi);
        if (step % 3 == 2) {
            bad |= hi - lo > before / 2;
            before = hi - lo;
        }
        nu = bad ? budget_middle(lo, hi) : newton;
    }
    double tails = 0;
    for (int64_t i = 0; i < n; i++) tails += a[i] / (1 + exp(fabs(z[i] + w[i] * nu)));
    return tails < BUDGET_FLAT * goal ? NAME(weighted_balance)(z, w, a, n, c, nu) : nu;
}

/* Search in double, with z, w and a of a row one behind the other and room for e; `quick`: first as all rows are. */
FN double NAME(wider_search)(double *wide, int64_t width, int64_t n, struct budget *b, struct start *start, int quick) {
    NAME(budget_row) row = {.n = n, .z = wide, .w = wide + width, .a = wide + 2 * width, .e = wide + 3 * width, .b = *b};
    row.ahead = row.ahead_own = wide;
    row.farthest = INFINITY;
    budget_again(&row.b);
    if (quick && NAME(budget_search)(&row, start)) return row.b.nu + row.b.at;
    return NAME(weighted_hard)(row.z, row.w, row.a, n, b->c, b->rest);
}

#endif

/* ---- What a row is given, and where it goes. ---- */

/* A row of a call: its scores, weights and bounds. */
typedef struct {
    int64_t n;
    const REAL *x, *weight, *lower, *upper;
    int bounded; /* 1: from above, 2: from below as well */
} NAME(given);

/* Scores are the logits themselves where nothing is masked or divided. */
FN NAME(given) NAME(given_row)(const struct weighted *call, int64_t index, struct budget_space *space) {
    const REAL *restrict logits = (const REAL *)call->logits + index * call->n, *ones = (const REAL *)space->ones;
    const REAL *zeros = (const REAL *)space->zeros;
    REAL *restrict x = (REAL *)space->x, temperature = (REAL)call->temperature;
    NAME(given) given = {call->n, logits, ones, zeros, ones, call->lower ? 2 : call->upper ? 1 : 0};
    if (call->weight) given.weight = (const REAL *)call->weight + index * call->weight_stride;
    if (call->lower) given.lower = (const REAL *)call->lower + index * call->lower_stride;
    if (call->upper) given.upper = (const REAL *)call->upper + index * call->upper_stride;
    if (!call->mask && temperature == R(1.0)) return given;
    given.x = x;
    for (int64_t i = 0; i < call->n; i++) x[i] = logits[i] / temperature;
    if (!call->mask) return given;
    const uint8_t *restrict mask = call->mask + index * call->mask_stride;
    for (int64_t i = 0; i < call->n; i++) x[i] = mask[i] ? x[i] : -INFINITE;
    return given;
}

/* Weights and shares of a row; with `live` = 0 they are those of any row without infinite scores. The sums are in double,
   exact to its rounding whatever REAL is. */
FN void NAME(budget_shares)(const NAME(given) * g, int live, REAL *restrict w, REAL *restrict a, struct shares *s) {
    const REAL *restrict x = live ? g->x : g->lower, *restrict weight = g->weight;
    const REAL *restrict lower = g->lower, *restrict upper = g->upper;
    double most = 0, sure = 0, total = 0, w1 = 0, w2 = 0, wrong = 0, negative = 0;
    REAL largest = 0, lowest = 0;
    int64_t n = g->n;
    PRAGMA(omp simd reduction(max : largest) reduction(min : lowest) reduction(+ : wrong, negative))
    for (int64_t i = 0; i < n; i++) {
        REAL size = NAME(abs)(weight[i]), width = upper[i] - lower[i];
        largest = size > largest ? size : largest;
        lowest = lower[i] < lowest ? lower[i] : lowest;
        wrong += width >= 0 && width <= LARGEST ? 0.0 : 1.0;
        wrong += weight[i] == weight[i] ? 0.0 : 1.0;
        wrong += x[i] == x[i] ? 0.0 : 1.0;
        negative += weight[i] < 0 ? 1.0 : 0.0;
    }
    int exponent = 0;
    if (largest > 0 && largest <= LARGEST) frexp((double)largest, &exponent);
    double unit = ldexp(1.0, exponent), over = 1 / unit;
    PRAGMA(omp simd reduction(+ : most, sure, total, w1, w2))
    for (int64_t i = 0; i < n; i++) {
        int finite = NAME(finite)(x[i]), high = x[i] > 0;
        double wt = (double)weight[i], l = (double)lower[i], u = (double)upper[i], width = u - l;
        double share = (wt < 0 ? -wt : wt) * over, part = share * width;
        double at_l = wt * (finite || !high ? l : u), at_u = wt * (finite || high ? u : l);
        int turned = wt < 0;
        most += turned ? at_l : at_u;
        sure += wt * (finite ? (turned ? u : l) : high ? u : l);
        share = finite ? share : 0.0;
        part = finite ? part : 0.0;
        total += part;
        w1 += part * share;
        w2 += part * share * share;
        w[i] = (REAL)share;
        a[i] = (REAL)part;
    }
    for (int64_t i = n; i % LANES; i++) w[i] = a[i] = 0;
    *s = (struct shares){unit, sure, total, w1, w2, most, negative > 0, wrong > 0 || !(largest <= LARGEST), lowest < 0};
}

/* The same without bounds and without infinite scores, where a is w. */
FN void NAME(weight_shares)(const NAME(given) * g, REAL *restrict w, struct shares *s) {
    const REAL *restrict weight = g->weight;
    REAL largest = 0, least_weight = 0, odd = 0;
    double sure = 0, total = 0, w1 = 0, w2 = 0;
    int64_t n = g->n;
    PRAGMA(omp simd reduction(max : largest) reduction(min : least_weight) reduction(+ : odd))
    for (int64_t i = 0; i < n; i++) {
        REAL size = NAME(abs)(weight[i]);
        largest = size > largest ? size : largest;
        least_weight = weight[i] < least_weight ? weight[i] : least_weight;
        odd += weight[i] * R(0.0); /* nan if a weight is nan or infinite */
    }
    int exponent = 0, wrong = odd != 0;
    if (largest > 0 && !wrong) frexp((double)largest, &exponent);
    double unit = ldexp(1.0, exponent);
    REAL over = (REAL)ldexp(1.0, -(exponent / 2)), more = (REAL)ldexp(1.0, exponent / 2 - exponent); /* one may overflow */
    for (int64_t b = 0; b < n; b += BLOCK) {
        int64_t end = b + BLOCK < n ? b + BLOCK : n;
        REAL part1 = 0, part2 = 0;
        PRAGMA(omp simd reduction(+ : total, part1, part2))
        for (int64_t i = b; i < end; i++) {
            REAL share = NAME(abs)(weight[i]) * over * more, square = share * share;
            total += (double)share; /* exact to the rounding of double */
            part1 += square;
            part2 += square * share;
            w[i] = share;
        }
        w1 += (double)part1, w2 += (double)part2;
    }
    if (least_weight < 0) {
        PRAGMA(omp simd reduction(+ : sure))
        for (int64_t i = 0; i < n; i++) sure += weight[i] < 0 ? (double)weight[i] : 0.0;
    }
    for (int64_t i = n; i % LANES; i++) w[i] = 0;
    *s = (struct shares){unit, sure, total, w1, w2, sure + total * unit, least_weight < 0, wrong, 0};
}

/* The scores, turned around where the weight is negative; 0 for infinite ones. Returns whether all were finite. */
FN int NAME(budget_scores)(const NAME(given) * g, int negative, REAL *restrict z) {
    const REAL *restrict x = g->x, *restrict weight = g->weight;
    REAL sum = 0;
    int64_t n = g->n;
    PRAGMA(omp simd reduction(+ : sum))
    for (int64_t i = 0; i < n; i++) {
        sum += x[i] * R(0.0);
        z[i] = NAME(finite)(x[i]) ? x[i] : R(0.0);
    }
    if (negative)
        for (int64_t i = 0; i < n; i++) z[i] = weight[i] < 0 ? -z[i] : z[i];
    for (int64_t i = n; i % LANES; i++) z[i] = 0;
    return sum == 0;
}

/* The vector at i of an array of n numbers; 0 beyond it. */
INLINE VEC NAME(part_of)(const REAL *from, int64_t i, int64_t n) {
#if VECTOR == 64 && REAL_BYTES == 4
    return (VEC)_mm512_maskz_loadu_ps((__mmask16)((1u << (n - i)) - 1), from + i);
#elif VECTOR == 64
    return (VEC)_mm512_maskz_loadu_pd((__mmask8)((1u << (n - i)) - 1), from + i);
#else
    VEC part = {0};
    for (int64_t j = i; j < n; j++) part[j - i] = from[j];
    return part;
#endif
}

/* Write a vector at i of an array of n numbers, as far as that goes. */
INLINE void NAME(put_part)(VEC part, REAL *to, int64_t i, int64_t n) {
#if VECTOR == 64 && REAL_BYTES == 4
    _mm512_mask_storeu_ps(to + i, (__mmask16)((1u << (n - i)) - 1), (__m512)part);
#elif VECTOR == 64
    _mm512_mask_storeu_pd(to + i, (__mmask8)((1u << (n - i)) - 1), (__m512d)part);
#else
    for (int64_t j = i; j < n; j++) to[j] = part[j - i];
#endif
}

/* The vector at i of an array of n numbers, where it may not be whole. */
INLINE VEC NAME(some_of)(const REAL *from, int64_t i, int64_t n) {
    return i + LANES <= n ? NAME(kept)(from + i) : NAME(part_of)(from, i, n);
}

/* The next scores of a row, turned around where the weight is negative; 0 beyond the row. */
INLINE VEC NAME(scores_at)(const NAME(given) * g, int64_t i, int negative) {
    VEC z = NAME(some_of)(g->x, i, g->n);
    return negative ? NAME(select)(NAME(some_of)(g->weight, i, g->n) < 0, -z, z) : z;
}

/* The same with the moments of the row, which has weights and shares; it is of no use where a score is not finite. Scores
   that fill whole vectors are read where they are. */
FN int NAME(budget_read)(const NAME(given) * g, int negative, NAME(budget_row) * row, REAL *restrict copy) {
    double all[3][LANES] = {{0}};
    VEC far = {0};
    int64_t n = g->n;
    int in_place = !negative && n % LANES == 0;
    for (int64_t i = 0; i < n;) {
        int64_t end = i + BLOCK < n ? i + BLOCK : n;
        VEC a1 = {0}, a2 = {0}, a3 = {0};
        for (; i < end; i += LANES) {
            VEC z = NAME(scores_at)(g, i, negative), t = NAME(kept)(row->a + i) * z;
            if (!in_place) NAME(keep)(z, copy + i);
            ADD_MOMENTS(z, t, NAME(kept)(row->w + i))
        }
        NAME(add_lanes)(all[0], a1);
        NAME(add_lanes)(all[1], a2);
        NAME(add_lanes)(all[2], a3);
    }
    row->z = in_place ? g->x : copy;
    row->z1 = NAME(sum)(all[0]), row->z2 = NAME(sum)(all[1]), row->zw = NAME(sum)(all[2]);
    row->farthest = NAME(largest)(far);
    return row->z1 * 0 == 0;
}

/* The same from a part of a long row that is read where it is: the first guess needs them roughly. Whether all scores are
   finite is left to the first pass. */
FN void NAME(budget_sample)(const NAME(given) * g, NAME(budget_row) * row) {
    int64_t apart = g->n / SAMPLE < 8 ? g->n / SAMPLE * LANES : 8 * LANES;
    VEC a0 = {0}, a1 = {0}, a2 = {0}, a3 = {0}, w1 = {0};
    for (int64_t i = 0; i < g->n; i += apart) {
        VEC z = NAME(kept)(g->x + i), a = NAME(kept)(row->a + i), w = NAME(kept)(row->w + i), t = a * z;
        a0 += a;
        a1 += t;
        a2 += t * z;
        a3 += t * w;
        w1 += a * w;
    }
    double total = row->shares.total, over = 1 / NAME(total)(a0), z1 = NAME(total)(a1) * over;
    row->z = g->x;
    row->z1 = z1 * total, row->z2 = NAME(total)(a2) * over * total;
    row->zw = (NAME(total)(a3) - z1 * NAME(total)(w1)) * over * total + z1 * row->shares.w1;
    row->sampled = 1, row->farthest = 0;
}

/* Weights and shares of a row without infinite scores; `a` is not written where there are no bounds. */
INLINE void NAME(shares_of)(const NAME(given) * g, REAL *w, REAL *a, struct shares *s) {
    if (g->bounded)
        NAME(budget_shares)(g, 0, w, a, s);
    else
        NAME(weight_shares)(g, w, s);
}

/* x + w nu where nu is infinite, or the score. */
INLINE double NAME(end_point)(double x, double w, double nu) {
    return w == 0 || isinf(x) ? x : w * nu > 0 ? INFINITY : -INFINITY;
}

/* lower + width sigmoid(z) from the nearer bound, for any row: from nu alone, one rounding at the end. */
FN void NAME(budget_write_any)(const NAME(given) * g, double nu, REAL *out) {
    for (int64_t i = 0; i < g->n; i++) {
        double x = g->x[i], w = g->weight[i], lower = g->lower[i], upper = g->upper[i];
        double z = isfinite(nu) ? (isinf(x) ? x : x + w * nu) : NAME(end_point)(x, w, nu);
        double tail = exp(-fabs(z)), small = (upper - lower) * (tail / (1 + tail));
        out[i] = nu != nu ? (REAL)NAN : (REAL)(z > 0 ? upper - small : lower + small);
    }
}

/* The same from y or its part, as the last pass kept it, for the vector at i of a row of n classes. */
INLINE VEC NAME(budget_value)(const NAME(given) * g, VEC y, VEC d, int64_t i, int plain, int bounded, int negative,
                              int64_t n) {
    VEC lower = {0}, upper = {0};
    y = plain ? NAME(moved)(y, d) : NAME(moved_part)(y, d);
    if (bounded) upper = NAME(some_of)(g->upper, i, n);
    if (bounded > 1 || !plain) lower = NAME(some_of)(g->lower, i, n);
    if (plain) return bounded > 1 ? NAME(above)(y, lower, upper) : bounded ? y * upper : y;
    if (negative) y = NAME(select)(NAME(some_of)(g->weight, i, n) < 0, -y, y);
    return NAME(between)(y, lower, upper);
}

INLINE void NAME(budget_write_row)(const NAME(given) * g, const NAME(budget_row) * row, REAL *out, int plain,
                                   int bounded, int negative) {
    VEC at = NAME(fill)((REAL)row->b.at);
    int64_t n = g->n, whole = n / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        VEC y = NAME(kept)(row->e + i), d = NAME(kept)(row->w + i) * at;
        NAME(keep)(NAME(budget_value)(g, y, d, i, plain, bounded, negative, whole), out + i);
    }
    if (whole < n) {
        VEC y = NAME(kept)(row->e + whole), d = NAME(kept)(row->w + whole) * at;
        NAME(put_part)(NAME(budget_value)(g, y, d, whole, plain, bounded, negative, n), out, whole, n);
    }
}

FN void NAME(budget_write)(const NAME(given) * g, const NAME(budget_row) * row, REAL *out) {
    if (row->plain && !g->bounded)
        NAME(budget_write_row)(g, row, out, 1, 0, 0);
    else if (row->plain && g->bounded == 1)
        NAME(budget_write_row)(g, row, out, 1, 1, 0);
    else if (row->plain)
        NAME(budget_write_row)(g, row, out, 1, 2, 0);
    else if (!row->shares.negative)
        NAME(budget_write_row)(g, row, out, 0, 2, 0);
    else
        NAME(budget_write_row)(g, row, out, 0, 2, 1);
}

/* ---- Calls. ---- */

/* Solve one row; returns nu. `quick` is set if `e` and `at` of the row give y. */
FN double NAME(budget_solve)(const struct weighted *call, const NAME(given) * g, int64_t index,
                             struct budget_space *space, NAME(budget_row) * row, int *quick, int again) {
    double nu, k = call->k[index * call->k_stride];
    struct shares *s = &row->shares;
    *quick = 0;
    row->n = g->n;
    row->z = (REAL *)space->z, row->e = (REAL *)space->e;
    row->ahead = (const REAL *)call->logits + (index + (index + 1 < call->rows)) * call->n;
    row->ahead_own = call->weight_stride ? g->weight + (index + 1 < call->rows ? g->n : 0) : (REAL *)space->shared_w;
    row->farthest = INFINITY;
    row->w = (REAL *)space->shared_w, row->a = (REAL *)(g->bounded ? space->shared_a : space->shared_w);
    *s = space->shares;
    if (!space->is_shared && !call->mask) {
        row->w = (REAL *)space->w, row->a = (REAL *)(g->bounded ? space->a : space->w);
        NAME(shares_of)(g, row->w, row->a, s);
    }
    int in_place = !call->mask && !s->negative && g->n % LANES == 0;
    if (in_place && call->out) row->e = (REAL *)call->out + index * g->n;
    row->sampled = 0;
    if (again) {
        row->measured = 0;
    } else if (in_place && g->n >= 2 * SAMPLE) {
        NAME(budget_sample)(g, row);
        row->measured = 1;
    } else {
        row->measured = !call->mask && NAME(budget_read)(g, s->negative, row, (REAL *)space->z);
    }
    row->special = !row->measured;
    if (row->special) {
        row->w = (REAL *)space->w, row->a = (REAL *)space->a;
        NAME(budget_shares)(g, 1, row->w, row->a, s);
        NAME(budget_scores)(g, s->negative, (REAL *)space->z);
        row->z = (REAL *)space->z, row->farthest = INFINITY;
    }
    row->plain = !s->negative && !s->below;
    if (budget_enter(&row->b, s, k, call->at_most, &nu)) {
        if (!row->sampled) return nu;
    } else if (NAME(budget_search)(row, &space->start)) {
        *quick = 1;
        nu = row->b.nu + row->b.at;
    }
    if (!*quick && row->sampled) { /* a score that is not finite changes the shares */
        return NAME(budget_solve)(call, g, index, space, row, quick, 1);
    } else if (!*quick) { /* in double */
        double *wide = space->wide, over = 1 / s->unit;
        int64_t width = space->width;
        memset(wide, 0, 3 * (size_t)width * sizeof *wide);
        for (int64_t i = 0; i < g->n; i++) {
            double share = NAME(finite)(g->x[i]) ? fabs((double)g->weight[i]) * over : 0;
            wide[i] = fmin(fmax((double)row->z[i], -BUDGET_FARTHEST), BUDGET_FARTHEST);
            wide[width + i] = share;
            wide[2 * width + i] = share * ((double)g->upper[i] - (double)g->lower[i]);
        }
        nu = WIDER_SEARCH(wide, width, g->n, &row->b, &space->start, sizeof(REAL) < 8);
    }
    nu /= s->unit;
    if (call->at_most && nu > 0) {
        nu = 0;
        row->b.nu = row->b.at = 0;
        NAME(budget_pass)(row, 1);
        *quick = 1;
    }
    return nu;
}

FN void NAME(weighted_rows)(const struct weighted *call, int64_t index, int count, struct budget_space *space) {
    for (int64_t at = index; at < index + count; at++) {
        NAME(given) g = NAME(given_row)(call, at, space);
        NAME(budget_row) row;
        int quick;
        double nu = NAME(budget_solve)(call, &g, at, space, &row, &quick, 0);
        call->nu[at] = nu;
        if (!call->out) continue;
        REAL *out = (REAL *)call->out + at * g.n;
        if (!quick) {
            NAME(budget_write_any)(&g, nu, out);
            continue;
        }
        NAME(budget_write)(&g, &row, out);
        for (int64_t i = 0; i < g.n && row.special; i++) {
            REAL x = g.x[i];
            if (!NAME(finite)(x)) out[i] = x > 0 ? g.upper[i] : g.lower[i];
        }
    }
}

/* ---- A tile: rows that share their weights and bounds, or have positive weights of their own and no bounds, each in a
   lane of its own. What is special about a row, or hard, is left to `weighted_rows`. ---- */

typedef struct {
    int64_t n;
    VEC *z, *e;
    const REAL *w, *a; /* of all rows */
    VEC *own;          /* the weights of each; 0 if they share them */
    VEC over, more;    /* one over the unit, in two factors */
    const char *ahead, *ahead_own, *target; /* the next scores and weights, and the place of y: fetched during the passes */
    NAME(lanes) few;
    int state[LANES], is_few[LANES];
    double unit[LANES], total[LANES], w1[LANES], w2[LANES], sure[LANES], most[LANES]; /* as in struct shares */
    double c[LANES], rest[LANES], goal[LANES], z1[LANES], z2[LANES], zw[LANES], f[LANES], s1[LANES], s2[LANES];
    double s3[LANES], moved[LANES], unsure[LANES]; /* as in struct budget */
    int summed[LANES];
    double logit[LANES], log_p[LANES], quantile[LANES], nu[LANES], at[LANES], r[LANES], step[LANES], farthest[LANES];
} NAME(budget_tile);

/* What a pass needs of the one before. */
typedef struct {
    double f[LANES], s1[LANES], s2[LANES];
    int summed[LANES];
} NAME(budget_sums_before);

/* Whether a pass of a tile sums the second derivative: later ones of float make it of what is there, where they can. */
#define SUMS_SECOND(limits, few, keep) (!(keep) || THREE || (limits) || !(few))

/* LANES classes of all rows from j on, or in a row of fewer all. */
INLINE void NAME(tile_columns)(VEC *part, const REAL *const *rows, int64_t j, int64_t n) {
    if (n >= LANES) {
        PRAGMA(GCC unroll 16)
        for (int i = 0; i < LANES; i++) memcpy(part + i, rows[i] + j, sizeof *part);
        NAME(transpose)(part);
    } else {
        for (int c = 0; c < n; c++)
            for (int i = 0; i < LANES; i++) part[c][i] = rows[i][c];
    }
}

/* A class of all rows, and its part of the moments; weights of their own are turned into shares, which are summed. */
#define LOAD_CLASS(x, j)                                                                                          \
    VEC score = temperature == R(1.0) ? x : x / temperature, weight, share;                                       \
    if (sign && sign[j] < 0) score = -score;                                                                      \
    z[j] = score;                                                                                                 \
    if (own) {                                                                                                    \
        weight = share = tile->own[j] = tile->own[j] * tile->over * tile->more;                                   \
        VEC square = weight * weight;                                                                             \
        NAME(add_lanes)(sums, weight); /* exact to the rounding of double */                                      \
        w1 += square;                                                                                             \
        w2 += square * weight;                                                                                    \
    } else {                                                                                                      \
        weight = NAME(fill)(w[j]), share = NAME(fill)(a[j]);                                                      \
    }                                                                                                             \
    VEC t = share * score;                                                                                        \
    ADD_MOMENTS(score, t, weight)

/* The scores and their moments. What is left beyond whole vectors is read with classes before it. */
INLINE void NAME(budget_load)(NAME(budget_tile) * tile, const REAL *const *rows, REAL temperature, const REAL *sign,
                              int own) {
    int64_t n = tile->n, whole = n / LANES * LANES, last = n < LANES ? 0 : n - LANES;
    VEC *restrict z = tile->z, far = {0}, part[LANES];
    const REAL *restrict w = tile->w, *restrict a = tile->a;
    double sums[LANES] = {0};
    EACH_LANE tile->z1[i] = tile->z2[i] = tile->zw[i] = 0;
    for (int64_t j = 0; j < n;) {
        VEC a1 = {0}, a2 = {0}, a3 = {0}, w1 = {0}, w2 = {0};
        int64_t end = j + STEPS < whole ? j + STEPS : whole;
        for (; j < end; j += LANES) {
            NAME(tile_columns)(part, rows, j, LANES);
            PRAGMA(GCC unroll 16)
            for (int c = 0; c < LANES; c++) {
                LOAD_CLASS(part[c], j + c)
            }
        }
        if (j == whole && whole < n) {
            NAME(tile_columns)(part, rows, last, n);
            for (; j < n; j++) {
                LOAD_CLASS(part[j - last], j)
            }
        }
        NAME(add_lanes)(tile->z1, a1);
        NAME(add_lanes)(tile->z2, a2);
        NAME(add_lanes)(tile->zw, a3);
        if (own) NAME(add_lanes)(tile->w1, w1);
        if (own) NAME(add_lanes)(tile->w2, w2);
    }
    if (own) EACH_LANE tile->total[i] += sums[i], tile->sure[i] = 0, tile->most[i] = tile->total[i] * tile->unit[i];
    EACH_LANE tile->farthest[i] = (double)far[i] + tile->z1[i] * 0;
}

/* The weights of each row, and the power of two by which they are to be divided; nan as the total where one is infinite
   or below 0, or all are next to 0. */
FN void NAME(budget_load_own)(NAME(budget_tile) * tile, const REAL *const *rows) {
    int64_t n = tile->n;
    VEC *restrict own = tile->own, largest = {0};
    NAME(bits) signs = {0};
    for (int64_t j = 0; j < n; j += LANES) {
        VEC part[LANES];
        int64_t first = j + LANES <= n || n < LANES ? j : n - LANES, count = n < LANES ? n : LANES;
        NAME(tile_columns)(part, rows, first, n);
        for (int c = 0; c < count; c++) {
            own[first + c] = part[c];
            largest = NAME(farther)(part[c], largest);
            signs |= (NAME(bits))part[c];
        }
    }
    REAL sizes[LANES], over[LANES], more[LANES]; /* one factor might overflow */
    BITS sign[LANES];
    memcpy(sizes, &largest, sizeof sizes);
    memcpy(sign, &signs, sizeof sign);
    EACH_LANE {
        SIGNED bits = (SIGNED)(NAME(to_bits)(sizes[i]) >> MANTISSA), exponent = bits - HALF_EXPONENT; /* as frexp's */
        SIGNED half = exponent / 2, rest = exponent - half;
        int fits = bits > 0 && sizes[i] <= LARGEST && !(sign[i] >> (8 * REAL_BYTES - 1));
        over[i] = NAME(from_bits)((BITS)(HALF_EXPONENT + 1 - half) << MANTISSA);
        more[i] = NAME(from_bits)((BITS)(HALF_EXPONENT + 1 - rest) << MANTISSA);
        tile->unit[i] = 1 / (double)over[i] / (double)more[i];
        tile->total[i] = fits ? 0 : (double)NAN;
        tile->w1[i] = tile->w2[i] = 0;
    }
    memcpy(&tile->over, over, sizeof over);
    memcpy(&tile->more, more, sizeof more);
}

/* The sums at nu, all rows being on the side that has the smaller sum if `few`; `keep` as in `budget_sums`. */
INLINE void NAME(budget_tile_sums)(NAME(budget_tile) * tile, VEC nu, int own, int shares, int limits, int few, int keep) {
    const REAL *restrict w = tile->w, *restrict a = tile->a;
    const VEC *restrict z = tile->z;
    VEC *restrict e = tile->e;
    NAME(lanes) side = tile->few;
    int more = SUMS_SECOND(limits, few, keep);
    EACH_LANE tile->f[i] = tile->s1[i] = tile->s2[i] = tile->s3[i] = 0;
    for (int64_t j = 0; j < tile->n;) {
        int64_t end = j + STEPS < tile->n ? j + STEPS : tile->n;
        VEC f = {0}, s1 = {0}, s2 = {0}, s3 = {0};
        for (; j < end; j++) {
            VEC weight = own ? tile->own[j] : NAME(fill)(w[j]), share = shares ? NAME(fill)(a[j]) : weight;
            VEC point = -(z[j] + weight * nu);
            VEC q = limits ? NAME(point_exp)(point) : keep ? NAME(vector_exp)(point) : NAME(rough_exp)(point);
            WEIGH(q, share, weight, keep == KEEP_NONE, more, !keep || THREE)
            if (keep == KEEP_Y) e[j] = y;
            if (keep == KEEP_PART) e[j] = NAME(signed_part)(y, v);
            if (keep == KEEP_NONE) FETCH(tile->ahead + j * VECTOR)
            if (keep) FETCH_TO_WRITE(tile->target + j * VECTOR)
            if (own && keep) FETCH(tile->ahead_own + j * VECTOR)
        }
        NAME(add_lanes)(tile->f, f);
        NAME(add_lanes)(tile->s1, s1);
        if (more) NAME(add_lanes)(tile->s2, s2);
        if (!keep || THREE) NAME(add_lanes)(tile->s3, s3);
    }
    EACH_LANE tile->summed[i] = more;
}

/* The second derivatives of rows for which it was not summed, from their sums before. */
FN void NAME(budget_bend)(NAME(budget_tile) * tile, const NAME(budget_sums_before) * was) {
    EACH_LANE {
        double unsure, rise = tile->f[i] - was->f[i];
        double s2 = budget_second(tile->moved[i], tile->f[i], tile->s1[i], rise, was->s1[i], was->s2[i], was->summed[i],
                                  &unsure);
        tile->s2[i] = tile->summed[i] ? tile->s2[i] : s2;
        tile->unsure[i] = tile->summed[i] ? 0 : unsure;
    }
}

FN void NAME(budget_remember)(const NAME(budget_tile) * tile, NAME(budget_sums_before) * was) {
    memcpy(was->f, tile->f, sizeof was->f);
    memcpy(was->s1, tile->s1, sizeof was->s1);
    memcpy(was->s2, tile->s2, sizeof was->s2);
    memcpy(was->summed, tile->summed, sizeof was->summed);
}

/* Move the open rows to their next points, and look at the sums there. A solved row stays where it is. */
FN void NAME(budget_look)(NAME(budget_tile) * tile, int keep) {
    NAME(budget_sums_before) was;
    REAL parts[LANES];
    VEC nu;
    int few = 1, limits = 0;
    NAME(budget_remember)(tile, &was);
    for (int i = 0; i < LANES; i++) {
        double at = tile->nu[i];
        if (tile->state[i] == OPEN) tile->nu[i] = (double)(REAL)(at + tile->at[i]), tile->at[i] = 0;
        tile->moved[i] = tile->nu[i] - at;
        parts[i] = (REAL)tile->nu[i];
        few &= tile->is_few[i];
        limits |= !(tile->farthest[i] + fabs(tile->nu[i]) < EXP_HIGH);
    }
    memcpy(&nu, parts, sizeof nu);
    int own = tile->own != 0, shares = tile->a != tile->w;
    if (limits || !few)
        NAME(budget_tile_sums)(tile, nu, own, shares, limits, 0, keep);
    else if (own && keep)
        NAME(budget_tile_sums)(tile, nu, 1, 0, 0, 1, KEEP_Y);
    else if (own)
        NAME(budget_tile_sums)(tile, nu, 1, 0, 0, 1, KEEP_NONE);
    else if (keep == KEEP_NONE && shares)
        NAME(budget_tile_sums)(tile, nu, 0, 1, 0, 1, KEEP_NONE);
    else if (keep == KEEP_NONE)
        NAME(budget_tile_sums)(tile, nu, 0, 0, 0, 1, KEEP_NONE);
    else if (keep == KEEP_Y && shares)
        NAME(budget_tile_sums)(tile, nu, 0, 1, 0, 1, KEEP_Y);
    else if (keep == KEEP_Y)
        NAME(budget_tile_sums)(tile, nu, 0, 0, 0, 1, KEEP_Y);
    else
        NAME(budget_tile_sums)(tile, nu, 0, shares, 0, 1, KEEP_PART);
    NAME(budget_bend)(tile, &was);
}

/* Find the next step of the rows that are open, and with `last` close those for which it is the last; whether any is
   open still. */
FN int NAME(budget_move)(NAME(budget_tile) * tile, int last) {
    int open = 0;
    EACH_LANE {
        double got = tile->f[i], goal = tile->goal[i], s1 = tile->s1[i], s2 = tile->s2[i], s3 = tile->s3[i];
        double u = got < goal ? got / goal : goal / got, level = LOG_DOUBLE(u, 0.0);
        tile->r[i] = (tile->is_few[i] ? got - goal : goal - got) / s1;
        level = got < goal ? level : -level;
        tile->step[i] = budget_next(tile->is_few[i], !last || THREE, tile->r[i], got, level, s1, s2, s3);
    }
    for (int i = 0; i < LANES; i++) {
        if (tile->state[i] != OPEN) continue;
        double r = fabs(tile->r[i]), step = tile->step[i];
        if (last && r <= LAST_STEP && r * r * tile->unsure[i] <= EPS / 2 * tile->s1[i])
            tile->state[i] = tile->s1[i] > BUDGET_DIGITS * tile->goal[i] ? CLOSE : HARD;
        if (!(fabs(step) < 40)) tile->state[i] = HARD;
        if (tile->state[i] == HARD) continue;
        tile->at[i] = step;
        open |= tile->state[i] == OPEN;
    }
    return open;
}

INLINE void NAME(budget_tile_write)(NAME(budget_tile) * tile, REAL *const *rows, const NAME(given) * g, int own,
                                    int plain, int bounded) {
    int64_t n = tile->n;
    VEC at, *e = tile->e;
    REAL moves[LANES];
    EACH_LANE moves[i] = (REAL)tile->at[i];
    memcpy(&at, moves, sizeof at);
    for (int64_t next = 0; next < n; next += LANES) {
        VEC part[LANES];
        int64_t count = n < LANES ? n : LANES, j = next + count <= n ? next : n - count;
        for (int64_t i = 0; i < count; i++) {
            VEC d = (own ? tile->own[j + i] : NAME(fill)(tile->w[j + i])) * at;
            if (plain) {
                part[i] = NAME(moved)(e[j + i], d);
                VEC upper = NAME(fill)(g->upper[j + i]);
                if (bounded > 1) part[i] = NAME(above)(part[i], NAME(fill)(g->lower[j + i]), upper);
                if (bounded == 1) part[i] *= upper;
                continue;
            }
            VEC y = NAME(moved_part)(e[j + i], d);
            if (g->weight[j + i] < 0) y = -y;
            part[i] = NAME(between)(y, NAME(fill)(g->lower[j + i]), NAME(fill)(g->upper[j + i]));
        }
        if (n < LANES) {
            for (int64_t i = 0; i < n; i++)
                for (int r = 0; r < LANES; r++)
                    if (rows[r]) rows[r][i] = part[i][r];
            break;
        }
        NAME(transpose)(part);
        for (int i = 0; i < LANES; i++)
            if (rows[i]) memcpy(rows[i] + j, part + i, sizeof *part);
    }
}

/* What the rows of a tile are to sum up to, and the first guess of each. Lanes from `count` on repeat the first row. */
FN void NAME(budget_begin)(NAME(budget_tile) * tile, const struct weighted *call, int64_t index, int count,
                           struct budget_space *space, int alike) {
    SIGNED few[LANES];
    double k[LANES];
    int at_most = call->at_most, wrong = space->shares.wrong;
    for (int i = 0; i < LANES; i++) k[i] = call->k[(index + (i < count ? i : 0)) * call->k_stride];
    EACH_LANE { /* as budget_enter; what has nothing to search is left to it */
        double unit = tile->unit[i], c = (k[i] - tile->sure[i]) / unit, rest = tile->total[i] - c;
        int open = !wrong && c > 0 && rest > 0 && !(at_most && k[i] >= tile->most[i]); /* not if one is nan */
        c = open ? c : 1, rest = open ? rest : 1;
        tile->state[i] = open ? OPEN : HARD;
        tile->c[i] = c, tile->rest[i] = rest, tile->goal[i] = c <= rest ? c : rest, tile->is_few[i] = c <= rest;
        few[i] = c <= rest ? -1 : 0;
    }
    if (!alike || call->k_stride) {
        EACH_LANE { /* as start_prepare */
            double c = tile->c[i], rest = tile->rest[i], less = c < rest ? c : rest, more = c < rest ? rest : c;
            double logit = LOG_DOUBLE(less / more, 0.0), log_p = LOG_DOUBLE(less / (less + more), 0.0);
            tile->logit[i] = c < rest ? logit : -logit, tile->log_p[i] = log_p;
            tile->quantile[i] = normal_quantile(log_p);
        }
    } else {
        const struct start *all = &space->start;
        start_prepare(&space->start, tile->c[0], tile->c[0] + tile->rest[0]);
        EACH_LANE tile->logit[i] = all->logit, tile->log_p[i] = all->log_p, tile->quantile[i] = all->quantile;
    }
    memcpy(&tile->few, few, sizeof few);
    EACH_LANE {
        double over = 1 / tile->total[i];
        tile->nu[i] = budget_guess(tile->logit[i], tile->log_p[i], tile->quantile[i], tile->z1[i] * over,
                                   tile->z2[i] * over, tile->zw[i] * over, tile->w1[i] * over, tile->w2[i] * over);
    }
    for (int i = 0; i < LANES; i++) {
        tile->at[i] = tile->f[i] = tile->s1[i] = tile->s2[i] = 0, tile->summed[i] = 1;
        if (!(fabs(tile->nu[i]) < 1e30) || !(tile->farthest[i] < 1e30)) tile->state[i] = HARD, tile->nu[i] = 0;
    }
}

/* Whether a row of a tile is solved. */
INLINE int NAME(budget_solved)(const NAME(budget_tile) * tile, const struct weighted *call, int i) {
    return tile->state[i] == CLOSE && fabs(tile->at[i]) <= SHORT && !(call->at_most && tile->nu[i] + tile->at[i] > 0);
}

/* nu of the rows that are solved, and where their values go. */
FN void NAME(budget_end)(NAME(budget_tile) * tile, const struct weighted *call, int64_t index, int count, REAL **out) {
    for (int i = 0; i < count; i++) {
        if (!NAME(budget_solved)(tile, call, i)) continue;
        call->nu[index + i] = (tile->nu[i] + tile->at[i]) / tile->unit[i];
        if (call->out) out[i] = (REAL *)call->out + (index + i) * call->n;
    }
}

/* The shares of rows that have the same. */
FN void NAME(budget_alike)(NAME(budget_tile) * tile, const struct shares *s) {
    for (int i = 0; i < LANES; i++) {
        tile->unit[i] = s->unit, tile->total[i] = s->total, tile->w1[i] = s->w1, tile->w2[i] = s->w2;
        tile->sure[i] = s->sure, tile->most[i] = s->most;
    }
}

/* Whether rows have weights for which they are to be read one by one: in most cases negative ones. */
FN int NAME(budget_apiece)(const NAME(budget_tile) * tile, int count) {
    int odd = 0;
    for (int i = 0; i < count; i++) odd += tile->total[i] != tile->total[i];
    return odd > 1;
}

FN void NAME(weighted_apiece)(const struct weighted *call, int64_t index, int count, struct budget_space *space);

FN void NAME(weighted_tile)(const struct weighted *call, int64_t index, int count, struct budget_space *space) {
    NAME(budget_tile) tile;
    const struct shares *s = &space->shares;
    const REAL *rows[LANES], *weights[LANES];
    REAL *out[LANES] = {0};
    NAME(given) g = NAME(given_row)(call, index, space);
    tile.n = call->n;
    int64_t next = index + 2 * LANES <= call->rows ? index + LANES : index;
    tile.ahead = (const char *)((const REAL *)call->logits + next * call->n);
    tile.ahead_own = (const char *)((const REAL *)call->weight + next * call->weight_stride);
    tile.target = call->out && count == LANES ? (const char *)((REAL *)call->out + index * call->n) : tile.ahead;
    tile.z = (VEC *)space->z, tile.e = (VEC *)space->e, tile.own = space->is_shared ? 0 : (VEC *)space->own;
    tile.w = (const REAL *)space->shared_w, tile.a = (const REAL *)(g.bounded ? space->shared_a : space->shared_w);
    for (int i = 0; i < LANES; i++) {
        int64_t row = index + (i < count ? i : 0);
        rows[i] = (const REAL *)call->logits + row * call->n;
        weights[i] = (const REAL *)call->weight + row * call->weight_stride;
    }
    NAME(budget_alike)(&tile, s);
    if (tile.own) {
        NAME(budget_load_own)(&tile, weights);
        if (NAME(budget_apiece)(&tile, count)) {
            NAME(weighted_apiece)(call, index, count, space);
            return;
        }
        NAME(budget_load)(&tile, rows, (REAL)call->temperature, 0, 1);
    } else {
        NAME(budget_load)(&tile, rows, (REAL)call->temperature, s->negative ? g.weight : 0, 0);
    }
    NAME(budget_begin)(&tile, call, index, count, space, !tile.own);
    int keep = !s->negative && !s->below ? KEEP_Y : KEEP_PART;
    for (int passes = 0, open = 1; open && passes < 8; passes++) {
        NAME(budget_look)(&tile, passes ? keep : KEEP_NONE);
        open = NAME(budget_move)(&tile, passes > 0);
    }
    NAME(budget_end)(&tile, call, index, count, out);
    if (call->out && tile.own)
        NAME(budget_tile_write)(&tile, out, &g, 1, 1, 0);
    else if (call->out && keep == KEEP_PART)
        NAME(budget_tile_write)(&tile, out, &g, 0, 0, 2);
    else if (call->out && g.bounded > 1)
        NAME(budget_tile_write)(&tile, out, &g, 0, 1, 2);
    else if (call->out && g.bounded)
        NAME(budget_tile_write)(&tile, out, &g, 0, 1, 1);
    else if (call->out)
        NAME(budget_tile_write)(&tile, out, &g, 0, 1, 0);
    for (int i = 0; i < count; i++)
        if (!NAME(budget_solved)(&tile, call, i)) NAME(weighted_rows)(call, index + i, 1, space);
}

/* The weights and shares of all rows of a call that have the same. */
FN void NAME(weighted_prepare)(const struct weighted *call, struct budget_space *space) {
    struct weighted bare = *call; /* no score is looked at: they may be of another type */
    bare.mask = 0, bare.temperature = 1;
    NAME(given) g = NAME(given_row)(&bare, 0, space);
    NAME(shares_of)(&g, (REAL *)space->shared_w, (REAL *)space->shared_a, &space->shares);
}
