/* The gradient of a normalisation by the statistics of a batch: what each column of dy and x is multiplied with, where
 * dx = slope dy + factor x + offset. With n = (x - mean) inverse and means over the rows,
 * dx = (dy - mean(dy) - n mean(dy n)) scale inverse. If RECTIFIED, dy is the gradient of a Relu's result; if ADDED, one of
 * two whose sum is. */
extern "C" __global__ void __launch_bounds__(256, 4)
    batch_gradients(const X *__restrict__ x, const G *__restrict__ dy, const float *__restrict__ scale,
                    const float *__restrict__ mean, const float *__restrict__ inverse,
                    const float *__restrict__ on_slope, const float *__restrict__ on_offset,
                    const OTHER *__restrict__ other_dy, const Y *__restrict__ y, DY *__restrict__ made, float *part,
                    u32 *arrived,
                    float *__restrict__ slope, float *__restrict__ factor, float *__restrict__ offset,
                    float *__restrict__ dscale, float *__restrict__ dbias, i64 rows, i64 width) {
    __shared__ float of_block[256 * PIECE];
    sum_chunk(x, dy, mean, on_slope, on_offset, other_dy, y, made, part, of_block, rows, width);
    if (!is_last(arrived)) return;
    const i64 column = (i64)blockIdx.x * TILE + threadIdx.x;
    const bool mine = threadIdx.x < TILE && column < width;
    /* What is read early arrives while chunks are added up. */
    const float deviation = mine ? inverse[column] : 0, gain = mine ? scale[column] * deviation : 0;
    const float average = mine ? mean[column] : 0;
    float one, other;
    add_chunks(part, of_block, one, other);
    if (!mine) return;
    const float tilt = -gain * deviation * deviation * (other / rows);
    dbias[column] = one;
    dscale[column] = other * deviation;
    slope[column] = gain;
    factor[column] = tilt;
    offset[column] = -gain * (one / rows) - tilt * average;
}
