"""CUDA source of a group of elementwise nodes: each value in a register, each input read once. Pure.

Values are stored as fp32, fp16 or bf16 and computed with in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from onnx import TensorProto

from ortflow.workflow.cuda import KERNELS, SUMMING, SUMMING_WARPS
from ortflow.workflow.fusion.chain import Chain
from ortflow.workflow.fusion.dropout import Draws, is_dropout
from ortflow.workflow.fusion.literals import literal
from ortflow.workflow.graph.ir.edit import attributes_of

HEAD = """\
struct Operand {
    void *data;
    unsigned mode, step, count, rank;
    unsigned dims[8];
    long long strides[8];
};

/* Where the element of an operand lies that meets element i of the whole; see the modes in operators.c. FLAT: there are
 * fewer than 2^32 elements, and no operand has strides. */
template <bool FLAT>
__device__ __forceinline__ unsigned long long place(const Operand &x, unsigned long long i, bool wide) {
    if (x.mode == 0) return i;
    if (FLAT) return x.mode == 1 ? 0u : (x.step == 1 ? (unsigned)i : (unsigned)i / x.step) % x.count;
    if (x.mode == 1) return 0;
    if (x.mode == 2) return wide ? (unsigned)((i / x.step) % x.count) : ((unsigned)i / x.step) % x.count;
    unsigned long long found = 0;
    for (int axis = (int)x.rank - 1; axis >= 0; axis--) {
        found += (i % x.dims[axis]) * (unsigned long long)x.strides[axis];
        i /= x.dims[axis];
    }
    return found;
}

/* Whether neighbours of the whole meet neighbours of the operand; otherwise they meet the same element. */
template <bool FLAT> __device__ __forceinline__ bool is_side_by_side(const Operand &x) {
    if (x.mode == 2) return x.step == 1;
    if (FLAT) return x.mode == 0;
    return x.mode == 0 || (x.mode == 3 && x.strides[x.rank - 1] == 1);
}

struct half_t { unsigned short bits; };
struct bfloat_t { unsigned short bits; };
__device__ __forceinline__ float widened(float x) { return x; }
__device__ __forceinline__ float widened(half_t x) { return from_fp16(x.bits); }
__device__ __forceinline__ float widened(bfloat_t x) { return __int_as_float((int)((unsigned)x.bits << 16)); }
__device__ __forceinline__ void narrow(float x, float &out) { out = x; }
__device__ __forceinline__ void narrow(float x, half_t &out) { out.bits = to_fp16(x); }
__device__ __forceinline__ void narrow(float x, bfloat_t &out) { out.bits = to_bf16(x); }
__device__ __forceinline__ float as_fp16(float x) { half_t y; narrow(x, y); return widened(y); }
__device__ __forceinline__ float as_bf16(float x) { bfloat_t y; narrow(x, y); return widened(y); }

/* For results that are stored as halves. Erf by Abramowitz and Stegun 7.1.26, off by 2e-7, given exp(-x x); it and Tanh
 * by their series near 0, where the difference of two numbers near 1 would lose its digits. */
__device__ __forceinline__ float far_erf(float x, float power) {
    const float t = quick_inverse(1.0f + 0.3275911f * fabsf(x));
    const float last = -1.453152027f + t * 1.061405429f;
    const float tail = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * last)));
    return copysignf(1.0f - tail * power, x);
}
__device__ __forceinline__ float quick_erf(float x, float power) {
    const float s = x * x;
    const float near = x * (1.128379167f + s * (-0.3761263890f + s * (0.1128379167f + s * (-0.02686617064f
                     + s * (0.005223977625f - s * 0.0008548327024f)))));
    return fabsf(x) < 0.5f ? near : far_erf(x, power);
}
__device__ __forceinline__ float quick_tanh(float x) {
    const float s = x * x, far = 1.0f - 2.0f * quick_inverse(1.0f + quick_exp(2.0f * x));
    const float last = -0.05396825397f + s * 0.02186948854f;
    const float near = x * (1.0f + s * (-0.3333333333f + s * (0.1333333333f + s * last)));
    return fabsf(x) < 0.25f ? near : far;
}

template <typename T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Lanes { T at[N]; };

template <typename T, int N, bool FLAT>
__device__ __forceinline__ void load(float *out, const Operand &x, unsigned long long i, bool wide) {
    const T *from = (const T *)x.data + place<FLAT>(x, i, wide);
    if (N > 1 && is_side_by_side<FLAT>(x)) {
        const Lanes<T, N> lanes = *(const Lanes<T, N> *)from;
        for (int k = 0; k < N; k++) out[k] = widened(lanes.at[k]);
    } else {
        const float value = widened(*from);
        for (int k = 0; k < N; k++) out[k] = value;
    }
}

template <typename T, int N, bool FLAT>
__device__ __forceinline__ void store(const float *in, const Operand &x, unsigned long long i, bool wide) {
    T *to = (T *)x.data + place<FLAT>(x, i, wide);
    if (N > 1 && is_side_by_side<FLAT>(x)) {
        Lanes<T, N> lanes;
        for (int k = 0; k < N; k++) narrow(in[k], lanes.at[k]);
        *(Lanes<T, N> *)to = lanes;
    } else
        narrow(in[0], *to);
}

"""
CONVERSIONS = """\
__device__ __forceinline__ float from_fp16(unsigned short x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
__device__ __forceinline__ unsigned short to_fp16(float x) {
    unsigned short y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ unsigned short to_bf16(float x) {
#if __CUDA_ARCH__ >= 800
    unsigned short y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
#else
    const unsigned bits = (unsigned)__float_as_int(x);
    return (unsigned short)(x != x ? 0x7fffu : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
}
/* Off by less than 2^-16 of the result, and 0 where that is subnormal. */
__device__ __forceinline__ float quick_exp(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
    return y;
}
__device__ __forceinline__ float quick_inverse(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

"""
"""What only a GPU has."""
FLOATS = {
    "Abs": "fabsf({0})",
    "Add": "{0} + {1}",
    "Div": "{0} / {1}",
    "Erf": "erff({0})",
    "Exp": "expf({0})",
    "Identity": "{0}",
    "Log": "logf({0})",
    "Mul": "{0} * {1}",
    "Neg": "-{0}",
    "Reciprocal": "1.0f / {0}",
    # ONNX Runtime's kernel makes 0 of a NaN, and a step that is not finite would look finite behind it.
    "Relu": "{0} < 0.0f ? 0.0f : {0}",
    # The form of ONNX Runtime's kernel, for its bits; exp of a number that is not above 0 cannot overflow.
    "Sigmoid": "{0} > 0.0f ? 1.0f / (1.0f + expf(-fabsf({0}))) : 1.0f - 1.0f / (1.0f + expf(-fabsf({0})))",
    "Sqrt": "sqrtf({0})",
    "Sub": "{0} - {1}",
    "Tanh": "tanhf({0})",
    "Where": "{0} ? {1} : {2}",
}
"""Operator of ONNX -> what it is in CUDA, of fp32."""
QUICK = {
    # Rounding to 16 bits alone is off by up to 2^-8 (bf16) or 2^-11 (fp16).
    "Erf": "quick_erf({0}, {1})",
    "Exp": "quick_exp({0})",
    "Sigmoid": "quick_inverse(1.0f + quick_exp(-{0}))",
    "Tanh": "quick_tanh({0})",
}
"""The same where results are stored as halves: what is off does not show in them. Erf is given exp(-x x) too."""
_FAR_ERF = "far_erf({0}, {1})"
BOOLS = {
    "And": "{0} && {1}",
    "Equal": "{0} == {1}",
    "Greater": "{0} > {1}",
    "GreaterOrEqual": "{0} >= {1}",
    "Less": "{0} < {1}",
    "LessOrEqual": "{0} <= {1}",
    "Not": "!{0}",
    "Or": "{0} || {1}",
}
"""The same, of bool."""
CONDITIONS = {"And": (0, 1), "Or": (0, 1), "Not": (0,), "Where": (0,)}
"""Operator -> which of its inputs are bool."""
STORED = {TensorProto.FLOAT: "float", TensorProto.FLOAT16: "half_t", TensorProto.BFLOAT16: "bfloat_t"}
"""Element type -> how a kernel reads and writes it."""
_CASTS = {TensorProto.FLOAT: "{0}", TensorProto.FLOAT16: "as_fp16({0})", TensorProto.BFLOAT16: "as_bf16({0})"}
BYTES = 16
"""That a thread reads or writes of an operand, where they lie side by side."""


def kernel(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[str],
    outputs: Sequence[str],
    constants: Mapping[str, float],
    types: Mapping[str, int] | None = None,
    lanes: int | None = None,
    summed: int | None = None,
    places: Mapping[str, str] | None = None,
) -> str:
    """The source of the kernels in KERNELS: operands `inputs`, then `outputs`, then how many elements.

    With `summed`, the number of an output, that of the kernels in SUMMING: then follow how many elements a row has, and
    where the sums of the output go, fp32 [blocks in y times SUMMING_WARPS, row].

    Seeds and numbers of dropouts, int64 [1], are inputs too; `places` names for the results of some an input or output
    that has their shape in every run, where the group's may be larger.

    `constants` are the scalars that `nodes` read beside the inputs; `types` tells which values are not fp32. Values are
    numbered, so that groups that compute the same have the same source. Of all but `fused` a thread computes `lanes`
    elements that lie side by side, `lanes_of` all operands by default.
    """
    types = types or {}
    stored = [STORED.get(types.get(name, TensorProto.FLOAT), "float") for name in (*inputs, *outputs)]
    names = {name: f"x{place}[k]" for place, name in enumerate(inputs)}
    names |= {name: literal(value) for name, value in constants.items()}
    halves = all(kind != "float" for kind in stored[len(inputs) :])
    forms = FLOATS | BOOLS | (QUICK if halves else {})
    lines, rounded = [], dict[str, str]()
    draws = Draws(inputs, outputs, places or {})
    chain = Chain(nodes, constants, outputs)
    powers: dict[str, str] = {}
    """Argument of an Erf -> the variable of exp(-x x)."""
    for number, node in enumerate(nodes):
        if is_dropout(node):
            lines.append(draws.line(node, number, names))
            names[node.output[0]] = f"v{number}"
            continue
        kind = "float" if node.op_type in FLOATS or node.op_type == "Cast" else "bool"
        form = _cast(node, types) if node.op_type == "Cast" else forms[node.op_type]
        if halves and node.op_type == "Erf":
            power = powers[node.input[0]] = f"e{number}"
            lines.append(f"float {power} = quick_exp(-{names[node.input[0]]} * {names[node.input[0]]});")
            form = (_FAR_ERF if chain.is_added_to_one(node.output[0]) else form).replace("{1}", power)
        elif halves and node.op_type == "Exp" and (of := chain.squared(node.input[0], powers)) is not None:
            form = powers[of]
        lines.append(f"{kind} v{number} = {form.format(*(names[name] for name in node.input))};")
        names[node.output[0]] = f"v{number}"
        if node.op_type == "Cast" and attributes_of(node)["to"] != TensorProto.FLOAT:
            rounded[node.output[0]] = names[node.input[0]]
    # What is stored is rounded then: once is enough.
    lines += [f"y{place}[k] = {rounded.get(name, names[name])};" for place, name in enumerate(outputs)]
    several = lanes or lanes_of([name for name in (*inputs, *outputs) if name not in draws.read], types)
    operands = [f"a{place}" for place in range(len(inputs))] + [f"o{place}" for place in range(len(outputs))]
    references = ", ".join([*(f"const Operand &{name}" for name in operands), "unsigned long long n"])
    # Without __grid_constant__ each thread copies a parameter whose address is taken to its local memory.
    parameters = ", ".join([*(f"const __grid_constant__ Operand {name}" for name in operands), "unsigned long long n"])
    arguments = ", ".join([*operands, "n"])
    loads = [
        f"float x{place}[N]; load<{stored[place]}, N, FLAT>(x{place}, a{place}, i, wide);"
        for place, name in enumerate(inputs)
        if name not in draws.read
    ]
    results = [f"float y{i}[N];" for i in range(len(outputs))]
    stores = [f"store<{stored[len(inputs) + i]}, N, FLAT>(y{i}, o{i}, i, wide);" for i in range(len(outputs))]
    body = [
        *loads,
        *draws.before,
        *results,
        "#pragma unroll",
        "for (int k = 0; k < N; k++) {",
        *(f"    {s}" for s in lines),
        "}",
        *stores,
    ]
    if summed is not None:
        return _summing(references, parameters, arguments, body, several, summed, draws.source)
    loop = (
        "    const unsigned long long first = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;\n"
        "    for (unsigned long long i = N * first; i < n; i += (unsigned long long)gridDim.x * blockDim.x * N) {\n"
    )
    return _group(references, loop, body, draws.source) + "".join(
        f'extern "C" __global__ void {name}({parameters}) {{ group<{count}, {flat}>({arguments}); }}\n'
        for name, count, flat in zip(KERNELS, (1, several, several), ("false", "false", "true"), strict=True)
    )


def _group(references: str, loop: str, body: Sequence[str], functions: str, end: str = "") -> str:
    return (
        f"{CONVERSIONS}{HEAD}{functions}"
        f"template <int N, bool FLAT> __device__ __forceinline__ void group({references}) {{\n"
        f"    const bool wide = n > 0xffffffffull;\n{loop}"
        + "".join(f"        {line}\n" for line in body)
        + f"    }}\n{end}}}\n\n"
    )


def _summing(
    references: str, parameters: str, arguments: str, body: Sequence[str], lanes: int, summed: int, functions: str
) -> str:
    """A warp takes N columns a thread, of every so many rows, and adds in fp32, in the order of the rows."""
    extra, names = ", unsigned long long width, float *part", "width, part"
    loop = (
        "    const unsigned long long column = (blockIdx.x * 32ull + threadIdx.x % 32) * N;\n"
        f"    const unsigned long long warp = blockIdx.y * {SUMMING_WARPS}ull + threadIdx.x / 32;\n"
        "    float total[N];\n"
        "    for (int k = 0; k < N; k++) total[k] = 0.0f;\n"
        "    if (column >= width) return;\n"
        f"    const unsigned long long step = gridDim.y * {SUMMING_WARPS}ull * width;\n"
        "    for (unsigned long long i = warp * width + column; i < n; i += step) {\n"
    )
    end = "    for (int k = 0; k < N; k++) part[warp * width + column + k] = total[k];\n"
    adding = [*body, f"for (int k = 0; k < N; k++) total[k] += y{summed}[k];"]
    return _group(f"{references}{extra}", loop, adding, functions, end) + "".join(
        f'extern "C" __global__ void {name}({parameters}{extra}) {{ group<{count}, {flat}>({arguments}, {names}); }}\n'
        for name, count, flat in zip(SUMMING, (1, lanes), ("false", "true"), strict=True)
    )


def lanes_of(values: Sequence[str], types: Mapping[str, int]) -> int:
    """Elements that a thread takes at a time, so that the smallest ones of `values` fill BYTES.

    If most of them are fp32, as in an optimizer's update that also writes halves, so that these do.
    """
    halves = sum(types.get(name, TensorProto.FLOAT) != TensorProto.FLOAT for name in values)
    return BYTES // (2 if halves and 2 * halves >= len(values) else 4)


def _cast(node: onnx.NodeProto, types: Mapping[str, int]) -> str:
    if types.get(node.input[0]) == TensorProto.BOOL:
        return "{0} ? 1.0f : 0.0f"
    return _CASTS[attributes_of(node)["to"]]
