/* linear_block.h for both types, with their constants; linear.c sets the instruction set. */

#define TYPE f64
#define REAL double
#define SIGNED int64_t
#define LANES 8
#define EXP_LIMIT 700.0
#define ROUNDER 6755399441055744.0
#define MANTISSA 52
#define LN2_HIGH 6.93145751953125e-1
#define LN2_LOW 1.42860682030941723212e-6
/* Taylor's, on |r| <= log(2) / 2. */
#define EXP_POLYNOMIAL(r)                                                                                    \
    (((((((((((((1.0 / 6227020800 * r + 1.0 / 479001600) * r + 1.0 / 39916800) * r + 1.0 / 3628800)          \
      * r + 1.0 / 362880) * r + 1.0 / 40320) * r + 1.0 / 5040) * r + 1.0 / 720) * r + 1.0 / 120)             \
      * r + 1.0 / 24) * r + 1.0 / 6) * r + 0.5) * r + 1.0) * r + 1.0)

#include "linear_block.h"

#undef TYPE
#undef REAL
#undef SIGNED
#undef LANES
#undef EXP_LIMIT
#undef ROUNDER
#undef MANTISSA
#undef LN2_HIGH
#undef LN2_LOW
#undef EXP_POLYNOMIAL

#define TYPE f32
#define REAL float
#define SIGNED int32_t
#define LANES 16
#define EXP_LIMIT 80.0f
#define ROUNDER 12582912.0f
#define MANTISSA 23
#define LN2_HIGH 0.693359375f
#define LN2_LOW -2.12194440e-4f
/* Minimax on |r| <= log(2) / 2, to 3e-9. */
#define EXP_POLYNOMIAL(r)                                                                                    \
    ((((((1.381454e-3f * r + 8.36874545e-3f) * r + 4.1668389e-2f) * r + 1.66665211e-1f) * r + 4.9999994e-1f) \
      * r + 1.0f) * r + 1.0f)

#include "linear_block.h"

#undef TYPE
#undef REAL
#undef SIGNED
#undef LANES
#undef EXP_LIMIT
#undef ROUNDER
#undef MANTISSA
#undef LN2_HIGH
#undef LN2_LOW
#undef EXP_POLYNOMIAL
