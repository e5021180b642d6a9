/* Rows of middle length with weights and bounds, for one type and one instruction set; after weighted_rows.h, whose names
   it uses. A band is as many rows as a vector has lanes, and the calls are those of a tile: rows that share their weights
   and bounds, or have positive weights of their own and no bounds. Scores and weights are read where they are, and y is
   kept where it will be written: nothing is transposed or copied. The steps between the passes are those of a tile, a row
   per lane. What is special about a row, or hard, is left to `weighted_rows`.

   Classes beyond whole vectors are read together with some before them, which have a share of 0 there. */

typedef struct {
    NAME(budget_tile) tile;
    int count;
    const REAL *z[LANES], *w[LANES], *a[LANES], *ahead[LANES], *ahead_own[LANES]; /* ahead: the next rows, to be fetched */
    REAL *e[LANES];
    VEC last[LANES];                            /* the shares of the last vector */
    VEC parts[5][LANES];                        /* sums over a block of each row */
    VEC far[LANES], largest[LANES], signs[LANES];
    double over[LANES];                         /* one over the unit of weights that are read as they are */
} NAME(band);

#define MOST_EXPONENT (REAL_BYTES == 4 ? 30 : 240) /* of weights that are read as they are: four are multiplied */

/* Do CLASSES(i, shares at i) for the vectors of a block. */
#define EACH_VECTOR(first, n, shares, last, CLASSES)                                      \
    int64_t whole = (n) / LANES * LANES, end = first + BLOCK < whole ? first + BLOCK : whole; \
    for (int64_t i = first; i < end; i += LANES) {                                        \
        CLASSES(i, NAME(kept)((shares) + i))                                              \
    }                                                                                     \
    if (end == whole && whole < (n)) {                                                    \
        CLASSES((n) - LANES, last)                                                        \
    }
#define EACH_BLOCK for (int64_t first = 0; first + LANES <= tile->n; first += BLOCK)
#define EACH_ROW for (int row = 0; row < band->count; row++)

/* The sums of the lanes of each row, added to those of other blocks. */
INLINE void NAME(band_add)(double *sums, VEC *parts) {
    double more[LANES] = {0};
    NAME(transpose)(parts);
    for (int i = 0; i < LANES; i++) NAME(add_lanes)(more, parts[i]);
    EACH_LANE sums[i] += more[i];
}

/* The largest of each row, lane by lane. */
INLINE VEC NAME(band_largest)(VEC *parts) {
    VEC found = {0};
    NAME(transpose)(parts);
    for (int i = 0; i < LANES; i++) found = NAME(farther)(parts[i], found);
    return found;
}

/* The moments of a block of a row; those of its weights as well if it has its `own`. Scores are copied if they are divided,
   or turned around where the weight is negative. */
INLINE void NAME(band_moments)(NAME(band) * band, int row, int64_t first, REAL temperature, const REAL *sign, REAL *copy,
                               int own) {
    const REAL *restrict x = band->z[row], *restrict weights = band->w[row], *restrict shares = band->a[row];
    double total[LANES] = {0};
    VEC far = band->far[row], largest = {0}, a1 = {0}, a2 = {0}, a3 = {0}, w1 = {0}, w2 = {0};
    NAME(bits) signs = {0};
    if (own) largest = band->largest[row], signs = (NAME(bits))band->signs[row];
#define MOMENTS_AT(at, part)                                                                          \
    VEC z = NAME(kept)(x + (at)), w = NAME(kept)(weights + (at)), a = part;                           \
    if (copy) {                                                                                       \
        z /= temperature;                                                                             \
        if (sign) z = NAME(select)(NAME(kept)(sign + (at)) < 0, -z, z);                               \
        NAME(keep)(z, copy + (at));                                                                   \
    }                                                                                                 \
    VEC t = a * z;                                                                                    \
    ADD_MOMENTS(z, t, w)                                                                              \
    if (own) {                                                                                        \
        VEC square = a * w;                                                                           \
        NAME(add_lanes)(total, a); /* exact to the rounding of double */                              \
        largest = NAME(farther)(w, largest);                                                          \
        signs |= (NAME(bits))w;                                                                       \
        w1 += square;                                                                                 \
        w2 += square * w;                                                                             \
    }
    EACH_VECTOR(first, band->tile.n, shares, band->last[row], MOMENTS_AT)
#undef MOMENTS_AT
    band->parts[0][row] = a1, band->parts[1][row] = a2, band->parts[2][row] = a3, band->far[row] = far;
    if (!own) return;
    band->parts[3][row] = w1, band->parts[4][row] = w2, band->largest[row] = largest, band->signs[row] = (VEC)signs;
    band->tile.total[row] += NAME(sum)(total);
}

/* The moments of all rows. */
INLINE void NAME(band_load)(NAME(band) * band, REAL temperature, const REAL *sign, REAL *copy, int64_t width, int own) {
    NAME(budget_tile) *tile = &band->tile;
    VEC zero = {0};
    for (int i = 0; i < LANES; i++) band->far[i] = band->largest[i] = band->signs[i] = zero;
    for (int k = 0; k < 5; k++)
        for (int i = band->count; i < LANES; i++) band->parts[k][i] = zero;
    EACH_LANE tile->z1[i] = tile->z2[i] = tile->zw[i] = 0;
    if (own) EACH_LANE tile->total[i] = tile->w1[i] = tile->w2[i] = 0;
    EACH_BLOCK {
        EACH_ROW NAME(band_moments)(band, row, first, temperature, sign, copy ? copy + row * width : 0, own);
        NAME(band_add)(tile->z1, band->parts[0]);
        NAME(band_add)(tile->z2, band->parts[1]);
        NAME(band_add)(tile->zw, band->parts[2]);
        if (own) NAME(band_add)(tile->w1, band->parts[3]);
        if (own) NAME(band_add)(tile->w2, band->parts[4]);
    }
    if (copy) EACH_ROW band->z[row] = copy + row * width;
    VEC far = NAME(band_largest)(band->far);
    EACH_LANE tile->farthest[i] = (double)far[i] + tile->z1[i] * 0;
}

/* The units of rows with weights of their own, and their sums as if weights were divided by them, which rounds nothing; nan
   as the total where a weight is infinite or below 0, or all are very large or very small. */
FN void NAME(band_units)(NAME(band) * band) {
    NAME(budget_tile) *tile = &band->tile;
    REAL sizes[LANES];
    BITS sign[LANES];
    VEC largest = NAME(band_largest)(band->largest);
    NAME(bits) signs = {0};
    NAME(transpose)(band->signs);
    for (int i = 0; i < LANES; i++) signs |= (NAME(bits))band->signs[i];
    memcpy(sizes, &largest, sizeof sizes);
    memcpy(sign, &signs, sizeof sign);
    EACH_LANE {
        SIGNED exponent = (SIGNED)(NAME(to_bits)(sizes[i]) >> MANTISSA) - HALF_EXPONENT; /* as frexp's */
        int fits = exponent >= -MOST_EXPONENT && exponent <= MOST_EXPONENT && !(sign[i] >> (8 * REAL_BYTES - 1));
        exponent = fits ? exponent : 0;
        double over = (double)NAME(from_bits)((BITS)(HALF_EXPONENT + 1 - exponent) << MANTISSA), square = over * over;
        band->over[i] = over, tile->unit[i] = 1 / over;
        tile->total[i] = fits ? tile->total[i] * over : (double)NAN;
        tile->w1[i] *= square, tile->w2[i] *= square * over;
        tile->z1[i] *= over, tile->z2[i] *= over, tile->zw[i] *= square;
    }
}

/* The sums over a block of a row at its nu, as `budget_tile_sums`. */
INLINE void NAME(band_sums)(NAME(band) * band, int row, int64_t first, int limits, int few, int keep) {
    const REAL *restrict scores = band->z[row], *restrict weights = band->w[row], *restrict shares = band->a[row];
    const REAL *ahead = keep ? band->ahead_own[row] : band->ahead[row];
    REAL *restrict e = band->e[row];
    VEC nu = NAME(fill)((REAL)(band->tile.nu[row] * band->over[row])), f = {0}, s1 = {0}, s2 = {0}, s3 = {0};
    NAME(lanes) side = (NAME(lanes)){0} - (band->tile.is_few[row] != 0);
    int more = SUMS_SECOND(limits, few, keep);
    band->tile.summed[row] = more;
#define SUMS_AT(at, part)                                                                                       \
    VEC w = NAME(kept)(weights + (at)), a = part, point = -(NAME(kept)(scores + (at)) + w * nu);                 \
    FETCH(ahead + (at))                                                                                         \
    if (!keep) FETCH_TO_WRITE(e + (at))                                                                         \
    VEC q = limits ? NAME(point_exp)(point) : keep ? NAME(vector_exp)(point) : NAME(rough_exp)(point);          \
    WEIGH(q, a, w, keep == KEEP_NONE, more, !keep || THREE)                                                     \
    if (keep == KEEP_Y) NAME(keep)(y, e + (at));                                                                \
    if (keep == KEEP_PART) NAME(keep)(NAME(signed_part)(y, v), e + (at));
    EACH_VECTOR(first, band->tile.n, shares, band->last[row], SUMS_AT)
#undef SUMS_AT
    band->parts[0][row] = f, band->parts[1][row] = s1, band->parts[2][row] = s2, band->parts[3][row] = s3;
}

/* Move the open rows to their next points, and look at the sums there. */
FN void NAME(band_look)(NAME(band) * band, int keep) {
    NAME(budget_tile) *tile = &band->tile;
    NAME(budget_sums_before) was;
    VEC zero = {0};
    NAME(budget_remember)(tile, &was);
    for (int i = 0; i < LANES; i++) {
        double at = tile->nu[i];
        if (tile->state[i] == OPEN) tile->nu[i] = (double)(REAL)(at + tile->at[i]), tile->at[i] = 0;
        tile->moved[i] = tile->nu[i] - at;
    }
    EACH_LANE tile->f[i] = tile->s1[i] = tile->s2[i] = tile->s3[i] = 0;
    EACH_BLOCK {
        for (int row = 0; row < LANES; row++) {
            if (tile->state[row] != OPEN)
                for (int k = 0; k < 4; k++) band->parts[k][row] = zero;
            else if (!(tile->farthest[row] + fabs(tile->nu[row]) < EXP_HIGH))
                NAME(band_sums)(band, row, first, 1, 0, keep);
            else if (!tile->is_few[row])
                NAME(band_sums)(band, row, first, 0, 0, keep);
            else if (keep == KEEP_NONE)
                NAME(band_sums)(band, row, first, 0, 1, KEEP_NONE);
            else if (keep == KEEP_Y)
                NAME(band_sums)(band, row, first, 0, 1, KEEP_Y);
            else
                NAME(band_sums)(band, row, first, 0, 1, KEEP_PART);
        }
        NAME(band_add)(tile->f, band->parts[0]);
        NAME(band_add)(tile->s1, band->parts[1]);
        NAME(band_add)(tile->s2, band->parts[2]);
        if (!keep || THREE) NAME(band_add)(tile->s3, band->parts[3]);
    }
    EACH_LANE {
        double over = band->over[i], square = over * over;
        tile->f[i] *= over, tile->s1[i] *= square, tile->s2[i] *= square * over, tile->s3[i] *= square * square;
    }
    NAME(budget_bend)(tile, &was);
}

/* The values of a row, where y is kept. */
INLINE void NAME(band_write)(const NAME(band) * band, int row, const NAME(given) * g, int plain, int bounded,
                             int negative) {
    const REAL *restrict w = band->w[row];
    REAL *e = band->e[row];
    VEC at = NAME(fill)((REAL)(band->tile.at[row] * band->over[row]));
    int64_t n = g->n, whole = n / LANES * LANES, rest = n - LANES;
    VEC last = NAME(budget_value)(g, NAME(kept)(e + rest), NAME(kept)(w + rest) * at, rest, plain, bounded, negative,
                                  sizeof last);
    for (int64_t i = 0; i < whole; i += LANES) {
        VEC y = NAME(kept)(e + i), d = NAME(kept)(w + i) * at;
        NAME(keep)(NAME(budget_value)(g, y, d, i, plain, bounded, negative, sizeof y), e + i);
    }
    NAME(keep)(last, e + rest);
}

FN void NAME(weighted_band)(const struct weighted *call, int64_t index, int count, struct budget_space *space) {
    NAME(band) band;
    NAME(budget_tile) *tile = &band.tile;
    const struct shares *s = &space->shares;
    NAME(given) g = NAME(given_row)(call, index, space);
    REAL temperature = (REAL)call->temperature, *out[LANES] = {0};
    int64_t n = call->n;
    VEC zero = {0};
    NAME(lanes) again; /* those of the last vector that are in one before it too */
    for (int i = 0; i < LANES; i++) again[i] = i < LANES - n % LANES ? -1 : 0;
    int own = !space->is_shared, copied = temperature != R(1.0) || s->negative;
    const REAL *shared_a = (const REAL *)(g.bounded ? space->shared_a : space->shared_w);
    tile->n = n, band.count = count;
    for (int i = 0; i < LANES; i++) {
        int64_t row = index + (i < count ? i : 0), next = row + LANES < call->rows ? row + LANES : row;
        band.z[i] = (const REAL *)call->logits + row * n;
        band.w[i] = own ? (const REAL *)call->weight + row * n : (const REAL *)space->shared_w;
        band.a[i] = own ? band.w[i] : shared_a;
        band.ahead[i] = (const REAL *)call->logits + next * n;
        band.ahead_own[i] = own ? (const REAL *)call->weight + next * n : band.w[i];
        band.e[i] = call->out ? (REAL *)call->out + row * n : (REAL *)space->e + i * space->width;
        band.last[i] = NAME(select)(again, zero, NAME(kept)(band.a[i] + n - LANES));
        tile->unit[i] = s->unit, tile->total[i] = s->total, tile->w1[i] = s->w1, tile->w2[i] = s->w2;
        band.over[i] = 1;
    }
    REAL *copy = (REAL *)space->z;
    if (own && copied)
        NAME(band_load)(&band, temperature, 0, copy, space->width, 1);
    else if (own)
        NAME(band_load)(&band, temperature, 0, 0, 0, 1);
    else if (copied)
        NAME(band_load)(&band, temperature, s->negative ? g.weight : 0, copy, space->width, 0);
    else
        NAME(band_load)(&band, temperature, 0, 0, 0, 0);
    if (own) NAME(band_units)(&band);
    NAME(budget_begin)(tile, call, index, count, space);
    int keep = !s->negative && !s->below ? KEEP_Y : KEEP_PART;
    for (int passes = 0, open = 1; open && passes < 8; passes++) {
        for (int i = count; i < LANES; i++) tile->state[i] = HARD;
        NAME(band_look)(&band, passes ? keep : KEEP_NONE);
        open = NAME(budget_move)(tile, passes > 0);
    }
    NAME(budget_end)(tile, call, index, count, out);
    for (int i = 0; i < count; i++) {
        if (!NAME(budget_solved)(tile, call, i))
            NAME(weighted_rows)(call, index + i, 1, space);
        else if (!call->out)
            continue;
        else if (keep == KEEP_PART)
            NAME(band_write)(&band, i, &g, 0, 2, s->negative);
        else if (g.bounded > 1)
            NAME(band_write)(&band, i, &g, 1, 2, 0);
        else if (g.bounded)
            NAME(band_write)(&band, i, &g, 1, 1, 0);
        else
            NAME(band_write)(&band, i, &g, 1, 0, 0);
    }
}

#ifndef WITH_HARD

/* Rows of half precision, converted while they are in the cache, for either pass. Those of `out` follow the scores: what a
   search fetches as the next scores is where it will write. */
FN void NAME(weighted_half)(const struct weighted *call, int64_t index, int count, struct budget_space *space) {
    struct weighted own = *call;
    int half = (int)call->half;
    int64_t n = own.n, first = index * n, size = count * n;
    word *x = (word *)space->narrow, *y = x + size, *u = y + size;
    void **each[] = {&own.grad_weight, &own.grad_lower, &own.grad_upper};
    NAME(widen)(half, (const uint16_t *)own.logits + first, x, size);
    own.rows -= index, own.logits = x;
    own.k = own.k ? own.k + index * own.k_stride : 0, own.nu += index;
    if (own.mask) own.mask += index * own.mask_stride;
    if (own.weight) own.weight = (const float *)own.weight + index * own.weight_stride;
    if (own.lower) own.lower = (const float *)own.lower + index * own.lower_stride;
    if (own.upper) own.upper = (const float *)own.upper + index * own.upper_stride;
    if (own.grad) {
        NAME(widen)(half, (const uint16_t *)own.grad + first, u, size);
        own.grad = u;
    }
    if (own.grad_k) own.grad_k += index;
    for (int i = 0; i < 3; i++)
        if (*each[i]) *each[i] = (float *)*each[i] + first;
    if (own.out) own.out = y;
    int64_t after = index + 2 * count <= call->rows ? first + size : first;
    for (int64_t i = 0; i < size; i += 32) { /* a line: what is read next, and the place of what is written */
        FETCH((const uint16_t *)call->logits + after + i)
        if (own.grad) FETCH((const uint16_t *)call->grad + after + i)
        if (own.out) FETCH_TO_WRITE((uint16_t *)call->out + first + i)
    }
    space->work(&own, 0, count, space);
    if (own.out) NAME(narrowed)(half, y, (uint16_t *)call->out + first, size);
}

#endif

#undef FN
#undef INLINE
#undef PRAGMA
#undef STEPS
#undef BLOCK
#undef VEC
#undef EACH_LANE
#undef WEIGH
#undef FETCH
#undef FETCH_TO_WRITE
#undef THREE
#undef SAMPLE
#undef SIDE
#undef ADD_MOMENTS
#undef LOAD_CLASS
#undef POINT_BUDGET
#undef SUMS_SECOND
#undef MOST_EXPONENT
#undef EACH_VECTOR
#undef EACH_BLOCK
#undef EACH_ROW
