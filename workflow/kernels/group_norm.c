/* Normalisation of each group of channels of an image (Wu and He 2018), of each channel where there are as many groups
 * (instance normalisation, Ulyanov, Vedaldi and Lempitsky 2016), and its gradient.
 *
 * With n = (x - mean) * inverse and g = dy * scale, means over a group's values: y = n * scale + bias, dscale = sum of
 * dy * n, dbias = sum of dy, dx = (g - mean(g) - n * mean(g * n)) * inverse. A task has a group of an image. */
#include <math.h>

#include "channels.h"
#include "rows.h"

#define RUN 4096 /* values added in single precision; the sums of runs are added in double */

typedef struct {
    int64_t images, channels, pixels, groups;
    float epsilon;
    const float *x, *scale, *bias, *dy, *mean_in, *inverse_in;
    float *y, *mean, *inverse, *dx, *parts; /* parts: of each image, dscale and dbias */
} Norm;

static double sum_over(const float *x, int64_t count, float shift, int squared) {
    double total = 0;
    for (int64_t i = 0; i < count; i += RUN) total += sum_of_row(x + i, least(RUN, count - i), shift, squared);
    return total;
}

static void forward_task(void *argument, size_t index) {
    const Norm *s = argument;
    int64_t width = s->channels / s->groups, count = width * s->pixels, first = (int64_t)index % s->groups * width;
    const float *x = s->x + (int64_t)index * count;
    float *y = s->y + (int64_t)index * count;
    /* From the first value on, so that a mean far from 0 takes nothing from the digits. */
    float mean = (float)(x[0] + sum_over(x, count, x[0], 0) / (double)count);
    float variance = (float)(sum_over(x, count, mean, 1) / (double)count), inverse = 1 / sqrtf(variance + s->epsilon);
    for (int64_t c = 0; c < width; c++)
        normalise_row(x + c * s->pixels, s->pixels, mean, inverse * s->scale[first + c], s->bias[first + c],
                      y + c * s->pixels);
    s->mean[index] = mean;
    s->inverse[index] = inverse;
}

static void backward_task(void *argument, size_t index) {
    const Norm *s = argument;
    int64_t width = s->channels / s->groups, count = width * s->pixels, pixels = s->pixels;
    int64_t image = (int64_t)index / s->groups, first = (int64_t)index % s->groups * width;
    const float *x = s->x + (int64_t)index * count, *dy = s->dy + (int64_t)index * count;
    float *dx = s->dx + (int64_t)index * count, mean = s->mean_in[index], inverse = s->inverse_in[index];
    float *dscale = s->parts + image * 2 * s->channels + first, *dbias = dscale + s->channels;
    double sum = 0, turned = 0;
    for (int64_t c = 0; c < width; c++) {
        double across = 0, along = 0;
        for (int64_t i = 0; i < pixels; i += RUN)
            add_gradient_sums(dy + c * pixels + i, x + c * pixels + i, least(RUN, pixels - i), mean, &across, &along);
        dscale[c] = (float)(along * inverse), dbias[c] = (float)across;
        sum += across * s->scale[first + c], turned += along * s->scale[first + c];
    }
    float offset = (float)(sum * inverse / (double)count);
    float tilt = (float)(turned * inverse * inverse * inverse / (double)count);
    for (int64_t c = 0; c < width; c++) {
        const float *from = x + c * pixels, *gradient = dy + c * pixels;
        float *to = dx + c * pixels, slope = s->scale[first + c] * inverse;
        int64_t i = 0;
        for (; i + W <= pixels; i += W)
            store(to + i, load(gradient + i) * all(slope) - all(offset) - (load(from + i) - all(mean)) * all(tilt));
        for (; i < pixels; i++) to[i] = gradient[i] * slope - offset - (from[i] - mean) * tilt;
    }
}

static int read_sizes(const Tensor *x, int64_t groups, Norm *s) {
    if (x->rank < 2 || groups < 1 || x->dims[1] % groups) return 0;
    s->images = x->dims[0], s->channels = x->dims[1], s->pixels = 1, s->groups = groups;
    for (size_t i = 2; i < x->rank; i++) s->pixels *= x->dims[i];
    return s->channels > 0 && s->pixels > 0;
}

/* data, scale, bias -> normalised, mean and inverse deviation of each group as [images, groups, 1] */
static Status *run_forward(Call *call) {
    Tensor x, scale, bias;
    TRY(read_input(call, 0, &x));
    TRY(read_input(call, 1, &scale));
    TRY(read_input(call, 2, &bias));
    Norm s = {.x = x.data, .scale = scale.data, .bias = bias.data, .epsilon = call->floats[0]};
    if (!read_sizes(&x, call->ints[0], &s) || elements(&scale) != s.channels || elements(&bias) != s.channels)
        return refuse(call, "images, groups of their channels, and a scale and a bias for each channel are needed");
    int64_t reduced[3] = {s.images, s.groups, 1};
    TRY(make_output(call, 0, x.dims, x.rank, &s.y));
    TRY(make_output(call, 1, reduced, 3, &s.mean));
    TRY(make_output(call, 2, reduced, 3, &s.inverse));
    parallel(call, forward_task, s.images * s.groups, &s);
    return NULL;
}

/* gradient, data, scale, mean, inverse -> of data, scale and bias */
static Status *run_backward(Call *call) {
    Tensor dy, x, scale, mean, inverse;
    TRY(read_input(call, 0, &dy));
    TRY(read_input(call, 1, &x));
    TRY(read_input(call, 2, &scale));
    TRY(read_input(call, 3, &mean));
    TRY(read_input(call, 4, &inverse));
    Norm s = {.dy = dy.data, .x = x.data, .scale = scale.data, .mean_in = mean.data, .inverse_in = inverse.data};
    int fits = read_sizes(&x, call->ints[0], &s) && elements(&dy) == elements(&x) && elements(&scale) == s.channels;
    if (!fits || elements(&mean) != s.images * s.groups || elements(&inverse) != s.images * s.groups)
        return refuse(call, "the gradient does not fit the normalised tensor");
    float *dscale, *dbias;
    TRY(make_output(call, 0, x.dims, x.rank, &s.dx));
    TRY(make_output(call, 1, &s.channels, 1, &dscale));
    TRY(make_output(call, 2, &s.channels, 1, &dbias));
    s.parts = scratch(2 * s.images * s.channels + 1);
    if (!s.parts) return out_of_memory(call);
    parallel(call, backward_task, s.images * s.groups, &s);
    add_rows(s.parts, s.images, 2 * s.channels, s.channels, dscale);
    add_rows(s.parts + s.channels, s.images, 2 * s.channels, s.channels, dbias);
    return NULL;
}

Node group_norm_node = {.name = "GroupNormalization", .inputs = 3, .needed = 3, .outputs = 3, .ints = {"num_groups"},
                        .floats = {"epsilon"}, .run = run_forward};
Node group_norm_gradient_node = {.name = "GroupNormalizationGrad", .inputs = 5, .needed = 5, .outputs = 3,
                                 .ints = {"num_groups"}, .run = run_backward};
