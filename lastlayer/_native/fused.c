/* Losses and projections whose value and gradient have a closed form, in a few passes over a row that is in the cache.

   Plain C for float, called through ctypes. The same in torch is beside each loss; rows that are out of the ordinary
   (nan, +inf, an infinite loss) are left to it, for the whole batch. */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"
#include "targets.h"

#define EXPORT __attribute__((visibility("default")))
#define PIECE 64           /* scores; rows are padded to whole pieces, and a piece without labels is spared their terms */
#define SHORT_LIST 64      /* the largest numbers of a row are held in order up to here */
#define MOST 16            /* classes of a subset: beyond that the polynomials lose digits when they are divided */

int lastlayer_isa(void);

/* The rank-th largest (1 is the largest), by selection in place: what is not less comes to stand before it. */
static double kth_largest(double *x, int64_t n, int64_t rank) {
    int64_t first = 0, last = n - 1, at = rank - 1;
    while (first < last) {
        double low = x[first], mid = x[first + (last - first) / 2], high = x[last];
        double pivot = fmax(fmin(low, mid), fmin(fmax(low, mid), high));
        int64_t i = first, j = last;
        while (i <= j) {
            while (x[i] > pivot) i++;
            while (x[j] < pivot) j--;
            if (i <= j) {
                double swap = x[i];
                x[i++] = x[j];
                x[j--] = swap;
            }
        }
        if (at <= j)
            last = j;
        else if (at >= i)
            first = i;
        else
            break;
    }
    return x[at];
}

/* What a call may compute; fused.py has the names. */
enum {
    LOGISTIC, ASYMMETRIC, TWO_WAY_ROWS, TWO_WAY_COLUMNS, LOGSUMEXP, QUASIBINARY, TRUNCATED, SMOOTH_SVM, WARP,
    CAPPED_SOFTMAX, CAPPED_SPARSEMAX, CAPPED_SOFTMAX_BACKWARD, CAPPED_SPARSEMAX_BACKWARD, MARGINALS,
    MARGINALS_BACKWARD, OPERATIONS
};

/* A call: what ctypes hands over. A stride of 0 is one row for all. */
struct fused {
    int64_t rows, n;
    const float *logits;
    const uint8_t *mask;
    int64_t mask_stride;
    const void *dense; /* the target: a number per class, or lists of m classes, or none */
    const int64_t *index;
    int64_t m;
    int dense_type, operation, threads, unused;
    const float *each, *positive; /* weights of classes, and of labels alone; in backward passes `each` is upstream */
    int64_t each_stride, positive_stride;
    const float *first; /* a number of each row */
    int64_t step;       /* 0 where all rows have the same */
    double number[6];
    float *loss, *out, *extra; /* per row; per score, the gradient or the projection; per row, see the operations */
    uint8_t *counts;           /* whether a row counts in the mean */
};

/* The memory of one thread: rows in whole pieces. */
struct fused_space {
    float *x, *a, *b, *g, *u; /* scores, shares of labels and of the rest, two rows for results */
    double *wide, *other;
    int odd, ready; /* a row is out of the ordinary; `other` holds a table of the whole call */
};

static double sigmoid(double z) { return z < 0 ? exp(z) / (1 + exp(z)) : 1 / (1 + exp(-z)); }

static double softplus(double z) { return fmax(z, 0) + log1p(exp(-fabs(z))); }

/* Polynomials in t up to a degree: the coefficients of prod (1 + w t), and their derivatives along a direction. */
struct polynomial {
    double c[MOST + 1], d[MOST + 1];
};

/* Multiply by absent + present t, whose derivative is slope t. */
static void multiply_by_class(struct polynomial *f, int degree, double absent, double present, double slope) {
    for (int m = degree; m > 0; m--) {
        f->d[m] = absent * f->d[m] + present * f->d[m - 1] + slope * f->c[m - 1];
        f->c[m] = absent * f->c[m] + present * f->c[m - 1];
    }
    f->c[0] *= absent, f->d[0] *= absent;
}

static void multiply(struct polynomial *f, int degree, const struct polynomial *by) {
    for (int m = degree; m >= 0; m--) {
        double c = 0, d = 0;
        for (int i = 0; i <= m; i++) {
            c += f->c[i] * by->c[m - i];
            d += f->d[i] * by->c[m - i] + f->c[i] * by->d[m - i];
        }
        f->c[m] = c, f->d[m] = d;
    }
}

/* ---- One copy of fused_rows.h for each instruction set; double lends its exponential. ---- */

#define FUSED
#define JOIN(x, type, isa) x##_##type##_##isa
#define JOINED(x, type, isa) JOIN(x, type, isa)
#define NAME(x) JOINED(x, TYPE, ISA)
#define EXP_DOUBLE JOINED(exp, f64, ISA)

#define EACH_SET "lml_types.h"
#include "sets.h"

/* ---- The call. ---- */

typedef void (*fused_work)(const struct fused *, int64_t, struct fused_space *);

#define WORKS(isa)                                                                                                  \
    { logistic_f32_##isa, asymmetric_f32_##isa, two_way_row_f32_##isa, two_way_columns_f32_##isa,                    \
      logsumexp_f32_##isa, quasibinary_f32_##isa, truncated_f32_##isa, smooth_svm_f32_##isa, warp_f32_##isa,         \
      capped_softmax_f32_##isa, capped_sparsemax_f32_##isa, capped_softmax_backward_f32_##isa,                       \
      capped_sparsemax_backward_f32_##isa, marginals_f32_##isa, marginals_backward_f32_##isa }

static const fused_work works[3][OPERATIONS] = {
    WORKS(baseline),
#if DISPATCH
    WORKS(avx2),
    WORKS(avx512),
#endif
};

EXPORT int lastlayer_fused_size(void) { return (int)sizeof(struct fused); }

struct fused_job {
    const struct fused *call;
    fused_work work;
    struct fused_space *spaces;
    int64_t items, grain;
};

static void fused_part(void *job, int64_t part, int slot) {
    const struct fused_job *j = job;
    int64_t first = part * j->grain, last = first + j->grain;
    if (last > j->items) last = j->items;
    for (int64_t i = first; i < last; i++) j->work(j->call, i, j->spaces + slot);
}

/* Run a call; 0, or 1 where there is no memory, or 2 where a row is out of the ordinary: nothing written counts then. */
EXPORT int lastlayer_run_fused(const struct fused *call) {
    int64_t n = call->n, columns = call->operation == TWO_WAY_COLUMNS;
    int64_t items = columns ? (n + PIECE - 1) / PIECE : call->rows, size = columns ? call->rows * PIECE : n;
    if (items == 0) return 0;
    int64_t threads = call->threads > POOL_MAX ? POOL_MAX : call->threads;
    if (threads < 1 || call->rows * n < SERIAL_BELOW) threads = 1;
    if (threads > items) threads = items;
    size_t width = ((size_t)n + PIECE - 1) / PIECE * PIECE, floats = width * 4 + 64, doubles = width * 8 + 64;
    size_t one = (5 * floats + 2 * doubles) / 64 * 64 + 64;
    char *memory = malloc(one * (size_t)threads + 64);
    struct fused_space *space = calloc((size_t)threads, sizeof *space);
    if (!memory || !space) {
        free(memory);
        free(space);
        return 1;
    }
    for (int64_t i = 0; i < threads; i++) {
        char *at = (char *)(((uintptr_t)memory + 63) / 64 * 64) + one * (size_t)i;
        float **rows[] = {&space[i].x, &space[i].a, &space[i].b, &space[i].g, &space[i].u};
        for (int j = 0; j < 5; j++, at += width * 4) *rows[j] = (float *)at;
        space[i].wide = (double *)at;
        space[i].other = (double *)(at + width * 8);
    }
    struct fused_job job = {call, works[lastlayer_isa()][call->operation], space, items, 1};
    job.grain = POOL_GRAIN / (size + 1) + 1;
    pool_run(fused_part, &job, (items + job.grain - 1) / job.grain, (int)threads);
    int odd = 0;
    for (int64_t i = 0; i < threads; i++) odd |= space[i].odd;
    free(memory);
    free(space);
    return odd ? 2 : 0;
}
