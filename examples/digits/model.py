"""Build SqueezeNet v1.1 as a plain ONNX forward graph for small images, with fresh weights and no PyTorch.

    python model.py --output build/model.onnx

Input `image` fp32 [batch, 1, 32, 32], output `logits` fp32 [batch, 10]. As in Iandola et al. 2016 ("SqueezeNet") and
its release 1.1: fire modules and no normalisation; Dropout before the last convolution. There is one pooling less,
because the images have 32 pixels a side and not 224, and no ReLU behind the last convolution, where it only hinders.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.graph.head import read_head

PRODUCER = "ortflow-example-digits"

SIDE, CLASSES = 32, 10


@dataclass
class Graph:
    """Nodes and initializers in the making."""

    random: np.random.Generator
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)

    def node(self, operator: str, *inputs: str, name: str, **attributes: object) -> str:
        """Add a node with one output of its own name."""
        self.nodes.append(helper.make_node(operator, list(inputs), [name], name=name, **attributes))
        return name

    def tensor(self, name: str, values: np.ndarray) -> str:
        """Add an initializer."""
        self.initializers.append(numpy_helper.from_array(values, name))
        return name

    def convolution(self, x: str, name: str, inputs: int, outputs: int, size: int, stride: int = 1) -> str:
        """A convolution that keeps the size, and ReLU; weights as He et al. 2015 draw them."""
        deviation = np.sqrt(2 / (inputs * size * size))
        weights = self.random.standard_normal((outputs, inputs, size, size)) * deviation
        weight = self.tensor(f"{name}.weight", weights.astype(np.float32))
        bias = self.tensor(f"{name}.bias", np.zeros(outputs, np.float32))
        convolved = self.node(
            "Conv", x, weight, bias, name=f"{name}.conv",
            kernel_shape=[size, size], strides=[stride, stride], pads=[size // 2] * 4,
        )  # fmt: skip
        return self.node("Relu", convolved, name=name)

    def fire(self, x: str, name: str, inputs: int, squeeze: int, expand: int) -> str:
        """Few 1 x 1 filters, then as many 1 x 1 as 3 x 3 filters side by side: 2 * `expand` channels."""
        squeezed = self.convolution(x, f"{name}.squeeze", inputs, squeeze, 1)
        small = self.convolution(squeezed, f"{name}.expand1x1", squeeze, expand, 1)
        large = self.convolution(squeezed, f"{name}.expand3x3", squeeze, expand, 3)
        return self.node("Concat", small, large, name=name, axis=1)

    def pool(self, x: str, name: str) -> str:
        """The largest of 3 x 3, every second pixel."""
        return self.node("MaxPool", x, name=name, kernel_shape=[3, 3], strides=[2, 2], pads=[0, 0, 1, 1])


def build(seed: int) -> onnx.ModelProto:
    """The forward graph, opset 17."""
    graph = Graph(np.random.default_rng(seed))
    x = graph.convolution("image", "conv1", 1, 64, 3, stride=2)
    x = graph.fire(x, "fire2", 64, 16, 64)
    x = graph.fire(x, "fire3", 128, 16, 64)
    x = graph.pool(x, "pool3")
    x = graph.fire(x, "fire4", 128, 32, 128)
    x = graph.fire(x, "fire5", 256, 32, 128)
    x = graph.pool(x, "pool5")
    x = graph.fire(x, "fire6", 256, 48, 192)
    x = graph.fire(x, "fire7", 384, 48, 192)
    x = graph.fire(x, "fire8", 384, 64, 256)
    x = graph.fire(x, "fire9", 512, 64, 256)
    x = graph.node("Dropout", x, graph.tensor("ratio", np.array(0.5, np.float32)), name="dropout")
    weights = graph.random.standard_normal((CLASSES, 512, 1, 1)) * 0.01
    weight = graph.tensor("conv10.weight", weights.astype(np.float32))
    bias = graph.tensor("conv10.bias", np.zeros(CLASSES, np.float32))
    x = graph.node("Conv", x, weight, bias, name="conv10", kernel_shape=[1, 1])
    x = graph.node("GlobalAveragePool", x, name="mean")
    logits = graph.node("Flatten", x, name="logits", axis=1)

    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, SIDE, SIDE])
    classes = helper.make_tensor_value_info(logits, TensorProto.FLOAT, ["batch", CLASSES])
    model = helper.make_model(
        helper.make_graph(graph.nodes, "squeezenet", [image], [classes], graph.initializers),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
        producer_name=PRODUCER,
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def main() -> None:
    """Write the model file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "build" / "model.onnx")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.output.exists() and ((head := read_head(options.output)) is None or head.producer != PRODUCER):
        sys.exit(f"{options.output} exists and was not written by this program; remove it, or choose another --output")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    model = build(options.seed)
    onnx.save(model, options.output)
    count = sum(int(np.prod(tensor.dims)) for tensor in model.graph.initializer)
    print(f"{options.output}: {count / 1e6:.2f} M parameters")


if __name__ == "__main__":
    main()
