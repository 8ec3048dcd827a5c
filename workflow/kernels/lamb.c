/* LAMB (You et al. 2020, "Large batch optimization for deep learning", algorithm 2) on one parameter of a flat buffer:
 * Adam's moments m and v, u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + epsilon) + decay * w, and
 * w = w - rate * r * u with r = |w| / |u|, or 1 where either is 0. Outputs may lie where the inputs lie.
 *
 * u is computed twice, for its norm and for the weights, so that no memory holds it. Some squares are added in single
 * precision and their sums in double, a task's and then all tasks' in order: the norms do not depend on the threads. */
#include <math.h>

#include "rows.h"
#include "vector.h"

#define ADDED 4 /* vectors of squares added in single precision */

enum { BETA_1, BETA_2, EPSILON, DECAY };

typedef struct {
    int64_t count;
    float beta_1, beta_2, epsilon, decay, scale, root, step;
    const float *w, *g, *m, *v;
    float *w_out, *m_out, *v_out;
    double *sums; /* of the squares of w and of u, for each task */
} Lamb;

static inline vec change(const Lamb *s, vec w, vec m, vec v) {
    return all(s->scale) * m / (root_of(v) * all(s->root) + all(s->epsilon)) + all(s->decay) * w;
}

static void norms_task(void *argument, size_t index) {
    const Lamb *s = argument;
    int64_t first = (int64_t)index * TASK_ELEMENTS, end = least(s->count, first + TASK_ELEMENTS);
    double of_w = 0, of_u = 0;
    for (int64_t i = first; i < end;) {
        vec w_squares = {0}, u_squares = {0};
        for (int block = 0; block < ADDED && i < end; block++, i += W) {
            int64_t some = end - i;
            int whole = some >= W;
            vec g = whole ? load(s->g + i) : load_some(s->g + i, some, 0);
            vec m = whole ? load(s->m + i) : load_some(s->m + i, some, 0);
            vec v = whole ? load(s->v + i) : load_some(s->v + i, some, 0);
            vec w = whole ? load(s->w + i) : load_some(s->w + i, some, 0);
            m = all(s->beta_1) * m + all(1 - s->beta_1) * g;
            v = all(s->beta_2) * v + all(1 - s->beta_2) * g * g;
            vec u = change(s, w, m, v);
            w_squares += w * w, u_squares += u * u;
            if (whole)
                store(s->m_out + i, m), store(s->v_out + i, v);
            else
                store_some(s->m_out + i, m, some), store_some(s->v_out + i, v, some);
        }
        of_w += sum_of(w_squares), of_u += sum_of(u_squares);
    }
    s->sums[2 * index] = of_w, s->sums[2 * index + 1] = of_u;
}

static void step_task(void *argument, size_t index) {
    const Lamb *s = argument;
    int64_t first = (int64_t)index * TASK_ELEMENTS, end = least(s->count, first + TASK_ELEMENTS);
    for (int64_t i = first; i < end; i += W) {
        int64_t some = end - i;
        int whole = some >= W;
        vec m = whole ? load(s->m_out + i) : load_some(s->m_out + i, some, 0);
        vec v = whole ? load(s->v_out + i) : load_some(s->v_out + i, some, 0);
        vec w = whole ? load(s->w + i) : load_some(s->w + i, some, 0);
        w -= all(s->step) * change(s, w, m, v);
        if (whole)
            store(s->w_out + i, w);
        else
            store_some(s->w_out + i, w, some);
    }
}

/* step, rate, weights, gradients, moments -> moments, weights */
static Status *run(Call *call) {
    Tensor rate, step, w, g, m, v;
    TRY(read_input(call, 0, &step));
    TRY(read_input(call, 1, &rate));
    TRY(read_input(call, 2, &w));
    TRY(read_input(call, 3, &g));
    TRY(read_input(call, 4, &m));
    TRY(read_input(call, 5, &v));
    int64_t count = elements(&w), tasks = divide_up(count, TASK_ELEMENTS);
    if (elements(&g) != count || elements(&m) != count || elements(&v) != count || !elements(&rate) || !elements(&step))
        return refuse(call, "gradients and moments are not as long as the parameters");
    const float *f = call->floats;
    double t = (double)*(const int64_t *)(const void *)step.data;
    Lamb s = {count, f[BETA_1], f[BETA_2], f[EPSILON], f[DECAY], .w = w.data, .g = g.data, .m = m.data, .v = v.data};
    s.scale = (float)(1 / (1 - pow((double)f[BETA_1], t)));
    s.root = (float)(1 / sqrt(1 - pow((double)f[BETA_2], t)));
    TRY(make_output(call, 0, m.dims, m.rank, &s.m_out));
    TRY(make_output(call, 1, v.dims, v.rank, &s.v_out));
    TRY(make_output(call, 2, w.dims, w.rank, &s.w_out));
    s.sums = (double *)(void *)scratch(4 * tasks + 4);
    if (!s.sums) return out_of_memory(call);
    parallel(call, norms_task, tasks, &s);
    double of_w = 0, of_u = 0;
    for (int64_t i = 0; i < tasks; i++) of_w += s.sums[2 * i], of_u += s.sums[2 * i + 1];
    s.step = (float)(*rate.data * (of_w > 0 && of_u > 0 ? sqrt(of_w / of_u) : 1));
    parallel(call, step_task, tasks, &s);
    return NULL;
}

Node lamb_node = {
    .name = "Lamb",
    .inputs = 6,
    .needed = 6,
    .outputs = 3,
    .integers = 1,
    .floats = {"beta_1", "beta_2", "epsilon", "decay"},
    .run = run,
};
