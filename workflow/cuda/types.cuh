/* Element types and the instructions that convert and move them: in front of every kernel of this folder. Without CUDA's
 * headers, which not every machine with NVRTC has. Tests on machines without a GPU put plain C++ in this file's place. */
typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;

#define DEVICE __device__ __forceinline__
#define INFINITE __int_as_float(0x7f800000)
#define NO_NUMBER __int_as_float(0x7fffffff)

struct f16 {
    u16 bits;
};
struct bf16 {
    u16 bits;
};

DEVICE float wide(float x) { return x; }
DEVICE float wide(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
DEVICE float wide(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

DEVICE u16 bf16_bits(float x) {
#if __CUDA_ARCH__ >= 800
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
#else
    u32 word = __float_as_uint(x);
    if ((word & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (u16)((word + 0x7fff + ((word >> 16) & 1)) >> 16);
#endif
}
template <class T> struct Type;
template <> struct Type<float> {
    static DEVICE float narrow(float x) { return x; }
};
template <> struct Type<f16> {
    static DEVICE f16 narrow(float x) {
        f16 y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
    static DEVICE u32 pair(float low, float high) {
#if __CUDA_ARCH__ >= 800
        u32 word;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
        return word;
#else
        return narrow(low).bits | (u32)narrow(high).bits << 16;
#endif
    }
};
template <> struct Type<bf16> {
    static DEVICE bf16 narrow(float x) {
        bf16 y = {bf16_bits(x)};
        return y;
    }
    static DEVICE u32 pair(float low, float high) {
#if __CUDA_ARCH__ >= 800
        u32 word;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
        return word;
#else
        return bf16_bits(low) | (u32)bf16_bits(high) << 16;
#endif
    }
};
/* To 2 in 2^22 of the result, and 0 where that is subnormal. */
DEVICE float quick_exp(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
    return y;
}
/* A barrier of SIZE neighbouring threads, whole warps, which are a part of the block. */
template <int SIZE> DEVICE void wait_for_group() {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + threadIdx.x / SIZE), "n"(SIZE) : "memory");
}

/* 4, 8, 16 or 32 bytes; the address is a multiple of as many, of 16 for 32. Of memory that the kernel does not write. */
template <int WORDS> DEVICE void fetch(u32 (&to)[WORDS], const void *from) {
    if constexpr (WORDS == 1) {
        to[0] = __ldg((const u32 *)from);
    } else if constexpr (WORDS == 2) {
        uint2 word = __ldg((const uint2 *)from);
        to[0] = word.x, to[1] = word.y;
    } else {
#pragma unroll
        for (int i = 0; i < WORDS / 4; i++) {
            uint4 word = __ldg((const uint4 *)from + i);
            to[4 * i] = word.x, to[4 * i + 1] = word.y, to[4 * i + 2] = word.z, to[4 * i + 3] = word.w;
        }
    }
}
/* 8 or 16 bytes that other blocks of the same kernel have written, from an address that is a multiple of as many. */
DEVICE void fetch_written(u32 (&to)[2], const void *from) {
    asm volatile("ld.global.cg.v2.b32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from) : "memory");
}
DEVICE void fetch_written(u32 (&to)[4], const void *from) {
    asm volatile("ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "l"(from)
                 : "memory");
}
/* As instructions of their own: the compiler takes stores of structures apart. It may move loads over them: no kernel
 * reads again what it has written so. */
template <int WORDS> DEVICE void put(void *to, const u32 (&from)[WORDS]) {
    if constexpr (WORDS == 1) {
        *(u32 *)to = from[0];
    } else if constexpr (WORDS == 2) {
        asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(from[0]), "r"(from[1]));
    } else {
#pragma unroll
        for (int i = 0; i < WORDS; i += 4)
            asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"((u32 *)to + i), "r"(from[i]),
                         "r"(from[i + 1]), "r"(from[i + 2]), "r"(from[i + 3]));
    }
}
