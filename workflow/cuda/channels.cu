/* Images [channels, height, width] as [rows, columns, STORED]: blocks of HIGH x WIDE pixels, `top` and `left` pixels of
 * zeros in front. A block has [CHANNELS, HIGH, WIDE], and zeros behind. A thread has PADDED elements of a block. */
extern "C" __global__ void __launch_bounds__(256)
    channels_last(const X *__restrict__ from, Y *__restrict__ to, i64 count, int height, int width, int rows,
                  int columns, int top, int left) {
    const i64 place = (i64)blockIdx.x * 256 + threadIdx.x;
    if (place >= count) return;
    const int pieces = STORED / PADDED;
    const i64 image = place / (pieces * rows * columns);
    const int in_image = (int)(place - image * pieces * rows * columns), block = in_image / pieces;
    const int first = in_image % pieces * PADDED;
    const int down = block / columns * HIGH - top, along = block % columns * WIDE - left;
    const X *of_image = from + image * CHANNELS * height * width;
    float v[PADDED];
#pragma unroll
    for (int j = 0; j < PADDED; j++) {
        const int element = first + j, channel = element / (HIGH * WIDE);
        const int y = down + element / WIDE % HIGH, x = along + element % WIDE;
        const bool is_there = channel < CHANNELS && y >= 0 && y < height && x >= 0 && x < width;
        v[j] = is_there ? wide(of_image[(channel * height + y) * width + x]) : 0;
    }
    store<PADDED>(to + place * PADDED, v);
}
