/* The matrix product, after Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008).
 *
 * B is packed into panels of NR columns, a block of A into panels of MR rows; the innermost loop keeps an MR x NR tile
 * of C in registers. The order of additions depends on the shapes alone, so results do not depend on the threads. */
#include "gemm.h"

#include "transpose.h"

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
#define MIDDLE (MR > 8 ? 8 : LOW)
#define FEW (2 * NR) /* columns up to which packing a factor's rows costs more than it saves */
#define KC (W == 16 ? 256 : 384) /* depth of a block: a panel of B stays in the first-level cache */
#define DEEP (W == 16 ? 4 * KC : 2 * KC) /* depth that a task packs at a time, in blocks that lie one after the other */
#define MC (56 / MR * MR)   /* most rows of a block of A: it stays in the second-level cache */
#define STRIP 128           /* most columns of a strip of B that a task packs for itself: it stays there, too */
#define WIDE (64 / NR * NR) /* columns through which a task follows the depth before it goes on: so much of C stays there */
#define PACK_PANELS 4       /* panels of B that one task packs */
#define EVEN 4              /* tasks come in multiples of it, so that two or four threads have equal shares */
#define MOST_ROOM (1 << 23) /* floats that are packed at a time: each session's thread keeps its memory */
#define AHEAD 12            /* rows asked for before they are packed: no hardware foresees strides of pages */

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

static inline int shorter(int piece) { return piece > EDGE ? EDGE : piece > 4 ? 4 : 1; }

/* As `pack_b_panel` for elements found by tables: whole panels by the longest pieces that lie together. */
static void pack_b_found(const Gemm *g, int64_t j, int64_t width, int64_t p, int64_t depth, float *to) {
    const int32_t *columns = g->columns + j, *rows = g->rows + p;
    int piece = width == NR ? W : 1;
    for (int i = 1; i < NR; i++)
        while (i % piece && columns[i] != columns[i - 1] + 1) piece = shorter(piece);
    for (int64_t q = 0; q < depth; q++, to += NR) {
        const float *from = g->b + rows[q];
        if (piece == W)
            UNROLL for (int v = 0; v < NR; v += W) store(to + v, load(from + columns[v]));
        else if (piece == EDGE)
            UNROLL for (int v = 0; v < NR; v += EDGE) store_edge(to + v, load_edge(from + columns[v]));
        else if (piece == 4)
            UNROLL for (int v = 0; v < NR; v += 4) memcpy(to + v, from + columns[v], 4 * sizeof(float));
        else if (width == NR)
            for (int v = 0; v < NR; v++) to[v] = from[columns[v]];
        else
            for (int64_t v = 0; v < NR; v++) to[v] = v < width ? from[columns[v]] : 0;
    }
}

/* Rows [i, i + height) of columns [p, p + depth) of op(A) as one panel: `depth` rows of MR, filled up with zeros.
 * Where MR is no multiple of EDGE, whole vectors are written and their surplus is overwritten by the next column's. */
static void pack_a_panel(const Gemm *g, int64_t i, int64_t height, int64_t p, int64_t depth, float *to) {
    if (g->depths) {
        /* The surplus of a column's vectors is overwritten by the next column, hence not in the last one. */
        const int64_t whole = height == MR && g->row_a == 1 && g->m - i >= EDGE ? depth - 1 : 0;
        for (int64_t q = 0; q < depth; q++, to += MR) {
            const float *from = g->a + i * g->row_a + g->depths[p + q];
            if (q < whole)
                for (int v = 0;; v = MR - EDGE) {
                    store_edge(to + v, load_edge(from + v));
                    if (v + EDGE >= MR) break;
                }
            else if (height == MR)
                UNROLL for (int v = 0; v < MR; v++) to[v] = from[v * g->row_a];
            else
                for (int64_t v = 0; v < MR; v++) to[v] = v < height ? from[v * g->row_a] : 0;
        }
        return;
    }
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

/* What is written of a product: c = alpha a b, and bias or start or what c holds is added. */
typedef struct {
    float *c;
    int64_t row_c;
    float alpha;
    int add;
    const float *bias, *start;
} Target;

/* The first `rows` rows of one tile. Element (i, p) of A lies at a[i * row_a + p * column_a]. */
static inline __attribute__((always_inline)) void some_rows(const int rows, int64_t depth, const float *restrict a,
                                                            int64_t row_a, int64_t column_a, const float *restrict b,
                                                            Target to) {
    vec sums[MR][NV];
    UNROLL for (int i = 0; i < rows; i++) {
        __builtin_prefetch(to.c + i * to.row_c, 1);
        UNROLL for (int v = 0; v < NV; v++) sums[i][v] = (vec){0};
    }
    for (int64_t p = 0; p < depth; p++) {
        vec row[NV];
        UNROLL for (int v = 0; v < NV; v++) row[v] = load(b + p * NR + v * W);
        const float *column = a + p * column_a;
#if W == 4
        /* NEON multiplies by a lane. */
        vec factors[MR / W];
        UNROLL for (int i = 0; i < rows / W; i++) {
            if (row_a == 1)
                factors[i] = load(column + i * W);
            else
                UNROLL for (int j = 0; j < W; j++) factors[i][j] = column[(i * W + j) * row_a];
        }
#define FACTOR(i) all(factors[(i) / W][(i) % W])
#else
#define FACTOR(i) all(column[(i) * row_a])
#endif
        UNROLL for (int i = 0; i < rows; i++) UNROLL for (int v = 0; v < NV; v++) sums[i][v] += FACTOR(i) * row[v];
    }
    /* Forget the addresses prefetched above: to keep them through the loop costs it a vector's register. */
    __asm__("" : "+r"(to.c), "+r"(to.row_c));
    UNROLL for (int i = 0; i < rows; i++) {
        const vec start = all(to.start ? to.start[i] : 0);
        UNROLL for (int v = 0; v < NV; v++) {
            float *at = to.c + i * to.row_c + v * W;
            vec value = all(to.alpha) * sums[i][v];
            store(at, to.add ? load(at) + value : to.bias ? load(to.bias + v * W) + value : to.start ? start + value : value);
        }
    }
}

static void tile(int64_t depth, const float *restrict a, const float *restrict b, Target to) {
    some_rows(MR, depth, a, 1, MR, b, to);
}

/* As `tile`, for fewer rows: the last rows of a matrix need not cost as much as MR. */
static void middle_tile(int64_t depth, const float *restrict a, const float *restrict b, Target to) {
    some_rows(MIDDLE, depth, a, 1, MR, b, to);
}

static void low_tile(int64_t depth, const float *restrict a, const float *restrict b, Target to) {
    some_rows(LOW, depth, a, 1, MR, b, to);
}

/* As `tile`, of rows that are not packed. */
static void loose_tile(int64_t depth, const float *restrict a, int64_t row_a, const float *restrict b, Target to) {
    some_rows(MR, depth, a, row_a, 1, b, to);
}

/* A tile at an edge, or whose columns do not lie together: [row][NR] -> C. */
static void put_tile(const Gemm *g, const float *whole, int64_t i, int64_t rows, int64_t j, int64_t columns, int add) {
    for (int64_t x = 0; x < rows; x++)
        for (int64_t y = 0; y < columns; y++) {
            float *at = g->c + (i + x) * g->row_c + (g->places ? g->places[j + y] : j + y);
            float before = add ? *at : g->bias ? g->bias[j + y] : g->start ? g->start[i + x] : 0;
            *at = before + whole[x * NR + y];
        }
}

/* Rows [i, i + height) x columns [j, j + width) of C for one block of depth; B is packed, and so is A, or it is NULL and
 * read where it lies. */
static void block(const Gemm *g, const float *a, const float *b, int64_t i, int64_t height, int64_t j, int64_t width,
                  int64_t p, int64_t depth) {
    const int add = p > 0 || g->add;
    float left[MR * KC];
    for (int64_t v = 0; v < width; v += NR, b += NR * depth) {
        int64_t columns = least(NR, width - v), first = j + v, last = first + columns - 1;
        const int32_t *places = g->places;
        const int together = columns == NR && (!places || places[last] - places[first] == NR - 1);
        float *c = g->c + (places ? places[first] : first);
        for (int64_t u = 0; u < height; u += MR) {
            int64_t rows = least(MR, height - u);
            const float *panel = a ? a + u * depth : g->a + (i + u) * g->row_a + p;
            if (!a && rows < MR) {
                pack_a_panel(g, i + u, rows, p, depth, left);
                panel = left;
            }
            float whole[MR * NR];
            Target to = {.c = whole, .row_c = NR, .alpha = g->alpha};
            if (rows == MR && together)
                to = (Target){c + (i + u) * g->row_c, g->row_c, g->alpha, add, g->bias ? g->bias + first : NULL,
                              g->start ? g->start + i + u : NULL};
            if (!a && rows == MR)
                loose_tile(depth, panel, g->row_a, b, to);
            else if (rows <= LOW)
                low_tile(depth, panel, b, to);
            else if (rows <= MIDDLE)
                middle_tile(depth, panel, b, to);
            else
                tile(depth, panel, b, to);
            if (to.c == whole) put_tile(g, whole, i + u, rows, first, columns, add);
        }
    }
}

/* Columns [j, j + width) of rows [p, p + depth) of op(B), panel after panel. */
static void pack_b_block(const Gemm *g, int64_t j, int64_t width, int64_t p, int64_t depth, float *to) {
    int64_t v = 0;
    if (g->columns) {
        for (; v < width; v += NR) pack_b_found(g, j + v, least(NR, width - v), p, depth, to + v * depth);
        return;
    }
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

static const float *column_of(const Gemm *g, int64_t i, int64_t p) {
    return g->a + i + (g->depths ? g->depths[p] : p * g->column_a);
}

static void pack_a_block(const Gemm *g, int64_t i, int64_t height, int64_t p, int64_t depth, float *to) {
    if (g->row_a == 1 && height % MR == 0 && g->m - i >= height - MR + EDGE) {
        /* Row by row of memory: a panel at a time would touch each of its pages anew. */
        for (int64_t q = 0; q + 1 < depth; q++) {
            const float *from = column_of(g, i, p + q), *soon = column_of(g, i, least(p + q + AHEAD, g->k - 1));
            for (int64_t u = 0; u < height; u += MR) {
                __builtin_prefetch(soon + u);
                for (int v = 0;; v = MR - EDGE) {
                    store_edge(to + u * depth + q * MR + v, load_edge(from + u + v));
                    if (v + EDGE >= MR) break;
                }
            }
        }
        const float *from = column_of(g, i, p + depth - 1);
        for (int64_t u = 0; u < height; u += MR)
            for (int v = 0; v < MR; v++) to[u * depth + (depth - 1) * MR + v] = from[u + v];
        return;
    }
    for (int64_t u = 0; u < height; u += MR) pack_a_panel(g, i + u, least(MR, height - u), p, depth, to + u * depth);
}

/* A thread's own packed blocks. */
static _Thread_local float own_a[MC * DEEP] __attribute__((aligned(64)));
static _Thread_local float own_b[STRIP * DEEP] __attribute__((aligned(64)));

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
    const int64_t columns = divide_up(width, NR) * NR;
    for (int64_t top = 0; top < g->k; top += DEEP) {
        const int64_t end = least(top + DEEP, g->k);
        for (int64_t p = top; p < end; p += KC)
            pack_b_block(g, j, width, p, least(KC, end - p), own_b + (p - top) * columns);
        for (int64_t i = 0; i < g->m; i += MC)
            for (int64_t p = top; p < end; p += KC) {
                int64_t depth = least(KC, end - p);
                block(g, shared_a(s, i / MR, p, depth), own_b + (p - top) * columns, i, least(MC, g->m - i), j, width, p,
                      depth);
            }
    }
}

/* So few columns that A is better read where it lies than packed. */
static int is_loose(const Gemm *g) { return !g->depths && g->column_a == 1 && g->n <= FEW; }

static void rows_task(void *argument, size_t index) {
    const Shared *s = argument;
    const Gemm *g = s->gemm;
    int64_t place = (int64_t)index, i = s->row_panels * place / s->tasks * MR;
    int64_t height = least(s->row_panels * (place + 1) / s->tasks * MR, g->m) - i;
    const int64_t rows = divide_up(height, MR) * MR;
    const float *packed = is_loose(g) ? NULL : own_a;
    for (int64_t top = 0; top < g->k; top += DEEP) {
        const int64_t end = least(top + DEEP, g->k);
        for (int64_t p = top; packed && p < end; p += KC)
            pack_a_block(g, i, height, p, least(KC, end - p), own_a + (p - top) * rows);
        for (int64_t j = 0; j < g->n; j += WIDE)
            for (int64_t p = top; p < end; p += KC) {
                int64_t depth = least(KC, end - p);
                block(g, packed ? packed + (p - top) * rows : NULL, shared_b(s, j / NR, p, depth), i, height, j,
                      least(WIDE, g->n - j), p, depth);
            }
    }
}

/* Tasks for so many panels, at most `most` to a task. */
static int64_t even_tasks(int64_t panels, int64_t most) {
    return least(divide_up(divide_up(panels, most), EVEN) * EVEN, panels);
}

int64_t gemm_room(const Gemm *gemm) { return gemm->k * (least(gemm->m, gemm->n) + NR); }

/* The product's depths [p, p + depth). */
static Gemm slice(const Gemm *gemm, int64_t p, int64_t depth) {
    Gemm piece = *gemm;
    piece.k = depth;
    if (gemm->depths) piece.depths += p;
    else piece.a += p * gemm->column_a;
    if (gemm->rows) piece.rows += p;
    else piece.b += p * gemm->row_b;
    if (p) piece.add = 1, piece.bias = NULL, piece.start = NULL;
    return piece;
}

int gemm_shared(const Call *call, const Gemm *gemm) {
    /* Cut where a task's blocks end: the same additions in the same order. */
    const int64_t pieces = divide_up(gemm_room(gemm), MOST_ROOM);
    const int64_t depth = divide_up(divide_up(gemm->k, pieces), DEEP) * DEEP;
    float *room = NULL;
    for (int64_t p = 0; p < gemm->k; p += depth) {
        const Gemm piece = slice(gemm, p, least(depth, gemm->k - p));
        if (!p) room = scratch(gemm_room(&piece));
        if (!room) return 0;
        gemm_shared_in(call, &piece, room);
    }
    return 1;
}

void gemm_shared_in(const Call *call, const Gemm *gemm, float *room) {
    Shared s = {gemm, room, divide_up(gemm->m, MR), divide_up(gemm->n, NR), 0};
    if (gemm->m < gemm->n) {
        s.tasks = even_tasks(s.column_panels, STRIP / NR);
        parallel(call, pack_a_task, divide_up(gemm->m, MC), &s);
        parallel(call, strip_task, s.tasks, &s);
    } else {
        s.tasks = even_tasks(s.row_panels, MC / MR);
        parallel(call, pack_b_task, divide_up(s.column_panels, PACK_PANELS), &s);
        parallel(call, rows_task, s.tasks, &s);
    }
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
