/* What every file of kernels needs of targets and order statistics. */
#ifndef LASTLAYER_SELECT_H
#define LASTLAYER_SELECT_H

#include <math.h>
#include <stdint.h>

/* The number types of a dense target. */
enum { DENSE_F32, DENSE_F64, DENSE_I8, DENSE_U8, DENSE_I16, DENSE_I32, DENSE_I64 };

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

#endif
