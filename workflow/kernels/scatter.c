/* GatherElements, and ScatterElements that adds: along an axis, an index for each element says where it is read or added.
 *
 * Exporters repeat the index of a row for each of its elements, which takes twice the memory of the elements. Here it is
 * broadcast. Each sum is in the order of the updates, whatever the threads. */
#include "rows.h"
#include "vector.h"

typedef struct {
    int64_t size, data, index; /* elements, and how far apart they are in the data and in the indices */
} Axis;

typedef struct {
    Axis axes[MOST_RANK];
    size_t count;
    int64_t size; /* of all axes together */
} Axes;

typedef struct {
    Axes before, behind; /* the axis; the last one behind it is `row` */
    Axis along, row;
    int64_t height; /* of the data along the axis */
    const int64_t *indices;
    float *data, *items;
    int64_t columns, rows; /* of a row, rows: those of one task */
    _Atomic int outside;
} Moves;

/* Axes that are contiguous in data and indices become one. */
static void add_axis(Axes *to, Axis axis) {
    Axis *last = to->count ? to->axes + to->count - 1 : NULL;
    to->size *= axis.size;
    if (axis.size == 1) return;
    if (last && last->data == axis.data * axis.size && last->index == axis.index * axis.size)
        *last = (Axis){last->size * axis.size, axis.data, axis.index};
    else
        to->axes[to->count++] = axis;
}

static void find(const Axes *axes, int64_t number, int64_t *data, int64_t *index) {
    for (size_t i = axes->count; i-- > 0; number /= axes->axes[i].size) {
        *data += number % axes->axes[i].size * axes->axes[i].data;
        *index += number % axes->axes[i].size * axes->axes[i].index;
    }
}

static float *place(Moves *m, float *data, int64_t index) {
    if (index < 0) index += m->height;
    if (index >= 0 && index < m->height) return data + index * m->along.data;
    m->outside = 1;
    return NULL;
}

/* `count` elements of a row, which begin at data, index and item. */
INLINE void move(Moves *m, int adds, float *data, const int64_t *index, float *item, int64_t count) {
    if (m->row.index || m->row.data != 1) {
        for (int64_t j = 0; j < count; j++) {
            float *at = place(m, data + j * m->row.data, index[j * m->row.index]);
            if (at && adds) *at += item[j];
            if (at && !adds) item[j] = *at;
        }
        return;
    }
    float *at = place(m, data, *index);
    int64_t j = 0;
    if (!at) return;
    for (; j + W <= count; j += W) {
        if (adds)
            store(at + j, load(at + j) + load(item + j));
        else
            store(item + j, load(at + j));
    }
    for (; j < count; j++) {
        if (adds)
            at[j] += item[j];
        else
            item[j] = at[j];
    }
}

/* Places [first, end) along the axis, of one place before it; `count` columns of each row from column `column` on. */
INLINE void move_rows(Moves *m, int adds, int64_t before, int64_t first, int64_t end, int64_t column, int64_t count) {
    int64_t data = column * m->row.data, index = column * m->row.index;
    find(&m->before, before, &data, &index);
    for (int64_t i = first; i < end; i++)
        for (int64_t k = 0; k < m->behind.size; k++) {
            int64_t from = data, at = index + i * m->along.index;
            find(&m->behind, k, &from, &at);
            int64_t number = (before * m->along.size + i) * m->behind.size + k;
            move(m, adds, m->data + from, m->indices + at, m->items + number * m->row.size + column, count);
        }
}

static void gather_task(void *argument, size_t index) {
    Moves *m = argument;
    int64_t row = (int64_t)index * m->rows, last = least(row + m->rows, m->before.size * m->along.size);
    while (row < last) {
        int64_t before = row / m->along.size, first = row % m->along.size;
        int64_t end = least(m->along.size, first + last - row);
        move_rows(m, 0, before, first, end, 0, m->row.size);
        row += end - first;
    }
}

/* Columns of its own, of one place before the axis: no other task adds to the same elements. */
static void scatter_task(void *argument, size_t index) {
    Moves *m = argument;
    int64_t blocks = divide_up(m->row.size, m->columns), column = (int64_t)index % blocks * m->columns;
    move_rows(m, 1, (int64_t)index / blocks, 0, m->along.size, column, least(m->columns, m->row.size - column));
}

/* Describe items of these dims, of which each axis of the indices has as many elements or one. */
static int describe(Moves *m, int64_t axis, const Tensor *data, const Tensor *indices, const int64_t *dims) {
    int64_t apart = 1, index_apart = 1, rank = (int64_t)data->rank;
    Axis axes[MOST_RANK];
    if (indices->rank != data->rank || axis < 0 || axis >= rank) return 0;
    for (int64_t i = rank; i-- > 0;) {
        int64_t size = indices->dims[i];
        if ((size != dims[i] && size != 1) || (i != axis && dims[i] > data->dims[i])) return 0;
        axes[i] = (Axis){dims[i], apart, size == 1 ? 0 : index_apart};
        apart *= data->dims[i], index_apart *= size;
    }
    m->before.size = m->behind.size = 1;
    for (int64_t i = 0; i < axis; i++) add_axis(&m->before, axes[i]);
    for (int64_t i = axis + 1; i < rank; i++) add_axis(&m->behind, axes[i]);
    m->along = axes[axis], m->height = data->dims[axis];
    m->row = m->behind.count ? m->behind.axes[--m->behind.count] : (Axis){1, 1, 0};
    m->behind.size /= m->row.size ? m->row.size : 1;
    m->indices = (const int64_t *)(const void *)indices->data;
    return 1;
}

static Status *refuse_outside(const Call *call) { return refuse(call, "an index lies outside of the data"); }

/* The shape that the indices are expanded to, indices, data */
static Status *run_gather(Call *call) {
    Tensor shape, indices, data;
    Moves m = {0};
    int64_t dims[MOST_RANK];
    TRY(read_input(call, 0, &shape));
    TRY(read_input(call, 1, &indices));
    TRY(read_input(call, 2, &data));
    const int64_t *to = (const int64_t *)(const void *)shape.data;
    int64_t lacking = (int64_t)indices.rank - elements(&shape);
    for (int64_t i = 0; i < (int64_t)indices.rank; i++)
        dims[i] = i < lacking || to[i - lacking] == 1 ? indices.dims[i] : to[i - lacking];
    if (lacking < 0 || !describe(&m, call->ints[0], &data, &indices, dims))
        return refuse(call, "shape, indices and data do not fit each other");
    TRY(make_output(call, 0, dims, data.rank, &m.items));
    int64_t rows = m.before.size * m.along.size, width = m.behind.size * m.row.size;
    if (!rows || !width) return NULL;
    m.data = data.data;
    m.rows = rows_in_blocks(rows, width).height;
    parallel(call, gather_task, divide_up(rows, m.rows), &m);
    return m.outside ? refuse_outside(call) : NULL;
}

/* indices, updates, data */
static Status *run_scatter(Call *call) {
    Tensor indices, updates, data;
    Moves m = {0};
    TRY(read_input(call, 0, &indices));
    TRY(read_input(call, 1, &updates));
    TRY(read_input(call, 2, &data));
    if (updates.rank != data.rank || !describe(&m, call->ints[0], &data, &indices, updates.dims))
        return refuse(call, "indices, updates and data do not fit each other");
    TRY(make_output(call, 0, data.dims, data.rank, &m.data));
    if (m.data != data.data) memcpy(m.data, data.data, (size_t)elements(&data) * sizeof(float));
    if (!elements(&updates)) return NULL;
    m.items = updates.data;
    m.columns = least(m.row.size, 128);
    parallel(call, scatter_task, m.before.size * divide_up(m.row.size, m.columns), &m);
    return m.outside ? refuse_outside(call) : NULL;
}

Node gather_node = {
    .name = "GatherElements", .inputs = 3, .needed = 3, .outputs = 1, .integers = 2, .ints = {"axis"}, .run = run_gather};
Node scatter_node = {
    .name = "ScatterAdd", .inputs = 3, .needed = 3, .outputs = 1, .integers = 1, .in_place = 3, .ints = {"axis"},
    .run = run_scatter};
