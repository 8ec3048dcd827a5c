"""Turns images to channels last in a training graph for half precision, with our operators for them. Pure.

cuDNN's convolutions of halves need the channels of a pixel side by side. A convolution becomes a Transpose, our
operator, and a Transpose back. Nodes that compute the same in either order (elementwise ones, means over pixels) then
read and write channels last, so that a Transpose back is only left where a node needs the other order. Called by
`place`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import onnx
from onnx import TensorProto

from ortflow.workflow.cuda.batch_norms import BatchNorms
from ortflow.workflow.cuda.blocks import PADDED, Blocks, stored
from ortflow.workflow.cuda.pooling import NOWHERE
from ortflow.workflow.cuda.turned import LAST, RANK, Turned
from ortflow.workflow.cuda.windows import AXES
from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.ir.rewriter import Rewriter

ELEMENTWISE = frozenset(
    {
        *("Abs", "Add", "And", "Cast", "Clip", "Div", "Elu", "Equal", "Erf", "Exp", "Gelu", "Greater"),
        *("GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max"),
        *("Min", "Mish", "Mul", "Neg", "Not", "Or", "Pow", "Reciprocal", "Relu", "Selu", "Sigmoid", "Sign", "Softplus"),
        *("Sqrt", "Sub", "Sum", "Tanh", "Where"),
    }
)
_PIXELS = [2, 3]
_CHANNELS = 4
"""Of a group, at least."""
_WINDOWS = "strides", "dilations", "pads"


def put(rewriter: Rewriter) -> None:
    """Rewrite the graph if it has a convolution that we compute. The nodes must be sorted."""
    if any(_is_ours(rewriter, node) for node in rewriter.nodes("Conv")):
        _Images(rewriter).run()


def windows_of(rewriter: Rewriter, image: str, weight: str, node: onnx.NodeProto) -> dict[str, object] | None:
    """The attributes of our convolution; None if cuDNN is not known to support it."""
    sizes, flags = (rewriter.dims(image) or ())[1:], attributes_of(node)
    dims = [size for size in rewriter.dims(weight) or () if isinstance(size, int)]
    if len(dims) != RANK or len(sizes) != RANK - 1 or not all(isinstance(size, int) for size in sizes):
        return None
    pads = list(flags.get("pads", [])) or [0] * (2 * AXES)
    if flags.get("auto_pad", b"NOTSET") != b"NOTSET" or pads[:AXES] != pads[AXES:]:
        return None
    group, outputs, channels = int(flags.get("group", 1)), *dims[:2]
    # cuDNN adds up halves where a group has one channel.
    few = group > 1 and min(channels, outputs // group) < _CHANNELS
    if few or not (rewriter.is_fp32(image) and rewriter.is_fp32(weight)):
        return None
    ones = [1] * AXES
    lists = {name: list(flags.get(name, [])) or ones for name in ("strides", "dilations")}
    return {"group": group, "kernel_shape": list(dims[AXES:]), **lists, "pads": pads, "channels_last": 1}


def _is_ours(rewriter: Rewriter, node: onnx.NodeProto) -> bool:
    return windows_of(rewriter, node.input[0], node.input[1], node) is not None


class _Images:
    def __init__(self, rewriter: Rewriter) -> None:
        self._w = rewriter
        self._turned = turned = Turned(rewriter)
        self._last, self._made = turned.of, turned.made
        self._padded: dict[tuple[str, str], str] = {}
        """Image or weight of few channels, and how it changes -> the same with channels last, padded."""
        self._pools: dict[str, tuple[str, dict[str, object]]] = {}
        """The indices that a pooling does not compute any more -> its places, and the attributes of its gradient."""
        norms = BatchNorms(turned)
        self._rules: Mapping[tuple[str, str], Callable[[onnx.NodeProto], None]] = {
            ("", "Conv"): self._convolution,
            (MICROSOFT, "ConvGrad"): self._convolution_gradient,
            ("", "BatchNormalization"): norms.forward,
            (MICROSOFT, "BatchNormalizationGrad"): norms.backward,
            ("", "MaxPool"): self._max_pool,
            (MICROSOFT, "MaxPoolGrad"): self._max_pool_gradient,
            ("", "GlobalAveragePool"): self._mean,
            ("", "ReduceMean"): self._mean,
            ("", "Expand"): self._expand,
            ("", "Size"): self._size,
        }

    def run(self) -> None:
        for node in self._w.all_nodes():
            rule = self._rules.get((node.domain, node.op_type))
            if rule is not None:
                rule(node)
            elif not node.domain and node.op_type in ELEMENTWISE:
                self._elementwise(node)

    def _weight(self, weight: str) -> str:
        if weight not in self._last:
            dims = self._w.dims(weight) or ()
            self._last[weight] = self._turned.new(f"{weight}/last", weight)
            if dims[AXES:] == (1, 1):
                # Nothing moves.
                shape = self._w.ints(*(int(dims[axis] or 0) for axis in LAST))
                self._w("Reshape", weight, shape, output=self._last[weight])
            else:
                self._w("Transpose", weight, output=self._last[weight], perm=LAST)
        return self._last[weight]

    def _few(self, image: str, weight: str, windows: dict[str, object]) -> Blocks | None:
        """For a convolution of few channels of an image which is not computed with channels last."""
        (_, channels, *sizes), (_, group, *_) = self._w.dims(image) or (), self._w.dims(weight) or ()
        # cuDNN multiplies few channels slowly: the forward pass of ResNet's first convolution took 904 us with eight,
        # and 322 in blocks of pixels (H100, 128 images, docs/benchmarks.md).
        if image in self._made or channels != group or not isinstance(channels, int) or channels >= PADDED:
            return None
        height, width = (int(size or 0) for size in sizes)
        return Blocks.of(channels, (height, width), windows)

    def _pad(self, value: str, few: Blocks, attributes: dict[str, object]) -> str:
        key = value, str(attributes)
        if key not in self._padded:
            # Another convolution may read the same image in other blocks.
            count = sum(name == value for name, _ in self._padded)
            self._padded[key] = f"{value}/padded{f'.{count}' if count else ''}"
            samples, channels, *pixels = self._w.dims(value) or ()
            sizes = attributes.get("sizes", pixels)
            assert isinstance(sizes, list)
            dims = (samples, *sizes, stored(int(channels or 0), few.block))
            self._w.describe(self._padded[key], TensorProto.FLOAT, dims)
            self._w.add("ChannelsLast", [value], [self._padded[key]], **attributes)
        return self._padded[key]

    def _convolution(self, node: onnx.NodeProto) -> None:
        image, weight, *bias = node.input
        windows = windows_of(self._w, image, weight, node)
        if windows is None:
            return
        out = node.output[0]
        few = self._few(image, weight, windows)
        if few is not None:
            image_last, shaped = self._pad(image, few, few.of_image), self._pad(weight, few, few.of_weight)
            windows = few.windows
        else:
            image_last, shaped = self._turned.last(image), self._weight(weight)
        self._w.drop(node)
        result = self._turned.new(f"{out}/last", out)
        biased = bool(bias and bias[0])
        unbiased = self._turned.new(f"{out}/unbiased", out) if biased else result
        self._w.add("Convolution", [image_last, shaped], [unbiased], **windows)
        if biased:
            self._w("Add", unbiased, bias[0], output=result)
        self._turned.back(result, out)

    def _convolution_gradient(self, node: onnx.NodeProto) -> None:
        gradient, image, weight = node.input
        windows = windows_of(self._w, image, weight, node)
        if windows is None:
            return
        of_image, of_weight, of_bias = [*node.output, "", ""][:3]
        sizes = (self._w.dims(image) or ())[AXES:]
        dy, dims = self._turned.last(gradient), self._w.dims(weight) or ()
        self._w.drop(node)
        if of_weight:
            few = self._few(image, weight, windows)
            x = self._pad(image, few, few.of_image) if few is not None else self._turned.last(image)
            changed = {**few.windows, **few.of_gradient} if few is not None else windows
            self._w.describe(of_weight, TensorProto.FLOAT, dims)
            self._w.add("ConvolutionWeightGrad", [dy, x], [of_weight], **changed)
        if of_bias:
            self._w.describe(of_bias, TensorProto.FLOAT, dims[:1])
            self._w.add("ColumnSums", [dy], [of_bias], axes=RANK - 1)
        if of_image:
            result = self._turned.new(f"{of_image}/last", image)
            self._w.add("ConvolutionDataGrad", [dy, self._weight(weight)], [result], **windows, sizes=sizes)
            self._w.describe(of_image, TensorProto.FLOAT, self._w.dims(image))
            self._turned.back(result, of_image)

    def _max_pool(self, node: onnx.NodeProto) -> None:
        image, flags = node.input[0], attributes_of(node)
        indices = node.output[1] if len(node.output) > 1 else ""
        readers = [reader for reader in self._w.nodes("MaxPoolGrad", MICROSOFT) if reader.input[2] == indices]
        if indices and not self._w.are_read_by(indices, readers):
            return
        fits = flags.get("auto_pad", b"NOTSET") == b"NOTSET" and not flags.get("ceil_mode", 0)
        fits = fits and prod(flags["kernel_shape"]) <= NOWHERE
        dims = self._w.dims(image) or ()
        if image not in self._made or not fits or not all(isinstance(size, int) for size in dims[1:]):
            return
        out = node.output[0]
        x = self._turned.last(image)
        windows: dict[str, object] = {name: list(flags[name]) for name in (*_WINDOWS, "kernel_shape") if name in flags}
        self._w.drop(node)
        result = self._turned.new(f"{out}/last", out)
        places = [self._turned.new(f"{out}/places", out, TensorProto.UINT8)] if indices else []
        self._w.add("MaxPool", [x], [result, *places], **windows)
        self._turned.back(result, out)
        if indices:
            self._pools[indices] = places[0], {**windows, "sizes": list(dims[2:])}

    def _max_pool_gradient(self, node: onnx.NodeProto) -> None:
        gradient, image, indices = node.input
        if indices not in self._pools:
            return
        (places, windows), out = self._pools[indices], node.output[0]
        inputs = [self._turned.last(gradient), places]
        self._w.drop(node)
        result = self._turned.new(f"{out}/last", image)
        self._w.add("MaxPoolGrad", inputs, [result], **windows)
        self._w.describe(out, TensorProto.FLOAT, self._w.dims(image))
        self._turned.back(result, out)

    def _mean(self, node: onnx.NodeProto) -> None:
        """A mean over all pixels."""
        image, flags, out = node.input[0], attributes_of(node), node.output[0]
        axes = self._w.integers(node.input[1]) if len(node.input) > 1 else list(flags.get("axes", []))
        is_global = node.op_type == "GlobalAveragePool"
        if image not in self._made or not (is_global or sorted(axis % RANK for axis in axes or ()) == _PIXELS):
            return
        x, dims = self._turned.last(image), self._w.dims(image) or ()
        self._w.drop(node)
        means = f"{out}/last"
        self._w.describe(means, TensorProto.FLOAT, (dims[0], 1, 1, dims[1]))
        self._w.add("PixelMeans", [x], [means])
        if is_global or flags.get("keepdims", 1):
            self._w.describe(out, TensorProto.FLOAT, (*dims[:2], 1, 1))
            self._turned.back(means, out)
        else:
            self._w("Squeeze", means, self._w.ints(1, 2), output=out)

    def _expand(self, node: onnx.NodeProto) -> None:
        """A gradient that is the same for all pixels: as large as an image with channels last."""
        (value, size), out = node.input, node.output[0]
        maker = self._w.maker(size)
        model = maker.input[0] if maker is not None and maker.op_type == "Shape" and not maker.attribute else ""
        if model not in self._made or len(self._w.dims(value) or ()) != RANK:
            return
        source, shape = self._turned.last(value), self._w("Shape", self._turned.last(model), output=f"{out}/shape")
        self._w.drop(node)
        self._w.describe(out, TensorProto.FLOAT, self._w.dims(model))
        self._turned.back(self._w("Expand", source, shape, output=self._turned.new(f"{out}/last", model)), out)

    def _size(self, node: onnx.NodeProto) -> None:
        if node.input[0] in self._made:
            self._w.redirect(node, node.input[0], self._turned.last(node.input[0]))

    def _elementwise(self, node: onnx.NodeProto) -> None:
        out = node.output[0]
        images = [name for name in node.input if name and not self._is_scalar(name)]
        if len(self._w.dims(out) or ()) != RANK or self._made.isdisjoint(images):
            return
        if any(len(self._w.dims(name) or ()) != RANK for name in images):
            return
        inputs = [self._turned.last(name) if name in images else name for name in node.input]
        if node.op_type == "Greater":
            inputs[0] = self._apart(node.input[0])
        self._w.drop(node)
        result = self._turned.new(f"{out}/last", out, self._w.element(out))
        self._w.write(node.op_type, inputs, [result], node.domain, **attributes_of(node))
        self._turned.back(result, out)

    def _apart(self, image: str) -> str:
        """An image for the gradient of its Relu.

        Otherwise the condition joins the kernel that computes the image, which then writes it for the backward pass.
        """
        value = self._turned.last(image)
        maker = self._w.maker(value)
        if maker is None or maker.op_type != "Relu":
            return value
        apart = self._turned.new(f"{image}/apart", image)
        # Moves nothing.
        return self._w("Reshape", value, self._w.ints(0, 0, 0, 0), output=apart)

    def _is_scalar(self, name: str) -> bool:
        value, dims = self._w.value(name), self._w.dims(name)
        return (value is not None and value.size == 1 and value.ndim < RANK) or dims == ()
