/* Every call on rows that are awkward, for a build with -fsanitize=address,undefined (make sanitize). The buffers have
   the exact size, so that one step beyond shows. Prints nothing and returns 0 if all is well. */
#include "../../lastlayer/_native/lml.c"

#include <stdio.h>

static uint64_t seed = 1;

static double uniform(void) {
    seed = seed * 6364136223846793005ULL + 1442695040888963407ULL;
    return (double)(seed >> 11) / 9007199254740992.0;
}

static void put(void *array, int type, int64_t i, double value) {
    if (type)
        ((double *)array)[i] = value;
    else
        ((float *)array)[i] = (float)value;
}

static double get(const void *array, int type, int64_t i) {
    return type ? ((const double *)array)[i] : (double)((const float *)array)[i];
}

static double score(int style, int64_t i) {
    double u = uniform() - 0.5;
    switch (style) {
        case 0: return 4 * u;
        case 1: return 1e4 + 100 * u;
        case 2: return i % 3 ? u : -INFINITY;
        case 3: return i == 0 ? INFINITY : u;
        case 4: return i == 1 ? NAN : u;
        case 5: return i < 2 ? 5e3 : -5e3;
        case 6: return 0;
        default: return 1e30 * u;
    }
}

static int check(int type, int64_t rows, int64_t n, int threads, int with_mask, double temperature) {
    size_t real = type ? 8 : 4, size = (size_t)(rows * n);
    void *logits = malloc(size * real + !size), *k = malloc((size_t)rows * real), *out = malloc(size * real + !size);
    void *row[6];
    for (int i = 0; i < 6; i++) row[i] = malloc((size_t)rows * real);
    uint8_t *mask = malloc(size + 1);
    int64_t *list = malloc((size_t)rows * 2 * 8);
    int8_t *dense = malloc(size + 1);
    float *soft = malloc(size * 4 + !size);
    for (int64_t i = 0; i < rows; i++) {
        double ks[] = {2, 0, (double)n, 0.5, (double)n - 1, n / 2.0, -1, (double)n + 1};
        put(k, type, i, ks[i % 8]);
        put(row[5], type, i, 1);
        list[2 * i] = n ? (int64_t)(uniform() * (double)n) : -1;
        list[2 * i + 1] = -1;
        for (int64_t j = 0; j < n; j++) put(logits, type, i * n + j, score((int)(i / 8 % 8), j));
    }
    for (size_t i = 0; i < size; i++) mask[i] = uniform() < 0.8, dense[i] = (int8_t)(uniform() * 3 - 1);
    for (size_t i = 0; i < size; i++) soft[i] = dense[i] > 0 ? (float)uniform() : (float)dense[i];

    struct call call = {.rows = rows, .n = n, .logits = logits, .k = k, .mask = with_mask ? mask : 0};
    call.k_stride = 1, call.mask_stride = n, call.temperature = temperature, call.threads = threads;
    call.center = row[0], call.delta = row[1], call.grad_k = row[2], call.log_mass = row[3], call.pull = row[4];
    int bad = 0;
    for (call.kind = KIND_Y; call.kind <= KIND_AT_MOST; call.kind++) {
        call.out = out, call.grad = logits, call.grad_delta = row[5];
        bad += lastlayer_run(&call, type, FORWARD);
        for (int64_t i = 0; i < rows && n && (call.kind == KIND_Y || call.kind == KIND_AT_MOST); i++) {
            double sum = 0, limit = 1e-5 * (1 + (double)n);
            for (int64_t j = 0; j < n; j++) sum += get(out, type, i * n + j);
            double over = sum - get(k, type, i); /* nan rows pass */
            bad += (call.kind == KIND_Y ? fabs(over) : over) > limit;
        }
        bad += lastlayer_run(&call, type, BACKWARD);
    }
    call.kind = KIND_Y;
    for (int form = 0; form < 6; form++) { /* the Fenchel-Young loss: rows that are out of the ordinary are told */
        struct call young = {.rows = rows, .n = n, .logits = logits, .k = form % 2 ? k : 0, .k_stride = 1, .temperature = 1};
        young.kind = KIND_FENCHEL_YOUNG, young.mask = call.mask, young.mask_stride = n, young.threads = threads;
        young.index = form < 2 ? list : 0, young.m = form < 2 ? 2 : 0;
        young.dense = form < 2 ? 0 : form < 4 ? (void *)dense : (void *)soft;
        young.dense_type = form < 4 ? DENSE_I8 : DENSE_F32, young.observed = 1, young.out = row[2];
        bad += lastlayer_run(&young, type, LOSS_FORWARD) % 3 != 0;
        young.slope = out;
        bad += lastlayer_run(&young, type, LOSS_FORWARD) % 3 != 0;
    }
    for (int form = 0; form < 3; form++)
        for (int step = 0; step < 3; step++) {
            call.index = form ? 0 : list, call.m = form ? 0 : 2;
            call.dense = form == 0 ? 0 : form == 1 ? (void *)dense : (void *)soft;
            call.dense_type = form == 1 ? DENSE_I8 : DENSE_F32, call.observed = step / 2.0, call.grad = row[5];
            call.out = row[2];
            bad += lastlayer_run(&call, type, LOSS_FORWARD);
            call.out = out;
            bad += lastlayer_run(&call, type, LOSS_BACKWARD);
            double total, over; /* the reduced loss with its gradient, which keeps no numbers of rows */
            struct call reduced = call;
            reduced.out = reduced.center = reduced.delta = reduced.log_mass = reduced.pull = 0;
            reduced.slope = out, reduced.total = &total, reduced.over = &over, reduced.mean = 1, reduced.unit = 1;
            bad += lastlayer_run(&reduced, type, LOSS_FORWARD);
        }
    for (call.half = HALF_BFLOAT16; !type && call.half <= HALF_FLOAT16; call.half++) { /* the first half of the arrays */
        call.out = out, call.index = 0, call.dense = 0;
        for (call.kind = KIND_Y; call.kind <= KIND_AT_MOST; call.kind += KIND_AT_MOST) {
            call.grad = call.grad_delta = 0;
            bad += lastlayer_run(&call, type, FORWARD);
            call.grad = logits;
            bad += lastlayer_run(&call, type, BACKWARD);
        }
        for (int form = 0; form < 2; form++) {
            float total;
            double over;
            struct call reduced = {.rows = rows, .n = n, .logits = logits, .k = k, .k_stride = 1, .half = call.half};
            reduced.mask = call.mask, reduced.mask_stride = n, reduced.temperature = temperature;
            reduced.threads = threads, reduced.index = form ? 0 : list, reduced.m = form ? 0 : 2;
            reduced.dense = form ? dense : 0, reduced.dense_type = DENSE_I8, reduced.observed = form / 2.0;
            reduced.slope = out, reduced.total = &total, reduced.over = &over, reduced.mean = 1, reduced.unit = 1;
            bad += lastlayer_run(&reduced, type, LOSS_FORWARD);
            uint16_t *half = malloc(size * 2 + !size);
            lastlayer_scale_to_half(out, 3, half, (int64_t)size, (int)call.half, threads);
            free(half);
        }
    }
    for (int i = 0; i < 6; i++) free(row[i]);
    free(logits), free(k), free(out), free(mask), free(list), free(dense), free(soft);
    if (bad) printf("type %d, %d rows of %d: %d wrong\n", type, (int)rows, (int)n, bad);
    return bad;
}

static float widened(int half, uint16_t value) {
    uint32_t bits = half == HALF_BFLOAT16 ? (uint32_t)value << 16 : widen_float16(value);
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

static uint16_t rounded(int half, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (half == HALF_FLOAT16) return narrow_float16(bits);
    return (uint16_t)(value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Both passes of a call in half precision: what float gives for the same numbers, rounded. */
static int check_half(struct weighted call, int half) {
    size_t size = (size_t)(call.rows * call.n);
    uint16_t *x = malloc(size * 2), *u = malloc(size * 2), *y = malloc(size * 2);
    float *wide_x = malloc(size * 4), *wide_u = malloc(size * 4), *wide_y = malloc(size * 4);
    int bad = 0;
    for (size_t i = 0; i < size; i++) {
        x[i] = rounded(half, ((const float *)call.logits)[i]), u[i] = rounded(half, (float)uniform());
        wide_x[i] = widened(half, x[i]), wide_u[i] = widened(half, u[i]);
    }
    for (int backward = 0; backward < 2; backward++) {
        call.logits = wide_x, call.grad = backward ? wide_u : 0, call.out = wide_y, call.half = HALF_NONE;
        bad += lastlayer_run_weighted(&call, 0, backward);
        call.logits = x, call.grad = backward ? u : 0, call.out = y, call.half = half;
        bad += lastlayer_run_weighted(&call, 0, backward);
        for (size_t i = 0; i < size; i++) {
            float found = widened(half, y[i]), wanted = widened(half, rounded(half, wide_y[i]));
            bad += found != wanted && (found == found || wanted == wanted);
        }
    }
    call.out = 0;
    bad += lastlayer_run_weighted(&call, 0, 0); /* nu alone */
    free(x), free(u), free(y), free(wide_x), free(wide_u), free(wide_y);
    return bad;
}

enum { ALL, WEIGHTS, UPPER, BOUNDS };

/* Rows with weights and bounds, shared or not, with positive weights or with bounds alone; the sums of rows that have one. */
static int check_weighted(int type, int64_t rows, int64_t n, int shared, int with_mask, int given) {
    size_t real = type ? 8 : 4, size = (size_t)(rows * n), terms = shared ? (size_t)n : size;
    void *array[8];
    for (int i = 0; i < 8; i++) array[i] = malloc((i > 0 && i < 4 ? terms : size) * real + 1);
    double *k = malloc((size_t)rows * 8), *nu = malloc((size_t)rows * 8), *grad_k = malloc((size_t)rows * 8);
    uint8_t *mask = malloc(size + 1);
    for (size_t i = 0; i < size; i++) put(array[0], type, (int64_t)i, score((int)(i / (size_t)n % 8), (int64_t)i % n));
    for (size_t i = 0; i < size; i++) mask[i] = uniform() > 0.2;
    for (size_t i = 0; i < terms; i++) {
        put(array[1], type, (int64_t)i, i % 7 || given == WEIGHTS ? pow(10, 6 * uniform() - 3) : -uniform());
        put(array[2], type, (int64_t)i, 0.3 * uniform());
        put(array[3], type, (int64_t)i, 0.5 + uniform());
    }
    for (int64_t i = 0; i < rows; i++) k[i] = 0.4 * (double)n * uniform();
    struct weighted call = {.rows = rows, .n = n, .logits = array[0], .k = k, .k_stride = 1, .temperature = 0.7,
                            .threads = 2, .weight = array[1], .lower = array[2], .upper = array[3], .out = array[4],
                            .nu = nu, .grad = array[4], .grad_k = grad_k, .grad_weight = array[5],
                            .grad_lower = array[6], .grad_upper = array[7]};
    call.weight_stride = call.lower_stride = call.upper_stride = shared ? 0 : n;
    if (with_mask) call.mask = mask, call.mask_stride = n;
    if (given == WEIGHTS) call.lower = call.upper = 0, call.lower_stride = call.upper_stride = 0;
    if (given == UPPER) call.lower = 0, call.lower_stride = 0;
    if (given >= UPPER) call.weight = 0, call.weight_stride = 0;
    if (given != ALL) call.temperature = 1;
    int bad = 0;
    for (call.at_most = 0; call.at_most < 2; call.at_most++) {
        bad += lastlayer_run_weighted(&call, type, 0);
        for (int64_t i = 0; i < rows && !call.at_most; i++) {
            double sum = 0, size_of = 0;
            for (int64_t j = 0; j < n; j++) {
                double part = get(array[4], type, i * n + j);
                part *= call.weight ? get(array[1], type, shared ? j : i * n + j) : 1;
                sum += part, size_of += fabs(part);
            }
            bad += i % 8 < 7 && fabs(sum - k[i]) > 1e-5 * size_of; /* scores of 1e30 have no digits; nan rows pass */
        }
        void *out = call.out;
        call.out = array[5], call.grad_weight = 0;
        bad += lastlayer_run_weighted(&call, type, 1);
        call.out = out, call.grad_weight = array[5];
        for (int half = HALF_BFLOAT16; !type && half <= HALF_FLOAT16; half++) bad += check_half(call, half);
    }
    call.at_most = 0, call.lower = 0, call.lower_stride = 0; /* logarithms, and nu alone with its gradients */
    for (call.kind = KIND_LOG; call.kind <= KIND_NU; call.kind++) {
        void *out = call.out;
        call.out = call.kind == KIND_LOG ? out : 0;
        bad += lastlayer_run_weighted(&call, type, 0);
        for (size_t i = 0; i < size && call.out && !call.upper; i++) bad += get(out, type, (int64_t)i) > 0;
        call.out = array[5], call.grad_weight = array[6], call.grad_lower = 0;
        if (call.kind == KIND_NU) call.grad = 0, call.grad_nu = k;
        bad += lastlayer_run_weighted(&call, type, 1);
        call.out = out;
    }
    for (int i = 0; i < 8; i++) free(array[i]);
    free(k), free(nu), free(grad_k), free(mask);
    if (bad) printf("weights, type %d, %d rows of %d: %d wrong\n", type, (int)rows, (int)n, bad);
    return bad;
}

/* Rows with limits on groups of different sizes, some of which are empty: each sum is k, or the row is nan. */
static int check_grouped(int64_t rows, int64_t n, int64_t groups) {
    size_t size = (size_t)(rows * n), cells = (size_t)(rows * (groups + 1));
    double *x = malloc(size * 8 + 1), *out = malloc(size * 8 + 1), *k = malloc((size_t)rows * 8);
    double *limit = malloc(cells * 8), *center = malloc(cells * 8), *delta = malloc(cells * 8);
    int64_t *order = malloc((size_t)n * 8 + 1), *first = calloc((size_t)groups + 1, 8);
    uint8_t *bound = malloc(cells);
    for (size_t i = 0; i < size; i++) x[i] = score((int)(i / (size_t)n % 8), (int64_t)i % n);
    for (int64_t i = 0; i < n; i++) order[i] = n - 1 - i;
    for (int64_t g = 1; g < groups; g++) first[g] = fmin(n, first[g - 1] + (g % 3) * n / groups);
    first[groups] = n;
    for (int64_t i = 0; i < rows; i++) k[i] = 0.2 * (double)n * uniform();
    for (size_t i = 0; i < cells; i++) limit[i] = 0.7 * (double)n / (double)groups * uniform();
    struct grouped call = {rows, n, groups, x, k, limit, groups, order, first, out, center, delta, bound, 2};
    int bad = 0;
    for (; call.limit_stride >= 0; call.limit_stride -= groups) {
        bad += lastlayer_run_grouped(&call);
        for (int64_t i = 0; i < rows; i++) {
            double sum = 0;
            for (int64_t j = 0; j < n; j++) sum += out[i * n + j];
            bad += fabs(sum - k[i]) > 2e-6 * (1 + k[i]);
        }
    }
    free(x), free(out), free(k), free(limit), free(center), free(delta), free(order), free(first), free(bound);
    if (bad) printf("groups, %d rows of %d in %d: %d wrong\n", (int)rows, (int)n, (int)groups, bad);
    return bad;
}

int main(void) {
    int bad = 0;
    int64_t sizes[] = {0, 1, 2, 3, 16, 17, 65, 100, 129, 201, 513, 1000, 2048, 2049};
    for (int isa = 0; isa < 3; isa++)
        for (int type = 0; type < 2; type++) {
            lastlayer_limit_isa(isa);
            for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
                for (int form = 0; form < 2; form++) {
                    bad += check(type, 64, sizes[i], 2, form, form ? 0.7 : 1);
                    for (int kind = 0; kind < 8 && sizes[i]; kind++)
                        bad += check_weighted(type, 61, sizes[i], kind % 2, form, kind / 2);
                    if (type) bad += check_grouped(61, sizes[i], form ? 1 : 7);
                }
            bad += check(type, 2, 70001, 2, 0, 1); /* rows split over threads */
        }
    return bad != 0;
}
