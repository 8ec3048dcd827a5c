/* Normalisation by the statistics of a batch, over the rows of X [rows, width]: what each column is multiplied with. An
 * elementwise kernel applies that. */

/* A running statistic after a batch, rounded as an Add of two Muls rounds it: without fused multiply-add. */
DEVICE float moved(float old, float momentum, float batch, float fresh) {
    return __fadd_rn(__fmul_rn(old, momentum), __fmul_rn(batch, fresh));
}

/* y = slope x + offset; the unbiased variance is correction variance. Running statistics move if there are any. */
extern "C" __global__ void __launch_bounds__(256, 4)
    batch_statistics(const X *__restrict__ x, const float *__restrict__ scale, const float *__restrict__ bias,
                     float *part, u32 *arrived, float *__restrict__ slope, float *__restrict__ offset,
                     float *__restrict__ mean, float *__restrict__ variance, float *__restrict__ inverse,
                     float *__restrict__ correction, const float *old_mean, const float *old_variance,
                     float *new_mean, float *new_variance, float epsilon, float momentum, float fresh, i64 rows,
                     i64 width) {
    __shared__ float of_block[256 * PIECE];
    sum_chunk(x, x, scale, scale, scale, x, x, (DY *)nullptr, part, of_block, rows, width);
    if (!is_last(arrived)) return;
    const i64 column = (i64)blockIdx.x * TILE + threadIdx.x;
    const bool mine = threadIdx.x < TILE && column < width, moves = mine && old_mean;
    /* What is read early arrives while chunks are added up. */
    const float gain = mine ? scale[column] : 0, shift = mine ? bias[column] : 0, near = mine ? wide(x[column]) : 0;
    const float running = moves ? old_mean[column] : 0, spreading = moves ? old_variance[column] : 0;
    float one, other;
    add_chunks(part, of_block, one, other);
    if (!mine) return;
    const float off = one / rows, square = other / rows - off * off, spread = square < 0 ? 0 : square;
    const float average = near + off, one_over = 1 / sqrtf(spread + epsilon), factor = gain * one_over;
    mean[column] = average;
    variance[column] = spread;
    inverse[column] = one_over;
    slope[column] = factor;
    offset[column] = shift - average * factor;
    const float elements = rows, unbiased = elements / fmaxf(elements - 1, 1);
    if (column == 0) *correction = unbiased;
    if (!moves) return;
    new_mean[column] = moved(running, momentum, average, fresh);
    new_variance[column] = moved(spreading, momentum, __fmul_rn(spread, unbiased), fresh);
}
