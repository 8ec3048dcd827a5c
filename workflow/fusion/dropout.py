"""CUDA source of dropouts in a group of elementwise nodes. Pure.

`workflow.kernels.dropout` defines their masks. A thread draws the random words of the elements that it computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

from ortflow.workflow.cuda import DROPOUT
from ortflow.workflow.fusion.literals import literal
from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir.edit import attributes_of

PHILOX = """\
typedef unsigned long long Long;
/* Philox-4x32-10: the words of four elements, of which the first is 4 `block`. */
__device__ __forceinline__ void philox(unsigned *out, Long block, Long seed, Long number) {
    unsigned a = (unsigned)block, b = (unsigned)(block >> 32), c = (unsigned)number, d = 0;
    unsigned key = (unsigned)seed, other = (unsigned)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const Long one = 0xD2511F53ull * a, two = 0xCD9E8D57ull * c;
        a = (unsigned)(two >> 32) ^ b ^ key, b = (unsigned)two;
        c = (unsigned)(one >> 32) ^ d ^ other, d = (unsigned)one;
        key += 0x9E3779B9u, other += 0xBB67AE85u;
    }
    out[0] = a, out[1] = b, out[2] = c, out[3] = d;
}
__device__ __forceinline__ unsigned word(Long i, Long seed, Long number) {
    unsigned four[4];
    philox(four, i / 4, seed, number);
    return i & 2 ? (i & 1 ? four[3] : four[2]) : (i & 1 ? four[1] : four[0]);
}
/* The words of N neighbours from element i on, a multiple of N. */
template <int N> __device__ __forceinline__ void draw(unsigned *out, Long i, Long seed, Long number) {
    if (N % 4 == 0) {
#pragma unroll
        for (int k = 0; k < N / 4; k++) philox(out + 4 * k, i / 4 + k, seed, number);
    } else
        for (int k = 0; k < N; k++) out[k] = word(i + k, seed, number);
}
/* The same of those elements of an operand that meet N neighbours of the whole. */
template <int N, bool FLAT>
__device__ __forceinline__ void draw(unsigned *out, const Operand &x, Long i, bool wide, Long seed, Long number) {
    const Long at = place<FLAT>(x, i, wide);
    if (N == 1 || is_side_by_side<FLAT>(x)) return draw<N>(out, at, seed, number);
    const unsigned one = word(at, seed, number);
    for (int k = 0; k < N; k++) out[k] = one;
}

"""


def is_dropout(node: onnx.NodeProto) -> bool:
    """Whether a node is ortflow's Dropout, of a seed, a number, and what it drops from."""
    return bool(node.op_type == DROPOUT and node.domain == CUDA_DOMAIN)


def drawn_with(nodes: Sequence[onnx.NodeProto]) -> set[str]:
    """The seeds and numbers of dropouts."""
    return {name for node in nodes if is_dropout(node) for name in node.input[:-1]}


class Draws:
    """The source that dropouts need, for a group with these inputs and outputs; see `source.kernel`."""

    def __init__(self, inputs: Sequence[str], outputs: Sequence[str], places: Mapping[str, str]) -> None:
        self._operands = {name: f"a{place}" for place, name in enumerate(inputs)}
        self._operands |= {name: f"o{place}" for place, name in enumerate(outputs)}
        self._places = places
        self.read: set[str] = set()
        """Seeds and numbers, int64 [1], which all elements share."""
        self.before: list[str] = []
        """Lines in front of the loop over a thread's elements, N from number i on."""

    @property
    def source(self) -> str:
        """Functions that the lines call."""
        return PHILOX if self.before else ""

    def line(self, node: onnx.NodeProto, number: int, names: Mapping[str, str]) -> str:
        """The line that computes a dropout, as the group's node of that number, of one element."""
        *shared, x = node.input
        self.read.update(shared)
        key = ", ".join(f"*(const Long *){self._operands[name]}.data" for name in shared)
        shape_source = self._places.get(node.output[0])
        call = "draw<N>(" if shape_source is None else "draw<N, FLAT>("
        position = "i" if shape_source is None else f"{self._operands[shape_source]}, i, wide"
        self.before.append(f"unsigned r{number}[N]; {call}r{number}, {position}, {key});")
        flags = attributes_of(node)
        scaled_value = f"{names[x]} * {literal(flags['scale'])}"
        return f"float v{number} = r{number}[k] >= {flags['dropped']}u ? {scaled_value} : 0.0f;"
