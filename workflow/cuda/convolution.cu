/* Halves [count] as fp32. */
extern "C" __global__ void __launch_bounds__(256) widen(const X *__restrict__ from, float *__restrict__ to, i64 count) {
    const i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) to[i] = wide(from[i]);
}
