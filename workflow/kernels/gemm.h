/* C = alpha op(A) op(B) (+ bias), fp32. */
#ifndef ORTFLOW_GEMM_H
#define ORTFLOW_GEMM_H

#include "node.h"

/* Element (i, p) of op(A) lies at a[i * row_a + p * column_a], likewise B of (p, j); where neither of the two strides is
 * 1, packing is slow. C is m x n, its rows `row_c` apart and its columns beside each other. `bias` has n elements, or is
 * NULL. With `add`, the product is added to what C holds, and there is no bias. */
typedef struct {
    int64_t m, n, k;
    float alpha;
    const float *a, *b, *bias;
    float *c;
    int64_t row_a, column_a, row_b, column_b, row_c;
    int add;
} Gemm;

/* One product by all threads of the session; 0 when memory runs out. */
int gemm_shared(const Call *call, const Gemm *gemm);
/* One product by this thread alone. */
void gemm_alone(const Gemm *gemm);

#endif
