
/* count bytes of target = the lowest `element` bytes of `value`, repeated. */
extern "C" __global__ void set_bytes(unsigned char *target, int value, int element, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) target[i] = (unsigned char)(value >> 8 * (i % element));
}
