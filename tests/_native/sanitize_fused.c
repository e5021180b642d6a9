/* Every operation of fused.c on rows that are awkward, as in sanitize.c. */
#include "../../lastlayer/_native/fused.c"

static int isa = 0;

int lastlayer_isa(void) { return isa; }

static uint64_t seed = 1;

static double uniform(void) {
    seed = seed * 6364136223846793005ULL + 1442695040888963407ULL;
    return (double)(seed >> 11) / 9007199254740992.0;
}

static float score(int style, int64_t i) {
    double u = uniform() - 0.5;
    switch (style) {
        case 0: return (float)(4 * u);
        case 1: return (float)(1e4 + 100 * u);
        case 2: return i % 3 ? (float)u : -INFINITY;
        case 3: return i == 0 ? INFINITY : (float)u;
        case 4: return i == 1 ? NAN : (float)u;
        case 5: return i < 2 ? 5e3f : -5e3f;
        case 6: return 0;
        default: return (float)(1e30 * u);
    }
}

static int check(int64_t rows, int64_t n, int style, int threads) {
    size_t size = (size_t)(rows * n);
    float *logits = malloc(size * 4), *out = malloc(size * 4), *soft = malloc(size * 4), *up = malloc(size * 4);
    float *k = malloc((size_t)rows * 4), *extra = malloc((size_t)rows * 8);
    size_t lines = (size_t)(rows > n ? rows : n);
    float *loss = malloc(lines * 4);
    uint8_t *counts = malloc(lines), *mask = malloc(size);
    int64_t *list = malloc((size_t)rows * 16);
    for (int64_t i = 0; i < rows; i++) {
        k[i] = (float)(uniform() * (double)n);
        list[2 * i] = (int64_t)(uniform() * (double)n), list[2 * i + 1] = -1;
        for (int64_t j = 0; j < n; j++) logits[i * n + j] = score(style, j);
    }
    for (size_t i = 0; i < size; i++) {
        soft[i] = uniform() < 0.1 ? (float)uniform() : uniform() < 0.1 ? -1.0f : 0.0f;
        up[i] = (float)uniform(), mask[i] = uniform() < 0.8;
    }
    int bad = 0;
    for (int operation = 0; operation < OPERATIONS; operation++)
        for (int form = 0; form < 3; form++) {
            struct fused call = {.rows = rows, .n = n, .logits = logits, .operation = operation, .threads = threads};
            call.dense = form == 0 ? soft : 0, call.dense_type = DENSE_F32;
            call.index = form == 1 ? list : 0, call.m = 2;
            call.mask = form == 2 ? mask : 0, call.mask_stride = n;
            call.each = up, call.each_stride = n, call.positive_stride = n;
            call.positive = form && operation != MARGINALS_BACKWARD ? 0 : up;
            call.first = k, call.step = 1;
            double subset = (double)(n < 6 ? n : 5), numbers[6] = {1, 1, 0.05, 1, 0, 0};
            memcpy(call.number, numbers, sizeof numbers);
            if (operation >= MARGINALS || operation == SMOOTH_SVM || operation == TRUNCATED) call.number[0] = subset;
            if (operation == ASYMMETRIC) call.number[1] = form ? 4 : 2.5;
            if (operation == WARP) call.number[0] = 64;
            call.loss = loss, call.out = out, call.extra = extra, call.counts = counts;
            bad += lastlayer_run_fused(&call) == 1;
        }
    free(logits), free(out), free(soft), free(up), free(k), free(extra), free(loss);
    free(counts), free(mask), free(list);
    return bad;
}

int main(void) {
    int64_t sizes[] = {1, 2, 7, 64, 65, 1000}, bad = 0;
#if DISPATCH
    __builtin_cpu_init();
    int most = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") ? 2
             : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")         ? 1
                                                                                        : 0;
#else
    int most = 0;
#endif
    for (isa = 0; isa <= most; isa++)
        for (int i = 0; i < 6; i++)
            for (int style = 0; style < 8; style++) bad += check(i < 5 ? 5 : 36, sizes[i], style, i < 5 ? 1 : 2);
    return bad != 0;
}
