"""The key of a convolution plan: sizes, types, layout and windows of images with two axes. Called by `convolution`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onnx import TensorProto

from ortflow.workflow.cuda.call import Tensor
from ortflow.workflow.errors import OrtflowError

TYPES = {TensorProto.FLOAT: "FLOAT", TensorProto.FLOAT16: "HALF", TensorProto.BFLOAT16: "BFLOAT16"}
"""Element type -> its name in cuDNN."""
AXES = 2
"""Spatial axes."""
Layout = tuple[list[int], list[int]]
"""Sizes and strides in cuDNN's order: samples (or outputs), channels, height, width."""


@dataclass(frozen=True)
class Windows:
    """Where the windows of a convolution lie; `pads` as in ONNX: first those before each axis, then those behind."""

    group: int
    kernel: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    pads: tuple[int, int, int, int]
    channels_last: bool

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> Windows:
        """Those of a node."""

        def numbers(name: str, default: int, count: int = AXES) -> Any:
            values = attributes.get(name)
            return tuple(int(value) for value in values) if values else (default,) * count

        return cls(
            int(attributes.get("group", 1)),
            numbers("kernel_shape", 1),
            numbers("strides", 1),
            numbers("dilations", 1),
            numbers("pads", 0, 2 * AXES),
            bool(attributes.get("channels_last", 0)),
        )

    def counts(self, sizes: Sequence[int]) -> tuple[int, int]:
        """The number of windows along each axis of an image of these sizes."""
        first, second = (
            (size + self.pads[axis] + self.pads[axis + AXES] - self.dilations[axis] * (self.kernel[axis] - 1) - 1)
            // self.strides[axis]
            + 1
            for axis, size in enumerate(sizes)
        )
        return first, second


@dataclass(frozen=True)
class Shape:
    """The key of a plan. `image` is [samples, channels, height, width], whatever the layout."""

    type: int
    image: tuple[int, int, int, int]
    outputs: int
    """Channels of the convolution's result."""
    windows: Windows

    @property
    def weight(self) -> tuple[int, int, int, int]:
        """Sizes of the weight, whatever the layout."""
        return self.outputs, self.image[1] // self.windows.group, *self.windows.kernel

    @property
    def made(self) -> tuple[int, int, int, int]:
        """Sizes of the convolution's result, whatever the layout."""
        return self.image[0], self.outputs, *self.windows.counts(self.image[AXES:])

    def stored(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Sizes in the order in which the axes are stored."""
        first, channels, height, width = sizes
        return (first, height, width, channels) if self.windows.channels_last else tuple(sizes)

    def layout(self, sizes: Sequence[int]) -> Layout:
        """cuDNN's description of a value of these sizes."""
        _, channels, height, width = sizes
        if self.windows.channels_last:
            return list(sizes), [height * width * channels, 1, width * channels, channels]
        return list(sizes), [channels * height * width, height * width, width, 1]


def shape_of(
    windows: Windows, *, image: Tensor | None = None, weight: Tensor | None = None,
    made: Tensor | None = None, sizes: Sequence[int] = (),
) -> Shape:  # fmt: skip
    """The key of a plan, from two of its three values; `sizes` are those of the image if it is not given.

    Raises OrtflowError if shapes or types do not match, and for halves with channels first.
    """
    tensors = [value for value in (image, weight, made) if value is not None]
    # cuDNN has algorithms for such halves that round partial sums and do not say so.
    if not windows.channels_last and any(value.type != TensorProto.FLOAT for value in tensors):
        raise OrtflowError("a convolution of halves with channels first")
    if any(len(value.shape) != AXES + 2 or value.type != tensors[0].type for value in tensors):
        raise OrtflowError(f"a convolution of {[list(value.shape) for value in tensors]}")

    def plain(tensor: Tensor) -> tuple[int, ...]:
        first, *sizes = tensor.shape
        return (first, sizes[-1], *sizes[:-1]) if windows.channels_last else tensor.shape

    if image is not None:
        samples, channels, height, width = plain(image)
    else:
        assert made is not None
        assert weight is not None
        height, width = sizes
        samples, channels = plain(made)[0], plain(weight)[1] * windows.group
    source = weight if weight is not None else made
    assert source is not None
    outputs = plain(source)[0 if weight is not None else 1]
    result = Shape(tensors[0].type, (samples, channels, height, width), outputs, windows)
    expected = {"weight": (weight, result.weight), "result": (made, result.made)}
    for name, (tensor, dims) in expected.items():
        if tensor is not None and plain(tensor) != dims:
            raise OrtflowError(f"the {name} of a convolution of {list(result.image)} is {plain(tensor)}, not {dims}")
    if min(*result.made, *result.image) < 1 or channels % windows.group or outputs % windows.group:
        raise OrtflowError(f"a convolution of {list(result.image)} by {list(result.weight)}")
    return result
