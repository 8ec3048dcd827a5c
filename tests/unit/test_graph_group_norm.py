"""Group and instance normalisation in every form that exporters write: detection, and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_build_models import run_graph, value
from kernels import LIBRARY, needs_kernels, off
from onnx import helper, numpy_helper

from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.graph.normalize.prepare import prepare
from ortflow.workflow.graph.optimize import rewrites
from ortflow.workflow.kernels.graph import with_kernels

RNG = np.random.default_rng(9)
EPSILON, GROUPS, CHANNELS = 1e-2, 3, 6
GROUPED = "r = Reshape x split; n = InstanceNormalization r ones zeros;"
BEHIND = "b = Reshape n whole; m = Mul b k_scale; y = Add m k_bias"
FORMS = {
    "torchscript": f"{GROUPED} s = Shape x; b = Reshape n s; k = Unsqueeze scale behind; m = Mul b k;"
    "u = Unsqueeze bias behind; y = Add m u",
    "dynamo": f"{GROUPED} s = Shape x; b = Reshape n s; m = Mul k_scale b; y = Add k_bias m",
    "of a known size": f"{GROUPED} {BEHIND}",
    "opset 21": "y = GroupNormalization x scale bias",
    "instance": "y = InstanceNormalization x scale bias",
}
OTHERS = {
    "a scale of its own": f"{GROUPED.replace('ones', 'other')} {BEHIND}",
    "a bias of its own": f"{GROUPED.replace('zeros', 'ones')} {BEHIND}",
    "without a bias": f"{GROUPED} b = Reshape n whole; y = Mul b k_scale",
    "a scale for each pixel": f"{GROUPED} b = Reshape n whole; m = Mul b pixels; y = Add m k_bias",
    "read twice": f"{GROUPED} b = Reshape n whole; m = Mul b k_scale; a = Add m k_bias; y = Add a b",
    "another shape": f"{GROUPED} t = Reshape n turned; b = Transpose t; m = Mul b k_scale; y = Add m k_bias",
}
"""Of these, the normalisation of the groups alone is one node."""


def dims_of(form: str, behind: Sequence[int]) -> dict[str, tuple[int, ...]]:
    whole = (4, CHANNELS, *behind)
    spread = (CHANNELS, *[1] * len(behind))
    dims = {"x": whole, "scale": (CHANNELS,), "bias": (CHANNELS,), "k_scale": spread, "k_bias": spread, "g": whole}
    return {**dims, "pixels": whole}


def model(lines: str, behind: Sequence[int], batch: int | str = 4) -> onnx.ModelProto:
    """loss = sum(g * formula(x)), prepared as a file of the user's is."""
    shapes, nodes = dims_of(lines, behind), []
    for place, line in enumerate(lines.split(";")):
        result, operator, *inputs = line.replace("=", " ").split()
        flags: dict[str, object] = {"epsilon": EPSILON} if operator.endswith("Normalization") else {}
        flags |= {"num_groups": GROUPS} if operator == "GroupNormalization" else {}
        flags |= {"perm": [0, 2, 1, *range(3, 2 + len(behind))]} if operator == "Transpose" else {}
        nodes.append(helper.make_node(operator, inputs, [result], name=f"/{place}", **flags))
    nodes.append(helper.make_node("Mul", ["y", "g"], ["weighted"]))
    nodes.append(helper.make_node("ReduceSum", ["weighted"], ["loss"], keepdims=0))
    read = {name for node in nodes for name in node.input}
    inputs = [value(n, [batch if len(d) > 2 and d[0] == 4 else d[0], *d[1:]]) for n, d in shapes.items() if n in read]
    whole = shapes["x"]
    constants = {
        "split": np.array([0, GROUPS, -1]), "behind": np.arange(1, 1 + len(behind)),
        "ones": np.ones(GROUPS, np.float32),
        "zeros": np.zeros(GROUPS, np.float32), "other": np.full(GROUPS, 2, np.float32), "whole": np.array(whole),
        "turned": np.array([4, *whole[2:3], CHANNELS, *whole[3:]]),
    }  # fmt: skip
    tensors = [numpy_helper.from_array(array, name) for name, array in constants.items() if name in read]
    graph = helper.make_graph(nodes, "formula", inputs, [value("loss", [])], tensors)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return prepare(helper.make_model(graph, opset_imports=imports, ir_version=10))[0]


def trained(forward: onnx.ModelProto, parameters: list[str], path: Path, library: Path | None) -> onnx.GraphProto:
    rewrites.before(forward.graph)
    made, _ = differentiate(forward, parameters, "loss")
    if library is not None:
        made = with_kernels(made)
    rewrites.after(made.graph)
    made = compose(made)
    onnx.save(made, path)
    return made.graph


@pytest.mark.parametrize("library", [None, pytest.param(LIBRARY.path, marks=needs_kernels)], ids=["standard", "ours"])
@pytest.mark.parametrize("behind", [(5, 7), (16,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_one_node_with_the_right_gradient(
    form: str, behind: tuple[int, ...], library: Path | None, tmp_path: Path
) -> None:
    batch = 4 if form == "of a known size" else "batch"
    forward = model(FORMS[form], behind, batch)
    rewrites.before(forward.graph)
    assert [n.op_type for n in forward.graph.node if n.op_type not in ("Unsqueeze", "Identity")] == [
        "GroupNormalization", "Mul", "ReduceSum"
    ]  # fmt: skip
    shapes = dims_of(form, behind)
    feeds = {name: (RNG.normal(1, 2, size=dims)).astype("float32") for name, dims in shapes.items()}
    forward = model(FORMS[form], behind, batch)
    names = {i.name for i in forward.graph.input}
    vectors = [n for n in ("scale", "bias", "k_scale", "k_bias") if n in names]
    graph = trained(forward, ["x", *vectors], tmp_path / "m.onnx", library)
    kinds = {node.domain for node in graph.node}
    assert kinds == ({"", "ortflow"} if library is not None else {""})
    found = run_graph(tmp_path / "m.onnx", {n: feeds[n] for n in names}, kernels=library)
    groups = CHANNELS if form == "instance" else GROUPS
    x, g = (feeds[name].astype("d").reshape(4, groups, CHANNELS // groups, -1) for name in ("x", "g"))
    scale, bias = (feeds[name].astype("d").reshape(1, groups, -1, 1) for name in vectors)
    inverse = 1 / np.sqrt(x.var((2, 3), keepdims=True) + EPSILON)
    normal = (x - x.mean((2, 3), keepdims=True)) * inverse
    assert found["loss"] == pytest.approx((g * (normal * scale + bias)).sum(), rel=1e-4)
    d = g * scale
    means = d.mean((2, 3), keepdims=True), (d * normal).mean((2, 3), keepdims=True)
    expected = {"x": (d - means[0] - normal * means[1]) * inverse, vectors[0]: (g * normal).sum((0, 3))}
    expected[vectors[1]] = g.sum((0, 3))
    for name, array in expected.items():
        assert off(found[f"{name}_grad"], array.reshape(shapes[name])) < 3e-6, name


@pytest.mark.parametrize("library", [None, pytest.param(LIBRARY.path, marks=needs_kernels)], ids=["standard", "ours"])
@pytest.mark.parametrize("form", OTHERS)
def test_what_is_another_formula_keeps_it(form: str, library: Path | None, tmp_path: Path) -> None:
    """Value and gradient of the remaining nodes are those of the original graph."""
    behind = (5, 7)
    forward = model(OTHERS[form], behind)
    feeds = {name: RNG.normal(1, 2, size=dims).astype("float32") for name, dims in dims_of(form, behind).items()}
    feeds = {i.name: feeds[i.name] for i in forward.graph.input}
    made, _ = differentiate(forward, list(feeds), "loss")
    onnx.save(compose(made), tmp_path / "plain.onnx")
    expected = run_graph(tmp_path / "plain.onnx", feeds)
    trained(forward, list(feeds), tmp_path / "m.onnx", library)
    rewrites.before(fused := model(OTHERS[form], behind).graph)
    (node,) = (node for node in fused.node if node.op_type == "GroupNormalization")
    assert node.output[0] == "n"
    found = run_graph(tmp_path / "m.onnx", feeds, kernels=library)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert off(found[name], array) < 3e-6, name


@pytest.mark.parametrize("library", [None, pytest.param(LIBRARY.path, marks=needs_kernels)], ids=["standard", "ours"])
def test_a_norm_that_nothing_trained_lies_before(library: Path | None, tmp_path: Path) -> None:
    forward = model(FORMS["dynamo"], (5, 7))
    feeds = {name: RNG.normal(1, 2, size=dims).astype("float32") for name, dims in dims_of("", (5, 7)).items()}
    feeds = {i.name: feeds[i.name] for i in forward.graph.input}
    onnx.save(forward, tmp_path / "plain.onnx")
    trained(forward, ["g"], tmp_path / "m.onnx", library)
    found = run_graph(tmp_path / "m.onnx", feeds, kernels=library)
    assert found["loss"] == pytest.approx(run_graph(tmp_path / "plain.onnx", feeds)["loss"], rel=1e-5)


def test_channels_that_no_group_divides_stay() -> None:
    """Reshape accepts them if the pixels allow it; a kernel for groups of channels cannot."""
    forward = model(FORMS["dynamo"], (4, 4))
    for tensor in forward.graph.initializer:
        if tensor.name == "split":
            tensor.CopyFrom(numpy_helper.from_array(np.array([0, 4, -1]), "split"))
        elif tensor.name in ("ones", "zeros"):
            number = np.full(4, tensor.name == "ones", np.float32)
            tensor.CopyFrom(numpy_helper.from_array(number, tensor.name))
    del forward.graph.value_info[:]
    forward = onnx.shape_inference.infer_shapes(forward)
    rewrites.before(forward.graph)
    kinds = [node.op_type for node in forward.graph.node]
    assert "Add" in kinds
    assert "Mul" in kinds
