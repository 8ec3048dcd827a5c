/* LayerNormalization over the last axis (Ba, Kiros and Hinton 2016), RMSNormalization (Zhang and Sennrich 2019), and
 * their gradients.
 *
 * With n = (x - mean) * inverse and g = dy * scale, means over the last axis:
 * y = n * scale + bias, dx = (g - mean(g) - n * mean(g * n)) * inverse, dscale = sum of dy * n, dbias = sum of dy.
 * Of a root mean square, mean is 0, and mean(g) and dbias fall away. */
#include "rows.h"
#include "vector.h"

#include <math.h>

typedef struct {
    Rows rows;
    float epsilon;
    const float *x, *scale, *bias, *dy, *mean_in, *inverse_in;
    float *y, *mean, *inverse, *dx, *parts;
} Norm;

INLINE void forward_rows(const Norm *s, size_t index, int centred) {
    int64_t width = s->rows.width, first = (int64_t)index * s->rows.height;
    int64_t end = least(s->rows.rows, first + s->rows.height), whole = width / W * W, rest = width - whole;
    for (int64_t i = first; i < end; i++) {
        const float *x = s->x + i * width;
        float *y = s->y + i * width;
        vec sum = centred && rest ? load_some(x + whole, rest, 0) : all(0), square = {0};
        for (int64_t j = 0; centred && j < whole; j += W) sum += load(x + j);
        float mean = centred ? sum_of(sum) / (float)width : 0;
        for (int64_t j = 0; j < whole; j += W) {
            vec d = load(x + j) - all(mean);
            square += d * d;
        }
        if (rest) {
            vec d = load_some(x + whole, rest, mean) - all(mean);
            square += d * d;
        }
        float inverse = 1 / sqrtf(sum_of(square) / (float)width + s->epsilon);
        for (int64_t j = 0; j < whole; j += W) {
            vec n = (load(x + j) - all(mean)) * all(inverse) * load(s->scale + j);
            store(y + j, s->bias ? n + load(s->bias + j) : n);
        }
        for (int64_t j = whole; j < width; j++)
            y[j] = (x[j] - mean) * inverse * s->scale[j] + (s->bias ? s->bias[j] : 0);
        if (centred) s->mean[i] = mean;
        s->inverse[i] = inverse;
    }
}

INLINE void backward_rows(const Norm *s, size_t index, int centred) {
    int64_t width = s->rows.width, first = (int64_t)index * s->rows.height;
    int64_t end = least(s->rows.rows, first + s->rows.height), whole = width / W * W;
    float *dscale = s->parts + 2 * (int64_t)index * width, *dbias = dscale + width;
    for (int64_t j = 0; j < (centred ? 2 : 1) * width; j++) dscale[j] = 0;
    for (int64_t i = first; i < end; i++) {
        const float *x = s->x + i * width, *dy = s->dy + i * width;
        float mean = centred ? s->mean_in[i] : 0, inverse = s->inverse_in[i];
        float *dx = s->dx + i * width;
        vec along = {0}, across = {0};
        for (int64_t j = 0; j < whole; j += W) {
            vec d = load(dy + j), n = (load(x + j) - all(mean)) * all(inverse), g = d * load(s->scale + j);
            along += g * n;
            store(dscale + j, load(dscale + j) + d * n);
            if (!centred) continue;
            across += g;
            store(dbias + j, load(dbias + j) + d);
        }
        float sum = sum_of(across), turned = sum_of(along);
        for (int64_t j = whole; j < width; j++) {
            float n = (x[j] - mean) * inverse, g = dy[j] * s->scale[j];
            turned += g * n;
            dscale[j] += dy[j] * n;
            if (!centred) continue;
            sum += g;
            dbias[j] += dy[j];
        }
        sum /= (float)width;
        turned /= (float)width;
        for (int64_t j = 0; j < whole; j += W) {
            vec n = (load(x + j) - all(mean)) * all(inverse), g = load(dy + j) * load(s->scale + j);
            store(dx + j, (g - all(sum) - n * all(turned)) * all(inverse));
        }
        for (int64_t j = whole; j < width; j++) {
            float n = (x[j] - mean) * inverse, g = dy[j] * s->scale[j];
            dx[j] = (g - sum - n * turned) * inverse;
        }
    }
}

static void forward_task(void *argument, size_t index) { forward_rows(argument, index, 1); }
static void backward_task(void *argument, size_t index) { backward_rows(argument, index, 1); }
static void rms_forward_task(void *argument, size_t index) { forward_rows(argument, index, 0); }
static void rms_backward_task(void *argument, size_t index) { backward_rows(argument, index, 0); }

static Status *run_forward(Call *call, int centred) {
    Tensor x, scale, bias = {0};
    TRY(read_input(call, 0, &x));
    TRY(read_input(call, 1, &scale));
    if (centred && count_inputs(call) > 2) TRY(read_input(call, 2, &bias));
    int64_t width = x.rank ? x.dims[x.rank - 1] : 0;
    if (!x.rank || elements(&scale) != width || (bias.data && elements(&bias) != width))
        return refuse(call, "scale or bias is not as long as the last axis");
    Norm norm = {rows_in_blocks(rows_of(&x), width), call->floats[0], .x = x.data, .scale = scale.data, .bias = bias.data};
    int64_t reduced[MOST_RANK];
    for (size_t i = 0; i < x.rank; i++) reduced[i] = i + 1 < x.rank ? x.dims[i] : 1;
    TRY(make_output(call, 0, x.dims, x.rank, &norm.y));
    if (centred) TRY(make_output(call, 1, reduced, x.rank, &norm.mean));
    TRY(make_output(call, centred ? 2 : 1, reduced, x.rank, &norm.inverse));
    parallel(call, centred ? forward_task : rms_forward_task, norm.rows.blocks, &norm);
    return NULL;
}

static Status *run_backward(Call *call, int centred) {
    Tensor dy, x, scale, mean = {0}, inverse;
    TRY(read_input(call, 0, &dy));
    TRY(read_input(call, 1, &x));
    TRY(read_input(call, 2, &scale));
    if (centred) TRY(read_input(call, 3, &mean));
    TRY(read_input(call, centred ? 4 : 3, &inverse));
    int64_t width = x.rank ? x.dims[x.rank - 1] : 0;
    int fits = x.rank && elements(&scale) == width && elements(&dy) == elements(&x);
    if (!fits || elements(&inverse) != rows_of(&x) || (centred && elements(&mean) != rows_of(&x)))
        return refuse(call, "the gradient does not fit the normalised tensor");
    Norm norm = {rows_in_parts(rows_of(&x), width), .dy = dy.data, .x = x.data, .scale = scale.data, .mean_in = mean.data};
    norm.inverse_in = inverse.data;
    norm.parts = scratch(2 * MOST_PARTS * width + 1);
    if (!norm.parts) return out_of_memory(call);
    float *dscale, *dbias;
    TRY(make_output(call, 0, x.dims, x.rank, &norm.dx));
    TRY(make_output(call, 1, &width, 1, &dscale));
    if (centred) TRY(make_output(call, 2, &width, 1, &dbias));
    parallel(call, centred ? backward_task : rms_backward_task, norm.rows.blocks, &norm);
    add_rows(norm.parts, norm.rows.blocks, 2 * width, width, dscale);
    if (centred) add_rows(norm.parts + width, norm.rows.blocks, 2 * width, width, dbias);
    return NULL;
}

/* x, scale, bias -> y, mean, inverse */
static Status *forward(Call *call) { return run_forward(call, 1); }
/* dy, x, scale, mean, inverse -> of x, scale, bias */
static Status *backward(Call *call) { return run_backward(call, 1); }
/* x, scale -> y, inverse */
static Status *rms_forward(Call *call) { return run_forward(call, 0); }
/* dy, x, scale, inverse -> of x, scale */
static Status *rms_backward(Call *call) { return run_backward(call, 0); }

Node norm_node = {
    .name = "LayerNormalization", .inputs = 3, .needed = 2, .outputs = 3, .floats = {"epsilon"}, .run = forward};
Node norm_gradient_node = {.name = "LayerNormalizationGrad", .inputs = 5, .needed = 5, .outputs = 3, .in_place = 1, .run = backward};
Node rms_node = {
    .name = "RMSNormalization", .inputs = 2, .needed = 2, .outputs = 2, .floats = {"epsilon"}, .run = rms_forward};
Node rms_gradient_node = {.name = "RMSNormalizationGrad", .inputs = 4, .needed = 4, .outputs = 2, .in_place = 1, .run = rms_backward};
