/* Rows with limits on groups of classes, in double and for one instruction set; after lml_rows.h, whose names it uses.
   lastlayer/project/groups.py has the same in torch, and the reasons.

   The scores of a row are put in the order of their groups. Groups that are bound, and all other classes together, are rows
   of lml_rows.h. A search that goes on with fewer classes keeps their exponentials. */

#define FN TARGET static
#define PRAGMA(text) _Pragma(#text)

/* Search, and keep the center of the exponentials in `e`, which `finish` may move. */
FN void NAME(grouped_search)(NAME(row) * row, double *center, struct space *space) {
    while (row->state == OPEN) {
        NAME(look)(row);
        NAME(move)(row);
    }
    *center = row->c;
    NAME(finish)(row, space->workspace);
}

/* Solve a projection of its own. */
FN void NAME(grouped_solve)(NAME(row) * row, const double *x, int64_t n, double k, double *center, struct space *space) {
    struct call call = {.rows = 1, .n = n, .logits = x, .temperature = 1};
    NAME(load)(row, &call, 0, space);
    NAME(begin)(row, k, &space->start);
    NAME(grouped_search)(row, center, space);
}

/* Search on in the `n` first scores and exponentials that are left of a row, from its threshold. */
FN void NAME(grouped_solve_on)(NAME(row) * row, int64_t n, double k, double *center, struct space *space) {
    double level = log(k / ((double)n - k));
    row->n = n, row->k = k, row->c = *center, row->state = OPEN, row->passes = 1;
    row->lo = level - row->high + *center, row->hi = level - row->low + *center;
    row->at = fmin(fmax(row->at, row->lo), row->hi);
    for (int64_t i = n; i % LANES; i++) row->e[i] = EXP_CEILING * 1.01; /* weighs nothing, as beyond any row */
    NAME(grouped_search)(row, center, space);
}

/* Write y, center and delta. */
FN void NAME(grouped_write)(NAME(row) * row, double *y, double *center, double *delta) {
    struct call call = {.rows = 1, .n = row->n, .kind = KIND_Y, .out = y, .center = center, .delta = delta};
    NAME(write)(&call, row, 0);
}

/* Whether the exponentials in `e` are those of all scores, none of them beyond their range. */
FN int NAME(grouped_kept)(const NAME(row) * row, double center) {
    return row->state == CLOSE && row->top == 0 && center - row->low < EXP_HIGH && center - row->high > EXP_LOW;
}

/* Whether limits can hold k; `size` becomes the number of classes of each group. */
FN int NAME(grouped_sound)(const struct grouped *call, const double *x, const double *limit, double k, double *size) {
    double room = 0;
    int sound = 1;
    for (int64_t g = 0; g < call->groups; g++) {
        double count = 0;
        for (int64_t i = call->first[g]; i < call->first[g + 1]; i++) count += x[i] == -INFINITY ? 0 : 1;
        size[g] = count;
        sound &= limit[g] >= 0;
        room += limit[g] < count ? limit[g] : count;
    }
    return sound && k <= room * (1 + GROUP_SLACK);
}

/* Take the groups that were bound last out of scores and exponentials; returns how many classes are left. */
FN int64_t NAME(grouped_free)(const struct grouped *call, uint8_t *bound, const double *size, double *x, double *e,
                              double *left) {
    int64_t from = 0, to = 0;
    for (int64_t g = 0; g < call->groups; g++) {
        int64_t count = call->first[g + 1] - call->first[g];
        if (bound[g] == BOUND) continue;
        if (bound[g] == BOUND_LAST) {
            bound[g] = BOUND, *left -= size[g];
        } else {
            memmove(x + to, x + from, (size_t)count * sizeof *x);
            memmove(e + to, e + from, (size_t)count * sizeof *e);
            to += count;
        }
        from += count;
    }
    return to;
}

/* Bind the groups whose sums are above their limits, which are added to `taken`; whether there were any. */
FN int NAME(grouped_bind)(const struct grouped *call, const double *y, const double *limit, const double *size,
                          uint8_t *bound, double *taken) {
    int found = 0;
    for (int64_t g = 0; g < call->groups; g++) {
        double sum = 0;
        int64_t count = call->first[g + 1] - call->first[g];
        if (bound[g]) continue;
        PRAGMA(omp simd reduction(+ : sum))
        for (int64_t i = 0; i < count; i++) sum += y[i];
        y += count;
        if (!(sum > limit[g] && limit[g] < size[g])) continue;
        bound[g] = BOUND_LAST, *taken += limit[g], found = 1;
    }
    return found;
}

/* Solve all classes but those of bound groups, and bind more until none is beyond its limit; whether there is a solution. */
FN int NAME(grouped_rest)(const struct grouped *call, const double *limit, double k, uint8_t *bound, double *center,
                          double *delta, struct grouped_space *space) {
    NAME(row) row;
    double taken = 0, left = 0, *x = space->free, *e = space->row.e, at = 0;
    int64_t n = call->n;
    for (int64_t g = 0; g < call->groups; g++) left += space->size[g];
    memcpy(x, space->sorted, (size_t)n * sizeof *x);
    for (int round = 0;; round++) {
        double rest = k - taken, near = fmin(fmax(rest, 0), left); /* rounding of what the groups took */
        if (fabs(rest - near) <= GROUP_SLACK * k) rest = near;
        if (left == 0) { /* no class, or none that takes part */
            memset(space->y, 0, (size_t)n * sizeof *x);
            *center = *delta = 0;
            return 1;
        }
        if (round && NAME(grouped_kept)(&row, at) && rest > 0 && rest < (double)n)
            NAME(grouped_solve_on)(&row, n, rest, &at, &space->row);
        else
            NAME(grouped_solve)(&row, x, n, rest, &at, &space->row);
        NAME(grouped_write)(&row, space->y, center, delta);
        if (!NAME(grouped_bind)(call, space->y, limit, space->size, bound, &taken)) return *delta == *delta;
        n = NAME(grouped_free)(call, bound, space->size, x, e, &left);
    }
}

FN void NAME(grouped_row)(const struct grouped *call, int64_t index, struct grouped_space *space) {
    int64_t n = call->n, groups = call->groups;
    const double *x = call->x + index * n, *limit = call->limit + index * call->limit_stride;
    double *out = call->out + index * n, *center = call->center + index * (groups + 1), k = call->k[index];
    double *delta = call->delta + index * (groups + 1), *sorted = space->sorted, *y = space->y;
    uint8_t *bound = call->bound + index * groups;
    NAME(row) row;
    for (int64_t i = 0; i < n; i++) sorted[i] = x[call->order[i]];
    for (int64_t g = 0; g <= groups; g++) center[g] = delta[g] = 0;
    memset(bound, 0, (size_t)groups);
    int sound = NAME(grouped_sound)(call, sorted, limit, k, space->size);
    sound = sound && NAME(grouped_rest)(call, limit, k, bound, center + groups, delta + groups, space);
    for (int64_t g = 0; g < groups && sound; g++) {
        int64_t first = call->first[g], size = call->first[g + 1] - first;
        const double *from = bound[g] ? space->free : y; /* whose room is not needed any more */
        if (bound[g]) {
            double unused;
            NAME(grouped_solve)(&row, sorted + first, size, limit[g], &unused, &space->row);
            NAME(grouped_write)(&row, space->free, center + g, delta + g);
        }
        for (int64_t i = 0; i < size; i++) out[call->order[first + i]] = from[i];
        if (!bound[g]) y += size;
        sound = delta[g] == delta[g];
    }
    for (int64_t i = 0; i < n && !sound; i++) out[i] = NAN;
    for (int64_t g = 0; g <= groups && !sound; g++) delta[g] = NAN;
}

#undef FN
#undef PRAGMA
