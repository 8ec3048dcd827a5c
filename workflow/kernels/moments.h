/* What Adam and LAMB share: parameters, gradients and both moments of a flat buffer, and how the moments go on:
 * m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, in the next step divided by 1 - b1^t and 1 - b2^t. */
#ifndef ORTFLOW_MOMENTS_H
#define ORTFLOW_MOMENTS_H

#include <math.h>

#include "rows.h"
#include "vector.h"

/* The first attributes of both operators; `decay` is the fourth. */
#define MOMENT_ATTRIBUTES {"beta_1", "beta_2", "epsilon", "decay"}

typedef struct {
    int64_t count;
    float beta_1, beta_2, epsilon, decay, rate;
    double first; /* 1 - b1^t */
    float root;   /* 1 / sqrt(1 - b2^t) */
    const float *w, *g, *m, *v;
    float *w_out, *m_out, *v_out;
} Moments;

/* step, rate, weights, gradients, moments -> moments, weights */
static inline Status *read_moments(Call *call, Moments *s) {
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
    *s = (Moments){count, f[0], f[1], f[2], f[3], *rate.data, .w = w.data, .g = g.data, .m = m.data, .v = v.data};
    s->first = 1 - pow((double)s->beta_1, t);
    s->root = (float)(1 / sqrt(1 - pow((double)s->beta_2, t)));
    TRY(make_output(call, 0, m.dims, m.rank, &s->m_out));
    TRY(make_output(call, 1, v.dims, v.rank, &s->v_out));
    return make_output(call, 2, w.dims, w.rank, &s->w_out);
}

/* Both moments of the elements from i on, as many as a vector has or as there are until `end`; they are stored, too. */
static inline void next_moments(const Moments *s, int64_t i, int64_t end, vec *m, vec *v) {
    const vec g = load_until(s->g, i, end);
    *m = all(s->beta_1) * load_until(s->m, i, end) + all(1 - s->beta_1) * g;
    *v = all(s->beta_2) * load_until(s->v, i, end) + all(1 - s->beta_2) * g * g;
    store_until(s->m_out, i, end, *m);
    store_until(s->v_out, i, end, *v);
}

#endif
