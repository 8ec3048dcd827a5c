/* The matrix product, after Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008).
 *
 * B is packed into panels of NR columns, a block of A into panels of MR rows; the innermost loop keeps an MR x NR tile
 * of C in registers. The order of additions depends on the shapes alone, so results do not depend on the threads. */
#include "gemm.h"

#include "vector.h"

#if W == 16
#define MR 14
#define NV 2
#elif W == 8
#define MR 6
#define NV 2
#else
#define MR 8
#define NV 3
#endif
#define NR (W * NV)
#define LOW 4 /* rows of a tile at the lower edge that has no more */
#define KC 384              /* depth of a block: a panel of B stays in the first-level cache */
#define MC (112 / MR * MR)  /* most rows of a block of A: it stays in the second-level cache */
#define STRIP 128           /* most columns of a strip of B that a task packs for itself: it stays there, too */
#define PACK_PANELS 4       /* panels of B that one task packs */
#define EVEN 4              /* tasks come in multiples of it, so that two or four threads have equal shares */
#define AHEAD 12            /* rows asked for before they are packed: no hardware foresees strides of pages */

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t iedge __attribute__((vector_size(4 * EDGE)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (iedge){__VA_ARGS__})
#endif

/* to[j * columns_apart + i] = from[i * rows_apart + j] for i, j < EDGE; j ascends, so that columns may overlap. */
#if EDGE == 4
static inline void transpose(const float *from, int64_t rows_apart, float *to, int64_t columns_apart) {
    edge r[4], s[4];
    UNROLL for (int i = 0; i < 4; i++) r[i] = load_edge(from + i * rows_apart);
    UNROLL for (int i = 0; i < 2; i++) {
        s[i] = SHUFFLE(r[i], r[i + 2], 0, 4, 1, 5);
        s[i + 2] = SHUFFLE(r[i], r[i + 2], 2, 6, 3, 7);
    }
    UNROLL for (int i = 0; i < 4; i += 2) {
        store_edge(to + i * columns_apart, SHUFFLE(s[i], s[i + 1], 0, 4, 1, 5));
        store_edge(to + (i + 1) * columns_apart, SHUFFLE(s[i], s[i + 1], 2, 6, 3, 7));
    }
}
#else
static inline void transpose(const float *from, int64_t rows_apart, float *to, int64_t columns_apart) {
    edge r[8], s[8], t[8];
    UNROLL for (int i = 0; i < 8; i++) r[i] = load_edge(from + i * rows_apart);
    UNROLL for (int i = 0; i < 8; i += 2) {
        s[i] = SHUFFLE(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        s[i + 1] = SHUFFLE(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    UNROLL for (int i = 0; i < 8; i += 4) {
        t[i] = SHUFFLE(s[i], s[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        t[i + 1] = SHUFFLE(s[i], s[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        t[i + 2] = SHUFFLE(s[i + 1], s[i + 3], 0, 1, 8, 9, 4, 5, 12, 13);
        t[i + 3] = SHUFFLE(s[i + 1], s[i + 3], 2, 3, 10, 11, 6, 7, 14, 15);
    }
    UNROLL for (int i = 0; i < 4; i++)
        store_edge(to + i * columns_apart, SHUFFLE(t[i], t[i + 4], 0, 1, 2, 3, 8, 9, 10, 11));
    UNROLL for (int i = 0; i < 4; i++)
        store_edge(to + (i + 4) * columns_apart, SHUFFLE(t[i], t[i + 4], 4, 5, 6, 7, 12, 13, 14, 15));
}
#endif

/* Columns [j, j + width) of rows [p, p + depth) of op(B) as one panel: `depth` rows of NR, filled up with zeros. */
static void pack_b_panel(const Gemm *g, int64_t j, int64_t width, int64_t p, int64_t depth, float *to) {
    const float *from = g->b + p * g->row_b + j * g->column_b;
    int64_t q = 0;
    if (width == NR && g->row_b == 1)
        for (; q + EDGE <= depth; q += EDGE)
            for (int v = 0; v < NR; v += EDGE) transpose(from + v * g->column_b + q, g->column_b, to + q * NR + v, NR);
    for (; q < depth; q++)
        for (int64_t v = 0; v < NR; v++) to[q * NR + v] = v < width ? from[q * g->row_b + v * g->column_b] : 0;
}

/* Rows [i, i + height) of columns [p, p + depth) of op(A) as one panel: `depth` rows of MR, filled up with zeros.
 * Where MR is no multiple of EDGE, whole vectors are written and their surplus is overwritten by the next column's. */
static void pack_a_panel(const Gemm *g, int64_t i, int64_t height, int64_t p, int64_t depth, float *to) {
    const float *from = g->a + i * g->row_a + p * g->column_a;
    int64_t q = 0, readable = least(g->m - i, MR < EDGE ? EDGE : MR);
    if (height == MR && readable >= EDGE) {
        if (g->row_a == 1)
            for (; q + 1 < depth; q++)
                for (int v = 0;; v = MR - EDGE) {
                    store_edge(to + q * MR + v, load_edge(from + q * g->column_a + v));
                    if (v + EDGE >= MR) break;
                }
        else if (g->column_a == 1)
            for (; q + EDGE < depth; q += EDGE)
                for (int v = 0;; v = MR - EDGE) {
                    transpose(from + v * g->row_a + q, g->row_a, to + q * MR + v, MR);
                    if (v + EDGE >= MR) break;
                }
    }
    for (; q < depth; q++)
        for (int64_t v = 0; v < MR; v++) to[q * MR + v] = v < height ? from[q * g->column_a + v * g->row_a] : 0;
}

/* c = alpha a b + bias, or c += alpha a b, for the first `rows` rows of one tile. */
static inline __attribute__((always_inline)) void some_rows(const int rows, int64_t depth, const float *restrict a,
                                                            const float *restrict b, float *restrict c, int64_t row_c,
                                                            float alpha, int add, const float *bias) {
    vec sums[MR][NV];
    UNROLL for (int i = 0; i < rows; i++) {
        __builtin_prefetch(c + i * row_c, 1);
        UNROLL for (int v = 0; v < NV; v++) sums[i][v] = (vec){0};
    }
    for (int64_t p = 0; p < depth; p++) {
        vec row[NV];
        UNROLL for (int v = 0; v < NV; v++) row[v] = load(b + p * NR + v * W);
#if W == 4
        /* NEON multiplies by a lane. */
        vec factors[MR / W];
        UNROLL for (int i = 0; i < rows / W; i++) factors[i] = load(a + p * MR + i * W);
#define FACTOR(i) all(factors[(i) / W][(i) % W])
#else
#define FACTOR(i) all(a[p * MR + (i)])
#endif
        UNROLL for (int i = 0; i < rows; i++) UNROLL for (int v = 0; v < NV; v++) sums[i][v] += FACTOR(i) * row[v];
    }
    UNROLL for (int i = 0; i < rows; i++) UNROLL for (int v = 0; v < NV; v++) {
        float *at = c + i * row_c + v * W;
        vec value = all(alpha) * sums[i][v];
        store(at, add ? load(at) + value : bias ? load(bias + v * W) + value : value);
    }
}

static inline void tile(int64_t depth, const float *restrict a, const float *restrict b, float *restrict c,
                        int64_t row_c, float alpha, int add, const float *bias) {
    some_rows(MR, depth, a, b, c, row_c, alpha, add, bias);
}

/* As `tile`, for fewer rows: the last rows of a matrix need not cost as much as MR. */
static inline void low_tile(int64_t depth, const float *restrict a, const float *restrict b, float *restrict c,
                            int64_t row_c, float alpha, int add, const float *bias) {
    some_rows(LOW, depth, a, b, c, row_c, alpha, add, bias);
}

/* Rows [i, i + height) x columns [j, j + width) of C for one block of depth; both factors are packed. */
static void block(const Gemm *g, const float *a, const float *b, int64_t i, int64_t height, int64_t j, int64_t width,
                  int64_t p, int64_t depth) {
    const int add = p > 0 || g->add;
    for (int64_t v = 0; v < width; v += NR, b += NR * depth) {
        const float *panel = a;
        int64_t columns = least(NR, width - v);
        for (int64_t u = 0; u < height; u += MR, panel += MR * depth) {
            float *c = g->c + (i + u) * g->row_c + j + v;
            const float *bias = g->bias ? g->bias + j + v : NULL;
            int64_t rows = least(MR, height - u);
            if (rows == MR && columns == NR) {
                tile(depth, panel, b, c, g->row_c, g->alpha, add, bias);
                continue;
            }
            float whole[MR * NR];
            if (rows <= LOW)
                low_tile(depth, panel, b, whole, NR, g->alpha, 0, NULL);
            else
                tile(depth, panel, b, whole, NR, g->alpha, 0, NULL);
            for (int64_t x = 0; x < rows; x++)
                for (int64_t y = 0; y < columns; y++) {
                    float before = add ? c[x * g->row_c + y] : bias ? bias[y] : 0;
                    c[x * g->row_c + y] = before + whole[x * NR + y];
                }
        }
    }
}

/* Columns [j, j + width) of rows [p, p + depth) of op(B), panel after panel. */
static void pack_b_block(const Gemm *g, int64_t j, int64_t width, int64_t p, int64_t depth, float *to) {
    int64_t v = 0;
    if (g->column_b == 1) {
        const float *from = g->b + p * g->row_b + j;
        v = width / NR * NR;
        for (int64_t q = 0; q < depth; q++, from += g->row_b)
            for (int64_t u = 0; u < v; u += NR) {
                if (q + AHEAD < depth) __builtin_prefetch(from + AHEAD * g->row_b + u);
                UNROLL for (int i = 0; i < NR; i += W) store(to + u * depth + q * NR + i, load(from + u + i));
            }
    }
    for (; v < width; v += NR) pack_b_panel(g, j + v, least(NR, width - v), p, depth, to + v * depth);
}

static void pack_a_block(const Gemm *g, int64_t i, int64_t height, int64_t p, int64_t depth, float *to) {
    if (g->row_a == 1 && height % MR == 0 && g->m - i >= height - MR + EDGE) {
        /* Row by row of memory: a panel at a time would touch each of its pages anew. */
        const float *from = g->a + i + p * g->column_a;
        for (int64_t q = 0; q + 1 < depth; q++, from += g->column_a)
            for (int64_t u = 0; u < height; u += MR) {
                if (q + AHEAD < depth) __builtin_prefetch(from + AHEAD * g->column_a + u);
                for (int v = 0;; v = MR - EDGE) {
                    store_edge(to + u * depth + q * MR + v, load_edge(from + u + v));
                    if (v + EDGE >= MR) break;
                }
            }
        for (int64_t u = 0; u < height; u += MR)
            for (int v = 0; v < MR; v++) to[u * depth + (depth - 1) * MR + v] = from[u + v];
        return;
    }
    for (int64_t u = 0; u < height; u += MR) pack_a_panel(g, i + u, least(MR, height - u), p, depth, to + u * depth);
}

/* A thread's own packed blocks. */
static _Thread_local float own_a[MC * KC] __attribute__((aligned(64)));
static _Thread_local float own_b[STRIP * KC] __attribute__((aligned(64)));

/* The factor with fewer rows or columns is packed once for all; each task packs its own piece of the other. */
typedef struct {
    const Gemm *gemm;
    float *packed;
    int64_t row_panels, column_panels, tasks;
} Shared;

static float *shared_a(const Shared *s, int64_t panel, int64_t p, int64_t depth) {
    return s->packed + MR * (p * s->row_panels + panel * depth);
}

static float *shared_b(const Shared *s, int64_t panel, int64_t p, int64_t depth) {
    return s->packed + NR * (p * s->column_panels + panel * depth);
}

static void pack_a_task(void *argument, size_t index) {
    const Shared *s = argument;
    int64_t i = (int64_t)index * MC, height = least(MC, s->gemm->m - i);
    for (int64_t p = 0; p < s->gemm->k; p += KC) {
        int64_t depth = least(KC, s->gemm->k - p);
        pack_a_block(s->gemm, i, height, p, depth, shared_a(s, i / MR, p, depth));
    }
}

static void pack_b_task(void *argument, size_t index) {
    const Shared *s = argument;
    int64_t j = (int64_t)index * PACK_PANELS * NR, width = least(PACK_PANELS * NR, s->gemm->n - j);
    for (int64_t p = 0; p < s->gemm->k; p += KC) {
        int64_t depth = least(KC, s->gemm->k - p);
        pack_b_block(s->gemm, j, width, p, depth, shared_b(s, j / NR, p, depth));
    }
}

static void strip_task(void *argument, size_t index) {
    const Shared *s = argument;
    const Gemm *g = s->gemm;
    int64_t place = (int64_t)index, j = s->column_panels * place / s->tasks * NR;
    int64_t width = least(s->column_panels * (place + 1) / s->tasks * NR, g->n) - j;
    for (int64_t p = 0; p < g->k; p += KC) {
        int64_t depth = least(KC, g->k - p);
        pack_b_block(g, j, width, p, depth, own_b);
        for (int64_t i = 0; i < g->m; i += MC)
            block(g, shared_a(s, i / MR, p, depth), own_b, i, least(MC, g->m - i), j, width, p, depth);
    }
}

static void rows_task(void *argument, size_t index) {
    const Shared *s = argument;
    const Gemm *g = s->gemm;
    int64_t place = (int64_t)index, i = s->row_panels * place / s->tasks * MR;
    int64_t height = least(s->row_panels * (place + 1) / s->tasks * MR, g->m) - i;
    for (int64_t p = 0; p < g->k; p += KC) {
        int64_t depth = least(KC, g->k - p);
        pack_a_block(g, i, height, p, depth, own_a);
        block(g, own_a, shared_b(s, 0, p, depth), i, height, 0, g->n, p, depth);
    }
}

/* Tasks for so many panels, at most `most` to a task. */
static int64_t even_tasks(int64_t panels, int64_t most) {
    return least(divide_up(divide_up(panels, most), EVEN) * EVEN, panels);
}

int gemm_shared(const Call *call, const Gemm *gemm) {
    Shared s = {gemm, NULL, divide_up(gemm->m, MR), divide_up(gemm->n, NR), 0};
    int by_columns = gemm->m < gemm->n;
    s.packed = scratch(gemm->k * (by_columns ? s.row_panels * MR : s.column_panels * NR));
    if (!s.packed) return 0;
    if (by_columns) {
        s.tasks = even_tasks(s.column_panels, STRIP / NR);
        parallel(call, pack_a_task, divide_up(gemm->m, MC), &s);
        parallel(call, strip_task, s.tasks, &s);
    } else {
        s.tasks = even_tasks(s.row_panels, MC / MR);
        parallel(call, pack_b_task, divide_up(s.column_panels, PACK_PANELS), &s);
        parallel(call, rows_task, s.tasks, &s);
    }
    return 1;
}

void gemm_alone(const Gemm *gemm) {
    for (int64_t p = 0; p < gemm->k; p += KC) {
        int64_t depth = least(KC, gemm->k - p), strip = STRIP * KC / depth / NR * NR;
        for (int64_t j = 0; j < gemm->n; j += strip) {
            int64_t width = least(strip, gemm->n - j);
            pack_b_block(gemm, j, width, p, depth, own_b);
            for (int64_t i = 0; i < gemm->m; i += MC) {
                int64_t height = least(MC, gemm->m - i);
                pack_a_block(gemm, i, height, p, depth, own_a);
                block(gemm, own_a, own_b, i, height, j, width, p, depth);
            }
        }
    }
}
