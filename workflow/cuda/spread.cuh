/* How two values are broadcast to the leading axes of a result: spread.py. */
struct Spread {
    u32 sizes[8];
    i64 of_x[8], of_mask[8];
};
