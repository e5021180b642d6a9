/* The LML projection and loss on the CPU: rows on several threads, the instruction set chosen at run time.

   Plain C, called through ctypes; lastlayer/project/lml.py has the same in torch, and the reasons. */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include "pool.h"
#include "targets.h"

#define EXPORT __attribute__((visibility("default")))

enum { KIND_Y, KIND_LOG, KIND_NU, KIND_AT_MOST, KIND_FENCHEL_YOUNG };
enum { HALF_NONE, HALF_BFLOAT16, HALF_FLOAT16 };
enum { DEGENERATE, OPEN, CLOSE, HARD }; /* a row: nothing to search, searching, solved, solved in logarithms */

#define PART 16384       /* scores a thread takes at a time from a long row */
#define AHEAD 1024       /* numbers that the backward pass fetches ahead of those it reads and writes */
#define TILE_BELOW 1024  /* rows up to here are solved several at once, in lml_tile.h */
#define TILE_FROM 4      /* fewer rows would leave most of a vector idle */
#define BAND_FROM 128    /* with weights or bounds, rows from here on are read where they are, in weighted_band.h */
#define HALF_GROUP 1024  /* scores of half precision that the backward pass with weights or bounds converts at a time */
#define NEAR 80.0        /* scores further below the largest than that are left out of a first guess */
#define FAR 4.0          /* a nu that far from where the exponentials were taken needs new ones */

/* What the passes over a row sum; each pass says what the fields mean there. */
struct sums {
    double a, b, f, square, above, full, low, high;
};

static void add_sums(struct sums *total, const struct sums *part) {
    total->a += part->a;
    total->b += part->b;
    total->f += part->f;
    total->square += part->square;
    total->above += part->above;
    total->full += part->full;
    total->low = fmin(total->low, part->low);
    total->high = fmax(total->high, part->high);
}

/* The parts of a start that depend on k and n alone. */
struct start {
    double k, n, logit, log_p, quantile;
};

typedef uint32_t __attribute__((may_alias)) word; /* the bits of a float */

/* A call: what ctypes hands over. */
struct call {
    int64_t rows, n;
    const void *logits, *k;
    int64_t k_stride; /* 0 where all rows have the same k */
    const uint8_t *mask;
    int64_t mask_stride;
    double temperature;
    int kind, threads;
    void *out, *center, *delta;
    const void *grad, *grad_delta;
    void *grad_k;
    double observed;
    const int64_t *index;
    int64_t m;
    const void *dense;
    int dense_type;
    void *log_mass, *pull;
    void *weight; /* of each row in the reduced loss; 0 where it does not contribute */
    void *total;  /* the reduced loss: the mean over the rows that contribute, or their sum */
    int64_t mean;
    void *slope;  /* the gradient of the sum over the rows that contribute, times `unit`, written with the loss */
    double *over; /* what turns it into that of the reduced loss; 0 where a row is nan, which upstream 0 must hide */
    double unit;
    int64_t half; /* the type of logits, grad, and out if it is y or a gradient; all other numbers are float */
};

/* The memory of one thread: `copy` and `e` have room for all rows that are solved at once, in whole vectors. */
struct space;
typedef void (*row_work)(const struct call *, int64_t, int, struct space *);

struct space {
    void *copy, *e;
    double *workspace;
    void *label;
    struct sums *parts;
    struct start start;
    float *narrow;     /* logits, out and grad of the rows worked on, where those of the call are of half precision */
    row_work work;     /* for these rows, as float */
    int threads;       /* for the parts of a row */
    int odd;           /* a row is out of the ordinary, and plain torch must take the batch */
};

static const int64_t dense_bytes[] = {4, 8, 1, 1, 2, 4, 8}; /* in the order of the types of a dense target */

/* float16 to the bits of a float. */
static inline uint32_t widen_float16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff, bits;
    float tiny = (float)rest * 0x1p-24f;
    memcpy(&bits, &tiny, sizeof bits);
    if (rest >= 0x400) bits = (rest << 13) + (rest < 0x7c00 ? 112u << 23 : 224u << 23);
    return sign | bits;
}

/* The reverse: to the nearest, ties to even. */
static inline uint16_t narrow_float16(uint32_t bits) {
    uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff, moved = rest - (112u << 23);
    float tiny; /* below 2^-14 the numbers are multiples of 2^-24, as those of float are next to 1/2 */
    memcpy(&tiny, &rest, sizeof tiny);
    tiny += 0.5f;
    memcpy(&bits, &tiny, sizeof bits);
    bits = rest < 0x38800000 ? bits - 0x3f000000 : (moved + 0xfff + (moved >> 13 & 1)) >> 13;
    if (rest >= 0x477ff000) bits = rest > 0x7f800000 ? 0x7e00 : 0x7c00;
    return (uint16_t)(sign | bits);
}

static double log_sigmoid(double z) { return fmin(z, 0) - log1p(exp(-fabs(z))); }

/* A sum of h = y (1 - y): exp(peak) times sum. */
struct mass {
    double peak, sum;
};

/* The quantile of the normal distribution for p <= 1/2 to 3e-3 (Abramowitz and Stegun 26.2.22). */
static double normal_quantile(double log_p) {
    double u = sqrt(-2 * log_p);
    return (2.30753 + 0.27061 * u) / (1 + u * (0.99229 + 0.04481 * u)) - u;
}

static void start_prepare(struct start *start, double k, double n) {
    if (start->k == k && start->n == n) return;
    double less = k < n - k ? k : n - k;
    start->k = k;
    start->n = n;
    start->logit = log(k / (n - k));
    start->log_p = log(less / n);
    start->quantile = normal_quantile(start->log_p);
}

/* A guess of nu as if the scores were normal. In the tail sigmoid(z) is exp(z), with the mean exp(mean + variance / 2);
   where the variance is large it is a step, smoothed as a normal distribution function of variance 8 / pi would be. */
__attribute__((always_inline)) static inline double start_guess(double logit, double log_p, double quantile, double mean,
                                                                double variance, double lo, double hi) {
    double small = -fabs(logit), spread = variance > 0 ? variance : 0, root = sqrt(spread);
    double tail = small - spread / 2, soft = sqrt(1 + 0.3926990817 * spread) * small;
    double step = sqrt(spread + 2.5464790895) * quantile;
    double weight = 0.5 + 0.35 * ((log_p + spread / 2) / (root + 1e-30) + 1.2);
    weight = weight < 0 ? 0 : weight > 1 ? 1 : weight;
    double guess = (1 - weight) * (tail > soft ? tail : soft) + weight * step;
    guess = (logit < 0 ? guess : -guess) - mean;
    guess = spread < 1e30 ? guess : (lo + hi) / 2;
    return guess < lo ? lo : guess > hi ? hi : guess;
}

/* The step of nu of fourth order (Householder's) from the sums a and b of `struct sums` and f = sum y - k; r is Newton's. */
__attribute__((always_inline)) static inline double fourth_order(double a, double b, double f, double square, double *r) {
    double over = 1 / (a + b), rho = (b - a) * over, tau = 1 - 6 * square * over;
    *r = f * over;
    return -*r * (1 - *r * rho / 2) / (1 - *r * rho + *r * *r * tau / 6);
}

/* A step of nu from the sums at `at`. CLOSE if it ends the search, HARD if the sums
   have underflowed. Far from the solution the step is kept within exact bounds, known to `slack`. */
static int take_step(const struct sums *m, double k, double at, double *lo, double *hi, double eps, double slack,
                     double least, double *step) {
    double a = m->a, b = m->b, sum_h = a + b, f = m->f + (m->above - k);
    if (!(sum_h > least)) return HARD;
    double r;
    *step = fourth_order(a, b, f, m->square, &r);
    double size = fabs(r);
    if (size < 0.5 && r * r * r * r / 3 <= eps / 2) return CLOSE;
    if (size < 0.3) return OPEN;
    /* The root of b q^2 + c q - a in q = exp(step) never passes the solution. */
    double c = f - (b - a), root = sqrt(c * c + 4 * a * b);
    double safe = log(c > 0 ? 2 * a / (c + root) : (root - c) / (2 * b));
    if (!isfinite(safe)) return HARD;
    if ((safe < 0) != (f > 0)) safe = 0;
    /* Nor does that of rest q^2 + surplus q - full, where each y below 1/2 grows as q, and each 1 - y above it shrinks so:
       across a gap it is the solution. */
    double surplus = m->above - k, rest = m->f + m->full, across = sqrt(surplus * surplus + 4 * rest * m->full);
    double tail = log(surplus > 0 ? 2 * m->full / (surplus + across) : (across - surplus) / (2 * rest));
    if (m->full > 0 && rest > 0 && isfinite(tail) && (tail < 0) == (f > 0) && fabs(tail) > fabs(safe)) safe = tail;
    *lo = fmax(*lo, at + (f < 0 ? safe : log1p(-fmin(r, 1))) - slack);
    *hi = fmin(*hi, at + (f > 0 ? safe : -log1p(fmax(r, -1))) + slack);
    if (size >= 1 || fabs(*step) < fabs(safe)) *step = safe;
    if (!(at + *step >= *lo && at + *step <= *hi)) *step = (*lo + *hi) / 2 - at;
    return OPEN;
}

/* Whether the sum at a nu of at least 0 is below k by more than rounding: then so is the sum of the sigmoids. */
static int unreached(double nu, double sum, double k, double eps) { return nu >= 0 && sum * (1 + 256 * eps) < k; }

#include "weighted.h"

/* A call with limits on groups: what ctypes hands over, for scores in double. */
struct grouped {
    int64_t rows, n, groups;
    const double *x, *k, *limit;
    int64_t limit_stride;          /* 0 where all rows have the same */
    const int64_t *order, *first;  /* the classes group by group, and where each group begins, with the end */
    double *out, *center, *delta;  /* y, and the thresholds of bound groups and of all other classes, groups + 1 per row */
    uint8_t *bound;
    int64_t threads;
};

struct grouped_space {
    double *sorted, *free, *y, *size;
    struct space row;
};

enum { BOUND = 1, BOUND_LAST }; /* a group, and one that is among the others still */

#define GROUP_SLACK 1e-6 /* of k: how far it may be above the limits, which as float32 do not add up exactly */

/* ---- One copy of lml_rows.h for each type and instruction set. ---- */

#define JOIN(x, type, isa) x##_##type##_##isa
#define JOINED(x, type, isa) JOIN(x, type, isa)
#define NAME(x) JOINED(x, TYPE, ISA)
#define SOLVE_HARD JOINED(solve_hard, f64, ISA)
#define EXP_DOUBLE JOINED(exp, f64, ISA)
#define LOG_DOUBLE JOINED(log, f64, ISA)
#define LOG1P_DOUBLE JOINED(log1p, f64, ISA)
#define WIDER_SEARCH JOINED(wider_search, f64, ISA)

#ifdef __clang__
#define SHUFFLE(a, b, type, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, type, ...) __builtin_shuffle(a, b, (type){__VA_ARGS__})
#endif

#define EACH_SET "lml_types.h"
#include "sets.h"

/* ---- The calls. ---- */

enum { FORWARD, BACKWARD, LOSS_FORWARD, LOSS_BACKWARD, FORWARD_TILE, LOSS_FORWARD_TILE };

#define ROWS(type, isa)                                                                                     \
    { forward_rows_##type##_##isa, backward_rows_##type##_##isa, loss_forward_rows_##type##_##isa,             \
      loss_backward_rows_##type##_##isa, forward_tile_##type##_##isa, loss_forward_tile_##type##_##isa }

static const row_work works[3][2][6] = {
    {ROWS(f32, baseline), ROWS(f64, baseline)},
#if DISPATCH
    {ROWS(f32, avx2), ROWS(f64, avx2)},
    {ROWS(f32, avx512), ROWS(f64, avx512)},
#endif
};

static const row_work half_works[3] = {
    half_rows_f32_baseline,
#if DISPATCH
    half_rows_f32_avx2,
    half_rows_f32_avx512,
#endif
};

/* Use the threads of this OpenMP runtime from now on. */
EXPORT void lastlayer_use_team(team_entry team) { pool_team = team; }

typedef void (*scaled_work)(int, const float *, float, uint16_t *, int64_t);

static const scaled_work scaled_works[3] = {
    scaled_f32_baseline,
#if DISPATCH
    scaled_f32_avx2,
    scaled_f32_avx512,
#endif
};

static int isa_limit = 2, has_f16c = 0;

#if DISPATCH
/* Once: the instruction is slow in a virtual machine. Not every compiler knows F16C by its name. */
__attribute__((constructor)) static void look_for_f16c(void) {
    unsigned a, b, c = 0, d;
    has_f16c = __get_cpuid(1, &a, &b, &c, &d) && c >> 29 & 1;
}
#endif

/* The instruction set in use: 0 baseline, 1 AVX2, 2 AVX-512. */
EXPORT int lastlayer_isa(void) {
    int isa = 0;
#if DISPATCH
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c) isa = 1;
    if (isa && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        isa = 2;
#endif
    return isa < isa_limit ? isa : isa_limit;
}

/* For tests: use no more than this instruction set. */
EXPORT void lastlayer_limit_isa(int limit) { isa_limit = limit; }

EXPORT int lastlayer_call_size(void) { return (int)sizeof(struct call); }

struct job {
    const struct call *call;
    row_work work;
    struct space *spaces;
    int64_t rows_a_part, group; /* group: rows worked on at once */
};

static void job_part(void *job, int64_t part, int slot) {
    const struct job *j = job;
    int64_t first = part * j->rows_a_part, last = first + j->rows_a_part;
    if (last > j->call->rows) last = j->call->rows;
    for (int64_t i = first; i < last; i += j->group)
        j->work(j->call, i, (int)(last - i < j->group ? last - i : j->group), j->spaces + slot);
}

/* Whether every class of the index lists exists; -1 pads. */
static int classes_exist(const struct call *call) {
    int64_t largest = -1, count = call->index ? call->rows * call->m : 0;
    for (int64_t i = 0; i < count; i++) largest = call->index[i] > largest ? call->index[i] : largest;
    return largest < call->n;
}

/* The loss of all rows from that of each, and with it their weights. */
#define REDUCE_LOSS(real)                                                                                    \
    static void reduce_loss_##real(const struct call *call) {                                                \
        real *weight = call->weight, *loss = call->out;                                                      \
        double sum = 0, count = 0;                                                                           \
        for (int64_t i = 0; i < call->rows; i++)                                                             \
            if (weight[i] > 0) sum += (double)loss[i], count += 1;                                           \
        double over = call->mean && count > 0 ? 1 / count : 1;                                               \
        for (int64_t i = 0; i < call->rows; i++) weight[i] = weight[i] > 0 ? (real)over : 0;                 \
        *(real *)call->total = (real)(sum * over);                                                           \
        if (call->over) *call->over = sum == sum ? over / call->unit : 0;                                    \
    }

REDUCE_LOSS(float)
REDUCE_LOSS(double)

/* One over the number of rows with a label, where index lists tell that before the rows are solved. */
static double unit_of_mean(const struct call *call) {
    int64_t count = call->observed > 0 ? call->rows : 0;
    if (!call->index || !call->mean) return 1;
    for (int64_t i = 0; i < call->rows && call->observed == 0; i++) {
        int found = 0;
        for (int64_t j = 0; j < call->m; j++) found |= call->index[i * call->m + j] >= 0;
        count += found;
    }
    return count > 0 ? 1 / (double)count : 1;
}

static size_t round_up(size_t bytes) { return (bytes + 127) / 64 * 64; }

static int run(const struct call *call, int type, int operation);

/* Run a call; 0, or 1 where there is no memory, or 2 where a class does not exist, or 3 where a row of the Fenchel-Young
   loss is out of the ordinary: nothing written counts then. The numbers of the rows of a reduced loss are dropped where
   there is no place for them. */
EXPORT int lastlayer_run(const struct call *call, int type, int operation) {
    if (call->total && !classes_exist(call)) return 2;
    if (call->rows == 0) return 0;
    if (!call->total) return run(call, type, operation);
    struct call own = *call;
    size_t size = (size_t)call->rows * (type ? 8 : 4);
    char *memory = call->weight ? 0 : malloc(6 * size);
    if (memory) {
        own.out = memory, own.center = memory + size, own.delta = memory + 2 * size;
        own.log_mass = memory + 3 * size, own.pull = memory + 4 * size, own.weight = memory + 5 * size;
    }
    own.unit = call->slope ? unit_of_mean(call) : 1;
    int problem = own.weight ? run(&own, type, operation) : 1;
    free(memory);
    return problem;
}

static int run(const struct call *call, int type, int operation) {
    int64_t n = call->n, threads = call->threads > POOL_MAX ? POOL_MAX : call->threads;
    if (threads < 1 || call->rows * n < SERIAL_BELOW) threads = 1;
    int split = threads > 1 && n >= 4 * PART && call->rows < 4 * threads; /* rows one by one, each over all threads */
    int64_t spaces = split || threads > call->rows ? (split ? 1 : call->rows) : threads;

    size_t real = type ? 8 : 4, width = ((size_t)n + 127) / 64 * 64;
    int forward = operation == FORWARD || operation == LOSS_FORWARD, loss = operation >= LOSS_FORWARD;
    int isa = lastlayer_isa(), tile = forward && n > 0 && n <= TILE_BELOW && call->rows >= TILE_FROM;
    int64_t group = tile ? (16 << isa) / (int64_t)real : 1;
    row_work work = works[isa][type][!tile ? operation : loss ? LOSS_FORWARD_TILE : FORWARD_TILE];
    size_t parts = round_up((width / PART + 1) * sizeof(struct sums)), copy = round_up((size_t)group * width * real);
    size_t e = forward ? copy : 0, workspace = forward ? round_up(width * 8) : 0;
    size_t label = loss ? round_up(width * real) : 0;
    size_t narrow = call->half ? round_up(3 * (size_t)(group * n) * 4) : 0;
    size_t one = parts + copy + e + workspace + label + narrow;
    char *memory = malloc(one * (size_t)spaces + 64);
    struct space *space = calloc((size_t)spaces, sizeof *space);
    if (!memory || !space) {
        free(memory);
        free(space);
        return 1;
    }
    for (int64_t i = 0; i < spaces; i++) {
        char *at = (char *)(((uintptr_t)memory + 63) / 64 * 64) + one * (size_t)i;
        space[i].parts = (struct sums *)at;
        space[i].copy = at += parts;
        space[i].e = at += copy;
        space[i].workspace = (double *)(at += e);
        space[i].label = at += workspace;
        space[i].narrow = (float *)(at + label);
        space[i].threads = split ? (int)threads : 1;
        space[i].work = work;
        if (loss) memset(space[i].label, 0, width * real);
    }

    int64_t grain = (POOL_GRAIN / (n + 1) / group + 1) * group;
    struct job job = {call, call->half ? half_works[isa] : work, space, grain, group};
    pool_run(job_part, &job, (call->rows + grain - 1) / grain, split ? 1 : (int)spaces);
    if (call->total) (type ? reduce_loss_double : reduce_loss_float)(call);
    int odd = 0;
    for (int64_t i = 0; i < spaces; i++) odd |= space[i].odd;
    free(memory);
    free(space);
    return odd ? 3 : 0;
}

struct scaled_job {
    scaled_work work;
    int half;
    const float *from;
    float factor;
    uint16_t *to;
    int64_t size;
};

static void scaled_part(void *job, int64_t part, int slot) {
    const struct scaled_job *j = job;
    int64_t first = part * PART, count = j->size - first < PART ? j->size - first : PART;
    (void)slot;
    j->work(j->half, j->from + first, j->factor, j->to + first, count);
}

/* Numbers of float times a factor, to half precision. */
EXPORT void lastlayer_scale_to_half(const float *from, double factor, uint16_t *to, int64_t size, int half, int threads) {
    struct scaled_job job = {scaled_works[lastlayer_isa()], half, from, (float)factor, to, size};
    pool_run(scaled_part, &job, (size + PART - 1) / PART, size < SERIAL_BELOW ? 1 : threads);
}

/* ---- Rows with weights and bounds. ---- */

typedef struct {
    weighted_work rows, tile, band, apiece, log, backward;
    void (*prepare)(const struct weighted *, struct budget_space *);
} weighted_works;

#define WEIGHTED(type, isa)                                                                                       \
    { weighted_rows_##type##_##isa, weighted_tile_##type##_##isa, weighted_band_##type##_##isa,                    \
      weighted_apiece_##type##_##isa, weighted_log_##type##_##isa, weighted_backward_##type##_##isa,                 \
      weighted_prepare_##type##_##isa }

static const weighted_works weighted_table[3][2] = {
    {WEIGHTED(f32, baseline), WEIGHTED(f64, baseline)},
#if DISPATCH
    {WEIGHTED(f32, avx2), WEIGHTED(f64, avx2)},
    {WEIGHTED(f32, avx512), WEIGHTED(f64, avx512)},
#endif
};

static const weighted_work weighted_half_works[3] = {
    weighted_half_f32_baseline,
#if DISPATCH
    weighted_half_f32_avx2,
    weighted_half_f32_avx512,
#endif
};

EXPORT int lastlayer_weighted_size(void) { return (int)sizeof(struct weighted); }

/* Whether a product is added with one rounding: without that, float has too few digits for the points of a row. */
EXPORT int lastlayer_fused(void) {
#ifdef __FP_FAST_FMA
    return 1;
#else
    return lastlayer_isa() > 0;
#endif
}

struct weighted_job {
    const struct weighted *call;
    weighted_work work;
    struct budget_space *spaces;
    int64_t grain, group;
};

static void weighted_part(void *job, int64_t part, int slot) {
    const struct weighted_job *j = job;
    int64_t first = part * j->grain, last = first + j->grain;
    if (last > j->call->rows) last = j->call->rows;
    for (int64_t i = first; i < last; i += j->group)
        j->work(j->call, i, (int)(last - i < j->group ? last - i : j->group), j->spaces + slot);
}

static int run_weighted(const struct weighted *call, int type, int backward);

/* Run a call; 0, or 1 where there is no memory. nu is dropped where there is no place for it. */
EXPORT int lastlayer_run_weighted(const struct weighted *call, int type, int backward) {
    if (call->rows == 0) return 0;
    if (call->nu) return run_weighted(call, type, backward);
    struct weighted own = *call;
    own.nu = malloc((size_t)call->rows * sizeof *own.nu);
    int problem = own.nu ? run_weighted(&own, type, backward) : 1;
    free(own.nu);
    return problem;
}

static int run_weighted(const struct weighted *call, int type, int backward) {
    int64_t n = call->n, threads = call->threads > POOL_MAX ? POOL_MAX : call->threads;
    if (threads < 1 || call->rows * n < SERIAL_BELOW) threads = 1;
    if (threads > call->rows) threads = call->rows;
    int isa = lastlayer_isa();
    const weighted_works *works = &weighted_table[isa][type];
    int shared = !call->weight_stride && !call->lower_stride && !call->upper_stride;
    int apart = call->weight_stride && !call->lower && !call->upper; /* weights per row, and no bounds */
    int tile = !backward && (shared || apart) && !call->mask && n > 0 && n <= TILE_BELOW && call->rows >= TILE_FROM;
    size_t real = type ? 8 : 4, width = ((size_t)n + 127) / 64 * 64;
    int apiece = !backward && !tile && (call->mask || (!shared && !(apart && n > TILE_BELOW)));
    int64_t lanes = (16 << isa) / (int64_t)real;
    int64_t group = tile || (apiece && n <= TILE_BELOW) ? lanes : backward && call->half ? HALF_GROUP / (n + 1) + 1 : 1;
    size_t one = round_up(width * real), many = round_up((size_t)group * width * real);
    size_t wide = round_up(4 * width * 8), narrow = backward ? one : 3 * one + 4 * many + wide;
    size_t all = narrow + (call->half ? round_up((size_t)(call->grad ? 3 : 2) * (size_t)(group * n) * 4) : 0);
    weighted_work search = apiece ? works->apiece : !tile ? works->rows : n < BAND_FROM ? works->tile : works->band;
    weighted_work work = backward ? works->backward : call->kind == KIND_LOG ? works->log : search;
    char *memory = malloc(all * (size_t)threads + 4 * one + 64);
    struct budget_space *space = calloc((size_t)threads, sizeof *space);
    if (!memory || !space) {
        free(memory);
        free(space);
        return 1;
    }
    char *at = (char *)(((uintptr_t)memory + 63) / 64 * 64), *own = at + 4 * one;
    for (size_t i = 0; i < width; i++)
        if (type)
            ((double *)at)[i] = 1, ((double *)(at + one))[i] = 0;
        else
            ((float *)at)[i] = 1, ((float *)(at + one))[i] = 0;
    for (int64_t i = 0; i < threads; i++, own += all) {
        struct budget_space *s = space + i;
        s->ones = at, s->zeros = at + one, s->shared_w = at + 2 * one, s->shared_a = at + 3 * one;
        s->x = own, s->w = own + one, s->a = own + 2 * one, s->z = own + 3 * one, s->e = own + 3 * one + many;
        s->own = own + 3 * one + 2 * many, s->apiece = own + 3 * one + 3 * many;
        s->wide = (double *)(own + 3 * one + 4 * many);
        s->narrow = (float *)(own + narrow), s->work = work, s->search = search;
        s->width = (int64_t)width, s->is_shared = shared;
        if (i == 0 && shared && !backward) works->prepare(call, s);
        s->shares = space->shares;
    }
    /* Many rows at a time: a thread fetches those that come after the ones it works on. */
    int64_t grain = (POOL_GRAIN / (n + 1) / group + 1) * group, more = call->rows / (32 * threads) / group * group;
    if (grain < more) grain = more;
    struct weighted_job job = {call, call->half ? weighted_half_works[isa] : work, space, grain, group};
    pool_run(weighted_part, &job, (call->rows + grain - 1) / grain, (int)threads);
    free(memory);
    free(space);
    return 0;
}

/* ---- Rows with limits on groups. ---- */

typedef void (*grouped_work)(const struct grouped *, int64_t, struct grouped_space *);

static const grouped_work grouped_works[3] = {
    grouped_row_f64_baseline,
#if DISPATCH
    grouped_row_f64_avx2,
    grouped_row_f64_avx512,
#endif
};

EXPORT int lastlayer_grouped_size(void) { return (int)sizeof(struct grouped); }

struct grouped_job {
    const struct grouped *call;
    grouped_work work;
    struct grouped_space *spaces;
    int64_t grain;
};

static void grouped_part(void *job, int64_t part, int slot) {
    const struct grouped_job *j = job;
    int64_t first = part * j->grain, last = first + j->grain;
    if (last > j->call->rows) last = j->call->rows;
    for (int64_t i = first; i < last; i++) j->work(j->call, i, j->spaces + slot);
}

/* Run a call; 0, or 1 where there is no memory. */
EXPORT int lastlayer_run_grouped(const struct grouped *call) {
    int64_t n = call->n, threads = call->threads > POOL_MAX ? POOL_MAX : call->threads;
    if (call->rows == 0) return 0;
    if (threads < 1 || call->rows * n < SERIAL_BELOW) threads = 1;
    if (threads > call->rows) threads = call->rows;
    size_t width = round_up(((size_t)n + 127) / 64 * 64 * sizeof(double)), groups = round_up((size_t)call->groups * 8);
    size_t parts = round_up(((size_t)n / PART + 1) * sizeof(struct sums)), one = 5 * width + groups + parts;
    char *memory = malloc(one * (size_t)threads + 64);
    struct grouped_space *space = calloc((size_t)threads, sizeof *space);
    if (!memory || !space) {
        free(memory);
        free(space);
        return 1;
    }
    for (int64_t i = 0; i < threads; i++) {
        char *at = (char *)(((uintptr_t)memory + 63) / 64 * 64) + one * (size_t)i;
        struct grouped_space *s = space + i;
        s->sorted = (double *)at, s->free = (double *)(at + width), s->y = (double *)(at + 2 * width);
        s->row.e = at + 3 * width, s->row.workspace = (double *)(at + 4 * width);
        s->size = (double *)(at + 5 * width), s->row.parts = (struct sums *)(at + 5 * width + groups);
        s->row.threads = 1;
    }
    int64_t grain = POOL_GRAIN / (n + 1) + 1;
    struct grouped_job job = {call, grouped_works[lastlayer_isa()], space, grain};
    pool_run(grouped_part, &job, (call->rows + grain - 1) / grain, (int)threads);
    free(memory);
    free(space);
    return 0;
}
