/* Operators of the domain ortflow.cuda on ONNX Runtime's CUDA provider.
 *
 * Python declares an operator for each signature of element types that a graph has (`ortflow_cuda_declare`). One whose
 * name begins with Fused launches an elementwise kernel from here. Every other calls Python (`ortflow_cuda_setup`), which
 * asks for the outputs' memory (`ortflow_cuda_output`) and launches what computes them. Nothing waits for the GPU.
 *
 * A fused kernel goes over the shape that all inputs are broadcast to. An output has the shape of the inputs that it
 * depends on; where that is smaller, its elements are written several times. */
#include "ort.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OPERANDS 12
#define RESULTS 6
#define AXES 8
#define THREADS 256
#define BLOCKS 65536
#define BLOCKS_FLAT 4224 /* enough to fill a GPU; each thread then goes on with what it found out about the operands */
#define MOST_INPUTS 64
#define MOST_OUTPUTS 64
#ifndef PROVIDER
#define PROVIDER "CUDAExecutionProvider" /* the tests of this file have none */
#endif

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

/* An input as Python sees it; rank -1 where it is left out. */
typedef struct {
    void *data;
    int64_t rank;
    int64_t dims[AXES];
} Tensor;

/* 0, or why the node failed is in `message`. */
typedef int (*Callback)(int64_t handle, void *call, const Tensor *inputs);

typedef struct {
    CustomOp op; /* first: ONNX Runtime hands its address back */
    char *name;
    size_t inputs, outputs;
    int types[MOST_INPUTS + MOST_OUTPUTS]; /* ONNX's numbers; negative for an input that is left out */
} Declared;

/* Of a fused kernel: for one element a thread, for `lanes`, and for `lanes` without strides and 64-bit places. */
typedef struct {
    void *narrow, *wide, *flat;
    int64_t lanes;
} Function;

typedef struct {
    const Api *api;
    const Declared *declared;
    int64_t handle;
    Callback callback;
    Function function; /* of a fused kernel */
    void *stream;
    int64_t inputs_of[RESULTS]; /* bit i: the output depends on input i */
} Kernel;

typedef struct {
    const Api *api;
    Context *context;
} Call;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Declared **declared;
static size_t declared_count;
static Function *functions;
static size_t function_count;
static Launch launch;
static Callback callback;
static void *stream;
static char message[1024];

/* cuLaunchKernel, what Python runs nodes with, and the stream that the sessions made next queue everything on. */
void ortflow_cuda_setup(void *launcher, void *python, void *queue) {
    launch = (Launch)launcher;
    callback = (Callback)python;
    stream = queue;
}

/* Where the callback writes why it failed. */
char *ortflow_cuda_message(void) { return message; }

/* The number of a fused kernel's functions; -1 where memory ran out. */
int64_t ortflow_cuda_function(void *narrow, void *wide, void *flat, int64_t lanes) {
    pthread_mutex_lock(&lock);
    Function *more = realloc(functions, (function_count + 1) * sizeof *functions);
    int64_t number = more ? (int64_t)function_count : -1;
    if (more) functions = more, functions[function_count++] = (Function){narrow, wide, flat, lanes};
    pthread_mutex_unlock(&lock);
    return number;
}

/* The memory of an output of the node that is being run, as ONNX Runtime gives it; 0 where it gives it. */
int ortflow_cuda_output(void *call, size_t index, const int64_t *dims, size_t rank, void **data) {
    Call *here = call;
    Value *value;
    Status *status = here->api->output(here->context, index, dims, rank, &value);
    if (!status) status = here->api->data(value, data);
    if (!status) return 0;
    here->api->release_status(status);
    return 1;
}

static const char *op_name(const CustomOp *op) { return ((const Declared *)op)->name; }
static const char *op_provider(const CustomOp *op) { return (void)op, PROVIDER; }
static size_t op_inputs(const CustomOp *op) { return ((const Declared *)op)->inputs; }
static size_t op_outputs(const CustomOp *op) { return ((const Declared *)op)->outputs; }
static int op_input_type(const CustomOp *op, size_t index) { return abs(((const Declared *)op)->types[index]); }
static int op_output_type(const CustomOp *op, size_t index) {
    const Declared *one = (const Declared *)op;
    return one->types[one->inputs + index];
}
/* 1: an input that may be left out. */
static int op_input_kind(const CustomOp *op, size_t index) { return ((const Declared *)op)->types[index] < 0; }
static int op_output_kind(const CustomOp *op, size_t index) { return (void)op, (void)index, 0; }
static int op_zero(const CustomOp *op, size_t index) { return (void)op, (void)index, 0; }
static int op_yes(const CustomOp *op) { return (void)op, 1; }

static int is_fused(const Declared *one) { return !strncmp(one->name, "Fused", 5); }

/* Outputs of ShardsReady are its inputs, in the same memory. */
static int is_view(const Declared *one) { return !strncmp(one->name, "ShardsReady", 11); }

static size_t op_aliases(int **inputs, int **outputs) {
    static int places[MOST_OUTPUTS];
    for (int i = 0; i < MOST_OUTPUTS; i++) places[i] = i;
    *inputs = *outputs = places;
    return MOST_OUTPUTS;
}
static void op_keep(int *inputs, int *outputs) { (void)inputs, (void)outputs; }

static Status *create(const CustomOp *op, const Api *api, const Info *info, void **out) {
    Kernel *kernel = calloc(1, sizeof *kernel);
    if (!kernel) return api->create_status(ORT_FAIL, "out of memory");
    kernel->api = api, kernel->declared = (const Declared *)op;
    kernel->callback = callback, kernel->stream = stream;
    Status *status = api->attribute_int(info, "handle", &kernel->handle);
    if (!status && is_fused(kernel->declared)) {
        pthread_mutex_lock(&lock);
        if (kernel->handle >= 0 && (size_t)kernel->handle < function_count)
            kernel->function = functions[kernel->handle];
        else
            status = api->create_status(ORT_FAIL, "a fused kernel was not compiled");
        pthread_mutex_unlock(&lock);
        for (int i = 0; !status && i < RESULTS; i++) {
            char name[] = "inputs_of_0";
            name[sizeof name - 2] = (char)('0' + i);
            status = api->attribute_int(info, name, &kernel->inputs_of[i]);
        }
    }
    if (status) {
        free(kernel);
        return status;
    }
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

static size_t size_of(int type) {
    switch (type) {
    case 10: case 16: return 2; /* fp16, bf16 */
    case 1: case 6: return 4;
    case 7: case 11: return 8;
    default: return 1;
    }
}

/* Whether so many elements, from a multiple of as many on, lie side by side and aligned, or are the same one. */
static int lies_in_lanes(const Operand *x, size_t lanes, size_t size) {
    size_t bytes = lanes * size;
    int aligned = (uintptr_t)x->data % (bytes < 16 ? bytes : 16) == 0;
    switch (x->mode) {
    case WHOLE: return aligned;
    case SCALAR: return 1;
    case RUN: return x->step == 1 ? aligned && x->count % lanes == 0 : x->step % lanes == 0;
    default: return x->rank && x->dims[x->rank - 1] % lanes == 0 && (!x->strides[x->rank - 1] || aligned);
    }
}

static Status *run_fused(const Kernel *kernel, Context *context) {
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
    const Function *function = &kernel->function;
    size_t lanes = (size_t)function->lanes;
    int wide = n % lanes == 0, flat = n <= UINT32_MAX;
    for (size_t i = 0; wide && i < inputs + outputs; i++) {
        wide = lies_in_lanes(&operands[i], lanes, size_of(kernel->declared->types[i]));
        flat = flat && operands[i].mode != STRIDED;
    }
    uint64_t work = wide ? n / lanes : n, blocks = (work + THREADS - 1) / THREADS;
    uint64_t most = wide && flat ? BLOCKS_FLAT : BLOCKS;
    void *chosen = !wide ? function->narrow : flat ? function->flat : function->wide;
    int code = launch(chosen, (unsigned)(blocks > most ? most : blocks), 1, 1, THREADS, 1, 1, 0, kernel->stream, parameters,
                      NULL);
    return code ? api->create_status(ORT_FAIL, "CUDA did not launch a fused kernel") : NULL;
}

static Status *run_python(const Kernel *kernel, Context *context) {
    const Api *api = kernel->api;
    Tensor inputs[MOST_INPUTS];
    Status *status = NULL;
    for (size_t i = 0; i < kernel->declared->inputs; i++) {
        const Value *value;
        size_t rank = 0;
        inputs[i].rank = -1;
        if ((status = api->input(context, i, &value))) return status;
        if (!value) continue;
        if ((status = api->data((Value *)value, &inputs[i].data)) || (status = shape_of(api, value, &rank, inputs[i].dims)))
            return status;
        inputs[i].rank = (int64_t)rank;
    }
    Call call = {api, context};
    return kernel->callback(kernel->handle, &call, inputs) ? api->create_status(ORT_FAIL, message) : NULL;
}

static Status *compute(void *state, Context *context) {
    const Kernel *kernel = state;
    return is_fused(kernel->declared) ? run_fused(kernel, context) : run_python(kernel, context);
}

/* An operator that sessions made from now on know; `types` are those of the inputs, then of the outputs. 0 where it is
 * not taken. */
int ortflow_cuda_declare(const char *name, size_t inputs, size_t outputs, const int *types) {
    if (inputs > MOST_INPUTS || outputs > MOST_OUTPUTS) return 0;
    pthread_mutex_lock(&lock);
    int found = 0;
    for (size_t i = 0; i < declared_count && !found; i++) found = !strcmp(declared[i]->name, name);
    Declared **more = found ? NULL : realloc(declared, (declared_count + 1) * sizeof *declared);
    Declared *one = more ? calloc(1, sizeof *one) : NULL;
    if (more) declared = more;
    if (one && (one->name = strdup(name))) {
        one->inputs = inputs, one->outputs = outputs;
        memcpy(one->types, types, (inputs + outputs) * sizeof *types);
        one->op = (CustomOp){
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
            .least_inputs = op_yes,
            .like_inputs = op_yes,
            .least_outputs = op_yes,
            .like_outputs = op_yes,
            .create = create,
            .compute = compute,
            .aliases = is_view(one) ? op_aliases : NULL,
            .release_aliases = op_keep,
        };
        declared[declared_count++] = one;
        found = 1;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

Status *RegisterCustomOps(SessionOptions *options, const ApiBase *base) {
    const Api *api = base->api(ORT_VERSION);
    Domain *domain;
    pthread_mutex_lock(&lock);
    Status *status = api->create_domain("ortflow.cuda", &domain);
    for (size_t i = 0; !status && i < declared_count; i++) status = api->add_to_domain(domain, &declared[i]->op);
    if (!status) status = api->add_domain(options, domain);
    pthread_mutex_unlock(&lock);
    return status;
}
