/* Copies the rows of X [rows, width] into rows of `whole` elements, behind the first `offset` ones. VECTOR elements at a
 * time. */
extern "C" __global__ void __launch_bounds__(256)
    join(const X *__restrict__ from, X *__restrict__ to, i64 rows, i64 width, i64 whole, i64 offset) {
    const i64 parts = width / VECTOR, count = rows * parts, step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        const i64 row = i / parts, place = (i % parts) * VECTOR;
        float v[VECTOR];
        load<VECTOR>(v, from + row * width + place);
        store<VECTOR>(to + row * whole + offset + place, v);
    }
}
