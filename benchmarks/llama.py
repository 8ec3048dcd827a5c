"""A Llama without weights, for cuda_sharded.py: as an ONNX graph in the operators of PyTorch's exporter, and as the
graphs of a run.

Weights are never written to a file: every rank draws those that it holds (`Weights`). Grouped queries, rotary
positions, RMSNorm and SwiGLU as in Llama 3 (Dubey et al. 2024); linear layers without biases, untied output.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper
from step import CLIP, DECAY, RATE, graphs_of

from ortflow.workflow.assembly import build, files
from ortflow.workflow.graph.intake.source import Source
from ortflow.workflow.graph.normalize.fusions import avoid_wrong_forms
from ortflow.workflow.graph.normalize.prepare import prepare
from ortflow.workflow.graph.roles.decide import Role, Roles
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.spec.run import TrainerRunSpec

EPSILON, BASE, DEVIATION = 1e-5, 500_000.0, 0.02
Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Sizes:
    """Of the decoder."""

    layers: int = 28
    width: int = 3072
    inner: int = 8192
    heads: int = 24
    groups: int = 8
    """Heads of keys and values."""
    context: int = 2048
    vocabulary: int = 32_000

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.width // self.heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameters in the order of their use."""
        width, inner, shared = self.width, self.inner, self.groups * self.head
        block = {
            "ln_1.weight": (width,), "q.weight": (width, width), "k.weight": (shared, width),
            "v.weight": (shared, width), "o.weight": (width, width), "ln_2.weight": (width,),
            "gate.weight": (inner, width), "up.weight": (inner, width), "down.weight": (width, inner),
        }  # fmt: skip
        found: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocabulary, width)}
        found |= {f"layers.{layer}.{name}": shape for layer in range(self.layers) for name, shape in block.items()}
        return {**found, "norm.weight": (width,), "head.weight": (self.vocabulary, width)}


class Weights(Mapping[str, Array]):
    """Fresh weights by name, drawn when they are asked for, the same on every rank and in every program."""

    def __init__(self, sizes: Sizes) -> None:
        self._shapes = sizes.shapes()

    def __getitem__(self, name: str) -> Array:
        shape = self._shapes[name]
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        random = np.random.Generator(np.random.SFC64(zlib.crc32(name.encode())))
        drawn = random.random(shape, dtype=np.float32)
        drawn -= np.float32(0.5)
        drawn *= np.float32(DEVIATION * 12**0.5)
        return drawn

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def frequencies(sizes: Sizes) -> npt.NDArray[np.float64]:
    """Of the rotary positions [head / 2]."""
    return np.asarray(BASE ** (-np.arange(0, sizes.head, 2) / sizes.head))


def rotary(sizes: Sizes) -> tuple[Array, Array]:
    """Cosines and sines [context, head]."""
    steps = frequencies(sizes)
    angles = np.outer(np.arange(sizes.context), np.concatenate([steps, steps]))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


@dataclass
class _Graph:
    sizes: Sizes
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, onnx.TensorProto] = field(default_factory=dict)

    def node(self, operator: str, *inputs: str, name: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(operator, list(inputs), [name], name=f"/{name}", **attributes))
        return name

    def constant(self, name: str, values: Any) -> str:
        self.constants[name] = numpy_helper.from_array(np.asarray(values), name)
        return name

    def numbers(self, *values: int) -> str:
        return self.constant(f"numbers_{'_'.join(map(str, values))}", np.array(values, np.int64))

    def linear(self, x: str, name: str) -> str:
        turned = self.node("Transpose", f"{name}.weight", name=f"{name}.turned", perm=[1, 0])
        return self.node("MatMul", x, turned, name=f"{name}.product")

    def norm(self, x: str, name: str) -> str:
        square = self.node("Pow", x, self.constant("two", np.float32(2)), name=f"{name}.square")
        mean = self.node("ReduceMean", square, self.numbers(-1), name=f"{name}.mean", keepdims=1)
        around = self.node("Add", mean, self.constant("epsilon", np.float32(EPSILON)), name=f"{name}.around")
        inverse = self.node("Reciprocal", self.node("Sqrt", around, name=f"{name}.root"), name=f"{name}.inverse")
        scaled = self.node("Mul", x, inverse, name=f"{name}.scaled")
        return self.node("Mul", f"{name}.weight", scaled, name=f"{name}.output")

    def heads(self, x: str, name: str, count: int) -> str:
        shape = self.numbers(-1, self.sizes.context, count, self.sizes.head)
        split = self.node("Reshape", x, shape, name=f"{name}.split", allowzero=1)
        return self.node("Transpose", split, name=f"{name}.heads", perm=[0, 2, 1, 3])

    def turned(self, x: str, name: str) -> str:
        """Rotary positions."""
        half, end, last, one = (self.numbers(each) for each in (self.sizes.head // 2, 2**63 - 1, 3, 1))
        first = self.node("Slice", x, self.numbers(0), half, last, one, name=f"{name}.first")
        second = self.node("Slice", x, half, end, last, one, name=f"{name}.second")
        other = self.node("Concat", self.node("Neg", second, name=f"{name}.neg"), first, name=f"{name}.cat", axis=-1)
        cos, sin = (self.node("Unsqueeze", each, one, name=f"{name}.{each}") for each in ("cos", "sin"))
        along = self.node("Mul", x, cos, name=f"{name}.along")
        return self.node("Add", along, self.node("Mul", other, sin, name=f"{name}.across"), name=f"{name}.rotated")

    def repeated(self, x: str, name: str) -> str:
        """Keys or values of a group for each of its heads."""
        sizes, two = self.sizes, self.numbers(2)
        parts = (sizes.groups, sizes.heads // sizes.groups, sizes.context, sizes.head)
        shape = self.node("Concat", "batch_size", *(self.numbers(each) for each in parts), name=f"{name}.shape", axis=0)
        wide = self.node("Expand", self.node("Unsqueeze", x, two, name=f"{name}.one"), shape, name=f"{name}.wide")
        flat = self.numbers(-1, sizes.heads, sizes.context, sizes.head)
        return self.node("Reshape", wide, flat, name=f"{name}.repeated", allowzero=1)

    def block(self, x: str, mask: str, name: str) -> str:
        sizes = self.sizes
        normal = self.norm(x, f"{name}.ln_1")
        q = self.turned(self.heads(self.linear(normal, f"{name}.q"), f"{name}.q", sizes.heads), f"{name}.q")
        k = self.turned(self.heads(self.linear(normal, f"{name}.k"), f"{name}.k", sizes.groups), f"{name}.k")
        v = self.heads(self.linear(normal, f"{name}.v"), f"{name}.v", sizes.groups)
        k, v = self.repeated(k, f"{name}.k"), self.repeated(v, f"{name}.v")
        scale = self.constant("scale", np.float32(sizes.head**-0.25))
        turned = self.node("Transpose", k, name=f"{name}.k.columns", perm=[0, 1, 3, 2])
        q, k = (self.node("Mul", each, scale, name=f"{each}.scaled") for each in (q, turned))
        scores = self.node("MatMul", q, k, name=f"{name}.scores")
        weights = self.node("Softmax", self.node("Add", scores, mask, name=f"{name}.masked"), name=f"{name}.weights")
        mixed = self.node("MatMul", weights, v, name=f"{name}.mixed")
        mixed = self.node("Transpose", mixed, name=f"{name}.merged", perm=[0, 2, 1, 3])
        mixed = self.node("Reshape", mixed, self.numbers(-1, sizes.context, sizes.width), name=f"{name}.attended")
        x = self.node("Add", x, self.linear(mixed, f"{name}.o"), name=f"{name}.between")
        normal = self.norm(x, f"{name}.ln_2")
        gate = self.linear(normal, f"{name}.gate")
        active = self.node("Mul", gate, self.node("Sigmoid", gate, name=f"{name}.sigmoid"), name=f"{name}.silu")
        inner = self.node("Mul", active, self.linear(normal, f"{name}.up"), name=f"{name}.inner")
        return self.node("Add", x, self.linear(inner, f"{name}.down"), name=f"{name}.output")


def model_of(sizes: Sizes) -> onnx.ModelProto:
    """Tokens to logits; parameters are inputs."""
    graph, context = _Graph(sizes), sizes.context
    steps = graph.constant("inverse_frequencies", frequencies(sizes).astype(np.float32))
    places = graph.constant("positions", np.arange(context, dtype=np.float32)[None, :, None])
    angles = graph.node("Mul", places, steps, name="angles")
    angles = graph.node("Concat", angles, angles, name="all_angles", axis=-1)
    for operator in ("Cos", "Sin"):
        graph.node(operator, angles, name=operator.lower())
    causal = graph.constant("causal_mask", np.triu(np.full((context, context), -1e9, np.float32), 1))
    graph.node("Shape", "tokens", name="batch_size", start=0, end=1)
    length = graph.node("Shape", "tokens", name="length", start=1, end=2)
    square = graph.node("Concat", length, length, name="square", axis=0)
    mask = graph.node("Slice", causal, graph.numbers(0, 0), square, graph.numbers(0, 1), name="mask")
    x = graph.node("Gather", "embed.weight", "tokens", name="embedding")
    for layer in range(sizes.layers):
        x = graph.block(x, mask, f"layers.{layer}")
    logits = graph.linear(graph.norm(x, "norm"), "head")
    inputs = [helper.make_tensor_value_info("tokens", TensorProto.INT64, ["batch", context])]
    inputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in sizes.shapes().items()]
    outputs = [helper.make_tensor_value_info(logits, TensorProto.FLOAT, ["batch", context, sizes.vocabulary])]
    made = helper.make_graph(graph.nodes, "llama", inputs, outputs, list(graph.constants.values()))
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def source_of(sizes: Sizes) -> Source:
    """What ortflow makes of a model file, with tensors of no memory."""
    shapes = sizes.shapes()
    prepared, notes = prepare(model_of(sizes), "llama")
    avoid_wrong_forms(prepared)
    kept = [value for value in prepared.graph.input if value.name not in shapes]
    del prepared.graph.input[:]
    prepared.graph.input.extend(kept)
    roles = [Role(name, shape, "trained", "a parameter", "FLOAT", "certain") for name, shape in shapes.items()]
    roles += [
        Role(each.name, tuple(each.dims), "constant", "a constant", "FLOAT", "certain")
        for each in prepared.graph.initializer
    ]
    tensors = {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}
    return Source(prepared, tensors, Roles(roles), frozenset({"labels"}), tuple(notes), ())


def spec_of(batch: int, ranks: int, zero: int, recompute: str | None, *, on_gpus: bool = True) -> TrainerRunSpec:
    """The run file."""
    return TrainerRunSpec.model_validate(
        {
            "name": "benchmark",
            "model": {
                "path": "llama.onnx", "loss": {"kind": "cross_entropy"},
                **({"recompute": recompute} if recompute else {}),
            },
            "data": {"train": {"path": "none"}, "micro_batch": batch, "last_batch": "drop"},
            "train": {
                "steps": 1, "precision": "bf16" if on_gpus else "fp32", "clip_norm": CLIP,
                "optimizer": {"name": "adamw", "lr": RATE, "weight_decay": DECAY},
            },
            "parallel": {"zero": zero},
            "resources": {"gpus_per_rank": int(on_gpus), "ranks_per_node": ranks},
            "export": {"enabled": False},
        }
    )  # fmt: skip


def graphs_in(folder: Path, sizes: Sizes, spec: TrainerRunSpec) -> GraphSet:
    """The graphs of a run, without weights."""
    folder.mkdir(parents=True, exist_ok=True)

    def nothing(path: Path, tensors: Any) -> None:
        path.write_bytes(b"")

    with (
        mock.patch.object(build, "read_source", return_value=source_of(sizes)),
        mock.patch.object(build, "check_constants"),
        mock.patch.object(files, "write_tensors", nothing),
    ):
        return graphs_of(spec, folder, on_gpus=spec.on_gpus)
