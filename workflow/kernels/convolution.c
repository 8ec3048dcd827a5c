/* Convolutions of up to three spatial axes and their gradients, for data and for weight.
 *
 * Each is a matrix product for each group (implicit.c), or, where a group has so few channels that a product would be
 * mostly padding, computed directly (direct.c). The gradient for the data is a convolution of the output's gradient for
 * each place of the data modulo the strides, by the places of the kernel that meet it. How the work is divided depends on
 * the shapes alone, so results do not depend on the threads. */
#include <stdlib.h>

#include "direct.h"
#include "gemm.h"
#include "implicit.h"
#include "transpose.h"

#define DIRECT 16           /* most products of channels in and out of a group that are computed directly */
#define TASKS 8             /* tasks from which no more are made by dividing the batch */
#define PARTIAL (1 << 20)   /* most floats of partial sums */
#define WHOLE (1 << 16)     /* elements of a weight from which on all threads share one product for its gradient */

int read_windows(const Tensor *geometry, const int64_t *x_dims, const int64_t *y_dims, size_t rank, Windows *out) {
    const int64_t *given = (const int64_t *)(const void *)geometry->data;
    int64_t axes = (elements(geometry) - 1) / 4, groups = given[0];
    if (axes < 1 || axes > AXES || (int64_t)rank != axes + 2 || groups < 1) return 0;
    if (x_dims[1] % groups || y_dims[1] % groups || x_dims[0] != y_dims[0]) return 0;
    *out = (Windows){.images = y_dims[0], .groups = groups};
    out->x_channels = x_dims[1] / groups, out->y_channels = y_dims[1] / groups;
    for (int64_t i = 0; i < AXES; i++) {
        int64_t axis = i - (AXES - axes);
        out->x[i] = axis < 0 ? 1 : x_dims[axis + 2];
        out->y[i] = axis < 0 ? 1 : y_dims[axis + 2];
        out->kernel[i] = axis < 0 ? 1 : given[1 + axis];
        out->stride[i] = axis < 0 ? 1 : given[1 + axes + axis];
        out->pad[i] = axis < 0 ? 0 : given[1 + 2 * axes + axis];
        out->dilation[i] = axis < 0 ? 1 : given[1 + 3 * axes + axis];
    }
    out->x_size = product(out->x), out->y_size = product(out->y), out->offsets = product(out->kernel);
    return 1;
}

static int is_direct(const Windows *s) {
    return s->x_channels * s->y_channels <= DIRECT && s->offsets <= MOST_PLACES;
}

typedef struct {
    Windows s;
    Planes p;          /* where it is direct */
    float *x, *y, *w;  /* data, output, weight; or their gradients */
    const float *bias;
    float *turned;     /* the weight in another order, or NULL */
    float *partial;    /* of the weight's gradient, one after the other; NULL where there is one */
    int64_t parts;     /* of the batch */
    _Atomic int failed;
} Work;

static float *x_of(const Work *work, int64_t image, int64_t group) {
    return work->x + (image * work->s.groups + group) * work->s.x_channels * work->s.x_size;
}

static float *y_of(const Work *work, int64_t image, int64_t group) {
    return work->y + (image * work->s.groups + group) * work->s.y_channels * work->s.y_size;
}

static float *w_of(const Work *work, int64_t group) {
    return work->w + group * work->s.y_channels * work->s.x_channels * work->s.offsets;
}

/* Images [first, first + images) of a group. */
static int forward(const Call *call, const Work *work, int64_t group, int64_t first, int64_t images) {
    const Windows *s = &work->s;
    Convolution c = {.s = *s, .x = x_of(work, first, group), .w = w_of(work, group), .y = y_of(work, first, group)};
    c.bias = work->bias ? work->bias + group * s->y_channels : NULL;
    c.s.images = images;
    c.x_apart = s->groups * s->x_channels * s->x_size, c.y_apart = s->groups * s->y_channels * s->y_size;
    c.w_row = s->x_channels * s->offsets, c.w_channel = s->offsets, c.y_row = s->y_size;
    c.steps[0] = s->y[1] * s->y[2], c.steps[1] = s->y[2], c.steps[2] = 1;
    return convolve(call, &c);
}

static void forward_task(void *argument, size_t index) {
    Work *work = argument;
    const Windows *s = &work->s;
    int64_t group = (int64_t)index % s->groups, image = (int64_t)index / s->groups;
    const float *bias = work->bias ? work->bias + group * s->y_channels : NULL;
    int done = is_direct(s) ? direct_convolution(s, &work->p, x_of(work, image, group), w_of(work, group), bias,
                                                 y_of(work, image, group))
                            : forward(NULL, work, group, image, 1);
    if (!done) work->failed = 1;
}

/* Along one axis, the data's places that are `rest` modulo the stride: how many there are, and the convolution of the
 * gradient that makes them. Its kernel is the places [last, last - apart, ...] of the weight's; 0 where there is none. */
typedef struct {
    int64_t places, count, last, apart, dilation, pad;
} Phase;

static Phase phase_of(const Windows *s, int axis, int64_t rest) {
    int64_t stride = s->stride[axis], dilation = s->dilation[axis], at = rest + s->pad[axis];
    Phase p = {.places = rest < s->x[axis] ? divide_up(s->x[axis] - rest, stride) : 0};
    int64_t first = 0;
    p.apart = 1;
    while (p.apart * dilation % stride) p.apart++;
    p.dilation = p.apart * dilation / stride;
    while (first < p.apart && (at - first * dilation) % stride) first++;
    if (first >= p.apart || first >= s->kernel[axis]) return p;
    p.count = (s->kernel[axis] - 1 - first) / p.apart + 1;
    p.last = first + (p.count - 1) * p.apart;
    p.pad = -((at - p.last * dilation) / stride);
    return p;
}

/* [y channel][x channel][place] -> [y channel][place][x channel], whose rows a product packs vector by vector. */
static void turn_task(void *argument, size_t index) {
    const Work *work = argument;
    int64_t channels = work->s.x_channels, places = work->s.offsets, c = 0;
    const float *from = work->w + (int64_t)index * channels * places;
    float *to = work->turned + (int64_t)index * channels * places;
    for (; c + EDGE <= channels; c += EDGE) {
        int64_t k = 0;
        for (; k + EDGE <= places; k += EDGE) transpose(from + c * places + k, places, to + k * channels + c, channels);
        for (; k < places; k++)
            for (int64_t v = 0; v < EDGE; v++) to[k * channels + c + v] = from[(c + v) * places + k];
    }
    for (; c < channels; c++)
        for (int64_t k = 0; k < places; k++) to[k * channels + c] = from[c * places + k];
}

/* The data's places of one phase along each axis. */
static int one_phase(const Call *call, const Work *work, int64_t group, int64_t first, int64_t images, const int64_t *rest) {
    const Windows *s = &work->s;
    Convolution c = {.s = {.images = images, .groups = 1, .x_channels = s->y_channels, .y_channels = s->x_channels}};
    Phase phases[AXES];
    int64_t begin = 0, step = 1;
    for (int i = AXES; i-- > 0;) {
        phases[i] = phase_of(s, i, rest[i]);
        c.s.x[i] = s->y[i], c.s.y[i] = phases[i].places, c.s.kernel[i] = phases[i].count, c.s.stride[i] = 1;
        c.s.pad[i] = phases[i].pad, c.s.dilation[i] = phases[i].dilation;
        begin += rest[i] * step, c.steps[i] = s->stride[i] * step, step *= s->x[i];
    }
    c.s.x_size = s->y_size, c.s.y_size = product(c.s.y), c.s.offsets = product(c.s.kernel);
    if (!c.s.y_size || !c.s.offsets) return 1;
    int32_t *taps = malloc((size_t)c.s.offsets * sizeof *taps);
    if (!taps) return 0;
    for (int64_t k = 0; k < c.s.offsets; k++) {
        int64_t at = 0, left = k, size = 1;
        for (int i = AXES; i-- > 0; left /= phases[i].count, size *= s->kernel[i])
            at += (phases[i].last - left % phases[i].count * phases[i].apart) * size;
        taps[k] = (int32_t)(work->turned ? at * s->x_channels : at);
    }
    c.x = y_of(work, first, group), c.w = w_of(work, group), c.y = x_of(work, first, group) + begin, c.taps = taps;
    c.x_apart = s->groups * s->y_channels * s->y_size, c.y_apart = s->groups * s->x_channels * s->x_size;
    c.w_row = s->offsets, c.w_channel = s->x_channels * s->offsets, c.y_row = s->x_size;
    if (work->turned) c.w = work->turned, c.w_row = 1;
    c.bias = work->bias ? work->bias + group * s->x_channels : NULL;
    int done = convolve(call, &c);
    free(taps);
    return done;
}

static int backward(const Call *call, const Work *work, int64_t group, int64_t first, int64_t images) {
    const Windows *s = &work->s;
    for (int64_t phase = 0; phase < product(s->stride); phase++) {
        int64_t rest[AXES] = {phase / s->stride[2] / s->stride[1], phase / s->stride[2] % s->stride[1],
                              phase % s->stride[2]};
        if (!one_phase(call, work, group, first, images, rest)) return 0;
    }
    return 1;
}

static void data_task(void *argument, size_t index) {
    Work *work = argument;
    const Windows *s = &work->s;
    int64_t group = (int64_t)index % s->groups, image = (int64_t)index / s->groups;
    int done = is_direct(s) ? direct_data_gradient(s, &work->p, y_of(work, image, group), w_of(work, group),
                                                   x_of(work, image, group))
                            : backward(NULL, work, group, image, 1);
    for (int64_t c = 0; is_direct(s) && work->bias && c < s->x_channels; c++) {
        float *x = x_of(work, image, group) + c * s->x_size, bias = work->bias[group * s->x_channels + c];
        for (int64_t i = 0; i < s->x_size; i++) x[i] += bias;
    }
    if (!done) work->failed = 1;
}

/* Some places of the data are met by no place of the kernel. */
static int has_gaps(const Windows *s) {
    for (int i = 0; i < AXES; i++)
        for (int64_t rest = 0; rest < s->stride[i]; rest++) {
            Phase p = phase_of(s, i, rest);
            if (p.places && !p.count) return 1;
        }
    return 0;
}

static int weight_of(const Call *call, const Work *work, int64_t group, int64_t first, int64_t images, float *w) {
    const Windows *s = &work->s;
    WeightGradient g = {.s = *s, .x = x_of(work, first, group), .y = y_of(work, first, group), .w = w};
    g.s.images = images, g.y_row = s->y_size;
    g.x_apart = s->groups * s->x_channels * s->x_size, g.y_apart = s->groups * s->y_channels * s->y_size;
    return weight_gradient(call, &g);
}

/* A group and a part of the batch. */
static void weight_task(void *argument, size_t index) {
    Work *work = argument;
    const Windows *s = &work->s;
    int64_t group = (int64_t)index % s->groups, part = (int64_t)index / s->groups;
    int64_t size = s->y_channels * s->x_channels * s->offsets;
    int64_t begin = s->images * part / work->parts, end = s->images * (part + 1) / work->parts;
    float *w = (part ? work->partial + (part - 1) * s->groups * size : work->w) + group * size;
    if (!is_direct(s)) {
        if (!weight_of(NULL, work, group, begin, end - begin, w)) work->failed = 1;
        return;
    }
    memset(w, 0, (size_t)size * sizeof(float));
    for (int64_t image = begin; image < end; image++)
        if (!direct_weight_gradient(s, &work->p, x_of(work, image, group), y_of(work, image, group), w)) work->failed = 1;
}

/* The tasks of a group and an image each, or all of them in one where groups are not divided. */
static Status *run_by_images(Call *call, Work *work, void (*task)(void *, size_t),
                             int (*whole)(const Call *, const Work *, int64_t, int64_t, int64_t)) {
    const Windows *s = &work->s;
    if (is_direct(s))
        find_planes(s, &work->p);
    else if (!fits_tables(s))
        return refuse(call, "the images are too large");
    if (is_direct(s) || s->groups > 1)
        parallel(call, task, s->images * s->groups, work);
    else if (!whole(call, work, 0, 0, s->images))
        work->failed = 1;
    return work->failed ? out_of_memory(call) : NULL;
}

/* The gradient has one place and the kernel lies upon all of the data, as in the first layer of a generator. */
static int is_product(const Windows *s) {
    for (int i = 0; i < AXES; i++)
        if (s->y[i] != 1 || s->kernel[i] != s->x[i] || s->pad[i] || s->dilation[i] != 1) return 0;
    return s->groups == 1;
}

/* Nothing, or the bias, everywhere. */
static void fill(float *to, const float *bias, int64_t images, int64_t channels, int64_t size) {
    for (int64_t i = 0; i < images * channels; i++)
        for (int64_t k = 0; k < size; k++) to[i * size + k] = bias ? bias[i % channels] : 0;
}

/* geometry, the data's shape, gradient, weight, and what a transposed convolution adds to each channel, or none */
static Status *run_data(Call *call) {
    Tensor geometry, shape, dy, w, bias;
    TRY(read_input(call, 0, &geometry));
    TRY(read_input(call, 1, &shape));
    TRY(read_input(call, 2, &dy));
    TRY(read_input(call, 3, &w));
    const int64_t *dims = (const int64_t *)(const void *)shape.data;
    Work work = {.y = dy.data, .w = w.data};
    const Windows *s = &work.s;
    if (elements(&shape) != (int64_t)dy.rank || !read_windows(&geometry, dims, dy.dims, dy.rank, &work.s) ||
        elements(&w) != s->groups * s->y_channels * s->x_channels * s->offsets)
        return refuse(call, "gradient, weight and geometry do not fit each other");
    int64_t channels = s->groups * s->x_channels;
    if (count_inputs(call) > 4) {
        TRY(read_input(call, 4, &bias));
        if (elements(&bias) != channels) return refuse(call, "the bias has not one element for each channel");
        work.bias = bias.data;
    }
    TRY(make_output(call, 0, dims, dy.rank, &work.x));
    if (s->images * channels * s->x_size == 0) return NULL;
    const int nothing = !s->y_channels || !s->y_size || !s->offsets;
    if (nothing || (!is_direct(s) && has_gaps(s))) fill(work.x, work.bias, s->images, channels, s->x_size);
    if (nothing) return NULL;
    if (!is_direct(s) && is_product(s)) {
        Gemm gemm = {.m = s->images, .n = channels * s->x_size, .k = s->y_channels, .alpha = 1, .a = dy.data, .b = w.data};
        gemm.row_a = s->y_channels, gemm.column_a = 1, gemm.row_b = gemm.n, gemm.column_b = 1;
        gemm.c = work.x, gemm.row_c = gemm.n, gemm.add = work.bias != NULL;
        if (work.bias) fill(work.x, work.bias, s->images, channels, s->x_size);
        return gemm_shared(call, &gemm) ? NULL : out_of_memory(call);
    }
    if (!is_direct(s) && s->groups == 1 && s->offsets > 1 && s->x_channels >= EDGE) {
        work.turned = weight_scratch(elements(&w));
        if (!work.turned) return out_of_memory(call);
        parallel(call, turn_task, s->y_channels, &work);
    }
    return run_by_images(call, &work, data_task, backward);
}

typedef struct {
    float *to;
    const float *from;
    int64_t count, size, parts;
} Sum;

static void sum_task(void *argument, size_t index) {
    const Sum *s = argument;
    int64_t first = (int64_t)index * s->size, end = least(first + s->size, s->count);
    for (int64_t part = 0; part < s->parts; part++)
        for (int64_t i = first; i < end; i++) s->to[i] += s->from[part * s->count + i];
}

static Status *run_weight(Call *call) {
    Tensor geometry, dy, x;
    TRY(read_input(call, 0, &geometry));
    TRY(read_input(call, 1, &dy));
    TRY(read_input(call, 2, &x));
    Work work = {.x = x.data, .y = dy.data, .parts = 1};
    const Windows *s = &work.s;
    if (x.rank != dy.rank || !read_windows(&geometry, x.dims, dy.dims, dy.rank, &work.s))
        return refuse(call, "gradient, data and geometry do not fit each other");
    const int64_t *kernel = (const int64_t *)(const void *)geometry.data + 1;
    int64_t dims[MOST_RANK] = {dy.dims[1], s->x_channels};
    for (size_t i = 2; i < dy.rank; i++) dims[i] = kernel[i - 2];
    TRY(make_output(call, 0, dims, dy.rank, &work.w));
    int64_t count = dims[0] * s->x_channels * s->offsets;
    if (!count) return NULL;
    if (!s->images || !s->y_size) {
        memset(work.w, 0, (size_t)count * sizeof(float));
        return NULL;
    }
    if (is_direct(s))
        find_planes(s, &work.p);
    else if (!fits_tables(s))
        return refuse(call, "the images are too large");
    if (!is_direct(s) && s->groups == 1 && (count > WHOLE || s->images < TASKS / 2))
        return weight_of(call, &work, 0, 0, s->images, work.w) ? NULL : out_of_memory(call);
    work.parts = least(divide_up(TASKS, s->groups), least(s->images, PARTIAL / count + 1));
    if (work.parts > 1) {
        work.partial = malloc((size_t)((work.parts - 1) * count) * sizeof(float));
        if (!work.partial) return out_of_memory(call);
    }
    parallel(call, weight_task, s->groups * work.parts, &work);
    Sum sum = {work.w, work.partial, count, 1 << 14, work.parts - 1};
    if (work.partial) parallel(call, sum_task, divide_up(count, sum.size), &sum);
    free(work.partial);
    return work.failed ? out_of_memory(call) : NULL;
}

/* geometry, pads behind, data, weight, bias or none */
static Status *run_forward(Call *call) {
    Tensor geometry, behind, x, w, bias;
    TRY(read_input(call, 0, &geometry));
    TRY(read_input(call, 1, &behind));
    TRY(read_input(call, 2, &x));
    TRY(read_input(call, 3, &w));
    Work work = {.x = x.data, .w = w.data};
    const int64_t *given = (const int64_t *)(const void *)geometry.data, axes = elements(&behind);
    const int64_t *after = (const int64_t *)(const void *)behind.data;
    int64_t dims[MOST_RANK] = {x.dims[0], w.dims[0]};
    if (elements(&geometry) != 1 + 4 * axes || (int64_t)x.rank != axes + 2)
        return refuse(call, "data and geometry do not fit each other");
    for (int64_t i = 0; i < axes; i++) {
        const int64_t *at = given + 1 + i;
        int64_t lacking = x.dims[i + 2] + at[2 * axes] + after[i] - at[3 * axes] * (at[0] - 1) - 1;
        dims[i + 2] = lacking < 0 ? 0 : lacking / at[axes] + 1;
    }
    if (!read_windows(&geometry, x.dims, dims, x.rank, &work.s) ||
        elements(&w) != dims[1] * work.s.x_channels * work.s.offsets)
        return refuse(call, "data, weight and geometry do not fit each other");
    if (count_inputs(call) > 4) {
        TRY(read_input(call, 4, &bias));
        if (elements(&bias) != dims[1]) return refuse(call, "the bias has not one element for each channel");
        work.bias = bias.data;
    }
    TRY(make_output(call, 0, dims, x.rank, &work.y));
    int64_t count = work.s.images * dims[1] * work.s.y_size;
    if (!count) return NULL;
    if (!work.s.x_channels || !work.s.offsets) {
        fill(work.y, work.bias, work.s.images, dims[1], work.s.y_size);
        return NULL;
    }
    return run_by_images(call, &work, forward_task, forward);
}

Node convolution_node = {
    .name = "Conv", .inputs = 5, .needed = 4, .outputs = 1, .integers = 2, .run = run_forward};
Node convolution_data_gradient_node = {
    .name = "ConvDataGrad", .inputs = 5, .needed = 4, .outputs = 1, .integers = 2, .run = run_data};
Node convolution_weight_gradient_node = {
    .name = "ConvWeightGrad", .inputs = 3, .needed = 3, .outputs = 1, .integers = 1, .run = run_weight};
