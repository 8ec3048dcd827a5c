/* Softmax of x scale + mask over rows of WIDTH elements. X, M, Y: of input, mask and result. Input and mask are spread over
 * the result's leading axes by strides, 0 where they have one element; X_WHOLE, M_WHOLE: they have as many as the last axis,
 * and one each otherwise. MASKED: there is a mask. Rows are kept in registers, as in norm.cu. */
/* VECTOR elements before the exponential. */
DEVICE void scores(float *v, const X *x, const M *mask, int place, float scale) {
#if X_WHOLE
    load<VECTOR>(v, x + place);
#else
    float one = wide(*x);
#pragma unroll
    for (int j = 0; j < VECTOR; j++) v[j] = one;
#endif
#if MASKED && M_WHOLE
    float m[VECTOR];
    load<VECTOR>(m, mask + place);
#pragma unroll
    for (int j = 0; j < VECTOR; j++) v[j] = v[j] * scale + m[j];
#else
    float m = MASKED ? wide(*mask) : 0;
#pragma unroll
    for (int j = 0; j < VECTOR; j++) v[j] = v[j] * scale + m;
#endif
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    softmax(const X *__restrict__ x, const M *__restrict__ mask, Y *__restrict__ y, Spread spread, float scale, int axes,
            i64 rows) {
    i64 row = (i64)blockIdx.x * ROWS + threadIdx.x / GROUP;
    bool live = row < rows;
    u32 left = (u32)row;
    for (int axis = axes - 1; axis >= 0 && live; axis--) {
        u32 at = left % spread.sizes[axis];
        left /= spread.sizes[axis];
        x += at * spread.of_x[axis], mask += at * spread.of_mask[axis];
    }
    y += row * WIDTH;
    float most = -INFINITE, total = 0;
#if READS
    float values[READS * VECTOR];
#pragma unroll
    for (int k = 0; k < READS; k++) {
        float *v = values + k * VECTOR;
#pragma unroll
        for (int j = 0; j < VECTOR; j++) v[j] = -INFINITE;
        if (live && PLACE(k) < WIDTH) scores(v, x, mask, PLACE(k), scale);
#pragma unroll
        for (int j = 0; j < VECTOR; j++) most = fmaxf(most, v[j]);
    }
    most = together<GROUP, Largest>(most);
#pragma unroll
    for (int k = 0; k < READS; k++)
        if (PLACE(k) < WIDTH)
#pragma unroll
            for (int j = 0; j < VECTOR; j++) {
                float &v = values[k * VECTOR + j];
                v = quick_exp(v - most);
                total += v;
            }
    float factor = 1 / sum<GROUP>(total);
#pragma unroll
    for (int k = 0; k < READS; k++) {
        float *v = values + k * VECTOR;
#pragma unroll
        for (int j = 0; j < VECTOR; j++) v[j] *= factor;
        if (live && PLACE(k) < WIDTH) store<VECTOR>(y + PLACE(k), v);
    }
#else
    for (int k = 0; PLACE(k) < WIDTH; k++) {
        float v[VECTOR];
        scores(v, x, mask, PLACE(k), scale);
#pragma unroll
        for (int j = 0; j < VECTOR; j++) most = fmaxf(most, v[j]);
    }
    most = together<GROUP, Largest>(most);
    float factor = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (int k = 0; PLACE(k) < WIDTH; k++) {
            float v[VECTOR];
            scores(v, x, mask, PLACE(k), scale);
#pragma unroll
            for (int j = 0; j < VECTOR; j++) {
                v[j] = quick_exp(v[j] - most);
                if (pass)
                    v[j] *= factor;
                else
                    total += v[j];
            }
            if (pass) store<VECTOR>(y + PLACE(k), v);
        }
        if (!pass) factor = 1 / sum<GROUP>(total);
    }
#endif
}
