/* Parameters on their way to other ranks, and gradients that have come from them. */
#define THREADS 256

/* to [count] = from [count], rounded; both are aligned for VECTOR elements. */
extern "C" __global__ void __launch_bounds__(THREADS)
    round_to(const float *__restrict__ from, X *__restrict__ to, i64 count) {
    const i64 step = (i64)gridDim.x * THREADS, vectors = count / VECTOR;
    for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < vectors; i += step) {
        float v[VECTOR];
        load<VECTOR>(v, from + i * VECTOR);
        store<VECTOR>(to + i * VECTOR, v);
    }
    const i64 i = vectors * VECTOR + threadIdx.x;
    if (blockIdx.x == 0 && i < count) to[i] = narrow<X>(from[i]);
}

/* sum [count] += more [count]; both are aligned for VECTOR elements. */
extern "C" __global__ void __launch_bounds__(THREADS)
    add_to(const float *__restrict__ more, float *__restrict__ sum, i64 count) {
    const i64 step = (i64)gridDim.x * THREADS, vectors = count / VECTOR;
    for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < vectors; i += step) {
        float v[VECTOR], w[VECTOR];
        load<VECTOR>(v, more + i * VECTOR);
        load<VECTOR>(w, sum + i * VECTOR);
#pragma unroll
        for (int j = 0; j < VECTOR; j++) w[j] += v[j];
        store<VECTOR>(sum + i * VECTOR, w);
    }
    const i64 i = vectors * VECTOR + threadIdx.x;
    if (blockIdx.x == 0 && i < count) sum[i] += more[i];
}
