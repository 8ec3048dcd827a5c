/* Product: Y = alpha op(A) op(B) (+ bias), with the batch axes of numpy.matmul.
 *
 * Each of A, B and Y may be seen through a permutation of its axes, so that no Transpose has to be run before or after:
 * a view is the decimal number 1 followed by the permutation's digits (10213 for 0, 2, 1, 3), or 0 for none. That of Y
 * leads from the product's axes to those of the output, the last of which must be the product's rows or columns. */
#include "gemm.h"

#include <string.h>

enum { TURN_A, TURN_B };
enum { VIEW_A, VIEW_B, VIEW_Y };
#define SHARED_WORK (1 << 22) /* multiplications from which a product of a batch is worth all threads */
#define ALONE_WORK (1 << 16)  /* multiplications below which one thread is faster */

/* The last two axes are rows and columns, the others the batch. */
typedef struct {
    size_t rank;
    int64_t dims[MOST_RANK], strides[MOST_RANK];
} Axes;

/* The order of axes that a view names; 0 when it is no permutation of so many axes. */
static int read_view(int64_t view, size_t rank, size_t *order) {
    int64_t left = view;
    unsigned seen = 0;
    for (size_t i = rank; i-- > 0; left /= 10) {
        order[i] = view ? (size_t)(left % 10) : i;
        if (order[i] >= rank || seen & 1u << order[i]) return 0;
        seen |= 1u << order[i];
    }
    return left == (view != 0);
}

static void contiguous(const int64_t *dims, size_t rank, int64_t *strides) {
    int64_t stride = 1;
    for (size_t i = rank; i-- > 0; stride *= dims[i]) strides[i] = stride;
}

static int see(const Tensor *tensor, int64_t view, int turn, Axes *out) {
    int64_t strides[MOST_RANK];
    size_t order[MOST_RANK], rank = tensor->rank;
    if (rank < 2 || !read_view(view, rank, order)) return 0;
    contiguous(tensor->dims, rank, strides);
    out->rank = rank;
    for (size_t i = 0; i < rank; i++) {
        size_t from = turn && i + 2 >= rank ? order[2 * rank - 3 - i] : order[i];
        out->dims[i] = tensor->dims[from];
        out->strides[i] = strides[from];
    }
    return 1;
}

typedef struct {
    Gemm gemm;
    size_t axes;
    int64_t dims[MOST_RANK], a[MOST_RANK], b[MOST_RANK], c[MOST_RANK];
} Batch;

static Gemm product_at(const Batch *batch, int64_t index) {
    Gemm gemm = batch->gemm;
    for (size_t i = batch->axes; i-- > 0; index /= batch->dims[i]) {
        int64_t place = index % batch->dims[i];
        gemm.a += place * batch->a[i];
        gemm.b += place * batch->b[i];
        gemm.c += place * batch->c[i];
    }
    return gemm;
}

static void product_task(void *argument, size_t index) {
    const Batch *batch = argument;
    Gemm gemm = product_at(batch, (int64_t)index);
    gemm_alone(&gemm);
}

static void fill(const Gemm *gemm) {
    for (int64_t i = 0; i < gemm->m; i++)
        for (int64_t j = 0; j < gemm->n; j++) gemm->c[i * gemm->row_c + j] = gemm->bias ? gemm->bias[j] : 0;
}

static Status *multiply(const Call *call, Batch *batch) {
    int64_t count = 1, work = batch->gemm.m * batch->gemm.n * batch->gemm.k;
    for (size_t i = 0; i < batch->axes; i++) count *= batch->dims[i];
    if (work && work * count > ALONE_WORK && count > 1 && work < SHARED_WORK) {
        parallel(call, product_task, count, batch);
        return NULL;
    }
    for (int64_t i = 0; i < count; i++) {
        Gemm gemm = product_at(batch, i);
        if (!work)
            fill(&gemm);
        else if (work * count <= ALONE_WORK)
            gemm_alone(&gemm);
        else if (!gemm_shared(call, &gemm))
            return out_of_memory(call);
    }
    return NULL;
}

/* Move batch axes that only lengthen A and Y into the rows: one large product instead of many small ones. */
static void join_rows(Batch *batch, int64_t row_a, int64_t row_c) {
    Gemm *gemm = &batch->gemm;
    for (size_t i = 0; i < batch->axes;) {
        if (batch->dims[i] != 1) {
            i++;
            continue;
        }
        for (size_t j = i + 1; j < batch->axes; j++) {
            batch->dims[j - 1] = batch->dims[j];
            batch->a[j - 1] = batch->a[j];
            batch->b[j - 1] = batch->b[j];
            batch->c[j - 1] = batch->c[j];
        }
        batch->axes--;
    }
    while (batch->axes) {
        size_t last = batch->axes - 1;
        if (batch->b[last] || batch->a[last] != row_a * gemm->m || batch->c[last] != row_c * gemm->m) return;
        gemm->m *= batch->dims[last];
        batch->axes = last;
    }
}

static Status *run(Call *call) {
    Tensor a, b, bias = {0};
    Axes x, y;
    TRY(read_input(call, 0, &a));
    TRY(read_input(call, 1, &b));
    if (count_inputs(call) > 2) TRY(read_input(call, 2, &bias));
    const int64_t *views = call->ints + 2;
    if (!see(&a, views[VIEW_A], (int)call->ints[TURN_A], &x) || !see(&b, views[VIEW_B], (int)call->ints[TURN_B], &y))
        return refuse(call, "a factor's axes do not fit its view");
    size_t rank = x.rank > y.rank ? x.rank : y.rank, order[MOST_RANK];
    int64_t dims[MOST_RANK], made[MOST_RANK], strides[MOST_RANK], placed[MOST_RANK];
    int64_t depth = x.dims[x.rank - 1];
    if (y.dims[y.rank - 2] != depth) return refuse(call, "the factors' inner dimensions differ");

    Batch batch = {.axes = rank - 2};
    for (size_t i = 0; i + 2 < rank; i++) {
        int in_a = i + x.rank >= rank, in_b = i + y.rank >= rank;
        int64_t of_a = in_a ? x.dims[i + x.rank - rank] : 1, of_b = in_b ? y.dims[i + y.rank - rank] : 1;
        if (of_a != of_b && of_a != 1 && of_b != 1) return refuse(call, "the factors' batch dimensions differ");
        dims[i] = of_a == 1 ? of_b : of_a;
        batch.dims[i] = dims[i];
        batch.a[i] = of_a == 1 ? 0 : x.strides[i + x.rank - rank];
        batch.b[i] = of_b == 1 ? 0 : y.strides[i + y.rank - rank];
    }
    dims[rank - 2] = x.dims[x.rank - 2];
    dims[rank - 1] = y.dims[y.rank - 1];
    if (!read_view(views[VIEW_Y], rank, order)) return refuse(call, "the output's axes do not fit its view");
    if (order[rank - 1] + 2 < rank) return refuse(call, "the output's last axis is neither rows nor columns of the product");
    for (size_t i = 0; i < rank; i++) made[i] = dims[order[i]];
    contiguous(made, rank, strides);
    for (size_t i = 0; i < rank; i++) placed[order[i]] = strides[i];
    for (size_t i = 0; i + 2 < rank; i++) batch.c[i] = placed[i];

    Gemm *g = &batch.gemm;
    *g = (Gemm){.m = dims[rank - 2], .n = dims[rank - 1], .k = depth, .alpha = call->floats[0], .a = a.data, .b = b.data};
    g->row_a = x.strides[x.rank - 2], g->column_a = x.strides[x.rank - 1];
    g->row_b = y.strides[y.rank - 2], g->column_b = y.strides[y.rank - 1];
    g->row_c = placed[rank - 2];
    g->bias = bias.data;
    if (bias.data && (elements(&bias) != g->n || placed[rank - 1] != 1)) return refuse(call, "the bias does not fit");
    TRY(make_output(call, 0, made, rank, &g->c));
    join_rows(&batch, g->row_a, g->row_c);
    if (placed[rank - 1] != 1) {
        /* Rows of the output are columns of the product: multiply the transposed factors in the other order. */
        Gemm turned = *g;
        turned.m = g->n, turned.n = g->m, turned.a = g->b, turned.b = g->a, turned.row_c = placed[rank - 1];
        turned.row_a = g->column_b, turned.column_a = g->row_b;
        turned.row_b = g->column_a, turned.column_b = g->row_a;
        *g = turned;
        for (size_t i = 0; i < batch.axes; i++) {
            int64_t of_a = batch.a[i];
            batch.a[i] = batch.b[i], batch.b[i] = of_a;
        }
    }
    return multiply(call, &batch);
}

Node product_node = {
    .name = "Product",
    .inputs = 3,
    .needed = 2,
    .outputs = 1,
    .ints = {"turn_a", "turn_b", "view_a", "view_b", "view_y"},
    .floats = {"alpha"},
    .run = run,
};
