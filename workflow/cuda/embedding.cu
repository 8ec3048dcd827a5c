/* The gradient of a look-up of rows of a table, row[indices[i]] += gradient[i], in an order that is always the same. The
 * places i are sorted by index, by digits of BITS bits from the lowest on, each of which keeps the order so far (`count`
 * and `scatter` for each); `bounds` finds where an index begins; `runs` sums each piece of RUN sorted places that has one
 * index; `rows` sums what a row of the table gets. An index outside of the table has the key `height`, and makes the whole
 * gradient no number. G: of the gradient, D: of the table's, A: of what is added to it if ADDS, which may lie in the
 * table's own memory. */
#define DIGITS (1 << BITS)
#define THREADS 512
#define WARPS (THREADS / 32)
#define GROUPS (256 / LANES)
#define COUNT (READS * VECTOR)
#define TILE (LANES * COUNT)

/* Either the keys of an earlier pass, or the indices. */
DEVICE u32 key_of(const i64 *indices, const u32 *keys, i64 i, i64 height) {
    if (!indices) return keys[i];
    i64 index = indices[i];
    if (index < 0) index += height;
    return index >= 0 && index < height ? (u32)index : (u32)height;
}
DEVICE int digit_of(u32 key, int shift) { return (int)(key >> shift & (DIGITS - 1)); }

/* counts [blocks, DIGITS]: how often each digit is in a block's piece of `chunk` keys. */
extern "C" __global__ void __launch_bounds__(512)
    count(const i64 *__restrict__ indices, const u32 *__restrict__ keys, int *__restrict__ counts, i64 entries,
          i64 chunk, i64 height, int shift) {
    __shared__ int mine[DIGITS];
    for (int d = threadIdx.x; d < DIGITS; d += THREADS) mine[d] = 0;
    __syncthreads();
    const i64 first = blockIdx.x * chunk, end = min(first + chunk, entries);
    for (i64 i = first + threadIdx.x; i < end; i += THREADS)
        atomicAdd(&mine[digit_of(key_of(indices, keys, i, height), shift)], 1);
    __syncthreads();
    for (int d = threadIdx.x; d < DIGITS; d += THREADS) counts[blockIdx.x * DIGITS + d] = mine[d];
}

extern "C" __global__ void __launch_bounds__(512)
    scatter(const i64 *__restrict__ indices, const u32 *__restrict__ keys, const u32 *__restrict__ places,
            const int *__restrict__ counts, u32 *__restrict__ sorted, u32 *__restrict__ sorted_places, i64 entries,
            i64 chunk, i64 height, int shift) {
    __shared__ int next[DIGITS], totals[DIGITS];
    __shared__ u16 of_warps[WARPS][DIGITS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    /* Where the first key of a digit goes: behind all of lower digits, and behind this one's of earlier blocks. */
    for (int d = threadIdx.x; d < DIGITS; d += THREADS) {
        int before = 0, all = 0;
        for (int block = 0; block < (int)gridDim.x; block++) {
            if (block == (int)blockIdx.x) before = all;
            all += counts[block * DIGITS + d];
        }
        next[d] = before, totals[d] = all;
        for (int w = 0; w < WARPS; w++) of_warps[w][d] = 0;
    }
    __syncthreads();
    for (int step = 1; step < DIGITS; step *= 2) {
        int lower[(DIGITS + THREADS - 1) / THREADS];
        for (int d = threadIdx.x, k = 0; d < DIGITS; d += THREADS, k++) lower[k] = d >= step ? totals[d - step] : 0;
        __syncthreads();
        for (int d = threadIdx.x, k = 0; d < DIGITS; d += THREADS, k++) totals[d] += lower[k];
        __syncthreads();
    }
    for (int d = threadIdx.x; d < DIGITS; d += THREADS) next[d] += d ? totals[d - 1] : 0;
    const i64 start = blockIdx.x * chunk, end = min(start + chunk, entries);
    for (i64 first = start; first < end; first += THREADS) {
        const i64 i = first + threadIdx.x;
        const bool live = i < end;
        const u32 key = live ? key_of(indices, keys, i, height) : 0;
        const int digit = live ? digit_of(key, shift) : -1;
        const u32 same = __match_any_sync(ALL, digit);
        const int earlier = __popc(same & ((1u << lane) - 1));
        if (live && earlier == 0) of_warps[warp][digit] = (u16)__popc(same);
        __syncthreads();
        if (live) {
            int to = next[digit] + earlier;
            for (int w = 0; w < warp; w++) to += of_warps[w][digit];
            sorted[to] = key;
            sorted_places[to] = places ? places[i] : (u32)i;
        }
        __syncthreads();
        for (int d = threadIdx.x; d < DIGITS; d += THREADS)
            for (int w = 0; w < WARPS; w++) next[d] += of_warps[w][d], of_warps[w][d] = 0;
        __syncthreads();
    }
}

/* starts [height + 1]: the first sorted place whose key is as large. */
extern "C" __global__ void __launch_bounds__(256)
    bounds(const u32 *__restrict__ keys, int *__restrict__ starts, i64 entries, i64 height) {
    const i64 row = (i64)blockIdx.x * 256 + threadIdx.x;
    if (row > height) return;
    i64 low = 0, high = entries;
    while (low < high) {
        i64 middle = (low + high) / 2;
        if (keys[middle] < row)
            low = middle + 1;
        else
            high = middle;
    }
    starts[row] = (int)low;
}

DEVICE int column_of(int read) { return (read * LANES + (int)threadIdx.x % LANES) * VECTOR; }

/* Adds a row of `width` elements from column `first` on. */
template <class T> DEVICE void add_row(float *sums, const T *row, i64 first, i64 width) {
#pragma unroll
    for (int k = 0; k < READS; k++) {
        float v[VECTOR];
        if (first + column_of(k) < width) {
            load<VECTOR>(v, row + first + column_of(k));
#pragma unroll
            for (int j = 0; j < VECTOR; j++) sums[k * VECTOR + j] += v[j];
        }
    }
}

/* part [entries / RUN, width]: sums of pieces that have one key; of others nothing is written. */
extern "C" __global__ void __launch_bounds__(256)
    runs(const u32 *__restrict__ keys, const u32 *__restrict__ places, const G *__restrict__ gradient,
         float *__restrict__ part, i64 width, int run) {
    const i64 start = (i64)blockIdx.x * run, first = (i64)blockIdx.y * TILE;
    if (keys[start] != keys[start + run - 1]) return;
    float sums[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) sums[i] = 0;
#pragma unroll 4
    for (int i = threadIdx.x / LANES; i < run; i += GROUPS)
        add_row(sums, gradient + places[start + i] * width, first, width);
    __shared__ float of_block[256];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        __syncthreads();
        of_block[threadIdx.x] = sums[i];
        __syncthreads();
        const i64 column = first + column_of(i / VECTOR) + i % VECTOR;
        if (threadIdx.x < LANES && column < width) {
            float all = 0;
            for (int group = 0; group < GROUPS; group++) all += of_block[group * LANES + threadIdx.x];
            part[blockIdx.x * width + column] = all;
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    rows(const u32 *__restrict__ keys, const u32 *__restrict__ places, const int *__restrict__ starts,
         const G *__restrict__ gradient, const float *__restrict__ part, const A *addend, D *table, i64 entries,
         i64 height, i64 width, int run) {
    const i64 row = (i64)blockIdx.x * GROUPS + threadIdx.x / LANES, first = (i64)blockIdx.y * TILE;
    if (row >= height) return;
    const int start = starts[row], end = starts[row + 1];
    const int whole = min(end, (int)(((i64)start + run - 1) / run * run)), rest = max(whole, end / run * run);
    const bool outside = entries && keys[entries - 1] == height;
    if (ADDS && start == end && !outside && (const void *)addend == (const void *)table) return;
    float sums[COUNT];
    const float before = outside ? NO_NUMBER : 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) sums[i] = before;
    if (ADDS) add_row(sums, addend + row * width, first, width);
#pragma unroll 4
    for (int i = start; i < whole; i++) add_row(sums, gradient + places[i] * width, first, width);
#pragma unroll 4
    for (int i = whole / run; i < rest / run; i++) add_row(sums, part + i * width, first, width);
#pragma unroll 4
    for (int i = rest; i < end; i++) add_row(sums, gradient + places[i] * width, first, width);
#pragma unroll
    for (int k = 0; k < READS; k++)
        if (first + column_of(k) < width) store<VECTOR>(table + row * width + first + column_of(k), sums + k * VECTOR);
}
