/* Convolutions of few channels: see direct.c. */
#ifndef ORTFLOW_DIRECT_H
#define ORTFLOW_DIRECT_H

#include "planes.h"

/* One image of one group, for groups of so few channels that a matrix product would be mostly padding. `w` is the
 * group's weight, [y_channels, x_channels, offsets]. Each returns 0 when memory runs out. */
int direct_convolution(const Windows *s, const Planes *p, const float *x, const float *w, const float *bias, float *y);
int direct_data_gradient(const Windows *s, const Planes *p, const float *y, const float *w, float *x);
/* Adds to `w`. */
int direct_weight_gradient(const Windows *s, const Planes *p, const float *x, const float *y, float *w);

#endif
