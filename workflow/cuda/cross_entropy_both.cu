/* The summed cross-entropy and its gradient in one pass: cross_entropy.cu and cross_entropy_gradient.cu where a row fits
 * into the threads that share it. X: of the scores, D: of their gradient, whose rows begin alike, as far as vectors go. A
 * thread keeps KEPT vectors of 8 scores, as they are stored: IN_REGISTERS of them, and the others in shared memory. */
#define WORDS (8 * (int)sizeof(X) / 4)
#define SHARED (KEPT > IN_REGISTERS ? KEPT - IN_REGISTERS : 0)

extern "C" __global__ void __launch_bounds__(BLOCK, 1024 / BLOCK)
    cross_entropy_both(const i64 *__restrict__ labels, const float *__restrict__ gradient, const X *__restrict__ scores,
                       float *__restrict__ losses, D *__restrict__ dscores, i64 ignore, i64 rows, int classes) {
    const i64 row = (i64)blockIdx.x * ROWS + threadIdx.x / GROUP;
    const bool live = row < rows;
    const X *x = scores + row * classes;
    D *dx = dscores + row * classes;
    const int head = live ? min((8 - off_vector(x)) % 8, classes) : 0, vectors = live ? (classes - head) / 8 : 0;
    const int tail = head + 8 * vectors, rest = live ? classes - tail : 0;
    u32 kept[IN_REGISTERS * WORDS];
    __shared__ u32 more[SHARED * WORDS * BLOCK + 4];
    /* Word j of slot k of a thread: quads of neighbouring threads lie side by side. */
#define MORE(k, j) more[(((k) - IN_REGISTERS) * WORDS + (j) / 4 * 4) * BLOCK + 4 * threadIdx.x + (j) % 4]
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const int i = k * GROUP + LANE;
        if (i >= vectors) continue;
        u32 words[WORDS];
        fetch(words, x + head + 8 * (i64)i);
#pragma unroll
        for (int j = 0; j < WORDS; j++) {
            if (k < IN_REGISTERS)
                kept[k * WORDS + j] = words[j];
            else
                MORE(k, j) = words[j];
        }
    }
    Softmax s = {-INFINITE, 0};
    float first = -INFINITE, last = -INFINITE;
    if (LANE < head) take<1>(s, &(first = wide(x[LANE])));
    if (LANE < rest) take<1>(s, &(last = wide(x[tail + LANE])));
#define SCORES(v, k)                                                                                                 \
    do {                                                                                                             \
        u32 words[WORDS];                                                                                            \
        _Pragma("unroll") for (int j = 0; j < WORDS; j++) words[j] =                                                 \
            (k) < IN_REGISTERS ? kept[((k) < IN_REGISTERS ? (k) : 0) * WORDS + j] : MORE(k, j);                      \
        unpack<8, X>(v, words);                                                                                      \
    } while (0)
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        float v[8];
        if (k * GROUP + LANE >= vectors) continue;
        SCORES(v, k);
        take<8>(s, v);
    }
    const float most = together<GROUP, Largest>(s.most);
    const float lse = most + logf(sum<GROUP>(s.sum * quick_exp(s.most - most)));
    if (!live) return;
    const i64 given = labels[row];
    const bool is_class = given >= 0 && given < classes, ignored = given == ignore;
    const int label = is_class ? (int)given : 0;
    const float factor = ignored ? 0 : is_class ? *gradient : NO_NUMBER;
    if (LANE == 0) losses[row] = ignored ? 0 : is_class ? lse - wide(x[label]) : NO_NUMBER;
    if (LANE < head) dx[LANE] = narrow<D>(ignored ? 0 : (quick_exp(first - lse) - (LANE == label)) * factor);
    if (LANE < rest)
        dx[tail + LANE] = narrow<D>(ignored ? 0 : (quick_exp(last - lse) - (tail + LANE == label)) * factor);
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const int i = k * GROUP + LANE;
        float v[8];
        if (i >= vectors) continue;
        SCORES(v, k);
        backward(v, lse, factor, label - (head + 8 * (i64)i));
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = ignored ? 0 : v[j];
        store<8>(dx + head + 8 * (i64)i, v);
    }
}
