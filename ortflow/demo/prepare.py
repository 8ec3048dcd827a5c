"""Make what run.yaml reads: points on three spirals, and a network of two hidden layers without any training in it."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.data.write import record_batch, write_set

HERE = Path(__file__).parent
SPIRALS, WIDTH = 3, 64


def points(count: int, seed: int) -> dict[str, np.ndarray]:
    """`count` points: `x` [count, 2], and `labels` [count]."""
    random = np.random.default_rng(seed)
    labels = random.integers(SPIRALS, size=count)
    radius = random.uniform(0.1, 1, size=count)
    angle = 5 * radius + 2 * np.pi * labels / SPIRALS + random.normal(0, 0.3, size=count)
    x = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return {"x": x.astype(np.float32), "labels": labels.astype(np.int64)}


def network() -> onnx.ModelProto:
    """`x` [batch, 2] to `logits` [batch, 3]."""
    random = np.random.default_rng(0)
    nodes, weights, value = [], [], "x"
    sizes = [2, WIDTH, WIDTH, SPIRALS]
    for number, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        weight = random.normal(0, np.sqrt(2 / inputs), (inputs, outputs)).astype(np.float32)
        weights += [
            numpy_helper.from_array(weight, f"layer{number}.weight"),
            numpy_helper.from_array(np.zeros(outputs, np.float32), f"layer{number}.bias"),
        ]
        last = number == len(sizes) - 2
        result = "logits" if last else f"hidden{number}"
        nodes.append(helper.make_node("Gemm", [value, weights[-2].name, weights[-1].name], [result]))
        if not last:
            nodes.append(helper.make_node("Relu", [result], [f"{result}.relu"]))
        value = result if last else f"{result}.relu"
    graph = helper.make_graph(
        nodes,
        "spirals",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 2])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", SPIRALS])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


if __name__ == "__main__":
    for name, count, seed in (("train", 1600, 1), ("eval", 400, 2)):
        write_set(HERE / f"{name}.arrow", [record_batch(points(count, seed))], replace=True)
    onnx.save(network(), HERE / "model.onnx")
