/* The gradient of softmax over rows of WIDTH elements, y (dy - sum(y dy)) scale. G, Y, D: of dy, y and the result. */
extern "C" __global__ void __launch_bounds__(BLOCK)
    softmax_gradient(const G *__restrict__ dy, const Y *__restrict__ y, D *__restrict__ dx, float scale, i64 rows) {
    i64 row = (i64)blockIdx.x * ROWS + threadIdx.x / GROUP;
    bool live = row < rows;
    dy += row * WIDTH, y += row * WIDTH, dx += row * WIDTH;
    float along = 0;
#if READS
    float g[READS * VECTOR], values[READS * VECTOR];
#pragma unroll
    for (int k = 0; k < READS; k++) {
        float *gk = g + k * VECTOR, *yk = values + k * VECTOR;
#pragma unroll
        for (int j = 0; j < VECTOR; j++) gk[j] = yk[j] = 0;
        if (live && PLACE(k) < WIDTH) {
            load<VECTOR>(gk, dy + PLACE(k));
            load<VECTOR>(yk, y + PLACE(k));
        }
#pragma unroll
        for (int j = 0; j < VECTOR; j++) along += gk[j] * yk[j];
    }
    along = sum<GROUP>(along);
#pragma unroll
    for (int k = 0; k < READS; k++) {
        float *v = g + k * VECTOR;
#pragma unroll
        for (int j = 0; j < VECTOR; j++) v[j] = (v[j] - along) * values[k * VECTOR + j] * scale;
        if (live && PLACE(k) < WIDTH) store<VECTOR>(dx + PLACE(k), v);
    }
#else
    for (int pass = 0; pass < 2; pass++) {
        for (int k = 0; PLACE(k) < WIDTH; k++) {
            float g[VECTOR], v[VECTOR];
            load<VECTOR>(g, dy + PLACE(k));
            load<VECTOR>(v, y + PLACE(k));
#pragma unroll
            for (int j = 0; j < VECTOR; j++) {
                if (pass)
                    v[j] = (g[j] - along) * v[j] * scale;
                else
                    along += g[j] * v[j];
            }
            if (pass) store<VECTOR>(dx + PLACE(k), v);
        }
        if (!pass) along = sum<GROUP>(along);
    }
#endif
}
