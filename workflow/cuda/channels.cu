
/* Images of channels [channels, pixels] as [pixels, PADDED], zeros behind the channels. A thread has a pixel. */
extern "C" __global__ void __launch_bounds__(256)
    channels_last(const X *__restrict__ from, Y *__restrict__ to, i64 count, i64 pixels, int channels) {
    const i64 place = (i64)blockIdx.x * 256 + threadIdx.x;
    if (place >= count) return;
    const i64 image = place / pixels, pixel = place % pixels;
    const X *first = from + image * channels * pixels + pixel;
    float v[PADDED];
#pragma unroll
    for (int channel = 0; channel < PADDED; channel++)
        v[channel] = channel < channels ? wide(first[channel * pixels]) : 0;
    store<PADDED>(to + place * PADDED, v);
}
