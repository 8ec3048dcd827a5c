/* Gradients on their way between the GPUs of one machine: see peers.py. RANKS take part, and RANK is this one. flags
 * [places, RANKS] are numbers of steps: the last one in which a rank has signalled the place. */
#define THREADS 256

extern "C" __global__ void next_step(u32 *step) {
    if (threadIdx.x == 0) *step += 1;
}

/* Signals a place to every other rank; flags [RANKS] are the addresses of the ranks' flags. */
extern "C" __global__ void notify(const u32 *step, u32 *const *flags, int place) {
    const int rank = threadIdx.x;
    __threadfence_system();
    if (rank < RANKS && rank != RANK) ((volatile u32 *)flags[rank])[place * RANKS + RANK] = *step;
}

/* Waits until all others have signalled places [first, last), or `stop` is set. */
extern "C" __global__ void wait_for(const u32 *step, const u32 *flags, int first, int last, const u32 *stop) {
    const u32 wanted = *step;
    for (int i = first * RANKS + threadIdx.x; i < last * RANKS; i += 32) {
        if (i % RANKS == RANK) continue;
        for (u32 turn = 1; (int)(((const volatile u32 *)flags)[i] - wanted) < 0; turn++)
            if (turn % 1024 == 0 && *(const volatile u32 *)stop) return;
    }
    __threadfence_system();
}

/* mine [count] = the sum of every rank's, in the order of ranks; others [RANKS - 1] begin `apart` elements from one
 * another. All are aligned for VECTOR elements. */
extern "C" __global__ void __launch_bounds__(256)
    add_up(float *mine, const float *others, i64 apart, i64 count) {
    const i64 step = (i64)gridDim.x * THREADS, vectors = count / VECTOR;
    for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < vectors; i += step) {
        float own[VECTOR], sum[VECTOR];
        load<VECTOR>(own, mine + i * VECTOR);
#pragma unroll
        for (int rank = 0; rank < RANKS; rank++) {
            float v[VECTOR];
            if (rank != RANK) load<VECTOR>(v, others + (rank - (rank > RANK)) * apart + i * VECTOR);
#pragma unroll
            for (int j = 0; j < VECTOR; j++) {
                const float each = rank == RANK ? own[j] : v[j];
                sum[j] = rank ? sum[j] + each : each;
            }
        }
        store<VECTOR>(mine + i * VECTOR, sum);
    }
    const i64 i = vectors * VECTOR + threadIdx.x;
    if (blockIdx.x == 0 && i < count) {
        float sum = 0;
        for (int rank = 0; rank < RANKS; rank++) {
            const float each = rank == RANK ? mine[i] : others[(rank - (rank > RANK)) * apart + i];
            sum = rank ? sum + each : each;
        }
        mine[i] = sum;
    }
}
