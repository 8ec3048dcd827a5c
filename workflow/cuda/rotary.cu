/* Rotary positions and their gradient: rotary.py. A thread has VECTOR elements of one half and those of the other half in
 * the same places. The tokens-first value and the table are spread over the rows, heads first, by strides; the other value
 * has the rows one after the other. */
extern "C" __global__ void __launch_bounds__(256)
    rotary(const X *__restrict__ x, const float *__restrict__ cosine, const float *__restrict__ sine, Y *__restrict__ y,
           Spread spread, int axes, i64 count) {
    const int per_row = HALF / VECTOR;
    for (i64 i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll) {
        u32 row = (u32)(i / per_row), left = row;
        int place = (int)(i % per_row) * VECTOR;
        i64 strided = 0, table = 0;
        for (int axis = axes - 1; axis >= 0; axis--) {
            u32 at = left % spread.sizes[axis];
            left /= spread.sizes[axis];
            strided += at * spread.of_x[axis], table += at * spread.of_mask[axis];
        }
        i64 straight = (i64)row * (2 * HALF), from = BACKWARD ? straight : strided, to = BACKWARD ? strided : straight;
        float a[VECTOR], b[VECTOR], cos_a[VECTOR], cos_b[VECTOR], sin_a[VECTOR], sin_b[VECTOR];
        load<VECTOR>(a, x + from + place), load<VECTOR>(b, x + from + HALF + place);
        load<VECTOR>(cos_a, cosine + table + place), load<VECTOR>(cos_b, cosine + table + HALF + place);
        load<VECTOR>(sin_a, sine + table + place), load<VECTOR>(sin_b, sine + table + HALF + place);
#pragma unroll
        for (int j = 0; j < VECTOR; j++) {
            float turned_a = BACKWARD ? b[j] * sin_b[j] : -(b[j] * sin_a[j]);
            float turned_b = BACKWARD ? -(a[j] * sin_a[j]) : a[j] * sin_b[j];
            a[j] = a[j] * cos_a[j] + turned_a, b[j] = b[j] * cos_b[j] + turned_b;
        }
        store<VECTOR>(y + to + place, a), store<VECTOR>(y + to + HALF + place, b);
    }
}
