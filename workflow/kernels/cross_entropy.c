/* CrossEntropy: the sum over rows of -log softmax(scores)[label], and of each row the logarithm of the sum of exp(scores);
 * and its gradient, dloss * (softmax(scores) - one at the label), which may be written over the scores: with a large
 * vocabulary they are the largest value of a step. Rows whose label is `ignore` count nothing. */
#include "rows.h"
#include "vector.h"

#include <math.h>

typedef struct {
    Rows rows;
    int64_t ignore;
    const int64_t *labels;
    const float *scores, *dloss, *sums_in;
    float *out, *sums, *losses;
    _Atomic int outside;
} Loss;

static int counts(Loss *s, int64_t row) {
    int64_t label = s->labels[row];
    if (label == s->ignore) return 0;
    if (label >= 0 && label < s->rows.width) return 1;
    s->outside = 1;
    return 0;
}

static void forward_task(void *argument, size_t index) {
    Loss *s = argument;
    int64_t width = s->rows.width, first = (int64_t)index * s->rows.height;
    int64_t end = least(s->rows.rows, first + s->rows.height), whole = width / W * W, rest = width - whole;
    const float lowest = -__builtin_inff();
    for (int64_t i = first; i < end; i++) {
        const float *x = s->scores + i * width;
        vec most = rest ? load_some(x + whole, rest, lowest) : all(lowest), sum = {0};
        for (int64_t j = 0; j < whole; j += W) most = larger(most, load(x + j));
        float top = largest_of(most);
        for (int64_t j = 0; j < whole; j += W) sum += exp_to_88(load(x + j) - all(top));
        if (rest) sum += exp_to_88(load_some(x + whole, rest, lowest) - all(top));
        s->sums[i] = top + logf(sum_of(sum));
        s->losses[i] = counts(s, i) ? s->sums[i] - x[s->labels[i]] : 0;
    }
}

static void backward_task(void *argument, size_t index) {
    Loss *s = argument;
    int64_t width = s->rows.width, first = (int64_t)index * s->rows.height;
    int64_t end = least(s->rows.rows, first + s->rows.height), whole = width / W * W, rest = width - whole;
    for (int64_t i = first; i < end; i++) {
        const float *x = s->scores + i * width;
        float *dx = s->out + i * width;
        int counted = counts(s, i);
        vec scale = all(counted ? *s->dloss : 0), sum = all(s->sums_in[i]);
        for (int64_t j = 0; j < whole; j += W) store(dx + j, scale * exp_to_88(load(x + j) - sum));
        if (rest) store_some(dx + whole, scale * exp_to_88(load_some(x + whole, rest, 0) - sum), rest);
        if (counted) dx[s->labels[i]] -= *s->dloss;
    }
}

static Status *read_rows(const Call *call, size_t scores, Loss *s, Tensor *x) {
    Tensor labels;
    TRY(read_input(call, 0, &labels));
    TRY(read_input(call, scores, x));
    if (x->rank != 2 || elements(&labels) != x->dims[0]) return refuse(call, "there is not one label to each row of scores");
    *s = (Loss){.rows = rows_in_blocks(x->dims[0], x->dims[1]), .ignore = call->ints[0], .scores = x->data};
    s->labels = (const int64_t *)(const void *)labels.data;
    return NULL;
}

static Status *forward(Call *call) {
    Tensor scores;
    Loss loss;
    float *sum;
    TRY(read_rows(call, 1, &loss, &scores));
    TRY(make_output(call, 0, NULL, 0, &sum));
    TRY(make_output(call, 1, scores.dims, 1, &loss.sums));
    loss.losses = scratch(loss.rows.rows + 1);
    if (!loss.losses) return out_of_memory(call);
    parallel(call, forward_task, loss.rows.blocks, &loss);
    double total = 0;
    for (int64_t i = 0; i < loss.rows.rows; i++) total += (double)loss.losses[i];
    *sum = (float)total;
    return loss.outside ? refuse(call, "a label is no class of the scores") : NULL;
}

static Status *backward(Call *call) {
    Tensor scores, sums, dloss;
    Loss loss;
    TRY(read_rows(call, 2, &loss, &scores));
    TRY(read_input(call, 1, &dloss));
    TRY(read_input(call, 3, &sums));
    loss.dloss = dloss.data, loss.sums_in = sums.data;
    if (elements(&dloss) != 1) return refuse(call, "the gradient of the loss is no scalar");
    if (elements(&sums) != loss.rows.rows) return refuse(call, "there is not one sum to each row of scores");
    TRY(make_output(call, 0, scores.dims, 2, &loss.out));
    parallel(call, backward_task, loss.rows.blocks, &loss);
    return NULL;
}

Node cross_entropy_node = {.name = "CrossEntropy",
                           .inputs = 2,
                           .needed = 2,
                           .outputs = 2,
                           .integers = 1,
                           .ints = {"ignore"},
                           .run = forward};
Node cross_entropy_gradient_node = {.name = "CrossEntropyGrad",
                                    .inputs = 4,
                                    .needed = 4,
                                    .outputs = 1,
                                    .integers = 1,
                                    .in_place = 3,
                                    .ints = {"ignore"},
                                    .run = backward};
