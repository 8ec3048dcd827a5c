/* Loads and stores of several elements at a time, and sums over threads. Arithmetic is fp32; half is how values are
 * stored. */
#define ALL 0xffffffffu

/* Where GROUP neighbouring threads share a row: rows of a block, a thread's number in its row, and the first of the
 * VECTOR elements that a thread reads the k-th time. */
#define ROWS (BLOCK / GROUP)
#define LANE ((int)threadIdx.x % GROUP)
#define PLACE(k) (((k) * GROUP + LANE) * VECTOR)

template <class T> DEVICE T narrow(float x) { return Type<T>::narrow(x); }

/* How many elements a row begins behind an address of which 8 can be read. */
template <class T> DEVICE int off_vector(const T *row) { return (int)((u64)row / sizeof(T) % 8); }

/* N elements, N a power of two up to 8, of the words that hold them. */
template <int N, class T> DEVICE void unpack(float *to, const u32 *words) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        if constexpr (sizeof(T) == 4) {
            to[i] = __uint_as_float(words[i]);
        } else {
            T half;
            half.bits = (u16)(words[i / 2] >> 16 * (i & 1));
            to[i] = wide(half);
        }
    }
}
/* The same from an address that is a multiple of their bytes, of 16 if they are more. */
template <int N, class T> DEVICE void load(float *to, const T *from) {
    if constexpr (N == 1) {
        to[0] = wide(*from);
    } else {
        u32 words[N * sizeof(T) / 4];
        fetch(words, from);
        unpack<N, T>(to, words);
    }
}
/* N elements as they are stored, in the registers that they fill: halves take half as many as in fp32. */
template <int N, class T> struct Kept {
    u32 words[N * sizeof(T) / 4];
    DEVICE void load(const T *from) { fetch(words, from); }
    DEVICE void unpack(float *to) const { ::unpack<N, T>(to, words); }
};
template <class T> struct Kept<1, T> {
    T one;
    DEVICE void load(const T *from) { one = *from; }
    DEVICE void unpack(float *to) const { to[0] = wide(one); }
};
template <int N, class T> DEVICE void store(T *to, const float *from) {
    if constexpr (N == 1) {
        *to = narrow<T>(from[0]);
    } else {
        constexpr int WORDS = N * sizeof(T) / 4;
        u32 words[WORDS];
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            if constexpr (sizeof(T) == 4)
                words[i] = __float_as_uint(from[i]);
            else
                words[i] = Type<T>::pair(from[2 * i], from[2 * i + 1]);
        }
        put(to, words);
    }
}

struct Add {
    static DEVICE float nothing() { return 0; }
    static DEVICE float of(float a, float b) { return a + b; }
};
struct Largest {
    static DEVICE float nothing() { return -INFINITE; }
    /* Without what is no number: sums keep that. */
    static DEVICE float of(float a, float b) { return fmaxf(a, b); }
};

/* Over groups of SIZE neighbouring threads, each of which gets the result; all of a group, and of a warp, come here. */
template <int SIZE, class Of> DEVICE float together(float x) {
#pragma unroll
    for (int step = (SIZE < 32 ? SIZE : 32) / 2; step; step /= 2) x = Of::of(x, __shfl_xor_sync(ALL, x, step));
    if constexpr (SIZE > 32) {
        constexpr int WARPS_OF_GROUP = SIZE / 32;
        __shared__ float of_warps[32];
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        wait_for_group<SIZE>();
        if (lane == 0) of_warps[warp] = x;
        wait_for_group<SIZE>();
        x = lane < WARPS_OF_GROUP ? of_warps[warp / WARPS_OF_GROUP * WARPS_OF_GROUP + lane] : Of::nothing();
#pragma unroll
        for (int step = 16; step; step /= 2) x = Of::of(x, __shfl_xor_sync(ALL, x, step));
    }
    return x;
}
template <int SIZE> DEVICE float sum(float x) { return together<SIZE, Add>(x); }
