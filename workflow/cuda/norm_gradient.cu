/* The gradients of norm.cu. G: of the result's gradient, X: of the input, D: of the input's gradient, R: of the part of
 * that gradient which came past the norm. RESIDUAL: there is one. A number, because a test of the pointer costs registers,
 * of which the widest rows leave few; for the same reason the residual is read only where it is added, and a row is kept
 * as it is stored. SUMS: the input's gradient is summed over the rows, for the bias of what made the input. */
#define COUNT (READS * VECTOR)
#define PARTS ((RMS ? 1 : 2) + SUMS)

template <int N> DEVICE void add(float *to, const R *from) {
    float r[N];
    load<N>(r, from);
#pragma unroll
    for (int j = 0; j < N; j++) to[j] += r[j];
}

/* With n = (x - mean) inverse, g = dy scale and means over the row: dx = (g - mean(g) - n mean(g n)) inverse; of RMS
 * without mean(g). part [blocks, PARTS, WIDTH]: each block's sums over its rows of dy n, of dy for a bias, and of dx. */
extern "C" __global__ void __launch_bounds__(BLOCK)
    norm_gradient(const G *__restrict__ dy, const X *__restrict__ x, const float *__restrict__ scale,
                  const float *__restrict__ mean, const float *__restrict__ inverse, const R *__restrict__ residual,
                  D *__restrict__ dx, float *__restrict__ part, i64 rows) {
    const int group = threadIdx.x / GROUP;
#if READS
    float of_scale[COUNT], of_bias[COUNT], of_dx[SUMS ? COUNT : 1];
#pragma unroll
    for (int i = 0; i < COUNT; i++) of_scale[i] = of_bias[i] = of_dx[SUMS ? i : 0] = 0;
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
        Kept<VECTOR, G> of_y[READS];
        Kept<VECTOR, X> of_x[READS];
#pragma unroll
        for (int k = 0; k < READS; k++)
            if (live && PLACE(k) < WIDTH) {
                of_y[k].load(gradient + PLACE(k));
                of_x[k].load(from + PLACE(k));
            }
#pragma unroll
        for (int k = 0; k < READS; k++) {
            if (!live || PLACE(k) >= WIDTH) continue;
            float g[VECTOR], n[VECTOR], s[VECTOR];
            of_y[k].unpack(g);
            of_x[k].unpack(n);
            load<VECTOR>(s, scale + PLACE(k));
#pragma unroll
            for (int j = 0; j < VECTOR; j++) {
                n[j] = (n[j] - middle) * factor;
                of_scale[k * VECTOR + j] += g[j] * n[j];
                of_bias[k * VECTOR + j] += g[j];
                g[j] *= s[j];
                total += g[j];
                along += g[j] * n[j];
            }
        }
        total = RMS ? 0 : sum<GROUP>(total) / WIDTH;
        along = sum<GROUP>(along) / WIDTH;
#pragma unroll
        for (int k = 0; k < READS; k++) {
            if (!live || PLACE(k) >= WIDTH) continue;
            float v[VECTOR], n[VECTOR], s[VECTOR];
            of_y[k].unpack(v);
            of_x[k].unpack(n);
            load<VECTOR>(s, scale + PLACE(k));
#pragma unroll
            for (int j = 0; j < VECTOR; j++) {
                n[j] = (n[j] - middle) * factor;
                v[j] = (v[j] * s[j] - total - n[j] * along) * factor;
            }
            if (RESIDUAL) add<VECTOR>(v, past + PLACE(k));
#pragma unroll
            for (int j = 0; j < VECTOR; j++)
                if (SUMS) of_dx[SUMS ? k * VECTOR + j : 0] += v[j];
            store<VECTOR>(to + PLACE(k), v);
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
    float *mine = part + (i64)blockIdx.x * PARTS * WIDTH;
#pragma unroll
    for (int which = 0; which < PARTS; which++) {
        const float *sums = which == 0 ? of_scale : which == 1 && !RMS ? of_bias : of_dx;
        if constexpr (ROWS == 1) {
#pragma unroll
            for (int k = 0; k < READS; k++)
                if (PLACE(k) < WIDTH) store<VECTOR>(mine + which * WIDTH + PLACE(k), sums + k * VECTOR);
        } else {
            /* Element k of thread t at [k, t]: no two threads of a warp meet at a bank. */
            __shared__ float of_block[COUNT * BLOCK];
            __syncthreads();
#pragma unroll
            for (int i = 0; i < COUNT; i++) of_block[i * BLOCK + threadIdx.x] = sums[i];
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
                 const float *__restrict__ inverse, const D *__restrict__ dx, float *__restrict__ part, i64 rows) {
    i64 column = (i64)blockIdx.x * 256 + threadIdx.x;
    if (column >= WIDTH) return;
    float of_scale = 0, of_bias = 0, of_dx = 0;
#pragma unroll 4
    for (i64 row = blockIdx.y; row < rows; row += gridDim.y) {
        float g = wide(dy[row * WIDTH + column]), n = wide(x[row * WIDTH + column]);
        of_scale += g * ((n - (RMS ? 0 : mean[row])) * inverse[row]);
        of_bias += g;
        if (SUMS) of_dx += wide(dx[row * WIDTH + column]);
    }
    float *mine = part + (i64)blockIdx.y * PARTS * WIDTH;
    mine[column] = of_scale;
    if (!RMS) mine[WIDTH + column] = of_bias;
    if (SUMS) mine[(PARTS - 1) * WIDTH + column] = of_dx;
}
