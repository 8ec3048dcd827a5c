/* Shards: hands tensors to a listener of the process and takes tensors from it, by a channel and a number.
 *
 * Inputs are a token, fp32 [1]; the shapes of the outputs behind the first, int64, of each its rank and then its
 * dimensions; and any tensors, of which the listener gets the addresses. Outputs are the next token, so that nodes form a
 * chain and run in the same order on every rank, and fp32 tensors of those shapes, which the listener fills. It is called
 * on the thread that runs the session. */
#include "node.h"

#include <stdlib.h>

typedef int (*Listener)(int64_t channel, int64_t number, size_t given, float **from, size_t made, float **to);

static Listener listener;

void ortflow_listen(Listener next) { listener = next; }

static Status *filled(Call *call, size_t given, float **from, size_t made, float **to) {
    Tensor shapes, input;
    int64_t place = 0, one = 1;
    float *token;
    TRY(read_input(call, 1, &shapes));
    const int64_t *dims = (const int64_t *)(const void *)shapes.data, end = elements(&shapes);
    TRY(make_output(call, 0, &one, 1, &token));
    *token = 0;
    for (size_t i = 0; i < made; i++) {
        if (place >= end || place + 1 + dims[place] > end) return refuse(call, "an output without a shape");
        TRY(make_output(call, i + 1, dims + place + 1, (size_t)dims[place], to + i));
        place += 1 + dims[place];
    }
    for (size_t i = 0; i < given; i++) {
        TRY(read_input(call, i + 2, &input));
        from[i] = input.data;
    }
    return listener(call->ints[0], call->ints[1], given, from, made, to) ? refuse(call, "the exchange failed") : NULL;
}

static Status *run(Call *call) {
    size_t outputs;
    TRY(call->api->output_count(call->context, &outputs));
    if (!listener) return refuse(call, "nobody listens");
    size_t given = count_inputs(call) - 2, made = outputs - 1;
    float **addresses = malloc((given + made + 1) * sizeof *addresses);
    if (!addresses) return out_of_memory(call);
    Status *status = filled(call, given, addresses, made, addresses + given);
    free(addresses);
    return status;
}

Node shards_node = {.name = "Shards", .variadic = 1, .inputs = 1, .needed = 2, .outputs = 1,
                    .ints = {"channel", "number"}, .run = run};
