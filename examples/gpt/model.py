"""Build a GPT-2-shaped decoder as a plain ONNX forward graph, with fresh weights and no PyTorch.

    python model.py --output build/model.onnx                                   # 3.2 M parameters, bytes
    python model.py --layers 12 --width 768 --heads 12 --context 1024 --vocabulary 50257   # GPT-2's 124 M

Input `tokens` int64 [batch, sequence], output `logits` fp32 [batch, sequence, vocabulary]. As in GPT-2: learned
positions, LayerNorm before each block, Gelu, output weights tied to the embedding (Radford et al. 2019).
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

PRODUCER = "ortflow-example-gpt"


@dataclass(frozen=True)
class Config:
    """Sizes of the decoder."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 128
    vocabulary: int = 256
    dropout: float = 0.0
    seed: int = 0


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
        self.initializers.append(numpy_helper.from_array(np.asarray(values, order="C"), name))
        return name

    def normal(self, name: str, *shape: int, deviation: float = 0.02) -> str:
        """Add normally distributed weights."""
        return self.tensor(name, (self.random.standard_normal(shape) * deviation).astype(np.float32))

    def linear(self, x: str, name: str, inputs: int, outputs: int, deviation: float = 0.02) -> str:
        """x @ weight + bias."""
        weight = self.normal(f"{name}.weight", inputs, outputs, deviation=deviation)
        bias = self.tensor(f"{name}.bias", np.zeros(outputs, np.float32))
        return self.node("Add", self.node("MatMul", x, weight, name=f"{name}.product"), bias, name=name)

    def norm(self, x: str, name: str, width: int) -> str:
        """LayerNormalization over the last axis."""
        scale = self.tensor(f"{name}.weight", np.ones(width, np.float32))
        bias = self.tensor(f"{name}.bias", np.zeros(width, np.float32))
        return self.node("LayerNormalization", x, scale, bias, name=name, axis=-1, epsilon=1e-5)

    def dropout(self, x: str, name: str, ratio: float) -> str:
        """Dropout in training mode; nothing where the ratio is 0."""
        if ratio == 0:
            return x
        share = self.tensor(f"{name}.ratio", np.array(ratio, np.float32))
        mode = self.tensor(f"{name}.training", np.array(True))
        return self.node("Dropout", x, share, mode, name=name)


def build(config: Config) -> onnx.ModelProto:
    """The forward graph, opset 20."""
    graph = Graph(np.random.default_rng(config.seed))
    width, context = config.width, config.context
    table = graph.normal("wte.weight", config.vocabulary, width)
    positions = graph.normal("wpe.weight", context, width, deviation=0.01)
    start, axis = graph.tensor("start", np.array([0])), graph.tensor("axis", np.array([0]))
    length = graph.node("Shape", "tokens", name="length", start=1, end=2)
    here = graph.node("Slice", positions, start, length, axis, name="positions")
    x = graph.node("Add", graph.node("Gather", table, "tokens", name="embedding"), here, name="input")
    x = graph.dropout(x, "input.dropout", config.dropout)

    # One mask for all layers: 0 where a token may look, a large negative number where it may not.
    causal = graph.tensor("causal_mask", np.triu(np.full((context, context), -1e9, np.float32), 1))
    twice = graph.node("Concat", length, length, name="square", axis=0)
    corner, axes = graph.tensor("corner", np.array([0, 0])), graph.tensor("axes", np.array([0, 1]))
    mask = graph.node("Slice", causal, corner, twice, axes, name="mask")
    for layer in range(config.layers):
        x = block(graph, config, x, mask, f"h.{layer}")
    x = graph.norm(x, "ln_f", width)
    logits = graph.node("MatMul", x, graph.node("Transpose", table, name="head", perm=[1, 0]), name="logits")

    inputs = [helper.make_tensor_value_info("tokens", TensorProto.INT64, ["batch", "sequence"])]
    shape = ["batch", "sequence", config.vocabulary]
    outputs = [helper.make_tensor_value_info(logits, TensorProto.FLOAT, shape)]
    model = helper.make_model(
        helper.make_graph(graph.nodes, "gpt", inputs, outputs, graph.initializers),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=9,
        producer_name=PRODUCER,
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def block(graph: Graph, config: Config, x: str, mask: str, name: str) -> str:
    """Attention and feed-forward, each on a normalised copy and added back."""
    width, residual = config.width, 0.02 / np.sqrt(2 * config.layers)
    attended = attention(graph, config, graph.norm(x, f"{name}.ln_1", width), mask, f"{name}.attn")
    projected = graph.linear(attended, f"{name}.attn.c_proj", width, width, residual)
    projected = graph.dropout(projected, f"{name}.attn.dropout", config.dropout)
    x = graph.node("Add", x, projected, name=f"{name}.attended")
    inner = graph.linear(graph.norm(x, f"{name}.ln_2", width), f"{name}.mlp.c_fc", width, 4 * width)
    inner = graph.node("Gelu", inner, name=f"{name}.mlp.gelu")
    inner = graph.linear(inner, f"{name}.mlp.c_proj", 4 * width, width, residual)
    inner = graph.dropout(inner, f"{name}.mlp.dropout", config.dropout)
    return graph.node("Add", x, inner, name=f"{name}.output")


def attention(graph: Graph, config: Config, x: str, mask: str, name: str) -> str:
    """Causal self-attention over all heads, before its output projection."""
    heads, size = config.heads, config.width // config.heads
    merged = graph.linear(x, f"{name}.c_attn", config.width, 3 * config.width)
    parts = [f"{name}.q", f"{name}.k", f"{name}.v"]
    graph.nodes.append(helper.make_node("Split", [merged], parts, name=f"{name}.split", axis=-1, num_outputs=3))
    by_head = graph.tensor(f"{name}.by_head", np.array([0, 0, heads, size]))
    flat = graph.tensor(f"{name}.flat", np.array([0, 0, config.width]))
    q, k, v = (graph.node("Reshape", part, by_head, name=f"{part}.split") for part in parts)
    q = graph.node("Transpose", q, name=f"{name}.q.heads", perm=[0, 2, 1, 3])
    k = graph.node("Transpose", k, name=f"{name}.k.heads", perm=[0, 2, 3, 1])
    v = graph.node("Transpose", v, name=f"{name}.v.heads", perm=[0, 2, 1, 3])
    scale = graph.tensor(f"{name}.scale", np.array(size**-0.5, np.float32))
    scores = graph.node("Mul", graph.node("MatMul", q, k, name=f"{name}.dot"), scale, name=f"{name}.scaled")
    weights = graph.node(
        "Softmax", graph.node("Add", scores, mask, name=f"{name}.masked"), name=f"{name}.weights", axis=-1
    )
    weights = graph.dropout(weights, f"{name}.weights.dropout", config.dropout)
    mixed = graph.node("MatMul", weights, v, name=f"{name}.mixed")
    mixed = graph.node("Transpose", mixed, name=f"{name}.merged", perm=[0, 2, 1, 3])
    return graph.node("Reshape", mixed, flat, name=name)


def main() -> None:
    """Write the model file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "build" / "model.onnx")
    for name, value in vars(Config()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    options = vars(parser.parse_args())
    output = options.pop("output")
    if output.exists() and ((head := read_head(output)) is None or head.producer != PRODUCER):
        sys.exit(f"{output} exists and was not written by this program; remove it, or choose another --output")
    output.parent.mkdir(parents=True, exist_ok=True)
    model = build(Config(**options))
    onnx.save(model, output)
    count = sum(int(np.prod(t.dims)) for t in model.graph.initializer if t.data_type == TensorProto.FLOAT)
    print(f"{output}: {count / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
