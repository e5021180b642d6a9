/* The operations of fused.c on one row, for one instruction set. Loops are plain scalar code for the compiler to
   vectorise; sums are in double. */

#define FN TARGET static
#define INLINE __attribute__((always_inline)) TARGET static inline
#define PRAGMA(text) _Pragma(#text)
#define EACH_PIECE(i, width) for (int64_t i = 0; i < (width); i += PIECE)
#define NOTHING -INFINITE

typedef double NAME(doubles) __attribute__((vector_size(VECTOR)));
typedef REAL NAME(halves) __attribute__((vector_size(VECTOR / 2)));
#define DOUBLES (VECTOR / 8)

INLINE int64_t NAME(whole)(int64_t n) { return (n + PIECE - 1) / PIECE * PIECE; }

/* exp(x) for x <= 0, or a little more. */
INLINE REAL NAME(decay)(REAL x) { return NAME(exp)(x, EXP_LOW, EXP_HIGH); }

/* ---- Reading: scores x (0 where a class takes no part), and the shares a and b = 1 - a, both 0 there. ---- */

#define SHARES(type)                                                                          \
    {                                                                                         \
        const type *restrict d = (const type *)call->dense + row * call->n + first;           \
        PRAGMA(omp simd reduction(| : odd, lost))                                             \
        for (int64_t i = 0; i < count; i++) {                                                 \
            REAL v = logits[i], share = d[i] >= 1 ? R(1.0) : (REAL)d[i];                      \
            int known = d[i] >= 0, live = known & (v != NOTHING);                             \
            odd |= (live & !(v <= LARGEST)) | (d[i] != d[i]);                                 \
            lost |= (d[i] > 0) & (v == NOTHING);                                              \
            x[i] = live ? v : R(0.0);                                                         \
            a[i] = live ? share : R(0.0);                                                     \
            b[i] = live ? R(1.0) - share : R(0.0);                                            \
        }                                                                                     \
        break;                                                                                \
    }

/* Read `count` classes of a row from `first` on, padded to whole pieces. Returns whether a label is ruled out. */
FN int NAME(read_part)(const struct fused *call, int64_t row, int64_t first, int64_t count, REAL *restrict x,
                       REAL *restrict a, REAL *restrict b, int *strange) {
    const REAL *restrict logits = call->logits + row * call->n + first;
    int odd = 0, lost = 0;
    for (int64_t i = count; i < NAME(whole)(count); i++) x[i] = a[i] = b[i] = 0;
    if (call->dense) {
        switch (call->dense_type) {
            case DENSE_F32: SHARES(float)
            case DENSE_F64: SHARES(double)
            case DENSE_I8: SHARES(int8_t)
            case DENSE_U8: SHARES(uint8_t)
            case DENSE_I16: SHARES(int16_t)
            case DENSE_I32: SHARES(int32_t)
            default: SHARES(int64_t)
        }
    } else {
        PRAGMA(omp simd reduction(| : odd))
        for (int64_t i = 0; i < count; i++) {
            REAL v = logits[i];
            int live = v != NOTHING;
            odd |= live & !(v <= LARGEST);
            x[i] = live ? v : R(0.0);
            a[i] = 0;
            b[i] = live ? R(1.0) : R(0.0);
        }
        for (int64_t i = 0; call->index && i < call->m; i++) {
            int64_t place = call->index[row * call->m + i] - first;
            if (place < 0 || place >= count) continue;
            if (b[place] == 0 && a[place] == 0) lost = 1;
            a[place] = b[place] + a[place];
            b[place] = 0;
        }
    }
    if (call->mask) {
        const uint8_t *restrict mask = call->mask + row * call->mask_stride + first;
        for (int64_t i = 0; i < count; i++) {
            lost |= !mask[i] & (a[i] > 0);
            x[i] = mask[i] ? x[i] : R(0.0);
            a[i] = mask[i] ? a[i] : R(0.0);
            b[i] = mask[i] ? b[i] : R(0.0);
        }
    }
    *strange |= odd;
    return lost;
}

FN int NAME(read)(const struct fused *call, int64_t row, struct fused_space *s) {
    return NAME(read_part)(call, row, 0, call->n, s->x, s->a, s->b, &s->odd);
}

/* Multiply the shares by the weights of the classes. */
FN void NAME(weigh)(const struct fused *call, int64_t row, struct fused_space *s) {
    if (call->each) {
        const REAL *restrict w = call->each + row * call->each_stride;
        for (int64_t i = 0; i < call->n; i++) s->a[i] *= w[i], s->b[i] *= w[i];
    }
    if (call->positive) {
        const REAL *restrict w = call->positive + row * call->positive_stride;
        for (int64_t i = 0; i < call->n; i++) s->a[i] *= w[i];
    }
}

/* Whether any number of a piece is not 0. */
INLINE int NAME(some)(const REAL *restrict a) {
    int found = 0;
    PRAGMA(omp simd reduction(| : found))
    for (int i = 0; i < PIECE; i++) found |= a[i] != 0;
    return found;
}

/* The loss of a row, and its gradient. */
FN void NAME(write)(const struct fused *call, int64_t row, struct fused_space *s, double loss, int counts) {
    if (!(fabs(loss) <= FLT_MAX)) s->odd = 1;
    call->loss[row] = (REAL)loss;
    call->counts[row] = counts != 0;
    if (call->out) memcpy(call->out + row * call->n, s->g, (size_t)call->n * sizeof(REAL));
}

/* A row without a loss. */
FN void NAME(write_none)(const struct fused *call, int64_t row, struct fused_space *s, int counts) {
    memset(s->g, 0, (size_t)call->n * sizeof(REAL));
    NAME(write)(call, row, s, 0, counts);
}

/* p = sigmoid(x) and 1 - p, from e = exp(-|x|). */
#define SIGMOID(v)                                                                 \
    REAL e = NAME(decay)(-NAME(abs)(v)), over = R(1.0) / (R(1.0) + e);             \
    REAL p = (v) < 0 ? e * over : over, miss = (v) < 0 ? over : e * over;

/* ---- Sums over the classes of a row. ---- */

/* The sum of A log(1 + exp(-x)) + B log(1 + exp(x)), with A and B linear in the shares: number[0] a + number[1] b and
   number[2] a + number[3] b. */
FN void NAME(logistic)(const struct fused *call, int64_t row, struct fused_space *s) {
    REAL *restrict x = s->x, *restrict a = s->a, *restrict b = s->b, *restrict g = s->g;
    REAL aa = (REAL)call->number[0], ab = (REAL)call->number[1], ba = (REAL)call->number[2], bb = (REAL)call->number[3];
    double loss = 0;
    int live = 0;
    NAME(read)(call, row, s);
    EACH_PIECE(at, call->n) live |= NAME(some)(a + at) | NAME(some)(b + at);
    NAME(weigh)(call, row, s);
    EACH_PIECE(at, call->n) {
        double sum = 0;
        PRAGMA(omp simd reduction(+ : sum))
        for (int64_t i = at; i < at + PIECE; i++) {
            SIGMOID(x[i])
            REAL yes = aa * a[i] + ab * b[i], no = ba * a[i] + bb * b[i], soft = NAME(log1p)(e);
            REAL term = yes * (soft + (x[i] < 0 ? -x[i] : R(0.0))) + no * (soft + (x[i] < 0 ? R(0.0) : x[i]));
            sum += (double)term;
            g[i] = no * p - yes * miss;
        }
        loss += sum;
    }
    NAME(write)(call, row, s, loss, live);
}

/* base^exponent for 0 <= base <= 1; 0 to a power that is not whole is 0. */
INLINE void NAME(power)(const REAL *restrict base, double exponent, REAL *restrict out) {
    if (exponent >= 0 && exponent <= 16 && exponent == (int)exponent) {
        for (int i = 0; i < PIECE; i++) out[i] = 1;
        for (int times = (int)exponent; times > 0; times--)
            for (int i = 0; i < PIECE; i++) out[i] *= base[i];
        return;
    }
    REAL times = (REAL)exponent;
    PRAGMA(omp simd)
    for (int i = 0; i < PIECE; i++) {
        REAL found = NAME(decay)(times * NAME(log)(base[i] > 0 ? base[i] : R(1.0), R(0.0)));
        out[i] = base[i] > 0 ? found : R(0.0);
    }
}

/* (1 - p)^plus log(1 / p) for labels, m^minus log(1 / (1 - m)) with m = max(p - clip, 0) for the rest. number: plus,
   minus, clip, and 1 where the powers have a gradient, else 0. */
FN void NAME(asymmetric)(const struct fused *call, int64_t row, struct fused_space *s) {
    REAL *restrict x = s->x, *restrict a = s->a, *restrict b = s->b, *restrict g = s->g;
    double plus = call->number[0], minus = call->number[1], loss = 0;
    REAL clip = (REAL)call->number[2], keep = (REAL)call->number[3], up = keep * (REAL)plus, down = keep * (REAL)minus;
    int live = 0;
    NAME(read)(call, row, s);
    EACH_PIECE(at, call->n) live |= NAME(some)(a + at) | NAME(some)(b + at);
    NAME(weigh)(call, row, s);
    EACH_PIECE(at, call->n) {
        REAL chance[PIECE], rest[PIECE], soft[PIECE], m[PIECE], cost[PIECE], under[PIECE], full[PIECE], less[PIECE];
        double sum = 0;
        const REAL *restrict v = x + at, *restrict hit = a + at, *restrict other = b + at;
        PRAGMA(omp simd)
        for (int i = 0; i < PIECE; i++) {
            SIGMOID(v[i])
            chance[i] = p, rest[i] = miss, soft[i] = e;
            g[at + i] = 0;
        }
        if (NAME(some)(other)) {
            PRAGMA(omp simd)
            for (int i = 0; i < PIECE; i++) { /* 1 - m from the side that does not cancel */
                m[i] = chance[i] > clip ? chance[i] - clip : R(0.0);
                REAL far = rest[i] + clip, near = R(1.0) - m[i];
                under[i] = v[i] > 0 ? far : near;
                REAL low = v[i] > 0 ? R(0.0) : -m[i] - (near - R(1.0));
                cost[i] = -NAME(log)(under[i], low);
            }
            if (clip == 0) /* rest may be too small for its logarithm, and p for 1 - p */
                PRAGMA(omp simd)
                for (int i = 0; i < PIECE; i++) cost[i] = NAME(log1p)(soft[i]) + (v[i] < 0 ? R(0.0) : v[i]);
            NAME(power)(m, minus, full);
            if (minus >= 1)
                NAME(power)(m, minus - 1, less);
            else
                for (int i = 0; i < PIECE; i++) less[i] = minus > 0 && m[i] > 0 ? full[i] / m[i] : R(0.0);
            PRAGMA(omp simd reduction(+ : sum))
            for (int i = 0; i < PIECE; i++) {
                REAL share = m[i] > 0 ? other[i] : R(0.0);
                sum += (double)(share * (full[i] * cost[i]));
                REAL slope = clip == 0 ? full[i] * chance[i] : full[i] * (chance[i] * (rest[i] / under[i]));
                REAL price = cost[i] > R(1000.0) ? R(1000.0) : cost[i]; /* above, 1 - p is 0: no inf * 0 */
                g[at + i] = share * (slope + down * (less[i] * price) * (chance[i] * rest[i]));
            }
        }
        if (NAME(some)(hit)) {
            NAME(power)(rest, plus, full);
            PRAGMA(omp simd reduction(+ : sum))
            for (int i = 0; i < PIECE; i++) {
                REAL found = NAME(log1p)(soft[i]) + (v[i] < 0 ? -v[i] : R(0.0));
                sum += (double)(hit[i] * (full[i] * found));
                REAL price = found > R(1000.0) ? R(1000.0) : found; /* above, p is 0, but chance is not quite */
                g[at + i] -= hit[i] * full[i] * (rest[i] + up * chance[i] * price);
            }
        }
        loss += sum;
    }
    NAME(write)(call, row, s, loss, live);
}

/* ---- Every positive above every negative: rows, and columns in strips of a PIECE. number: warm, cool, margin. ---- */

/* b exp((x - high) / cool), and a exp((low - x) / warm). */
INLINE REAL NAME(mass)(REAL x, REAL b, REAL high, REAL over) { return b * NAME(decay)((x - high) * over); }

FN void NAME(two_way_row)(const struct fused *call, int64_t row, struct fused_space *s) {
    REAL *restrict x = s->x, *restrict a = s->a, *restrict b = s->b, *restrict g = s->g, *restrict u = s->u;
    double warm = call->number[0], cool = call->number[1], above = 0, below = 0;
    REAL high = NOTHING, low = INFINITE, over_warm = (REAL)(1 / warm), over_cool = (REAL)(1 / cool);
    int64_t width = NAME(whole)(call->n);
    NAME(read)(call, row, s);
    PRAGMA(omp simd reduction(max : high) reduction(min : low))
    for (int64_t i = 0; i < width; i++) {
        REAL negative = b[i] > 0 ? x[i] : NOTHING, positive = a[i] > 0 ? x[i] : INFINITE;
        high = negative > high ? negative : high;
        low = positive < low ? positive : low;
    }
    if (high == NOTHING || low == INFINITE) {
        NAME(write_none)(call, row, s, low != INFINITE);
        return;
    }
    EACH_PIECE(at, width) {
        double sum = 0;
        PRAGMA(omp simd reduction(+ : sum))
        for (int64_t i = at; i < at + PIECE; i++) {
            g[i] = NAME(mass)(x[i], b[i], high, over_cool);
            sum += (double)g[i];
        }
        above += sum;
        if (!NAME(some)(a + at)) continue;
        sum = 0;
        PRAGMA(omp simd reduction(+ : sum))
        for (int64_t i = at; i < at + PIECE; i++) {
            u[i] = a[i] * NAME(decay)((low - x[i]) * over_warm);
            sum += (double)u[i];
        }
        below += sum;
    }
    double z = ((double)high - (double)low) + cool * log(above) + warm * log(below) + call->number[2];
    double slope = sigmoid(z);
    REAL by = (REAL)(slope / above), less = (REAL)(slope / below);
    EACH_PIECE(at, width) {
        if (NAME(some)(a + at))
            for (int64_t i = at; i < at + PIECE; i++) g[i] = g[i] * by - u[i] * less;
        else
            for (int64_t i = at; i < at + PIECE; i++) g[i] *= by;
    }
    NAME(write)(call, row, s, softplus(z), 1);
}

/* One strip of columns; `first`, where there is one, holds the weights of the rows. */
FN void NAME(two_way_columns)(const struct fused *call, int64_t strip, struct fused_space *s) {
    int64_t begin = strip * PIECE, count = call->n - begin < PIECE ? call->n - begin : PIECE;
    double warm = call->number[0], cool = call->number[1];
    REAL over_warm = (REAL)(1 / warm), over_cool = (REAL)(1 / cool);
    REAL x[PIECE], a[PIECE], b[PIECE], high[PIECE], low[PIECE], by[PIECE], less[PIECE];
    double above[PIECE], below[PIECE];
    for (int i = 0; i < PIECE; i++) high[i] = NOTHING, low[i] = INFINITE, above[i] = below[i] = 0;
#define READ_STRIP                                                                        \
    REAL weight = call->first ? call->first[row * call->step] : R(1.0);                   \
    if (!(weight > 0)) continue;                                                          \
    NAME(read_part)(call, row, begin, count, x, a, b, &s->odd);
    for (int64_t row = 0; row < call->rows; row++) {
        READ_STRIP
        PRAGMA(omp simd)
        for (int i = 0; i < PIECE; i++) {
            REAL negative = b[i] > 0 ? x[i] : NOTHING, positive = a[i] > 0 ? x[i] : INFINITE;
            high[i] = negative > high[i] ? negative : high[i];
            low[i] = positive < low[i] ? positive : low[i];
        }
    }
    for (int64_t row = 0; row < call->rows; row++) {
        READ_STRIP
        PRAGMA(omp simd)
        for (int i = 0; i < PIECE; i++) {
            REAL found = b[i] > 0 ? NAME(mass)(x[i], b[i], high[i], over_cool) * weight : R(0.0);
            above[i] += (double)found;
        }
        if (!NAME(some)(a)) continue;
        PRAGMA(omp simd)
        for (int i = 0; i < PIECE; i++) {
            REAL found = a[i] > 0 ? a[i] * NAME(decay)((low[i] - x[i]) * over_warm) * weight : R(0.0);
            below[i] += (double)found;
        }
    }
    for (int i = 0; i < count; i++) {
        int positive = low[i] != INFINITE, active = positive && high[i] != NOTHING;
        double z = active ? ((double)high[i] - (double)low[i]) + cool * log(above[i]) + warm * log(below[i]) + call->number[2] : 0;
        double slope = active ? sigmoid(z) : 0, loss = active ? softplus(z) : 0;
        if (!(loss <= FLT_MAX)) s->odd = 1;
        by[i] = active ? (REAL)(slope / above[i]) : R(0.0);
        less[i] = active ? (REAL)(slope / below[i]) : R(0.0);
        call->loss[begin + i] = (REAL)loss;
        call->counts[begin + i] = positive;
    }
    for (int i = (int)count; i < PIECE; i++) by[i] = less[i] = 0;
    for (int64_t row = 0; row < call->rows && call->out; row++) {
        REAL *restrict out = call->out + row * call->n + begin, g[PIECE];
        memset(out, 0, (size_t)count * sizeof(REAL));
        READ_STRIP
        PRAGMA(omp simd)
        for (int i = 0; i < PIECE; i++) {
            REAL found = NAME(mass)(x[i], b[i], high[i], over_cool) * weight * by[i];
            g[i] = b[i] > 0 && by[i] > 0 ? found : R(0.0);
        }
        if (NAME(some)(a))
            PRAGMA(omp simd)
            for (int i = 0; i < PIECE; i++) {
                REAL found = a[i] * NAME(decay)((low[i] - x[i]) * over_warm) * weight * less[i];
                g[i] -= a[i] > 0 && less[i] > 0 ? found : R(0.0);
            }
        memcpy(out, g, (size_t)count * sizeof(REAL));
    }
#undef READ_STRIP
}

/* ---- One normaliser. ---- */

/* The logarithm of the sum of exponentials, less the largest score, with the softmax as its gradient. extra: two numbers
   per row, the largest score and the sum of the labels' shares. */
FN void NAME(logsumexp)(const struct fused *call, int64_t row, struct fused_space *s) {
    REAL *restrict x = s->x, *restrict a = s->a, *restrict b = s->b, *restrict g = s->g, peak = NOTHING;
    int64_t width = NAME(whole)(call->n);
    double mass = 0, labels = 0;
    NAME(read)(call, row, s);
    EACH_PIECE(at, width) {
        double sum = 0;
        PRAGMA(omp simd reduction(max : peak) reduction(+ : sum))
        for (int64_t i = at; i < at + PIECE; i++) {
            REAL score = a[i] + b[i] > 0 ? x[i] : NOTHING;
            peak = score > peak ? score : peak;
            sum += (double)a[i];
        }
        labels += sum;
    }
    call->extra[2 * row] = peak == NOTHING ? R(0.0) : peak;
    call->extra[2 * row + 1] = (REAL)labels;
    if (peak == NOTHING) {
        NAME(write_none)(call, row, s, 0);
        return;
    }
    EACH_PIECE(at, width) {
        double sum = 0;
        PRAGMA(omp simd reduction(+ : sum))
        for (int64_t i = at; i < at + PIECE; i++) {
            REAL found = NAME(decay)(x[i] - peak);
            g[i] = a[i] + b[i] > 0 ? found : R(0.0);
            sum += (double)g[i];
        }
        mass += sum;
    }
    REAL over = (REAL)(1 / mass);
    for (int64_t i = 0; i < width; i++) g[i] *= over;
    NAME(write)(call, row, s, log(mass), 1);
}

/* The sum of max(q, 0) - a q with q = (x - number[0]) - number[1]. extra: the sum of a less the number of q >= 0. */
FN void NAME(quasibinary)(const struct fused *call, int64_t row, struct fused_space *s) {
    REAL *restrict x = s->x, *restrict a = s->a, *restrict b = s->b, *restrict g = s->g;
    REAL peak = (REAL)call->number[0], rest = (REAL)call->number[1];
    double loss = 0, slope = 0;
    NAME(read)(call, row, s);
    EACH_PIECE(at, call->n) {
        double sum = 0, slopes = 0;
        PRAGMA(omp simd reduction(+ : sum, slopes))
        for (int64_t i = at; i < at + PIECE; i++) {
            REAL q = (x[i] - peak) - rest, live = a[i] + b[i] > 0 ? R(1.0) : R(0.0);
            sum += (double)(live * ((q >= 0 ? q : R(0.0)) - a[i] * q));
            g[i] = live * ((q >= 0 ? R(1.0) : R(0.0)) - a[i]);
            slopes -= (double)g[i];
        }
        loss += sum, slope += slopes;
    }
    call->extra[row] = (REAL)slope;
    NAME(write)(call, row, s, loss, 1);
}

/* ---- The largest scores of a row. ---- */

/* The largest number of a piece. */
INLINE REAL NAME(most)(const REAL *restrict v) {
    REAL most = NOTHING;
    PRAGMA(omp simd reduction(max : most))
    for (int i = 0; i < PIECE; i++) most = v[i] > most ? v[i] : most;
    return most;
}

/* Put a number above the last one into a list of `count` in order. */
INLINE void NAME(put)(REAL v, int count, REAL *list) {
    int place = count - 1;
    for (; place > 0 && v > list[place - 1]; place--) list[place] = list[place - 1];
    list[place] = v;
}

/* The `count` largest numbers, in order, `count` <= SHORT_LIST; -inf where there are fewer. At least
   so many are no less than the count-th of the largest numbers of the pieces, which spares most pieces a search. */
FN void NAME(best)(const REAL *restrict v, int64_t width, int count, REAL *list) {
    for (int i = 0; i < count; i++) list[i] = NOTHING;
    EACH_PIECE(at, width) {
        REAL most = NAME(most)(v + at);
        if (most > list[count - 1]) NAME(put)(most, count, list);
    }
    REAL least = list[count - 1];
    for (int i = 0; i < count; i++) list[i] = NOTHING;
    EACH_PIECE(at, width) {
        REAL most = NAME(most)(v + at);
        if (!(most >= least && most > list[count - 1])) continue;
        for (int64_t i = at; i < at + PIECE; i++)
            if (v[i] >= least && v[i] > list[count - 1]) NAME(put)(v[i], count, list);
    }
}

/* Write numbers as REAL. */
INLINE void NAME(store_doubles)(NAME(doubles) v, REAL *out) {
    NAME(halves) half = __builtin_convertvector(v, NAME(halves));
    memcpy(out, &half, sizeof half);
}

/* The rank-th largest number. */
FN REAL NAME(kth)(const REAL *v, int64_t n, int64_t rank, struct fused_space *s) {
    if (rank > n) return NOTHING;
    if (rank <= SHORT_LIST) {
        REAL list[SHORT_LIST];
        NAME(best)(v, NAME(whole)(n), (int)rank, list);
        return list[rank - 1];
    }
    for (int64_t i = 0; i < n; i++) s->wide[i] = (double)v[i];
    return (REAL)kth_largest(s->wide, n, rank);
}

/* Write the scores of the classes that are marked, and -inf elsewhere. Returns their number. */
INLINE int64_t NAME(keep_marked)(const REAL *restrict x, const REAL *restrict mark, int64_t width, REAL *restrict u) {
    int64_t count = 0;
    EACH_PIECE(at, width) {
        int found = 0;
        PRAGMA(omp simd reduction(+ : found))
        for (int64_t i = at; i < at + PIECE; i++) {
            u[i] = mark[i] > 0 ? x[i] : NOTHING;
            found += mark[i] > 0;
        }
        count += found;
    }
    return count;
}

/* The sum over labels of log(1 + sum over rivals of exp(x_j - x_y)), without the number[0] - labels best rivals. */
FN void NAME(truncated)(const struct fused *call, int64_t row, struct fused_space *s) {
    REAL *restrict x = s->x, *restrict a = s->a, *restrict b = s->b, *restrict g = s->g, *restrict u = s->u;
    int64_t n = call->n, width = NAME(whole)(n), labels = 0;
    if (NAME(read)(call, row, s)) s->odd = 1;
    EACH_PIECE(at, width) {
        int found = 0;
        PRAGMA(omp simd reduction(+ : found))
        for (int64_t i = at; i < at + PIECE; i++) {
            found += a[i] > 0;
            u[i] = b[i] > 0 && !(a[i] > 0) ? x[i] : NOTHING;
        }
        labels += found;
    }
    int64_t spared = (int64_t)call->number[0] - labels;
    REAL peak = NOTHING;
    if (labels && spared > 0) {
        REAL limit = NAME(kth)(u, n, spared, s);
        for (int64_t i = 0; i < width; i++) spared -= u[i] > limit;
        for (int64_t i = 0; i < width; i++) {
            int tie = u[i] == limit && spared > 0;
            spared -= tie;
            u[i] = u[i] > limit || tie ? NOTHING : u[i];
        }
    }
    PRAGMA(omp simd reduction(max : peak))
    for (int64_t i = 0; i < width; i++) peak = u[i] > peak ? u[i] : peak;
    if (!labels || peak == NOTHING) {
        NAME(write_none)(call, row, s, labels > 0);
        return;
    }
    double mass = 0, loss = 0, total = 0;
    EACH_PIECE(at, width) {
        double sum = 0;
        PRAGMA(omp simd reduction(+ : sum))
        for (int64_t i = at; i < at + PIECE; i++) {
            REAL found = NAME(decay)(u[i] - peak);
            g[i] = u[i] == NOTHING ? R(0.0) : found;
            sum += (double)g[i];
        }
        mass += sum;
    }
    double rest = log(mass);
    const REAL *weight = call->each ? call->each + row * call->each_stride : 0;
    EACH_PIECE(at, width) {
        if (!NAME(some)(a + at)) continue;
        for (int64_t i = at; i < at + PIECE; i++) {
            if (!(a[i] > 0)) continue;
            double z = ((double)x[i] - (double)peak) - rest, share = (double)a[i] * (weight ? (double)weight[i] : 1);
            loss += share * softplus(-z);
            b[i] = (REAL)(share * sigmoid(-z));
            total += share * sigmoid(-z);
        }
    }
    REAL by = (REAL)(total / mass);
    for (int64_t i = 0; i < width; i++) g[i] = a[i] > 0 ? -b[i] : g[i] * by;
    NAME(write)(call, row, s, loss, 1);
}

/* L(r_p) times the sum of the hinges to the negatives, for each positive; few positives, or the batch is sorted. number:
   the most positives. */
FN void NAME(warp)(const struct fused *call, int64_t row, struct fused_space *s) {
    REAL *restrict x = s->x, *restrict a = s->a, *restrict b = s->b, *restrict g = s->g, *restrict u = s->u;
    int64_t n = call->n, width = NAME(whole)(n), positives = 0, negatives;
    const REAL *weight = call->each ? call->each + row * call->each_stride : 0;
    double loss = 0, *steps = s->other; /* L(0), L(1), ... */
    for (int64_t i = 0; i <= n && !s->ready; i++) steps[i] = i ? steps[i - 1] + 1 / (double)i : 0;
    s->ready = 1;
    NAME(read)(call, row, s);
    for (int64_t i = 0; i < width; i++) b[i] = a[i] > 0 ? R(0.0) : b[i], g[i] = 0;
    negatives = NAME(keep_marked)(x, b, width, u);
    EACH_PIECE(at, width) {
        if (!NAME(some)(a + at)) continue;
        for (int64_t p = at; p < at + PIECE; p++) {
            if (!(a[p] > 0)) continue;
            if (++positives > (int64_t)call->number[0]) {
                s->odd = 1;
                return;
            }
            REAL floor = -(R(1.0) - x[p]); /* rounded as plain torch does */
            int rank = 0;
            double sum = 0;
            PRAGMA(omp simd reduction(+ : rank, sum))
            for (int64_t i = 0; i < width; i++) {
                rank += u[i] > floor;
                sum += u[i] > floor ? (double)u[i] : 0;
            }
            double share = (double)a[p] * (weight ? (double)weight[p] : 1) * steps[rank];
            loss += share * ((double)rank * (1 - (double)x[p]) + sum);
            REAL slope = (REAL)share;
            PRAGMA(omp simd)
            for (int64_t i = 0; i < width; i++) g[i] += u[i] > floor ? slope : R(0.0);
            g[p] = (REAL)(-share * (double)rank); /* no negative: nothing is added there before or after */
        }
    }
    NAME(write)(call, row, s, loss, positives && negatives);
}

/* ---- Projections onto the capped simplex. first: k of the rows; number[0]: the temperature. ---- */

/* Read a row, divided by the temperature, into u; 0 where the row is out of the ordinary, else k. */
FN double NAME(read_capped)(const struct fused *call, int64_t row, struct fused_space *s) {
    double k = call->first[row * call->step];
    NAME(read)(call, row, s);
    if (call->number[0] != 1) {
        REAL temperature = (REAL)call->number[0];
        for (int64_t i = 0; i < call->n; i++) s->x[i] /= temperature;
    }
    int64_t live = NAME(keep_marked)(s->x, s->b, NAME(whole)(call->n), s->u);
    if (k > 0 && k < (double)live) return k;
    s->odd = 1;
    return 0;
}

/* The scores above the ceil(k)-th largest, fewer than k, in `wide` as distances from it. Returns their number. */
FN int64_t NAME(above)(const struct fused *call, struct fused_space *s, REAL center) {
    int64_t count = 0, width = NAME(whole)(call->n);
    const REAL *u = s->u;
    EACH_PIECE(at, width) {
        REAL most = NAME(most)(u + at);
        if (!(most > center)) continue;
        for (int64_t i = at; i < at + PIECE; i++)
            if (u[i] > center) s->wide[count++] = (double)u[i] - (double)center;
    }
    return count;
}

/* min(1, exp(x - tau)): Newton's method from the most classes at 1, as in project/capped.py. */
FN void NAME(capped_softmax)(const struct fused *call, int64_t row, struct fused_space *s) {
    double k = NAME(read_capped)(call, row, s), mass = 0, delta;
    if (k == 0) return;
    int64_t width = NAME(whole)(call->n), most = (int64_t)ceil(k) - 1;
    REAL *restrict u = s->u, *restrict g = s->g, center = NAME(kth)(u, call->n, most + 1, s);
    int64_t above = NAME(above)(call, s, center), capped = above;
    EACH_PIECE(at, width) {
        double sum = 0;
        PRAGMA(omp simd reduction(+ : sum))
        for (int64_t i = at; i < at + PIECE; i++) {
            REAL found = NAME(decay)(u[i] - center);
            g[i] = u[i] == NOTHING ? R(0.0) : found;
            sum += u[i] > center ? 0 : (double)g[i];
        }
        mass += sum;
    }
    delta = log(mass) - log(k - (double)most); /* no less than the solution */
    for (int i = 0; i < 64; i++) {
        double more = 0;
        int64_t count = 0;
        for (int64_t j = 0; j < above; j++) {
            if (s->wide[j] > delta)
                count++;
            else
                more += exp(s->wide[j]);
        }
        if (i && count <= capped) break;
        capped = count;
        delta = log(mass + more) - log(k - (double)count);
    }
    REAL scale = (REAL)exp(-delta);
    for (int64_t i = 0; i < width; i++) g[i] = g[i] * scale < 1 ? g[i] * scale : R(1.0);
    for (int64_t i = 0; i < width && above; i++) /* where the exponential is large, from the difference */
        if (u[i] > center) g[i] = (REAL)exp(fmin(((double)u[i] - (double)center) - delta, 0));
    memcpy(call->out + row * call->n, g, (size_t)call->n * sizeof(REAL));
}

/* clip(x - tau, 0, 1), with tau from the classes that can be above 0. */
FN void NAME(capped_sparsemax)(const struct fused *call, int64_t row, struct fused_space *s) {
    double k = NAME(read_capped)(call, row, s), lo, hi = 0, delta;
    if (k == 0) return;
    int64_t width = NAME(whole)(call->n), upper = (int64_t)ceil(k), lower = (int64_t)floor(k) + 1, count = 0;
    REAL *restrict u = s->u, *restrict g = s->g, center, next;
    if (lower <= SHORT_LIST) {
        REAL list[SHORT_LIST];
        NAME(best)(u, width, (int)lower, list);
        center = list[upper - 1], next = list[lower - 1];
    } else {
        center = NAME(kth)(u, call->n, upper, s);
        next = lower == upper ? center : NAME(kth)(u, call->n, lower, s);
    }
    lo = ((double)next - (double)center) - 1;
    REAL reach = (REAL)(lo - 1e-3 * (1 - lo)); /* a little less than lo: rounding must lose no class */
    double *d = s->wide;
    EACH_PIECE(at, width) {
        REAL most = NAME(most)(u + at);
        if (!(most - center > reach)) continue;
        for (int64_t i = at; i < at + PIECE; i++) {
            d[count] = (double)u[i] - (double)center;
            count += u[i] - center > reach;
        }
    }
    delta = (lo + hi) / 2;
    for (int i = 0; i < 100; i++) {
        double scores = 0, inside = 0, full = 0, part = 0;
        PRAGMA(omp simd reduction(+ : scores, inside, full, part))
        for (int64_t j = 0; j < count; j++) {
            double v = d[j] - delta;
            int in = v > 0 && v < 1;
            part += in ? v : 0;
            scores += in ? d[j] : 0;
            inside += in ? 1 : 0;
            full += v >= 1 ? 1 : 0;
        }
        double excess = part + (full - k), newton = inside > 0 ? (scores + (full - k)) / inside : NAN;
        if (excess > 0)
            lo = delta;
        else
            hi = delta;
        if (excess == 0 && !(inside > 0)) break;
        double step = newton >= lo && newton <= hi && i < 40 ? newton : (lo + hi) / 2;
        if (step == delta) break;
        delta = step;
    }
    for (int64_t i = 0; i < width; i++) {
        double v = ((double)u[i] - (double)center) - delta;
        g[i] = (REAL)(v > 1 ? 1 : v > 0 ? v : 0);
    }
    memcpy(call->out + row * call->n, g, (size_t)call->n * sizeof(REAL));
}

/* h (u - sum h u / sum h) / temperature, with h = y for the softmax and 1 for sparsemax where 0 < y < 1, else 0. logits
   is y, and each is u. */
INLINE void NAME(capped_backward)(const struct fused *call, int64_t row, struct fused_space *s, int soft) {
    const REAL *restrict y = call->logits + row * call->n, *restrict up = call->each + row * call->each_stride;
    REAL *restrict h = s->x, *restrict out = call->out + row * call->n;
    double mass = 0, total = 0;
    PRAGMA(omp simd reduction(+ : mass, total))
    for (int64_t i = 0; i < call->n; i++) {
        h[i] = y[i] > 0 && y[i] < 1 ? (soft ? y[i] : R(1.0)) : R(0.0);
        mass += (double)h[i];
        total += h[i] > 0 ? (double)h[i] * (double)up[i] : 0;
    }
    REAL mean = mass > 0 ? (REAL)(total / mass) : R(0.0), over = (REAL)(1 / call->number[0]);
    PRAGMA(omp simd)
    for (int64_t i = 0; i < call->n; i++) out[i] = h[i] > 0 ? h[i] * (up[i] - mean) * over : R(0.0);
    if (!NAME(finite)(mean)) s->odd = 1;
}

FN void NAME(capped_softmax_backward)(const struct fused *call, int64_t row, struct fused_space *s) {
    NAME(capped_backward)(call, row, s, 1);
}

FN void NAME(capped_sparsemax_backward)(const struct fused *call, int64_t row, struct fused_space *s) {
    NAME(capped_backward)(call, row, s, 0);
}

/* ---- Subsets of k classes, k <= MOST. ---- */

/* The polynomial prod (1 + w t) over the classes of a row up to the degree k, about the k-th largest score. The `heavy`
   classes are above that score, and fewer than k: each is a factor absent + present t. All others have w <= 1, in
   `wide`; dividing by 1 + w t takes such a class out again, with no more than 2^k roundings. `slope` is the derivative of
   the scores along a direction, with w slope in `other`. */
typedef struct {
    struct polynomial light, all;
    int k, heavy;
    int64_t place[MOST];
    double absent[MOST], present[MOST], turn[MOST];
    REAL center;
} NAME(subsets);

/* From the scores u, -inf where there is none, each times `scale`. 0 if there are fewer than k classes. */
FN int NAME(count_subsets)(NAME(subsets) * f, struct fused_space *s, int64_t n, int k, double scale, const REAL *slope) {
    int64_t width = NAME(whole)(n);
    const REAL *restrict u = s->u;
    double *restrict w = s->wide, *restrict turn = s->other;
    REAL list[MOST];
    NAME(best)(u, width, k, list);
    REAL center = list[k - 1];
    if (center == NOTHING) return 0;
    f->k = k, f->heavy = 0, f->center = center;
    PRAGMA(omp simd)
    for (int64_t i = 0; i < width; i++) {
        double d = ((double)u[i] - (double)center) * scale, found = EXP_DOUBLE(d, -708.0, 0.0);
        w[i] = u[i] > center || !(d > -700.0) ? 0.0 : found;
    }
    if (slope)
        for (int64_t i = 0; i < width; i++) turn[i] = i < n ? w[i] * (double)slope[i] : 0;
    NAME(doubles) c[MOST + 1] = {{0}}, d[MOST + 1] = {{0}};
    c[0] += 1;
    for (int64_t i = 0; i < width; i += DOUBLES) {
        NAME(doubles) v, t;
        memcpy(&v, w + i, sizeof v);
        if (slope) {
            memcpy(&t, turn + i, sizeof t);
            for (int m = k; m > 0; m--) d[m] += v * d[m - 1] + t * c[m - 1];
        }
        for (int m = k; m > 0; m--) c[m] += v * c[m - 1];
    }
    for (int lane = 0; lane < DOUBLES; lane++) {
        struct polynomial one = {{0}, {0}};
        for (int m = 0; m <= k; m++) one.c[m] = c[m][lane], one.d[m] = d[m][lane];
        if (lane)
            multiply(&f->light, k, &one);
        else
            f->light = one;
    }
    f->all = f->light;
    EACH_PIECE(at, width) {
        REAL most = NAME(most)(u + at);
        if (!(most > center)) continue;
        for (int64_t i = at; i < at + PIECE; i++) {
            if (!(u[i] > center)) continue;
            double tail = exp(-((double)u[i] - (double)center) * scale);
            int j = f->heavy++;
            f->place[j] = i, f->present[j] = 1 / (1 + tail), f->absent[j] = tail / (1 + tail);
            f->turn[j] = slope ? f->present[j] * (double)slope[i] : 0;
            multiply_by_class(&f->all, k, f->absent[j], f->present[j], f->turn[j]);
        }
    }
    return 1;
}

/* The polynomial of all classes but one heavy one. */
FN struct polynomial NAME(without)(const NAME(subsets) * f, int heavy) {
    struct polynomial found = f->light;
    for (int j = 0; j < f->heavy; j++)
        if (j != heavy) multiply_by_class(&found, f->k, f->absent[j], f->present[j], f->turn[j]);
    return found;
}

/* number: k, tau, alpha. */
FN void NAME(smooth_svm)(const struct fused *call, int64_t row, struct fused_space *s) {
    REAL *restrict x = s->x, *restrict a = s->a, *restrict b = s->b, *restrict g = s->g, *restrict u = s->u;
    int64_t n = call->n, width = NAME(whole)(n), label = -1;
    int k = (int)call->number[0];
    double tau = call->number[1], scale = 1 / (k * tau), *w = s->wide;
    NAME(subsets) f;
    if (NAME(read)(call, row, s)) s->odd = 1;
    for (int64_t at = 0; at < width && label < 0; at += PIECE)
        for (int64_t i = at; i < at + PIECE && label < 0 && NAME(some)(a + at); i++)
            if (a[i] > 0) label = i;
    for (int64_t i = 0; i < width; i++) u[i] = a[i] + b[i] > 0 ? x[i] : NOTHING;
    if (label >= 0) u[label] = NOTHING;
    if (label < 0 || !NAME(count_subsets)(&f, s, n, k, scale, 0)) {
        NAME(write_none)(call, row, s, label >= 0);
        return;
    }
    const double *e = f.all.c;
    double z = call->number[2] / tau + (log(e[k]) - log(e[k - 1])) + ((double)f.center - (double)x[label]) * scale;
    double weight = call->each ? (double)call->each[row * call->each_stride + label] : 1;
    double slope = weight * sigmoid(z) / k, first = slope / e[k], second = slope / e[k - 1];
    for (int64_t i = 0; i < width; i += DOUBLES) {
        NAME(doubles) v, now = {0}, before = {0};
        memcpy(&v, w + i, sizeof v);
        now += e[0];
        for (int m = 1; m < k; m++) {
            before = now;
            now = e[m] - v * now;
        }
        v *= now * first - before * second;
        NAME(store_doubles)(v, g + i);
    }
    for (int j = 0; j < f.heavy; j++) {
        struct polynomial rest = NAME(without)(&f, j);
        double less = k > 1 ? rest.c[k - 2] * second : 0;
        g[f.place[j]] = (REAL)(f.present[j] * (rest.c[k - 1] * first - less));
    }
    g[label] = (REAL)-slope;
    NAME(write)(call, row, s, weight * tau * softplus(z), 1);
}

/* Read a row into u; 0 where it is out of the ordinary. number: k. */
FN int NAME(read_subsets)(const struct fused *call, int64_t row, struct fused_space *s, NAME(subsets) * f,
                          const REAL *slope) {
    NAME(read)(call, row, s);
    int64_t live = NAME(keep_marked)(s->x, s->b, NAME(whole)(call->n), s->u);
    int k = (int)call->number[0];
    if (live > k && NAME(count_subsets)(f, s, call->n, k, 1, slope)) return 1;
    s->odd = 1;
    return 0;
}

/* The probability of each class. */
FN void NAME(marginals)(const struct fused *call, int64_t row, struct fused_space *s) {
    NAME(subsets) f;
    if (!NAME(read_subsets)(call, row, s, &f, 0)) return;
    int64_t width = NAME(whole)(call->n);
    double over = 1 / f.all.c[f.k];
    for (int64_t i = 0; i < width; i += DOUBLES) {
        NAME(doubles) v, now = {0};
        memcpy(&v, s->wide + i, sizeof v);
        now += f.all.c[0];
        for (int m = 1; m < f.k; m++) now = f.all.c[m] - v * now;
        NAME(store_doubles)(v * (now * over), s->g + i);
    }
    for (int64_t i = 0; i < width; i++) s->g[i] = s->g[i] < 1 ? s->g[i] : R(1.0);
    for (int j = 0; j < f.heavy; j++) {
        double y = f.present[j] * NAME(without)(&f, j).c[f.k - 1] * over;
        s->g[f.place[j]] = (REAL)(y < 1 ? y : 1);
    }
    if (!(f.all.c[f.k] > 1e-290 && f.all.c[f.k] < 1e290)) s->odd = 1;
    memcpy(call->out + row * call->n, s->g, (size_t)call->n * sizeof(REAL));
}

/* Their gradient. The matrix of derivatives is symmetric, so this is the derivative of the probabilities along the
   upstream gradient, which is `each`, less its mean: a constant changes nothing, and would cancel. positive: the
   probabilities. */
FN void NAME(marginals_backward)(const struct fused *call, int64_t row, struct fused_space *s) {
    NAME(subsets) f;
    REAL *restrict slope = s->g;
    const REAL *restrict up = call->each + row * call->each_stride;
    const REAL *restrict pi = call->positive + row * call->positive_stride;
    double total = 0;
    PRAGMA(omp simd reduction(+ : total))
    for (int64_t i = 0; i < call->n; i++) total += (double)(pi[i] * up[i]);
    REAL mean = (REAL)(total / call->number[0]);
    for (int64_t i = 0; i < call->n; i++) slope[i] = up[i] - mean;
    if (!NAME(read_subsets)(call, row, s, &f, slope)) return;
    int64_t width = NAME(whole)(call->n);
    double over = 1 / f.all.c[f.k], turn = f.all.d[f.k] * over;
    for (int64_t i = 0; i < width; i += DOUBLES) {
        NAME(doubles) v, t, now = {0}, moved = {0};
        memcpy(&v, s->wide + i, sizeof v);
        memcpy(&t, s->other + i, sizeof t);
        now += f.all.c[0], moved += f.all.d[0];
        for (int m = 1; m < f.k; m++) {
            moved = f.all.d[m] - t * now - v * moved;
            now = f.all.c[m] - v * now;
        }
        NAME(store_doubles)(((t - v * turn) * now + v * moved) * over, s->u + i);
    }
    for (int j = 0; j < f.heavy; j++) {
        struct polynomial rest = NAME(without)(&f, j);
        double c = rest.c[f.k - 1], d = rest.d[f.k - 1];
        s->u[f.place[j]] = (REAL)(((f.turn[j] - f.present[j] * turn) * c + f.present[j] * d) * over);
    }
    memcpy(call->out + row * call->n, s->u, (size_t)call->n * sizeof(REAL));
}

#undef FN
#undef INLINE
#undef PRAGMA
#undef EACH_PIECE
#undef NOTHING
#undef DOUBLES
#undef SHARES
#undef SIGMOID
