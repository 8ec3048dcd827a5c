/* Adam (Kingma and Ba 2015, algorithm 1) and AdamW (Loshchilov and Hutter 2019, algorithm 2) on flat buffers:
 * m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, w = w - rate (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + epsilon),
 * the weight first lessened by rate * decay * w. Outputs may lie where the inputs lie. */
#include "rows.h"
#include "vector.h"

#include <math.h>

enum { BETA_1, BETA_2, EPSILON, DECAY };

typedef struct {
    int64_t count;
    float beta_1, beta_2, epsilon, keep, step, root;
    const float *w, *g, *m, *v;
    float *w_out, *m_out, *v_out;
} Adam;

static void task(void *argument, size_t index) {
    const Adam *a = argument;
    int64_t first = (int64_t)index * TASK_ELEMENTS, end = least(a->count, first + TASK_ELEMENTS);
    for (int64_t i = first; i < end; i += W) {
        int64_t some = end - i;
        int whole = some >= W;
        vec g = whole ? load(a->g + i) : load_some(a->g + i, some, 0);
        vec m = whole ? load(a->m + i) : load_some(a->m + i, some, 0);
        vec v = whole ? load(a->v + i) : load_some(a->v + i, some, 0);
        vec w = whole ? load(a->w + i) : load_some(a->w + i, some, 0);
        m = all(a->beta_1) * m + all(1 - a->beta_1) * g;
        v = all(a->beta_2) * v + all(1 - a->beta_2) * g * g;
        w = all(a->keep) * w - all(a->step) * m / (root_of(v) * all(a->root) + all(a->epsilon));
        if (whole) {
            store(a->m_out + i, m), store(a->v_out + i, v), store(a->w_out + i, w);
        } else {
            store_some(a->m_out + i, m, some), store_some(a->v_out + i, v, some), store_some(a->w_out + i, w, some);
        }
    }
}

static Status *run(Call *call) {
    Tensor rate, step, w, g, m, v;
    TRY(read_input(call, 0, &step));
    TRY(read_input(call, 1, &rate));
    TRY(read_input(call, 2, &w));
    TRY(read_input(call, 3, &g));
    TRY(read_input(call, 4, &m));
    TRY(read_input(call, 5, &v));
    int64_t count = elements(&w);
    if (elements(&g) != count || elements(&m) != count || elements(&v) != count || !elements(&rate) || !elements(&step))
        return refuse(call, "gradients and moments are not as long as the parameters");
    const float *f = call->floats;
    double t = (double)*(const int64_t *)(const void *)step.data;
    double first = 1 - pow((double)f[BETA_1], t), second = 1 - pow((double)f[BETA_2], t);
    Adam adam = {count, f[BETA_1], f[BETA_2], f[EPSILON], .w = w.data, .g = g.data, .m = m.data, .v = v.data};
    adam.keep = 1 - *rate.data * f[DECAY];
    adam.step = (float)(*rate.data / first);
    adam.root = (float)(1 / sqrt(second));
    TRY(make_output(call, 0, m.dims, m.rank, &adam.m_out));
    TRY(make_output(call, 1, v.dims, v.rank, &adam.v_out));
    TRY(make_output(call, 2, w.dims, w.rank, &adam.w_out));
    parallel(call, task, divide_up(count, TASK_ELEMENTS), &adam);
    return NULL;
}

Node adam_node = {
    .name = "Adam",
    .inputs = 6,
    .needed = 6,
    .outputs = 3,
    .integers = 1,
    .floats = {"beta_1", "beta_2", "epsilon", "decay"},
    .run = run,
};
