/* Rotary positions (Su et al. 2021), as in Llama, and their gradient. With halves a and b of the last axis,
 *   Rotary:     y  = (a cos_a - b sin_a,   b cos_b + a sin_b)
 *   RotaryGrad: dx = (da cos_a + db sin_b, db cos_b - da sin_a).
 * Shapes are [batch, heads, tokens, size], or [batch, tokens, heads, size] of x and dx with `tokens_first`. Cosines and
 * sines have one shape, which is broadcast to [batch, heads, tokens, size]. Without `tokens_first` any rank will do. */
#include "rows.h"
#include "vector.h"

typedef struct {
    Rows rows;
    int backward;
    const float *given, *cosine, *sine;
    float *made;
    size_t rank;
    int64_t dims[MOST_RANK];                                               /* with heads first */
    int64_t of_given[MOST_RANK], of_made[MOST_RANK], of_table[MOST_RANK]; /* strides */
} Rotary;

static inline void rotate(const Rotary *r, const float *x, const float *cosine, const float *sine, float *y) {
    int64_t half = r->rows.width / 2;
    for (int64_t j = 0; j < half; j += W) {
        vec a = load_until(x, j, half), b = load_until(x + half, j, half);
        vec sin_a = load_until(sine, j, half), sin_b = load_until(sine + half, j, half);
        vec turned_a = r->backward ? b * sin_b : -(b * sin_a), turned_b = r->backward ? -(a * sin_a) : a * sin_b;
        store_until(y, j, half, a * load_until(cosine, j, half) + turned_a);
        store_until(y + half, j, half, b * load_until(cosine + half, j, half) + turned_b);
    }
}

static void task(void *argument, size_t index) {
    const Rotary *r = argument;
    int64_t first = (int64_t)index * r->rows.height, end = least(r->rows.rows, first + r->rows.height);
    for (int64_t row = first; row < end; row++) {
        int64_t left = row, given = 0, made = 0, table = 0;
        for (size_t i = r->rank - 1; i-- > 0; left /= r->dims[i]) {
            int64_t at = left % r->dims[i];
            given += at * r->of_given[i], made += at * r->of_made[i], table += at * r->of_table[i];
        }
        rotate(r, r->given + given, r->cosine + table, r->sine + table, r->made + made);
    }
}

static void swap(int64_t *values) {
    int64_t kept = values[1];
    values[1] = values[2], values[2] = kept;
}

static void strides_of(const int64_t *dims, size_t rank, int64_t *strides) {
    int64_t step = 1;
    for (size_t i = rank; i-- > 0; step *= dims[i]) strides[i] = step;
}

/* Strides of a table, 0 where it has one element; whether it is broadcast to `dims`. */
static int spread(const Tensor *table, const int64_t *dims, size_t rank, int64_t *strides) {
    int64_t own[MOST_RANK];
    if (table->rank > rank || !table->rank || table->dims[table->rank - 1] != dims[rank - 1]) return 0;
    strides_of(table->dims, table->rank, own);
    for (size_t i = 0, missing = rank - table->rank; i < rank; i++) {
        int64_t size = i < missing ? 1 : table->dims[i - missing];
        if (size != 1 && size != dims[i]) return 0;
        strides[i] = size == 1 ? 0 : own[i - missing];
    }
    return 1;
}

static Status *run(Call *call, int backward) {
    Tensor x, cosine, sine;
    TRY(read_input(call, 0, &x));
    TRY(read_input(call, 1, &cosine));
    TRY(read_input(call, 2, &sine));
    int tokens_first = (int)call->ints[0];
    if (x.rank < (tokens_first ? 4 : 1) || (tokens_first && x.rank > 4) || x.dims[x.rank - 1] % 2)
        return refuse(call, "the rotated value has no halves, or no heads");
    Rotary r = {.backward = backward, .given = x.data, .cosine = cosine.data, .sine = sine.data, .rank = x.rank};
    int64_t other[MOST_RANK]; /* of the result */
    memcpy(r.dims, x.dims, sizeof r.dims);
    if (tokens_first && !backward) swap(r.dims);
    memcpy(other, r.dims, sizeof other);
    if (tokens_first && backward) swap(other);
    strides_of(x.dims, x.rank, r.of_given);
    strides_of(other, x.rank, r.of_made);
    if (tokens_first) swap(backward ? r.of_made : r.of_given);
    int64_t of_sine[MOST_RANK];
    if (!spread(&cosine, r.dims, r.rank, r.of_table) || !spread(&sine, r.dims, r.rank, of_sine) ||
        memcmp(r.of_table, of_sine, r.rank * sizeof *of_sine))
        return refuse(call, "cosines and sines do not fit the rotated value");
    TRY(make_output(call, 0, other, x.rank, &r.made));
    r.rows = rows_in_blocks(rows_of(&x), x.dims[x.rank - 1]);
    if (elements(&x)) parallel(call, task, r.rows.blocks, &r);
    return NULL;
}

static Status *forward(Call *call) { return run(call, 0); }
static Status *backward(Call *call) { return run(call, 1); }

Node rotary_node = {
    .name = "Rotary", .inputs = 3, .needed = 3, .outputs = 1, .ints = {"tokens_first"}, .run = forward};
Node rotary_gradient_node = {
    .name = "RotaryGrad", .inputs = 3, .needed = 3, .outputs = 1, .ints = {"tokens_first"}, .run = backward};
