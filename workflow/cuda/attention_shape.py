"""The key of an attention plan: sizes, types, and the layout of queries, keys and values. Called by `attention`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnx import TensorProto

from ortflow.workflow.cuda.call import Tensor
from ortflow.workflow.errors import OrtflowError

HALF = {TensorProto.FLOAT16: ("HALF", "__half"), TensorProto.BFLOAT16: ("BFLOAT16", "__nv_bfloat16")}
"""Element type -> its names in cuDNN and in CUDA C++."""
MASKS = {TensorProto.BOOL: "bool", TensorProto.FLOAT: "float", **{kind: name for kind, (_, name) in HALF.items()}}
"""Element type of a mask -> its name in CUDA C++."""
_BYTES = 2
"""Bytes of an fp16 or bf16 element."""
Layout = tuple[list[int], list[int]]
"""Sizes and strides in cuDNN's order: batch, heads, tokens, size."""


@dataclass(frozen=True)
class Shape:
    """The key of a plan. The mask's batch and heads are 0 if there is no mask."""

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
    """For each of queries, keys and values: whether it is [batch, heads, tokens, size]."""
    packed: bool = False
    """Whether they are one value, [batch, tokens, width]: each token has its queries, its keys, then its values."""
    dropout: float = 0.0
    """Probability with which a weight is dropped."""

    @property
    def width(self) -> int:
        """Elements per token if queries, keys and values are packed."""
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
        """Number of elements of the mask in cuDNN's form."""
        return self.mask[0] * self.mask[1] * self.tokens * self.keys

    def layout(self) -> Layout:
        """Layout of the result."""
        return self._layout(self.tokens, self.heads, self.heads * self.size)

    def layouts(self) -> list[Layout]:
        """Layouts of queries, keys and values, and of their gradients."""
        sizes = [(self.tokens, self.heads), *[(self.keys, self.shared)] * 2]
        if self.packed:
            # ONNX Runtime's Split of the projection, and the Concat of its gradients, took 0.77 ms of a step of 20 of
            # GPT-2 124M (H200).
            return [self._layout(*size, self.width) for size in sizes]
        return [
            self._layout(tokens, heads, self.size if first else heads * self.size, first)
            for (tokens, heads), first in zip(sizes, self.heads_first, strict=True)
        ]

    def _layout(self, tokens: int, heads: int, row: int, first: bool = False) -> Layout:
        """Layout of `tokens` tokens, each `row` elements after the previous one."""
        size = self.size
        steps = [heads * tokens * size, tokens * size] if first else [tokens * row, size]
        return [self.batch, heads, tokens, size], [*steps, row, 1]

    def parts(self, pointers: Sequence[int]) -> list[int]:
        """Pointers to queries, keys and values, from the pointers to the values that contain them."""
        if not self.packed:
            return list(pointers)
        (first,) = pointers
        return [first + heads * self.size * _BYTES for heads in (0, self.heads, self.heads + self.shared)]


def shape_of(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool,
    heads_first: tuple[bool, bool, bool] = (False, False, False),
) -> Shape:  # fmt: skip
    """The key for operands of these shapes. Raises OrtflowError if shapes or types do not match."""
    by_tokens = []
    for tensor, first in zip((q, k, v), heads_first, strict=True):
        if len(tensor.shape) != 4:
            raise OrtflowError(f"attention of a value of shape {tensor.shape}")
        a, b, c, d = tensor.shape
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
    """The key for one packed value; `heads` are query heads, key and value heads, and head size.

    Raises OrtflowError if the value does not have that size, or as `shape_of` does.
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
