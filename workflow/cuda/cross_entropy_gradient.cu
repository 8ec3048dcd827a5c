/* The gradient of cross_entropy.cu, (softmax(scores) - one at the label) times that of the sum. X: of the scores, D: of
 * their gradient. */
/* Of 8 scores, of which that of the label is the one at `at`. */
DEVICE void backward(float *v, float shift, float factor, i64 at) {
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = quick_exp(v[j] - shift);
    if (at >= 0 && at < 8)
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] -= (int)at == j;
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] *= factor;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    cross_entropy_gradient(const i64 *__restrict__ labels, const float *__restrict__ gradient,
                           const X *__restrict__ scores, const float *__restrict__ lse, D *__restrict__ dscores,
                           i64 ignore, i64 start, i64 total, i64 rows, int classes) {
    i64 row = (i64)blockIdx.x * ROWS + threadIdx.x / GROUP;
    if (row >= rows) return;
    const X *x = scores + row * classes;
    D *dx = dscores + row * classes;
    const i64 given = labels[row];
    /* Where the rows of both do not begin alike, as far as vectors go, all is read one by one. */
    const bool alike = off_vector(x) == off_vector(dx);
    const int head = alike ? min((8 - off_vector(x)) % 8, classes) : classes, vectors = (classes - head) / 8;
    const int tail = head + 8 * vectors;
    if (given == ignore) {
        const float nothing[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        for (int i = LANE; i < head; i += GROUP) dx[i] = narrow<D>(0);
        for (int i = LANE; i < vectors; i += GROUP) store<8>(dx + head + 8 * (i64)i, nothing);
        for (int i = tail + LANE; i < classes; i += GROUP) dx[i] = narrow<D>(0);
        return;
    }
    const bool is_class = given >= 0 && given < total;
    /* A class of another part is none of these. */
    const i64 place = given - start;
    const int label = is_class && place >= 0 && place < classes ? (int)place : -1;
    const float factor = is_class ? *gradient : NO_NUMBER, shift = lse[row];
    for (int i = LANE; i < head; i += GROUP)
        dx[i] = narrow<D>((quick_exp(wide(x[i]) - shift) - (i == label)) * factor);
    for (int i = LANE; i < vectors; i += 2 * GROUP) {
        const bool more = i + GROUP < vectors;
        const i64 one = head + 8 * (i64)i, two = one + 8 * GROUP;
        float v[16];
        load<8>(v, x + one);
        if (more) load<8>(v + 8, x + two);
        backward(v, shift, factor, label - one);
        store<8>(dx + one, v);
        if (more) {
            backward(v + 8, shift, factor, label - two);
            store<8>(dx + two, v + 8);
        }
    }
    for (int i = tail + LANE; i < classes; i += GROUP)
        dx[i] = narrow<D>((quick_exp(wide(x[i]) - shift) - (i == label)) * factor);
}
