/* Blocks of labels, one per lane. TYPE, REAL, SIGNED, LANES, ISA and TARGET are set by linear_types.h and linear.c. */

#define V NAME(vector)
#define M NAME(mask)
#define INLINE __attribute__((always_inline)) TARGET static inline

typedef REAL V __attribute__((vector_size(LINE)));
typedef SIGNED M __attribute__((vector_size(LINE))); /* -1 where it holds, else 0 */

static const M NAME(lane_bit) =
#if LANES == 16
    {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
#else
    {1, 2, 4, 8, 16, 32, 64, 128};
#endif

INLINE M NAME(expand)(unsigned bits) { return (((SIGNED)bits - (M){0}) & NAME(lane_bit)) != 0; }

INLINE V NAME(select)(M where, V a, V b) { return (V)(((M)a & where) | ((M)b & ~where)); }

INLINE V NAME(larger)(V a, V b) { return NAME(select)(a > b, a, b); }

INLINE V NAME(smaller)(V a, V b) { return NAME(select)(a < b, a, b); }

INLINE V NAME(size_of)(V a) { return NAME(larger)(a, -a); }

INLINE V NAME(splat)(REAL x) { return x - (V){0}; }

/* The lanes where a mask holds, as bits. */
INLINE unsigned NAME(bits)(M mask) {
    M set = mask & NAME(lane_bit);
    SIGNED all = 0;
    for (int i = 0; i < LANES; i++) all |= set[i];
    return (unsigned)all;
}

INLINE int NAME(any)(M mask) { return NAME(bits)(mask) != 0; }

/* exp, for arguments cut to where it is finite and not 0. */
INLINE V NAME(exp)(V x) {
    x = NAME(larger)(NAME(smaller)(x, NAME(splat)(EXP_LIMIT)), NAME(splat)(-EXP_LIMIT));
    V shifted = x * (REAL)1.44269504088896340736 + ROUNDER;
    V whole = shifted - ROUNDER;
    V r = (x - whole * LN2_HIGH) - whole * LN2_LOW;
    M exponent = (M)shifted << MANTISSA; /* the low bits of `shifted` are the whole number */
    return (V)((M)(EXP_POLYNOMIAL(r)) + exponent);
}

struct NAME(block) {
    const struct call *call;
    struct rows rows;
    V *w;       /* one vector per feature, then that of the intercept */
    V *alpha;   /* one per row: the dual variables; for the logistic loss their logits (see `logistic_step`) */
    REAL *norm; /* squared length of each row with the bias */
    REAL *weight; /* of each row, or 0 */
    uint16_t *sign, *active; /* bits per row: lanes where it is positive, lanes where it is in play */
    int32_t *list;
    int64_t n_active;
    uint64_t random;
    V cost_positive, cost_negative;
    V old_max, new_max, new_min;
    unsigned live, full, waiting; /* lanes at work; lanes with all rows in play; lanes that have ended */
    int64_t label[LANES], step[LANES];
    int32_t passes[LANES];
    int converged[LANES];
};
#define BLOCK struct NAME(block)

INLINE V NAME(score)(const BLOCK *b, int64_t i) {
    const V *w = b->w;
    const REAL *x = b->rows.values;
    V sum[4] = {w[b->rows.n_features] * (REAL)b->call->bias, {0}, {0}, {0}};
    if (!b->rows.start) {
        int64_t n = b->rows.n_features, t = 0;
        x += (b->rows.origin ? b->rows.origin[i] : i) * n;
        for (; t + 4 <= n; t += 4)
            for (int u = 0; u < 4; u++) sum[u] += w[t + u] * x[t + u];
        for (; t < n; t++) sum[0] += w[t] * x[t];
    } else {
        const int32_t *index = b->rows.indices;
        int64_t t = b->rows.start[i], end = b->rows.end[i];
        for (; t + 4 <= end; t += 4)
            for (int u = 0; u < 4; u++) sum[u] += w[index[t + u]] * x[t + u];
        for (; t < end; t++) sum[0] += w[index[t]] * x[t];
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

INLINE void NAME(add_row)(BLOCK *b, int64_t i, V d) {
    V *w = b->w;
    const REAL *x = b->rows.values;
    if (!b->rows.start) {
        int64_t n = b->rows.n_features;
        x += (b->rows.origin ? b->rows.origin[i] : i) * n;
        for (int64_t t = 0; t < n; t++) w[t] += d * x[t];
    } else {
        const int32_t *index = b->rows.indices;
        int64_t end = b->rows.end[i];
        for (int64_t t = b->rows.start[i]; t < end; t++) w[index[t]] += d * x[t];
    }
    w[b->rows.n_features] += d * (REAL)b->call->bias;
}

/* Rows come in random order, and neither they nor their weights are in a cache: fetch the weights of the next row, the
   features of the one after it, and where those of a later one begin. */
INLINE void NAME(prefetch)(const BLOCK *b, int64_t s) {
    if (!b->rows.start || s + 1 >= b->n_active) return;
    const int32_t *index = b->rows.indices;
    int64_t i = b->list[s + 1], t = b->rows.start[i], end = b->rows.end[i];
    if (end - t > 64) end = t + 64;
    for (; t < end; t++) __builtin_prefetch(b->w + index[t], 1);
    __builtin_prefetch(b->alpha + i, 1);
    if (s + AHEAD >= b->n_active) return;
    __builtin_prefetch(b->rows.start + b->list[s + AHEAD]);
    __builtin_prefetch(b->rows.end + b->list[s + AHEAD]);
    i = b->list[s + AHEAD / 2];
    const char *values = (const char *)((const REAL *)b->rows.values + b->rows.start[i]);
    const char *features = (const char *)(index + b->rows.start[i]);
    int64_t n = b->rows.end[i] - b->rows.start[i];
    if (n > 64) n = 64;
    for (int64_t at = 0; at < n * (int64_t)sizeof *index; at += LINE) __builtin_prefetch(features + at);
    for (int64_t at = 0; at < n * (int64_t)sizeof(REAL); at += LINE) __builtin_prefetch(values + at);
    __builtin_prefetch(b->norm + i);
    __builtin_prefetch(b->sign + i);
    __builtin_prefetch(b->active + i);
}

/* One pass for max(0, 1 - y f)^2: min 1/2 a'(Q + D)a - sum a, a >= 0, with D = 1/(2 C). */
TARGET static void NAME(hinge_pass)(BLOCK *b) {
    const V one = NAME(splat)(1), zero = {0};
    V diag_positive = (REAL)0.5 / b->cost_positive, diag_negative = (REAL)0.5 / b->cost_negative;
    V new_max = NAME(splat)(-(REAL)INFINITY), new_min = NAME(splat)((REAL)INFINITY), old_max = b->old_max;
    unsigned live = b->live;
    for (int64_t s = 0; s < b->n_active; s++) {
        int64_t i = b->list[s];
        NAME(prefetch)(b, s);
        V f = NAME(score)(b, i), a = b->alpha[i];
        M positive = NAME(expand)(b->sign[i]), on = NAME(expand)(b->active[i] & live);
        V y = NAME(select)(positive, one, -one), diag = NAME(select)(positive, diag_positive, diag_negative);
        if (b->weight) diag /= b->weight[i];
        V slope = y * f - one + a * diag;
        M bound = a == zero, shrunk = on & bound & (slope > old_max);
        on &= ~shrunk;
        V projected = (V)((M)slope & ~(bound & (slope > zero)));
        new_max = NAME(select)(on, NAME(larger)(new_max, projected), new_max);
        new_min = NAME(select)(on, NAME(smaller)(new_min, projected), new_min);
        V next = NAME(select)(on, NAME(larger)(a - slope / (b->norm[i] + diag), zero), a);
        V d = next - a;
        if (NAME(any)(d != zero)) {
            b->alpha[i] = next;
            NAME(add_row)(b, i, d * y);
        }
        if (NAME(any)(shrunk)) {
            b->active[i] &= (uint16_t)~NAME(bits)(shrunk);
            if (!(b->active[i] & live)) b->list[s--] = b->list[--b->n_active];
        }
    }
    b->new_max = new_max;
    b->new_min = new_min;
}

/* One pass for log(1 + exp(-y f)). The dual variable of a row is a = C sigmoid(-m), and m is what is stored: the slope of
   the dual is y f - m (Yu, Huang and Lin 2011 have its logarithm). The new m lies between the old one and y f; it solves
   h(m) = m - y f + |x|^2 (a_old - a(m)) = 0, and h increases. */
TARGET static void NAME(logistic_pass)(BLOCK *b) {
    const V one = NAME(splat)(1);
    const V small = NAME(splat)((REAL)(0.1 * b->call->tolerance));
    V new_max = {0};
    unsigned live = b->live;
    for (int64_t s = 0; s < b->n_active; s++) {
        int64_t i = b->list[s];
        NAME(prefetch)(b, s);
        V f = NAME(score)(b, i), m = b->alpha[i];
        M positive = NAME(expand)(b->sign[i]), on = NAME(expand)(b->active[i] & live);
        V y = NAME(select)(positive, one, -one), cost = NAME(select)(positive, b->cost_positive, b->cost_negative);
        if (b->weight) cost *= b->weight[i];
        V goal = y * f, slope = goal - m, size = NAME(size_of)(slope);
        new_max = NAME(select)(on, NAME(larger)(new_max, size), new_max);
        on &= size > small;
        if (!NAME(any)(on)) continue;
        V scale = cost * b->norm[i], old = one / (one + NAME(exp)(m)), s1 = old, now = m;
        V low = NAME(smaller)(m, goal), high = NAME(larger)(m, goal), h = -slope;
        for (int step = 0; step < 20; step++) {
            V next = now - h / (one + scale * s1 * (one - s1));
            now = NAME(select)((next < low) | (next > high), (low + high) * (REAL)0.5, next);
            s1 = one / (one + NAME(exp)(now));
            h = (now - goal) + scale * (old - s1);
            if (!NAME(any)(on & (NAME(size_of)(h) > (REAL)0.05 * size))) break;
            low = NAME(select)(h < 0, now, low);
            high = NAME(select)(h > 0, now, high);
        }
        b->alpha[i] = NAME(select)(on, now, m);
        NAME(add_row)(b, i, (V)((M)(cost * (s1 - old) * y) & on));
    }
    b->new_max = new_max;
    b->new_min = (V){0};
}

/* Put all rows that some lane needs into the list. */
static void NAME(fill_list)(BLOCK *b) {
    int64_t n = 0;
    for (int64_t i = 0; i < b->rows.n; i++)
        if (b->active[i] & b->live) b->list[n++] = (int32_t)i;
    b->n_active = n;
}

static double NAME(row_weight)(const BLOCK *b, int64_t i) { return b->weight ? (double)b->weight[i] : 1; }

/* Give the lane the next label of the task that has rows of both kinds; 0 if there is none. Others are settled here. */
static int NAME(load)(BLOCK *b, const struct task *task, int64_t *next, int lane, const int32_t *place) {
    const struct call *call = b->call;
    uint16_t bit = (uint16_t)(1u << lane);
    while (*next < task->last) {
        int64_t label = call->order[(*next)++], count = 0;
        for (int64_t i = 0; i < b->rows.n; i++) b->sign[i] &= (uint16_t)~bit;
        for (int64_t t = call->positive_start[label]; t < call->positive_start[label + 1]; t++) {
            int64_t i = place ? place[call->positives[t]] - 1 : call->positives[t];
            if (i < 0 || b->sign[i] & bit) continue;
            b->sign[i] |= bit;
            count++;
        }
        if (count > 0 && count < b->rows.n) {
            b->label[lane] = label;
            b->step[lane] = 0;
            return 1;
        }
        double mass = 0, sign = count > 0 ? 1 : -1;
        for (int64_t i = 0; i < b->rows.n; i++) mass += NAME(row_weight)(b, i);
        mass *= count > 0 ? call->positive_weight[label] : call->negative_weight[label];
        for (int64_t step = 0; step < call->n_costs; step++)
            call->intercepts[step * call->n_labels + label] =
                sign * constant_score(call->loss, call->bias, mass * call->costs[step]);
        __atomic_fetch_add(call->done, call->n_costs, __ATOMIC_RELAXED);
    }
    return 0;
}

/* Set the lane to the cost of its step, with all rows in play. */
static void NAME(begin)(BLOCK *b, int lane) {
    const struct call *call = b->call;
    int64_t label = b->label[lane], step = b->step[lane];
    uint16_t bit = (uint16_t)(1u << lane);
    REAL positive = (REAL)(call->costs[step] * call->positive_weight[label]);
    REAL negative = (REAL)(call->costs[step] * call->negative_weight[label]);
    for (int64_t i = 0; i < b->rows.n; i++) {
        b->active[i] |= bit;
        if (step == 0)
            b->alpha[i][lane] = call->loss == LOGISTIC ? EXP_LIMIT / 2 : 0;
        else if (call->loss == LOGISTIC) { /* the same a under another C */
            double s = 1 / (1 + exp((double)b->alpha[i][lane])) * call->costs[step - 1] / call->costs[step];
            b->alpha[i][lane] = (REAL)fmin(log1p(-s) - log(s), EXP_LIMIT / 2);
        }
    }
    b->cost_positive[lane] = positive;
    b->cost_negative[lane] = negative;
    b->old_max[lane] = (REAL)INFINITY;
    b->passes[lane] = 0;
    b->converged[lane] = 0;
    b->live |= bit;
    b->full |= bit;
}

/* Write out the weights of the lanes `which`. */
TARGET static int NAME(emit)(BLOCK *b, unsigned which) {
    const struct call *call = b->call;
    int64_t n = b->rows.n_features;
    REAL cut = (REAL)call->threshold;
    M counts = {0};
    for (int64_t j = 0; j < n; j++) {
        V size = NAME(size_of)(b->w[j]);
        counts -= (size >= cut) & (size > 0);
    }
    struct weights *out[LANES] = {0};
    for (int lane = 0; lane < LANES; lane++) {
        if (!(which >> lane & 1)) continue;
        int64_t at = b->step[lane] * call->n_labels + b->label[lane];
        out[lane] = call->weights + at;
        call->intercepts[at] = (double)b->w[n][lane] * call->bias;
        call->passes[at] = b->converged[lane] ? b->passes[lane] : -b->passes[lane];
        size_t count = (size_t)counts[lane];
        out[lane]->index = malloc((count + 1) * sizeof(int32_t));
        out[lane]->value = malloc((count + 1) * sizeof(REAL));
        if (!out[lane]->index || !out[lane]->value) return 0;
    }
    M wanted = NAME(expand)(which);
    for (int64_t j = 0; j < n; j++) {
        V w = b->w[j], size = NAME(size_of)(w);
        unsigned kept = NAME(bits)(wanted & (size >= cut) & (size > 0));
        for (; kept; kept &= kept - 1) {
            int lane = __builtin_ctz(kept);
            int64_t at = out[lane]->n++;
            out[lane]->index[at] = b->rows.feature ? b->rows.feature[j] : (int32_t)j;
            ((REAL *)out[lane]->value)[at] = w[lane];
        }
    }
    return 1;
}

/* Write out the lanes that have ended, and give them the next cost or label. 0 where there is no memory. */
TARGET static int NAME(refill)(BLOCK *b, const struct task *task, int64_t *next, const int32_t *place) {
    unsigned done = b->waiting, cleared = 0;
    if (!NAME(emit)(b, done)) return 0;
    __atomic_fetch_add(b->call->done, __builtin_popcount(done), __ATOMIC_RELAXED);
    b->waiting = 0;
    for (unsigned left = done; left; left &= left - 1) {
        int lane = __builtin_ctz(left);
        if (++b->step[lane] < b->call->n_costs)
            NAME(begin)(b, lane);
        else
            cleared |= 1u << lane;
    }
    if (cleared) {
        M keep = ~NAME(expand)(cleared);
        for (int64_t j = 0; j <= b->rows.n_features; j++) b->w[j] = (V)((M)b->w[j] & keep);
    }
    for (; cleared; cleared &= cleared - 1) {
        int lane = __builtin_ctz(cleared);
        if (NAME(load)(b, task, next, lane, place)) NAME(begin)(b, lane);
    }
    return 1;
}

/* After a pass: which lanes have ended, which need all their rows back, which rows may leave next time. */
static int NAME(judge)(BLOCK *b) {
    int changed = 0;
    for (unsigned left = b->live; left; left &= left - 1) {
        int lane = __builtin_ctz(left);
        unsigned bit = 1u << lane;
        double top = (double)b->new_max[lane], range = top - (double)b->new_min[lane];
        b->passes[lane]++;
        int close = !(range > b->call->tolerance);
        if ((close && b->full & bit) || b->passes[lane] >= b->call->max_passes) {
            b->converged[lane] = close && b->full & bit;
            b->live &= ~bit;
            b->waiting |= bit;
            changed = 1;
        } else if (close) {
            for (int64_t i = 0; i < b->rows.n; i++) b->active[i] |= (uint16_t)bit;
            b->old_max[lane] = (REAL)INFINITY;
            b->full |= bit;
            changed = 1;
        } else {
            b->old_max[lane] = top > 0 ? (REAL)top : (REAL)INFINITY;
            if (b->call->loss == SQUARED_HINGE) b->full &= ~bit;
        }
    }
    return changed;
}

/* Copy the rows of a problem with their features renumbered, so that the weights lie close together. Where a problem has
   more than a quarter of all values they are used where they are: a copy would take as much memory as the rows, which may
   be on disk (mapped), and its features would be nearly all. */
static int NAME(gather)(BLOCK *b, const struct task *task, struct space *space, int32_t **place) {
    const struct call *call = b->call;
    const int32_t *list = call->row_list + call->row_start[task->problem];
    int64_t n = call->row_start[task->problem + 1] - call->row_start[task->problem];
    size_t held = space->size[PLACES];
    *place = room(space, PLACES, (size_t)call->n_rows * sizeof **place);
    if (space->failed) return 0;
    if (space->size[PLACES] != held) memset(*place, 0, space->size[PLACES]);
    for (int64_t i = 0; i < n; i++) (*place)[list[i]] = (int32_t)i + 1;
    b->rows.n = n;
    b->rows.origin = list;
    if (!call->indptr) return 1;

    int64_t total = 0, distinct = 0;
    for (int64_t i = 0; i < n; i++) total += call->indptr[list[i] + 1] - call->indptr[list[i]];
    if (total > call->indptr[call->n_rows] / 4) {
        int64_t *start = room(space, INDPTR, (size_t)(2 * n) * sizeof *start);
        if (space->failed) return 0;
        for (int64_t i = 0; i < n; i++) {
            start[i] = call->indptr[list[i]];
            start[n + i] = call->indptr[list[i] + 1];
        }
        b->rows.start = start;
        b->rows.end = start + n;
        return 1;
    }
    held = space->size[MAP];
    int32_t *map = room(space, MAP, (size_t)call->n_features * sizeof *map);
    int64_t *indptr = room(space, INDPTR, (size_t)(n + 1) * sizeof *indptr);
    int32_t *indices = room(space, INDICES, (size_t)total * sizeof *indices);
    REAL *values = room(space, VALUES, (size_t)total * sizeof *values);
    int64_t most = total < call->n_features ? total : call->n_features;
    int32_t *features = room(space, FEATURES, (size_t)most * sizeof *features);
    if (space->failed) return 0;
    if (space->size[MAP] != held) memset(map, 0, space->size[MAP]);
    for (int64_t i = 0; i < n; i++)
        for (int64_t t = call->indptr[list[i]]; t < call->indptr[list[i] + 1]; t++)
            if (!map[call->indices[t]]) {
                map[call->indices[t]] = 1;
                features[distinct++] = call->indices[t];
            }
    qsort(features, (size_t)distinct, sizeof *features, compare_int32);
    for (int64_t j = 0; j < distinct; j++) map[features[j]] = (int32_t)j;
    int64_t at = 0;
    for (int64_t i = 0; i < n; i++) {
        indptr[i] = at;
        for (int64_t t = call->indptr[list[i]]; t < call->indptr[list[i] + 1]; t++, at++) {
            indices[at] = map[call->indices[t]];
            values[at] = ((const REAL *)call->values)[t];
        }
    }
    indptr[n] = at;
    for (int64_t j = 0; j < distinct; j++) map[features[j]] = 0;
    b->rows = (struct rows){n, distinct, indptr, indptr + 1, indices, values, features, list};
    return 1;
}

static void NAME(measure_rows)(BLOCK *b) {
    const REAL *x = b->rows.values;
    double bias = b->call->bias * b->call->bias;
    for (int64_t i = 0; i < b->rows.n; i++) {
        int64_t row = b->rows.origin ? b->rows.origin[i] : i;
        int64_t from = b->rows.start ? b->rows.start[i] : row * b->rows.n_features;
        int64_t to = b->rows.start ? b->rows.end[i] : from + b->rows.n_features;
        double sum = bias;
        for (int64_t t = from; t < to; t++) sum += (double)x[t] * (double)x[t];
        b->norm[i] = (REAL)sum;
        if (b->weight) b->weight[i] = (REAL)b->call->row_weight[row];
    }
}

TARGET static void NAME(solve_task)(const struct call *call, const struct task *task, struct space *space) {
    BLOCK block = {.call = call}, *b = &block;
    int32_t *place = 0;
    const int64_t *end = call->indptr ? call->indptr + 1 : 0;
    b->rows = (struct rows){call->n_rows, call->n_features, call->indptr, end, call->indices, call->values, 0, 0};
    if (call->row_start && !NAME(gather)(b, task, space, &place)) return;
    size_t n = (size_t)b->rows.n, w_bytes = (size_t)(b->rows.n_features + 1) * sizeof(V);
    b->w = room(space, W, w_bytes);
    b->alpha = room(space, ALPHA, n * sizeof(V));
    b->sign = room(space, SIGNS, n * sizeof *b->sign);
    b->active = room(space, ACTIVE, n * sizeof *b->active);
    b->list = room(space, LIST, n * sizeof *b->list);
    b->norm = room(space, ROWS, 2 * n * sizeof(REAL));
    if (space->failed) return;
    b->weight = call->row_weight ? b->norm + n : 0;
    memset(b->w, 0, w_bytes);
    memset(b->sign, 0, n * sizeof *b->sign);
    memset(b->active, 0, n * sizeof *b->active);
    NAME(measure_rows)(b);
    b->random = (uint64_t)call->seed * 0x9e3779b97f4a7c15ULL ^ (uint64_t)(call->offset + task->first) << 20;
    b->cost_positive = b->cost_negative = NAME(splat)(1);

    int64_t next = task->first;
    for (int lane = 0; lane < LANES; lane++)
        if (NAME(load)(b, task, &next, lane, place)) NAME(begin)(b, lane);
    NAME(fill_list)(b);
    while (b->live && !*call->stop) {
        shuffle(b->list, b->n_active, &b->random);
        if (call->loss == SQUARED_HINGE)
            NAME(hinge_pass)(b);
        else
            NAME(logistic_pass)(b);
        int changed = NAME(judge)(b);
        if (b->waiting && (!b->live || __builtin_popcount(b->waiting) >= LANES / 2)) {
            if (!NAME(refill)(b, task, &next, place)) {
                space->failed = 1;
                break;
            }
            changed = 1;
        }
        if (changed) NAME(fill_list)(b);
    }
    if (place)
        for (int64_t i = 0; i < b->rows.n; i++) place[b->rows.origin[i]] = 0;
}

#undef V
#undef M
#undef INLINE
#undef BLOCK
