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

from ortflow.workflow.cuda.channels import PADDED
from ortflow.workflow.cuda.pooling import NOWHERE
from ortflow.workflow.cuda.rectified import before_relu
from ortflow.workflow.cuda.running import correction_of, updates_of
from ortflow.workflow.cuda.windows import AXES
from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.ir.rewriter import Dims, Rewriter

LAST, FIRST = [0, 2, 3, 1], [0, 3, 1, 2]
RANK = AXES + 2
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
    sizes, given = (rewriter.dims(image) or ())[1:], attributes_of(node)
    dims = [size for size in rewriter.dims(weight) or () if isinstance(size, int)]
    if len(dims) != RANK or len(sizes) != RANK - 1 or not all(isinstance(size, int) for size in sizes):
        return None
    pads = list(given.get("pads", [])) or [0] * (2 * AXES)
    if given.get("auto_pad", b"NOTSET") != b"NOTSET" or pads[:AXES] != pads[AXES:]:
        return None
    group, outputs, channels = int(given.get("group", 1)), *dims[:2]
    # cuDNN adds up halves where a group has one channel.
    few = group > 1 and min(channels, outputs // group) < _CHANNELS
    if few or not (rewriter.is_fp32(image) and rewriter.is_fp32(weight)):
        return None
    ones = [1] * AXES
    found = {name: list(given.get(name, [])) or ones for name in ("strides", "dilations")}
    return {"group": group, "kernel_shape": list(dims[AXES:]), **found, "pads": pads, "channels_last": 1}


def _is_ours(rewriter: Rewriter, node: onnx.NodeProto) -> bool:
    return windows_of(rewriter, node.input[0], node.input[1], node) is not None


class _Images:
    def __init__(self, rewriter: Rewriter) -> None:
        self._w = rewriter
        self._last: dict[str, str] = {}
        """Image -> the same with channels last."""
        self._made: set[str] = set()
        """Images that are computed with channels last."""
        self._padded: dict[str, str] = {}
        """Image or weight of few channels -> the same with channels last, padded."""
        self._pools: dict[str, tuple[str, dict[str, object]]] = {}
        """The indices that a pooling does not compute any more -> its places, and the attributes of its gradient."""
        self._inverses: dict[str, str] = {}
        """The mean of a batch -> the inverse of its deviation."""
        self._applied: dict[str, tuple[str, str, str]] = {}
        """The mean of a batch -> what is normalised by it, channels last, and the slope and offset that do so."""
        self._rules: Mapping[tuple[str, str], Callable[[onnx.NodeProto], None]] = {
            ("", "Conv"): self._convolution,
            (MICROSOFT, "ConvGrad"): self._convolution_gradient,
            ("", "BatchNormalization"): self._batch_norm,
            (MICROSOFT, "BatchNormalizationGrad"): self._batch_norm_gradient,
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

    def last(self, image: str) -> str:
        """The image with channels last, made if it is not there yet."""
        if image not in self._last:
            self._last[image] = self._new(f"{image}/last", image)
            self._w("Transpose", image, output=self._last[image], perm=LAST)
        return self._last[image]

    def _new(self, name: str, like: str, element: int = TensorProto.FLOAT) -> str:
        """A described value of the sizes of an image, channels last."""
        dims = self._w.dims(like)
        self._w.describe(name, element, None if dims is None else tuple(dims[axis] for axis in LAST))
        return name

    def _back(self, value: str, image: str) -> None:
        """Let an image be the value, whose channels are last."""
        self._last[image] = value
        self._made.add(image)
        self._w("Transpose", value, output=image, perm=FIRST)

    def _weight(self, weight: str) -> str:
        if weight not in self._last:
            dims = self._w.dims(weight) or ()
            self._last[weight] = self._new(f"{weight}/last", weight)
            if dims[AXES:] == (1, 1):
                # Nothing moves.
                shape = self._w.ints(*(int(dims[axis] or 0) for axis in LAST))
                self._w("Reshape", weight, shape, output=self._last[weight])
            else:
                self._w("Transpose", weight, output=self._last[weight], perm=LAST)
        return self._last[weight]

    def _has_few(self, image: str, weight: str) -> bool:
        """Whether a convolution reads an image of few channels which is not computed with channels last."""
        channels, group = (self._w.dims(image) or ())[1], (self._w.dims(weight) or ())[1]
        return image not in self._made and channels == group and int(channels or 0) < PADDED

    def _pad(self, value: str) -> str:
        if value not in self._padded:
            self._padded[value] = f"{value}/padded"
            samples, _, *pixels = self._w.dims(value) or ()
            self._w.describe(self._padded[value], TensorProto.FLOAT, (samples, *pixels, PADDED))
            self._w.add("ChannelsLast", [value], [self._padded[value]])
        return self._padded[value]

    def _convolution(self, node: onnx.NodeProto) -> None:
        image, weight, *bias = node.input
        windows = windows_of(self._w, image, weight, node)
        if windows is None:
            return
        out = node.output[0]
        if self._has_few(image, weight):
            given, shaped = self._pad(image), self._pad(weight)
        else:
            given, shaped = self.last(image), self._weight(weight)
        self._w.drop(node)
        made = self._new(f"{out}/last", out)
        biased = bool(bias and bias[0])
        alone = self._new(f"{out}/unbiased", out) if biased else made
        self._w.add("Convolution", [given, shaped], [alone], **windows)
        if biased:
            self._w("Add", alone, bias[0], output=made)
        self._back(made, out)

    def _convolution_gradient(self, node: onnx.NodeProto) -> None:
        gradient, image, weight = node.input
        windows = windows_of(self._w, image, weight, node)
        if windows is None:
            return
        of_image, of_weight, of_bias = [*node.output, "", ""][:3]
        sizes = (self._w.dims(image) or ())[AXES:]
        dy, dims = self.last(gradient), self._w.dims(weight) or ()
        self._w.drop(node)
        if of_weight:
            x = self._pad(image) if self._has_few(image, weight) else self.last(image)
            self._w.describe(of_weight, TensorProto.FLOAT, dims)
            self._w.add("ConvolutionWeightGrad", [dy, x], [of_weight], **windows, channels=int(dims[1] or 0))
        if of_bias:
            self._w.describe(of_bias, TensorProto.FLOAT, dims[:1])
            self._w.add("ColumnSums", [dy], [of_bias], axes=RANK - 1)
        if of_image:
            made = self._new(f"{of_image}/last", image)
            self._w.add("ConvolutionDataGrad", [dy, self._weight(weight)], [made], **windows, sizes=sizes)
            self._w.describe(of_image, TensorProto.FLOAT, self._w.dims(image))
            self._back(made, of_image)

    def _batch_norm(self, node: onnx.NodeProto) -> None:
        given, image = attributes_of(node), node.input[0]
        if not given.get("training_mode", 0) or given.get("momentum", 0.9) != 0 or image not in self._made:
            return
        if len(node.output) != 3 or not all(node.output):
            return
        (out, mean, variance), channels = node.output, (self._w.dims(image) or ())[1:2]
        x, inputs = self.last(image), list(node.input[1:3])
        settings = {"epsilon": float(given.get("epsilon", 1e-5))}
        ratio = correction_of(self._w, (x, image), mean, variance)
        correction = ratio.output[0] if ratio is not None else f"{out}/correction"
        updates = updates_of(self._w, node, correction, channels) if ratio is not None else None
        self._w.drop(node, *([ratio] if ratio is not None else []))
        slope, offset, inverse = (self._vector(f"{out}/{name}", channels) for name in ("slope", "offset", "inverse"))
        for name in (mean, variance):
            self._vector(name, channels)
        self._w.describe(correction, TensorProto.FLOAT, ())
        self._inverses[mean] = inverse
        made_of = [slope, offset, mean, variance, inverse, correction]
        for update in updates or ():
            self._w.drop(*update.makers)
            inputs.append(update.old)
            made_of.append(self._vector(update.new, channels))
            settings |= {"momentum": update.momentum, "fresh": update.fresh}
        self._w.add("BatchStatistics", [x, *inputs], made_of, **settings)
        made = self._new(f"{out}/last", image)
        self._w("Add", self._product(x, slope, f"{out}/scaled", image), offset, output=made)
        self._applied[mean] = made, slope, offset
        self._back(made, out)

    def _batch_norm_gradient(self, node: onnx.NodeProto) -> None:
        gradient, image, scale, mean, inverse = node.input
        if image not in self._made or not all(node.output):
            return
        inverse = self._inverses.get(mean, inverse)
        (out, of_scale, of_bias), channels = node.output, (self._w.dims(image) or ())[1:2]
        dy, x = self.last(gradient), self.last(image)
        # Where the Relu reads what is normalised, its product has no other reader.
        rectified = before_relu(self._w, dy, self._applied[mean][0]) if mean in self._applied else None
        self._w.drop(node)
        names = [self._vector(f"{out}/{name}", channels) for name in ("slope", "factor", "offset")]
        for name in (of_scale, of_bias):
            self._vector(name, channels)
        slope, factor, offset = names
        inputs = [dy, x, scale, mean, inverse]
        if rectified is not None:
            inputs[0], zero = rectified
            inputs += self._applied[mean][1:]
            dy = self._rectified(inputs[0], x, mean, zero, image, out)
        self._w.add("BatchGradients", inputs, [*names, of_scale, of_bias])
        parts = self._product(dy, slope, f"{out}/of_gradient", image), self._product(x, factor, f"{out}/of_x", image)
        both = self._w("Add", *parts, output=self._new(f"{out}/both", image))
        self._w.describe(out, TensorProto.FLOAT, self._w.dims(image))
        self._back(self._w("Add", both, offset, output=self._new(f"{out}/last", image)), out)

    def _rectified(self, gradient: str, x: str, mean: str, zero: str, image: str, out: str) -> str:
        """The gradient where what is normalised is larger than zero, computed again by the node that reads it."""
        _, slope, offset = self._applied[mean]
        scaled = self._product(x, slope, f"{out}/again/scaled", image)
        again = self._w("Add", scaled, offset, output=self._new(f"{out}/again", image))
        larger = self._new(f"{out}/larger", image, TensorProto.BOOL)
        self._w("Greater", again, zero, output=larger)
        number = self._w("Cast", larger, output=self._new(f"{out}/number", image), to=int(TensorProto.FLOAT))
        return self._w("Mul", gradient, number, output=self._new(f"{out}/rectified", image))

    def _vector(self, name: str, channels: Dims) -> str:
        self._w.describe(name, TensorProto.FLOAT, channels)
        return name

    def _product(self, value: str, vector: str, name: str, like: str) -> str:
        return self._w("Mul", value, vector, output=self._new(name, like))

    def _max_pool(self, node: onnx.NodeProto) -> None:
        image, given = node.input[0], attributes_of(node)
        indices = node.output[1] if len(node.output) > 1 else ""
        readers = [each for each in self._w.nodes("MaxPoolGrad", MICROSOFT) if each.input[2] == indices]
        if indices and not self._w.are_read_by(indices, readers):
            return
        fits = given.get("auto_pad", b"NOTSET") == b"NOTSET" and not given.get("ceil_mode", 0)
        fits = fits and prod(given["kernel_shape"]) <= NOWHERE
        dims = self._w.dims(image) or ()
        if image not in self._made or not fits or not all(isinstance(size, int) for size in dims[1:]):
            return
        out = node.output[0]
        x = self.last(image)
        windows: dict[str, object] = {name: list(given[name]) for name in (*_WINDOWS, "kernel_shape") if name in given}
        self._w.drop(node)
        made = self._new(f"{out}/last", out)
        places = [self._new(f"{out}/places", out, TensorProto.UINT8)] if indices else []
        self._w.add("MaxPool", [x], [made, *places], **windows)
        self._back(made, out)
        if indices:
            self._pools[indices] = places[0], {**windows, "sizes": list(dims[2:])}

    def _max_pool_gradient(self, node: onnx.NodeProto) -> None:
        gradient, image, indices = node.input
        if indices not in self._pools:
            return
        (places, windows), out = self._pools[indices], node.output[0]
        given = [self.last(gradient), places]
        self._w.drop(node)
        made = self._new(f"{out}/last", image)
        self._w.add("MaxPoolGrad", given, [made], **windows)
        self._w.describe(out, TensorProto.FLOAT, self._w.dims(image))
        self._back(made, out)

    def _mean(self, node: onnx.NodeProto) -> None:
        """A mean over all pixels."""
        image, given, out = node.input[0], attributes_of(node), node.output[0]
        axes = self._w.integers(node.input[1]) if len(node.input) > 1 else list(given.get("axes", []))
        alone = node.op_type == "GlobalAveragePool"
        if image not in self._made or not (alone or sorted(axis % RANK for axis in axes or ()) == _PIXELS):
            return
        x, dims = self.last(image), self._w.dims(image) or ()
        self._w.drop(node)
        means = f"{out}/last"
        self._w.describe(means, TensorProto.FLOAT, (dims[0], 1, 1, dims[1]))
        self._w.add("PixelMeans", [x], [means])
        if alone or given.get("keepdims", 1):
            self._w.describe(out, TensorProto.FLOAT, (*dims[:2], 1, 1))
            self._back(means, out)
        else:
            self._w("Squeeze", means, self._w.ints(1, 2), output=out)

    def _expand(self, node: onnx.NodeProto) -> None:
        """A gradient that is the same for all pixels: as large as an image with channels last."""
        (value, size), out = node.input, node.output[0]
        maker = self._w.maker(size)
        like = maker.input[0] if maker is not None and maker.op_type == "Shape" and not maker.attribute else ""
        if like not in self._made or len(self._w.dims(value) or ()) != RANK:
            return
        given, shape = self.last(value), self._w("Shape", self.last(like), output=f"{out}/shape")
        self._w.drop(node)
        self._w.describe(out, TensorProto.FLOAT, self._w.dims(like))
        self._back(self._w("Expand", given, shape, output=self._new(f"{out}/last", like)), out)

    def _size(self, node: onnx.NodeProto) -> None:
        if node.input[0] in self._made:
            self._w.redirect(node, node.input[0], self.last(node.input[0]))

    def _elementwise(self, node: onnx.NodeProto) -> None:
        out = node.output[0]
        images = [name for name in node.input if name and not self._is_scalar(name)]
        if len(self._w.dims(out) or ()) != RANK or self._made.isdisjoint(images):
            return
        if any(len(self._w.dims(name) or ()) != RANK for name in images):
            return
        given = [self.last(name) if name in images else name for name in node.input]
        if node.op_type == "Greater":
            given[0] = self._apart(node.input[0])
        self._w.drop(node)
        made = self._new(f"{out}/last", out, self._w.element(out))
        self._w.write(node.op_type, given, [made], node.domain, **attributes_of(node))
        self._back(made, out)

    def _apart(self, image: str) -> str:
        """An image for the gradient of its Relu.

        Otherwise the condition joins the kernel that computes the image, which then writes it for the backward pass.
        """
        value = self.last(image)
        maker = self._w.maker(value)
        if maker is None or maker.op_type != "Relu":
            return value
        apart = self._new(f"{image}/apart", image)
        # Moves nothing.
        return self._w("Reshape", value, self._w.ints(0, 0, 0, 0), output=apart)

    def _is_scalar(self, name: str) -> bool:
        value, dims = self._w.value(name), self._w.dims(name)
        return (value is not None and value.size == 1 and value.ndim < RANK) or dims == ()
