/* The gradients of a convolution of up to three spatial axes, for its data and for its weight.
 *
 * Both go image by image and group by group over tiles of the matrix that has a row for each channel and place in the
 * kernel, and a column for each place in the output (im2col): dW = dY columns(X)^T, columns(dX) = W^T dY. Where a
 * group has so few channels that a matrix product would be mostly padding, they are computed directly. How the work is
 * divided depends on the shapes alone, so results do not depend on the threads. */
#include <stdlib.h>

#include "gemm.h"
#include "vector.h"

#define AXES 3
#define TILE (1 << 16)   /* floats of a tile of columns: it stays in the second-level cache */
#define ROWS 128         /* rows of a tile: fewer do not pay for packing the other factor */
#define DIRECT 16        /* most products of channels in and out of a group that are computed directly */
#define TASKS 8          /* tasks from which no more are made by dividing the batch */
#define PARTIAL (1 << 20) /* most floats of partial sums */

/* x: data, y: output; each spatial axis of the data is read at place * stride + offset * dilation - pad. */
typedef struct {
    int64_t images, groups, x_channels, y_channels; /* channels are those of a group */
    int64_t x[AXES], y[AXES], kernel[AXES], stride[AXES], pad[AXES], dilation[AXES];
    int64_t x_size, y_size, offsets; /* places of an image of each, and of the kernel */
} Shape3;

static int64_t product(const int64_t *dims) { return dims[0] * dims[1] * dims[2]; }

/* `geometry` is: groups, then kernel, strides, pads before, dilations of each spatial axis. */
static int read_shape(const Tensor *geometry, const int64_t *x_dims, const Tensor *dy, Shape3 *out) {
    const int64_t *given = (const int64_t *)(const void *)geometry->data;
    int64_t axes = (elements(geometry) - 1) / 4, groups = given[0];
    if (axes < 1 || axes > AXES || (int64_t)dy->rank != axes + 2 || groups < 1) return 0;
    if (x_dims[1] % groups || dy->dims[1] % groups || x_dims[0] != dy->dims[0]) return 0;
    *out = (Shape3){.images = dy->dims[0], .groups = groups};
    out->x_channels = x_dims[1] / groups, out->y_channels = dy->dims[1] / groups;
    for (int64_t i = 0; i < AXES; i++) {
        int64_t axis = i - (AXES - axes);
        out->x[i] = axis < 0 ? 1 : x_dims[axis + 2];
        out->y[i] = axis < 0 ? 1 : dy->dims[axis + 2];
        out->kernel[i] = axis < 0 ? 1 : given[1 + axis];
        out->stride[i] = axis < 0 ? 1 : given[1 + axes + axis];
        out->pad[i] = axis < 0 ? 0 : given[1 + 2 * axes + axis];
        out->dilation[i] = axis < 0 ? 1 : given[1 + 3 * axes + axis];
    }
    out->x_size = product(out->x), out->y_size = product(out->y), out->offsets = product(out->kernel);
    return 1;
}

/* The first and, behind the last, places of the output's axis whose data at an offset of the kernel lies in [0, x). */
static void valid(const Shape3 *s, int axis, int64_t offset, int64_t *first, int64_t *end) {
    int64_t shift = offset * s->dilation[axis] - s->pad[axis], step = s->stride[axis];
    *first = shift < 0 ? divide_up(-shift, step) : 0;
    *end = s->x[axis] > shift ? divide_up(s->x[axis] - shift, step) : 0;
    *end = least(*end, s->y[axis]);
    if (*end < *first) *end = *first;
}

/* What is done with a run of places along the last axis: `count` of them, `step` apart in the data. */
typedef void (*Run)(float *data, int64_t step, float *other, int64_t count, void *argument);

/* Calls `run` for the rows [row, row + rows) of the output's first two axes, at one place of the kernel, wherever the
 * data has something; `other` lies as the output does, from `row` on. */
static inline __attribute__((always_inline)) void each_run(const Shape3 *s, int64_t offset, int64_t row, int64_t rows,
                                                           float *data, float *other, Run run, void *argument) {
    int64_t at[AXES], first[AXES], end[AXES], shift[AXES];
    at[2] = offset % s->kernel[2], at[1] = offset / s->kernel[2] % s->kernel[1];
    at[0] = offset / s->kernel[2] / s->kernel[1];
    for (int i = 0; i < AXES; i++) {
        valid(s, i, at[i], &first[i], &end[i]);
        shift[i] = at[i] * s->dilation[i] - s->pad[i];
    }
    if (end[2] == first[2]) return;
    for (int64_t r = row; r < row + rows; r++) {
        int64_t d = r / s->y[1], h = r % s->y[1];
        if (d < first[0] || d >= end[0] || h < first[1] || h >= end[1]) continue;
        int64_t line = (d * s->stride[0] + shift[0]) * s->x[1] + h * s->stride[1] + shift[1];
        run(data + line * s->x[2] + first[2] * s->stride[2] + shift[2], s->stride[2],
            other + (r - row) * s->y[2] + first[2], end[2] - first[2], argument);
    }
}

static inline void copy_run(float *data, int64_t step, float *other, int64_t count, void *argument) {
    (void)argument;
    if (step == 1)
        memcpy(other, data, (size_t)count * sizeof(float));
    else
        for (int64_t i = 0; i < count; i++) other[i] = data[i * step];
}

static inline void add_run(float *restrict data, int64_t step, float *restrict other, int64_t count, void *argument) {
    (void)argument;
    if (step == 1)
        for (int64_t i = 0; i < count; i++) data[i] += other[i];
    else
        for (int64_t i = 0; i < count; i++) data[i * step] += other[i];
}

static inline void scaled_run(float *restrict data, int64_t step, float *restrict other, int64_t count, void *argument) {
    const float factor = *(const float *)argument;
    if (step == 1)
        for (int64_t i = 0; i < count; i++) data[i] += factor * other[i];
    else
        for (int64_t i = 0; i < count; i++) data[i * step] += factor * other[i];
}

static inline void dot_run(float *data, int64_t step, float *other, int64_t count, void *argument) {
    float *sum = argument;
    vec sums = all(0);
    int64_t i = 0;
    if (step == 1)
        for (; i + W <= count; i += W) sums += load(data + i) * load(other + i);
    float rest = 0;
    for (; i < count; i++) rest += data[i * step] * other[i];
    *sum += sum_of(sums) + rest;
}

typedef struct {
    Shape3 s;
    float *x, *y, *w;  /* data or its gradient, the output's gradient, weight or its gradient */
    float *partial;    /* of the weight's gradient, one after the other; NULL where there is one */
    int64_t channels;  /* of the data, that a task has at most */
    int64_t blocks, parts; /* tasks of a group by channels, and by images */
    _Atomic int failed;
} Work;

/* The kernel is one place that reads each place of the data once: the data itself is the matrix of columns. */
static int is_plain(const Shape3 *s) {
    for (int i = 0; i < AXES; i++)
        if (s->kernel[i] != 1 || s->stride[i] != 1 || s->pad[i] || s->x[i] != s->y[i]) return 0;
    return 1;
}

static int is_direct(const Shape3 *s) { return s->x_channels * s->y_channels <= DIRECT; }

/* Rows of the output, along its last axis, whose columns for so many channels make a tile. */
static int64_t rows_of_tile(const Shape3 *s, int64_t channels) {
    int64_t rows = TILE / (channels * s->offsets * s->y[2]), all_rows = s->y[0] * s->y[1];
    return least(rows < 1 ? 1 : rows, all_rows);
}

static void data_task(void *argument, size_t index) {
    Work *work = argument;
    const Shape3 *s = &work->s;
    int64_t block = (int64_t)index % work->blocks, rest = (int64_t)index / work->blocks;
    int64_t group = rest % s->groups, image = rest / s->groups, first = block * work->channels;
    int64_t channels = least(work->channels, s->x_channels - first), depth = s->y_channels;
    float *x = work->x + ((image * s->groups + group) * s->x_channels + first) * s->x_size;
    float *y = work->y + (image * s->groups + group) * depth * s->y_size;
    const float *w = work->w + (group * depth * s->x_channels + first) * s->offsets;
    int64_t wide = s->x_channels * s->offsets, lines = s->y[0] * s->y[1];
    Gemm gemm = {.m = channels * s->offsets, .k = depth, .alpha = 1, .a = w, .row_a = 1, .column_a = wide};
    gemm.row_b = s->y_size, gemm.column_b = 1;
    if (is_plain(s)) {
        gemm.n = s->y_size, gemm.b = y, gemm.c = x, gemm.row_c = s->y_size;
        gemm_alone(&gemm);
        return;
    }
    memset(x, 0, (size_t)(channels * s->x_size) * sizeof(float));
    if (is_direct(s)) {
        for (int64_t c = 0; c < channels; c++)
            for (int64_t m = 0; m < depth; m++)
                for (int64_t k = 0; k < s->offsets; k++) {
                    float factor = w[m * wide + c * s->offsets + k];
                    each_run(s, k, 0, lines, x + c * s->x_size, y + m * s->y_size, scaled_run, &factor);
                }
        return;
    }
    int64_t rows = rows_of_tile(s, channels);
    float *columns = scratch(gemm.m * rows * s->y[2]);
    if (!columns) {
        work->failed = 1;
        return;
    }
    for (int64_t row = 0; row < lines; row += rows) {
        int64_t here = least(rows, lines - row);
        gemm.n = gemm.row_c = here * s->y[2], gemm.b = y + row * s->y[2], gemm.c = columns;
        gemm_alone(&gemm);
        for (int64_t c = 0; c < channels; c++)
            for (int64_t k = 0; k < s->offsets; k++)
                each_run(s, k, row, here, x + c * s->x_size, columns + (c * s->offsets + k) * gemm.n, add_run, NULL);
    }
}

static void weight_task(void *argument, size_t index) {
    Work *work = argument;
    const Shape3 *s = &work->s;
    int64_t block = (int64_t)index % work->blocks, rest = (int64_t)index / work->blocks;
    int64_t group = rest % s->groups, part = rest / s->groups, first = block * work->channels;
    int64_t channels = least(work->channels, s->x_channels - first), height = s->y_channels;
    int64_t wide = s->x_channels * s->offsets, lines = s->y[0] * s->y[1];
    float *w = part ? work->partial + (part - 1) * s->groups * height * wide : work->w;
    w += group * height * wide + first * s->offsets;
    Gemm gemm = {.m = height, .n = channels * s->offsets, .alpha = 1, .c = w, .row_c = wide, .add = 1};
    gemm.row_a = s->y_size, gemm.column_a = gemm.row_b = 1;
    for (int64_t m = 0; m < height; m++) memset(w + m * wide, 0, (size_t)gemm.n * sizeof(float));
    int64_t begin = s->images * part / work->parts, end = s->images * (part + 1) / work->parts;
    int64_t rows = is_plain(s) ? lines : rows_of_tile(s, channels);
    float *columns = is_plain(s) || is_direct(s) ? NULL : scratch(gemm.n * rows * s->y[2]);
    if (!columns && !is_plain(s) && !is_direct(s)) {
        work->failed = 1;
        return;
    }
    for (int64_t image = begin; image < end; image++) {
        float *x = work->x + ((image * s->groups + group) * s->x_channels + first) * s->x_size;
        float *y = work->y + (image * s->groups + group) * height * s->y_size;
        if (is_direct(s)) {
            for (int64_t m = 0; m < height; m++)
                for (int64_t c = 0; c < channels; c++)
                    for (int64_t k = 0; k < s->offsets; k++) {
                        float *sum = w + m * wide + c * s->offsets + k;
                        each_run(s, k, 0, lines, x + c * s->x_size, y + m * s->y_size, dot_run, sum);
                    }
            continue;
        }
        for (int64_t row = 0; row < lines; row += rows) {
            int64_t here = least(rows, lines - row);
            gemm.k = here * s->y[2], gemm.a = y + row * s->y[2];
            gemm.b = x, gemm.column_b = s->x_size;
            if (columns) {
                memset(columns, 0, (size_t)(gemm.n * gemm.k) * sizeof(float));
                for (int64_t c = 0; c < channels; c++)
                    for (int64_t k = 0; k < s->offsets; k++)
                        each_run(s, k, row, here, x + c * s->x_size, columns + (c * s->offsets + k) * gemm.k, copy_run,
                                 NULL);
                gemm.b = columns, gemm.column_b = gemm.k;
            }
            gemm_alone(&gemm);
        }
    }
}

/* Channels of a task, and how many tasks of a group they make. */
static void divide(Work *work) {
    work->channels = least(divide_up(ROWS, work->s.offsets), work->s.x_channels);
    work->blocks = work->channels ? divide_up(work->s.x_channels, work->channels) : 0;
}

static Status *run_data(Call *call) {
    Tensor geometry, shape, dy, w;
    TRY(read_input(call, 0, &geometry));
    TRY(read_input(call, 1, &shape));
    TRY(read_input(call, 2, &dy));
    TRY(read_input(call, 3, &w));
    const int64_t *dims = (const int64_t *)(const void *)shape.data;
    Work work = {.y = dy.data, .w = w.data};
    if (elements(&shape) != (int64_t)dy.rank || !read_shape(&geometry, dims, &dy, &work.s) ||
        elements(&w) != work.s.groups * work.s.y_channels * work.s.x_channels * work.s.offsets)
        return refuse(call, "gradient, weight and geometry do not fit each other");
    TRY(make_output(call, 0, dims, dy.rank, &work.x));
    divide(&work);
    if (!work.s.y_channels || !work.s.y_size || !work.s.offsets) {
        memset(work.x, 0, (size_t)(work.s.images * work.s.groups * work.s.x_channels * work.s.x_size) * sizeof(float));
        return NULL;
    }
    parallel(call, data_task, work.s.images * work.s.groups * work.blocks, &work);
    return work.failed ? out_of_memory(call) : NULL;
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
    if (x.rank != dy.rank || !read_shape(&geometry, x.dims, &dy, &work.s))
        return refuse(call, "gradient, data and geometry do not fit each other");
    const int64_t *kernel = (const int64_t *)(const void *)geometry.data + 1;
    int64_t dims[MOST_RANK] = {dy.dims[1], work.s.x_channels};
    for (size_t i = 2; i < dy.rank; i++) dims[i] = kernel[i - 2];
    TRY(make_output(call, 0, dims, dy.rank, &work.w));
    divide(&work);
    int64_t count = dims[0] * work.s.x_channels * work.s.offsets;
    if (!count) return NULL;
    int64_t tasks = work.s.groups * work.blocks;
    work.parts = least(divide_up(TASKS, tasks), least(work.s.images, PARTIAL / count + 1));
    if (work.parts < 1) work.parts = 1;
    if (work.parts > 1) {
        work.partial = malloc((size_t)((work.parts - 1) * count) * sizeof(float));
        if (!work.partial) return out_of_memory(call);
    }
    parallel(call, weight_task, tasks * work.parts, &work);
    Sum sum = {work.w, work.partial, count, 1 << 14, work.parts - 1};
    if (work.partial) parallel(call, sum_task, divide_up(count, sum.size), &sum);
    free(work.partial);
    return work.failed ? out_of_memory(call) : NULL;
}

Node convolution_data_gradient_node = {
    .name = "ConvDataGrad", .inputs = 4, .needed = 4, .outputs = 1, .integers = 2, .run = run_data};
Node convolution_weight_gradient_node = {
    .name = "ConvWeightGrad", .inputs = 3, .needed = 3, .outputs = 1, .integers = 1, .run = run_weight};
