/* The largest of each window of an image [samples, height, width, channels], and the gradient, which goes to the first
 * largest of a window. A thread has VECTOR channels of one place. Windows are PH x PW, SH and SW apart, their places DH
 * and DW apart, and begin TOP rows above and LEFT columns before the image. */
struct Sizes {
    i64 count;
    int height, width, rows, columns, channels;
};

extern "C" __global__ void __launch_bounds__(256)
    max_pool(const X *__restrict__ x, Y *__restrict__ y, Sizes of) {
    i64 place = (i64)blockIdx.x * 256 + threadIdx.x;
    if (place >= of.count) return;
    const int parts = of.channels / VECTOR, part = (int)(place % parts);
    place /= parts;
    const int column = (int)(place % of.columns);
    place /= of.columns;
    const int row = (int)(place % of.rows);
    const i64 sample = place / of.rows;
    const X *image = x + sample * of.height * of.width * of.channels + part * VECTOR;
    float most[VECTOR];
#pragma unroll
    for (int j = 0; j < VECTOR; j++) most[j] = -INFINITE;
#pragma unroll
    for (int r = 0; r < PH; r++) {
        const int h = row * SH - TOP + r * DH;
#pragma unroll
        for (int s = 0; s < PW; s++) {
            const int w = column * SW - LEFT + s * DW;
            if (h < 0 || h >= of.height || w < 0 || w >= of.width) continue;
            float v[VECTOR];
            load<VECTOR>(v, image + ((i64)h * of.width + w) * of.channels);
#pragma unroll
            /* NaN stays. */
            for (int j = 0; j < VECTOR; j++) most[j] = v[j] > most[j] || v[j] != v[j] ? v[j] : most[j];
        }
    }
    store<VECTOR>(y + (((sample * of.rows + row) * of.columns + column) * of.channels + part * VECTOR), most);
}

extern "C" __global__ void __launch_bounds__(256)
    max_pool_gradient(const G *__restrict__ dy, const X *__restrict__ x, const Y *__restrict__ y, D *__restrict__ dx,
                      Sizes of) {
    i64 place = (i64)blockIdx.x * 256 + threadIdx.x;
    if (place >= of.count) return;
    const int parts = of.channels / VECTOR, part = (int)(place % parts);
    place /= parts;
    const int w = (int)(place % of.width);
    place /= of.width;
    const int h = (int)(place % of.height);
    const i64 sample = place / of.height;
    const X *image = x + sample * of.height * of.width * of.channels + part * VECTOR;
    const i64 windows = sample * of.rows * of.columns * of.channels + part * VECTOR;
    float mine[VECTOR], all[VECTOR];
    load<VECTOR>(mine, image + ((i64)h * of.width + w) * of.channels);
#pragma unroll
    for (int j = 0; j < VECTOR; j++) all[j] = 0;
#pragma unroll
    for (int r = 0; r < PH; r++) {
        const int from_top = h + TOP - r * DH, row = from_top / SH;
        if (from_top < 0 || from_top % SH || row >= of.rows) continue;
#pragma unroll
        for (int s = 0; s < PW; s++) {
            const int from_left = w + LEFT - s * DW, column = from_left / SW;
            if (from_left < 0 || from_left % SW || column >= of.columns) continue;
            const i64 window = windows + ((i64)row * of.columns + column) * of.channels;
            float most[VECTOR], gradient[VECTOR];
            load<VECTOR>(most, y + window);
            u32 first = 0;
#pragma unroll
            for (int j = 0; j < VECTOR; j++) first |= (u32)(mine[j] == most[j]) << j;
            for (int before = 0; first && before < r * PW + s; before++) {
                const int above = row * SH - TOP + before / PW * DH, left = column * SW - LEFT + before % PW * DW;
                if (above < 0 || above >= of.height || left < 0 || left >= of.width) continue;
                float v[VECTOR];
                load<VECTOR>(v, image + ((i64)above * of.width + left) * of.channels);
#pragma unroll
                for (int j = 0; j < VECTOR; j++)
                    if (v[j] == most[j]) first &= ~(1u << j);
            }
            if (!first) continue;
            load<VECTOR>(gradient, dy + window);
#pragma unroll
            for (int j = 0; j < VECTOR; j++)
                if (first >> j & 1) all[j] += gradient[j];
        }
    }
    store<VECTOR>(dx + (((sample * of.height + h) * of.width + w) * of.channels + part * VECTOR), all);
}
