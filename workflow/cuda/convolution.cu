
/* Weights [outputs, places, stored], channels last, as fp32 [outputs, channels, places]: the first channels of those
 * stored. A thread has an output and a channel. */
extern "C" __global__ void __launch_bounds__(256)
    channels_first(const X *__restrict__ from, float *__restrict__ to, i64 count, int places, int stored,
                   int channels) {
    const i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    if (i >= count) return;
    const i64 output = i / channels;
    const X *first = from + output * places * stored + i % channels;
    for (int place = 0; place < places; place++) to[i * places + place] = wide(first[(i64)place * stored]);
}

/* Weights [outputs, rows, columns, stored] of blocks as fp32 [outputs, channels, height, width]; see channels.cu. A thread
 * has an element. */
extern "C" __global__ void __launch_bounds__(256)
    out_of_blocks(const X *__restrict__ from, float *__restrict__ to, i64 count, int rows, int columns, int stored,
                  int channels, int height, int width, int high, int broad) {
    const i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    if (i >= count) return;
    const int x = (int)(i % width), y = (int)(i / width % height);
    const i64 channel = i / ((i64)height * width) % channels, output = i / ((i64)channels * height * width);
    const i64 block = (output * rows + y / high) * columns + x / broad;
    to[i] = wide(from[block * stored + (channel * high + y % high) * broad + x % broad]);
}
