/* What every file of kernels needs of targets. */
#ifndef LASTLAYER_TARGETS_H
#define LASTLAYER_TARGETS_H

#include <stdint.h>

/* The number types of a dense target. */
enum { DENSE_F32, DENSE_F64, DENSE_I8, DENSE_U8, DENSE_I16, DENSE_I32, DENSE_I64 };

#endif
