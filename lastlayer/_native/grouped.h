/* Rows with limits on groups of classes, in double and for one instruction set; after lml_rows.h, whose names it uses.
   lastlayer/project/groups.py has the same in torch, and the reasons.

   The scores of a row are put in the order of their groups. Groups that are bound, and all other classes together, are rows
   of lml_rows.h. */

#define FN TARGET static
#define PRAGMA(text) _Pragma(#text)

/* A projection of its own: y, and its threshold as center and delta. */
FN void NAME(grouped_cell)(const double *x, int64_t n, double k, double *y, double *center, double *delta,
                           struct space *space) {
    struct call call = {.rows = 1, .n = n, .logits = x, .temperature = 1, .kind = KIND_Y, .out = y};
    NAME(row) row;
    call.center = center, call.delta = delta;
    NAME(load)(&row, &call, 0, space);
    NAME(solve)(&row, k, space);
    NAME(write)(&call, &row, 0);
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

/* Take the groups that are not bound out of `x`; returns their number of classes, and of those that take part. */
FN int64_t NAME(grouped_free)(const struct grouped *call, const double *x, const uint8_t *bound, const double *size,
                              double *free, double *left) {
    int64_t n = 0;
    *left = 0;
    for (int64_t g = 0; g < call->groups; g++) {
        int64_t first = call->first[g], count = call->first[g + 1] - first;
        if (bound[g]) continue;
        memcpy(free + n, x + first, (size_t)count * sizeof *free);
        n += count, *left += size[g];
    }
    return n;
}

/* Bind the groups whose sums are above their limits; returns what these add up to. */
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
        bound[g] = 1, *taken += limit[g], found = 1;
    }
    return found;
}

FN void NAME(grouped_row)(const struct grouped *call, int64_t index, struct grouped_space *space) {
    int64_t n = call->n, groups = call->groups, count;
    const double *x = call->x + index * n, *limit = call->limit + index * call->limit_stride;
    double *out = call->out + index * n, *center = call->center + index * (groups + 1), k = call->k[index];
    double *delta = call->delta + index * (groups + 1), *sorted = space->sorted, *free = space->free, *y = space->y;
    double taken = 0, left;
    uint8_t *bound = call->bound + index * groups;
    for (int64_t i = 0; i < n; i++) sorted[i] = x[call->order[i]];
    for (int64_t g = 0; g <= groups; g++) center[g] = delta[g] = 0;
    memset(bound, 0, (size_t)groups);
    int sound = NAME(grouped_sound)(call, sorted, limit, k, space->size);
    for (int open = sound; open;) {
        count = NAME(grouped_free)(call, sorted, bound, space->size, free, &left);
        double rest = k - taken, near = fmin(fmax(rest, 0), left); /* rounding of what the groups took */
        if (fabs(rest - near) <= GROUP_SLACK * k) rest = near;
        if (left == 0) { /* no class, or none that takes part */
            memset(y, 0, (size_t)count * sizeof *y);
            center[groups] = delta[groups] = 0;
            break;
        }
        NAME(grouped_cell)(free, count, rest, y, center + groups, delta + groups, &space->row);
        open = NAME(grouped_bind)(call, y, limit, space->size, bound, &taken);
    }
    sound = sound && delta[groups] == delta[groups];
    for (int64_t g = 0; g < groups && sound; g++) {
        int64_t first = call->first[g], size = call->first[g + 1] - first;
        const double *from = bound[g] ? free : y; /* whose room is not needed any more */
        if (bound[g]) NAME(grouped_cell)(sorted + first, size, limit[g], free, center + g, delta + g, &space->row);
        for (int64_t i = 0; i < size; i++) out[call->order[first + i]] = from[i];
        if (!bound[g]) y += size;
        sound = delta[g] == delta[g];
    }
    for (int64_t i = 0; i < n && !sound; i++) out[i] = NAN;
    for (int64_t g = 0; g <= groups && !sound; g++) delta[g] = NAN;
}

#undef FN
#undef PRAGMA
