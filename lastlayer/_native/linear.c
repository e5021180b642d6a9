/* L2-regularised linear classifiers, one per label, by coordinate descent on the dual.

   Plain C, called through ctypes; lastlayer/train/linear/plain.py has the same in numpy, and the formulas.

   A block solves as many labels at once as a vector of 64 bytes has lanes: row by row, the scores of all lanes come from
   one pass over the row's features, where a label's weights are a lane of each feature's vector. Each lane has its own
   set of rows still in play (shrinking, Hsieh et al. 2008) and its own end. A lane that has ended takes the next cost of
   the path, or the next label of the task. Tasks are cut by sizes alone and have seeds of their own, so the answer does
   not depend on the number of threads. */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are passed between inlined functions alone */
#endif

#define EXPORT __attribute__((visibility("default")))
#define LINE 64 /* bytes of a block's vectors: one cache line */
#define AHEAD 6 /* rows by which the start of a row is fetched before it is needed */

enum { SQUARED_HINGE, LOGISTIC };

/* A call: what ctypes hands over. */
struct call {
    int64_t n_rows, n_features;
    const int64_t *indptr;  /* 0: dense rows */
    const int32_t *indices; /* sorted or not, distinct within a row */
    const void *values;
    const double *row_weight; /* or 0: all 1 */
    int64_t n_problems, n_labels, n_costs;
    const int64_t *row_start; /* 0: all rows, in each problem */
    const int32_t *row_list;
    const int64_t *label_start;    /* where each problem's labels start, in `order` */
    const int64_t *order;          /* labels in the order in which they are solved */
    const int64_t *positive_start; /* where each label's rows start, in `positives` */
    const int32_t *positives;      /* rows; those outside the problem are ignored */
    const double *costs;           /* C, one per step of the path */
    const double *positive_weight, *negative_weight; /* one per label */
    double bias, threshold, tolerance;
    int64_t max_passes, seed;
    int64_t offset; /* how many labels come before these in the whole job, for the seeds of a part of it */
    int loss, threads;
    volatile int *stop;      /* set from outside to end early */
    volatile int64_t *done;  /* solved labels times costs */
    double *intercepts;      /* n_costs x n_labels */
    int32_t *passes;         /* the same; negative: not converged */
    struct weights *weights; /* the same */
};

/* The weights of one label that are not cut. */
struct weights {
    int64_t n;
    int32_t *index;
    void *value;
};

/* A share of the work: labels first to last of `order`, all of one problem. */
struct task {
    int64_t problem, first, last;
};

/* The rows of a problem. Sparse rows of a small part of all rows have their features renumbered. */
struct rows {
    int64_t n, n_features;
    const int64_t *start, *end; /* of each row in `indices` and `values`; 0: dense rows */
    const int32_t *indices;
    const void *values;
    const int32_t *feature; /* the name of each local feature, or 0: the same */
    const int32_t *origin;  /* which row each is, or 0: the same */
};

/* The memory of one thread; it grows with what its problems need. */
struct space {
    void *memory[12];
    size_t size[12];
    int failed;
};

enum { W, ALPHA, SIGNS, ACTIVE, LIST, INDPTR, INDICES, VALUES, FEATURES, PLACES, MAP, ROWS };

/* Memory number `which` with at least `bytes`, aligned to a line; `failed` is set where there is none. */
static void *room(struct space *space, int which, size_t bytes) {
    if (space->size[which] < bytes || !space->memory[which]) {
        free(space->memory[which]);
        size_t size = (bytes + bytes / 4 + LINE) / LINE * LINE;
        space->memory[which] = aligned_alloc(LINE, size);
        space->size[which] = space->memory[which] ? size : 0;
        if (!space->memory[which]) space->failed = 1;
    }
    return space->memory[which];
}

static uint64_t next_random(uint64_t *state) { /* splitmix64 (Steele, Lea and Flood 2014) */
    uint64_t z = *state += 0x9e3779b97f4a7c15ULL;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ z >> 27) * 0x94d049bb133111ebULL;
    return z ^ z >> 31;
}

static void shuffle(int32_t *list, int64_t n, uint64_t *state) {
    for (int64_t i = n - 1; i > 0; i--) {
        int64_t j = (int64_t)((next_random(state) >> 32) * (uint64_t)(i + 1) >> 32);
        int32_t kept = list[i];
        list[i] = list[j];
        list[j] = kept;
    }
}

static int compare_int32(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* The score of a label whose rows are all alike: the best with an intercept alone. `mass` is the sum of the costs. */
static double constant_score(int loss, double bias, double mass) {
    double scale = (bias > 0 ? bias * bias : 1) * mass;
    if (loss == SQUARED_HINGE) return 2 * scale / (1 + 2 * scale);
    double low = 0, high = scale / 2; /* t = scale sigmoid(-t) */
    for (int i = 0; i < 200 && low < high; i++) {
        double middle = (low + high) / 2;
        if (middle == low || middle == high) break;
        if (middle < scale / (1 + exp(middle)))
            low = middle;
        else
            high = middle;
    }
    return (low + high) / 2;
}

/* ---- One copy of linear_block.h for each type and instruction set. ---- */

#define JOIN(x, type, isa) x##_##type##_##isa
#define JOINED(x, type, isa) JOIN(x, type, isa)
#define NAME(x) JOINED(x, TYPE, ISA)

#define EACH_SET "linear_types.h"
#include "sets.h"

typedef void (*task_work)(const struct call *, const struct task *, struct space *);

static const task_work works[3][2] = {
    {solve_task_f32_baseline, solve_task_f64_baseline},
#if DISPATCH
    {solve_task_f32_avx2, solve_task_f64_avx2},
    {solve_task_f32_avx512, solve_task_f64_avx512},
#endif
};

static int isa_limit = 2;

/* The instruction set in use: 0 baseline, 1 AVX2, 2 AVX-512. */
EXPORT int linear_isa(void) {
    int isa = 0;
#if DISPATCH
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) isa = 1;
    if (isa && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        isa = 2;
#endif
    return isa < isa_limit ? isa : isa_limit;
}

/* For tests: use no more than this instruction set. */
EXPORT void linear_limit_isa(int limit) { isa_limit = limit; }

EXPORT int linear_call_size(void) { return (int)sizeof(struct call); }

struct job {
    const struct call *call;
    task_work work;
    const struct task *tasks;
    struct space *spaces;
};

static void job_part(void *job, int64_t part, int slot) {
    const struct job *j = job;
    if (!*j->call->stop && !j->spaces[slot].failed) j->work(j->call, j->tasks + part, j->spaces + slot);
}

/* A problem of few rows is one task. One of many rows is cut into whole blocks, about eight tasks in all; where labels
   are many, a task has enough of them to refill ended lanes. Problems of all rows have been cut by the caller. */
static int64_t task_size(const struct call *call, int64_t problem, int64_t lanes) {
    int64_t labels = call->label_start[problem + 1] - call->label_start[problem];
    if (!call->row_start || call->row_start[problem + 1] - call->row_start[problem] < 4096) return labels + !labels;
    int64_t size = (labels / 8 + lanes - 1) / lanes * lanes;
    return size < lanes ? lanes : size > 8 * lanes ? 8 * lanes : size;
}

static struct task *cut_tasks(const struct call *call, int64_t lanes, int64_t *count) {
    struct task *tasks = 0;
    for (int writing = 0; writing < 2; writing++) {
        int64_t n = 0;
        for (int64_t p = 0; p < call->n_problems; p++) {
            int64_t to = call->label_start[p + 1], size = task_size(call, p, lanes);
            for (int64_t first = call->label_start[p]; first < to; first += size, n++)
                if (writing) tasks[n] = (struct task){p, first, first + size < to ? first + size : to};
        }
        *count = n;
        if (!writing && !(tasks = malloc((size_t)(n + 1) * sizeof *tasks))) return 0;
    }
    return tasks;
}

/* Solve all problems. 0; 1 where there is no memory; 2 where it was stopped. */
EXPORT int linear_solve(const struct call *call, int type) {
    int64_t count = 0;
    struct task *tasks = cut_tasks(call, type ? LINE / 8 : LINE / 4, &count);
    int threads = call->threads < 1 ? 1 : call->threads > POOL_MAX ? POOL_MAX : call->threads;
    struct space *spaces = calloc((size_t)threads, sizeof *spaces);
    int failed = !tasks || !spaces;
    if (!failed) {
        struct job job = {call, works[linear_isa()][type], tasks, spaces};
        pool_run(job_part, &job, count, threads);
    }
    for (int i = 0; spaces && i < threads; i++) {
        failed |= spaces[i].failed;
        for (int k = 0; k < (int)(sizeof spaces[i].memory / sizeof *spaces[i].memory); k++) free(spaces[i].memory[k]);
    }
    free(spaces);
    free(tasks);
    return failed ? 1 : *call->stop ? 2 : 0;
}

/* Write the weights of one step of the path one label after the other. */
EXPORT void linear_copy(const struct weights *weights, int64_t n_labels, int type, int32_t *index, void *value) {
    size_t real = type ? 8 : 4;
    for (int64_t i = 0; i < n_labels; i++) {
        size_t n = (size_t)weights[i].n;
        if (!n) continue;
        memcpy(index, weights[i].index, n * sizeof *index);
        memcpy(value, weights[i].value, n * real);
        index += n;
        value = (char *)value + n * real;
    }
}

EXPORT void linear_free(struct weights *weights, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        free(weights[i].index);
        free(weights[i].value);
        weights[i] = (struct weights){0, 0, 0};
    }
}
