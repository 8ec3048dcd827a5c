"""Small transformers as graphs, without PyTorch: heads, groups of heads, packed weights, gates, ties, as tests want."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.edit import Editor, make_outputs, scalar
from ortflow.workflow.graph.objective.modes import train_mode
from ortflow.workflow.graph.types import LOSS_SUM, LOSS_WEIGHT, SEED

Array = npt.NDArray[Any]


@dataclass
class Sizes:
    """Of one transformer."""

    heads: int = 4
    groups: int = 4
    """Heads of keys and values."""
    head: int = 4
    hidden: int = 16
    vocabulary: int = 70
    layers: int = 2
    tokens: int = 5
    packed: bool = False
    """One weight for queries, keys and values; needs `groups` = `heads`."""
    gated: bool = False
    tied: bool = True
    bias: bool = True
    relative: bool = False
    """A bias for each head and distance of tokens, from one table for all layers."""
    head_norm: bool = False
    dropout: float = 0.0
    smoothing: float = 0.0
    turned: bool = True
    """Weights as PyTorch's Linear has them: [outputs, inputs]."""

    @property
    def width(self) -> int:
        """Of the residual stream."""
        return self.heads * self.head


@dataclass
class Model:
    """A forward graph with its loss, and what it reads."""

    proto: onnx.ModelProto
    tensors: dict[str, Array]
    batch: dict[str, Array] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors."""
        return {name: array.shape for name, array in self.tensors.items()}

    @property
    def given(self) -> dict[str, Array]:
        """All inputs."""
        return {**self.tensors, **self.batch}


def drawing_by_seed(model: Model) -> Model:
    """The same with dropouts that ortflow's kernels compute, from a seed in the batch."""
    proto = onnx.ModelProto.FromString(model.proto.SerializeToString())
    train_mode(proto.graph)
    return Model(proto, model.tensors, {**model.batch, SEED: np.array([17])})


class _Builder:
    def __init__(self, sizes: Sizes, seed: int) -> None:
        self.sizes, self.random = sizes, np.random.default_rng(seed)
        self.graph = helper.make_graph([], "transformer", [], [])
        self.edit = Editor(self.graph)
        self.tensors: dict[str, Array] = {}

    def weight(self, name: str, *dims: int, around: float = 0.0) -> str:
        """A parameter."""
        if name not in self.tensors:
            values = around + self.random.standard_normal(dims) / np.sqrt(dims[0])
            self.tensors[name] = values.astype(np.float32)
            self.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, dims))
        return name

    def linear(self, x: str, name: str, inputs: int, outputs: int) -> str:
        """x W + b, as an exporter writes it."""
        edit = self.edit
        if self.sizes.turned:
            turned = edit("Transpose", self.weight(f"{name}.weight", outputs, inputs), perm=[1, 0])
            y = edit("MatMul", x, turned)
            return edit("Add", y, self.weight(f"{name}.bias", outputs)) if self.sizes.bias else y
        rows = edit("Reshape", x, edit.ints(-1, inputs))
        biases = [self.weight(f"{name}.bias", outputs)] if self.sizes.bias else []
        y = edit("Gemm", rows, self.weight(f"{name}.weight", inputs, outputs), *biases)
        return edit("Reshape", y, edit.ints(-1, self.sizes.tokens, outputs))

    def norm(self, x: str, name: str, width: int) -> str:
        """Layer norm over the last axis."""
        scale, bias = self.weight(f"{name}.weight", width, around=1.0), self.weight(f"{name}.bias", width)
        return self.edit("LayerNormalization", x, scale, bias, axis=-1, epsilon=1e-5)

    def drop(self, x: str) -> str:
        """Dropout in training mode."""
        if not self.sizes.dropout:
            return x
        edit = self.edit
        made = [edit.fresh("dropped"), edit.fresh("mask")]
        ratio, on = edit.constant(self.sizes.dropout), edit.constant(True, "bool")
        return edit.write("Dropout", [x, ratio, on], made)[0]

    def heads(self, x: str, count: int) -> str:
        """[batch, tokens, width] -> [batch, heads, tokens, head]; the batch's size is computed."""
        edit, sizes = self.edit, self.sizes
        batch = edit("Slice", edit("Shape", x), edit.ints(0), edit.ints(1))
        shape = edit("Concat", batch, edit.ints(sizes.tokens, -1, sizes.head), axis=0)
        return edit("Transpose", edit("Reshape", x, shape), perm=[0, 2, 1, 3])

    def spread(self, x: str) -> str:
        """Each head of keys or values for as many heads of queries."""
        edit, sizes = self.edit, self.sizes
        if sizes.groups == sizes.heads:
            return x
        times = sizes.heads // sizes.groups
        batch = edit("Slice", edit("Shape", x), edit.ints(0), edit.ints(1))
        shape = edit("Concat", batch, edit.ints(sizes.groups, times, sizes.tokens, sizes.head), axis=0)
        wide = edit("Expand", edit("Unsqueeze", x, edit.ints(2)), shape)
        return edit("Reshape", wide, edit.ints(-1, sizes.heads, sizes.tokens, sizes.head))

    def attention(self, x: str, name: str) -> str:
        """Over all tokens."""
        edit, sizes = self.edit, self.sizes
        kept = sizes.groups * sizes.head
        if sizes.packed:
            made = [edit.fresh("packed") for _ in range(3)]
            all_three = self.linear(x, f"{name}.qkv", sizes.width, 3 * sizes.width)
            q, k, v = edit.write("Split", [all_three, edit.ints(*[sizes.width] * 3)], made, axis=2)
        else:
            q = self.linear(x, f"{name}.q", sizes.width, sizes.width)
            k, v = (self.linear(x, f"{name}.{each}", sizes.width, kept) for each in "kv")
        q, k, v = self.heads(q, sizes.heads), self.heads(k, sizes.groups), self.heads(v, sizes.groups)
        if sizes.head_norm:
            q, k = (self.norm(value, f"{name}.{each}_norm", sizes.head) for each, value in (("q", q), ("k", k)))
        k, v = self.spread(k), self.spread(v)
        scores = edit("MatMul", q, edit("Transpose", k, perm=[0, 1, 3, 2]))
        scores = edit("Mul", scores, edit.constant(sizes.head**-0.5))
        if sizes.relative:
            places = np.abs(np.subtract.outer(np.arange(sizes.tokens), np.arange(sizes.tokens)))
            table = self.weight("relative", sizes.tokens, sizes.heads)
            bias = edit("Transpose", edit("Gather", table, edit.constant(places, "int64"), axis=0), perm=[2, 0, 1])
            scores = edit("Add", scores, edit("Unsqueeze", bias, edit.ints(0)))
        mixed = edit("MatMul", self.drop(edit("Softmax", scores, axis=-1)), v)
        joined = edit("Transpose", mixed, perm=[0, 2, 1, 3])
        batch = edit("Slice", edit("Shape", joined), edit.ints(0), edit.ints(1))
        shape = edit("Concat", batch, edit.ints(sizes.tokens, sizes.width), axis=0)
        return self.linear(edit("Reshape", joined, shape), f"{name}.out", sizes.width, sizes.width)

    def mlp(self, x: str, name: str) -> str:
        """Two products, or three with a gate."""
        edit, sizes = self.edit, self.sizes
        up = self.linear(x, f"{name}.up", sizes.width, sizes.hidden)
        if sizes.gated:
            gate = self.linear(x, f"{name}.gate", sizes.width, sizes.hidden)
            up = edit("Mul", edit("Mul", gate, edit("Sigmoid", gate)), up)
        else:
            up = edit("Tanh", up)
        return self.drop(self.linear(self.drop(up), f"{name}.down", sizes.hidden, sizes.width))

    def loss(self, logits: str) -> None:
        """Cross-entropy, as `objective.loss` attaches it."""
        edit, sizes = self.edit, self.sizes
        rows = edit("Reshape", logits, edit.ints(-1, sizes.vocabulary))
        labels = edit("Reshape", "labels", edit.ints(-1))
        counted = edit.cast(edit("Not", edit("Equal", labels, edit.constant(-100, "int64"))))
        edit.total(counted, LOSS_WEIGHT)
        names = [edit.fresh("hard") if sizes.smoothing else LOSS_SUM, edit.fresh("log_probability")]
        edit.write("SoftmaxCrossEntropyLoss", [rows, labels], names, reduction="sum", ignore_index=-100)
        if sizes.smoothing:
            summed = edit("ReduceSum", edit("LogSoftmax", rows, axis=1), edit.ints(1), keepdims=0)
            soft = edit("ReduceSum", edit("Mul", summed, counted), keepdims=0)
            soft = edit("Mul", soft, edit.constant(-sizes.smoothing / sizes.vocabulary))
            edit("Add", edit("Mul", names[0], edit.constant(1 - sizes.smoothing)), soft, output=LOSS_SUM)


def transformer(sizes: Sizes, seed: int = 0, batch: int = 3) -> Model:
    """The model with random weights and a batch."""
    builder = _Builder(sizes, seed)
    edit, graph = builder.edit, builder.graph
    for name in ("tokens", "labels"):
        graph.input.append(helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", sizes.tokens]))
    table = builder.weight("table", sizes.vocabulary, sizes.width)
    x = edit("Add", edit("Gather", table, "tokens", axis=0), builder.weight("places", sizes.tokens, sizes.width))
    x = builder.drop(x)
    for layer in range(sizes.layers):
        name = f"layer{layer}"
        x = edit("Add", x, builder.attention(builder.norm(x, f"{name}.norm1", sizes.width), f"{name}.attention"))
        x = edit("Add", x, builder.mlp(builder.norm(x, f"{name}.norm2", sizes.width), f"{name}.mlp"))
    x = builder.norm(x, "norm", sizes.width)
    head = table if sizes.tied else builder.weight("head", sizes.vocabulary, sizes.width)
    builder.loss(edit("MatMul", x, edit("Transpose", head, perm=[1, 0])))
    make_outputs(graph, [scalar(LOSS_SUM), scalar(LOSS_WEIGHT)])
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    proto = helper.make_model(graph, opset_imports=imports, ir_version=9)
    shapes.infer(proto)
    random = np.random.default_rng(seed + 1)
    tokens = random.integers(0, sizes.vocabulary, (batch, sizes.tokens))
    labels = np.where(random.random(tokens.shape) < 0.2, -100, random.integers(0, sizes.vocabulary, tokens.shape))
    return Model(proto, builder.tensors, {"tokens": tokens, "labels": labels})
