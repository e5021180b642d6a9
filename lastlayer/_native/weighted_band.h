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
    const REAL *target[LANES];                  /* where the values of a row will be written */
    VEC last[LANES];                            /* the shares of the last vector */
    VEC parts[5][LANES];                        /* sums over a block of each row */
    VEC far[LANES], largest[LANES], signs[LANES], odd[LANES], wrong[LANES];
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
INLINE void NAME(band_add)(const NAME(band) * band, double *sums, VEC *parts) {
    double more[LANES] = {0};
    if (band->count == 1) {
        sums[0] += NAME(total)(parts[0]);
        return;
    }
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
    if (own) EACH_LANE tile->sure[i] = tile->total[i] = tile->w1[i] = tile->w2[i] = 0;
    EACH_BLOCK {
        EACH_ROW NAME(band_moments)(band, row, first, temperature, sign, copy ? copy + row * width : 0, own);
        NAME(band_add)(band, tile->z1, band->parts[0]);
        NAME(band_add)(band, tile->z2, band->parts[1]);
        NAME(band_add)(band, tile->zw, band->parts[2]);
        if (own) NAME(band_add)(band, tile->w1, band->parts[3]);
        if (own) NAME(band_add)(band, tile->w2, band->parts[4]);
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
        tile->most[i] = tile->sure[i] + tile->total[i] / over;
        tile->w1[i] *= square, tile->w2[i] *= square * over;
        tile->z1[i] *= over, tile->z2[i] *= over, tile->zw[i] *= square;
    }
}

/* The sums over a block of a row at its nu, as `budget_tile_sums`. */
INLINE void NAME(band_sums)(NAME(band) * band, int row, int64_t first, int limits, int few, int keep) {
    const REAL *restrict scores = band->z[row], *restrict weights = band->w[row], *restrict shares = band->a[row];
    const REAL *ahead = keep ? band->ahead_own[row] : band->ahead[row];
    const REAL *target = band->target[row];
    REAL *restrict e = band->e[row];
    VEC nu = NAME(fill)((REAL)(band->tile.nu[row] * band->over[row])), f = {0}, s1 = {0}, s2 = {0}, s3 = {0};
    NAME(lanes) side = (NAME(lanes)){0} - (band->tile.is_few[row] != 0);
    int more = SUMS_SECOND(limits, few, keep);
    band->tile.summed[row] = more;
#define SUMS_AT(at, part)                                                                                       \
    VEC w = NAME(kept)(weights + (at)), a = part, point = -(NAME(kept)(scores + (at)) + w * nu);                 \
    FETCH(ahead + (at))                                                                                         \
    if (!keep) FETCH_TO_WRITE(target + (at))                                                                       \
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
        NAME(band_add)(band, tile->f, band->parts[0]);
        NAME(band_add)(band, tile->s1, band->parts[1]);
        NAME(band_add)(band, tile->s2, band->parts[2]);
        if (!keep || THREE) NAME(band_add)(band, tile->s3, band->parts[3]);
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
    VEC last = NAME(budget_value)(g, NAME(kept)(e + rest), NAME(kept)(w + rest) * at, rest, plain, bounded, negative, n);
    for (int64_t i = 0; i < whole; i += LANES) {
        VEC y = NAME(kept)(e + i), d = NAME(kept)(w + i) * at;
        NAME(keep)(NAME(budget_value)(g, y, d, i, plain, bounded, negative, whole), e + i);
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
        band.target[i] = band.e[i] = call->out ? (REAL *)call->out + row * n : (REAL *)space->e + i * space->width;
        band.last[i] = NAME(select)(again, zero, NAME(kept)(band.a[i] + n - LANES));
        band.over[i] = 1;
    }
    NAME(budget_alike)(tile, s);
    REAL *copy = (REAL *)space->z;
    if (own && copied)
        NAME(band_load)(&band, temperature, 0, copy, space->width, 1);
    else if (own)
        NAME(band_load)(&band, temperature, 0, 0, 0, 1);
    else if (copied)
        NAME(band_load)(&band, temperature, s->negative ? g.weight : 0, copy, space->width, 0);
    else
        NAME(band_load)(&band, temperature, 0, 0, 0, 0);
    if (own) {
        NAME(band_units)(&band);
        if (NAME(budget_apiece)(tile, count)) {
            NAME(weighted_apiece)(call, index, count, space);
            return;
        }
    }
    NAME(budget_begin)(tile, call, index, count, space, !own);
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

/* ---- Rows of any kind: each with weights, bounds and infinite scores of its own, copied to whole vectors. ---- */

/* What is summed over some classes of a row, lane by lane. */
typedef struct {
    VEC far, largest, odd, z1, z2, zw, w1, w2; /* odd: nan where a score is not finite */
    NAME(bits) signs;                          /* of weights and lower bounds; the last bit: scores of +inf */
    NAME(lanes) wrong; /* scores that are nan, weights and bounds that are not finite, bounds the wrong way round */
    double total[LANES], sure[LANES];
} NAME(band_parts);

/* Add the shares of classes, lane by lane and exact to the rounding of double: next to the sum of many the rounding of each
   would hide what is left to a few. */
INLINE void NAME(add_shares)(double *restrict total, VEC weight, VEC lower, VEC upper, int weighted) {
    REAL w[LANES], l[LANES], u[LANES];
    memcpy(w, &weight, sizeof w);
    memcpy(l, &lower, sizeof l);
    memcpy(u, &upper, sizeof u);
    EACH_LANE total[i] += (weighted ? (double)w[i] : 1.0) * ((double)u[i] - (double)l[i]);
}

/* Copy some classes, with weights that have lost their signs and with shares, 0 where a score is not finite; or just look
   at them where they can be read `in_place`. */
INLINE void NAME(band_copy)(NAME(band_parts) * s, VEC x, VEC weight, VEC lower, VEC upper, int weighted, int bounded,
                            int in_place, REAL *z_to, REAL *w_to, REAL *a_to) {
    VEC zero = {0}, width = bounded > 1 ? upper - lower : upper;
    NAME(lanes) finite = x - x == 0;
    NAME(bits) sign = (NAME(bits))NAME(fill)(R(-0.0)), turn = (NAME(bits))(weight < 0) & sign; /* not a weight of -0 */
    s->odd += x * R(0.0);
    s->wrong |= x != x;
    if (weighted) s->wrong |= weight - weight != 0; /* also where a score is not finite, as everywhere else */
    if (bounded) s->wrong |= ~((width >= 0) & (width <= NAME(fill)(LARGEST)));
    s->signs |= (NAME(bits))(x > NAME(fill)(LARGEST)) & 1;
    x = NAME(select)(finite, x, zero);
    if (weighted) weight = NAME(select)(finite, weight, zero);
    VEC z = weighted ? (VEC)((NAME(bits))x ^ turn) : x, w = weighted ? (VEC)((NAME(bits))weight & ~sign) : weight;
    VEC a = weighted ? bounded ? w * width : w : NAME(select)(finite, width, zero), t = a * z;
    if (weighted) s->signs |= turn, s->largest = NAME(farther)(w, s->largest);
    if (bounded > 1) s->signs |= (NAME(bits))lower & sign;
    /* At nu = -inf a class is at its lower bound, or where its weight is negative at the upper one. */
    if (weighted) NAME(add_shares)(s->sure, weight, zero, NAME(select)(weight < 0, upper, lower), 1);
    if (!weighted && bounded > 1) NAME(add_lanes)(s->sure, NAME(select)(finite, lower, zero));
    if (!bounded || (!weighted && bounded == 1))
        NAME(add_lanes)(s->total, a);
    else
        NAME(add_shares)(s->total, weighted ? w : zero, weighted ? lower : NAME(select)(finite, lower, zero),
                         weighted ? upper : NAME(select)(finite, upper, zero), weighted);
    if (!in_place) NAME(keep)(z, z_to);
    if (weighted) NAME(keep)(w, w_to);
    if (!in_place || bounded > 1) NAME(keep)(a, a_to);
    s->far = NAME(farther)(z, s->far);
    s->z1 += t, s->z2 += t * z;
    if (!weighted) return;
    VEC square = a * w;
    s->zw += t * w, s->w1 += square, s->w2 += square * w;
}

/* A block of a row, from `first` on. */
INLINE void NAME(band_read)(NAME(band) * band, int row, int64_t first, const NAME(given) * g, int weighted, int bounded,
                            int in_place) {
    const REAL *x = g->x, *restrict weight = g->weight, *restrict lower = g->lower, *restrict upper = g->upper;
    REAL *z_to = (REAL *)band->z[row], *restrict w_to = (REAL *)band->w[row], *restrict a_to = (REAL *)band->a[row];
    NAME(budget_tile) *tile = &band->tile;
    VEC zero = {0}, one = zero + R(1.0);
    int64_t n = g->n, whole = n / LANES * LANES, end = first + BLOCK < whole ? first + BLOCK : whole;
    NAME(band_parts) s; /* field by field: clearing it as a whole takes as long as a few vectors */
    s.far = band->far[row], s.largest = band->largest[row], s.odd = band->odd[row];
    s.signs = (NAME(bits))band->signs[row], s.wrong = (NAME(lanes))band->wrong[row];
    s.z1 = s.z2 = s.zw = s.w1 = s.w2 = zero;
    EACH_LANE s.total[i] = s.sure[i] = 0;
    for (int64_t i = first; i < end; i += LANES)
        NAME(band_copy)(&s, NAME(kept)(x + i), weighted ? NAME(kept)(weight + i) : one,
                        bounded > 1 ? NAME(kept)(lower + i) : zero, bounded ? NAME(kept)(upper + i) : one, weighted,
                        bounded, in_place, z_to + i, w_to + i, a_to + i);
    if (whole < n && whole < first + BLOCK)
        NAME(band_copy)(&s, NAME(part_of)(x, whole, n), NAME(part_of)(weight, whole, n), NAME(part_of)(lower, whole, n),
                        NAME(part_of)(upper, whole, n), weighted, bounded, in_place, z_to + whole, w_to + whole,
                        a_to + whole);
    band->parts[0][row] = s.z1, band->parts[1][row] = s.z2;
    if (weighted) band->parts[2][row] = s.zw, band->parts[3][row] = s.w1, band->parts[4][row] = s.w2;
    band->far[row] = s.far, band->largest[row] = s.largest, band->odd[row] = s.odd;
    band->signs[row] = (VEC)s.signs, band->wrong[row] = (VEC)s.wrong;
    tile->total[row] += NAME(sum)(s.total);
    if (weighted || bounded > 1) tile->sure[row] += NAME(sum)(s.sure);
}

/* The bits of any lane of each row. */
INLINE void NAME(band_bits)(VEC *rows, BITS *found) {
    NAME(bits) all = {0};
    NAME(transpose)(rows);
    for (int i = 0; i < LANES; i++) all |= (NAME(bits))rows[i];
    memcpy(found, &all, sizeof all);
}

/* What infinite scores add to the sum: they are at a bound whatever nu is. */
FN double NAME(band_ends)(const NAME(given) * g) {
    double sum = 0;
    for (int64_t i = 0; i < g->n; i++)
        if (!NAME(finite)(g->x[i])) sum += (double)g->weight[i] * (double)(g->x[i] > 0 ? g->upper[i] : g->lower[i]);
    return sum;
}

/* Copy the finite scores of a row that was read in place, and their shares. */
FN void NAME(band_copy_finite)(NAME(band) * band, int row, const NAME(given) * g, struct budget_space *space) {
    REAL *z = (REAL *)space->z + row * space->width, *a = (REAL *)space->own + row * space->width;
    for (int64_t i = 0; i < g->n; i++) {
        int finite = NAME(finite)(g->x[i]);
        z[i] = finite ? g->x[i] : R(0.0);
        a[i] = finite ? g->upper[i] - g->lower[i] : R(0.0);
    }
    band->z[row] = z, band->a[row] = a;
}

/* Copy the rows of a band and sum up what is known of them; returns what kinds of rows there are. */
FN int NAME(band_read_all)(NAME(band) * band, const struct weighted *call, int64_t index, const NAME(given) * given,
                           struct budget_space *space, int *special, int in_place) {
    NAME(budget_tile) *tile = &band->tile;
    int weighted = call->weight != 0, bounded = call->lower ? 2 : call->upper ? 1 : 0, kinds = 0;
    BITS wrong[LANES], signs[LANES];
    VEC zero = {0}, one = zero + R(1.0), copies[LANES];
    double odd[LANES] = {0};
    for (int i = 0; i < LANES; i++) band->far[i] = band->signs[i] = band->wrong[i] = band->odd[i] = zero;
    for (int i = 0; i < LANES; i++) band->largest[i] = weighted ? zero : one;
    for (int k = 0; k < 5; k++)
        for (int i = band->count; i < LANES; i++) band->parts[k][i] = zero;
    EACH_LANE {
        tile->z1[i] = tile->z2[i] = tile->zw[i] = tile->w1[i] = tile->w2[i] = 0;
        tile->sure[i] = tile->total[i] = 0;
    }
    EACH_BLOCK {
        EACH_ROW {
            const NAME(given) *g = given + row;
            if (weighted && bounded > 1)
                NAME(band_read)(band, row, first, g, 1, 2, 0);
            else if (weighted && bounded)
                NAME(band_read)(band, row, first, g, 1, 1, 0);
            else if (weighted)
                NAME(band_read)(band, row, first, g, 1, 0, 0);
            else if (bounded > 1 && in_place)
                NAME(band_read)(band, row, first, g, 0, 2, 1);
            else if (bounded > 1)
                NAME(band_read)(band, row, first, g, 0, 2, 0);
            else if (in_place)
                NAME(band_read)(band, row, first, g, 0, 1, 1);
            else
                NAME(band_read)(band, row, first, g, 0, 1, 0);
        }
        NAME(band_add)(band, tile->z1, band->parts[0]);
        NAME(band_add)(band, tile->z2, band->parts[1]);
        if (!weighted) continue;
        NAME(band_add)(band, tile->zw, band->parts[2]);
        NAME(band_add)(band, tile->w1, band->parts[3]);
        NAME(band_add)(band, tile->w2, band->parts[4]);
    }
    if (!weighted) EACH_LANE tile->zw[i] = tile->z1[i], tile->w1[i] = tile->w2[i] = tile->total[i];
    memcpy(copies, band->signs, sizeof copies);
    NAME(band_bits)(copies, signs);
    NAME(band_bits)(band->wrong, wrong);
    NAME(band_add)(band, odd, band->odd);
    VEC far = NAME(band_largest)(band->far);
    EACH_LANE {
        tile->farthest[i] = (double)far[i];
        tile->total[i] = wrong[i] || !(tile->total[i] <= LARGEST) ? (double)NAN : tile->total[i];
    }
    EACH_ROW {
        special[row] = odd[row] != 0;
        kinds |= signs[row] >> (8 * REAL_BYTES - 1) ? TURNED : 0;
        if (signs[row] & 1 || (special[row] && bounded > 1)) {
            NAME(given) g = NAME(given_row)(call, index + row, space);
            tile->sure[row] += NAME(band_ends)(&g);
        }
        if (special[row] && in_place) NAME(band_copy_finite)(band, row, given + row, space);
    }
    for (int i = 0; i < LANES; i++) band->signs[i] = zero; /* the copies have none */
    NAME(band_units)(band);
    return kinds;
}

FN void NAME(weighted_apiece)(const struct weighted *call, int64_t index, int count, struct budget_space *space) {
    NAME(band) band;
    NAME(budget_tile) *tile = &band.tile;
    NAME(given) given[LANES];
    REAL *out[LANES] = {0};
    int64_t n = call->n, width = space->width;
    int special[LANES], in_place = !call->weight && !call->mask && call->temperature == 1 && n % LANES == 0;
    tile->n = (n + LANES - 1) / LANES * LANES, band.count = count;
    for (int i = 0; i < count; i++) {
        int64_t row = index + i, next = row + count < call->rows ? row + count : row;
        struct budget_space here = *space;
        here.x = (REAL *)space->z + i * width; /* masked or divided scores are copied there at once */
        given[i] = NAME(given_row)(call, row, &here);
        band.z[i] = here.x, band.w[i] = call->weight ? (REAL *)space->apiece + i * width : (REAL *)space->ones;
        band.a[i] = (REAL *)space->own + i * width, band.e[i] = (REAL *)space->e + i * width;
        band.target[i] = call->out ? (REAL *)call->out + row * n : band.e[i];
        if (call->out && n % LANES == 0) band.e[i] = (REAL *)call->out + row * n;
        if (in_place) band.z[i] = given[i].x;
        if (in_place && !call->lower) band.a[i] = given[i].upper;
        band.ahead[i] = band.ahead_own[i] = (const REAL *)call->logits + next * n;
        if (call->weight_stride) band.ahead_own[i] = (const REAL *)call->weight + next * n;
        if (call->lower_stride) band.ahead_own[i] = (const REAL *)call->lower + next * n;
        if (call->upper_stride) band.ahead_own[i] = (const REAL *)call->upper + next * n;
    }
    int kinds = NAME(band_read_all)(&band, call, index, given, space, special, in_place);
    NAME(budget_begin)(tile, call, index, count, space, 0);
    int keep = kinds & TURNED ? KEEP_PART : KEEP_Y;
    for (int passes = 0, open = 1; open && passes < 8; passes++) {
        for (int i = count; i < LANES; i++) tile->state[i] = HARD;
        NAME(band_look)(&band, passes ? keep : KEEP_NONE);
        open = NAME(budget_move)(tile, passes > 0);
    }
    NAME(budget_end)(tile, call, index, count, out);
    for (int i = 0; i < count; i++) {
        if (!NAME(budget_solved)(tile, call, i)) {
            NAME(weighted_rows)(call, index + i, 1, space);
            continue;
        }
        if (!call->out) continue;
        NAME(budget_row) row = {.n = n, .w = (REAL *)band.w[i], .e = band.e[i], .plain = keep == KEEP_Y};
        row.shares.negative = kinds & TURNED, row.b.at = tile->at[i] * band.over[i];
        NAME(budget_write)(given + i, &row, out[i]);
        if (!special[i]) continue;
        NAME(given) g = NAME(given_row)(call, index + i, space);
        for (int64_t j = 0; j < n; j++) out[i][j] = NAME(finite)(g.x[j]) ? out[i][j] : g.x[j] > 0 ? g.upper[j] : g.lower[j];
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
    if (own.grad_nu) own.grad_nu += index;
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
#undef SUMS_SECOND
#undef MOST_EXPONENT
#undef EACH_VECTOR
#undef EACH_BLOCK
#undef EACH_ROW
