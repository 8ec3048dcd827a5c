/* The largest of each window of an image [samples, height, width, channels], and the gradient, which goes to the first
 * largest of a window, or to its last that is no number: `places` has the number of that element in its window. A thread
 * has VECTOR channels of one place. Windows are PH x PW, SH and SW apart, their places DH and DW apart, and begin TOP
 * rows above and LEFT columns before the image. */
struct Sizes {
    i64 count;
    int height, width, rows, columns, channels;
};

struct alignas(VECTOR) Places {
    unsigned char of[VECTOR];
};

/* `places` may be missing. */
extern "C" __global__ void __launch_bounds__(256)
    max_pool(const X *__restrict__ x, Y *__restrict__ y, unsigned char *__restrict__ places, Sizes of) {
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
    Places first;
#pragma unroll
    for (int j = 0; j < VECTOR; j++) {
        most[j] = -INFINITE;
        first.of[j] = NOWHERE;
    }
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
            for (int j = 0; j < VECTOR; j++) {
                /* -infinity is larger than nothing. */
                const bool better = v[j] > most[j] || v[j] != v[j] || (v[j] == most[j] && first.of[j] == NOWHERE);
                most[j] = better ? v[j] : most[j];
                first.of[j] = better ? r * PW + s : first.of[j];
            }
        }
    }
    const i64 out = ((sample * of.rows + row) * of.columns + column) * of.channels + part * VECTOR;
    store<VECTOR>(y + out, most);
    if (places) *(Places *)(places + out) = first;
}

extern "C" __global__ void __launch_bounds__(256)
    max_pool_gradient(const G *__restrict__ dy, const unsigned char *__restrict__ places, D *__restrict__ dx,
                      Sizes of) {
    i64 place = (i64)blockIdx.x * 256 + threadIdx.x;
    if (place >= of.count) return;
    const int parts = of.channels / VECTOR, part = (int)(place % parts);
    place /= parts;
    const int w = (int)(place % of.width);
    place /= of.width;
    const int h = (int)(place % of.height);
    const i64 sample = place / of.height;
    const i64 windows = sample * of.rows * of.columns * of.channels + part * VECTOR;
    float all[VECTOR];
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
            const Places first = *(const Places *)(places + window);
            float gradient[VECTOR];
            load<VECTOR>(gradient, dy + window);
#pragma unroll
            for (int j = 0; j < VECTOR; j++) all[j] += first.of[j] == r * PW + s ? gradient[j] : 0;
        }
    }
    store<VECTOR>(dx + (((sample * of.height + h) * of.width + w) * of.channels + part * VECTOR), all);
}
