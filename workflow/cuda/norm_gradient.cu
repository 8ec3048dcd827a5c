/* The gradients of norm.cu. G: of the result's gradient, X: of the input, D: of the input's gradient, R: of the part of
 * that gradient which came past the norm. RESIDUAL: there is one. A number, because a test of the pointer costs registers,
 * of which the widest rows leave none; for the same reason the residual is read only where it is added. */
#define COUNT (READS * VECTOR)

template <int N> DEVICE void add(float *to, const R *from) {
    float r[N];
    load<N>(r, from);
#pragma unroll
    for (int j = 0; j < N; j++) to[j] += r[j];
}

/* With n = (x - mean) inverse, g = dy scale and means over the row: dx = (g - mean(g) - n mean(g n)) inverse; of RMS
 * without mean(g). part [blocks, 1 or 2, WIDTH]: each block's sums over its rows of dy n, and of dy for a bias. */
extern "C" __global__ void __launch_bounds__(BLOCK)
    norm_gradient(const G *__restrict__ dy, const X *__restrict__ x, const float *__restrict__ scale,
                  const float *__restrict__ mean, const float *__restrict__ inverse, const R *__restrict__ residual,
                  D *__restrict__ dx, float *__restrict__ part, i64 rows) {
    const int group = threadIdx.x / GROUP;
#if READS
    float of_scale[COUNT], of_bias[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) of_scale[i] = of_bias[i] = 0;
#endif
    for (i64 first = (i64)blockIdx.x * ROWS; first < rows; first += (i64)gridDim.x * ROWS) {
        i64 row = first + group;
        bool live = row < rows;
        float middle = live && !RMS ? mean[row] : 0, factor = live ? inverse[row] : 0;
        float total = 0, along = 0;
        const G *gradient = dy + row * WIDTH;
        const X *from = x + row * WIDTH;
        const R *past = residual + row * WIDTH;
        D *to = dx + row * WIDTH;
#if READS
        float g[COUNT], n[COUNT];
#pragma unroll
        for (int k = 0; k < READS; k++) {
            float *gk = g + k * VECTOR, *nk = n + k * VECTOR;
#pragma unroll
            for (int j = 0; j < VECTOR; j++) gk[j] = 0, nk[j] = middle;
            if (live && PLACE(k) < WIDTH) {
                load<VECTOR>(gk, gradient + PLACE(k));
                load<VECTOR>(nk, from + PLACE(k));
            }
        }
#pragma unroll
        for (int k = 0; k < READS; k++) {
            float *gk = g + k * VECTOR, *nk = n + k * VECTOR, s[VECTOR];
#pragma unroll
            for (int j = 0; j < VECTOR; j++) s[j] = 0;
            if (PLACE(k) < WIDTH) load<VECTOR>(s, scale + PLACE(k));
#pragma unroll
            for (int j = 0; j < VECTOR; j++) {
                nk[j] = (nk[j] - middle) * factor;
                of_scale[k * VECTOR + j] += gk[j] * nk[j];
                of_bias[k * VECTOR + j] += gk[j];
                gk[j] *= s[j];
                total += gk[j];
                along += gk[j] * nk[j];
            }
        }
        total = RMS ? 0 : sum<GROUP>(total) / WIDTH;
        along = sum<GROUP>(along) / WIDTH;
#pragma unroll
        for (int k = 0; k < READS; k++) {
            float v[VECTOR];
#pragma unroll
            for (int j = 0; j < VECTOR; j++) v[j] = (g[k * VECTOR + j] - total - n[k * VECTOR + j] * along) * factor;
            if (live && PLACE(k) < WIDTH) {
                if (RESIDUAL) add<VECTOR>(v, past + PLACE(k));
                store<VECTOR>(to + PLACE(k), v);
            }
        }
#else
        for (int pass = 0; pass < 2; pass++) {
            for (int k = 0; PLACE(k) < WIDTH; k++) {
                float g[VECTOR], n[VECTOR], s[VECTOR];
                load<VECTOR>(g, gradient + PLACE(k));
                load<VECTOR>(n, from + PLACE(k));
                load<VECTOR>(s, scale + PLACE(k));
#pragma unroll
                for (int j = 0; j < VECTOR; j++) {
                    n[j] = (n[j] - middle) * factor, g[j] *= s[j];
                    if (pass) {
                        g[j] = (g[j] - total - n[j] * along) * factor;
                    } else {
                        total += g[j], along += g[j] * n[j];
                    }
                }
                if (RESIDUAL && pass) add<VECTOR>(g, past + PLACE(k));
                if (pass) store<VECTOR>(to + PLACE(k), g);
            }
            if (!pass) {
                total = RMS ? 0 : sum<GROUP>(total) / WIDTH;
                along = sum<GROUP>(along) / WIDTH;
            }
        }
#endif
    }
#if READS
    float *mine = part + (i64)blockIdx.x * (RMS ? 1 : 2) * WIDTH;
#pragma unroll
    for (int which = 0; which < (RMS ? 1 : 2); which++) {
        if constexpr (ROWS == 1) {
#pragma unroll
            for (int k = 0; k < READS; k++)
                if (PLACE(k) < WIDTH)
                    store<VECTOR>(mine + which * WIDTH + PLACE(k), (which ? of_bias : of_scale) + k * VECTOR);
        } else {
            /* Element k of thread t at [k, t]: no two threads of a warp meet at a bank. */
            __shared__ float of_block[COUNT * BLOCK];
            __syncthreads();
#pragma unroll
            for (int i = 0; i < COUNT; i++) of_block[i * BLOCK + threadIdx.x] = which ? of_bias[i] : of_scale[i];
            __syncthreads();
            for (int i = threadIdx.x; i < COUNT * GROUP; i += BLOCK) {
                int element = i / GROUP, thread = i % GROUP;
                int column = (element / VECTOR * GROUP + thread) * VECTOR + element % VECTOR;
                float all = 0;
                for (int row = 0; row < ROWS; row++) all += of_block[element * BLOCK + row * GROUP + thread];
                if (column < WIDTH) mine[which * WIDTH + column] = all;
            }
        }
    }
#endif
}

/* The same sums where the row did not fit into registers: a thread a column. */
extern "C" __global__ void __launch_bounds__(256)
    norm_columns(const G *__restrict__ dy, const X *__restrict__ x, const float *__restrict__ mean,
                 const float *__restrict__ inverse, float *__restrict__ part, i64 rows) {
    i64 column = (i64)blockIdx.x * 256 + threadIdx.x;
    if (column >= WIDTH) return;
    float of_scale = 0, of_bias = 0;
#pragma unroll 4
    for (i64 row = blockIdx.y; row < rows; row += gridDim.y) {
        float g = wide(dy[row * WIDTH + column]), n = wide(x[row * WIDTH + column]);
        of_scale += g * ((n - (RMS ? 0 : mean[row])) * inverse[row]);
        of_bias += g;
    }
    float *mine = part + (i64)blockIdx.y * (RMS ? 1 : 2) * WIDTH;
    mine[column] = of_scale;
    if (!RMS) mine[WIDTH + column] = of_bias;
}
