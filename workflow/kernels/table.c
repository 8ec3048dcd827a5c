/* TableGrad: the gradient of a look-up of rows, as `rows[indices[i]] += gradient[i]` in the order of i.
 *
 * Each task has columns of its own, so that results do not depend on the threads. */
#include "rows.h"
#include "vector.h"

typedef struct {
    int64_t entries, height, width, columns;
    const int64_t *indices;
    const float *gradient;
    float *table;
    _Atomic int outside;
} Table;

static void task(void *argument, size_t index) {
    Table *t = argument;
    int64_t first = (int64_t)index * t->columns, count = least(t->columns, t->width - first);
    for (int64_t row = 0; row < t->height; row++) memset(t->table + row * t->width + first, 0, (size_t)count * sizeof(float));
    for (int64_t i = 0; i < t->entries; i++) {
        int64_t row = t->indices[i] < 0 ? t->indices[i] + t->height : t->indices[i], j = 0;
        if (row < 0 || row >= t->height) {
            t->outside = 1;
            continue;
        }
        const float *from = t->gradient + i * t->width + first;
        float *to = t->table + row * t->width + first;
        for (; j + W <= count; j += W) store(to + j, load(to + j) + load(from + j));
        for (; j < count; j++) to[j] += from[j];
    }
}

static Status *run(Call *call) {
    Tensor shape, indices, gradient;
    TRY(read_input(call, 0, &shape));
    TRY(read_input(call, 1, &indices));
    TRY(read_input(call, 2, &gradient));
    const int64_t *dims = (const int64_t *)(const void *)shape.data;
    if (elements(&shape) != 2 || elements(&gradient) != elements(&indices) * dims[1])
        return refuse(call, "the gradient does not fit indices and table");
    Table table = {.entries = elements(&indices), .height = dims[0], .width = dims[1], .columns = least(dims[1], 128)};
    table.indices = (const int64_t *)(const void *)indices.data;
    table.gradient = gradient.data;
    TRY(make_output(call, 0, dims, 2, &table.table));
    if (table.columns) parallel(call, task, divide_up(table.width, table.columns), &table);
    return table.outside ? refuse(call, "an index lies outside of the table") : NULL;
}

Node table_gradient_node = {
    .name = "TableGrad", .inputs = 3, .needed = 3, .outputs = 1, .integers = 2, .run = run};
