/* Collective: what Python computes with the other ranks, on the thread that runs the session.
 *
 * Python says in `ortflow_collective_setup` what to call. Kinds 0 and 1 give a tensor of the input's shape, 2 one with
 * `parts` times as many rows, 3 one with as many times fewer. The second input and output are a scalar without meaning:
 * each node reads that of the node before it, which keeps ONNX Runtime from running them in another order. */
#include "node.h"

#include <string.h>

enum { ALL_REDUCE, ALL_REDUCE_MAX, ALL_GATHER, REDUCE_SCATTER };
#define WORDS 1024

/* 0, or why it failed is in `words`, which has room for `room` bytes. */
typedef int (*Collective)(int64_t kind, int64_t channel, int64_t parts, int64_t element, const void *from,
                          int64_t from_count, void *to, int64_t to_count, char *words, int64_t room);

static Collective collective;

void ortflow_collective_setup(void *python) { collective = (Collective)python; }

static Status *run_on(Call *call, int64_t element, int64_t size) {
    int64_t kind = call->ints[0], channel = call->ints[1], parts = call->ints[2];
    Tensor x;
    float *y, *token;
    char words[WORDS] = "";
    size_t outputs = 0;
    if (!collective) return call->api->create_status(ORT_FAIL, "no communicator is connected to this process's sessions");
    TRY(read_input(call, 0, &x));
    int64_t count = elements(&x), dims[MOST_RANK];
    memcpy(dims, x.dims, sizeof dims);
    if (kind < ALL_REDUCE || kind > REDUCE_SCATTER || parts < 1) return refuse(call, "unknown kind or number of parts");
    if (kind >= ALL_GATHER && x.rank < 1) return refuse(call, "a scalar has no rows");
    if (kind == REDUCE_SCATTER && dims[0] % parts) return refuse(call, "the rows are not divisible by the parts");
    if (kind == ALL_GATHER) dims[0] *= parts;
    if (kind == REDUCE_SCATTER) dims[0] /= parts;
    TRY(make_output(call, 0, dims, x.rank, &y));
    TRY(call->api->output_count(call->context, &outputs));
    if (outputs > 1) {
        TRY(make_output(call, 1, NULL, 0, &token));
        *token = 0;
    }
    int64_t made = kind == ALL_GATHER ? count * parts : kind == REDUCE_SCATTER ? count / parts : count;
    if (kind <= ALL_REDUCE_MAX && (void *)y != (void *)x.data) memcpy(y, x.data, (size_t)(count * size));
    if (collective(kind, channel, parts, element, x.data, count, y, made, words, WORDS)) {
        words[WORDS - 1] = 0;
        return call->api->create_status(ORT_FAIL, words);
    }
    return NULL;
}

static Status *run_float(Call *call) { return run_on(call, ORT_FLOAT, 4); }
static Status *run_double(Call *call) { return run_on(call, ORT_DOUBLE, 8); }
static Status *run_int64(Call *call) { return run_on(call, ORT_INT64, 8); }

#define COLLECTIVE(type, run_it)                                                                               \
    {.name = "Collective", .inputs = 2, .needed = 1, .outputs = 2, .made = 1, .element = type, .in_place = 1, \
     .ints = {"kind", "channel", "parts"}, .run = run_it}

Node collective_node = COLLECTIVE(ORT_FLOAT, run_float);
Node collective_double_node = COLLECTIVE(ORT_DOUBLE, run_double);
Node collective_int64_node = COLLECTIVE(ORT_INT64, run_int64);
