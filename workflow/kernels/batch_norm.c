/* Normalisation of each channel over batch and pixels (Ioffe and Szegedy 2015), and its gradient.
 *
 * With n = (x - mean) * inverse, means over batch and pixels: y = n * scale + bias, dscale = sum of dy * n, dbias = sum
 * of dy, dx = (dy - mean(dy) - n * mean(dy * n)) * scale * inverse. A task has a channel, so that its sums need nobody. */
#include <math.h>

#include "channels.h"
#include "node.h"

typedef struct {
    int64_t images, channels, pixels;
    float epsilon;
    const float *x, *scale, *bias, *dy, *mean_in, *inverse_in;
    float *y, *mean, *variance, *dx, *dscale, *dbias;
} Norm;

/* The sum over batch and pixels of (x - shift) or of its square. A row's sum is single, the sum of rows double. */
static inline double sum_over(const Norm *s, int64_t channel, float shift, int squared) {
    double total = 0;
    for (int64_t image = 0; image < s->images; image++)
        total += sum_of_row(s->x + (image * s->channels + channel) * s->pixels, s->pixels, shift, squared);
    return total;
}

static void forward_task(void *argument, size_t index) {
    const Norm *s = argument;
    int64_t channel = (int64_t)index, pixels = s->pixels;
    double count = (double)(s->images * pixels);
    /* From the first value on, so that a mean far from 0 takes nothing from the digits. */
    float first = s->x[channel * pixels];
    float mean = (float)(first + sum_over(s, channel, first, 0) / count);
    float variance = (float)(sum_over(s, channel, mean, 1) / count);
    float slope = s->scale[channel] / sqrtf(variance + s->epsilon), bias = s->bias[channel];
    for (int64_t image = 0; image < s->images; image++) {
        int64_t begin = (image * s->channels + channel) * pixels;
        normalise_row(s->x + begin, pixels, mean, slope, bias, s->y + begin);
    }
    s->mean[channel] = mean;
    s->variance[channel] = variance;
}

static void backward_task(void *argument, size_t index) {
    const Norm *s = argument;
    int64_t channel = (int64_t)index, pixels = s->pixels, whole = pixels / W * W;
    double count = (double)(s->images * pixels), across = 0, along = 0;
    float mean = s->mean_in[channel], inverse = s->inverse_in[channel];
    for (int64_t image = 0; image < s->images; image++) {
        int64_t begin = (image * s->channels + channel) * pixels;
        add_gradient_sums(s->dy + begin, s->x + begin, pixels, mean, &across, &along);
    }
    float slope = s->scale[channel] * inverse, offset = (float)(across / count);
    float tilt = (float)(along * inverse * inverse / count);
    for (int64_t image = 0; image < s->images; image++) {
        int64_t begin = (image * s->channels + channel) * pixels;
        const float *x = s->x + begin, *dy = s->dy + begin;
        float *dx = s->dx + begin;
        for (int64_t i = 0; i < whole; i += W) {
            vec rest = load(dy + i) - all(offset) - (load(x + i) - all(mean)) * all(tilt);
            store(dx + i, rest * all(slope));
        }
        for (int64_t i = whole; i < pixels; i++) dx[i] = (dy[i] - offset - (x[i] - mean) * tilt) * slope;
    }
    s->dscale[channel] = (float)(along * inverse);
    s->dbias[channel] = (float)across;
}

static int read_sizes(const Tensor *x, Norm *s) {
    if (x->rank < 2) return 0;
    s->images = x->dims[0], s->channels = x->dims[1], s->pixels = 1;
    for (size_t i = 2; i < x->rank; i++) s->pixels *= x->dims[i];
    return s->images > 0 && s->pixels > 0;
}

/* data, scale, bias -> normalised, mean and variance of the batch */
static Status *run_forward(Call *call) {
    Tensor x, scale, bias;
    TRY(read_input(call, 0, &x));
    TRY(read_input(call, 1, &scale));
    TRY(read_input(call, 2, &bias));
    Norm s = {.x = x.data, .scale = scale.data, .bias = bias.data, .epsilon = call->floats[0]};
    if (!read_sizes(&x, &s) || elements(&scale) != s.channels || elements(&bias) != s.channels)
        return refuse(call, "a batch of images, and a scale and a bias for each channel, are needed");
    TRY(make_output(call, 0, x.dims, x.rank, &s.y));
    TRY(make_output(call, 1, &s.channels, 1, &s.mean));
    TRY(make_output(call, 2, &s.channels, 1, &s.variance));
    parallel(call, forward_task, s.channels, &s);
    return NULL;
}

/* gradient, data, scale, mean, inverse -> of data, scale and bias */
static Status *run_backward(Call *call) {
    Tensor dy, x, vectors[3];
    TRY(read_input(call, 0, &dy));
    TRY(read_input(call, 1, &x));
    Norm s = {.dy = dy.data, .x = x.data};
    int fits = read_sizes(&x, &s) && elements(&dy) == elements(&x);
    for (size_t i = 0; i < 3; i++) {
        TRY(read_input(call, 2 + i, &vectors[i]));
        fits = fits && elements(&vectors[i]) == s.channels;
    }
    if (!fits) return refuse(call, "gradient, images, and three values for each channel are needed");
    s.scale = vectors[0].data, s.mean_in = vectors[1].data, s.inverse_in = vectors[2].data;
    TRY(make_output(call, 0, x.dims, x.rank, &s.dx));
    TRY(make_output(call, 1, &s.channels, 1, &s.dscale));
    TRY(make_output(call, 2, &s.channels, 1, &s.dbias));
    parallel(call, backward_task, s.channels, &s);
    return NULL;
}

Node batch_norm_node = {.name = "BatchNormalization", .inputs = 3, .needed = 3, .outputs = 3, .floats = {"epsilon"},
                        .run = run_forward};
Node batch_norm_gradient_node = {
    .name = "BatchNormalizationGrad", .inputs = 5, .needed = 5, .outputs = 3, .run = run_backward};
