/* Optimizer steps on the tensors of a PyTorch optimizer, where they are: called through ctypes, not by ONNX Runtime.
 * One call updates all tensors of a parameter group, shared out among threads in tasks of equal size. */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "rows.h"
#include "vector.h"

typedef struct {
    float *w;
    const float *g;
    float *m, *v;   /* moments; v is unused by SGD, and m is NULL without momentum */
    int64_t count, step; /* elements; the number of this step, from 1 on */
} Parameter;

typedef struct {
    double rate, beta_1, beta_2, epsilon, decay;
    int64_t mode, correct; /* `mode`: see Modes; for SGD whether Nesterov's; `correct`: whether the bias is corrected */
} Options;

enum Modes { L2, DECAY_AFTER, DECAY_BEFORE };

typedef struct {
    const Parameter *parameters;
    const int64_t *first; /* the number of the first task of each parameter, and that of all tasks */
    int64_t count;
    Options options;
    double *sums; /* of the squares of the weights and of the change, for each task (LAMB) */
} Group;

typedef struct Work {
    void (*task)(const Group *, const Parameter *, int64_t from, int64_t to, int64_t number);
    const Group *group;
    atomic_llong next;
} Work;

static const Parameter *parameter_of(const Group *g, int64_t number, int64_t *place) {
    int64_t low = 0, high = g->count;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (g->first[middle] <= number)
            low = middle;
        else
            high = middle;
    }
    *place = (number - g->first[low]) * TASK_ELEMENTS;
    return g->parameters + low;
}

static void *work(void *argument) {
    Work *w = argument;
    const int64_t tasks = w->group->first[w->group->count];
    for (int64_t number; (number = atomic_fetch_add(&w->next, 1)) < tasks;) {
        int64_t from;
        const Parameter *p = parameter_of(w->group, number, &from);
        w->task(w->group, p, from, least(p->count, from + TASK_ELEMENTS), number);
    }
    return NULL;
}

/* Without a thread that the system refuses, the others do its tasks. */
static void share_out(void (*task)(const Group *, const Parameter *, int64_t, int64_t, int64_t), const Group *group,
                      int64_t threads) {
    Work w = {task, group, 0};
    pthread_t helpers[63];
    int64_t started = 0;
    for (int64_t wanted = least(least(threads, 64), group->first[group->count]) - 1; started < wanted; started++)
        if (pthread_create(&helpers[started], NULL, work, &w)) break;
    work(&w);
    while (started) pthread_join(helpers[--started], NULL);
}

/* Both moments of the elements from i on, which are stored. */
static inline void moments(const Options *o, const Parameter *p, int64_t i, int64_t to, vec g, vec *m, vec *v) {
    const float b1 = (float)o->beta_1, b2 = (float)o->beta_2;
    /* As PyTorch: 1 - beta is rounded once. */
    *m = all(b1) * load_until(p->m, i, to) + all((float)(1 - o->beta_1)) * g;
    *v = all(b2) * load_until(p->v, i, to) + all((float)(1 - o->beta_2)) * g * g;
    store_until(p->m, i, to, *m);
    store_until(p->v, i, to, *v);
}

typedef struct {
    double first, second; /* 1 - b1^t and 1 - b2^t, or 1 */
} Bias;

static inline Bias bias(const Options *o, const Parameter *p) {
    if (!o->correct) return (Bias){1, 1};
    return (Bias){1 - pow(o->beta_1, (double)p->step), 1 - pow(o->beta_2, (double)p->step)};
}

static void adam_task(const Group *group, const Parameter *p, int64_t from, int64_t to, int64_t number) {
    (void)number;
    const Options *o = &group->options;
    const Bias b = bias(o, p);
    const float lessened = (float)(1 - o->rate * o->decay);
    const float before = o->mode == DECAY_BEFORE ? lessened : 1, after = o->mode == DECAY_AFTER ? lessened : 1;
    const float added = o->mode == L2 ? (float)o->decay : 0, epsilon = (float)o->epsilon;
    /* With the decay after the step, transformers' AdamW, epsilon is added to the root of the uncorrected moment. */
    const float root = o->mode == DECAY_AFTER ? 1 : (float)(1 / sqrt(b.second));
    const float step = (float)(o->rate / b.first * (o->mode == DECAY_AFTER ? sqrt(b.second) : 1));
    for (int64_t i = from; i < to; i += W) {
        vec w = load_until(p->w, i, to), m, v;
        moments(o, p, i, to, load_until(p->g, i, to) + all(added) * w, &m, &v);
        w = all(before) * w - all(step) * m / (root_of(v) * all(root) + all(epsilon));
        store_until(p->w, i, to, all(after) * w);
    }
}

static inline vec lamb_change(const Options *o, Bias b, vec w, vec m, vec v) {
    const float scale = (float)(1 / b.first), root = (float)(1 / sqrt(b.second));
    return all(scale) * m / (root_of(v) * all(root) + all((float)o->epsilon)) + all((float)o->decay) * w;
}

static void lamb_norms_task(const Group *group, const Parameter *p, int64_t from, int64_t to, int64_t number) {
    const Bias b = bias(&group->options, p);
    double of_w = 0, of_u = 0;
    for (int64_t i = from; i < to; i += W) {
        vec w = load_until(p->w, i, to), m, v;
        moments(&group->options, p, i, to, load_until(p->g, i, to), &m, &v);
        vec u = lamb_change(&group->options, b, w, m, v);
        of_w += sum_of(w * w), of_u += sum_of(u * u);
    }
    group->sums[2 * number] = of_w, group->sums[2 * number + 1] = of_u;
}

static void lamb_step_task(const Group *group, const Parameter *p, int64_t from, int64_t to, int64_t number) {
    (void)number;
    const int64_t place = p - group->parameters;
    double of_w = 0, of_u = 0;
    for (int64_t i = group->first[place]; i < group->first[place + 1]; i++)
        of_w += group->sums[2 * i], of_u += group->sums[2 * i + 1];
    const float step = (float)(group->options.rate * (of_w > 0 && of_u > 0 ? sqrt(of_w / of_u) : 1));
    const Bias b = bias(&group->options, p);
    for (int64_t i = from; i < to; i += W) {
        vec w = load_until(p->w, i, to), m = load_until(p->m, i, to), v = load_until(p->v, i, to);
        store_until(p->w, i, to, w - all(step) * lamb_change(&group->options, b, w, m, v));
    }
}

static void sgd_task(const Group *group, const Parameter *p, int64_t from, int64_t to, int64_t number) {
    (void)number;
    const Options *o = &group->options;
    for (int64_t i = from; i < to; i += W) {
        vec w = load_until(p->w, i, to), g = load_until(p->g, i, to) + all((float)o->decay) * w;
        if (p->m) {
            vec m = all((float)o->beta_1) * load_until(p->m, i, to) + g;
            store_until(p->m, i, to, m);
            g = o->mode ? g + all((float)o->beta_1) * m : m;
        }
        store_until(p->w, i, to, w - all((float)o->rate) * g);
    }
}

enum Rules { ADAM, LAMB, SGD };

/* Returns 0, or 1 if there is no memory for the table of tasks; nothing has changed then. */
int ortflow_step(int64_t rule, const Parameter *parameters, int64_t count, const Options *options, int64_t threads) {
    int64_t *first = malloc(sizeof(int64_t) * (size_t)(count + 1));
    if (!first) return 1;
    first[0] = 0;
    for (int64_t i = 0; i < count; i++) first[i + 1] = first[i] + divide_up(parameters[i].count, TASK_ELEMENTS);
    Group group = {parameters, first, count, *options, NULL};
    if (rule == LAMB) {
        group.sums = malloc(sizeof(double) * 2 * (size_t)(first[count] + 1));
        if (!group.sums) {
            free(first);
            return 1;
        }
        share_out(lamb_norms_task, &group, threads);
        share_out(lamb_step_task, &group, threads);
    } else {
        share_out(rule == ADAM ? adam_task : sgd_task, &group, threads);
    }
    free(group.sums);
    free(first);
    return 0;
}
