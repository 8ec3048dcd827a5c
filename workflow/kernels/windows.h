/* Windows of up to three axes that slide over images: convolutions and pooling. */
#ifndef ORTFLOW_WINDOWS_H
#define ORTFLOW_WINDOWS_H

#include "node.h"

#define AXES 3

/* x: data, y: output; each spatial axis of the data is read at place * stride + offset * dilation - pad. */
typedef struct {
    int64_t images, groups, x_channels, y_channels; /* channels are those of a group */
    int64_t x[AXES], y[AXES], kernel[AXES], stride[AXES], pad[AXES], dilation[AXES];
    int64_t x_size, y_size, offsets; /* places of an image of each, and of the kernel */
} Windows;

static inline int64_t product(const int64_t *dims) { return dims[0] * dims[1] * dims[2]; }

/* `geometry` is: groups, then kernel, strides, pads before, dilations of each spatial axis; `y_dims` are the output's.
 * 0 where they do not fit each other. */
int read_windows(const Tensor *geometry, const int64_t *x_dims, const int64_t *y_dims, size_t rank, Windows *out);

#endif
