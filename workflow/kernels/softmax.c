/* Softmax of scale * x + mask over the last axis, and its gradient dx = scale * y * (dy - sum of dy * y).
 *
 * x and mask are spread over each other as by ONNX's Add. */
#include "rows.h"
#include "vector.h"

/* A factor as it is spread over the result: `step` along the last axis is 1 or 0. */
typedef struct {
    const float *data;
    int64_t strides[MOST_RANK], step;
} Spread;

typedef struct {
    Rows rows;
    float scale;
    Spread x, mask;
    const float *y, *dy;
    float *out;
    size_t rank;
    int64_t dims[MOST_RANK];
} Softmax;

static const float *row_of(const Softmax *s, const Spread *of, int64_t row) {
    const float *data = of->data;
    for (size_t i = s->rank - 1; i-- > 0; row /= s->dims[i]) data += row % s->dims[i] * of->strides[i];
    return data;
}

static inline vec lanes(const float *row, int64_t step, int64_t j, int64_t count) {
    if (!step) return all(*row);
    return count < W ? load_some(row + j, count, 0) : load(row + j);
}

static void forward_task(void *argument, size_t index) {
    const Softmax *s = argument;
    int64_t width = s->rows.width, first = (int64_t)index * s->rows.height;
    int64_t end = least(s->rows.rows, first + s->rows.height), whole = width / W * W, rest = width - whole;
    const float lowest = -__builtin_inff();
    for (int64_t i = first; i < end; i++) {
        const float *x = row_of(s, &s->x, i), *mask = s->mask.data ? row_of(s, &s->mask, i) : NULL;
        float *y = s->out + i * width;
        vec most = all(lowest), sum = {0};
        for (int64_t j = 0; j < whole; j += W) {
            vec value = all(s->scale) * lanes(x, s->x.step, j, W);
            if (mask) value += lanes(mask, s->mask.step, j, W);
            store(y + j, value);
            most = larger(most, value);
        }
        if (rest) {
            vec value = all(s->scale) * lanes(x, s->x.step, whole, rest);
            if (mask) value += lanes(mask, s->mask.step, whole, rest);
            store_some(y + whole, value, rest);
        }
        if (rest) most = larger(most, load_some(y + whole, rest, lowest));
        vec top = all(largest_of(most));
        for (int64_t j = 0; j < whole; j += W) {
            vec value = exp_to_88(load(y + j) - top);
            store(y + j, value);
            sum += value;
        }
        if (rest) {
            vec value = exp_to_88(load_some(y + whole, rest, lowest) - top);
            store_some(y + whole, value, rest);
            sum += value;
        }
        float share = 1 / sum_of(sum);
        for (int64_t j = 0; j < whole; j += W) store(y + j, load(y + j) * all(share));
        for (int64_t j = whole; j < width; j++) y[j] *= share;
    }
}

static void backward_task(void *argument, size_t index) {
    const Softmax *s = argument;
    int64_t width = s->rows.width, first = (int64_t)index * s->rows.height;
    int64_t end = least(s->rows.rows, first + s->rows.height), whole = width / W * W;
    for (int64_t i = first; i < end; i++) {
        const float *y = s->y + i * width, *dy = s->dy + i * width;
        float *dx = s->out + i * width;
        vec sums = {0};
        for (int64_t j = 0; j < whole; j += W) sums += load(dy + j) * load(y + j);
        float sum = sum_of(sums);
        for (int64_t j = whole; j < width; j++) sum += dy[j] * y[j];
        for (int64_t j = 0; j < whole; j += W)
            store(dx + j, all(s->scale) * load(y + j) * (load(dy + j) - all(sum)));
        for (int64_t j = whole; j < width; j++) dx[j] = s->scale * y[j] * (dy[j] - sum);
    }
}

/* The strides of a tensor over the result's axes. */
static Spread spread(const Softmax *s, const Tensor *tensor) {
    Spread out = {.data = tensor->data};
    int64_t stride = 1;
    for (size_t i = s->rank; i-- > s->rank - tensor->rank; stride *= tensor->dims[i + tensor->rank - s->rank]) {
        int64_t own = tensor->dims[i + tensor->rank - s->rank] == 1 ? 0 : stride;
        if (i + 1 == s->rank)
            out.step = own;
        else
            out.strides[i] = own;
    }
    return out;
}

/* The axes of x and mask together; 0 when they do not fit each other. */
static int join(const Tensor *x, const Tensor *mask, Softmax *s) {
    s->rank = x->rank > mask->rank ? x->rank : mask->rank;
    for (size_t i = 1; i <= s->rank; i++) {
        int64_t a = i <= x->rank ? x->dims[x->rank - i] : 1, b = i <= mask->rank ? mask->dims[mask->rank - i] : 1;
        if (a != b && a != 1 && b != 1) return 0;
        s->dims[s->rank - i] = a == 1 ? b : a;
    }
    return 1;
}

static Status *forward(Call *call) {
    Tensor x, mask = {0};
    Softmax s = {.scale = call->floats[0]};
    TRY(read_input(call, 0, &x));
    if (count_inputs(call) > 1) TRY(read_input(call, 1, &mask));
    if (!join(&x, &mask, &s)) return refuse(call, "scores and mask do not fit each other");
    if (!s.rank) return refuse(call, "a scalar has no last axis");
    s.x = spread(&s, &x);
    if (mask.data) s.mask = spread(&s, &mask);
    Tensor result = {.rank = s.rank};
    for (size_t i = 0; i < s.rank; i++) result.dims[i] = s.dims[i];
    s.rows = rows_in_blocks(rows_of(&result), s.dims[s.rank - 1]);
    TRY(make_output(call, 0, s.dims, s.rank, &s.out));
    parallel(call, forward_task, s.rows.blocks, &s);
    return NULL;
}

static Status *backward(Call *call) {
    Tensor dy, y;
    TRY(read_input(call, 0, &dy));
    TRY(read_input(call, 1, &y));
    if (!y.rank || elements(&dy) != elements(&y)) return refuse(call, "the gradient is not as large as y");
    Softmax s = {rows_in_blocks(rows_of(&y), y.dims[y.rank - 1]), call->floats[0], .y = y.data, .dy = dy.data};
    TRY(make_output(call, 0, y.dims, y.rank, &s.out));
    parallel(call, backward_task, s.rows.blocks, &s);
    return NULL;
}

Node softmax_node = {.name = "Softmax", .inputs = 2, .needed = 1, .outputs = 1, .floats = {"scale"}, .run = forward};
Node softmax_gradient_node = {
    .name = "SoftmaxGrad", .inputs = 2, .needed = 2, .outputs = 1, .in_place = 1, .floats = {"scale"}, .run = backward};
