/* Normalisation by the statistics of a batch, over the rows of X [rows, width]: sums over columns, then what each column
 * is multiplied with. Elementwise kernels apply that. Layout as in sums.cu. */
#define GROUPS (256 / LANES)
#define COUNT (READS * VECTOR)
#define TILE (LANES * COUNT)

/* out [gridDim.y, 2 width]. Without GRADIENT the sums of x - s and of its square, where s is the first row: near the
 * mean, so that little is lost when the variance is taken from them. With it, the sums of dy and of dy (x - s), where s
 * is the mean. */
extern "C" __global__ void __launch_bounds__(256)
    batch_sums(const X *__restrict__ x, const G *__restrict__ dy, const float *__restrict__ mean,
               float *__restrict__ out, i64 rows, i64 width) {
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const i64 first = (i64)blockIdx.x * TILE, step = (i64)gridDim.y * GROUPS;
    float sums[2][COUNT], shift[COUNT];
#pragma unroll
    for (int k = 0; k < READS; k++) {
        const i64 column = first + (k * LANES + lane) * VECTOR;
#pragma unroll
        for (int j = 0; j < VECTOR; j++) {
            const int i = k * VECTOR + j;
            sums[0][i] = sums[1][i] = shift[i] = 0;
            if (column < width) shift[i] = GRADIENT ? mean[column + j] : wide(x[column + j]);
        }
    }
#pragma unroll 4
    for (i64 row = (i64)blockIdx.y * GROUPS + group; row < rows; row += step) {
#pragma unroll
        for (int k = 0; k < READS; k++) {
            const i64 column = first + (k * LANES + lane) * VECTOR;
            float v[VECTOR], g[VECTOR];
            if (column < width) {
                load<VECTOR>(v, x + row * width + column);
                if (GRADIENT) load<VECTOR>(g, dy + row * width + column);
#pragma unroll
                for (int j = 0; j < VECTOR; j++) {
                    const int i = k * VECTOR + j;
                    const float off = v[j] - shift[i], one = GRADIENT ? g[j] : off;
                    sums[0][i] += one;
                    sums[1][i] += one * off;
                }
            }
        }
    }
    __shared__ float of_block[COUNT * 256];
#pragma unroll
    for (int which = 0; which < 2; which++) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < COUNT; i++) of_block[i * 256 + threadIdx.x] = sums[which][i];
        __syncthreads();
        for (int i = threadIdx.x; i < TILE; i += 256) {
            const int element = i / LANES, thread = i % LANES;
            const i64 column = first + (element / VECTOR * LANES + thread) * VECTOR + element % VECTOR;
            float all = 0;
            for (int row = 0; row < GROUPS; row++) all += of_block[element * 256 + row * LANES + thread];
            if (column < width) out[((i64)blockIdx.y * 2 + which) * width + column] = all;
        }
    }
}

/* The two sums of a column over the rows of part [count, 2 width]; the threads of the first lane get them. */
DEVICE void of_column(const float *part, i64 count, i64 width, float &one, float &other) {
    const int lane = threadIdx.x % 32, group = threadIdx.x / 32;
    const i64 column = (i64)blockIdx.x * 32 + lane;
    float a = 0, b = 0;
    if (column < width)
        for (i64 row = group; row < count; row += 32) {
            a += part[2 * row * width + column];
            b += part[(2 * row + 1) * width + column];
        }
    __shared__ float of_block[2][32][33];
    of_block[0][group][lane] = a;
    of_block[1][group][lane] = b;
    __syncthreads();
    one = sum<32>(of_block[0][lane][group]);
    other = sum<32>(of_block[1][lane][group]);
}

/* A running statistic after a batch, rounded as an Add of two Muls rounds it: without fused multiply-add. */
DEVICE float moved(float old, float momentum, float batch, float fresh) {
    return __fadd_rn(__fmul_rn(old, momentum), __fmul_rn(batch, fresh));
}

/* y = slope x + offset; the unbiased variance is correction variance. Running statistics move if there are any. */
extern "C" __global__ void __launch_bounds__(1024)
    batch_statistics(const float *__restrict__ part, const X *__restrict__ x, const float *__restrict__ scale,
                     const float *__restrict__ bias, float *__restrict__ slope, float *__restrict__ offset,
                     float *__restrict__ mean, float *__restrict__ variance, float *__restrict__ inverse,
                     float *__restrict__ correction, const float *old_mean, const float *old_variance,
                     float *new_mean, float *new_variance, float epsilon, float momentum, float fresh, i64 count,
                     i64 rows, i64 width) {
    float one, other;
    of_column(part, count, width, one, other);
    const i64 column = (i64)blockIdx.x * 32 + threadIdx.x / 32;
    if (threadIdx.x % 32 || column >= width) return;
    const float off = one / rows, square = other / rows - off * off, spread = square < 0 ? 0 : square;
    const float average = wide(x[column]) + off, one_over = 1 / sqrtf(spread + epsilon);
    const float factor = scale[column] * one_over;
    mean[column] = average;
    variance[column] = spread;
    inverse[column] = one_over;
    slope[column] = factor;
    offset[column] = bias[column] - average * factor;
    const float elements = rows, unbiased = elements / fmaxf(elements - 1, 1);
    if (column == 0) *correction = unbiased;
    if (!old_mean) return;
    new_mean[column] = moved(old_mean[column], momentum, average, fresh);
    new_variance[column] = moved(old_variance[column], momentum, __fmul_rn(spread, unbiased), fresh);
}

/* dx = slope dy + factor x + offset: with n = (x - mean) inverse and means over the rows,
 * dx = (dy - mean(dy) - n mean(dy n)) scale inverse. */
extern "C" __global__ void __launch_bounds__(1024)
    batch_gradients(const float *__restrict__ part, const float *__restrict__ scale, const float *__restrict__ mean,
                    const float *__restrict__ inverse, float *__restrict__ slope, float *__restrict__ factor,
                    float *__restrict__ offset, float *__restrict__ dscale, float *__restrict__ dbias, i64 count,
                    i64 rows, i64 width) {
    float one, other;
    of_column(part, count, width, one, other);
    const i64 column = (i64)blockIdx.x * 32 + threadIdx.x / 32;
    if (threadIdx.x % 32 || column >= width) return;
    const float deviation = inverse[column], gain = scale[column] * deviation;
    const float tilt = -gain * deviation * deviation * (other / rows);
    dbias[column] = one;
    dscale[column] = other * deviation;
    slope[column] = gain;
    factor[column] = tilt;
    offset[column] = -gain * (one / rows) - tilt * mean[column];
}
