/* The operator ortflow.cuda.Fused on ONNX Runtime's CUDA provider: launches a kernel that Python has compiled and loaded.
 *
 * Inputs and outputs are fp32 on the device. The kernel goes over the shape that all inputs are broadcast to. An output
 * has the shape of the inputs that it depends on; where that is smaller, its elements are written several times. */
#include "ort.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define OPERANDS 12
#define RESULTS 6
#define AXES 8
#define THREADS 256
#define BLOCKS 65536

enum { WHOLE, SCALAR, RUN, STRIDED };

typedef struct {
    void *data;
    uint32_t mode;  /* WHOLE: element i; SCALAR: the only one; RUN: (i / step) % count; STRIDED: by dims and strides */
    uint32_t step, count, rank;
    uint32_t dims[AXES];
    int64_t strides[AXES];
} Operand;

typedef int (*Launch)(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, void *stream, void **parameters, void **extra);

typedef struct {
    const Api *api;
    void *function, *stream;
    int64_t inputs_of[RESULTS]; /* bit i: the output depends on input i */
} Kernel;

typedef struct {
    char *source;
    void *function;
} Entry;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Entry *entries;
static size_t entry_count;
static Launch launch;
static void *stream;

/* cuLaunchKernel, and the stream that the sessions which are made next queue everything on. */
void ortflow_fused_setup(void *launcher, void *queue) {
    launch = (Launch)launcher;
    stream = queue;
}

/* The CUfunction of a source; 0 where memory ran out. */
int ortflow_fused_add(const char *source, void *function) {
    pthread_mutex_lock(&lock);
    Entry *more = realloc(entries, (entry_count + 1) * sizeof *entries);
    char *copy = more ? strdup(source) : NULL;
    if (more) entries = more;
    if (copy) entries[entry_count++] = (Entry){copy, function};
    pthread_mutex_unlock(&lock);
    return copy != NULL;
}

static const char *op_name(const CustomOp *op) { return (void)op, "Fused"; }
static const char *op_provider(const CustomOp *op) { return (void)op, "CUDAExecutionProvider"; }
static int op_type(const CustomOp *op, size_t index) { return (void)op, (void)index, ORT_FLOAT; }
static size_t op_one(const CustomOp *op) { return (void)op, 1; }
static int op_zero(const CustomOp *op, size_t index) { return (void)op, (void)index, 0; }
static int op_variadic(const CustomOp *op, size_t index) { return (void)op, (void)index, 2; }
static int op_yes(const CustomOp *op) { return (void)op, 1; }

static Status *create(const CustomOp *op, const Api *api, const Info *info, void **out) {
    (void)op;
    size_t size = 0;
    Status *status = api->attribute_string(info, "source", NULL, &size);
    if (status) return status;
    char *source = malloc(size + 1);
    Kernel *kernel = calloc(1, sizeof *kernel);
    if (!source || !kernel) {
        free(source), free(kernel);
        return api->create_status(ORT_FAIL, "out of memory");
    }
    status = api->attribute_string(info, "source", source, &size);
    source[size] = 0;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; !status && i < entry_count && !kernel->function; i++)
        if (!strcmp(entries[i].source, source)) kernel->function = entries[i].function;
    pthread_mutex_unlock(&lock);
    free(source);
    for (int i = 0; !status && i < RESULTS; i++) {
        char name[] = "inputs_of_0";
        name[sizeof name - 2] = (char)('0' + i);
        status = api->attribute_int(info, name, &kernel->inputs_of[i]);
    }
    if (!status && !kernel->function) status = api->create_status(ORT_FAIL, "a fused kernel was not compiled");
    if (status) {
        free(kernel);
        return status;
    }
    kernel->api = api;
    kernel->stream = stream;
    *out = kernel;
    return NULL;
}

static Status *shape_of(const Api *api, const Value *value, size_t *rank, int64_t *dims) {
    Shape *shape;
    Status *status = api->shape(value, &shape);
    if (status) return status;
    if (!(status = api->rank(shape, rank))) {
        if (*rank > AXES)
            status = api->create_status(ORT_INVALID_ARGUMENT, "more than 8 axes");
        else
            status = api->dims(shape, dims, *rank);
    }
    api->release_shape(shape);
    return status;
}

/* How an operand of the shape `dims` meets results of the shape `whole`, both of `rank` axes. */
static void broadcast(Operand *x, size_t rank, const int64_t *dims, const int64_t *whole) {
    int first = -1, last = -1, runs = 0, inside = 0;
    for (int axis = 0; axis < (int)rank; axis++) {
        if (whole[axis] == 1) continue;
        if (dims[axis] != 1) {
            if (!inside) runs++;
            inside = 1;
            if (first < 0) first = axis;
            last = axis;
        } else
            inside = 0;
    }
    uint64_t step = 1, count = 1, stride = 1, total = 1;
    for (int axis = (int)rank - 1; axis >= 0; axis--) {
        if (axis > last) step *= (uint64_t)whole[axis];
        if (axis >= first && axis <= last) count *= (uint64_t)dims[axis];
        total *= (uint64_t)whole[axis];
        x->dims[axis] = (uint32_t)whole[axis];
        x->strides[axis] = dims[axis] == 1 ? 0 : (int64_t)stride;
        stride *= (uint64_t)dims[axis];
    }
    x->rank = (uint32_t)rank, x->step = (uint32_t)step, x->count = (uint32_t)count;
    if (runs == 0)
        x->mode = SCALAR;
    else if (runs > 1 || step > UINT32_MAX || count > UINT32_MAX)
        x->mode = STRIDED;
    else
        x->mode = RUN;
    if (stride == total) x->mode = WHOLE;
}

static Status *compute(void *state, Context *context) {
    const Kernel *kernel = state;
    const Api *api = kernel->api;
    Operand operands[OPERANDS + RESULTS];
    int64_t dims[OPERANDS][AXES], whole[AXES];
    size_t ranks[OPERANDS], rank = 0, inputs, outputs;
    void *parameters[OPERANDS + RESULTS + 1];
    Status *status;
    memset(operands, 0, sizeof operands);
    if ((status = api->input_count(context, &inputs)) || (status = api->output_count(context, &outputs))) return status;
    if (inputs > OPERANDS || outputs > RESULTS) return api->create_status(ORT_INVALID_ARGUMENT, "too many values");
    for (size_t i = 0; i < inputs; i++) {
        const Value *value;
        void *data;
        if ((status = api->input(context, i, &value)) || (status = api->data((Value *)value, &data)) ||
            (status = shape_of(api, value, &ranks[i], dims[i])))
            return status;
        operands[i].data = data;
        if (ranks[i] > rank) rank = ranks[i];
    }
    for (size_t axis = 0; axis < rank; axis++) whole[axis] = 1;
    for (size_t i = 0; i < inputs; i++) {
        size_t missing = rank - ranks[i];
        memmove(dims[i] + missing, dims[i], ranks[i] * sizeof **dims);
        for (size_t axis = 0; axis < missing; axis++) dims[i][axis] = 1;
        for (size_t axis = 0; axis < rank; axis++) {
            if (dims[i][axis] == 1) continue;
            if (whole[axis] != 1 && whole[axis] != dims[i][axis])
                return api->create_status(ORT_INVALID_ARGUMENT, "shapes do not go together");
            whole[axis] = dims[i][axis];
        }
    }
    uint64_t n = 1;
    for (size_t axis = 0; axis < rank; axis++) n *= (uint64_t)whole[axis];
    for (size_t i = 0; i < inputs; i++) {
        broadcast(&operands[i], rank, dims[i], whole);
        parameters[i] = &operands[i];
    }
    for (size_t i = 0; i < outputs; i++) {
        Value *value;
        Operand *result = &operands[inputs + i];
        int64_t own[AXES];
        size_t own_rank = 0;
        for (size_t axis = 0; axis < rank; axis++) own[axis] = 1;
        for (size_t k = 0; k < inputs; k++) {
            if (!(kernel->inputs_of[i] >> k & 1)) continue;
            if (ranks[k] > own_rank) own_rank = ranks[k];
            for (size_t axis = 0; axis < rank; axis++)
                if (dims[k][axis] != 1) own[axis] = dims[k][axis];
        }
        if ((status = api->output(context, i, own + rank - own_rank, own_rank, &value)) ||
            (status = api->data(value, &result->data)))
            return status;
        broadcast(result, rank, own, whole);
        parameters[inputs + i] = result;
    }
    parameters[inputs + outputs] = &n;
    if (!n) return NULL;
    uint64_t blocks = (n + THREADS - 1) / THREADS;
    int code = launch(kernel->function, blocks > BLOCKS ? BLOCKS : (unsigned)blocks, 1, 1, THREADS, 1, 1, 0, kernel->stream,
                      parameters, NULL);
    return code ? api->create_status(ORT_FAIL, "CUDA did not launch a fused kernel") : NULL;
}

static CustomOp fused = {
    .version = ORT_VERSION,
    .name = op_name,
    .provider = op_provider,
    .input_type = op_type,
    .inputs = op_one,
    .output_type = op_type,
    .outputs = op_one,
    .destroy = free,
    .input_kind = op_variadic,
    .output_kind = op_variadic,
    .input_memory = op_zero,
    .least_inputs = op_yes,
    .like_inputs = op_yes,
    .least_outputs = op_yes,
    .like_outputs = op_yes,
    .create = create,
    .compute = compute,
};

Status *RegisterCustomOps(SessionOptions *options, const ApiBase *base) {
    static Domain *domain;
    const Api *api = base->api(ORT_VERSION);
    Status *status = NULL;
    pthread_mutex_lock(&lock);
    if (!domain) {
        Domain *fresh;
        if (!(status = api->create_domain("ortflow.cuda", &fresh)) && !(status = api->add_to_domain(fresh, &fused)))
            domain = fresh;
    }
    if (!status) status = api->add_domain(options, domain);
    pthread_mutex_unlock(&lock);
    return status;
}
