"""The cross-entropy and its gradient as one node: where that is possible, and that it computes the same."""

from __future__ import annotations

import numpy as np
import onnx
from cuda_composed import check_same
from onnx import TensorProto, helper

from ortflow.workflow.fusion.losses import join_losses
from ortflow.workflow.graph.domains import CUDA_DOMAIN

ROWS, CLASSES = 5, 13


def node(operator: str, given: list[str], made: list[str], domain: str = CUDA_DOMAIN, **flags: int) -> onnx.NodeProto:
    return helper.make_node(operator, given, made, made[0], domain=domain, **flags)


def loss(ignore: int = -1) -> onnx.NodeProto:
    return node("CrossEntropy", ["labels", "x"], ["loss", "lse"], ignore=ignore)


def gradient(made: str = "dx", of: str = "g", ignore: int = -1, scores: str = "x") -> onnx.NodeProto:
    return node("CrossEntropyGrad", ["labels", of, scores, "lse"], [made], ignore=ignore)


def check(*nodes: onnx.NodeProto, outputs: tuple[str, ...] = ("loss", "dx")) -> list[str]:
    """Check that the graph computes the same with joined losses; its operators after that."""
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "graph",
        [info("x", TensorProto.FLOAT, [ROWS, CLASSES]), info("labels", TensorProto.INT64, [ROWS]),
         info("g", TensorProto.FLOAT, [])],
        [info(name, TensorProto.FLOAT, None) for name in outputs],
    )  # fmt: skip
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(CUDA_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=9)
    feeds = {
        "x": np.random.default_rng(0).normal(0, 20, (ROWS, CLASSES)).astype("float32"),
        "labels": np.array([0, -1, 12, 3, -1]),
        "g": np.array(0.5, np.float32),
    }
    return check_same(model, join_losses, feeds)


def test_a_loss_and_its_gradient_are_one_node() -> None:
    assert check(loss(), gradient()) == ["CrossEntropyWithGrad"]


def test_the_gradient_of_the_loss_may_be_computed() -> None:
    scaled = node("Mul", ["g", "g"], ["scaled"], "")
    assert check(loss(), scaled, gradient(of="scaled")) == ["Mul", "CrossEntropyWithGrad"]


def test_a_gradient_that_depends_on_the_loss_is_computed_behind_it() -> None:
    scaled = node("Mul", ["loss", "g"], ["scaled"], "")
    assert check(loss(), scaled, gradient(of="scaled")) == ["CrossEntropy", "Mul", "CrossEntropyGrad"]


def test_logarithms_that_are_read_elsewhere_are_made() -> None:
    apart = ["CrossEntropy", "CrossEntropyGrad"]
    assert check(loss(), gradient(), outputs=("loss", "dx", "lse")) == apart
    assert check(loss(), gradient(), gradient("dx2"), outputs=("loss", "dx", "dx2")) == [*apart, "CrossEntropyGrad"]
    negative = node("Neg", ["lse"], ["less"], "")
    assert check(loss(), gradient(), negative, outputs=("loss", "dx", "less")) == [*apart, "Neg"]
    assert check(loss(), outputs=("loss",)) == ["CrossEntropy"]


def test_a_gradient_of_something_else_stays() -> None:
    same = node("Identity", ["x"], ["x2"], "")
    assert sorted(check(loss(), same, gradient(scores="x2"))) == ["CrossEntropy", "CrossEntropyGrad", "Identity"]
    outputs = [helper.make_tensor_value_info("dx", TensorProto.FLOAT, None)]
    other = helper.make_model(helper.make_graph([loss(-1), gradient(ignore=-2)], "graph", [], outputs))
    assert [one.op_type for one in join_losses(other).graph.node] == ["CrossEntropy", "CrossEntropyGrad"]
