/* C = alpha op(A) op(B) (+ bias), fp32. */
#ifndef ORTFLOW_GEMM_H
#define ORTFLOW_GEMM_H

#include "node.h"

/* Element (i, p) of op(A) lies at a[i * row_a + p * column_a], likewise B of (p, j); where neither of the two strides is
 * 1, packing is slow. C is m x n, its rows `row_c` apart and its columns beside each other. `bias` has n elements and
 * `start`, which is added to rows, has m; one of them or both are NULL. With `add`, the product is added to what C
 * holds, and there is neither.
 *
 * Tables say where elements lie that strides do not reach, or are NULL: A's are then at a[i * row_a + depths[p]], B's at
 * b[rows[p] + columns[j]], both tables or none, and C's at c[i * row_c + places[j]], where `places` ascends. */
typedef struct {
    int64_t m, n, k;
    float alpha;
    const float *a, *b, *bias, *start;
    float *c;
    int64_t row_a, column_a, row_b, column_b, row_c;
    int add;
    const int32_t *depths, *rows, *columns, *places;
} Gemm;

/* One product by all threads of the session; 0 when memory runs out. */
int gemm_shared(const Call *call, const Gemm *gemm);
/* The same with memory of at least `gemm_room` floats, which suffices for a smaller n, too. */
void gemm_shared_in(const Call *call, const Gemm *gemm, float *room);
int64_t gemm_room(const Gemm *gemm);
/* One product by this thread alone. */
void gemm_alone(const Gemm *gemm);

#endif
