/* The arithmetic of one row, for one type and one instruction set; lml.c includes this file once for each.

   Takes: REAL and its constants (see lml.c), LANES (numbers in a vector), TARGET (the instruction set), NAME(x).
   Most loops are plain scalar code for the compiler to vectorise: no branches, no calls, reductions marked as such. The
   passes of the search, which take most of the time, are written in vectors. Sums run over BLOCKs in REAL, so that no
   lane adds up more than STEPS numbers, and from there on in double. */

#define STEPS (VECTOR < 32 ? 8 : 32)
#define BLOCK (STEPS * LANES)
#define VEC NAME(vector)
#define FN TARGET static
#define INLINE __attribute__((always_inline)) TARGET static inline
#define PRAGMA(text) _Pragma(#text)

/* The limits of an exponential, such that the compiler does not know their values: it would work out the ends apart,
   and blend. */
#define LIMITS                                 \
    REAL low = EXP_LOW, high = EXP_HIGH;       \
    __asm__("" : "+m"(low), "+m"(high));

typedef REAL NAME(vector) __attribute__((vector_size(VECTOR)));
typedef SIGNED NAME(lanes) __attribute__((vector_size(VECTOR)));
typedef BITS NAME(bits) __attribute__((vector_size(VECTOR)));

/* A row: its scores (logits over the temperature, -inf where masked), the points of the search, and what the passes
   over its parts need and find. */
typedef struct {
    int64_t n;
    const REAL *logits, *x, *u;
    const uint8_t *mask;
    const REAL *label; /* how much of each class is a label, from 0 to 1; -1 where that is unknown */
    REAL *copy, *e, *out;
    REAL temperature, pivot, cut;
    REAL c, s, t, scale, shift, rho, rest, weight; /* rest = 1 - rho */
    int kind, threads;
    int at_most; /* k is the largest sum, and nu no more than 0 */
    struct sums *parts;
    /* The search. nu is kept as a distance `at` from -c, and its bounds with it: far from 0 a sum would lose digits. */
    int state, passes, ranked;
    int tails; /* far from the solution: the next step takes `full` */
    double k, top, finite, at, lo, hi, low, least, high, step, sum_h; /* low: -inf is a score, least: it is none */
    REAL upper, lower; /* the scores of ranks ceil(k) and floor(k) + 1, once `ranked` */
    struct sums m;
    double pull; /* of the loss: the sum of its derivatives in x + nu */
    REAL *h;     /* room for h */
} NAME(row);

/* The same for a vector, without limits. */
INLINE VEC NAME(vector_exp)(VEC x) {
    VEC shifted = x * R(1.44269504088896340736) + ROUNDER;
    VEC m = shifted - ROUNDER;
    VEC r = (x - m * LN2_HIGH) - m * LN2_LOW;
    VEC p = EXP_POLYNOMIAL(r);
    return (VEC)((NAME(bits))p + ((NAME(bits))shifted << MANTISSA));
}

INLINE VEC NAME(select)(NAME(lanes) test, VEC yes, VEC no) {
    return (VEC)((test & (NAME(lanes))yes) | (~test & (NAME(lanes))no));
}

/* The sum of the lanes. */
INLINE double NAME(total)(VEC x) {
    REAL parts[LANES];
    double sum = 0;
    memcpy(parts, &x, sizeof parts);
    PRAGMA(omp simd reduction(+ : sum))
    for (int i = 0; i < LANES; i++) sum += parts[i];
    return sum;
}

/* x + nu; an infinite score keeps its sign. */
INLINE REAL NAME(point)(REAL x, REAL c, REAL t) { return (x - c) + t; }

/* ---- Passes: each works on the scores first <= i < last of a row. ---- */

FN void NAME(prepare_part)(NAME(row) * row, int64_t first, int64_t last, struct sums *sums) {
    const REAL *restrict logits = row->logits;
    const uint8_t *restrict mask = row->mask;
    REAL *restrict copy = row->copy;
    REAL temperature = row->temperature;
    (void)sums;
    if (mask)
        for (int64_t i = first; i < last; i++) {
            REAL x = logits[i] / temperature;
            copy[i] = mask[i] ? x : -INFINITE;
        }
    else
        for (int64_t i = first; i < last; i++) copy[i] = logits[i] / temperature;
}

/* Moments about the first score; nan or inf in a row shows in them. */
FN void NAME(moments_part)(NAME(row) * row, int64_t first, int64_t last, struct sums *sums) {
    const REAL *restrict x = row->x;
    REAL pivot = row->pivot, low = 0, high = 0;
    double total = 0, squares = 0;
    for (int64_t b = first; b < last; b += BLOCK) {
        int64_t end = b + BLOCK < last ? b + BLOCK : last;
        REAL sum = 0, square = 0;
        PRAGMA(omp simd reduction(+ : sum, square) reduction(min : low) reduction(max : high))
        for (int64_t i = b; i < end; i++) {
            REAL d = x[i] - pivot;
            sum += d;
            square += d * d;
            low = d < low ? d : low;
            high = d > high ? d : high;
        }
        total += sum;
        squares += square;
    }
    *sums = (struct sums){.a = total, .b = squares, .low = low, .high = high};
}

/* The same about 0 for the finite scores, with counts of the others. */
FN void NAME(census_part)(NAME(row) * row, int64_t first, int64_t last, struct sums *sums) {
    const REAL *restrict x = row->x;
    double sum = 0, square = 0, count = 0, top = 0, nan = 0;
    REAL low = INFINITE, high = -INFINITE;
    PRAGMA(omp simd reduction(+ : sum, square, count, top, nan) reduction(min : low) reduction(max : high))
    for (int64_t i = first; i < last; i++) {
        REAL v = x[i];
        int finite = NAME(finite)(v);
        double d = finite ? (double)v : 0.0;
        REAL small = finite ? v : INFINITE, large = finite ? v : -INFINITE;
        sum += d;
        square += d * d;
        count += finite ? 1.0 : 0.0;
        top += v == INFINITE ? 1.0 : 0.0;
        nan += v != v ? 1.0 : 0.0;
        low = small < low ? small : low;
        high = large > high ? large : high;
    }
    *sums = (struct sums){.a = sum, .b = square, .f = count, .square = top, .above = nan, .low = low, .high = high};
}

/* The scores from `cut` to `pivot`: their number, and their moments about the latter. */
FN void NAME(near_part)(NAME(row) * row, int64_t first, int64_t last, struct sums *sums) {
    const REAL *restrict x = row->x;
    REAL pivot = row->pivot, cut = row->cut;
    double sum = 0, square = 0, count = 0;
    PRAGMA(omp simd reduction(+ : sum, square, count))
    for (int64_t i = first; i < last; i++) {
        int near = x[i] >= cut && x[i] <= pivot;
        double d = near ? (double)(x[i] - pivot) : 0.0;
        sum += d;
        square += d * d;
        count += near ? 1.0 : 0.0;
    }
    *sums = (struct sums){.a = sum, .b = square, .f = count};
}

/* How many scores are at least `pivot`. */
FN void NAME(count_part)(NAME(row) * row, int64_t first, int64_t last, struct sums *sums) {
    const REAL *restrict x = row->x;
    VEC pivot = {0};
    NAME(lanes) found = {0};
    int64_t i = first, count = 0;
    for (pivot += row->pivot; i + LANES <= last; i += LANES) {
        VEC score;
        memcpy(&score, x + i, sizeof score);
        found -= score >= pivot;
    }
    for (int j = 0; j < LANES; j++) count += found[j];
    for (; i < last; i++) count += x[i] >= row->pivot;
    *sums = (struct sums){.f = (double)count};
}

/* The largest score below `cut`, and the least of the others. */
FN void NAME(next_part)(NAME(row) * row, int64_t first, int64_t last, struct sums *sums) {
    const REAL *restrict x = row->x;
    REAL cut = row->cut, high = -INFINITE, low = INFINITE;
    PRAGMA(omp simd reduction(max : high) reduction(min : low))
    for (int64_t i = first; i < last; i++) {
        REAL below = x[i] < cut ? x[i] : -INFINITE, above = x[i] < cut ? INFINITE : x[i];
        high = below > high ? below : high;
        low = above < low ? above : low;
    }
    *sums = (struct sums){.low = low, .high = high};
}

/* What a pass of the search sums, with q = (1 - y) / y: a = sum y h, b = sum (1 - y) h, h = y (1 - y); square = sum
   h^2; f = sum y - above. All from w, the lesser of y and 1 - y, with above = #{y > 1/2} and perhaps full = sum w of
   these; or plainly, with above = 0, where it need not be exact. */
#define SUM_PLAIN(q)                                        \
    VEC y = R(1.0) / (R(1.0) + q), v = q * y, h = y * v;    \
    a += h * y;                                             \
    b += h * v;                                             \
    square += h * h;                                        \
    f += y;

#define SUM_EXACT(q)                                        \
    VEC y = R(1.0) / (R(1.0) + q), v = q * y;               \
    NAME(lanes) up = y > v;                                 \
    VEC w = NAME(select)(up, v, y), h = w - w * w;          \
    a += h * y;                                             \
    b += h * v;                                             \
    square += h * h;                                        \
    f += NAME(select)(up, -w, w);                           \
    above += NAME(select)(up, one, zero);

#define SUM_TAILS(q)                                        \
    SUM_EXACT(q)                                            \
    full += NAME(select)(up, w, zero);

/* The sums over a part of a row, with the vector q at i. */
#define SUM_PART(q, SUM)                                                                                           \
    {                                                                                                              \
    VEC zero = {0}, one = zero + R(1.0);                                                                           \
    *sums = (struct sums){0};                                                                                      \
    (void)one;                                                                                                     \
    for (int64_t i = first; i < last;) {                                                                           \
        int64_t end = i + BLOCK < last ? i + BLOCK : last;                                                         \
        VEC a = zero, b = zero, f = zero, square = zero, above = zero, full = zero;                                \
        for (; i < end; i += LANES) {                                                                              \
            VEC p = q;                                                                                             \
            SUM(p)                                                                                                 \
        }                                                                                                          \
        sums->a += NAME(total)(a), sums->b += NAME(total)(b), sums->f += NAME(total)(f);                           \
        sums->square += NAME(total)(square), sums->above += NAME(total)(above), sums->full += NAME(total)(full);   \
    }                                                                                                              \
    }

/* c - x from i on; beyond the row EXP_HIGH, which weighs nothing. (No score does for that: next to a large c the
   number c - EXP_HIGH rounds to c itself.) */
INLINE VEC NAME(below)(const REAL *x, int64_t i, int64_t n, REAL c) {
    VEC found;
    REAL padded[LANES];
    if (i + LANES > n) {
        for (int j = 0; j < LANES; j++) padded[j] = i + j < n ? x[i + j] : c;
        memcpy(&found, padded, sizeof found);
        found = c - found;
        for (int j = (int)(n - i); j < LANES; j++) found[j] = EXP_HIGH;
        return found;
    }
    memcpy(&found, x + i, sizeof found);
    return c - found;
}

/* Whether exp(c - x) is in range for all scores, so that the exponential needs no limits. */
INLINE int NAME(narrow)(const NAME(row) * row) {
    return row->c - row->low < EXP_HIGH && row->c - row->high > EXP_LOW;
}

INLINE VEC NAME(limited)(VEC x) {
    VEC low = {0}, high = {0};
    low += EXP_LOW, high += EXP_HIGH;
    x = NAME(select)(x < high, x, high);
    return NAME(select)(x > low, x, low);
}

INLINE VEC NAME(keep)(VEC q, REAL *e) {
    memcpy(e, &q, sizeof q);
    return q;
}

INLINE VEC NAME(kept)(const REAL *e) {
    VEC q;
    memcpy(&q, e, sizeof q);
    return q;
}

/* E = exp(c - x), kept for the passes to come in `e`, which has room for whole vectors, and the sums at nu = -c. */
FN void NAME(start_part)(NAME(row) * row, int64_t first, int64_t last, struct sums *sums) {
    const REAL *restrict x = row->x;
    REAL *restrict e = row->e;
    REAL c = row->c;
    int64_t n = row->n;
    if (NAME(narrow)(row))
        SUM_PART(NAME(keep)(NAME(vector_exp)(NAME(below)(x, i, n, c)), e + i), SUM_PLAIN)
    else
        SUM_PART(NAME(keep)(NAME(vector_exp)(NAME(limited)(NAME(below)(x, i, n, c))), e + i), SUM_TAILS)
}

/* The sums at exp(-nu) = s exp(c). */
FN void NAME(search_part)(NAME(row) * row, int64_t first, int64_t last, struct sums *sums) {
    const REAL *restrict e = row->e;
    REAL s = row->s;
    if (row->tails)
        SUM_PART(NAME(kept)(e + i) * s, SUM_TAILS)
    else
        SUM_PART(NAME(kept)(e + i) * s, SUM_EXACT)
}

FN void NAME(write_y_part)(NAME(row) * row, int64_t first, int64_t last, struct sums *sums) {
    const REAL *restrict e = row->e;
    REAL *restrict out = row->out;
    REAL s = row->s;
    (void)sums;
    PRAGMA(omp simd)
    for (int64_t i = first; i < last; i++) out[i] = e[i] < EXP_CEILING ? R(1.0) / (R(1.0) + e[i] * s) : R(0.0);
}

/* The same from c and t alone: without `e`, and for a t of any size. A short t is a factor, since rounding x - c + t
   would show in the sum. A long one means a c whose neighbours are further apart than that, and so are the scores. */
FN void NAME(write_hard_part)(NAME(row) * row, int64_t first, int64_t last, struct sums *sums) {
    const REAL *restrict x = row->x;
    REAL *restrict out = row->out;
    REAL c = row->c, far = NAME(abs)(row->t) > R(1.0) ? row->t : R(0.0), s = (REAL)exp((double)far - (double)row->t);
    (void)sums;
    PRAGMA(omp simd)
    for (int64_t i = first; i < last; i++) {
        REAL z = (c - x[i]) - far, e = NAME(exp)(z, EXP_LOW, -EXP_LOW); /* a k as small as that shows in the sum */
        out[i] = z < -EXP_LOW ? R(1.0) / (R(1.0) + e * s) : R(0.0);
    }
}

FN void NAME(write_log_part)(NAME(row) * row, int64_t first, int64_t last, struct sums *sums) {
    const REAL *restrict x = row->x;
    REAL *restrict out = row->out;
    REAL c = row->c, t = row->t;
    (void)sums;
    PRAGMA(omp simd)
    for (int64_t i = first; i < last; i++) {
        REAL z = NAME(point)(x[i], c, t);
        REAL e = NAME(exp)(-NAME(abs)(z), EXP_LOW, EXP_HIGH);
        e = NAME(abs)(z) > -EXP_LOW ? R(0.0) : e;
        out[i] = (z < 0 ? z : R(0.0)) - NAME(log1p)(e);
    }
}

/* At a point: e = exp(-|x + nu|), 1 / (1 + e), and h = y (1 - y). */
#define POINT_H                                                  \
    REAL z = NAME(point)(x[i], c, t);                            \
    REAL e = NAME(exp)(-NAME(abs)(z), EXP_LOW, EXP_HIGH);                           \
    e = NAME(abs)(z) > -EXP_LOW ? R(0.0) : e;                    \
    REAL over = R(1.0) / (R(1.0) + e);                           \
    REAL h = e * over * over;

/* |x|. */
INLINE VEC NAME(magnitude)(VEC x) {
    NAME(bits) sign = {0};
    sign = (sign + 1) << (8 * REAL_BYTES - 1);
    return (VEC)((NAME(bits))x & ~sign);
}

/* h to `out`, in vectors; the last of them overlaps the one before it. */
FN void NAME(write_h)(const NAME(row) * row, int64_t first, int64_t last) {
    const REAL *restrict x = row->x;
    const REAL *u = row->u;
    REAL *restrict out = row->out, c = row->c, t = row->t;
    VEC zero = {0}, one = zero + R(1.0), most = zero - EXP_LOW;
    if (last - first < LANES) {
        PRAGMA(omp simd)
        for (int64_t i = first; i < last; i++) {
            POINT_H
            out[i] = h;
        }
        return;
    }
    for (int64_t i = first; i < last; i += LANES) {
        int64_t at = i + LANES > last ? last - LANES : i;
        VEC score;
        memcpy(&score, x + at, sizeof score);
        __builtin_prefetch(x + at + AHEAD, 0, 2);
        __builtin_prefetch(u + at + AHEAD, 0, 2);
        __builtin_prefetch(out + at + AHEAD, 1, 2);
        VEC far = NAME(magnitude)((score - c) + t);
        NAME(lanes) near = far <= most;
        VEC e = (VEC)(near & (NAME(lanes))NAME(vector_exp)(-NAME(select)(near, far, most)));
        VEC over = one / (one + e), h = e * over * over;
        memcpy(out + at, &h, sizeof h);
    }
}

/* Backward: h to `out` (not for the logarithm), and the sums of h (a) and h u (b), or of (1 - y) u (b) for the
   logarithm. The sums are a loop of their own: next to an exponential the compiler keeps them in memory. */
FN void NAME(weigh_part)(NAME(row) * row, int64_t first, int64_t last, struct sums *sums) {
    const REAL *restrict x = row->x, *restrict u = row->u;
    REAL *restrict out = row->out;
    REAL c = row->c, t = row->t;
    double a = 0, b = 0;
    if (row->kind != KIND_LOG) NAME(write_h)(row, first, last);
    if (row->kind == KIND_Y)
        PRAGMA(omp simd reduction(+ : a, b))
        for (int64_t i = first; i < last; i++) {
            a += out[i];
            b += (double)out[i] * (double)(NAME(finite)(x[i]) ? u[i] : R(0.0));
        }
    else if (row->kind == KIND_LOG)
        PRAGMA(omp simd reduction(+ : a, b))
        for (int64_t i = first; i < last; i++) {
            POINT_H
            a += h;
            b += NAME(finite)(x[i]) ? (z < 0 ? over : e * over) * u[i] : R(0.0);
        }
    else
        PRAGMA(omp simd reduction(+ : a))
        for (int64_t i = first; i < last; i++) a += out[i];
    *sums = (struct sums){.a = a, .b = b};
}

/* h (u - shift) scale for y; ((1 - y) u - h shift) scale for the logarithm; -h shift scale for nu. */
FN void NAME(spread_part)(NAME(row) * row, int64_t first, int64_t last, struct sums *sums) {
    const REAL *restrict x = row->x, *restrict u = row->u;
    REAL *restrict out = row->out;
    REAL c = row->c, t = row->t, shift = row->shift, scale = row->scale;
    int kind = row->kind;
    (void)sums;
    if (kind == KIND_Y)
        PRAGMA(omp simd)
        for (int64_t i = first; i < last; i++) {
            REAL g = NAME(finite)(x[i]) ? u[i] : R(0.0);
            out[i] = out[i] * (g - shift) * scale;
        }
    else if (kind == KIND_LOG)
        PRAGMA(omp simd)
        for (int64_t i = first; i < last; i++) {
            POINT_H
            REAL v = NAME(finite)(x[i]) ? (z < 0 ? over : e * over) * u[i] : R(0.0);
            out[i] = (v - h * shift) * scale;
        }
    else
        PRAGMA(omp simd)
        for (int64_t i = first; i < last; i++) out[i] = -out[i] * shift * scale;
}

/* At a point of the loss: the shares `hit` and `rest_of` of the terms -log y and -log(1 - rho y), keep = 1 - rho y, and
   the derivative d of the loss in z. h / keep is formed without the e that both hold, and which may be 0 where rho is
   1. */
#define POINT_LOSS                                                                                     \
    POINT_H                                                                                            \
    REAL y = z < 0 ? e * over : over, miss = z < 0 ? over : e * over;                                  \
    REAL keep = (z < 0 ? R(1.0) + rest * e : rest + e) * over;                                         \
    REAL part = z < 0 ? e / (R(1.0) + rest * e) : rest == 0 ? R(1.0) : e / (rest + e);                 \
    REAL hit = label[i] < 0 ? R(0.0) : label[i], rest_of = label[i] < 0 ? R(0.0) : R(1.0) - label[i];  \
    REAL d = rest_of * (rho * part * over) - hit * miss;                                               \
    d = NAME(finite)(x[i]) ? d : R(0.0);

/* b = sum dz, f = the loss. */
#define SUM_LOSS(STORE)                                                                                \
    PRAGMA(omp simd reduction(+ : b, f))                                                               \
    for (int64_t i = first; i < last; i++) {                                                           \
        POINT_LOSS                                                                                     \
        (void)h;                                                                                       \
        REAL soft = NAME(log1p)(e), log_y = (z < 0 ? z : R(0.0)) - soft;                               \
        REAL minus = -rho * y, sum = R(1.0) + minus;                                                   \
        REAL log_keep = NAME(log)(z < 0 ? sum : keep, z < 0 ? minus - (sum - R(1.0)) : R(0.0));        \
        log_keep = rest == 0 ? (z < 0 ? R(0.0) : -z) - soft : log_keep;                                \
        b += d;                                                                                        \
        f -= (hit == 0 ? R(0.0) : hit * log_y) + (rest_of == 0 ? R(0.0) : rest_of * log_keep);         \
        STORE                                                                                          \
    }

FN void NAME(loss_part)(NAME(row) * row, int64_t first, int64_t last, struct sums *sums) {
    const REAL *restrict x = row->x;
    const REAL *restrict label = row->label;
    REAL c = row->c, t = row->t, rho = row->rho, rest = row->rest;
    double b = 0, f = 0;
    SUM_LOSS()
    *sums = (struct sums){.b = b, .f = f};
}

/* The same, with dz to `out` and h to `h`. */
FN void NAME(loss_store_part)(NAME(row) * row, int64_t first, int64_t last, struct sums *sums) {
    const REAL *restrict x = row->x;
    const REAL *restrict label = row->label;
    REAL *restrict out = row->out, *restrict kept = row->h;
    REAL c = row->c, t = row->t, rho = row->rho, rest = row->rest;
    double b = 0, f = 0;
    SUM_LOSS(out[i] = d; kept[i] = h;)
    *sums = (struct sums){.b = b, .f = f};
}

/* The same for rho = 1, whose terms are those of the Fenchel-Young loss, with dz to `out`. */
FN void NAME(young_part)(NAME(row) * row, int64_t first, int64_t last, struct sums *sums) {
    const REAL *restrict x = row->x;
    const REAL *restrict label = row->label;
    REAL *restrict out = row->out;
    REAL c = row->c, t = row->t;
    const REAL rho = 1, rest = 0;
    double b = 0, f = 0;
    SUM_LOSS(out[i] = d;)
    *sums = (struct sums){.b = b, .f = f};
}

/* From these (dz - h weight) scale. */
FN void NAME(loss_stored_part)(NAME(row) * row, int64_t first, int64_t last, struct sums *sums) {
    const REAL *restrict h = row->h;
    REAL *restrict out = row->out;
    REAL weight = row->weight, scale = row->scale;
    (void)sums;
    PRAGMA(omp simd)
    for (int64_t i = first; i < last; i++) out[i] = (out[i] - h[i] * weight) * scale;
}

/* (dz - h weight) scale; without `label` no class has a dz. */
FN void NAME(loss_spread_part)(NAME(row) * row, int64_t first, int64_t last, struct sums *sums) {
    const REAL *restrict x = row->x;
    const REAL *restrict label = row->label;
    REAL *restrict out = row->out;
    REAL c = row->c, t = row->t, rho = row->rho, rest = row->rest, weight = row->weight, scale = row->scale;
    (void)sums;
    if (!label)
        PRAGMA(omp simd)
        for (int64_t i = first; i < last; i++) {
            POINT_H
            out[i] = -h * weight * scale;
        }
    else
        PRAGMA(omp simd)
        for (int64_t i = first; i < last; i++) {
            POINT_LOSS
            (void)y, (void)keep;
            out[i] = (d - h * weight) * scale;
        }
}

/* ---- A pass over a whole row, its parts on several threads where there are any. ---- */

typedef void (*NAME(part))(NAME(row) *, int64_t, int64_t, struct sums *);

typedef struct {
    NAME(row) * row;
    NAME(part) part;
} NAME(pass_job);

FN void NAME(pass_work)(void *job, int64_t part, int slot) {
    NAME(pass_job) *pass = job;
    NAME(row) *row = pass->row;
    int64_t first = part * PART, last = first + PART < row->n ? first + PART : row->n;
    (void)slot;
    pass->part(row, first, last, row->parts + part);
}

__attribute__((noinline)) FN struct sums NAME(long_pass)(NAME(row) * row, NAME(part) part) {
    NAME(pass_job) job = {row, part};
    int64_t parts = (row->n + PART - 1) / PART;
    memset(row->parts, 0, (size_t)parts * sizeof *row->parts);
    pool_run(NAME(pass_work), &job, parts, row->threads);
    struct sums total = row->parts[0];
    for (int64_t i = 1; i < parts; i++) add_sums(&total, row->parts + i);
    return total;
}

INLINE struct sums NAME(pass)(NAME(row) * row, NAME(part) part) {
    struct sums sums = {0};
    if (row->n > PART) return NAME(long_pass)(row, part);
    part(row, 0, row->n, &sums);
    return sums;
}

#ifdef WITH_HARD

/* The sums of a pass in logarithms at the points d + at: all parts are scaled by the largest, exp(peak), so that they
   do not underflow across a wide gap. a = sum y^2 (1 - y), b = sum y (1 - y)^2, f = the signed small parts w,
   square = sum of the signed w^2 (3 - 2 w). */
FN struct sums NAME(hard_sums)(const double *restrict d, int64_t n, double at, double peak) {
    LIMITS
    double a = 0, b = 0, f = 0, cubic = 0, above = 0, unit = exp(peak);
    PRAGMA(omp simd reduction(+ : a, b, f, cubic, above))
    for (int64_t i = 0; i < n; i++) {
        double z = d[i] + at, tail = NAME(exp)(-NAME(abs)(z) - peak, low, high), over = 1.0 / (1.0 + tail * unit);
        double w = tail * unit * over, part = tail * over, o = 1.0 - w;
        double outer = part * o * o, inner = part * o * w, bend = part * w * (3.0 - 2.0 * w);
        a += z > 0 ? outer : inner;
        b += z > 0 ? inner : outer;
        f += z > 0 ? -part : part;
        cubic += z > 0 ? -bend : bend;
        above += z > 0 ? 1.0 : 0.0;
    }
    return (struct sums){.a = a, .b = b, .f = f, .square = cubic, .above = above};
}

/* Where sum y = k inside a wide gap: the sums of the tails above and below, each over its largest part, are equal. */
FN double NAME(gap_center)(const double *restrict d, int64_t n, double upper, double lower) {
    LIMITS
    double above = 0, below = 0;
    PRAGMA(omp simd reduction(+ : above, below))
    for (int64_t i = 0; i < n; i++) {
        double tail = NAME(exp)(d[i] < 0 ? d[i] - lower : upper - d[i], low, high);
        below += d[i] < 0 ? tail : 0.0;
        above += d[i] < 0 ? 0.0 : tail;
    }
    return log(above / below) / 2 - (upper + lower) / 2;
}

/* The search that holds on any row: exact bounds from the scores of ranks ceil(k) and floor(k) + 1, sums in logarithms.
   nu = t - c. The center stays where it is, between those two, and the scores become distances from it: where k is not
   whole it is a score itself, and t is short however large the scores are. */
FN void NAME(solve_hard)(double *x, int64_t n, double k, double upper, double lower, double *center, double *t) {
    double upper_rank = ceil(k), lower_rank = floor(k) + 1;
    double c = lower / 2 + upper / 2;
    double lo = log(k - (upper_rank - 1)) - log((double)n - k) - (upper - c);
    double hi = log(k) - log(lower_rank - k) + (c - lower);
    double at = (lo + hi) / 2, slack = 8 * DBL_EPSILON * (1 + fabs(lo) + fabs(hi));
    lo -= slack, hi += slack;
    for (int64_t i = 0; i < n; i++) x[i] -= c;
    if (upper - lower > 2 * FAR) at = NAME(gap_center)(x, n, upper - c, lower - c);
    at = at < lo ? lo : at > hi ? hi : at;
    for (int i = 0; i < 64; i++) {
        double peak = -INFINITY;
        PRAGMA(omp simd reduction(max : peak))
        for (int64_t j = 0; j < n; j++) {
            double z = -NAME(abs)(x[j] + at);
            peak = z > peak ? z : peak;
        }
        struct sums m = NAME(hard_sums)(x, n, at, peak);
        double surplus = m.above - k, exponent = surplus == 0 ? 0 : peak, unit = exp(exponent);
        /* Inside a gap that wide, which side is nearer is a matter of rounding: y is 0 or 1, and log y right to eps. */
        if (surplus == 0 && -peak > 4 / DBL_EPSILON) break;
        double f = surplus + m.f * unit, cubic = surplus + m.square * unit, r = f / ((m.a + m.b) * unit);
        double root = hypot(cubic, 2 * sqrt(m.a * unit) * sqrt(m.b * unit)); /* no square underflows */
        double safe = cubic > 0 ? log(2) + log(m.a) + exponent - log(cubic + root)
                                : log(root - cubic) - log(2) - log(m.b) - exponent;
        if ((safe < 0) != (f > 0)) safe = 0;
        double halley = -r / (1 - r * ((m.b - m.a) / (m.a + m.b)) / 2);
        if (fabs(r) < 0.5 && 0.42 * fabs(r * r * r) <= DBL_EPSILON / 2) {
            at += halley;
            break;
        }
        double step = fabs(r) < 1 && fabs(halley) > fabs(safe) ? halley : safe;
        lo = fmax(lo, at + (f < 0 ? safe : log1p(-fmin(r, 1))) - 4 * DBL_EPSILON * (1 + fabs(at)));
        hi = fmin(hi, at + (f > 0 ? safe : -log1p(fmax(r, -1))) + 4 * DBL_EPSILON * (1 + fabs(at)));
        at = at + step >= lo && at + step <= hi ? at + step : (lo + hi) / 2;
    }
    *center = c;
    *t = at;
}

#endif

/* ---- A row. ---- */

/* Point the row at its scores, which are the logits themselves where nothing is masked or divided. */
FN void NAME(prepare)(NAME(row) * row) {
    row->x = row->logits;
    if (!row->mask && row->temperature == R(1.0)) return;
    NAME(pass)(row, NAME(prepare_part));
    row->x = row->copy;
}

/* The integers of the numbers, in the same order; and back. */
INLINE SIGNED NAME(order)(REAL x) {
    SIGNED bits = (SIGNED)NAME(to_bits)(x);
    return bits < 0 ? (SIGNED)((BITS)bits ^ ((BITS)-1 >> 1)) : bits;
}

INLINE REAL NAME(of_order)(SIGNED order) {
    return NAME(from_bits)(order < 0 ? (BITS)order ^ ((BITS)-1 >> 1) : (BITS)order);
}

INLINE double NAME(at_least)(NAME(row) * row, REAL least) {
    row->pivot = least;
    return NAME(pass)(row, NAME(count_part)).f;
}

/* Search between the exact bounds of nu that `upper` and `lower` give. In a gap so wide that all sums underflow there is
   no use in that. */
FN void NAME(begin_between)(NAME(row) * row, REAL upper, REAL lower) {
    double upper_rank = ceil(row->k), lower_rank = floor(row->k) + 1, c = row->c;
    row->upper = upper, row->lower = lower;
    row->ranked = 1;
    row->passes = 0;
    row->lo = log(row->k - (upper_rank - 1)) - log(row->finite - row->k) - ((double)upper - c);
    row->hi = log(row->k) - log(lower_rank - row->k) - ((double)lower - c);
    row->at = (row->lo + row->hi) / 2;
    row->state = (double)upper - (double)lower < -2 * LOG_SMALLEST ? OPEN : HARD;
}

/* Find the scores of both ranks by halving the numbers between the ends. */
FN void NAME(rank)(NAME(row) * row) {
    double upper_rank = ceil(row->k), lower_rank = floor(row->k) + 1;
    double slack = 4 * EPS * (fabs(row->least) + fabs(row->high)); /* of ends that were found as distances */
    SIGNED first = NAME(order)((REAL)fmax(row->least - slack, -LARGEST));
    SIGNED last = NAME(order)((REAL)fmin(row->high + slack, LARGEST)) + 1;
    while (last - 1 > first) {
        SIGNED middle = (first & last) + ((first ^ last) >> 1);
        if (NAME(at_least)(row, NAME(of_order)(middle)) - row->top >= upper_rank)
            first = middle;
        else
            last = middle;
    }
    REAL upper = NAME(of_order)(first), lower = upper;
    if (lower_rank > upper_rank && NAME(at_least)(row, upper) - row->top < lower_rank)
        row->cut = upper, lower = (REAL)NAME(pass)(row, NAME(next_part)).high;
    NAME(begin_between)(row, upper, lower);
}

/* Of scores far apart, those that lie about the solution make a guess: the moments of a group within NEAR of its largest,
   where k ends in it, as those of all would be; `square` is what the groups above leave of k. Whether there is one. Where
   k ends with a group, the search begins in the gap below it. */
FN int NAME(begin_near)(NAME(row) * row, struct sums *m) {
    row->cut = INFINITE;
    double left = row->k, high = NAME(pass)(row, NAME(next_part)).high;
    for (int groups = 0; groups < 4 && left > 0; groups++) {
        row->pivot = (REAL)high;
        row->cut = row->pivot - (REAL)NEAR;
        struct sums near = NAME(pass)(row, NAME(near_part));
        if (near.f > left) {
            *m = near;
            m->square = left, m->high = high;
            return 1;
        }
        left -= near.f;
        near = NAME(pass)(row, NAME(next_part));
        high = near.high;
        if (left == 0) NAME(begin_between)(row, (REAL)near.low, (REAL)high);
    }
    return 0;
}

/* Moments of the row and a first guess; DEGENERATE with the infinite or nan t where there is nothing to search. */
FN void NAME(begin)(NAME(row) * row, double k, struct start *start) {
    struct sums m = {.a = NAN};
    double n = (double)row->n, pivot = 0;
    row->c = row->t = 0;
    row->top = row->passes = row->ranked = row->tails = 0;
    if (row->n > 0 && NAME(finite)(row->x[0])) {
        row->pivot = row->x[0];
        m = NAME(pass)(row, NAME(moments_part));
        pivot = row->pivot;
    }
    if (!(fabs(m.a) <= DBL_MAX) || !(m.b <= DBL_MAX)) {
        m = (struct sums){.low = INFINITY, .high = -INFINITY};
        if (row->n > 0) m = NAME(pass)(row, NAME(census_part));
        pivot = 0;
        n = m.f;
        k -= row->top = m.square;
        if (m.above > 0) k = NAN;
    }
    if (row->at_most && k > n) k = n;
    row->k = k;
    row->finite = n;
    row->state = DEGENERATE;
    row->t = (REAL)(k == 0 ? -INFINITY : k == n ? INFINITY : NAN);
    if (!(k > 0 && k < n)) return;

    row->state = OPEN;
    row->low = n == (double)row->n ? m.low + pivot : -INFINITY;
    row->high = m.high + pivot;
    row->least = m.low + pivot;
    start_prepare(start, k, n);
    row->lo = start->logit - row->high;
    row->hi = start->logit - (m.low + pivot);
    if (m.high - m.low > NEAR && NAME(begin_near)(row, &m)) k = m.square, n = m.f, pivot = m.high;
    if (row->ranked) return;
    start_prepare(start, k, n);
    double mean = m.a / n, variance = m.b / n - mean * mean;
    row->at = start_guess(start->logit, start->log_p, start->quantile, mean + pivot, variance, row->lo, row->hi);
}

/* The sums at `at`: from the scores where that is far from the centre, else from `e`. */
FN void NAME(look)(NAME(row) * row) {
    if (row->passes++ == 0 || fabs(row->at) > FAR) {
        double c = row->c;
        row->c = (REAL)(c - row->at);
        double moved = (double)row->c - c;
        row->lo += moved, row->hi += moved, row->at = 0;
        row->m = NAME(pass)(row, NAME(start_part));
        if (!NAME(narrow)(row) || row->m.a + row->m.b > row->m.f / 4) return; /* else plain sums will not do */
        row->tails = 1;
    }
    row->s = (REAL)exp(-row->at);
    row->m = NAME(pass)(row, NAME(search_part));
}

FN void NAME(move)(NAME(row) * row) {
    double slack = 16 * EPS * (1 + fabs((double)row->c));
    double k = row->k + row->top; /* the passes count the infinite scores in */
    row->state = take_step(&row->m, k, row->at, &row->lo, &row->hi, EPS, slack, SMALLEST_SUM, &row->step);
    if (row->state != HARD) row->at += row->step;
    row->tails = fabs(row->step) > 0.3;
    int stuck = fabs(row->at) > FAR && (REAL)((double)row->c - row->at) == row->c; /* c is too large to be moved */
    if (row->state == OPEN && (stuck || row->passes == 16)) row->state = HARD;
    if (row->state == HARD && !row->ranked) NAME(rank)(row);
}

/* nu = t - c as a pair whose second part is small: a long t would be rounded where it shows. */
FN void NAME(split)(NAME(row) * row, double c, double t) {
    row->c = (REAL)(fabs(t) < 0.03 ? c : c - t);
    row->t = (REAL)(((double)row->c - c) + t);
}

/* Where the budget is not reached nu is 0: then y follows from the scores alone. */
INLINE void NAME(loosen)(NAME(row) * row) {
    if (row->at_most && row->t >= row->c) row->state = HARD, row->c = row->t = 0;
}

/* After CLOSE, `e` and `s` are set, so that y = 1 / (1 + e s): the last step of the search enters through `s`, and the
   sums are right at the points returned, to rounding. `sum_h` is of the last pass, moved to the solution, or nan where
   the last step was too long for that. After HARD the search in logarithms gives c and t alone. */
FN void NAME(finish)(NAME(row) * row, double *workspace) {
    row->sum_h = NAN;
    if (row->state == CLOSE) {
        double t = row->step, a = row->m.a, b = row->m.b;
        if (fabs(t * t * t) < EPS) row->sum_h = (a + b) + t * ((b - a) + t / 2 * (a + b - 6 * row->m.square));
        row->s = (REAL)exp(-row->at);
        NAME(split)(row, (double)row->c, row->at);
    } else if (row->state == HARD) {
        int64_t finite = 0;
        for (int64_t i = 0; i < row->n; i++)
            if (NAME(finite)(row->x[i])) workspace[finite++] = (double)row->x[i];
        double c, t;
        SOLVE_HARD(workspace, finite, row->k, (double)row->upper, (double)row->lower, &c, &t);
        NAME(split)(row, c, t);
    }
}

FN void NAME(solve)(NAME(row) * row, double k, struct space *space) {
    NAME(begin)(row, k, &space->start);
    while (row->state == OPEN) {
        NAME(look)(row);
        if (row->at_most && unreached(row->at - (double)row->c, row->m.f + row->m.above, row->k + row->top, EPS)) {
            row->state = DEGENERATE, row->t = INFINITE;
            break;
        }
        NAME(move)(row);
    }
    NAME(finish)(row, space->workspace);
    NAME(loosen)(row);
}

/* ---- Calls: each works on `count` rows from `index` on. ---- */

FN void NAME(load)(NAME(row) * row, const struct call *call, int64_t index, struct space *space) {
    int64_t n = call->n;
    memset(row, 0, sizeof *row);
    row->n = n;
    row->logits = (const REAL *)call->logits + index * n;
    row->mask = call->mask ? call->mask + index * call->mask_stride : 0;
    row->temperature = (REAL)call->temperature;
    row->copy = (REAL *)space->copy;
    row->e = (REAL *)space->e;
    row->parts = space->parts;
    row->threads = space->threads;
    row->rho = (REAL)call->observed;
    row->rest = (REAL)(1 - call->observed);
    row->at_most = call->kind == KIND_AT_MOST;
    row->kind = row->at_most ? KIND_Y : call->kind;
    NAME(prepare)(row);
}

FN void NAME(write_point)(const struct call *call, const NAME(row) * row, int64_t index) {
    if (!call->center) return; /* where only y is wanted */
    ((REAL *)call->center)[index] = row->c;
    ((REAL *)call->delta)[index] = row->t;
}

FN void NAME(write)(const struct call *call, NAME(row) * row, int64_t index) {
    NAME(write_point)(call, row, index);
    if (call->kind == KIND_NU) return;
    row->out = (REAL *)call->out + index * row->n;
    if (row->state == DEGENERATE) {
        for (int64_t i = 0; i < row->n; i++) {
            REAL y = row->x[i] == INFINITE ? 1 : row->x[i] == -INFINITE ? 0 : row->t > 0;
            y = row->kind == KIND_Y ? y : y > 0 ? R(0.0) : -INFINITE;
            row->out[i] = row->t != row->t ? row->t : y;
        }
        return;
    }
    if (call->kind == KIND_LOG) {
        NAME(pass)(row, NAME(write_log_part));
        return;
    }
    /* What the search in plain sums left behind belongs to its own last center: `e`, `s`, `at`, the bounds, the sums. A
       hard row has another center, and is written from its scores with c and t, which `finish` has set; nothing else
       is read. The loss and the backward passes take such a row from c and t alone, too. */
    NAME(pass)(row, row->state == HARD ? NAME(write_hard_part) : NAME(write_y_part));
}

FN void NAME(forward_rows)(const struct call *call, int64_t index, int count, struct space *space) {
    for (int i = 0; i < count; i++) {
        NAME(row) row;
        NAME(load)(&row, call, index + i, space);
        NAME(solve)(&row, (double)((const REAL *)call->k)[(index + i) * call->k_stride], space);
        NAME(write)(call, &row, index + i);
    }
}

/* h exp(-peak), for a peak that is no less than -|z| but for rounding. */
INLINE double NAME(scaled_h)(double z, double peak) {
    double far = fabs(z), over = 1 / (1 + EXP_DOUBLE(-far, -708.0, 0.0)), h = EXP_DOUBLE(-far - peak, -708.0, 600.0);
    return -far - peak < -708.0 ? 0 : h * over * over;
}

/* 1 - y. */
INLINE double NAME(missing)(double z) {
    double tail = EXP_DOUBLE(-fabs(z), -708.0, 0.0), over = 1 / (1 + tail);
    return z < 0 ? over : tail * over;
}

/* sum h as exp(peak) times a number from 1 / 4 to n, where the sum itself may underflow. As one logarithm it would lose
   the number next to a large peak. */
FN struct mass NAME(mass)(const NAME(row) * row) {
    const REAL *restrict x = row->x;
    double c = row->c, t = row->t, peak = -INFINITY, sum = 0;
    PRAGMA(omp simd reduction(max : peak))
    for (int64_t i = 0; i < row->n; i++) {
        double near = NAME(finite)(x[i]) ? -fabs(((double)x[i] - c) + t) : -INFINITY;
        peak = near > peak ? near : peak;
    }
    PRAGMA(omp simd reduction(+ : sum))
    for (int64_t i = 0; i < row->n; i++) {
        double h = NAME(scaled_h)(((double)x[i] - c) + t, peak);
        sum += NAME(finite)(x[i]) ? h : 0.0;
    }
    return (struct mass){peak, sum};
}

/* The gradient where sum h underflows: as in backward_row, in logarithms. Returns that of k. */
FN double NAME(backward_hard)(NAME(row) * row, double given) {
    const REAL *restrict x = row->x, *restrict upstream = row->u;
    REAL *restrict out = row->out;
    struct mass mass = NAME(mass)(row);
    double c = row->c, t = row->t, total = 0, peak = mass.peak, unit = 1 / mass.sum, over = 1 / (double)row->temperature;
    int values = row->kind == KIND_Y, logs = row->kind == KIND_LOG;
    PRAGMA(omp simd reduction(+ : total))
    for (int64_t i = 0; i < (values || logs ? row->n : 0); i++) {
        double z = ((double)x[i] - c) + t, pull = values ? NAME(scaled_h)(z, peak) * unit : NAME(missing)(z);
        total += NAME(finite)(x[i]) ? pull * (double)upstream[i] : 0.0;
    }
    double sum = logs ? given + total : given;
    PRAGMA(omp simd)
    for (int64_t i = 0; i < row->n; i++) {
        double z = ((double)x[i] - c) + t, u = upstream ? (double)upstream[i] : 0;
        double g = values ? NAME(scaled_h)(z, 0) * (u - total) : logs ? NAME(missing)(z) * u : 0;
        g -= NAME(scaled_h)(z, peak) * unit * sum;
        out[i] = NAME(finite)(x[i]) ? (REAL)(g * over) : R(0.0);
    }
    return (values ? total : 0) + (sum == 0 ? 0 : sum * (exp(-peak) * unit));
}

FN void NAME(backward_row)(const struct call *call, int64_t index, struct space *space) {
    NAME(row) row;
    REAL unused, *grad_k = call->grad_k ? (REAL *)call->grad_k + index : &unused;
    double given = call->grad_delta ? ((const REAL *)call->grad_delta)[index] : 0;
    NAME(load)(&row, call, index, space);
    row.c = ((const REAL *)call->center)[index];
    row.t = ((const REAL *)call->delta)[index];
    row.u = call->grad ? (const REAL *)call->grad + index * row.n : 0;
    row.out = (REAL *)call->out + index * row.n;
    if (!NAME(finite)(row.t)) {
        int asked = given != 0; /* a row nobody asks for has no gradient, nan or not */
        for (int64_t i = 0; i < row.n && row.u && !asked; i++) asked = row.u[i] != 0;
        REAL fill = row.t != row.t && asked ? row.t : R(0.0);
        for (int64_t i = 0; i < row.n; i++) row.out[i] = fill;
        *grad_k = fill;
        return;
    }
    struct sums m = NAME(pass)(&row, NAME(weigh_part));
    int loose = row.at_most && row.t >= row.c;
    if (!loose && !(m.a > SMALLEST_SUM)) {
        *grad_k = (REAL)NAME(backward_hard)(&row, given);
        return;
    }
    double total = loose ? 0 : (m.b + given) / m.a;
    row.scale = (REAL)(1 / (double)row.temperature);
    row.shift = (REAL)total;
    *grad_k = (REAL)total;
    NAME(pass)(&row, NAME(spread_part));
}

FN void NAME(backward_rows)(const struct call *call, int64_t index, int count, struct space *space) {
    for (int i = 0; i < count; i++) NAME(backward_row)(call, index + i, space);
}

/* Write a value at the classes of an index list. */
FN void NAME(mark)(const struct call *call, int64_t index, REAL *label, REAL value) {
    const int64_t *list = call->index + index * call->m;
    for (int64_t i = 0; i < call->m; i++)
        if (list[i] >= 0 && list[i] < call->n) label[list[i]] = value;
}

/* The labels of a row of a dense target; a number above 1 counts as 1, and nan stays nan. */
#define LABELS(type)                                                                              \
    {                                                                                             \
        const type *d = (const type *)call->dense + index * n;                                    \
        for (int64_t i = 0; i < n; i++) label[i] = d[i] < 0 ? R(-1.0) : d[i] > 1 ? R(1.0) : (REAL)d[i]; \
        break;                                                                                    \
    }

FN void NAME(labels_of_row)(const struct call *call, int64_t index, REAL *restrict label) {
    int64_t n = call->n;
    switch (call->dense_type) {
        case DENSE_F32: LABELS(float)
        case DENSE_F64: LABELS(double)
        case DENSE_I8: LABELS(int8_t)
        case DENSE_U8: LABELS(uint8_t)
        case DENSE_I16: LABELS(int16_t)
        case DENSE_I32: LABELS(int32_t)
        default: LABELS(int64_t)
    }
}

/* Whether a row counts in the mean: it has a label or, with `observed`, a known class. One with nan counts, and shows. */
FN int NAME(contributes)(const struct call *call, int64_t index, const REAL *restrict label) {
    int64_t found = 0;
    if (call->dense) {
        REAL least = call->observed > 0 ? -R(0.5) : R(0.0);
        for (int64_t i = 0; i < call->n; i++) found += !(label[i] <= least);
        return found > 0;
    }
    for (int64_t i = 0; i < call->m; i++) found += call->index[index * call->m + i] >= 0;
    return call->observed > 0 || found > 0;
}

/* The loss of one class, and its derivative dz; in double, for the few classes of an index list and for rows that are
   hard or degenerate. */
FN double NAME(loss_term)(const NAME(row) * row, int64_t i, double label, double *d) {
    double x = row->x[i], rho = row->rho, rest = row->rest, t = row->t;
    double z = isinf(x) && isinf(t) ? x : (x - (double)row->c) + t;
    double tail = exp(-fabs(z)), large = 1 / (1 + tail), small = tail * large; /* y and 1 - y, or the reverse */
    double y = z < 0 ? small : large, out = z < 0 ? large : small;
    int live = isfinite(x) && isfinite(t);
    double hit = label < 0 ? 0 : label, rest_of = label < 0 ? 0 : 1 - label;
    *d = !live ? 0 : rest_of * (rest == 0 ? y : rho * y * out / (rest + rho * out)) - hit * out;
    double seen = log1p(tail) - fmin(z, 0), unseen = log1p(tail) - fmin(-z, 0);
    if (rest > 0) unseen = y < 0.5 ? -log1p(-rho * y) : -log(rest + rho * out);
    return (hit == 0 ? 0 : hit * seen) + (rest_of == 0 ? 0 : rest_of * unseen);
}

/* The same at a point, for all classes of a hard row: in vectors. */
INLINE double NAME(hard_term)(double z, int live, double label, double rho, double rest, double *d) {
    double tail = EXP_DOUBLE(-fabs(z), -708.0, 0.0), soft = LOG1P_DOUBLE(tail);
    double large = 1 / (1 + tail), small = tail * large, y = z < 0 ? small : large, out = z < 0 ? large : small;
    double hit = label < 0 ? 0 : label, rest_of = label < 0 ? 0 : 1 - label, left = rest + rho * out;
    double part = rest == 0 ? y : rho * y * out / left;
    *d = live ? rest_of * part - hit * out : 0;
    double few = LOG1P_DOUBLE(-rho * (y < 0.5 ? y : 0)), many = LOG_DOUBLE(left > 0 ? left : 1, 0);
    double seen = soft - (z < 0 ? z : 0), unseen = rest > 0 ? -(y < 0.5 ? few : many) : soft + (z > 0 ? z : 0);
    return (hit == 0 ? 0 : hit * seen) + (rest_of == 0 ? 0 : rest_of * unseen);
}

FN double NAME(hard_loss)(const NAME(row) * row, const REAL *restrict label, double *pull) {
    const REAL *restrict x = row->x;
    double c = row->c, t = row->t, rho = row->rho, rest = row->rest, loss = 0, total = 0;
    PRAGMA(omp simd reduction(+ : loss, total))
    for (int64_t i = 0; i < row->n; i++) {
        double d, z = ((double)x[i] - c) + t;
        loss += NAME(hard_term)(z, NAME(finite)(x[i]), (double)label[i], rho, rest, &d);
        total += d;
    }
    *pull = total;
    return loss;
}

FN void NAME(write_loss)(const struct call *call, NAME(row) * row, int64_t index, struct space *space) {
    double log_mass, loss = 0, pull = 0, d;
    int listed = call->index && call->observed == 0;
    REAL *label = (REAL *)space->label;
    if (call->dense) NAME(labels_of_row)(call, index, label);
    if (call->weight) ((REAL *)call->weight)[index] = (REAL)NAME(contributes)(call, index, label);
    if (listed) {
        const int64_t *list = call->index + index * call->m;
        for (int64_t i = 0; i < call->m; i++)
            if (list[i] >= 0 && list[i] < call->n) loss += NAME(loss_term)(row, list[i], 1, &d), pull += d;
    } else {
        row->label = label;
        row->out = call->slope ? (REAL *)call->slope + index * row->n : 0;
        row->h = (REAL *)space->workspace;
        if (call->index) NAME(mark)(call, index, label, 1);
        if (row->state == CLOSE) {
            struct sums m = NAME(pass)(row, call->slope ? NAME(loss_store_part) : NAME(loss_part));
            loss = m.f, pull = m.b;
        } else if (row->state == HARD) {
            loss = NAME(hard_loss)(row, label, &pull);
        } else {
            for (int64_t i = 0; i < row->n; i++) loss += NAME(loss_term)(row, i, label[i], &d), pull += d;
        }
        if (call->index) NAME(mark)(call, index, label, 0);
    }
    if (row->state == DEGENERATE) {
        log_mass = row->t != row->t ? NAN : -INFINITY;
        pull = row->t != row->t ? NAN : 0;
        loss = row->t != row->t ? NAN : loss;
    } else if (row->state == HARD) {
        struct mass mass = NAME(mass)(row);
        log_mass = mass.peak + log(mass.sum);
    } else {
        if (row->sum_h != row->sum_h) {
            struct sums m = NAME(pass)(row, NAME(search_part));
            row->sum_h = m.a + m.b;
        }
        log_mass = log(row->sum_h);
        row->pull = pull;
        pull *= 1 + ((double)(REAL)log_mass - log_mass); /* what rounding takes from pull / sum h */
    }
    NAME(write_point)(call, row, index);
    ((REAL *)call->out)[index] = (REAL)loss;
    ((REAL *)call->log_mass)[index] = (REAL)log_mass;
    ((REAL *)call->pull)[index] = (REAL)pull;
}

/* (dz - pull h / sum h) / temperature for one class, in double. */
FN double NAME(loss_slope)(const NAME(row) * row, int64_t i, double label, struct mass mass, double pull) {
    double d, z = ((double)row->x[i] - (double)row->c) + (double)row->t;
    if (!NAME(finite)(row->x[i])) return 0;
    NAME(loss_term)(row, i, label, &d);
    return (d - pull * (NAME(scaled_h)(z, mass.peak) / mass.sum)) / (double)row->temperature;
}

/* The same for all classes of a hard row, times `grad`. */
FN void NAME(hard_slopes)(const NAME(row) * row, const REAL *restrict label, struct mass mass, double pull, double grad) {
    const REAL *restrict x = row->x;
    REAL *restrict out = row->out;
    double c = row->c, t = row->t, rho = row->rho, rest = row->rest, weight = pull / mass.sum, peak = mass.peak;
    double over = 1 / (double)row->temperature;
    PRAGMA(omp simd)
    for (int64_t i = 0; i < row->n; i++) {
        double d, z = ((double)x[i] - c) + t;
        NAME(hard_term)(z, NAME(finite)(x[i]), (double)label[i], rho, rest, &d);
        double slope = (d - weight * NAME(scaled_h)(z, peak)) * over;
        out[i] = NAME(finite)(x[i]) ? (REAL)(grad * slope) : R(0.0);
    }
}

/* The gradient of a row times `grad`, to `out`. */
FN void NAME(loss_backward_row)(const struct call *call, int64_t index, struct space *space, double grad, REAL *out) {
    NAME(row) row;
    double log_mass = ((const REAL *)call->log_mass)[index], pull = ((const REAL *)call->pull)[index];
    const REAL *weight = (const REAL *)call->weight;
    REAL unused, *grad_k = call->grad_k ? (REAL *)call->grad_k + index : &unused;
    NAME(load)(&row, call, index, space);
    row.c = ((const REAL *)call->center)[index];
    row.t = ((const REAL *)call->delta)[index];
    row.out = out;
    if (!NAME(finite)(row.t) || (weight && weight[index] == 0)) {
        REAL fill = row.t != row.t && grad != 0 ? row.t : R(0.0); /* as in backward_row */
        for (int64_t i = 0; i < row.n; i++) row.out[i] = fill;
        *grad_k = fill;
        return;
    }
    *grad_k = (REAL)(pull == 0 ? 0 : grad * pull * exp(-log_mass));
    struct mass mass = {0, exp(log_mass)};
    int listed = call->index && call->observed == 0, hard = !(log_mass > log(SMALLEST_SUM));
    REAL *label = (REAL *)space->label;
    if (call->dense) NAME(labels_of_row)(call, index, label);
    if (call->index) NAME(mark)(call, index, label, 1);
    row.label = listed ? 0 : label;
    row.weight = (REAL)(pull * exp(-log_mass));
    if (log_mass < -8 && !hard) { /* its rounding would show in the exponential */
        row.kind = KIND_NU;
        mass.sum = NAME(pass)(&row, NAME(weigh_part)).a;
        row.weight = (REAL)(pull / mass.sum);
    }
    row.scale = (REAL)(grad / (double)row.temperature);
    if (hard)
        NAME(hard_slopes)(&row, label, NAME(mass)(&row), pull, grad);
    else
        NAME(pass)(&row, NAME(loss_spread_part));
    for (int64_t i = 0; i < call->m && listed && !hard; i++) {
        int64_t j = call->index[index * call->m + i];
        if (j >= 0 && j < row.n) row.out[j] = (REAL)(grad * NAME(loss_slope)(&row, j, 1, mass, pull));
    }
    if (call->index) NAME(mark)(call, index, label, 0);
}

/* The gradient of a row, after its loss was written: of the rows that a search in plain sums has solved, all but the
   labels of index lists is there, or follows from `e`. */
FN void NAME(write_slope)(const struct call *call, NAME(row) * row, int64_t index, struct space *space) {
    REAL *out = (REAL *)call->slope + index * row->n;
    double weight = ((const REAL *)call->weight)[index] * call->unit;
    if (row->state != CLOSE || weight == 0) {
        NAME(loss_backward_row)(call, index, space, weight, out);
        return;
    }
    row->out = out;
    row->weight = (REAL)(row->pull / row->sum_h);
    row->scale = (REAL)(call->unit / (double)row->temperature);
    if (!call->index || call->observed > 0) {
        NAME(pass)(row, NAME(loss_stored_part));
        return;
    }
    row->label = 0;
    NAME(pass)(row, NAME(loss_spread_part));
    struct mass mass = {0, row->sum_h};
    for (int64_t i = 0; i < call->m; i++) {
        int64_t j = call->index[index * call->m + i];
        if (j >= 0 && j < row->n) out[j] = (REAL)(weight * NAME(loss_slope)(row, j, 1, mass, row->pull));
    }
}

/* ---- The Fenchel-Young loss: the terms of rho = 1, and (labels - k) nu; its gradient is dz. ---- */

/* The labels of a row, in `label`, with their sum, and the size k of its projection. `known` classes take part. */
FN double NAME(young_size)(const struct call *call, int64_t index, REAL *label, double *labels, int64_t *known) {
    double total = 0;
    int64_t found = call->n;
    if (call->index) {
        const int64_t *list = call->index + index * call->m;
        for (int64_t i = 0; i < call->m; i++) total += list[i] >= 0;
        NAME(mark)(call, index, label, 1);
    } else {
        NAME(labels_of_row)(call, index, label);
        found = 0;
        PRAGMA(omp simd reduction(+ : total, found))
        for (int64_t i = 0; i < call->n; i++) {
            total += (double)(label[i] < 0 ? R(0.0) : label[i]);
            found += !(label[i] < 0);
        }
    }
    double k = call->k ? (double)((const REAL *)call->k)[index * call->k_stride] : total;
    *labels = total, *known = found;
    return k > (double)found ? (double)found : k;
}

/* The loss of a row that is solved, and its gradient, to `e` where nobody wants it. */
FN void NAME(write_young)(const struct call *call, NAME(row) * row, int64_t index, double over, struct space *space) {
    double loss = 0, d;
    row->out = call->slope ? (REAL *)call->slope + index * row->n : (REAL *)space->e;
    row->label = (const REAL *)space->label;
    row->rho = 1, row->rest = 0;
    if (row->state == DEGENERATE) { /* no class is taken, and none wanted; else plain torch takes the batch */
        for (int64_t i = 0; i < row->n; i++) row->out[i] = 0;
        if (!(row->t == -INFINITE && over == 0 && row->k == 0 && row->top == 0)) space->odd = 1;
    } else if (row->state == CLOSE) {
        loss = NAME(pass)(row, NAME(young_part)).f;
    } else {
        for (int64_t i = 0; i < row->n; i++) {
            loss += NAME(loss_term)(row, i, row->label[i], &d);
            row->out[i] = (REAL)d;
        }
    }
    if (row->state != DEGENERATE) loss += over * ((double)row->t - (double)row->c);
    if (!(fabs(loss) <= LARGEST)) space->odd = 1;
    ((REAL *)call->out)[index] = (REAL)loss;
}

FN void NAME(young_rows)(const struct call *call, int64_t index, int count, struct space *space) {
    REAL *label = (REAL *)space->label, *copy = (REAL *)space->copy;
    for (int64_t i = index; i < index + count; i++) {
        NAME(row) row;
        double labels;
        int64_t known;
        NAME(load)(&row, call, i, space);
        double k = NAME(young_size)(call, i, label, &labels, &known);
        for (int64_t j = 0; j < row.n && known < row.n; j++) copy[j] = label[j] < 0 ? -INFINITE : row.x[j];
        if (known < row.n) row.x = copy;
        NAME(solve)(&row, k, space);
        NAME(write_young)(call, &row, i, labels - k, space);
        if (call->index) NAME(mark)(call, i, label, 0);
    }
}

FN void NAME(loss_forward_rows)(const struct call *call, int64_t index, int count, struct space *space) {
    if (call->kind == KIND_FENCHEL_YOUNG) {
        NAME(young_rows)(call, index, count, space);
        return;
    }
    for (int i = 0; i < count; i++) {
        NAME(row) row;
        NAME(load)(&row, call, index + i, space);
        NAME(solve)(&row, (double)((const REAL *)call->k)[(index + i) * call->k_stride], space);
        NAME(write_loss)(call, &row, index + i, space);
        if (call->slope) NAME(write_slope)(call, &row, index + i, space);
    }
}

FN void NAME(loss_backward_rows)(const struct call *call, int64_t index, int count, struct space *space) {
    const REAL *weight = (const REAL *)call->weight; /* then one gradient is that of all rows */
    for (int64_t i = index; i < index + count; i++) {
        double grad = ((const REAL *)call->grad)[weight ? 0 : i] * (weight ? (double)weight[i] : 1);
        NAME(loss_backward_row)(call, i, space, grad, (REAL *)call->out + i * call->n);
    }
}

#undef FN
#undef INLINE
#undef PRAGMA
#undef SUM_PART
#undef LIMITS
#undef POINT_H
#undef POINT_LOSS
#undef SUM_LOSS
#undef LABELS
