/* Stochastic gradient descent as torch.optim.SGD defines it, on flat buffers: g = g + decay * w, b = momentum * b + g,
 * w = w - rate * b, or with Nesterov's momentum w = w - rate * (g + momentum * b); without momentum w = w - rate * g.
 * Outputs may lie where the inputs lie. */
#include "rows.h"
#include "vector.h"

enum { DECAY, MOMENTUM };

typedef struct {
    int64_t count;
    float rate, decay, momentum;
    int64_t nesterov;
    const float *w, *g, *b;
    float *w_out, *b_out; /* b and b_out are NULL without momentum */
} Sgd;

static void task(void *argument, size_t index) {
    const Sgd *s = argument;
    int64_t first = (int64_t)index * TASK_ELEMENTS, end = least(s->count, first + TASK_ELEMENTS);
    for (int64_t i = first; i < end; i += W) {
        vec w = load_until(s->w, i, end), g = load_until(s->g, i, end) + all(s->decay) * w;
        if (s->b) {
            vec b = all(s->momentum) * load_until(s->b, i, end) + g;
            store_until(s->b_out, i, end, b);
            g = s->nesterov ? g + all(s->momentum) * b : b;
        }
        store_until(s->w_out, i, end, w - all(s->rate) * g);
    }
}

static Status *run_on(Call *call, int has_momentum) {
    Tensor rate, w, g, b = {0};
    TRY(read_input(call, 0, &rate));
    TRY(read_input(call, 1, &w));
    TRY(read_input(call, 2, &g));
    if (has_momentum) TRY(read_input(call, 3, &b));
    int64_t count = elements(&w);
    if (elements(&g) != count || (has_momentum && elements(&b) != count) || !elements(&rate))
        return refuse(call, "gradients and momentum are not as long as the parameters");
    Sgd s = {count, *rate.data, call->floats[DECAY], .w = w.data, .g = g.data, .b = b.data};
    if (has_momentum) {
        s.momentum = call->floats[MOMENTUM], s.nesterov = call->ints[0];
        TRY(make_output(call, 1, b.dims, b.rank, &s.b_out));
    }
    TRY(make_output(call, 0, w.dims, w.rank, &s.w_out));
    parallel(call, task, divide_up(count, TASK_ELEMENTS), &s);
    return NULL;
}

/* rate, weights, gradients -> weights */
static Status *run_plain(Call *call) { return run_on(call, 0); }

/* rate, weights, gradients, momentum -> weights, momentum */
static Status *run_momentum(Call *call) { return run_on(call, 1); }

Node sgd_node = {.name = "Sgd", .inputs = 3, .needed = 3, .outputs = 1, .floats = {"decay"}, .run = run_plain};
Node sgd_momentum_node = {.name = "SgdMomentum", .inputs = 4, .needed = 4, .outputs = 2, .ints = {"nesterov"},
                          .floats = {"decay", "momentum"}, .run = run_momentum};
