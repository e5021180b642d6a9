/* Short rows: as many as a vector has lanes are solved at once, each in a lane of its own, so that no sum runs across a
   vector. For one type and one instruction set, as lml_rows.h, which comes first.

   A row leaves the tile, and is solved by lml_rows.h alone, if there is anything special about it: nan or +inf, k at
   either end, sums that underflow. What a row's neighbours are never matters to it: the passes that they need leave its
   solution as it is. */

#define FN TARGET static
#define INLINE __attribute__((always_inline)) TARGET static inline
#define PRAGMA(text) _Pragma(#text)
#define EACH_LANE PRAGMA(omp simd) for (int i = 0; i < LANES; i++)

/* What a row of the tile is about, an array for each number. */
typedef struct {
    int64_t n;
    int at_most;          /* k is the largest sum */
    VEC *x, *e;           /* class by class */
    VEC pivot, c, s;      /* y = 1 / (1 + e s), e = exp(c - x) */
    int state[LANES];     /* CLOSE if it was solved here */
    int wide[LANES];      /* scores too far apart for the plain start */
    int tails[LANES];     /* far from the solution: the next step takes `full` */
    int moved;            /* whether the next pass has to take exponentials anew, with limits */
    int limited;          /* whether one has */
    double a[LANES], b[LANES], f[LANES], square[LANES], above[LANES], full[LANES]; /* as in struct sums */
    double k[LANES], logit[LANES], log_p[LANES], quantile[LANES]; /* as in struct start */
    double at[LANES], lo[LANES], hi[LANES], r[LANES], step[LANES];
} NAME(tile);

#if VECTOR / REAL_BYTES == 16
#define LOW_HALVES 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH_HALVES 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif VECTOR / REAL_BYTES == 8
#define LOW_HALVES 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH_HALVES 4, 12, 5, 13, 6, 14, 7, 15
#elif VECTOR / REAL_BYTES == 4
#define LOW_HALVES 0, 4, 1, 5
#define HIGH_HALVES 2, 6, 3, 7
#else
#define LOW_HALVES 0, 2
#define HIGH_HALVES 1, 3
#endif

/* Rows to columns, of LANES by LANES numbers: half of the rows is shuffled into the other until each has met all. */
INLINE void NAME(transpose)(VEC *rows) {
    VEC mixed[LANES];
    PRAGMA(GCC unroll 4)
    for (int met = 1; met < LANES; met *= 2) {
        PRAGMA(GCC unroll 8)
        for (int i = 0; i < LANES / 2; i++) {
            mixed[2 * i] = SHUFFLE(rows[i], rows[i + LANES / 2], NAME(lanes), LOW_HALVES);
            mixed[2 * i + 1] = SHUFFLE(rows[i], rows[i + LANES / 2], NAME(lanes), HIGH_HALVES);
        }
        PRAGMA(GCC unroll 16)
        for (int i = 0; i < LANES; i++) rows[i] = mixed[i];
    }
}

INLINE void NAME(add_lanes)(double *restrict total, VEC part) {
    REAL parts[LANES];
    memcpy(parts, &part, sizeof parts);
    EACH_LANE total[i] += parts[i];
}

/* ---- Passes over the scores of a tile, class by class. ---- */

/* The scores, and their moments about the first of the row: a is their sum, b that of their squares. */
FN void NAME(tile_load)(NAME(tile) * tile, const REAL *const *rows, REAL temperature) {
    int64_t n = tile->n, whole = n / LANES * LANES;
    VEC *restrict x = tile->x;
    for (int i = 0; i < LANES; i++) ((REAL *)&tile->pivot)[i] = rows[i][0] / temperature;
    for (int64_t j = 0; j < whole; j += LANES) {
        VEC part[LANES];
        for (int i = 0; i < LANES; i++) memcpy(part + i, rows[i] + j, sizeof *part);
        NAME(transpose)(part);
        for (int i = 0; i < LANES; i++) x[j + i] = part[i];
    }
    for (int64_t j = whole; j < n; j++)
        for (int i = 0; i < LANES; i++) ((REAL *)(x + j))[i] = rows[i][j];
    for (int64_t j = 0; j < n && temperature != R(1.0); j++) x[j] /= temperature;

    VEC pivot = tile->pivot;
    EACH_LANE tile->a[i] = tile->b[i] = 0;
    for (int64_t j = 0; j < n;) {
        int64_t end = j + STEPS < n ? j + STEPS : n;
        VEC sum = {0}, square = {0};
        for (; j < end; j++) {
            VEC d = x[j] - pivot;
            sum += d;
            square += d * d;
        }
        NAME(add_lanes)(tile->a, sum);
        NAME(add_lanes)(tile->b, square);
    }
}

/* What is known of the rows of a tile that may be wide. */
typedef struct {
    REAL far[LANES], low[LANES], high[LANES]; /* the largest |c - x|, and the ends of the scores, but for -inf */
    REAL count[LANES], odd[LANES];            /* how many scores are not -inf; 0 if none is nan or +inf */
} NAME(ends);

FN void NAME(tile_ends)(const NAME(tile) * tile, NAME(ends) * ends) {
    VEC zero = {0}, one = zero + R(1.0), far = zero, low = zero + INFINITE, high = -low, count = zero, odd = zero;
    for (int64_t j = 0; j < tile->n; j++) {
        VEC x = tile->x[j], d = tile->c - x;
        NAME(lanes) live = x != -INFINITE;
        d = NAME(select)(d < 0, -d, d);
        far = NAME(select)(live & (d > far), d, far);
        low = NAME(select)(live & (x < low), x, low);
        high = NAME(select)(x > high, x, high);
        count += NAME(select)(live, one, zero);
        odd = NAME(select)(x < INFINITE, odd, one);
    }
    memcpy(ends->far, &far, sizeof far);
    memcpy(ends->low, &low, sizeof low);
    memcpy(ends->high, &high, sizeof high);
    memcpy(ends->count, &count, sizeof count);
    memcpy(ends->odd, &odd, sizeof odd);
}

/* The scores no further than NEAR below the largest, and their moments about it. */
FN void NAME(tile_near)(const NAME(tile) * tile, const NAME(ends) * ends, double *total, double *squares, double *count) {
    VEC high, zero = {0}, one = zero + R(1.0), number = zero;
    memcpy(&high, ends->high, sizeof high);
    EACH_LANE total[i] = squares[i] = count[i] = 0;
    for (int64_t j = 0; j < tile->n;) {
        int64_t end = j + STEPS < tile->n ? j + STEPS : tile->n;
        VEC sum = zero, square = zero;
        for (; j < end; j++) {
            VEC d = tile->x[j] - high;
            NAME(lanes) near = d >= -(REAL)NEAR;
            d = NAME(select)(near, d, zero);
            sum += d;
            square += d * d;
            number += NAME(select)(near, one, zero);
        }
        NAME(add_lanes)(total, sum);
        NAME(add_lanes)(squares, square);
    }
    NAME(add_lanes)(count, number);
}

/* The sums of SUM over all classes, lane by lane, with the vector q at j. */
#define SUM_TILE(q, SUM, TAILS)                                                                          \
    {                                                                                                    \
    VEC zero = {0}, one = zero + R(1.0);                                                                 \
    (void)one;                                                                                           \
    EACH_LANE tile->a[i] = tile->b[i] = tile->f[i] = tile->square[i] = tile->above[i] = tile->full[i] = 0;\
    for (int64_t j = 0; j < tile->n;) {                                                                  \
        int64_t end = j + STEPS < tile->n ? j + STEPS : tile->n;                                         \
        VEC a = zero, b = zero, f = zero, square = zero, above = zero, full = zero;                      \
        for (; j < end; j++) {                                                                           \
            VEC p = q;                                                                                   \
            SUM(p)                                                                                       \
        }                                                                                                \
        NAME(add_lanes)(tile->a, a);                                                                     \
        NAME(add_lanes)(tile->b, b);                                                                     \
        NAME(add_lanes)(tile->f, f);                                                                     \
        NAME(add_lanes)(tile->square, square);                                                           \
        NAME(add_lanes)(tile->above, above);                                                             \
        if (TAILS) NAME(add_lanes)(tile->full, full);                                                    \
    }                                                                                                    \
    }

FN void NAME(tile_start)(NAME(tile) * tile) {
    const VEC *restrict x = tile->x;
    VEC *restrict e = tile->e;
    VEC c = tile->c;
    SUM_TILE((e[j] = NAME(vector_exp)(c - x[j])), SUM_PLAIN, 0)
}

FN void NAME(tile_search)(NAME(tile) * tile) {
    const VEC *restrict e = tile->e;
    VEC s = tile->s;
    int tails = 0;
    for (int i = 0; i < LANES; i++) tails |= tile->tails[i];
    if (tails)
        SUM_TILE(e[j] * s, SUM_TAILS, 1)
    else
        SUM_TILE(e[j] * s, SUM_EXACT, 0)
}

/* The same with exponentials taken anew and limited; rows whose center is the old one, and whose scores are in range, have
   the same again. */
FN void NAME(tile_again)(NAME(tile) * tile) {
    const VEC *restrict x = tile->x;
    VEC *restrict e = tile->e;
    VEC c = tile->c;
    for (int64_t j = 0; j < tile->n; j++) e[j] = NAME(vector_exp)(NAME(limited)(c - x[j]));
    tile->limited = 1;
    NAME(tile_search)(tile);
}

/* 0 where the exponential was limited. */
INLINE VEC NAME(within)(VEC e, VEC value) {
    VEC zero = {0};
    return NAME(select)(e < EXP_CEILING, value, zero);
}

/* y, or h times a factor, row by row, for the rows of the tile that have a place. */
INLINE void NAME(tile_spread)(NAME(tile) * tile, REAL *const *rows, int slopes, VEC factor) {
    int64_t n = tile->n, whole = n / LANES * LANES;
    const VEC *restrict e = tile->e;
    VEC s = tile->s;
    for (int64_t j = 0; j < whole; j += LANES) {
        VEC part[LANES];
        for (int i = 0; i < LANES; i++) {
            VEC q = e[j + i] * s, y = R(1.0) / (R(1.0) + q);
            part[i] = slopes ? q * y * y * factor : y;
        }
        for (int i = 0; i < LANES && tile->limited; i++) part[i] = NAME(within)(e[j + i], part[i]);
        NAME(transpose)(part);
        for (int i = 0; i < LANES; i++)
            if (rows[i]) memcpy(rows[i] + j, part + i, sizeof *part);
    }
    for (int64_t j = whole; j < n; j++) {
        VEC q = e[j] * s, y = R(1.0) / (R(1.0) + q), part = slopes ? q * y * y * factor : y;
        if (tile->limited) part = NAME(within)(e[j], part);
        for (int i = 0; i < LANES; i++)
            if (rows[i]) rows[i][j] = part[i];
    }
}

FN void NAME(tile_write)(NAME(tile) * tile, REAL *const *rows) { NAME(tile_spread)(tile, rows, 0, tile->s); }

FN void NAME(tile_slopes)(NAME(tile) * tile, REAL *const *rows, VEC factor) { NAME(tile_spread)(tile, rows, 1, factor); }

/* ---- The search, all rows in step. ---- */

/* A guess of nu from the moments of the scores that come near the largest; HARD where that will not do. */
FN void NAME(tile_look_closer)(NAME(tile) * tile, struct start *start, const double *farthest) {
    NAME(ends) ends;
    double total[LANES], squares[LANES], count[LANES];
    NAME(tile_ends)(tile, &ends);
    NAME(tile_near)(tile, &ends, total, squares, count);
    for (int i = 0; i < LANES; i++) {
        double k = tile->k[i], n = ends.count[i];
        int all = n == (double)tile->n && farthest[i] < 1e30;
        if (tile->state[i] != OPEN || farthest[i] < EXP_HIGH || (all && ends.odd[i] == 0 && ends.far[i] < EXP_HIGH)) continue;
        if (ends.odd[i] != 0 || !(k < n) || !(count[i] > k)) {
            tile->state[i] = HARD;
            continue;
        }
        double high = ends.high[i], shift = total[i] / count[i], variance = squares[i] / count[i] - shift * shift;
        start_prepare(start, k, n);
        tile->lo[i] = start->logit - high, tile->hi[i] = start->logit - (double)ends.low[i];
        start_prepare(start, k, count[i]);
        double guess = start_guess(start->logit, start->log_p, start->quantile, high + shift, variance, tile->lo[i], tile->hi[i]);
        REAL center = (REAL)-guess;
        ((REAL *)&tile->c)[i] = center;
        tile->lo[i] += (double)center, tile->hi[i] += (double)center;
        tile->wide[i] = tile->tails[i] = 1;
    }
}

/* A guess of nu for each row; HARD where the tile is not for it. No score is further from the mean than the root of
   n - 1 standard deviations (Samuelson's inequality). */
FN void NAME(tile_begin)(NAME(tile) * tile, struct start *start) {
    double n = (double)tile->n, farthest[LANES];
    REAL pivot[LANES], center[LANES];
    memcpy(pivot, &tile->pivot, sizeof pivot);
    for (int i = 0; i < LANES; i++) {
        int fits = tile->k[i] > 0 && tile->k[i] < n;
        tile->state[i] = fits ? OPEN : HARD;
        tile->wide[i] = tile->tails[i] = 0;
        if (fits) start_prepare(start, tile->k[i], n);
        tile->logit[i] = start->logit, tile->log_p[i] = start->log_p, tile->quantile[i] = start->quantile;
    }
    EACH_LANE {
        double shift = tile->a[i] / n, variance = tile->b[i] / n - shift * shift, mean = shift + (double)pivot[i];
        double reach = 1.001 * sqrt(n * (variance > 0 ? variance : 0)) + 1e-3 * fabs(shift);
        tile->lo[i] = tile->logit[i] - mean - reach;
        tile->hi[i] = tile->logit[i] - mean + reach;
        double guess = start_guess(tile->logit[i], tile->log_p[i], tile->quantile[i], mean, variance, tile->lo[i],
                                   tile->hi[i]);
        center[i] = (REAL)-guess;
        farthest[i] = fabs((double)center[i] - mean) + reach;
        tile->at[i] = 0;
        tile->lo[i] += (double)center[i], tile->hi[i] += (double)center[i];
    }
    memcpy(&tile->c, center, sizeof center);
    for (int i = 0; i < LANES; i++) ((REAL *)&tile->s)[i] = R(1.0);
    tile->limited = 0, tile->moved = 1;
    int wide = 0;
    for (int i = 0; i < LANES; i++) wide |= tile->state[i] == OPEN && !(farthest[i] < EXP_HIGH);
    if (wide) NAME(tile_look_closer)(tile, start, farthest);
}

/* Take the exponentials of a row about another center. */
FN void NAME(tile_recenter)(NAME(tile) * tile, int i) {
    REAL *center = (REAL *)&tile->c + i;
    double old = *center;
    *center = (REAL)(old - tile->at[i]);
    double moved = (double)*center - old;
    if (moved == 0) tile->state[i] = HARD; /* too large to be moved */
    tile->lo[i] += moved, tile->hi[i] += moved, tile->at[i] = 0;
    tile->moved = 1;
}

/* Move the rows that are open; whether there still are any. Rows for which the plain sums of the start will not do wait
   for those of the next pass. With `mass`, a row is not closed before the sums of its last pass give sum h at the
   solution. */
FN int NAME(tile_move)(NAME(tile) * tile, int plain, int mass) {
    int open = 0;
    tile->moved = 0;
    EACH_LANE {
        double f = tile->f[i] + (tile->above[i] - tile->k[i]);
        tile->step[i] = fourth_order(tile->a[i], tile->b[i], f, tile->square[i], tile->r + i);
    }
    for (int i = 0; i < LANES; i++) {
        if (tile->state[i] != OPEN) continue;
        int waits = plain && tile->wide[i]; /* for sums with limits */
        if (tile->at_most && !waits &&
            unreached(tile->at[i] - (double)tile->c[i], tile->f[i] + tile->above[i], tile->k[i], EPS)) {
            tile->state[i] = CLOSE; /* here, or above it: not below 0 */
            continue;
        }
        double r = fabs(tile->r[i]), t = fabs(tile->step[i]), sum_h = tile->a[i] + tile->b[i];
        double full = tile->tails[i] ? tile->full[i] : 0;
        tile->tails[i] = !(r < 0.3);
        if (waits) {
            tile->step[i] = 0;
            tile->moved = tile->tails[i] = 1;
        } else if (plain && !(sum_h > tile->f[i] / 4)) {
            tile->step[i] = 0;
            tile->tails[i] = 1;
        } else if (r < 0.3 && sum_h > SMALLEST_SUM) {
            if (!plain && r * r * r * r / 3 <= EPS / 2 && (!mass || t * t * t < EPS)) tile->state[i] = CLOSE;
        } else {
            struct sums m = {tile->a[i], tile->b[i], tile->f[i], tile->square[i], tile->above[i], full, 0, 0};
            double slack = 16 * EPS * (1 + fabs((double)tile->c[i]));
            tile->state[i] = take_step(&m, tile->k[i], tile->at[i], tile->lo + i, tile->hi + i, EPS, slack,
                                       SMALLEST_SUM, tile->step + i);
        }
        if (tile->state[i] != HARD) tile->at[i] += tile->step[i];
        if (tile->state[i] == OPEN && !(fabs(tile->at[i]) < (tile->tails[i] ? 1 : FAR))) NAME(tile_recenter)(tile, i);
        open |= tile->state[i] == OPEN;
    }
    REAL s[LANES];
    EACH_LANE s[i] = (REAL)EXP_DOUBLE(-tile->at[i], -FAR - 1, FAR + 1);
    memcpy(&tile->s, s, sizeof s);
    return open;
}

/* The size of a row of the Fenchel-Young loss; -1 if a class is left out, and the row to be solved alone. */
FN double NAME(young_size_of_lane)(const struct call *call, int64_t index, struct space *space) {
    double labels;
    int64_t known;
    double k = NAME(young_size)(call, index, (REAL *)space->label, &labels, &known);
    if (call->index) NAME(mark)(call, index, (REAL *)space->label, 0);
    return known < call->n ? -1 : k;
}

/* The scores of a row, -inf where it is masked. */
FN const REAL *NAME(masked)(const struct call *call, int64_t row, REAL *restrict to) {
    const REAL *restrict logits = (const REAL *)call->logits + row * call->n;
    const uint8_t *restrict mask = call->mask + row * call->mask_stride;
    for (int64_t j = 0; j < call->n; j++) to[j] = mask[j] ? logits[j] : -INFINITE;
    return to;
}

/* Solve `count` rows from `index` on. */
FN void NAME(tile_solve)(NAME(tile) * tile, const struct call *call, int64_t index, int count, struct space *space,
                         int mass) {
    const REAL *rows[LANES];
    tile->n = call->n;
    tile->at_most = call->kind == KIND_AT_MOST;
    tile->x = (VEC *)space->copy;
    tile->e = (VEC *)space->e;
    for (int i = 0; i < LANES; i++) {
        int64_t row = index + (i < count ? i : 0);
        rows[i] = (const REAL *)call->logits + row * call->n;
        if (call->mask) rows[i] = NAME(masked)(call, row, (REAL *)space->e + i * call->n);
        tile->k[i] = call->kind == KIND_FENCHEL_YOUNG ? NAME(young_size_of_lane)(call, row, space)
                                                      : (double)((const REAL *)call->k)[row * call->k_stride];
    }
    NAME(tile_load)(tile, rows, (REAL)call->temperature);
    NAME(tile_begin)(tile, &space->start);
    int plain = 0, open = 1;
    for (int i = 0; i < LANES; i++) plain |= tile->state[i] == OPEN && !tile->wide[i];
    for (int passes = plain ? 0 : 1; open && passes < 16; passes++) {
        if (passes == 0)
            NAME(tile_start)(tile);
        else if (tile->moved)
            NAME(tile_again)(tile);
        else
            NAME(tile_search)(tile);
        open = NAME(tile_move)(tile, passes == 0, mass);
    }
}

/* ---- Calls: as those of lml_rows.h, for no more than LANES rows. ---- */

/* The row of a lane, as the search of lml_rows.h would leave it but for `e`. */
FN void NAME(row_of_lane)(NAME(row) * row, const NAME(tile) * tile, int i, const struct call *call, int64_t index,
                          struct space *space) {
    double a = tile->a[i], b = tile->b[i], t = tile->step[i];
    NAME(load)(row, call, index, space);
    row->sum_h = (a + b) + t * ((b - a) + t / 2 * (a + b - 6 * tile->square[i]));
    row->state = CLOSE;
    NAME(split)(row, (double)tile->c[i], tile->at[i]);
}

/* nu = t - c of all rows, as `split` does. */
FN void NAME(tile_split)(const NAME(tile) * tile, double *c, double *t) {
    EACH_LANE {
        double center = tile->c[i], at = tile->at[i];
        c[i] = (double)(REAL)(fabs(at) < 0.03 ? center : center - at);
        t[i] = (double)(REAL)((c[i] - center) + at);
    }
}

FN void NAME(forward_tile)(const struct call *call, int64_t index, int count, struct space *space) {
    NAME(tile) tile;
    REAL *out[LANES] = {0};
    NAME(tile_solve)(&tile, call, index, count, space, 0);
    double c[LANES], t[LANES];
    NAME(tile_split)(&tile, c, t);
    int alone[LANES], some = 0; /* alone: a row is written from its scores */
    for (int i = 0; i < count; i++) {
        alone[i] = call->kind == KIND_LOG || (call->kind == KIND_AT_MOST && t[i] >= c[i]);
        if (tile.state[i] != CLOSE || alone[i] || call->kind == KIND_NU) continue;
        out[i] = (REAL *)call->out + (index + i) * call->n;
        some = 1;
    }
    if (some) NAME(tile_write)(&tile, out);
    for (int i = 0; i < count; i++) {
        if (tile.state[i] != CLOSE) {
            NAME(forward_rows)(call, index + i, 1, space);
        } else if (alone[i]) {
            NAME(row) row;
            NAME(row_of_lane)(&row, &tile, i, call, index + i, space);
            NAME(loosen)(&row);
            NAME(write)(call, &row, index + i);
        } else if (call->center) {
            ((REAL *)call->center)[index + i] = (REAL)c[i];
            ((REAL *)call->delta)[index + i] = (REAL)t[i];
        }
    }
}

/* The labels of an index list, one column of the lists at a time: where they are, and the points of their scores; 0 in
   a lane without a label there, or not solved in the tile. */
typedef struct {
    double c[LANES], t[LANES]; /* nu = t - c, as the type of the call holds it */
    int64_t label[LANES];      /* -1 where there is none */
    double z[LANES];
} NAME(column);

FN void NAME(read_column)(NAME(column) * column, const NAME(tile) * tile, const struct call *call, int64_t index,
                          int count, int64_t j) {
    REAL x[LANES] = {0};
    for (int i = 0; i < LANES; i++) {
        int live = i < count && tile->state[i] == CLOSE;
        int64_t label = live ? call->index[(index + i) * call->m + j] : -1;
        column->label[i] = label >= 0 && label < call->n ? label : -1;
        if (column->label[i] >= 0) x[i] = tile->x[label][i];
    }
    EACH_LANE column->z[i] = ((double)x[i] - column->c[i]) + column->t[i];
}

/* The loss of index lists without `observed`: of the rows that the tile has solved, all at once. */
FN void NAME(tile_listed)(NAME(tile) * tile, const struct call *call, int64_t index, int count) {
    NAME(column) column;
    REAL *out[LANES] = {0}, factor[LANES], slope[LANES];
    double loss[LANES] = {0}, pull[LANES] = {0}, sum_h[LANES], log_mass[LANES], scale = call->unit / call->temperature;
    EACH_LANE {
        double a = tile->a[i], b = tile->b[i], step = tile->step[i];
        sum_h[i] = (a + b) + step * ((b - a) + step / 2 * (a + b - 6 * tile->square[i]));
    }
    NAME(tile_split)(tile, column.c, column.t);
    for (int64_t j = 0; j < call->m; j++) {
        NAME(read_column)(&column, tile, call, index, count, j);
        EACH_LANE {
            double z = column.z[i], tail = EXP_DOUBLE(-fabs(z), -708.0, 0.0), large = 1 / (1 + tail);
            double term = LOG1P_DOUBLE(tail) - (z < 0 ? z : 0), miss = z < 0 ? large : tail * large;
            miss = z > -INFINITY ? miss : 0;
            loss[i] += column.label[i] < 0 ? 0 : term;
            pull[i] -= column.label[i] < 0 ? 0 : miss;
        }
    }
    EACH_LANE {
        log_mass[i] = LOG_DOUBLE(sum_h[i], 0);
        factor[i] = (REAL)(0 - pull[i] / sum_h[i] * scale);
    }
    for (int i = 0; i < count; i++) {
        if (tile->state[i] != CLOSE) continue;
        int found = 0;
        for (int64_t j = 0; j < call->m; j++) found |= call->index[(index + i) * call->m + j] >= 0;
        if (call->weight) ((REAL *)call->weight)[index + i] = (REAL)found;
        if (call->center) ((REAL *)call->center)[index + i] = (REAL)column.c[i];
        if (call->center) ((REAL *)call->delta)[index + i] = (REAL)column.t[i];
        ((REAL *)call->out)[index + i] = (REAL)loss[i];
        ((REAL *)call->log_mass)[index + i] = (REAL)log_mass[i];
        /* with what rounding takes from pull / sum h */
        ((REAL *)call->pull)[index + i] = (REAL)(pull[i] * (1 + ((double)(REAL)log_mass[i] - log_mass[i])));
        if (call->slope) out[i] = (REAL *)call->slope + (index + i) * call->n;
    }
    if (!call->slope) return;
    VEC factors;
    memcpy(&factors, factor, sizeof factors);
    NAME(tile_slopes)(tile, out, factors);
    for (int64_t j = 0; j < call->m; j++) {
        NAME(read_column)(&column, tile, call, index, count, j);
        EACH_LANE {
            double z = column.z[i], tail = EXP_DOUBLE(-fabs(z), -708.0, 0.0), large = 1 / (1 + tail);
            double miss = z < 0 ? large : tail * large, h = tail * large * large;
            slope[i] = z > -INFINITY ? (REAL)((0 - miss - pull[i] * h / sum_h[i]) * scale) : R(0.0);
        }
        for (int i = 0; i < count; i++)
            if (column.label[i] >= 0) out[i][column.label[i]] = slope[i];
    }
}

/* The Fenchel-Young loss of the rows of a tile. */
FN void NAME(young_tile)(NAME(tile) * tile, const struct call *call, int64_t index, int count, struct space *space) {
    for (int i = 0; i < count; i++) {
        NAME(row) row;
        double labels;
        int64_t known;
        if (tile->state[i] != CLOSE) continue;
        NAME(row_of_lane)(&row, tile, i, call, index + i, space);
        double k = NAME(young_size)(call, index + i, (REAL *)space->label, &labels, &known);
        NAME(write_young)(call, &row, index + i, labels - k, space);
        if (call->index) NAME(mark)(call, index + i, (REAL *)space->label, 0);
    }
    for (int i = 0; i < count; i++)
        if (tile->state[i] != CLOSE) NAME(young_rows)(call, index + i, 1, space);
}

FN void NAME(loss_forward_tile)(const struct call *call, int64_t index, int count, struct space *space) {
    NAME(tile) tile;
    if (call->kind == KIND_FENCHEL_YOUNG) {
        NAME(tile_solve)(&tile, call, index, count, space, 0);
        NAME(young_tile)(&tile, call, index, count, space);
        return;
    }
    int listed = call->index && call->observed == 0;
    NAME(tile_solve)(&tile, call, index, count, space, 1);
    if (listed) NAME(tile_listed)(&tile, call, index, count);
    for (int i = 0; i < count && !listed; i++) {
        if (tile.state[i] != CLOSE) continue;
        NAME(row) row;
        NAME(row_of_lane)(&row, &tile, i, call, index + i, space);
        NAME(write_loss)(call, &row, index + i, space);
        if (call->slope) NAME(write_slope)(call, &row, index + i, space);
    }
    for (int i = 0; i < count; i++) /* those that are solved alone take the tile's memory */
        if (tile.state[i] != CLOSE) NAME(loss_forward_rows)(call, index + i, 1, space);
}

#ifndef WITH_HARD

/* Numbers of half precision to float. */
FN void NAME(widen)(int half, const uint16_t *restrict from, word *restrict to, int64_t size) {
    int64_t i = 0;
    if (half == HALF_BFLOAT16)
        for (; i < size; i++) to[i] = (uint32_t)from[i] << 16;
#if VECTOR == 64
    for (; i + 16 <= size; i += 16)
        _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from + i))));
#elif VECTOR == 32
    for (; i + 8 <= size; i += 8)
        _mm256_storeu_ps((float *)(to + i), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
#endif
    for (; i < size; i++) to[i] = widen_float16(from[i]);
}

/* The reverse: to the nearest, ties to even. */
FN void NAME(narrowed)(int half, const word *restrict from, uint16_t *restrict to, int64_t size) {
    int64_t i = 0;
    if (half == HALF_BFLOAT16)
        for (; i < size; i++) {
            uint32_t rounded = (from[i] + 0x7fff + (from[i] >> 16 & 1)) >> 16;
            to[i] = (uint16_t)((from[i] & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
        }
#if VECTOR == 64
    for (; i + 16 <= size; i += 16)
        _mm256_storeu_si256((__m256i *)(to + i), _mm512_cvtps_ph(_mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#elif VECTOR == 32
    for (; i + 8 <= size; i += 8)
        _mm_storeu_si128((__m128i *)(to + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps((const float *)(from + i)), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < size; i++) to[i] = narrow_float16(from[i]);
}

/* The reverse of numbers times a factor. */
FN void NAME(scaled)(int half, const float *from, float factor, uint16_t *to, int64_t size) {
    float block[256];
    for (int64_t i = 0; i < size; i += 256) {
        int64_t count = size - i < 256 ? size - i : 256;
        for (int64_t j = 0; j < count; j++) block[j] = from[i + j] * factor;
        NAME(narrowed)(half, (const word *)block, to + i, count);
    }
}

/* Rows of half precision, converted while they are in the cache: the forward and backward pass of y, and the loss with its
   gradient, which stays float. */
FN void NAME(half_rows)(const struct call *call, int64_t index, int count, struct space *space) {
    struct call own = *call;
    int half = (int)call->half;
    int64_t first = index * own.n, size = count * own.n;
    word *x = (word *)space->narrow, *y = x + size, *u = y + size;
    uint16_t *to = (uint16_t *)own.out + first;
    void **each[] = {&own.out, &own.center, &own.delta, &own.log_mass, &own.pull, &own.weight};
    NAME(widen)(half, (const uint16_t *)own.logits + first, x, size);
    own.logits = x;
    for (int i = 0; i < 6; i++)
        if (*each[i]) *each[i] = (float *)*each[i] + index;
    if (own.grad) {
        NAME(widen)(half, (const uint16_t *)own.grad + first, u, size);
        own.grad = u;
    }
    own.k = (const float *)own.k + index * own.k_stride;
    if (own.mask) own.mask += index * own.mask_stride;
    if (own.index) own.index += index * own.m;
    if (own.dense) own.dense = (const char *)own.dense + first * dense_bytes[own.dense_type];
    if (own.slope) own.slope = (float *)own.slope + first;
    if (!own.total) own.out = y;
    space->work(&own, 0, count, space);
    if (!own.total) NAME(narrowed)(half, y, to, size);
}

#endif

#undef FN
#undef INLINE
#undef PRAGMA
#undef EACH_LANE
#undef STEPS
#undef BLOCK
#undef SUM_PLAIN
#undef SUM_EXACT
#undef SUM_TAILS
#undef VEC
#undef LOW_HALVES
#undef HIGH_HALVES
#undef SUM_TILE
