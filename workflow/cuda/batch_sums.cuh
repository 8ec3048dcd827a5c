/* Two sums over the rows of each column of X [rows, width]. Blocks sum chunks of rows, TILE columns each; the last block of
 * a tile to do so adds the chunks up, in the same order whichever block it is. LANES threads read TILE columns of a row. */
#define GROUPS (256 / LANES)
#define COUNT (READS * VECTOR)
#define TILE (LANES * COUNT)
#define SUMS (2 * TILE)
#define WARPS 8
/* Rows that a thread reads before it adds them: 128 bytes. Without, one read at a time is under way. */
#define BYTES_OF_ROW (COUNT * (int)(sizeof(X) + GRADIENT * sizeof(G) + ADDED * (sizeof(OTHER) + sizeof(Y))))
#define AHEAD (BYTES_OF_ROW < 16 ? 8 : 128 / BYTES_OF_ROW)
/* Adding up: a thread reads PIECE sums of a chunk at a time, of CHUNKS_AHEAD chunks before it adds them; AT_ONCE chunks
 * share a block's threads. */
#define PIECE (SUMS < 4 ? SUMS : 4)
#define PIECES (SUMS / PIECE)
#define AT_ONCE (256 / PIECES)
#define CHUNKS_AHEAD 8

/* To part [gridDim.x, gridDim.y, 2, TILE]. Without GRADIENT the sums of x - s and of its square, where s is the first row:
 * near the mean, so that little is lost when the variance is taken from them. With it, the sums of dy and of dy (x - s),
 * where s is the mean; if RECTIFIED, dy only where on slope x + on offset is larger than zero; if ADDED, dy + other_dy only
 * where y is larger than zero, which is also written to `made`. `of_block` [256 PIECE] is shared. */
DEVICE void sum_chunk(const X *__restrict__ x, const G *__restrict__ dy, const float *__restrict__ mean,
                      const float *__restrict__ on_slope, const float *__restrict__ on_offset,
                      const OTHER *__restrict__ other_dy, const Y *__restrict__ y, DY *__restrict__ made, float *part,
                      float *of_block, i64 rows, i64 width) {
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const i64 step = (i64)gridDim.y * GROUPS;
    float sums[2][COUNT], shift[COUNT], slopes[COUNT], offsets[COUNT];
    i64 columns[READS];
#pragma unroll
    for (int k = 0; k < READS; k++) {
        /* Behind the last column: the last ones again, whose sums here nobody reads. */
        columns[k] = min((i64)blockIdx.x * TILE + (k * LANES + lane) * VECTOR, width - VECTOR);
        if (!GRADIENT) load<VECTOR>(shift + k * VECTOR, x + columns[k]);
#pragma unroll
        for (int j = 0; j < VECTOR; j++) {
            const int i = k * VECTOR + j;
            sums[0][i] = sums[1][i] = 0;
            if (GRADIENT) shift[i] = mean[columns[k] + j];
            if (RECTIFIED) slopes[i] = on_slope[columns[k] + j], offsets[i] = on_offset[columns[k] + j];
        }
    }
    for (i64 row = (i64)blockIdx.y * GROUPS + group; row < rows; row += AHEAD * step) {
        Kept<VECTOR, X> of_x[AHEAD][READS];
        Kept<VECTOR, G> of_dy[AHEAD][READS];
        Kept<VECTOR, OTHER> of_other[AHEAD][READS];
        Kept<VECTOR, Y> of_y[AHEAD][READS];
#pragma unroll
        for (int ahead = 0; ahead < AHEAD; ahead++) {
            const i64 from = min(row + ahead * step, rows - 1) * width;
#pragma unroll
            for (int k = 0; k < READS; k++) {
                of_x[ahead][k].load(x + from + columns[k]);
                if (GRADIENT) of_dy[ahead][k].load(dy + from + columns[k]);
                if (ADDED) of_other[ahead][k].load(other_dy + from + columns[k]);
                if (ADDED) of_y[ahead][k].load(y + from + columns[k]);
            }
        }
#pragma unroll
        for (int ahead = 0; ahead < AHEAD; ahead++) {
            const bool counts = row + ahead * step < rows;
#pragma unroll
            for (int k = 0; k < READS; k++) {
                float v[VECTOR], g[VECTOR];
                of_x[ahead][k].unpack(v);
                if (GRADIENT) of_dy[ahead][k].unpack(g);
                if (ADDED) {
                    float also[VECTOR], result[VECTOR];
                    of_other[ahead][k].unpack(also);
                    of_y[ahead][k].unpack(result);
#pragma unroll
                    for (int j = 0; j < VECTOR; j++) {
                        const DY sum = narrow<DY>(result[j] > 0 ? g[j] + also[j] : 0);
                        g[j] = wide(sum);
                    }
                    if (counts) store<VECTOR>(made + (row + ahead * step) * width + columns[k], g);
                }
#pragma unroll
                for (int j = 0; j < VECTOR; j++) {
                    const int i = k * VECTOR + j;
                    const bool on = counts && (!RECTIFIED || v[j] * slopes[i] + offsets[i] > 0);
                    const float off = v[j] - shift[i], one = on ? GRADIENT ? g[j] : off : 0;
                    sums[0][i] += one;
                    sums[1][i] += one * off;
                }
            }
        }
    }
#pragma unroll
    for (int apart = 16; apart >= LANES; apart /= 2)
#pragma unroll
        for (int i = 0; i < 2 * COUNT; i++)
            sums[i / COUNT][i % COUNT] += __shfl_xor_sync(ALL, sums[i / COUNT][i % COUNT], apart);
    if (threadIdx.x % 32 < LANES) {
        float *mine = of_block + threadIdx.x / 32 * SUMS + lane * VECTOR;
#pragma unroll
        for (int i = 0; i < 2 * COUNT; i++)
            mine[i / COUNT * TILE + i % COUNT / VECTOR * LANES * VECTOR + i % VECTOR] = sums[i / COUNT][i % COUNT];
    }
    __syncthreads();
    if (threadIdx.x < SUMS) {
        float all = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) all += of_block[warp * SUMS + threadIdx.x];
        part[((i64)blockIdx.x * gridDim.y + blockIdx.y) * SUMS + threadIdx.x] = all;
    }
}

/* Whether all other blocks of the tile have written their chunk's sums, which can then be read. `arrived` [gridDim.x] is 0
 * before the kernel and behind it. */
DEVICE bool is_last(u32 *arrived) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicInc(arrived + blockIdx.x, gridDim.y - 1) == gridDim.y - 1;
        if (last) __threadfence();
    }
    __syncthreads();
    return last;
}

/* The sums of the tile's column threadIdx.x % TILE over all chunks. */
DEVICE void add_chunks(const float *part, float *of_block, float &one, float &other) {
    const int first = threadIdx.x / PIECES, chunks = gridDim.y;
    const float *from = part + (i64)blockIdx.x * chunks * SUMS + threadIdx.x % PIECES * PIECE;
    float *mine = of_block + threadIdx.x * PIECE, sums[PIECE];
#pragma unroll
    for (int j = 0; j < PIECE; j++) sums[j] = 0;
    for (int chunk = first; chunk < chunks; chunk += CHUNKS_AHEAD * AT_ONCE) {
        u32 words[CHUNKS_AHEAD][PIECE];
#pragma unroll
        for (int k = 0; k < CHUNKS_AHEAD; k++) fetch_written(words[k], from + min(chunk + k * AT_ONCE, chunks - 1) * (i64)SUMS);
#pragma unroll
        for (int k = 0; k < CHUNKS_AHEAD; k++)
#pragma unroll
            for (int j = 0; j < PIECE; j++)
                sums[j] += chunk + k * AT_ONCE < chunks ? __uint_as_float(words[k][j]) : 0;
    }
#pragma unroll
    for (int j = 0; j < PIECE; j++) mine[j] = sums[j];
#pragma unroll
    for (int half = AT_ONCE / 2; half; half /= 2) {
        __syncthreads();
        if (first < half)
#pragma unroll
            for (int j = 0; j < PIECE; j++) mine[j] += mine[half * SUMS + j];
    }
    __syncthreads();
    one = of_block[threadIdx.x % TILE];
    other = of_block[TILE + threadIdx.x % TILE];
}
