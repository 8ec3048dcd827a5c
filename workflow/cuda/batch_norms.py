"""Turns normalisations by the statistics of a batch, and their gradients, to channels last. Used by `images`."""

from __future__ import annotations

import onnx
from onnx import TensorProto

from ortflow.workflow.cuda.rectified import before_relu, sum_before_relu
from ortflow.workflow.cuda.running import correction_of, updates_of
from ortflow.workflow.cuda.turned import Turned
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.ir.rewriter import Dims


class BatchNorms:
    """The rules for both."""

    def __init__(self, turned: Turned) -> None:
        self._w, self._turned = turned.w, turned
        self._inverses: dict[str, str] = {}
        """The mean of a batch -> the inverse of its deviation."""
        self._applied: dict[str, tuple[str, str, str]] = {}
        """The mean of a batch -> what is normalised by it, channels last, and the slope and offset that do so."""

    def forward(self, node: onnx.NodeProto) -> None:
        flags, image = attributes_of(node), node.input[0]
        if not flags.get("training_mode", 0) or flags.get("momentum", 0.9) != 0 or image not in self._turned.made:
            return
        if len(node.output) != 3 or not all(node.output):
            return
        (out, mean, variance), channels = node.output, (self._w.dims(image) or ())[1:2]
        x, inputs = self._turned.last(image), list(node.input[1:3])
        settings = {"epsilon": float(flags.get("epsilon", 1e-5))}
        # The kernel of the statistics also moves the running ones: two elementwise kernels behind each of ResNet-50's
        # 53 normalisations took 1.6 us each, and as many launches.
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
        result = self._turned.new(f"{out}/last", image)
        self._w("Add", self._product(x, slope, f"{out}/scaled", image), offset, output=result)
        self._applied[mean] = result, slope, offset
        self._turned.back(result, out)

    def backward(self, node: onnx.NodeProto) -> None:
        gradient, image, scale, mean, inverse = node.input
        if image not in self._turned.made or not all(node.output):
            return
        inverse = self._inverses.get(mean, inverse)
        (out, of_scale, of_bias), channels = node.output, (self._w.dims(image) or ())[1:2]
        dy, x = self._turned.last(gradient), self._turned.last(image)
        # Where the Relu reads what is normalised, its product has no other reader.
        rectified = before_relu(self._w, dy, self._applied[mean][0]) if mean in self._applied else None
        self._w.drop(node)
        names = [self._vector(f"{out}/{name}", channels) for name in ("slope", "factor", "offset")]
        for name in (of_scale, of_bias):
            self._vector(name, channels)
        slope, factor, offset = names
        inputs, made_of = [dy, x, scale, mean, inverse], [*names, of_scale, of_bias]
        added = sum_before_relu(self._w, dy) if rectified is None else None
        if rectified is not None:
            inputs[0], zero = rectified
            inputs += self._applied[mean][1:]
            dy = self._rectified(inputs[0], x, mean, zero, image, out)
        if added is not None:
            self._w.drop(added.product)
            inputs[0] = added.one
            self._w.add("BatchGradientsOfSum", [*inputs, added.other, added.result], [*made_of, dy])
        else:
            self._w.add("BatchGradients", inputs, made_of)
        parts = self._product(dy, slope, f"{out}/of_gradient", image), self._product(x, factor, f"{out}/of_x", image)
        total = self._w("Add", *parts, output=self._turned.new(f"{out}/both", image))
        self._w.describe(out, TensorProto.FLOAT, self._w.dims(image))
        self._turned.back(self._w("Add", total, offset, output=self._turned.new(f"{out}/last", image)), out)

    def _rectified(self, gradient: str, x: str, mean: str, zero: str, image: str, out: str) -> str:
        """The gradient where what is normalised is larger than zero, computed again by the node that reads it."""
        _, slope, offset = self._applied[mean]
        scaled = self._product(x, slope, f"{out}/again/scaled", image)
        again = self._w("Add", scaled, offset, output=self._turned.new(f"{out}/again", image))
        larger = self._turned.new(f"{out}/larger", image, TensorProto.BOOL)
        self._w("Greater", again, zero, output=larger)
        number = self._w("Cast", larger, output=self._turned.new(f"{out}/number", image), to=int(TensorProto.FLOAT))
        return self._w("Mul", gradient, number, output=self._turned.new(f"{out}/rectified", image))

    def _vector(self, name: str, channels: Dims) -> str:
        self._w.describe(name, TensorProto.FLOAT, channels)
        return name

    def _product(self, value: str, vector: str, name: str, like: str) -> str:
        return self._w("Mul", value, vector, output=self._turned.new(name, like))
