/* Registers the operators with a session, and reads and makes their tensors. */
#include "node.h"

#include <pthread.h>
#include <stdlib.h>

static Node *const NODES[] = {
    &product_node,          &norm_node,        &norm_gradient_node,  &gelu_node, &gelu_gradient_node, &softmax_node,
    &softmax_gradient_node, &column_sums_node, &table_gradient_node, &adam_node,
    &cross_entropy_node,    &cross_entropy_gradient_node, &convolution_data_gradient_node,
    &convolution_weight_gradient_node, &convolution_node, &max_pool_gradient_node, &batch_norm_node, &batch_norm_gradient_node,
    &scaling_node, &lamb_node, &sgd_node, &sgd_momentum_node, &rms_node, &rms_gradient_node,
    &group_norm_node, &group_norm_gradient_node, &collective_node, &collective_double_node, &collective_int64_node,
    &shards_node, &dropout_node, &rotary_node, &rotary_gradient_node, &gather_node, &scatter_node,
};

typedef struct {
    const Node *node;
    Call call;
} Kernel;

static const Node *node_of(const CustomOp *op) { return (const Node *)op; }
static const char *op_name(const CustomOp *op) { return node_of(op)->name; }
static const char *op_provider(const CustomOp *op) { return (void)op, NULL; }
static int op_input_type(const CustomOp *op, size_t index) {
    if (node_of(op)->variadic) return ORT_ANY;
    if (!index && node_of(op)->element) return node_of(op)->element;
    return index < node_of(op)->integers ? ORT_INT64 : ORT_FLOAT;
}
static int op_output_type(const CustomOp *op, size_t index) {
    return !index && node_of(op)->element ? node_of(op)->element : ORT_FLOAT;
}
static size_t op_inputs(const CustomOp *op) { return node_of(op)->inputs; }
static size_t op_outputs(const CustomOp *op) { return node_of(op)->outputs; }
static int op_input_kind(const CustomOp *op, size_t index) {
    return node_of(op)->variadic ? ORT_VARIADIC : index >= node_of(op)->needed;
}
static int op_output_kind(const CustomOp *op, size_t index) {
    return node_of(op)->variadic ? ORT_VARIADIC : node_of(op)->made && index >= node_of(op)->made;
}
static int op_zero(const CustomOp *op, size_t index) { return (void)op, (void)index, 0; }
static int op_arity(const CustomOp *op) { return (void)op, 1; }
static int op_least_inputs(const CustomOp *op) { return node_of(op)->variadic ? (int)node_of(op)->needed : 1; }
static int op_like_inputs(const CustomOp *op) { return !node_of(op)->variadic; }

/* ONNX Runtime does not say which operator it asks about, so there is a function for each input. */
static size_t over(int input, int **inputs, int **outputs) {
    static int places[] = {0, 1, 2}, first = 0;
    *inputs = &places[input], *outputs = &first;
    return 1;
}
static size_t over_first(int **inputs, int **outputs) { return over(0, inputs, outputs); }
static size_t over_second(int **inputs, int **outputs) { return over(1, inputs, outputs); }
static size_t over_third(int **inputs, int **outputs) { return over(2, inputs, outputs); }
static void keep(int *inputs, int *outputs) { (void)inputs, (void)outputs; }
static size_t (*const IN_PLACE[])(int **, int **) = {NULL, over_first, over_second, over_third};

static Status *create(const CustomOp *op, const Api *api, const Info *info, void **out) {
    const Node *node = node_of(op);
    Kernel *kernel = calloc(1, sizeof *kernel);
    if (!kernel) return api->create_status(ORT_FAIL, "out of memory");
    kernel->node = node;
    kernel->call.api = api;
    for (int i = 0; i < MOST_ATTRIBUTES; i++) {
        Status *status = NULL;
        if (node->ints[i]) status = api->attribute_int(info, node->ints[i], &kernel->call.ints[i]);
        if (!status && node->floats[i]) status = api->attribute_float(info, node->floats[i], &kernel->call.floats[i]);
        if (status) {
            free(kernel);
            return status;
        }
    }
    *out = kernel;
    return NULL;
}

static Status *compute(void *state, Context *context) {
    /* A copy: a session may be run by several threads at once. */
    Call call = ((Kernel *)state)->call;
    call.context = context;
    return ((Kernel *)state)->node->run(&call);
}

Status *RegisterCustomOps(SessionOptions *options, const ApiBase *base) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static Domain *domain;
    const Api *api = base->api(ORT_VERSION);
    Status *status = NULL;
    pthread_mutex_lock(&lock);
    if (!domain) {
        Domain *fresh;
        status = api->create_domain("ortflow", &fresh);
        for (size_t i = 0; !status && i < sizeof NODES / sizeof *NODES; i++) {
            NODES[i]->op = (CustomOp){
                .version = ORT_VERSION,
                .name = op_name,
                .provider = op_provider,
                .input_type = op_input_type,
                .inputs = op_inputs,
                .output_type = op_output_type,
                .outputs = op_outputs,
                .destroy = free,
                .input_kind = op_input_kind,
                .output_kind = op_output_kind,
                .input_memory = op_zero,
                .least_inputs = op_least_inputs,
                .like_inputs = op_like_inputs,
                .least_outputs = op_arity,
                .like_outputs = op_arity,
                .create = create,
                .compute = compute,
                .may_inplace = IN_PLACE[NODES[i]->in_place],
                .release_inplace = keep,
            };
            status = api->add_to_domain(fresh, &NODES[i]->op);
        }
        if (!status) domain = fresh;
    }
    pthread_mutex_unlock(&lock);
    return status ? status : api->add_domain(options, domain);
}

size_t count_inputs(const Call *call) {
    size_t count = 0;
    Status *status = call->api->input_count(call->context, &count);
    if (status) call->api->release_status(status);
    return count;
}

Status *read_input(const Call *call, size_t index, Tensor *out) {
    const Api *api = call->api;
    const Value *value;
    Shape *shape;
    TRY(api->input(call->context, index, &value));
    TRY(api->data((Value *)value, (void **)&out->data));
    TRY(api->shape(value, &shape));
    Status *status = api->rank(shape, &out->rank);
    if (!status && out->rank > MOST_RANK) status = refuse(call, "more than 8 axes");
    if (!status) status = api->dims(shape, out->dims, out->rank);
    api->release_shape(shape);
    return status;
}

Status *make_output(const Call *call, size_t index, const int64_t *dims, size_t rank, float **data) {
    Value *value;
    TRY(call->api->output(call->context, index, dims, rank, &value));
    return call->api->data(value, (void **)data);
}

Status *refuse(const Call *call, const char *message) { return call->api->create_status(ORT_INVALID_ARGUMENT, message); }

Status *out_of_memory(const Call *call) { return call->api->create_status(ORT_FAIL, "out of memory"); }

int64_t rows_of(const Tensor *tensor) {
    int64_t rows = 1;
    for (size_t i = 0; i + 1 < tensor->rank; i++) rows *= tensor->dims[i];
    return rows;
}

int64_t elements(const Tensor *tensor) { return tensor->rank ? rows_of(tensor) * tensor->dims[tensor->rank - 1] : 1; }

void parallel(const Call *call, void (*task)(void *, size_t), int64_t total, void *argument) {
    if (total == 1) {
        task(argument, 0);
    } else if (total > 1) {
        Status *status = call->api->parallel_for(call->context, task, (size_t)total, 0, argument);
        if (!status) return;
        call->api->release_status(status);
        for (int64_t i = 0; i < total; i++) task(argument, (size_t)i);
    }
}

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t scratch_key, weight_key;
static void make_keys(void) {
    pthread_key_create(&scratch_key, free);
    pthread_key_create(&weight_key, free);
}

/* Memory of one thread; it ends with the thread. */
typedef struct {
    int64_t count;
    float *memory;
} Held;

static float *hold(Held *held, pthread_key_t key, int64_t count) {
    if (count > held->count) {
        free(held->memory);
        held->count = 0;
        held->memory = aligned_alloc(64, ((size_t)count * sizeof(float) + 63) / 64 * 64);
        pthread_setspecific(key, held->memory);
        if (held->memory) held->count = count;
    }
    return held->memory;
}

float *scratch(int64_t count) {
    static _Thread_local Held held;
    pthread_once(&once, make_keys);
    return hold(&held, scratch_key, count);
}

float *weight_scratch(int64_t count) {
    static _Thread_local Held held;
    pthread_once(&once, make_keys);
    return hold(&held, weight_key, count);
}
