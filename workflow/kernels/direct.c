/* Convolutions of few channels, and their gradients, without a matrix of columns: each is a sum over the places of the
 * kernel of runs of planes. */
#include "direct.h"

#define PLACES 9 /* places of the kernel at a time: as many sums as even AVX2 has registers for */

/* to = the sum of factors[i] from[i], added to what it holds with `add`; writes whole blocks. */
static void combine(float *to, int64_t length, const float *const *from, const float *factors, int64_t count, int add) {
    for (int64_t i = 0; i < length; i += BLOCK) {
        vec sums[4];
        UNROLL for (int v = 0; v < 4; v++) sums[v] = add ? load(to + i + v * W) : all(0);
        for (int64_t j = 0; j < count; j++)
            UNROLL for (int v = 0; v < 4; v++) sums[v] += all(factors[j]) * load(from[j] + i + v * W);
        UNROLL for (int v = 0; v < 4; v++) store(to + i + v * W, sums[v]);
    }
}

/* sums[i] += a run times from[i], for `count` <= PLACES; reads whole vectors. */
static void multiply(float *sums, const float *run, int64_t length, const float *const *from, int64_t count) {
    const float *read[PLACES];
    vec found[PLACES];
    UNROLL for (int j = 0; j < PLACES; j++) read[j] = from[j < count ? j : 0], found[j] = all(0);
    for (int64_t i = 0; i < length; i += W) {
        vec value = load(run + i);
        UNROLL for (int j = 0; j < PLACES; j++) found[j] += value * load(read[j] + i);
    }
    for (int64_t j = 0; j < count; j++) sums[j] += sum_of(found[j]);
}

static float *zeros(int64_t count) {
    float *memory = scratch(count);
    if (memory) memset(memory, 0, (size_t)count * sizeof(float));
    return memory;
}

int direct_convolution(const Windows *s, const Planes *p, const float *x, const float *w, const float *bias, float *y) {
    int64_t whole = p->planes * p->apart;
    float *planes = zeros(s->x_channels * whole + p->apart);
    if (!planes) return 0;
    float *run = planes + s->x_channels * whole;
    for (int64_t c = 0; c < s->x_channels; c++) deal(s, p, x + c * s->x_size, planes + c * whole);
    for (int64_t m = 0; m < s->y_channels; m++) {
        for (int64_t i = 0; i < p->apart; i++) run[i] = bias ? bias[m] : 0;
        for (int64_t c = 0; c < s->x_channels; c++)
            for (int64_t k = 0; k < s->offsets; k += PLACES) {
                const float *from[PLACES];
                int64_t count = least(PLACES, s->offsets - k);
                for (int64_t j = 0; j < count; j++) from[j] = planes + c * whole + p->begin[k + j];
                combine(run, p->run, from, w + (m * s->x_channels + c) * s->offsets + k, count, 1);
            }
        shrink(s, p, y + m * s->y_size, run);
    }
    return 1;
}

int direct_data_gradient(const Windows *s, const Planes *p, const float *y, const float *w, float *x) {
    int64_t whole = p->planes * p->apart, wide = p->margin + p->apart;
    float *planes = zeros(whole + s->y_channels * wide);
    if (!planes) return 0;
    float *runs = planes + whole;
    for (int64_t m = 0; m < s->y_channels; m++)
        stretch(s, p, y + m * s->y_size, runs + m * wide + p->margin);
    memset(x, 0, (size_t)(s->x_channels * s->x_size) * sizeof(float));
    for (int64_t c = 0; c < s->x_channels; c++) {
        for (int64_t plane = 0; plane < p->planes; plane++) {
            const float *from[PLACES];
            float factors[PLACES];
            int64_t count = 0, begun = 0;
            for (int64_t i = 0; i < s->y_channels * s->offsets; i++) {
                int64_t m = i / s->offsets, k = i % s->offsets;
                if (p->plane[k] == plane) {
                    from[count] = runs + m * wide + p->margin - p->shift[k];
                    factors[count++] = w[(m * s->x_channels + c) * s->offsets + k];
                }
                if (count == PLACES || i + 1 == s->y_channels * s->offsets) {
                    combine(planes + plane * p->apart, p->size, from, factors, count, begun);
                    count = 0, begun = 1;
                }
            }
        }
        collect(s, p, x + c * s->x_size, planes);
    }
    return 1;
}

int direct_weight_gradient(const Windows *s, const Planes *p, const float *x, const float *y, float *w) {
    int64_t whole = p->planes * p->apart;
    float *planes = zeros(whole + s->y_channels * p->apart);
    if (!planes) return 0;
    float *runs = planes + whole;
    for (int64_t m = 0; m < s->y_channels; m++) stretch(s, p, y + m * s->y_size, runs + m * p->apart);
    for (int64_t c = 0; c < s->x_channels; c++) {
        deal(s, p, x + c * s->x_size, planes);
        for (int64_t k = 0; k < s->offsets; k += PLACES) {
            const float *from[PLACES];
            int64_t count = least(PLACES, s->offsets - k);
            for (int64_t j = 0; j < count; j++) from[j] = planes + p->begin[k + j];
            for (int64_t m = 0; m < s->y_channels; m++)
                multiply(w + (m * s->x_channels + c) * s->offsets + k, runs + m * p->apart, p->run, from, count);
        }
    }
    return 1;
}
