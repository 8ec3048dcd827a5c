/* Squares of floats transposed in registers. */
#ifndef ORTFLOW_TRANSPOSE_H
#define ORTFLOW_TRANSPOSE_H

#include "vector.h"

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t iedge __attribute__((vector_size(4 * EDGE)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (iedge){__VA_ARGS__})
#endif

/* to[j * columns_apart + i] = from[i * rows_apart + j] for i, j < EDGE; j ascends, so that columns may overlap. */
#if EDGE == 4
static inline void transpose(const float *from, int64_t rows_apart, float *to, int64_t columns_apart) {
    edge r[4], s[4];
    UNROLL for (int i = 0; i < 4; i++) r[i] = load_edge(from + i * rows_apart);
    UNROLL for (int i = 0; i < 2; i++) {
        s[i] = SHUFFLE(r[i], r[i + 2], 0, 4, 1, 5);
        s[i + 2] = SHUFFLE(r[i], r[i + 2], 2, 6, 3, 7);
    }
    UNROLL for (int i = 0; i < 4; i += 2) {
        store_edge(to + i * columns_apart, SHUFFLE(s[i], s[i + 1], 0, 4, 1, 5));
        store_edge(to + (i + 1) * columns_apart, SHUFFLE(s[i], s[i + 1], 2, 6, 3, 7));
    }
}
#else
static inline void transpose(const float *from, int64_t rows_apart, float *to, int64_t columns_apart) {
    edge r[8], s[8], t[8];
    UNROLL for (int i = 0; i < 8; i++) r[i] = load_edge(from + i * rows_apart);
    UNROLL for (int i = 0; i < 8; i += 2) {
        s[i] = SHUFFLE(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        s[i + 1] = SHUFFLE(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    UNROLL for (int i = 0; i < 8; i += 4) {
        t[i] = SHUFFLE(s[i], s[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        t[i + 1] = SHUFFLE(s[i], s[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        t[i + 2] = SHUFFLE(s[i + 1], s[i + 3], 0, 1, 8, 9, 4, 5, 12, 13);
        t[i + 3] = SHUFFLE(s[i + 1], s[i + 3], 2, 3, 10, 11, 6, 7, 14, 15);
    }
    UNROLL for (int i = 0; i < 4; i++)
        store_edge(to + i * columns_apart, SHUFFLE(t[i], t[i + 4], 0, 1, 2, 3, 8, 9, 10, 11));
    UNROLL for (int i = 0; i < 4; i++)
        store_edge(to + (i + 4) * columns_apart, SHUFFLE(t[i], t[i + 4], 4, 5, 6, 7, 12, 13, 14, 15));
}
#endif

#endif
