"""CUDA source of a group of elementwise nodes: each value in a register, each input read once. Pure."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import onnx

HEAD = """\
struct Operand {
    float *data;
    unsigned mode, step, count, rank;
    unsigned dims[8];
    long long strides[8];
};

/* The element of an operand that meets element i of the whole; see the modes in fused.c. */
__device__ __forceinline__ float &at(const Operand &x, unsigned long long i, bool wide) {
    if (x.mode == 0) return x.data[i];
    if (x.mode == 1) return x.data[0];
    if (x.mode == 2) return x.data[wide ? (unsigned)((i / x.step) % x.count) : ((unsigned)i / x.step) % x.count];
    long long place = 0;
    for (int axis = (int)x.rank - 1; axis >= 0; axis--) {
        place += (long long)(i % x.dims[axis]) * x.strides[axis];
        i /= x.dims[axis];
    }
    return x.data[place];
}

"""
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
    "Sigmoid": "{0} > 0.0f ? 1.0f / (1.0f + expf(-fabsf({0}))) : 1.0f - 1.0f / (1.0f + expf(-fabsf({0})))",
    "Sqrt": "sqrtf({0})",
    "Sub": "{0} - {1}",
    "Tanh": "tanhf({0})",
    "Where": "{0} ? {1} : {2}",
    "Cast": "{0} ? 1.0f : 0.0f",
}
"""Operator of ONNX -> what it is in CUDA, of fp32; Cast is from bool."""
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
CONDITIONS = {"And": (0, 1), "Or": (0, 1), "Not": (0,), "Where": (0,), "Cast": (0,)}
"""Operator -> which of its inputs are bool."""


def kernel(
    nodes: Sequence[onnx.NodeProto], inputs: Sequence[str], outputs: Sequence[str], constants: Mapping[str, float]
) -> str:
    """The source of a kernel `fused`: operands `inputs`, then `outputs`, then the number of elements.

    `constants` are the scalars that `nodes` read beside the inputs. Values are numbered, so that groups that compute
    the same have the same source.
    """
    names = {name: f"x{place}" for place, name in enumerate(inputs)}
    names |= {name: literal(value) for name, value in constants.items()}
    lines = [f"float x{place} = at(a{place}, i, wide);" for place in range(len(inputs))]
    for number, node in enumerate(nodes):
        form = FLOATS.get(node.op_type) or BOOLS[node.op_type]
        kind = "float" if node.op_type in FLOATS else "bool"
        lines.append(f"{kind} v{number} = {form.format(*(names[name] for name in node.input))};")
        names[node.output[0]] = f"v{number}"
    lines += [f"at(o{place}, i, wide) = {names[name]};" for place, name in enumerate(outputs)]
    parameters = [
        *(f"const __grid_constant__ Operand a{place}" for place in range(len(inputs))),
        *(f"const __grid_constant__ Operand o{place}" for place in range(len(outputs))),
        "unsigned long long n",
    ]
    body = "\n".join(f"        {line}" for line in lines)
    return (
        f'{HEAD}extern "C" __global__ void fused({", ".join(parameters)}) {{\n'
        "    const bool wide = n > 0xffffffffull;\n"
        "    const unsigned long long first = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;\n"
        "    for (unsigned long long i = first; i < n; i += (unsigned long long)gridDim.x * blockDim.x) {\n"
        f"{body}\n"
        "    }\n"
        "}\n"
    )


def literal(value: float) -> str:
    """A number of fp32 to the bit."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return f"__int_as_float(0x{bits:08x})"
