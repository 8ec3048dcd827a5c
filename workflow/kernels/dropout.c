/* Dropout with the masks that dropout.py defines: the gradient, and what the backward pass recomputes, draw them again.
 *
 * So many counters are drawn at a time that compilers make vectors of them; each has the words of four neighbours. */
#include "rows.h"

#include <string.h>

#define ROUNDS 10
#define COUNTERS 128
#define AT_A_TIME (4 * COUNTERS)

typedef struct {
    int64_t count;
    uint32_t key[2], number, dropped;
    float scale;
    const float *from;
    float *to;
} Dropout;

/* Words 4 l to 4 l + 3 are those of the l-th counter from `first` on. */
static void draw(const Dropout *d, uint64_t first, uint32_t *words) {
    uint32_t a[COUNTERS], b[COUNTERS], c[COUNTERS], e[COUNTERS], key = d->key[0], other = d->key[1];
    for (int l = 0; l < COUNTERS; l++) {
        a[l] = (uint32_t)(first + (uint64_t)l), b[l] = (uint32_t)((first + (uint64_t)l) >> 32);
        c[l] = d->number, e[l] = 0;
    }
    for (int round = 0; round < ROUNDS; round++) {
        for (int l = 0; l < COUNTERS; l++) {
            uint64_t one = (uint64_t)0xD2511F53u * a[l], two = (uint64_t)0xCD9E8D57u * c[l];
            uint32_t high = (uint32_t)(one >> 32), above = (uint32_t)(two >> 32);
            a[l] = above ^ b[l] ^ key, c[l] = high ^ e[l] ^ other;
            b[l] = (uint32_t)two, e[l] = (uint32_t)one;
        }
        key += 0x9E3779B9u, other += 0xBB67AE85u;
    }
    for (int l = 0; l < COUNTERS; l++)
        words[4 * l] = a[l], words[4 * l + 1] = b[l], words[4 * l + 2] = c[l], words[4 * l + 3] = e[l];
}

static void task(void *argument, size_t index) {
    const Dropout *d = argument;
    int64_t i = (int64_t)index * TASK_ELEMENTS, end = least(d->count, i + TASK_ELEMENTS);
    uint32_t words[AT_A_TIME];
    for (; i < end; i += AT_A_TIME) {
        draw(d, (uint64_t)i / 4, words);
        int64_t count = least(end - i, AT_A_TIME);
        for (int64_t j = 0; j < count; j++) d->to[i + j] = words[j] >= d->dropped ? d->from[i + j] * d->scale : 0.0f;
    }
}

static Status *run(Call *call) {
    Tensor seed, number, x;
    TRY(read_input(call, 0, &seed));
    TRY(read_input(call, 1, &number));
    TRY(read_input(call, 2, &x));
    if (elements(&seed) != 1 || elements(&number) != 1) return refuse(call, "one seed and one number are needed");
    uint64_t key, place;
    memcpy(&key, seed.data, sizeof key);
    memcpy(&place, number.data, sizeof place);
    Dropout d = {.count = elements(&x), .key = {(uint32_t)key, (uint32_t)(key >> 32)}, .number = (uint32_t)place,
                 .dropped = (uint32_t)call->ints[0], .scale = call->floats[0], .from = x.data};
    TRY(make_output(call, 0, x.dims, x.rank, &d.to));
    parallel(call, task, divide_up(d.count, TASK_ELEMENTS), &d);
    return NULL;
}

Node dropout_node = {.name = "Dropout", .inputs = 3, .needed = 3, .outputs = 1, .integers = 2, .in_place = 3,
                     .ints = {"dropped"}, .floats = {"scale"}, .run = run};
