/* The summed cross-entropy of rows of scores with classes for labels. X: of the scores. A row may begin at any address:
 * what lies before the first multiple of 16 bytes, and behind the last, is read alone. GROUP threads share a row. A label
 * that is no class makes the result no number. */
/* The largest of the values so far, and the sum of exp(value - largest). */
struct Softmax {
    float most, sum;
};
template <int COUNT> DEVICE void take(Softmax &s, const float *v) {
    float most = v[0];
#pragma unroll
    for (int j = 1; j < COUNT; j++) most = fmaxf(most, v[j]);
    if (!(most <= s.most)) {
        s.sum *= quick_exp(s.most - most);
        s.most = most;
    }
    float shift = s.most == -INFINITE ? 0 : s.most;
#pragma unroll
    for (int j = 0; j < COUNT; j++) s.sum += quick_exp(v[j] - shift);
}

/* The largest of a row's scores, and the sum of exp(score - largest), in all of its threads. */
DEVICE Softmax of_row(const X *x, int classes, bool live) {
    Softmax s = {-INFINITE, 0};
    if (live) {
        const int head = min((8 - off_vector(x)) % 8, classes), vectors = (classes - head) / 8;
        for (int i = LANE; i < head; i += GROUP) {
            float v = wide(x[i]);
            take<1>(s, &v);
        }
#pragma unroll 2
        for (int i = LANE; i < vectors; i += GROUP) {
            float v[8];
            load<8>(v, x + head + 8 * (i64)i);
            take<8>(s, v);
        }
        for (int i = head + 8 * vectors + LANE; i < classes; i += GROUP) {
            float v = wide(x[i]);
            take<1>(s, &v);
        }
    }
    float most = together<GROUP, Largest>(s.most);
    return {most, sum<GROUP>(s.sum * quick_exp(s.most - most))};
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    cross_entropy(const i64 *__restrict__ labels, const X *__restrict__ scores, float *__restrict__ lse,
                  float *__restrict__ losses, i64 ignore, i64 rows, int classes) {
    i64 row = (i64)blockIdx.x * ROWS + threadIdx.x / GROUP;
    bool live = row < rows;
    const X *x = scores + row * classes;
    const Softmax s = of_row(x, classes, live);
    if (live && LANE == 0) {
        float all = s.most + logf(s.sum);
        i64 label = labels[row];
        lse[row] = all;
        losses[row] = label == ignore ? 0 : label >= 0 && label < classes ? all - wide(x[label]) : NO_NUMBER;
    }
}

/* The same of scores of the classes from `start` on, of `total`: what the parts of a row put together. */
extern "C" __global__ void __launch_bounds__(BLOCK)
    cross_entropy_share(const i64 *__restrict__ labels, const X *__restrict__ scores, float *__restrict__ most,
                        float *__restrict__ sums, float *__restrict__ picked, i64 ignore, i64 start, i64 total,
                        i64 rows, int classes) {
    i64 row = (i64)blockIdx.x * ROWS + threadIdx.x / GROUP;
    bool live = row < rows;
    const X *x = scores + row * classes;
    const Softmax s = of_row(x, classes, live);
    if (live && LANE == 0) {
        const i64 label = labels[row], here = label - start;
        most[row] = s.most;
        sums[row] = s.sum;
        const bool is_class = label == ignore || (label >= 0 && label < total);
        picked[row] = !is_class ? NO_NUMBER : label != ignore && here >= 0 && here < classes ? wide(x[here]) : 0;
    }
}

/* The sum of all losses, by one block. */
extern "C" __global__ void __launch_bounds__(1024) total(const float *__restrict__ losses, float *out, i64 rows) {
    double all = 0;
#pragma unroll 4
    for (i64 i = threadIdx.x; i < rows; i += 1024) all += losses[i];
    __shared__ double of_block[1024];
    of_block[threadIdx.x] = all;
    for (int step = 512; step; step /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < step) of_block[threadIdx.x] += of_block[threadIdx.x + step];
    }
    if (threadIdx.x == 0) *out = (float)of_block[0];
}
