/* Layer or RMS norm over rows of WIDTH elements. X, Y: of input and result. RMS: no mean. A group of GROUP threads keeps
 * its row in registers; where READS is 0 the row is too long for that, and is read again for each pass. */
extern "C" __global__ void __launch_bounds__(BLOCK)
    normalise(const X *__restrict__ x, const float *__restrict__ scale, const float *__restrict__ bias, Y *__restrict__ y,
              float *__restrict__ mean, float *__restrict__ inverse, float epsilon, i64 rows) {
    i64 row = (i64)blockIdx.x * ROWS + threadIdx.x / GROUP;
    bool live = row < rows;
    const X *from = x + row * WIDTH;
    Y *to = y + row * WIDTH;
    float middle = 0, squares = 0;
#if READS
    float values[READS * VECTOR];
#pragma unroll
    for (int k = 0; k < READS; k++) {
        float *v = values + k * VECTOR;
#pragma unroll
        for (int j = 0; j < VECTOR; j++) v[j] = 0;
        if (live && PLACE(k) < WIDTH) load<VECTOR>(v, from + PLACE(k));
#pragma unroll
        for (int j = 0; j < VECTOR; j++) middle += v[j];
    }
    middle = RMS ? 0 : sum<GROUP>(middle) / WIDTH;
#pragma unroll
    for (int k = 0; k < READS; k++)
        if (PLACE(k) < WIDTH)
#pragma unroll
            for (int j = 0; j < VECTOR; j++) {
                float off = values[k * VECTOR + j] - middle;
                squares += off * off;
            }
#else
    for (int k = 0; !RMS && PLACE(k) < WIDTH; k++) {
        float v[VECTOR];
        load<VECTOR>(v, from + PLACE(k));
#pragma unroll
        for (int j = 0; j < VECTOR; j++) middle += v[j];
    }
    middle = RMS ? 0 : sum<GROUP>(middle) / WIDTH;
    for (int k = 0; PLACE(k) < WIDTH; k++) {
        float v[VECTOR];
        load<VECTOR>(v, from + PLACE(k));
#pragma unroll
        for (int j = 0; j < VECTOR; j++) squares += (v[j] - middle) * (v[j] - middle);
    }
#endif
    float factor = rsqrtf(sum<GROUP>(squares) / WIDTH + epsilon);
    if (!live) return;
    if (threadIdx.x % GROUP == 0) {
        if (!RMS) mean[row] = middle;
        inverse[row] = factor;
    }
#if READS
#pragma unroll
    for (int k = 0; k < READS; k++)
#else
    for (int k = 0; PLACE(k) < WIDTH; k++)
#endif
    {
        if (PLACE(k) >= WIDTH) break;
        float s[VECTOR], b[VECTOR], v[VECTOR];
        load<VECTOR>(s, scale + PLACE(k));
#if !READS
        load<VECTOR>(v, from + PLACE(k));
#endif
#pragma unroll
        for (int j = 0; j < VECTOR; j++) b[j] = 0;
        if (bias) load<VECTOR>(b, bias + PLACE(k));
#pragma unroll
        for (int j = 0; j < VECTOR; j++) {
#if READS
            v[j] = values[k * VECTOR + j];
#endif
            v[j] = (v[j] - middle) * factor * s[j] + b[j];
        }
        store<VECTOR>(to + PLACE(k), v);
    }
}
