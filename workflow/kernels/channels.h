/* Sums over a channel's values, for the norms that have a scale and a bias for each channel. */
#ifndef ORTFLOW_CHANNELS_H
#define ORTFLOW_CHANNELS_H

#include "vector.h"

/* The sum of x - shift over `count` values, or of its square, in single precision. */
static inline double sum_of_row(const float *x, int64_t count, float shift, int squared) {
    int64_t whole = count / (4 * W) * (4 * W), i = 0;
    vec sums[4] = {{0}};
    for (; i < whole; i += 4 * W)
        UNROLL for (int v = 0; v < 4; v++) {
            vec d = load(x + i + v * W) - all(shift);
            sums[v] += squared ? d * d : d;
        }
    for (; i < count; i += W) {
        vec d = (i + W <= count ? load(x + i) : load_some(x + i, count - i, shift)) - all(shift);
        sums[0] += squared ? d * d : d;
    }
    return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

/* Adds the sums of dy and of dy * (x - mean) over `count` values. */
static inline void add_gradient_sums(const float *dy, const float *x, int64_t count, float mean, double *across,
                                     double *along) {
    vec sums = all(0), products = all(0), more = all(0), others = all(0);
    int64_t i = 0;
    for (; i + 2 * W <= count; i += 2 * W) {
        vec a = load(dy + i), b = load(dy + i + W);
        sums += a, more += b;
        products += a * (load(x + i) - all(mean)), others += b * (load(x + i + W) - all(mean));
    }
    for (; i + W <= count; i += W) {
        vec a = load(dy + i);
        sums += a, products += a * (load(x + i) - all(mean));
    }
    if (i < count) {
        vec a = load_some(dy + i, count - i, 0);
        sums += a, products += a * (load_some(x + i, count - i, mean) - all(mean));
    }
    *across += sum_of(sums + more), *along += sum_of(products + others);
}

/* y = (x - mean) * slope + bias */
static inline void normalise_row(const float *x, int64_t count, float mean, float slope, float bias, float *y) {
    int64_t i = 0;
    for (; i + W <= count; i += W) store(y + i, (load(x + i) - all(mean)) * all(slope) + all(bias));
    for (; i < count; i++) y[i] = (x[i] - mean) * slope + bias;
}

#endif
