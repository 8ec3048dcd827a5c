"""What a plan of attention is made for: sizes, types, and where queries, keys and values lie. Called by `attention`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnx import TensorProto

from ortflow.workflow.cuda.operators import Tensor
from ortflow.workflow.errors import OrtflowError

HALF = {TensorProto.FLOAT16: ("HALF", "__half"), TensorProto.BFLOAT16: ("BFLOAT16", "__nv_bfloat16")}
"""Element type -> its names in cuDNN and in CUDA C++."""
MASKS = {TensorProto.BOOL: "bool", TensorProto.FLOAT: "float", **{kind: name for kind, (_, name) in HALF.items()}}
"""Element type of a mask -> its name in CUDA C++."""
_BYTES = 2
"""Of an element of fp16 or bf16."""
Layout = tuple[list[int], list[int]]
"""Sizes and strides in cuDNN's order, which is batch, heads, tokens, size."""


@dataclass(frozen=True)
class Shape:
    """What a plan is made for. The mask's batch and heads are 0 where there is none."""

    type: int
    batch: int
    tokens: int
    keys: int
    heads: int
    shared: int
    """Heads of keys and values."""
    size: int
    mask: tuple[int, int]
    scale: float
    causal: bool
    heads_first: tuple[bool, bool, bool] = (False, False, False)
    """Of queries, keys and values: they are [batch, heads, tokens, size]."""
    packed: bool = False
    """They are one value, [batch, tokens, width]: each token has its queries, then its keys, then its values."""

    @property
    def width(self) -> int:
        """Elements of a token where queries, keys and values are packed."""
        return (self.heads + 2 * self.shared) * self.size

    @property
    def rows(self) -> tuple[int, int, int, int]:
        """Sizes of the result."""
        return self.batch, self.tokens, self.heads, self.size

    @property
    def statistics(self) -> tuple[int, int, int, int]:
        """Sizes of the logarithms of the sums."""
        return self.batch, self.heads, self.tokens, 1

    @property
    def bias(self) -> int:
        """Elements of the mask as cuDNN adds it."""
        return self.mask[0] * self.mask[1] * self.tokens * self.keys

    def layout(self) -> Layout:
        """Of the result."""
        return self._layout(self.tokens, self.heads, self.heads * self.size)

    def layouts(self) -> list[Layout]:
        """Of queries, keys and values, and of their gradients."""
        sizes = [(self.tokens, self.heads), *[(self.keys, self.shared)] * 2]
        if self.packed:
            return [self._layout(*each, self.width) for each in sizes]
        return [
            self._layout(tokens, heads, self.size if first else heads * self.size, first)
            for (tokens, heads), first in zip(sizes, self.heads_first, strict=True)
        ]

    def _layout(self, tokens: int, heads: int, row: int, first: bool = False) -> Layout:
        """Of so many tokens, each `row` elements behind the one before."""
        size = self.size
        steps = [heads * tokens * size, tokens * size] if first else [tokens * row, size]
        return [self.batch, heads, tokens, size], [*steps, row, 1]

    def parts(self, pointers: Sequence[int]) -> list[int]:
        """Pointers of queries, keys and values, of those of the values in which they lie."""
        if not self.packed:
            return list(pointers)
        (first,) = pointers
        return [first + heads * self.size * _BYTES for heads in (0, self.heads, self.heads + self.shared)]


def shape_of(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool,
    heads_first: tuple[bool, bool, bool] = (False, False, False),
) -> Shape:  # fmt: skip
    """Of the operands' shapes. Raises OrtflowError for shapes and types that do not fit each other."""
    by_tokens = []
    for each, first in zip((q, k, v), heads_first, strict=True):
        if len(each.shape) != 4:
            raise OrtflowError(f"attention of a value of shape {each.shape}")
        a, b, c, d = each.shape
        by_tokens.append((a, c, b, d) if first else (a, b, c, d))
    batch, tokens, heads, size = by_tokens[0]
    keys, shared = by_tokens[1][1:3]
    if by_tokens[1:] != [(batch, keys, shared, size)] * 2 or heads % shared:
        raise OrtflowError(f"attention of queries {q.shape}, keys {k.shape} and values {v.shape}")
    if q.type not in HALF or {k.type, v.type} != {q.type}:
        raise OrtflowError("attention of queries, keys and values that are not all fp16 or all bf16")
    planes = _planes(mask, (batch, heads, tokens, keys))
    return Shape(q.type, batch, tokens, keys, heads, shared, size, planes, scale, causal, heads_first)


def packed_shape_of(packed: Tensor, heads: Sequence[int], mask: Tensor | None, scale: float, causal: bool) -> Shape:
    """Of one value; `heads` are the heads of the queries, those of keys and of values, and the size of each.

    Raises OrtflowError if the value is not of so many, and as `shape_of` does.
    """
    queries, shared, size = heads
    if len(packed.shape) != 3 or packed.shape[2] != (queries + 2 * shared) * size or queries % shared:
        raise OrtflowError(f"attention of {queries} and twice {shared} heads of size {size} in a value {packed.shape}")
    if packed.type not in HALF:
        raise OrtflowError("attention of queries, keys and values that are not all fp16 or all bf16")
    batch, tokens, _ = packed.shape
    planes = _planes(mask, (batch, queries, tokens, tokens))
    return Shape(packed.type, batch, tokens, tokens, queries, shared, size, planes, scale, causal, packed=True)


def _planes(mask: Tensor | None, scores: tuple[int, int, int, int]) -> tuple[int, int]:
    """The mask's batch and heads."""
    if mask is None:
        return 0, 0
    if len(mask.shape) != 4 or any(a not in (1, b) for a, b in zip(mask.shape, scores, strict=True)):
        raise OrtflowError(f"a mask of shape {mask.shape} for scores of shape {scores}")
    if mask.type not in MASKS:
        raise OrtflowError(f"a mask of ONNX's type {mask.type}")
    return mask.shape[0], mask.shape[1]
