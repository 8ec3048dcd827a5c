/* What the kernels of the cross-entropy share. */
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

