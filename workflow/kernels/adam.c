/* Adam (Kingma and Ba 2015, algorithm 1) and AdamW (Loshchilov and Hutter 2019, algorithm 2) on flat buffers:
 * m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, w = w - rate (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + epsilon),
 * the weight first lessened by rate * decay * w. Outputs may lie where the inputs lie. */
#include "moments.h"

typedef struct {
    Moments moments;
    float keep, step;
} Adam;

static void task(void *argument, size_t index) {
    const Adam *a = argument;
    const Moments *s = &a->moments;
    int64_t first = (int64_t)index * TASK_ELEMENTS, end = least(s->count, first + TASK_ELEMENTS);
    for (int64_t i = first; i < end; i += W) {
        vec m, v, w = load_until(s->w, i, end);
        next_moments(s, i, end, &m, &v);
        w = all(a->keep) * w - all(a->step) * m / (root_of(v) * all(s->root) + all(s->epsilon));
        store_until(s->w_out, i, end, w);
    }
}

static Status *run(Call *call) {
    Adam adam;
    Moments *s = &adam.moments;
    TRY(read_moments(call, s));
    adam.keep = 1 - s->rate * s->decay;
    adam.step = (float)(s->rate / s->first);
    parallel(call, task, divide_up(s->count, TASK_ELEMENTS), &adam);
    return NULL;
}

Node adam_node = {
    .name = "Adam",
    .inputs = 6,
    .needed = 6,
    .outputs = 3,
    .integers = 1,
    .floats = MOMENT_ATTRIBUTES,
    .run = run,
};
