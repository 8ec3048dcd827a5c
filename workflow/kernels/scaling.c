/* Gradients scaled in place and their norm, in one pass over the memory; a second one only where they are clipped.
 *
 * Squares are of the gradients as they come. Some are added in single precision and the sums in double, a task's and
 * then all tasks' in order, so that the norm does not depend on the threads. */
#include "rows.h"
#include "vector.h"

#include <math.h>

#define ADDED 4         /* squares added in single precision */
#define EPSILON 1e-6f   /* as in torch.nn.utils.clip_grad_norm_ */

typedef double wide __attribute__((vector_size(8 * W)));

typedef struct {
    int64_t count;
    float factor;
    const float *from;
    float *to;
    double *sums; /* of each task; NULL where they are not wanted */
} Scaling;

static void task(void *argument, size_t index) {
    const Scaling *s = argument;
    int64_t i = (int64_t)index * TASK_ELEMENTS, end = least(s->count, i + TASK_ELEMENTS);
    wide sums = {0};
    for (; i + ADDED * W <= end; i += ADDED * W) {
        vec squares = {0};
        UNROLL for (int v = 0; v < ADDED; v++) {
            vec value = load(s->from + i + v * W);
            squares += value * value;
            store(s->to + i + v * W, value * all(s->factor));
        }
        sums += __builtin_convertvector(squares, wide);
    }
    double sum = 0;
    for (int v = 0; v < W; v++) sum += sums[v];
    for (; i < end; i++) {
        float value = s->from[i];
        sum += (double)(value * value);
        s->to[i] = value * s->factor;
    }
    if (s->sums) s->sums[index] = sum;
}

/* gradients, factor, most norm -> gradients, norm of the scaled ones before they are clipped */
static Status *run(Call *call) {
    Tensor gradients, factor, most;
    TRY(read_input(call, 0, &gradients));
    TRY(read_input(call, 1, &factor));
    TRY(read_input(call, 2, &most));
    if (elements(&factor) != 1 || elements(&most) != 1) return refuse(call, "one factor and one norm are needed");
    Scaling s = {elements(&gradients), *factor.data, .from = gradients.data};
    int64_t tasks = divide_up(s.count, TASK_ELEMENTS), one = 1;
    float *norm, limit = *most.data;
    TRY(make_output(call, 0, gradients.dims, gradients.rank, &s.to));
    TRY(make_output(call, 1, &one, 1, &norm));
    s.sums = (double *)(void *)scratch(2 * tasks + 2);
    if (!s.sums) return out_of_memory(call);
    parallel(call, task, tasks, &s);
    double sum = 0;
    for (int64_t i = 0; i < tasks; i++) sum += s.sums[i];
    *norm = (float)sqrt(sum) * s.factor;
    float allowed = limit / (*norm + EPSILON);
    /* A norm that is no number is the caller's to see: nothing mends these gradients. */
    if (isfinite(*norm) && allowed < 1) {
        s.from = s.to, s.factor = allowed, s.sums = NULL;
        parallel(call, task, tasks, &s);
    }
    return NULL;
}

Node scaling_node = {.name = "ScaleGradients", .inputs = 3, .needed = 3, .outputs = 2, .run = run};
