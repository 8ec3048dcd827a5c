/* CUDA's threads one after the other on a processor, as fibers that take turns at barriers: in place of types.cuh. */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <stdlib.h>
#include <ucontext.h>

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
struct dim3 {
    u32 x, y, z;
};
#define DEVICE inline
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __restrict__

static dim3 threadIdx, blockIdx, blockDim, gridDim;
static char fault[200];

static float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
static float __uint_as_float(u32 x) { return __int_as_float((int)x); }
static u32 __float_as_uint(float x) { u32 y; memcpy(&y, &x, 4); return y; }
#define INFINITE __int_as_float(0x7f800000)
#define NO_NUMBER __int_as_float(0x7fffffff)
static float rsqrtf(float x) { return 1 / sqrtf(x); }
static float __fmul_rn(float a, float b) { volatile float product = a * b; return product; }
static float __fadd_rn(float a, float b) { return a + b; }
static int __popc(u32 x) { return __builtin_popcount(x); }
template <class T> static T min(T a, T b) { return a < b ? a : b; }
template <class T> static T max(T a, T b) { return a > b ? a : b; }

struct Fiber {
    ucontext_t context;
    bool done;
};
static Fiber fibers[1024];
enum { STACK = 1 << 15 };
static char *stacks;
static ucontext_t home;
static int current, threads;
static void (*kernel)(void **);
static void **arguments;
struct Barrier {
    int arrived, passed;
};
static Barrier of_block, of_warp[32], of_group[16];
static u32 slots[1024];

static void next_fiber() {
    int from = current, to = from;
    do to = (to + 1) % threads; while (fibers[to].done && to != from);
    if (to == from) return;
    current = to;
    threadIdx.x = (u32)to;
    swapcontext(&fibers[from].context, &fibers[to].context);
}
static void wait_at(Barrier &barrier, int members) {
    int passed = barrier.passed;
    if (++barrier.arrived == members) {
        barrier.arrived = 0, barrier.passed++;
        return;
    }
    for (int turn = 0; barrier.passed == passed; turn++) {
        if (turn > 100000) {
            snprintf(fault, sizeof fault, "threads of block %u wait for ever", blockIdx.x);
            setcontext(&home);
        }
        next_fiber();
    }
}
static void __syncthreads() { wait_at(of_block, (int)blockDim.x); }
template <int SIZE> static void wait_for_group() { wait_at(of_group[threadIdx.x / SIZE], SIZE); }
static void __syncwarp() { wait_at(of_warp[threadIdx.x / 32], 32); }
static void __threadfence_system() {}
static void __threadfence() {}
template <class T> static T exchanged(T x, int lane) {
    static_assert(sizeof(T) == 4, "");
    memcpy(&slots[threadIdx.x], &x, 4);
    __syncwarp();
    T y;
    memcpy(&y, &slots[threadIdx.x / 32 * 32 + lane], 4);
    __syncwarp();
    return y;
}
template <class T> static T __shfl_xor_sync(u32, T x, int step) { return exchanged(x, (int)(threadIdx.x % 32) ^ step); }
template <class T> static T __shfl_sync(u32, T x, int lane) { return exchanged(x, lane); }
template <class T> static T __shfl_up_sync(u32, T x, int step) {
    int lane = threadIdx.x % 32;
    return exchanged(x, lane < step ? lane : lane - step);
}
static u32 __match_any_sync(u32, int x) {
    memcpy(&slots[threadIdx.x], &x, 4);
    __syncwarp();
    u32 same = 0;
    for (int lane = 0; lane < 32; lane++) same |= (u32)(slots[threadIdx.x / 32 * 32 + lane] == (u32)x) << lane;
    __syncwarp();
    return same;
}
static int atomicAdd(int *at, int x) { int before = *at; *at += x; return before; }
static u32 atomicInc(u32 *at, u32 most) { u32 before = *at; *at = before >= most ? 0 : before + 1; return before; }
template <class T> static T __ldg(const T *at) { return *at; }

static void fiber_main() {
    kernel(arguments);
    int mine = current;
    fibers[mine].done = true;
    for (int i = 0; i < threads; i++)
        if (!fibers[i].done) {
            next_fiber();
            break;
        }
    setcontext(&home);
}
static void run_block() {
    memset(&of_block, 0, sizeof of_block), memset(of_warp, 0, sizeof of_warp), memset(of_group, 0, sizeof of_group);
    for (int i = 0; i < threads; i++) {
        Fiber &f = fibers[i];
        f.done = false;
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = stacks + i * STACK, f.context.uc_stack.ss_size = STACK, f.context.uc_link = &home;
        makecontext(&f.context, fiber_main, 0);
    }
    current = 0, threadIdx = {0, 0, 0};
    swapcontext(&home, &fibers[0].context);
}
/* Why it failed, or nothing. */
static const char *emulate(const u32 *grid, const u32 *block, void (*function)(void **), void **given) {
    fault[0] = 0;
    kernel = function, arguments = given;
    threads = (int)block[0];
    stacks = (char *)malloc((size_t)threads * STACK);
    gridDim = {grid[0], grid[1], grid[2]}, blockDim = {block[0], 1, 1};
    /* Every second time from the last block to the first: results must not depend on their order. */
    static bool backwards = true;
    backwards = !backwards;
    const i64 blocks = (i64)grid[0] * grid[1];
    for (i64 i = 0; i < blocks && !fault[0]; i++) {
        const i64 place = backwards ? blocks - 1 - i : i;
        blockIdx = {(u32)(place % grid[0]), (u32)(place / grid[0]), 0};
        run_block();
    }
    free(stacks);
    return fault[0] ? fault : 0;
}

struct f16 {
    u16 bits;
};
struct bf16 {
    u16 bits;
};
static float wide(float x) { return x; }
static float wide(f16 x) { _Float16 y; memcpy(&y, &x, 2); return (float)y; }
static float wide(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
template <class T> struct Type;
template <> struct Type<float> {
    static float narrow(float x) { return x; }
};
template <> struct Type<f16> {
    static f16 narrow(float x) { _Float16 y = (_Float16)x; f16 z; memcpy(&z, &y, 2); return z; }
    static u32 pair(float low, float high) { return narrow(low).bits | (u32)narrow(high).bits << 16; }
};
template <> struct Type<bf16> {
    static bf16 narrow(float x) {
        u32 word = __float_as_uint(x);
        if (x != x) return {0x7fff};
        return {(u16)((word + 0x7fff + ((word >> 16) & 1)) >> 16)};
    }
    static u32 pair(float low, float high) { return narrow(low).bits | (u32)narrow(high).bits << 16; }
};
static float quick_exp(float x) {
    float y = exp2f(x * 1.4426950408889634f);
    return y < 1.17549435e-38f ? 0 : y;
}
static void check_place(const void *at, int words) {
    if ((u64)at % (u64)(4 * words < 16 ? 4 * words : 16))
        snprintf(fault, sizeof fault, "%d words at once at an address that is no multiple of as many", words);
}
template <int WORDS> static void fetch(u32 (&to)[WORDS], const void *from) { check_place(from, WORDS), memcpy(to, from, 4 * WORDS); }
template <int WORDS> static void fetch_written(u32 (&to)[WORDS], const void *from) { fetch(to, from); }
template <int WORDS> static void put(void *to, const u32 (&from)[WORDS]) { check_place(to, WORDS), memcpy(to, from, 4 * WORDS); }
