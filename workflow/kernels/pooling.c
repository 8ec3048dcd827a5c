/* The gradient of pooling by the maximum: each window's goes to its first maximum, or to its last that is no number. */
#include <math.h>

#include "planes.h"

typedef struct {
    Windows s;
    Planes p;
    const float *y, *x;
    float *to;
    _Atomic int failed;
} Work;

/* One channel of one image: windows side by side are compared at once, place of the kernel by place. */
static void task(void *argument, size_t index) {
    Work *work = argument;
    const Windows *s = &work->s;
    const Planes *p = &work->p;
    int64_t whole = p->planes * p->apart;
    float *to = work->to + (int64_t)index * s->x_size;
    float *planes = scratch(2 * whole + p->apart);
    if (!planes) {
        work->failed = 1;
        return;
    }
    float *found = planes + whole, *run = found + whole;
    for (int64_t i = 0; i < whole; i++) planes[i] = -INFINITY;
    memset(found, 0, (size_t)(whole + p->apart) * sizeof(float));
    deal(s, p, work->x + (int64_t)index * s->x_size, planes);
    stretch(s, p, work->y + (int64_t)index * s->y_size, run);
    for (int64_t i = 0; i < p->run; i += W) {
        vec most = all(-INFINITY);
        ivec first = (ivec){0} - 1;
        for (int64_t k = 0; k < s->offsets; k++) {
            vec value = load(planes + p->begin[k] + i);
            ivec better = (value > most) | (value != value);
            most = choose(better, value, most);
            first = (first & ~better) | (better & (int32_t)k);
        }
        vec gradient = load(run + i);
        for (int64_t k = 0; k < s->offsets; k++) {
            float *at = found + p->begin[k] + i;
            store(at, load(at) + choose(first == (int32_t)k, gradient, all(0)));
        }
    }
    memset(to, 0, (size_t)s->x_size * sizeof(float));
    collect(s, p, to, found);
}

/* geometry of one group, gradient, data */
static Status *run(Call *call) {
    Tensor geometry, dy, x;
    TRY(read_input(call, 0, &geometry));
    TRY(read_input(call, 1, &dy));
    TRY(read_input(call, 2, &x));
    Work work = {.y = dy.data, .x = x.data};
    if (x.rank != dy.rank || x.rank < 3 || !read_windows(&geometry, x.dims, dy.dims, dy.rank, &work.s) ||
        x.dims[1] != dy.dims[1] || work.s.offsets > MOST_PLACES)
        return refuse(call, "gradient, data and geometry do not fit each other");
    TRY(make_output(call, 0, x.dims, x.rank, &work.to));
    find_planes(&work.s, &work.p);
    if (work.s.y_size)
        parallel(call, task, x.dims[0] * x.dims[1], &work);
    else
        memset(work.to, 0, (size_t)elements(&x) * sizeof(float));
    return work.failed ? out_of_memory(call) : NULL;
}

Node max_pool_gradient_node = {
    .name = "MaxPoolGrad", .inputs = 3, .needed = 3, .outputs = 1, .integers = 1, .run = run};
