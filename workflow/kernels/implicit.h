/* Convolutions and their weight gradients as matrix products whose matrix of columns (im2col) is never written: what
 * packs a factor finds its elements by tables, in images that lie padded in a small memory. */
#ifndef ORTFLOW_IMPLICIT_H
#define ORTFLOW_IMPLICIT_H

#include "windows.h"

/* One group's convolution y = w x (+ bias). Images of x and y lie `x_apart` and `y_apart` from each other, channels of x
 * beside each other. Of the weight, the element of output channel m, channel c and place k of the kernel lies at
 * w[m * w_row + c * w_channel + taps[k]]. The output of place (d, h, w) lies at d, h and w times `steps`, of channel m
 * `y_row` times m further. */
typedef struct {
    Windows s;
    const float *x, *w, *bias;
    float *y;
    int64_t x_apart, y_apart, w_row, w_channel, y_row;
    int64_t steps[AXES];
    const int32_t *taps; /* NULL: places beside each other, channels behind each other */
} Convolution;

/* By all threads of the session, or with NULL by this thread alone; 0 when memory runs out. */
int convolve(const Call *call, const Convolution *convolution);

/* One group's gradient of its weight, [y channel][x channel][place], summed over the images of `s`. */
typedef struct {
    Windows s;
    const float *x, *y; /* data; the output's gradient */
    float *w;
    int64_t x_apart, y_apart, y_row;
    int add; /* to what w holds */
} WeightGradient;

int weight_gradient(const Call *call, const WeightGradient *gradient);

/* 0 where a single image is too large for the tables. */
int fits_tables(const Windows *s);

#endif
