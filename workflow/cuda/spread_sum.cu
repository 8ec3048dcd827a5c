/* y = x + m, where x and m of rows of WIDTH are broadcast to each other by strides, as in softmax.cu. For residuals whose
 * shape differs from a product's: it is rare, so a thread computes one element. */
extern "C" __global__ void __launch_bounds__(256)
    spread_sum(const X *__restrict__ x, const M *__restrict__ m, Y *__restrict__ y, Spread spread, int axes, i64 count) {
    for (i64 i = (i64)blockIdx.x * 256 + threadIdx.x; i < count; i += (i64)gridDim.x * 256) {
        i64 left = i / WIDTH, of_x = i % WIDTH, of_m = of_x;
        for (int axis = axes - 1; axis >= 0; axis--) {
            i64 at = left % spread.sizes[axis];
            left /= spread.sizes[axis];
            of_x += at * spread.of_x[axis], of_m += at * spread.of_mask[axis];
        }
        y[i] = narrow<Y>(wide(x[of_x]) + wide(m[of_m]));
    }
}
