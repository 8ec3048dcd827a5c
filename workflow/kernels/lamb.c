/* LAMB (You et al. 2020, "Large batch optimization for deep learning", algorithm 2) on one parameter of a flat buffer:
 * Adam's moments m and v, u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + epsilon) + decay * w, and
 * w = w - rate * r * u with r = |w| / |u|, or 1 where either is 0. Outputs may lie where the inputs lie.
 *
 * u is computed twice, for its norm and for the weights, so that no memory holds it. Some squares are added in single
 * precision and their sums in double, a task's and then all tasks' in order: the norms do not depend on the threads. */
#include "moments.h"

#define ADDED 4 /* vectors of squares added in single precision */

typedef struct {
    Moments moments;
    float scale, step;
    double *sums; /* of the squares of w and of u, for each task */
} Lamb;

static inline vec change(const Lamb *l, vec w, vec m, vec v) {
    const Moments *s = &l->moments;
    return all(l->scale) * m / (root_of(v) * all(s->root) + all(s->epsilon)) + all(s->decay) * w;
}

static void norms_task(void *argument, size_t index) {
    const Lamb *l = argument;
    const Moments *s = &l->moments;
    int64_t first = (int64_t)index * TASK_ELEMENTS, end = least(s->count, first + TASK_ELEMENTS);
    double of_w = 0, of_u = 0;
    for (int64_t i = first; i < end;) {
        vec w_squares = {0}, u_squares = {0};
        for (int block = 0; block < ADDED && i < end; block++, i += W) {
            vec m, v, w = load_until(s->w, i, end);
            next_moments(s, i, end, &m, &v);
            vec u = change(l, w, m, v);
            w_squares += w * w, u_squares += u * u;
        }
        of_w += sum_of(w_squares), of_u += sum_of(u_squares);
    }
    l->sums[2 * index] = of_w, l->sums[2 * index + 1] = of_u;
}

static void step_task(void *argument, size_t index) {
    const Lamb *l = argument;
    const Moments *s = &l->moments;
    int64_t first = (int64_t)index * TASK_ELEMENTS, end = least(s->count, first + TASK_ELEMENTS);
    for (int64_t i = first; i < end; i += W) {
        vec w = load_until(s->w, i, end);
        w -= all(l->step) * change(l, w, load_until(s->m_out, i, end), load_until(s->v_out, i, end));
        store_until(s->w_out, i, end, w);
    }
}

static Status *run(Call *call) {
    Lamb l;
    const Moments *s = &l.moments;
    TRY(read_moments(call, &l.moments));
    const int64_t tasks = divide_up(s->count, TASK_ELEMENTS);
    l.scale = (float)(1 / s->first);
    l.sums = (double *)(void *)scratch(4 * tasks + 4);
    if (!l.sums) return out_of_memory(call);
    parallel(call, norms_task, tasks, &l);
    double of_w = 0, of_u = 0;
    for (int64_t i = 0; i < tasks; i++) of_w += l.sums[2 * i], of_u += l.sums[2 * i + 1];
    l.step = (float)(s->rate * (of_w > 0 && of_u > 0 ? sqrt(of_w / of_u) : 1));
    parallel(call, step_task, tasks, &l);
    return NULL;
}

Node lamb_node = {
    .name = "Lamb",
    .inputs = 6,
    .needed = 6,
    .outputs = 3,
    .integers = 1,
    .floats = MOMENT_ATTRIBUTES,
    .run = run,
};
