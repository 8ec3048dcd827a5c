/* Gelu (Hendrycks and Gimpel 2016) and its gradient, exact or with the approximation by tanh.
 *
 * Exact: y = x F(x), dy/dx = F(x) + x f(x), with F and f the normal distribution and its density. With z = |x| / sqrt(2)
 * F(-|x|) = erfc(z) / 2, and erfc(z) = t P(t) e^(-z^2) for t = 1 / (1 + 0.45 z): the form of Abramowitz and Stegun 7.1.26,
 * with a polynomial P of degree 6 fitted to an error of 1e-9 in erfc.
 * Approximate: y = x s(u), dy/dx = s(u) + x u' s(u) (1 - s(u)), with s the logistic function and
 * u = 2 sqrt(2 / pi) (x + 0.044715 x^3). */
#include "rows.h"
#include "vector.h"

#define CUBE 0.044715f
#define TWICE_SLOPE 1.59576912f /* 2 sqrt(2 / pi) */

typedef struct {
    int approximate;
    int64_t count;
    const float *x, *dy;
    float *out;
} Gelu;

/* F(x), and `bell` = e^(-x^2 / 2). */
static inline vec normal_distribution(vec x, vec *bell) {
    vec z = choose(x < all(0), -x, x) * all(0.707106781f), t = all(1) / (all(1) + all(0.45f) * z);
    vec p = all(9.2569910e-2f);
    p = p * t + all(-4.9410564e-1f);
    p = p * t + all(8.5717034e-1f);
    p = p * t + all(-3.7580550e-1f);
    p = p * t + all(4.6017221e-1f);
    p = p * t + all(2.0100890e-1f);
    p = p * t + all(2.5898975e-1f);
    *bell = exp_to_88(all(-0.5f) * x * x);
    vec tail = all(0.5f) * t * p * *bell;
    return choose(x < all(0), tail, all(1) - tail);
}

static inline vec value_at(vec x, int approximate) {
    vec bell;
    if (!approximate) return x * normal_distribution(x, &bell);
    vec u = all(TWICE_SLOPE) * (x + all(CUBE) * x * x * x);
    return x / (all(1) + exp_to_88(least_of(-u, all(88))));
}

static inline vec slope_at(vec x, int approximate) {
    vec bell;
    if (!approximate) {
        vec below = normal_distribution(x, &bell);
        return below + x * bell * all(0.398942280f);
    }
    /* Beyond 10 the logistic function is flat to the last bit, and the powers of x must not overflow. */
    x = choose(x > all(10), all(10), choose(x < all(-10), all(-10), x));
    vec square = x * x, u = all(TWICE_SLOPE) * (x + all(CUBE) * x * square);
    vec s = all(1) / (all(1) + exp_to_88(-u));
    vec rise = all(TWICE_SLOPE) * (all(1) + all(3 * CUBE) * square);
    return s + x * rise * s * (all(1) - s);
}

static inline void work(const Gelu *g, size_t index, int approximate) {
    int64_t first = (int64_t)index * TASK_ELEMENTS, end = least(g->count, first + TASK_ELEMENTS), i = first;
    for (; i + W <= end; i += W) {
        vec x = load(g->x + i);
        store(g->out + i, g->dy ? load(g->dy + i) * slope_at(x, approximate) : value_at(x, approximate));
    }
    if (i < end) {
        vec x = load_some(g->x + i, end - i, 0);
        vec out = g->dy ? load_some(g->dy + i, end - i, 0) * slope_at(x, approximate) : value_at(x, approximate);
        store_some(g->out + i, out, end - i);
    }
}

static void task(void *argument, size_t index) {
    const Gelu *g = argument;
    if (g->approximate)
        work(g, index, 1);
    else
        work(g, index, 0);
}

static Status *forward(Call *call) {
    Tensor x;
    TRY(read_input(call, 0, &x));
    Gelu gelu = {(int)call->ints[0], elements(&x), x.data, NULL, NULL};
    TRY(make_output(call, 0, x.dims, x.rank, &gelu.out));
    parallel(call, task, divide_up(gelu.count, TASK_ELEMENTS), &gelu);
    return NULL;
}

static Status *backward(Call *call) {
    Tensor dy, x;
    TRY(read_input(call, 0, &dy));
    TRY(read_input(call, 1, &x));
    if (elements(&dy) != elements(&x)) return refuse(call, "the gradient is not as large as x");
    Gelu gelu = {(int)call->ints[0], elements(&x), x.data, dy.data, NULL};
    TRY(make_output(call, 0, x.dims, x.rank, &gelu.out));
    parallel(call, task, divide_up(gelu.count, TASK_ELEMENTS), &gelu);
    return NULL;
}

Node gelu_node = {.name = "Gelu", .inputs = 1, .needed = 1, .outputs = 1, .ints = {"approximate"}, .run = forward};
Node gelu_gradient_node = {
    .name = "GeluGrad", .inputs = 2, .needed = 2, .outputs = 1, .in_place = 1, .ints = {"approximate"}, .run = backward};
