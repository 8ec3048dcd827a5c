/* Sums over the rows of a matrix X [rows, width], in two steps, each in a fixed order. */
#define GROUPS (256 / LANES)
#define COUNT (READS * VECTOR)
#define TILE (LANES * COUNT)

/* out [width]: the sums of the block's rows, of every `step` groups of GROUPS the one at `start`, over `divisor`. A
 * block has TILE columns. */
DEVICE void sum_rows(const X *__restrict__ x, float *__restrict__ out, i64 start, i64 groups, i64 rows, i64 width,
                     float divisor) {
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const i64 first = (i64)blockIdx.x * TILE, step = groups * GROUPS;
    float sums[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) sums[i] = 0;
#pragma unroll 4
    for (i64 row = start * GROUPS + group; row < rows; row += step) {
        const X *from = x + row * width + first;
#pragma unroll
        for (int k = 0; k < READS; k++) {
            int column = (k * LANES + lane) * VECTOR;
            float v[VECTOR];
            if (first + column < width) {
                load<VECTOR>(v, from + column);
#pragma unroll
                for (int j = 0; j < VECTOR; j++) sums[k * VECTOR + j] += v[j];
            }
        }
    }
    __shared__ float of_block[COUNT * 256];
#pragma unroll
    for (int i = 0; i < COUNT; i++) of_block[i * 256 + threadIdx.x] = sums[i];
    __syncthreads();
    for (int i = threadIdx.x; i < TILE; i += 256) {
        int element = i / LANES, thread = i % LANES;
        i64 column = first + (element / VECTOR * LANES + thread) * VECTOR + element % VECTOR;
        float all = 0;
        for (int row = 0; row < GROUPS; row++) all += of_block[element * 256 + row * LANES + thread];
        if (column < width) out[column] = all / divisor;
    }
}

/* out [gridDim.y, width]: what each row of blocks sums. */
extern "C" __global__ void __launch_bounds__(256)
    column_sums(const X *__restrict__ x, float *__restrict__ out, i64 rows, i64 width) {
    sum_rows(x, out + (i64)blockIdx.y * width, blockIdx.y, gridDim.y, rows, width, 1);
}

/* out [samples, width]: means over the rows of x [samples, rows, width]; a row of blocks has a sample. */
extern "C" __global__ void __launch_bounds__(256)
    column_means(const X *__restrict__ x, float *__restrict__ out, i64 samples, i64 rows, i64 width) {
    for (i64 sample = blockIdx.y; sample < samples; sample += gridDim.y) {
        sum_rows(x + sample * rows * width, out + sample * width, 0, 1, rows, width, (float)rows);
        __syncthreads();
    }
}

/* The sum over `count` rows of part [count, width]; columns from `split` on are those of `second`, from twice that of
 * `third`. 32 columns a block. */
extern "C" __global__ void __launch_bounds__(1024)
    finish(const float *__restrict__ part, float *__restrict__ first, float *__restrict__ second,
           float *__restrict__ third, i64 count, i64 width, i64 split) {
    const int lane = threadIdx.x % 32, group = threadIdx.x / 32;
    const i64 column = (i64)blockIdx.x * 32 + lane;
    float all = 0;
    if (column < width)
        for (i64 row = group; row < count; row += 32) all += part[row * width + column];
    __shared__ float of_block[32][33];
    of_block[group][lane] = all;
    __syncthreads();
    all = sum<32>(of_block[lane][group]);
    const i64 place = (i64)blockIdx.x * 32 + group;
    if (lane == 0 && place < width)
        (place < split ? first : place < 2 * split ? second - split : third - 2 * split)[place] = all;
}
