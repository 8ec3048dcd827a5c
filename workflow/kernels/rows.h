/* Work on a tensor's rows (its last axis), shared out in blocks that depend on the shape alone. */
#ifndef ORTFLOW_ROWS_H
#define ORTFLOW_ROWS_H

#include "node.h"

#define TASK_ELEMENTS 16384 /* of one task: some ten microseconds */
#define MOST_PARTS 32       /* partial sums over rows */

typedef struct {
    int64_t rows, width, height; /* `height` rows to a block */
    int64_t blocks;
} Rows;

static inline Rows rows_in_blocks(int64_t rows, int64_t width) {
    int64_t height = width ? TASK_ELEMENTS / width : 1;
    if (height < 1) height = 1;
    return (Rows){rows, width, height, divide_up(rows, height)};
}

/* As above, in at most MOST_PARTS blocks: for sums over all rows. */
static inline Rows rows_in_parts(int64_t rows, int64_t width) {
    Rows r = rows_in_blocks(rows, width);
    if (r.blocks > MOST_PARTS) {
        r.height = divide_up(rows, MOST_PARTS);
        r.blocks = divide_up(rows, r.height);
    }
    return r;
}

/* to[j] = sum over i < rows of from[i * apart + j], on this thread. */
void add_rows(const float *from, int64_t rows, int64_t apart, int64_t width, float *to);

#endif
