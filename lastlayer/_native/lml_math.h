/* Exponentials and logarithms of one number, in the arithmetic that vectors have; included once for each type and
   instruction set. */

#define INLINE __attribute__((always_inline)) TARGET static inline

INLINE REAL NAME(from_bits)(BITS i) {
    REAL f;
    __builtin_memcpy(&f, &i, sizeof f);
    return f;
}

INLINE BITS NAME(to_bits)(REAL f) {
    BITS i;
    __builtin_memcpy(&i, &f, sizeof i);
    return i;
}

/* exp to about one unit in the last place, for low <= x <= high and as at these ends beyond. */
INLINE REAL NAME(exp)(REAL x, REAL low, REAL high) {
    x = x > high ? high : x;
    x = x < low ? low : x;
    REAL shifted = x * R(1.44269504088896340736) + ROUNDER;
    REAL m = shifted - ROUNDER;
    REAL r = (x - m * LN2_HIGH) - m * LN2_LOW;
    return NAME(from_bits)(NAME(to_bits)(EXP_POLYNOMIAL(r)) + (NAME(to_bits)(shifted) << MANTISSA));
}

/* log(u + low), for 0 < u <= 2 and |low| at most half an ulp of u. What low adds is low / u, of which the first terms
   about u = 1 do: elsewhere it is lost in log u. */
INLINE REAL NAME(log)(REAL u, REAL low) {
    BITS bits = NAME(to_bits)(u) - NAME(to_bits)(R(0.70710678118654752440));
    REAL e = NAME(exponent)(bits);
    REAL m = NAME(from_bits)((bits & MANTISSA_MASK) + NAME(to_bits)(R(0.70710678118654752440)));
    REAL x = m - R(1.0), z = x * x;
    REAL y = x * z * LOG_RATIO(x);
    y = y - e * R(2.121944400546905827679e-4) + low * (R(1.5) - R(0.5) * u);
    y = y - R(0.5) * z;
    return (x + y) + e * R(0.693359375);
}

INLINE REAL NAME(log1p)(REAL a) {
    REAL u = R(1.0) + a;
    return NAME(log)(u, a - (u - R(1.0)));
}

INLINE REAL NAME(abs)(REAL x) { return ABS(x); }

INLINE int NAME(finite)(REAL x) { return NAME(abs)(x) <= LARGEST; }

#undef INLINE
