"""The operators of `ortflow.cuda` as functions of ONNX, so that graphs with them run on the CPU.

Dropouts become those of ortflow's CPU library.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import onnx
from graph_build_models import run_graph
from kernels import off
from onnx import helper, parser

from ortflow.workflow.cuda.blocks import PADDED
from ortflow.workflow.graph.domains import CPU_DOMAIN, CUDA_DOMAIN, MICROSOFT
from ortflow.workflow.graph.ir.edit import attributes_of, import_domain, replace

_NORM_GRADIENT = """
    minus_one = Constant <value_ints = [-1]> ()
    zero = Constant <value_ints = [0]> ()
    g = Mul (dy, scale)
    gn = Mul (g, n)
    along = ReduceMean (gn, minus_one)
    part = Mul (n, along)
    rest = Sub (g, part)
    dyn = Mul (dy, n)
    sizes = Shape (scale)
    flat = Concat <axis = 0> (minus_one, sizes)
    rows = Reshape (dyn, flat)
    dscale = ReduceSum <keepdims = 0> (rows, zero)
"""
_FUNCTIONS = (
    """LayerNormalization <epsilon> (x, scale, bias) => (y, mean, inverse) {
        y, mean, inverse = LayerNormalization <axis = -1, epsilon: float = @epsilon> (x, scale, bias)
    }""",
    f"""LayerNormalizationGrad (dy, x, scale, mean, inverse) => (dx, dscale, dbias) {{
        off = Sub (x, mean)
        n = Mul (off, inverse)
        {_NORM_GRADIENT}
        middle = ReduceMean (g, minus_one)
        centred = Sub (rest, middle)
        dx = Mul (centred, inverse)
        dyrows = Reshape (dy, flat)
        dbias = ReduceSum <keepdims = 0> (dyrows, zero)
    }}""",
    """RMSNormalization <epsilon> (x, scale) => (y, inverse) {
        minus_one = Constant <value_ints = [-1]> ()
        e = Constant <value_float: float = @epsilon> ()
        square = Mul (x, x)
        mean = ReduceMean (square, minus_one)
        shifted = Add (mean, e)
        root = Sqrt (shifted)
        inverse = Reciprocal (root)
        n = Mul (x, inverse)
        y = Mul (n, scale)
    }""",
    f"""RMSNormalizationGrad (dy, x, scale, inverse) => (dx, dscale) {{
        n = Mul (x, inverse)
        {_NORM_GRADIENT}
        dx = Mul (rest, inverse)
    }}""",
    """CrossEntropy <ignore> (labels, scores) => (loss, lse) {
        one = Constant <value_ints = [1]> ()
        zero = Constant <value_int = 0> ()
        nothing = Constant <value_float = 0.0> ()
        ignored = Constant <value_int: int = @ignore> ()
        most = ReduceMax (scores, one)
        shifted = Sub (scores, most)
        powers = Exp (shifted)
        total = ReduceSum (powers, one)
        logarithm = Log (total)
        column = Add (logarithm, most)
        lse = Squeeze (column, one)
        left_out = Equal (labels, ignored)
        places = Where (left_out, zero, labels)
        place = Unsqueeze (places, one)
        found = GatherElements <axis = 1> (scores, place)
        score = Squeeze (found, one)
        difference = Sub (lse, score)
        losses = Where (left_out, nothing, difference)
        loss = ReduceSum <keepdims = 0> (losses)
    }""",
    """CrossEntropyGrad <ignore> (labels, gradient, scores, lse) => (dscores) {
        one = Constant <value_ints = [1]> ()
        zero = Constant <value_int = 0> ()
        nothing = Constant <value_float = 0.0> ()
        ignored = Constant <value_int: int = @ignore> ()
        column = Unsqueeze (lse, one)
        logarithms = Sub (scores, column)
        probabilities = Exp (logarithms)
        left_out = Equal (labels, ignored)
        places = Where (left_out, zero, labels)
        place = Unsqueeze (places, one)
        each = Where (left_out, nothing, gradient)
        factor = Unsqueeze (each, one)
        scaled = Mul (probabilities, factor)
        less = Neg (factor)
        dscores = ScatterElements <axis = 1, reduction = "add"> (scaled, place, less)
    }""",
    """TableGrad <rows> (indices, gradient) => (table) {
        rows_ = Constant <value_int: int = @rows> ()
        minus_one = Constant <value_ints = [-1]> ()
        far = Constant <value_ints = [9223372036854775807]> ()
        height = Reshape (rows_, minus_one)
        sizes = Shape (gradient)
        width = Slice (sizes, minus_one, far)
        flat = Concat <axis = 0> (minus_one, width)
        gradients = Reshape (gradient, flat)
        places = Reshape (indices, minus_one)
        one = Constant <value_ints = [1]> ()
        places_ = Unsqueeze (places, one)
        whole = Concat <axis = 0> (height, width)
        zeros = ConstantOfShape (whole)
        table = ScatterND <reduction = "add"> (zeros, places_, gradients)
    }""",
    """Softmax <scale> (x, mask) => (y) {
        scale_ = Constant <value_float: float = @scale> ()
        scaled = Mul (x, scale_)
        masked = Add (scaled, mask)
        y = Softmax <axis = -1> (masked)
    }""",
    """SoftmaxGrad <scale> (dy, y) => (dx) {
        scale_ = Constant <value_float: float = @scale> ()
        minus_one = Constant <value_ints = [-1]> ()
        product = Mul (dy, y)
        along = ReduceSum (product, minus_one)
        off = Sub (dy, along)
        unscaled = Mul (off, y)
        dx = Mul (unscaled, scale_)
    }""",
    """Rotary <tokens_first> (x, cosine, sine) => (y) {
        flag = Constant <value_int: int = @tokens_first> ()
        swaps = Cast <to = 9> (flag)
        heads_first = If (swaps) <
            then_branch = swapped () => (one) { one = Transpose <perm = [0, 2, 1, 3]> (x) },
            else_branch = same () => (other) { other = Identity (x) }
        >
        a, b = Split <axis = -1, num_outputs = 2> (heads_first)
        minus_b = Neg (b)
        turned = Concat <axis = -1> (minus_b, a)
        along = Mul (heads_first, cosine)
        across = Mul (turned, sine)
        y = Add (along, across)
    }""",
    """RotaryGrad <tokens_first> (dy, cosine, sine) => (dx) {
        scaled = Mul (dy, sine)
        a, b = Split <axis = -1, num_outputs = 2> (scaled)
        minus_a = Neg (a)
        across = Concat <axis = -1> (b, minus_a)
        along = Mul (dy, cosine)
        heads_first = Add (along, across)
        flag = Constant <value_int: int = @tokens_first> ()
        swaps = Cast <to = 9> (flag)
        dx = If (swaps) <
            then_branch = swapped () => (one) { one = Transpose <perm = [0, 2, 1, 3]> (heads_first) },
            else_branch = same () => (other) { other = Identity (heads_first) }
        >
    }""",
    """BatchStatistics <epsilon> (x, scale, bias) => (slope, offset, mean, variance, inverse, correction) {
        zero = Constant <value_ints = [0]> ()
        one = Constant <value_float = 1.0> ()
        e = Constant <value_float: float = @epsilon> ()
        minus_one = Constant <value_ints = [-1]> ()
        width = Shape (scale)
        flat = Concat <axis = 0> (minus_one, width)
        rows = Reshape (x, flat)
        mean = ReduceMean <keepdims = 0> (rows, zero)
        off = Sub (rows, mean)
        square = Mul (off, off)
        variance = ReduceMean <keepdims = 0> (square, zero)
        shifted = Add (variance, e)
        deviation = Sqrt (shifted)
        inverse = Reciprocal (deviation)
        slope = Mul (scale, inverse)
        moved = Mul (mean, slope)
        offset = Sub (bias, moved)
        sizes = Size (x)
        channels = Size (scale)
        count_ = Div (sizes, channels)
        count = Cast <to = 1> (count_)
        fewer_ = Sub (count, one)
        fewer = Max (fewer_, one)
        correction = Div (count, fewer)
    }""",
    """BatchGradients (dy, x, scale, mean, inverse) => (slope, factor, offset, dscale, dbias) {
        zero = Constant <value_ints = [0]> ()
        minus_one = Constant <value_ints = [-1]> ()
        width = Shape (scale)
        flat = Concat <axis = 0> (minus_one, width)
        rows = Reshape (dy, flat)
        values = Reshape (x, flat)
        off = Sub (values, mean)
        dbias = ReduceSum <keepdims = 0> (rows, zero)
        product = Mul (rows, off)
        along = ReduceSum <keepdims = 0> (product, zero)
        dscale = Mul (along, inverse)
        slope = Mul (scale, inverse)
        sizes = Size (x)
        channels = Size (scale)
        count_ = Div (sizes, channels)
        count = Cast <to = 1> (count_)
        square = Mul (inverse, inverse)
        a = Div (along, count)
        b = Mul (a, square)
        c = Mul (b, slope)
        factor = Neg (c)
        d = Div (dbias, count)
        f = Mul (d, slope)
        g = Neg (f)
        h = Mul (factor, mean)
        offset = Sub (g, h)
    }""",
    """ColumnSums <axes> (x) => (sums) {
        axes_ = Constant <value_int: int = @axes> ()
        zero = Constant <value_ints = [0]> ()
        minus_one = Constant <value_ints = [-1]> ()
        far = Constant <value_ints = [9223372036854775807]> ()
        sizes = Shape (x)
        first = Reshape (axes_, minus_one)
        left = Slice (sizes, first, far)
        flat = Concat <axis = 0> (minus_one, left)
        rows = Reshape (x, flat)
        sums = ReduceSum <keepdims = 0> (rows, zero)
    }""",
)


_BATCH = ["slope", "offset", "mean", "variance", "inverse", "correction"]
"""Outputs of BatchStatistics that every node has."""


def composed(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy that any runtime accepts."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for rewrite in (_apart, _of_images):
        replace(copy.graph.node, [one for node in copy.graph.node for one in rewrite(node)])
    for node in copy.graph.node:
        if node.domain == CUDA_DOMAIN and node.op_type == "Dropout":
            node.domain = CPU_DOMAIN
            import_domain(copy, CPU_DOMAIN)
    for text in _FUNCTIONS:
        function = parser.parse_function(f'<domain: "{CUDA_DOMAIN}", opset_import: ["": 18]>\n{text}')
        if any(node.op_type == function.name and node.domain == CUDA_DOMAIN for node in copy.graph.node):
            copy.functions.append(function)
    return copy


def _apart(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Operators that compute what two of the others do, as these two."""
    if node.op_type == "CrossEntropyWithGrad":
        return _loss_and_gradient(node)
    if node.op_type == "Softmax" and node.domain == CUDA_DOMAIN and not any(node.input[1:]):
        return _masked(node)
    if node.op_type == "BatchStatistics" and len(node.output) > len(_BATCH):
        return _with_updates(node)
    if node.op_type == "BatchGradients" and len(node.input) > _UNRECTIFIED:
        return _with_condition(node)
    if node.op_type == "BatchGradientsOfSum":
        return _with_sum(node)
    return [*_without_residual(_without_sums(node)), *_sums(node)]


_UNRECTIFIED = 5


def _with_sum(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """The gradient of a Relu as the sum of two, and that of the normalisation."""
    one, *others, other, y = node.input
    *made, dy = node.output
    return [
        helper.make_node("Add", [one, other], [f"{dy}/sum"]),
        helper.make_node("Constant", [], [f"{dy}/zero"], value_float=0.0),
        helper.make_node("Greater", [y, f"{dy}/zero"], [f"{dy}/larger"]),
        helper.make_node("Where", [f"{dy}/larger", f"{dy}/sum", f"{dy}/zero"], [dy]),
        helper.make_node("BatchGradients", [dy, *others], made, domain=CUDA_DOMAIN),
    ]


def _with_condition(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """The gradient of a Relu of what was normalised, and that of the normalisation."""
    alone = onnx.NodeProto.FromString(node.SerializeToString())
    (dy, x), (slope, offset), out = node.input[:2], node.input[_UNRECTIFIED:], f"{node.output[0]}/rectified"
    del alone.input[_UNRECTIFIED:]
    alone.input[0] = out
    return [
        helper.make_node("Mul", [x, slope], [f"{out}/scaled"]),
        helper.make_node("Add", [f"{out}/scaled", offset], [f"{out}/normalised"]),
        helper.make_node("Constant", [], [f"{out}/zero"], value_float=0.0),
        helper.make_node("Greater", [f"{out}/normalised", f"{out}/zero"], [f"{out}/larger"]),
        helper.make_node("Where", [f"{out}/larger", dy, f"{out}/zero"], [out]),
        alone,
    ]


def _with_updates(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """The statistics of a batch, and what it moves by them."""
    alone = onnx.NodeProto.FromString(node.SerializeToString())
    settings = attributes_of(node)
    del alone.input[3:], alone.output[len(_BATCH) :], alone.attribute[:]
    alone.attribute.append(helper.make_attribute("epsilon", settings["epsilon"]))
    mean, variance, correction = (node.output[_BATCH.index(name)] for name in ("mean", "variance", "correction"))
    names = iter(f"{node.output[0]}/update.{place}" for place in itertools.count())
    made = [alone]

    def add(operator: str, *inputs: str, output: str | None = None, **attributes: float) -> str:
        made.append(helper.make_node(operator, list(inputs), [output or next(names)], **attributes))
        return str(made[-1].output[0])

    kept, fresh = (add("Constant", value_float=settings[name]) for name in ("momentum", "fresh"))
    batches = mean, add("Mul", variance, correction)
    for old, batch, new in zip(node.input[3:], batches, node.output[len(_BATCH) :], strict=True):
        add("Add", add("Mul", old, kept), add("Mul", batch, fresh), output=new)
    return made


def _masked(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Softmax with a mask of zeros: a function cannot do without an input."""
    zeros, masked = f"{node.output[0]}/zeros", onnx.NodeProto.FromString(node.SerializeToString())
    masked.input[:] = [node.input[0], zeros]
    return [helper.make_node("Constant", [], [zeros], value_float=0.0), masked]


def _without_sums(node: onnx.NodeProto) -> onnx.NodeProto:
    alone = onnx.NodeProto.FromString(node.SerializeToString())
    if any(attribute.name == "sums" for attribute in node.attribute):
        del alone.output[-1], alone.attribute[:]
    return alone


def _sums(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """What the gradient of a norm sums, as a node of its own: over two axes, which it has in these tests."""
    if not any(attribute.name == "sums" for attribute in node.attribute):
        return []
    given, made = node.output[:1], node.output[-1:]
    return [helper.make_node("ColumnSums", given, made, domain=CUDA_DOMAIN, axes=2)]


def _loss_and_gradient(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    (labels, gradient, scores), (loss, dscores), lse = node.input, node.output, f"{node.output[0]}/lse"
    made = [
        helper.make_node("CrossEntropy", [labels, scores], [loss, lse], domain=CUDA_DOMAIN),
        helper.make_node("CrossEntropyGrad", [labels, gradient, scores, lse], [dscores], domain=CUDA_DOMAIN),
    ]
    for each in made:
        each.attribute.extend(node.attribute)
    return made


def _without_residual(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """A gradient and what is added to it as a separate sum: a function cannot omit an input of a node."""
    places = {"LayerNormalizationGrad": 5, "RMSNormalizationGrad": 4, "TableGrad": 2}
    if node.domain != CUDA_DOMAIN or len(node.input) != places.get(node.op_type, -2) + 1:
        return [node]
    alone = onnx.NodeProto.FromString(node.SerializeToString())
    residual, alone.output[0] = alone.input.pop(), f"{node.output[0]}/through"
    return [alone, helper.make_node("Add", [alone.output[0], residual], node.output[:1])]


def _of_images(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Convolutions and poolings with channels last by the operators for channels first, between Transposes.

    Gradients are ONNX Runtime's in the training wheel, or composed before (`autodiff.compose`).
    """
    if node.domain == CUDA_DOMAIN and node.op_type == "ChannelsLast":
        return _padded(node)
    if node.domain == CUDA_DOMAIN and node.op_type == "PixelMeans":
        axes = f"{node.output[0]}/axes"
        return [
            helper.make_node("Constant", [], [axes], value_ints=[1, 2]),
            helper.make_node("ReduceMean", [node.input[0], axes], node.output),
        ]
    if node.domain != CUDA_DOMAIN or node.op_type not in _IMAGES:
        return [node]
    operator, domain, given, made = _IMAGES[node.op_type]
    settings = {
        each.name: helper.get_attribute_value(each)
        for each in node.attribute
        if each.name not in ("weight", "block", "before", "channels_last", "sizes")
    }
    first = [f"{node.output[0]}/in.{place}" for place in range(len(node.input))]
    nodes = [
        helper.make_node("Transpose", [name], [turned], perm=[0, 3, 1, 2])
        for name, turned in zip(node.input, first, strict=True)
    ]
    out = f"{node.output[0]}/out"
    inputs = [first[place] if place >= 0 else f"{out}/extra" for place in given]
    outputs = [out if wanted else "" for wanted in made]
    if node.op_type == "MaxPool" and len(node.output) > 1:
        # ONNX Runtime's gradient reads the image and the elements' numbers in it.
        nodes.append(helper.make_node("Identity", first[:1], [f"{node.output[1]}/image"]))
        outputs.append(f"{node.output[1]}/indices")
    if node.op_type == "MaxPoolGrad":
        del nodes[1:]
        inputs = [first[0], f"{node.input[1]}/image", f"{node.input[1]}/indices"]
    if node.op_type == "ConvolutionDataGrad":
        height, width = next(helper.get_attribute_value(a) for a in node.attribute if a.name == "sizes")
        shape, size = f"{out}/shape", f"{out}/size"
        nodes += [
            helper.make_node("Shape", first[:1], [f"{out}/batch"], start=0, end=1),
            helper.make_node("Shape", first[1:], [f"{out}/channels"], start=1, end=2),
            helper.make_node("Constant", [], [size], value_ints=[height, width]),
            helper.make_node("Concat", [f"{out}/batch", f"{out}/channels", size], [shape], axis=0),
            helper.make_node("ConstantOfShape", [shape], [f"{out}/extra"]),
        ]
    if node.op_type == "ConvolutionWeightGrad":
        shape = f"{out}/shape"
        nodes += [
            helper.make_node("Shape", first[:1], [f"{out}/outputs"], start=1, end=2),
            helper.make_node("Shape", first[1:], [f"{out}/channels"], start=1, end=2),
            helper.make_node("Constant", [], [f"{out}/kernel"], value_ints=settings["kernel_shape"]),
            helper.make_node("Concat", [f"{out}/outputs", f"{out}/channels", f"{out}/kernel"], [shape], axis=0),
            helper.make_node("ConstantOfShape", [shape], [f"{out}/extra"]),
        ]
    nodes.append(helper.make_node(operator, inputs, outputs, domain=domain, **settings))
    if node.op_type == "ConvolutionWeightGrad":
        nodes += _weight(node, out)
    else:
        nodes.append(helper.make_node("Transpose", [out], node.output[:1], perm=[0, 2, 3, 1]))
    return nodes


class _Made:
    """Nodes that make one value after the other."""

    def __init__(self, value: str, made: str) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.value, self._made = value, made

    def then(self, operator: str, *constants: list[int], **attributes: Any) -> None:
        names = [f"{self._made}/{len(self.nodes)}.{place}" for place in range(len(constants))]
        self.nodes += [
            helper.make_node("Constant", [], [n], value_ints=c) for n, c in zip(names, constants, strict=True)
        ]
        out = f"{self._made}/{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, [self.value, *names], [out], **attributes))
        self.value = out

    def all(self) -> list[onnx.NodeProto]:
        self.nodes[-1].output[0] = self._made
        return self.nodes


def _padded(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Pixels in blocks, channels last, with zeros behind the channels to a multiple of PADDED."""
    settings, far = attributes_of(node), 1 << 12
    (high, wide), (top, left) = settings.get("block", (1, 1)), settings.get("before", (0, 0))
    made = _Made(node.input[0], node.output[0])
    made.then("Pad", [0, 0, top, left, 0, 0, *([far, far] if "sizes" in settings else [0, 0])])
    if "sizes" in settings:
        rows, columns = settings["sizes"]
        made.then("Slice", [0, 0], [rows * high, columns * wide], [2, 3])
    else:
        rows = columns = -1
    if (high, wide) != (1, 1):
        made.then("Reshape", [0, 0, rows, high, columns * wide])
        made.then("Reshape", [0, 0, 0, 0, columns, wide])
        made.then("Transpose", perm=[0, 2, 4, 1, 3, 5])
        made.then("Reshape", [0, 0, 0, -1])
    else:
        made.then("Transpose", perm=[0, 2, 3, 1])
    (last, y), (channels, less, whole, more, pads) = (
        (made.value, node.output[0]),
        (f"{made.value}/{i}" for i in range(5)),
    )
    return [
        *made.nodes,
        helper.make_node("Shape", [last], [channels], start=3),
        helper.make_node("Neg", [channels], [less]),
        helper.make_node("Constant", [], [whole], value_ints=[PADDED]),
        helper.make_node("Mod", [less, whole], [more]),
        helper.make_node("Constant", [], [f"{y}/none"], value_ints=[0] * 7),
        helper.make_node("Concat", [f"{y}/none", more], [pads], axis=0),
        helper.make_node("Pad", [last, pads], [y]),
    ]


def _weight(node: onnx.NodeProto, out: str) -> list[onnx.NodeProto]:
    """The gradient of a weight in its own order, of one for an image of blocks."""
    settings = attributes_of(node)
    made = _Made(out, node.output[0])
    if "weight" not in settings:
        made.then("Identity")
        return made.all()
    channels, height, width = settings["weight"]
    (high, wide), (rows, columns) = settings.get("block", (1, 1)), settings["kernel_shape"]
    made.then("Slice", [0], [channels * high * wide], [1])
    made.then("Reshape", [0, channels, high, wide, rows, columns])
    made.then("Transpose", perm=[0, 1, 4, 2, 5, 3])
    made.then("Reshape", [0, 0, rows * high, columns * wide])
    made.then("Slice", [0, 0], [height, width], [2, 3])
    return made.all()


_IMAGES = {
    # operator -> ONNX's or ONNX Runtime's, its inputs (-1: one that is made here), and which output is ours
    "Convolution": ("Conv", "", (0, 1), (True,)),
    "ConvolutionDataGrad": ("ConvGrad", MICROSOFT, (0, -1, 1), (True, False, False)),
    "ConvolutionWeightGrad": ("ConvGrad", MICROSOFT, (0, 1, -1), (False, True, False)),
    "MaxPool": ("MaxPool", "", (0,), (True,)),
    "MaxPoolGrad": ("MaxPoolGrad", MICROSOFT, (0,), (True,)),
}


def check_same(
    model: onnx.ModelProto,
    rewrite: Callable[[onnx.ModelProto], onnx.ModelProto],
    feeds: Mapping[str, Any],
) -> list[str]:
    """Check that a rewrite returns a copy that computes the same; the operators of the copy."""
    before = model.SerializeToString()
    found = rewrite(model)
    assert model.SerializeToString() == before
    expected, results = (run_graph(composed(one), feeds) for one in (model, found))
    assert results.keys() == expected.keys()
    for name, array in expected.items():
        assert off(results[name], array) < 1e-6, name
    return [one.op_type for one in found.graph.node]
