/* Includes EACH_SET once per instruction set, with ISA, TARGET and VECTOR (bytes) defined for it. */

#define ISA baseline
#define TARGET
#define VECTOR 16
#include EACH_SET
#undef ISA
#undef TARGET
#undef VECTOR

#if defined(__x86_64__) && defined(__GNUC__)
#define DISPATCH 1

#define ISA avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define VECTOR 32
#include EACH_SET
#undef ISA
#undef TARGET
#undef VECTOR

#define ISA avx512
#ifdef __clang__
#define TARGET __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,fma"), min_vector_width(512)))
#else
#define TARGET __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,fma,prefer-vector-width=512")))
#endif
#define VECTOR 64
#include EACH_SET
#undef ISA
#undef TARGET
#undef VECTOR
#else
#define DISPATCH 0
#endif
