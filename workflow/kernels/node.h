/* What a kernel sees of the node it runs: tensors, attributes, threads. */
#ifndef ORTFLOW_NODE_H
#define ORTFLOW_NODE_H

#include "ort.h"

#define MOST_RANK 8
#define MOST_ATTRIBUTES 5

typedef struct {
    const Api *api;
    Context *context;
    int64_t ints[MOST_ATTRIBUTES];
    float floats[MOST_ATTRIBUTES];
} Call;

typedef struct {
    float *data;
    size_t rank;
    int64_t dims[MOST_RANK];
} Tensor;

/* An operator of the domain `ortflow`. Its first `integers` inputs are int64, all other tensors fp32; `element`, unless 0,
 * is the type of the first input and output. Outputs from number `made` on, unless 0, may be left out. Its first output
 * may be written over input number `in_place`, counted from 1, where nobody else reads that; 0: over none. A `variadic`
 * one takes at least `needed` inputs of any types, and makes at least one output. */
typedef struct {
    CustomOp op;
    const char *name;
    size_t inputs, needed, outputs, made, integers, in_place, variadic;
    int element;
    const char *ints[MOST_ATTRIBUTES], *floats[MOST_ATTRIBUTES];
    Status *(*run)(Call *call);
} Node;

extern Node product_node, norm_node, norm_gradient_node, gelu_node, gelu_gradient_node, softmax_node,
    softmax_gradient_node, column_sums_node, table_gradient_node, adam_node,
    cross_entropy_node, cross_entropy_gradient_node, convolution_node, convolution_data_gradient_node,
    convolution_weight_gradient_node, max_pool_gradient_node, batch_norm_node, batch_norm_gradient_node,
    scaling_node, lamb_node, sgd_node, sgd_momentum_node, rms_node, rms_gradient_node,
    group_norm_node, group_norm_gradient_node, collective_node, collective_double_node, collective_int64_node, shards_node,
    dropout_node, rotary_node, rotary_gradient_node, gather_node, scatter_node;

#define TRY(expression)                            \
    do {                                           \
        Status *status_ = (expression);            \
        if (status_) return status_;               \
    } while (0)

size_t count_inputs(const Call *call);
Status *read_input(const Call *call, size_t index, Tensor *out);
Status *make_output(const Call *call, size_t index, const int64_t *dims, size_t rank, float **data);
Status *refuse(const Call *call, const char *message);
Status *out_of_memory(const Call *call);
int64_t elements(const Tensor *tensor);
/* Elements of the axes before the last. */
int64_t rows_of(const Tensor *tensor);

/* Run task(argument, i) for all i < total on the session's threads; returns when all are done. */
void parallel(const Call *call, void (*task)(void *, size_t), int64_t total, void *argument);
/* Memory for this thread's next use, at least `count` floats, aligned to a cache line; NULL when there is none. */
float *scratch(int64_t count);
/* The same, for a weight in another order, which is read while `scratch` is used. */
float *weight_scratch(int64_t count);

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

#endif
