/* What is written once for both types, with their constants; lml.c and fused.c set the instruction set. double comes
   first: the hard search of float rows is its. */

#define TYPE f64
#define REAL double
#define BITS uint64_t
#define SIGNED int64_t
#define REAL_BYTES 8
#define R(x) x
#define LANES (VECTOR / REAL_BYTES)
#define EPS DBL_EPSILON
#define LARGEST DBL_MAX
#define INFINITE ((double)INFINITY)
#define ABS __builtin_fabs
#define SMALLEST_SUM 1e-200
#define LOG_SMALLEST -460.0
#define BUDGET_DIGITS 1e-6
#define SHORT 1.5e-4     /* the longest last step of a search with weights */
#define LAST_STEP 1.3e-4 /* the longest of Newton's that is followed by it: three derivatives are known, or in float two */
#define EXP_HIGH 600.0
#define EXP_CEILING 3.77e260 /* a little less than exp(EXP_HIGH): no class, or one that cannot matter */
#define EXP_LOW -708.0
#define ROUNDER 6755399441055744.0
#define MANTISSA 52
#define HALF_EXPONENT 1022 /* the exponent of 1/2 in the bits of a number */
#define MANTISSA_MASK 0xfffffffffffffLL
#define LN2_HIGH 6.93145751953125e-1
#define LN2_LOW 1.42860682030941723212e-6
#define LOG_RATIO(x) NAME(log_ratio)(x)
#define WITH_HARD

/* Taylor's, on |r| <= log(2) / 2. */
#define EXP_POLYNOMIAL(r)                                                                                    \
    (((((((((((((1.0 / 6227020800 * r + 1.0 / 479001600) * r + 1.0 / 39916800) * r + 1.0 / 3628800)          \
      * r + 1.0 / 362880) * r + 1.0 / 40320) * r + 1.0 / 5040) * r + 1.0 / 720) * r + 1.0 / 120)             \
      * r + 1.0 / 24) * r + 1.0 / 6) * r + 0.5) * r + 1.0) * r + 1.0)

/* (log(1 + x) - x + x^2 / 2) / x^3, on sqrt(1/2) - 1 <= x <= sqrt(2) - 1 (Cephes, S. Moshier). */
__attribute__((always_inline)) TARGET static inline double NAME(log_ratio)(double x) {
    double p = 1.01875663804580931796e-4, q = x + 1.12873587189167450590e1;
    p = p * x + 4.97494994976747001425e-1;
    p = p * x + 4.70579119878881725854;
    p = p * x + 1.44989225341610930846e1;
    p = p * x + 1.79368678507819816313e1;
    p = p * x + 7.70838733755885391666;
    q = q * x + 4.52279145837532221105e1;
    q = q * x + 8.29875266912776603211e1;
    q = q * x + 7.11544750618563894466e1;
    q = q * x + 2.31251620126765340583e1;
    return p / q;
}

/* The exponent in the bits of a number, as a number: without a conversion from 64 bits, which few processors have. */
__attribute__((always_inline)) TARGET static inline double NAME(exponent)(uint64_t bits) {
    int64_t shifted = ((int64_t)bits >> 52) + 0x4338000000000000LL;
    double value;
    __builtin_memcpy(&value, &shifted, sizeof value);
    return value - ROUNDER;
}

#include "lml_math.h"
#ifndef FUSED
#include "lml_rows.h"
#include "lml_tile.h"
#include "weighted_rows.h"
#include "weighted_after.h"
#include "weighted_band.h"
#include "grouped.h"
#endif

#undef TYPE
#undef REAL
#undef BITS
#undef SIGNED
#undef REAL_BYTES
#undef R
#undef LANES
#undef EPS
#undef LARGEST
#undef INFINITE
#undef SMALLEST_SUM
#undef LOG_SMALLEST
#undef BUDGET_DIGITS
#undef SHORT
#undef LAST_STEP
#undef ABS
#undef EXP_HIGH
#undef EXP_CEILING
#undef EXP_LOW
#undef ROUNDER
#undef MANTISSA
#undef HALF_EXPONENT
#undef MANTISSA_MASK
#undef LN2_HIGH
#undef LN2_LOW
#undef WITH_HARD
#undef EXP_POLYNOMIAL

#define TYPE f32
#define REAL float
#define BITS uint32_t
#define SIGNED int32_t
#define REAL_BYTES 4
#define R(x) x##f
#define LANES (VECTOR / REAL_BYTES)
#define EPS FLT_EPSILON
#define LARGEST FLT_MAX
#define INFINITE INFINITY
#define ABS __builtin_fabsf
#define SMALLEST_SUM 1e-20
#define LOG_SMALLEST -46.0
#define BUDGET_DIGITS 0.03
#define SHORT 0.0055
#define LAST_STEP 0.005
#define EXP_HIGH 80.0f
#define EXP_CEILING 5.54e34f
#define EXP_LOW -87.0f
#define ROUNDER 12582912.0f
#define MANTISSA 23
#define HALF_EXPONENT 126
#define MANTISSA_MASK 0x7fffff
#define LN2_HIGH 0.693359375f
#define LN2_LOW -2.12194440e-4f

/* Minimax on |r| <= log(2) / 2, to 3e-9. */
#define EXP_POLYNOMIAL(r)                                                                                    \
    ((((((1.381454e-3f * r + 8.36874545e-3f) * r + 4.1668389e-2f) * r + 1.66665211e-1f) * r + 4.9999994e-1f) \
      * r + 1.0f) * r + 1.0f)

/* From Cephes (S. Moshier). */
__attribute__((always_inline)) TARGET static inline float NAME(log_ratio)(float x) {
    float p = 7.0376836292e-2f;
    p = p * x - 1.1514610310e-1f;
    p = p * x + 1.1676998740e-1f;
    p = p * x - 1.2420140846e-1f;
    p = p * x + 1.4249322787e-1f;
    p = p * x - 1.6668057665e-1f;
    p = p * x + 2.0000714765e-1f;
    p = p * x - 2.4999993993e-1f;
    return p * x + 3.3333331174e-1f;
}

__attribute__((always_inline)) TARGET static inline float NAME(exponent)(uint32_t bits) {
    return (float)((int32_t)bits >> 23);
}

#include "lml_math.h"
#ifdef FUSED
#include "fused_rows.h"
#else
#include "lml_rows.h"
#include "lml_tile.h"
#include "weighted_rows.h"
#include "weighted_after.h"
#include "weighted_band.h"
#endif

#undef TYPE
#undef REAL
#undef BITS
#undef SIGNED
#undef REAL_BYTES
#undef R
#undef LANES
#undef EPS
#undef LARGEST
#undef INFINITE
#undef SMALLEST_SUM
#undef LOG_SMALLEST
#undef BUDGET_DIGITS
#undef SHORT
#undef LAST_STEP
#undef ABS
#undef EXP_HIGH
#undef EXP_CEILING
#undef EXP_LOW
#undef ROUNDER
#undef MANTISSA
#undef HALF_EXPONENT
#undef MANTISSA_MASK
#undef LN2_HIGH
#undef LN2_LOW
#undef EXP_POLYNOMIAL
#undef LOG_RATIO
