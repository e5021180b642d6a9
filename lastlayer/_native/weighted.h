/* Rows with weights and bounds: what weighted_rows.h needs and is the same for every type. */


/* A call: what ctypes hands over. Without weights they are 1, without bounds 0 and 1; a stride of 0 is one row for all. */
struct weighted {
    int64_t rows, n;
    const void *logits;
    const double *k;
    int64_t k_stride;
    const uint8_t *mask;
    int64_t mask_stride;
    double temperature;
    int at_most, threads;
    int64_t kind;
    const void *weight, *lower, *upper;
    int64_t weight_stride, lower_stride, upper_stride;
    void *out; /* y or its logarithm, none for nu; in the backward pass the gradient of the logits */
    double *nu;
    const void *grad;
    const double *grad_nu;
    double *grad_k;
    void *grad_weight, *grad_lower, *grad_upper;
    int64_t half; /* the type of logits, out and grad; all other numbers are float */
};

/* Sums over the classes of a row that do not depend on its finite scores. Weights are divided by `unit`. */
struct shares {
    double unit, sure, total, w1, w2; /* sure: at nu = -inf; then sums of a, a w and a w^2 */
    double most;                      /* the largest sum that can be reached */
    int negative, wrong;              /* a negative weight; nan, or bounds the wrong way round */
    int below;                        /* a bound below 0 */
};

/* A search for sum a sigmoid(z + w nu) = c, with rest = sum a - c. nu + at is the point of the next pass. */
struct budget {
    double c, rest, total, goal, w1, w2; /* goal is the smaller of c and rest */
    double nu, at, lo, hi, f, s1, s2, s3;
    double moved, unsure;   /* the step to nu, and how far s2 may be off */
    int few, summed, state; /* few: c is the smaller; summed: s2 is not an estimate */
};

/* What a pass keeps of y. */
enum { KEEP_NONE, KEEP_Y, KEEP_PART };

enum { TURNED = 1 }; /* a row has negative weights or lower bounds */

struct budget_space;
typedef void (*weighted_work)(const struct weighted *, int64_t, int, struct budget_space *);

struct budget_space {
    void *x, *z, *e, *w, *a, *own, *apiece;
    void *shared_w, *shared_a, *ones, *zeros; /* of all threads */
    double *wide;
    float *narrow;      /* logits, out and grad of the rows worked on, where those of the call are of half precision */
    weighted_work work; /* for these rows, as float */
    weighted_work search; /* for nu of these rows, where logarithms are wanted */
    int64_t width;
    int is_shared;
    struct shares shares;
    struct start start;
};

static void budget_again(struct budget *b) {
    b->nu = b->at = 0;
    b->lo = -INFINITY, b->hi = INFINITY;
    b->state = OPEN;
}

#define BUDGET_SLACK 1e-6 /* of the sum: a k out of reach by less is taken for the end, as sums of float32 differ by that */
#define BUDGET_SMALL 1e-290 /* a sum of w^2 h below it has no quotient */
#define BUDGET_FARTHEST 1e250 /* of scores: beyond that, as -1.8e308 is, a quotient by a weight would overflow */
#define BUDGET_FLAT 1e-3  /* tails below this part of the sum: they are balanced instead */

/* Whether there is nothing to search, with nu. */
static int budget_enter(struct budget *b, const struct shares *s, double k, int at_most, double *nu) {
    double c = (k - s->sure) / s->unit, rest = s->total - c, slack = BUDGET_SLACK * (s->total + fabs(k) / s->unit);
    *nu = NAN;
    if (s->wrong || k != k) return 1;
    if (at_most && k >= s->most) {
        *nu = 0;
        return 1;
    }
    if (!(c > 0 && rest > 0)) {
        *nu = fabs(c) <= slack ? -INFINITY : fabs(rest) > slack ? NAN : at_most ? 0 : INFINITY;
        return 1;
    }
    memset(b, 0, sizeof *b);
    b->c = c, b->rest = rest, b->total = s->total, b->w1 = s->w1, b->w2 = s->w2;
    b->few = c <= rest;
    b->goal = b->few ? c : rest;
    budget_again(b);
    return 0;
}

/* A guess of nu as if scores and weights were normal: the points z + w nu then have a mean and a variance, and
   `start_guess` has the mean that is wanted at that variance. All moments are means under the shares a. */
__attribute__((always_inline)) static inline double budget_guess(double logit, double log_p, double quantile, double z1,
                                                                 double z2, double zw, double w1, double w2) {
    double spread = z2 - z1 * z1, both = zw - z1 * w1, wide = w2 - w1 * w1, nu = 0, reach = 1e30;
    for (int i = 0; i < 4; i++) {
        double variance = i ? spread + nu * (2 * both + nu * wide) : spread;
        nu = (start_guess(logit, log_p, quantile, 0, variance, -reach, reach) - z1) / w1;
    }
    return nu;
}

/* The next step, of fourth order (Householder's) where all `three` derivatives are known: near the solution on the sum,
   as in lml, where Newton's step r is certain to be as good as it is short; else on the logarithm of the smaller side,
   of which `level` is the distance from the goal's, and which is nearly straight. */
__attribute__((always_inline)) static inline double budget_next(int few, int three, double r, double got, double level,
                                                                double s1, double s2, double s3) {
    double over = (few ? 1 : -1) / got, first = s1 * over, second = s2 * over - first * first;
    double third = s3 * over - first * (3 * second + first * first), t = level / first;
    double bend = 1 - t * second / (2 * first), turn = 2 * bend - 1 + t * t * third / (6 * first);
    double by_log = !(bend > 0.5) ? -t : three && turn > bend / 2 ? -t * bend / turn : -t / bend;
    double rho = s2 / s1, tau = s3 / s1;
    return r * r < 1e-3 ? -r * (1 - r * rho / 2) / (1 - r * rho + r * r * tau / 6) : by_log;
}

/* The second derivative after a step, from f and s1 there, by how much f rose, and s1 and s2 before: as if the fifth were 0,
   and after a short step the fourth or the third. s2 before was `summed`, or is itself of this kind. `unsure` is a bound on
   what is left out, or after longer steps the last term. */
__attribute__((always_inline)) static inline double budget_second(double step, double f, double s1, double rise,
                                                                  double s1_was, double s2_was, int summed,
                                                                  double *unsure) {
    double size = fabs(step), over = 1 / (size > 0 ? step : 1), slope = (s1 - s1_was) * over, first = slope - s2_was;
    double low = slope + first, more = 4 * first - 12 * ((rise * over - s1_was) * over - s2_was / 2);
    double by_sums = size > 0.3 ? low + more : size > 0.01 ? low : s2_was;
    double left = size > 0.3 ? fabs(more) : s1 * (size > 0.01 ? size * size / 6 : size);
    left = size * s1 > 2 * f ? s1 : left; /* long, as the weights that matter go */
    *unsure = summed ? left : s1 * (size > 1e-3 ? size : 1);
    return summed ? by_sums : size > 1e-3 ? slope : s2_was;
}

/* A step from the sums at nu. CLOSE if it ends the search, which only the `last` of several passes can do, by being
   `short_enough`; HARD if `digits` are missing: sum w h as a part of the goal. */
static void budget_step(struct budget *b, double short_enough, double eps, double digits, int last) {
    double f = b->few ? b->f - b->goal : b->goal - b->f, r = f / b->s1;
    if (!(b->s1 > 0) || !(b->f > 0) || !(fabs(r) < 1e300)) {
        b->state = HARD;
        return;
    }
    if (f < 0) b->lo = b->nu;
    if (f > 0) b->hi = b->nu;
    b->at = budget_next(b->few, b->s3 != 0, r, b->f, log(b->f / b->goal), b->s1, b->s2, b->s3);
    if (last && fabs(r) <= short_enough && r * r * b->unsure <= eps / 2 * b->s1) {
        b->state = b->s1 > digits * b->goal ? CLOSE : HARD;
        return;
    }
    if (!(b->nu + b->at >= b->lo && b->nu + b->at <= b->hi)) b->at = (b->lo + b->hi) / 2 - b->nu;
    if (!(fabs(b->at) < 1e300)) b->state = HARD;
}

/* A point between: halves the orders of magnitude of a wide bracket, else the bracket. */
static double budget_middle(double lo, double hi) {
    double by_order = sinh(asinh(lo * 1e3) / 2 + asinh(hi * 1e3) / 2) / 1e3;
    return by_order > lo && by_order < hi ? by_order : lo / 2 + hi / 2;
}
