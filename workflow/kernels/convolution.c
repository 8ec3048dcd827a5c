/* The gradients of a convolution of up to three spatial axes, for its data and for its weight.
 *
 * Both go image by image and group by group over tiles of the matrix that has a row for each channel and place in the
 * kernel, and a column for each place in the output (im2col): dW = dY columns(X)^T, columns(dX) = W^T dY. Where a
 * group has so few channels that a matrix product would be mostly padding, they are computed directly. How the work is
 * divided depends on the shapes alone, so results do not depend on the threads. */
#include <stdlib.h>

#include "direct.h"
#include "gemm.h"

#define TILE (1 << 16)   /* floats of a tile of columns: it stays in the second-level cache */
#define ROWS 128         /* rows of a tile: fewer do not pay for packing the other factor */
#define DIRECT 16        /* most products of channels in and out of a group that are computed directly */
#define SMALL 128        /* places of an output from which on each image has a product of its own */
#define JOINED 256       /* places of the images, together, that share one otherwise */
#define TASKS 8          /* tasks from which no more are made by dividing the batch */
#define PARTIAL (1 << 20) /* most floats of partial sums */

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

/* The first and, behind the last, places of the output's axis whose data at an offset of the kernel lies in [0, x). */
static void valid(const Windows *s, int axis, int64_t offset, int64_t *first, int64_t *end) {
    int64_t shift = offset * s->dilation[axis] - s->pad[axis], step = s->stride[axis];
    *first = shift < 0 ? divide_up(-shift, step) : 0;
    *end = s->x[axis] > shift ? divide_up(s->x[axis] - shift, step) : 0;
    *end = least(*end, s->y[axis]);
    if (*end < *first) *end = *first;
}

/* What is done with a run of places along the last axis: `count` of them, `step` apart in the data. */
typedef void (*Run)(float *data, int64_t step, float *other, int64_t count);

/* Calls `run` for the rows [row, row + rows) of the output's first two axes, at one place of the kernel, wherever the
 * data has something; `other` lies as the output does, from `row` on. */
static inline __attribute__((always_inline)) void each_run(const Windows *s, int64_t offset, int64_t row, int64_t rows,
                                                           float *data, float *other, Run run) {
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
            other + (r - row) * s->y[2] + first[2], end[2] - first[2]);
    }
}

static inline void copy_run(float *data, int64_t step, float *other, int64_t count) {
    if (step == 1)
        memcpy(other, data, (size_t)count * sizeof(float));
    else
        for (int64_t i = 0; i < count; i++) other[i] = data[i * step];
}

static inline void add_run(float *restrict data, int64_t step, float *restrict other, int64_t count) {
    if (step == 1)
        for (int64_t i = 0; i < count; i++) data[i] += other[i];
    else
        for (int64_t i = 0; i < count; i++) data[i * step] += other[i];
}

/* The same for every channel and place of the kernel, each of which has a row of columns, `apart` from the next. */
static inline __attribute__((always_inline)) void each_column(const Windows *s, int64_t channels, int64_t row,
                                                              int64_t rows, float *x, float *columns, int64_t apart,
                                                              Run run) {
    for (int64_t c = 0; c < channels; c++)
        for (int64_t k = 0; k < s->offsets; k++, columns += apart)
            each_run(s, k, row, rows, x + c * s->x_size, columns, run);
}

typedef struct {
    Windows s;
    Planes p;          /* where it is direct */
    float *x, *y, *w;  /* data or its gradient, the output's gradient, weight or its gradient */
    float *partial;    /* of the weight's gradient, one after the other; NULL where there is one */
    int64_t channels;  /* of the data, that a task has at most */
    int64_t joined;    /* images of one product: small ones share the packing of the weight */
    int64_t blocks, parts; /* tasks of a group by channels, and by images */
    _Atomic int failed;
} Work;

/* The kernel is one place that reads each place of the data once: the data itself is the matrix of columns. */
static int is_plain(const Windows *s) {
    for (int i = 0; i < AXES; i++)
        if (s->kernel[i] != 1 || s->stride[i] != 1 || s->pad[i] || s->x[i] != s->y[i]) return 0;
    return 1;
}

static int is_direct(const Windows *s) {
    return s->x_channels * s->y_channels <= DIRECT && s->offsets <= MOST_PLACES;
}

/* Rows of the output, along its last axis, whose columns for so many channels make a tile. */
static int64_t rows_of_tile(const Windows *s, int64_t channels) {
    int64_t rows = TILE / (channels * s->offsets * s->y[2]), all_rows = s->y[0] * s->y[1];
    return least(rows < 1 ? 1 : rows, all_rows);
}

/* Values of some images, [channel][image][place], of those that lie `apart`. */
static void join(const float *from, int64_t apart, int64_t channels, int64_t size, int64_t images, float *to) {
    for (int64_t c = 0; c < channels; c++)
        for (int64_t i = 0; i < images; i++, to += size)
            memcpy(to, from + i * apart + c * size, (size_t)size * sizeof(float));
}

/* The reverse. */
static void spread(const float *from, int64_t apart, int64_t channels, int64_t size, int64_t images, float *to) {
    for (int64_t c = 0; c < channels; c++)
        for (int64_t i = 0; i < images; i++, from += size)
            memcpy(to + i * apart + c * size, from, (size_t)size * sizeof(float));
}

/* Memory for one product of some images: the output's gradient, joined, and behind it `rows` rows of columns. */
typedef struct {
    int64_t lines, count, x_apart; /* rows of the output; columns of the product; from one image of x to the next */
    float *y, *columns;
} Joined;

static int join_gradient(const Windows *s, int64_t images, int64_t rows, const float *y, Joined *out) {
    *out = (Joined){.lines = s->y[0] * s->y[1], .count = images * s->y_size};
    out->x_apart = s->groups * s->x_channels * s->x_size;
    out->y = scratch((s->y_channels + rows) * out->count);
    if (!out->y) return 0;
    out->columns = out->y + s->y_channels * out->count;
    join(y, s->groups * s->y_channels * s->y_size, s->y_channels, s->y_size, images, out->y);
    return 1;
}

/* As `data_task` for images that are joined: x and y are those of the first. */
static int joined_data(const Windows *s, Gemm *gemm, int64_t images, int64_t channels, float *x, const float *y) {
    Joined j;
    if (!join_gradient(s, images, gemm->m, y, &j)) return 0;
    gemm->n = gemm->row_b = gemm->row_c = j.count, gemm->b = j.y, gemm->c = j.columns;
    gemm_alone(gemm);
    if (is_plain(s)) {
        spread(j.columns, j.x_apart, channels, s->x_size, images, x);
        return 1;
    }
    for (int64_t i = 0; i < images; i++) {
        float *image = x + i * j.x_apart;
        memset(image, 0, (size_t)(channels * s->x_size) * sizeof(float));
        each_column(s, channels, 0, j.lines, image, j.columns + i * s->y_size, j.count, add_run);
    }
    return 1;
}

/* As a step of `weight_task` for images that are joined. */
static int joined_weight(const Windows *s, Gemm *gemm, int64_t images, int64_t channels, float *x, const float *y) {
    Joined j;
    if (!join_gradient(s, images, gemm->n, y, &j)) return 0;
    if (is_plain(s)) {
        join(x, j.x_apart, channels, s->x_size, images, j.columns);
    } else {
        memset(j.columns, 0, (size_t)(gemm->n * j.count) * sizeof(float));
        for (int64_t i = 0; i < images; i++)
            each_column(s, channels, 0, j.lines, x + i * j.x_apart, j.columns + i * s->y_size, j.count, copy_run);
    }
    gemm->k = gemm->row_a = gemm->column_b = j.count, gemm->a = j.y, gemm->b = j.columns;
    gemm_alone(gemm);
    return 1;
}

static void data_task(void *argument, size_t index) {
    Work *work = argument;
    const Windows *s = &work->s;
    int64_t block = (int64_t)index % work->blocks, rest = (int64_t)index / work->blocks;
    int64_t group = rest % s->groups, image = rest / s->groups * work->joined, first = block * work->channels;
    int64_t channels = least(work->channels, s->x_channels - first), depth = s->y_channels;
    float *x = work->x + ((image * s->groups + group) * s->x_channels + first) * s->x_size;
    float *y = work->y + (image * s->groups + group) * depth * s->y_size;
    const float *w = work->w + (group * depth * s->x_channels + first) * s->offsets;
    int64_t wide = s->x_channels * s->offsets, lines = s->y[0] * s->y[1];
    Gemm gemm = {.m = channels * s->offsets, .k = depth, .alpha = 1, .a = w, .row_a = 1, .column_a = wide};
    gemm.row_b = s->y_size, gemm.column_b = 1;
    if (work->joined > 1) {
        if (!joined_data(s, &gemm, least(work->joined, s->images - image), channels, x, y)) work->failed = 1;
        return;
    }
    if (is_plain(s)) {
        gemm.n = s->y_size, gemm.b = y, gemm.c = x, gemm.row_c = s->y_size;
        gemm_alone(&gemm);
        return;
    }
    if (is_direct(s)) {
        if (!direct_data_gradient(s, &work->p, y, w, x)) work->failed = 1;
        return;
    }
    memset(x, 0, (size_t)(channels * s->x_size) * sizeof(float));
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
        each_column(s, channels, row, here, x, columns, gemm.n, add_run);
    }
}

static void weight_task(void *argument, size_t index) {
    Work *work = argument;
    const Windows *s = &work->s;
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
    const int alone = work->joined == 1 && !is_plain(s) && !is_direct(s);
    float *columns = alone ? scratch(gemm.n * rows * s->y[2]) : NULL;
    if (alone && !columns) {
        work->failed = 1;
        return;
    }
    for (int64_t image = begin; image < end; image += work->joined) {
        float *x = work->x + ((image * s->groups + group) * s->x_channels + first) * s->x_size;
        float *y = work->y + (image * s->groups + group) * height * s->y_size;
        if (work->joined > 1) {
            if (!joined_weight(s, &gemm, least(work->joined, end - image), channels, x, y)) work->failed = 1;
            continue;
        }
        if (is_direct(s)) {
            if (!direct_weight_gradient(s, &work->p, x, y, w)) work->failed = 1;
            continue;
        }
        for (int64_t row = 0; row < lines; row += rows) {
            int64_t here = least(rows, lines - row);
            gemm.k = here * s->y[2], gemm.a = y + row * s->y[2];
            gemm.b = x, gemm.column_b = s->x_size;
            if (columns) {
                memset(columns, 0, (size_t)(gemm.n * gemm.k) * sizeof(float));
                each_column(s, channels, row, here, x, columns, gemm.k, copy_run);
                gemm.b = columns, gemm.column_b = gemm.k;
            }
            gemm_alone(&gemm);
        }
    }
}

/* Channels of a task, and how many tasks of a group they make. */
static void divide(Work *work) {
    int64_t most = is_direct(&work->s) ? DIRECT : divide_up(ROWS, work->s.offsets);
    if (is_direct(&work->s)) find_planes(&work->s, &work->p);
    work->channels = least(most, work->s.x_channels);
    work->blocks = work->channels ? divide_up(work->s.x_channels, work->channels) : 0;
    work->joined = 1;
    if (!is_direct(&work->s) && work->s.y_size > 0 && work->s.y_size < SMALL)
        work->joined = least(divide_up(JOINED, work->s.y_size), work->s.images);
    if (work->joined < 1) work->joined = 1;
}

static Status *run_data(Call *call) {
    Tensor geometry, shape, dy, w;
    TRY(read_input(call, 0, &geometry));
    TRY(read_input(call, 1, &shape));
    TRY(read_input(call, 2, &dy));
    TRY(read_input(call, 3, &w));
    const int64_t *dims = (const int64_t *)(const void *)shape.data;
    Work work = {.y = dy.data, .w = w.data};
    if (elements(&shape) != (int64_t)dy.rank || !read_windows(&geometry, dims, dy.dims, dy.rank, &work.s) ||
        elements(&w) != work.s.groups * work.s.y_channels * work.s.x_channels * work.s.offsets)
        return refuse(call, "gradient, weight and geometry do not fit each other");
    TRY(make_output(call, 0, dims, dy.rank, &work.x));
    divide(&work);
    if (!work.s.y_channels || !work.s.y_size || !work.s.offsets) {
        memset(work.x, 0, (size_t)(work.s.images * work.s.groups * work.s.x_channels * work.s.x_size) * sizeof(float));
        return NULL;
    }
    parallel(call, data_task, divide_up(work.s.images, work.joined) * work.s.groups * work.blocks, &work);
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
    if (x.rank != dy.rank || !read_windows(&geometry, x.dims, dy.dims, dy.rank, &work.s))
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

typedef struct {
    Windows s;
    Planes p;
    const float *x, *w, *bias;
    float *y;
    _Atomic int failed;
} Forward;

static void forward_task(void *argument, size_t index) {
    Forward *work = argument;
    const Windows *s = &work->s;
    int64_t first = (int64_t)index % s->groups * s->y_channels;
    const float *bias = work->bias ? work->bias + first : NULL;
    if (!direct_convolution(s, &work->p, work->x + (int64_t)index * s->x_channels * s->x_size,
                            work->w + first * s->x_channels * s->offsets, bias,
                            work->y + (int64_t)index * s->y_channels * s->y_size))
        work->failed = 1;
}

/* A convolution whose groups have few channels: geometry, pads behind, data, weight, bias or none. */
static Status *run_forward(Call *call) {
    Tensor geometry, behind, x, w, bias;
    TRY(read_input(call, 0, &geometry));
    TRY(read_input(call, 1, &behind));
    TRY(read_input(call, 2, &x));
    TRY(read_input(call, 3, &w));
    Forward work = {.x = x.data, .w = w.data};
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
    if (work.s.offsets > MOST_PLACES) return refuse(call, "the kernel has too many places");
    if (!work.s.y_channels || !work.s.y_size) return NULL;
    find_planes(&work.s, &work.p);
    parallel(call, forward_task, work.s.images * work.s.groups, &work);
    return work.failed ? out_of_memory(call) : NULL;
}

Node convolution_node = {
    .name = "Conv", .inputs = 5, .needed = 4, .outputs = 1, .integers = 2, .run = run_forward};
Node convolution_data_gradient_node = {
    .name = "ConvDataGrad", .inputs = 4, .needed = 4, .outputs = 1, .integers = 2, .run = run_data};
Node convolution_weight_gradient_node = {
    .name = "ConvWeightGrad", .inputs = 3, .needed = 3, .outputs = 1, .integers = 1, .run = run_weight};
