/* Vectors of W floats in the compiler's own notation: AVX-512, AVX2 with FMA, or NEON. */
#ifndef ORTFLOW_VECTOR_H
#define ORTFLOW_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define W 16
#elif defined(__AVX2__) && defined(__FMA__)
#define W 8
#elif defined(__aarch64__)
#define W 4
#else
#error "needs AVX-512, AVX2 with FMA, or 64-bit ARM"
#endif
/* Floats of a row of the squares that are transposed in registers. */
#define EDGE (W < 8 ? W : 8)

typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef float edge __attribute__((vector_size(4 * EDGE)));
typedef float unaligned __attribute__((vector_size(4 * W), aligned(4)));
typedef float unaligned_edge __attribute__((vector_size(4 * EDGE), aligned(4)));

#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))

static inline vec load(const float *p) { return *(const unaligned *)p; }
static inline void store(float *p, vec x) { *(unaligned *)p = x; }
static inline edge load_edge(const float *p) { return *(const unaligned_edge *)p; }
static inline void store_edge(float *p, edge x) { *(unaligned_edge *)p = x; }
static inline vec all(float x) { return x - (vec){0}; }
static inline vec choose(ivec where, vec yes, vec no) { return (vec)(((ivec)yes & where) | ((ivec)no & ~where)); }
static inline vec least_of(vec a, vec b) { return choose(a > b, b, a); }
static inline vec larger(vec a, vec b) { return choose(a > b, a, b); }

/* The first `count` floats, the others `rest`. */
static inline vec load_some(const float *p, int64_t count, float rest) {
    float lanes[W];
    for (int i = 0; i < W; i++) lanes[i] = i < count ? p[i] : rest;
    return load(lanes);
}

static inline void store_some(float *p, vec x, int64_t count) {
    float lanes[W];
    store(lanes, x);
    memcpy(p, lanes, (size_t)count * sizeof(float));
}

/* The floats from p[i] on, but none from p[end] on; 0 in the place of those. */
static inline vec load_until(const float *p, int64_t i, int64_t end) {
    return end - i >= W ? load(p + i) : load_some(p + i, end - i, 0);
}

static inline void store_until(float *p, int64_t i, int64_t end, vec x) {
    if (end - i >= W)
        store(p + i, x);
    else
        store_some(p + i, x, end - i);
}

static inline float sum_of(vec x) {
    float lanes[W];
    store(lanes, x);
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

static inline vec root_of(vec x) {
    float lanes[W];
    store(lanes, x);
    UNROLL for (int i = 0; i < W; i++) lanes[i] = sqrtf(lanes[i]);
    return load(lanes);
}

static inline float largest_of(vec x) {
    float lanes[W];
    store(lanes, x);
    float most = lanes[0];
    for (int i = 1; i < W; i++) most = lanes[i] > most || lanes[i] != lanes[i] ? lanes[i] : most;
    return most;
}

/* e^x for x <= 88 to 2 ulp: 2^n e^r with |r| <= ln(2) / 2 and a polynomial fitted to the relative error of e^r.
 * 0 below the smallest normal number; NaN stays NaN, whatever n is then. */
static inline vec exp_to_88(vec x) {
    const float to_integer = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    vec n = (x * all(1.44269504f) + all(to_integer)) - all(to_integer);
    vec r = x - n * all(0.693359375f) - n * all(-2.12194440e-4f);
    vec p = all(0.0013836842f);
    p = p * r + all(0.0083748158f);
    p = p * r + all(0.041668225f);
    p = p * r + all(0.16666420f);
    p = p * r + all(0.49999991f);
    p = p * r + all(1.0f);
    p = p * r + all(1.0f);
    return choose(x < all(-87.3f), all(0), p * (vec)((__builtin_convertvector(n, ivec) + 127) << 23));
}

#endif
