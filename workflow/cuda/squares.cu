/* The sum of the squares of a vector, in two steps, each in a fixed order: runs of 16 in fp32, their sums in double. */
#define RUN 16

/* part [gridDim.x]: what each block of 256 threads sums. `runs`: of RUN elements; the `rest` behind them is one thread's. */
extern "C" __global__ void __launch_bounds__(256)
    square_sum(const float *__restrict__ x, double *__restrict__ part, i64 runs, i64 rest) {
    double sum_of_runs = 0;
    const i64 step = (i64)gridDim.x * 256;
    for (i64 run = (i64)blockIdx.x * 256 + threadIdx.x; run < runs; run += step) {
        float sums[4] = {0, 0, 0, 0};
        /* Neighbouring threads read neighbouring vectors; the last runs of all have fewer neighbours. */
        const i64 first = run - threadIdx.x, together = runs - first < 256 ? runs - first : 256;
        const float *from = x + first * RUN + threadIdx.x * 4;
#pragma unroll
        for (int k = 0; k < RUN / 4; k++) {
            float v[4];
            load<4>(v, from + k * together * 4);
#pragma unroll
            for (int j = 0; j < 4; j++) sums[j] += v[j] * v[j];
        }
        sum_of_runs += (double)((sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
    if (blockIdx.x == 0 && threadIdx.x == 0)
        for (i64 i = 0; i < rest; i++) sum_of_runs += (double)x[runs * RUN + i] * x[runs * RUN + i];
    __shared__ double of_block[256];
    of_block[threadIdx.x] = sum_of_runs;
    __syncthreads();
    for (int half = 128; half; half /= 2) {
        if (threadIdx.x < half) of_block[threadIdx.x] += of_block[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) part[blockIdx.x] = of_block[0];
}

/* The sum of part [count], by one block of 256 threads. */
extern "C" __global__ void __launch_bounds__(256)
    finish_squares(const double *__restrict__ part, double *__restrict__ out, i64 count) {
    __shared__ double of_block[256];
    double all = 0;
    for (i64 i = threadIdx.x; i < count; i += 256) all += part[i];
    of_block[threadIdx.x] = all;
    __syncthreads();
    for (int half = 128; half; half /= 2) {
        if (threadIdx.x < half) of_block[threadIdx.x] += of_block[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[0] = of_block[0];
}
