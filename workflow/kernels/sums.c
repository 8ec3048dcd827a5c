/* ColumnSums: the sum over all axes but the last. Partial sums over blocks of rows, then their sum, in order. */
#include "rows.h"
#include "vector.h"

typedef struct {
    Rows rows;
    const float *x;
    float *parts;
} Sums;

void add_rows(const float *from, int64_t rows, int64_t apart, int64_t width, float *to) {
    int64_t j = 0;
    for (; j + 4 * W <= width; j += 4 * W) {
        vec a = {0}, b = {0}, c = {0}, d = {0};
        for (int64_t i = 0; i < rows; i++) {
            const float *row = from + i * apart + j;
            a += load(row), b += load(row + W), c += load(row + 2 * W), d += load(row + 3 * W);
        }
        store(to + j, a), store(to + j + W, b), store(to + j + 2 * W, c), store(to + j + 3 * W, d);
    }
    for (; j < width; j++) {
        float sum = 0;
        for (int64_t i = 0; i < rows; i++) sum += from[i * apart + j];
        to[j] = sum;
    }
}

static void task(void *argument, size_t index) {
    const Sums *s = argument;
    int64_t first = (int64_t)index * s->rows.height, width = s->rows.width;
    int64_t count = least(s->rows.height, s->rows.rows - first);
    add_rows(s->x + first * width, count, width, width, s->parts + (int64_t)index * width);
}

static Status *run(Call *call) {
    Tensor x;
    float *y;
    TRY(read_input(call, 0, &x));
    if (x.rank < 1) return refuse(call, "a scalar has no columns");
    int64_t width = x.dims[x.rank - 1];
    TRY(make_output(call, 0, &width, 1, &y));
    Sums sums = {rows_in_parts(rows_of(&x), width), x.data, NULL};
    sums.parts = scratch(MOST_PARTS * width + 1);
    if (!sums.parts) return out_of_memory(call);
    parallel(call, task, sums.rows.blocks, &sums);
    add_rows(sums.parts, sums.rows.blocks, width, width, y);
    return NULL;
}

Node column_sums_node = {.name = "ColumnSums", .inputs = 1, .needed = 1, .outputs = 1, .run = run};
