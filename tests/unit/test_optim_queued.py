"""Scaling and update of a step without the host: the same bits, and NaN changes nothing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from ortflow.workflow.fusion.groups import fuse
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.layout import ALIGNMENT
from ortflow.workflow.onnx_runtime import onnxruntime as ort
from ortflow.workflow.optim.gradient import FACTOR, gradient_graph, queued_gradient_graph
from ortflow.workflow.optim.graph import optimizer_graph
from ortflow.workflow.optim.guard import guarded
from ortflow.workflow.optim.segments import Segment
from ortflow.workflow.spec.optimizers import Adagrad, Adam, Lamb, Lion, NAdam, Optimizer, RAdam, RmsProp, Sgd, moments

SEGMENTS = [Segment(0, 3 * ALIGNMENT, 0.1), Segment(3 * ALIGNMENT, 8 * ALIGNMENT, 0.0)]
OPTIMIZERS: list[Optimizer] = [
    Adam(name="adam", lr=1e-3, weight_decay=0.1),
    Adam(name="adamw", lr=1e-3, weight_decay=0.1),
    Lamb(name="lamb", lr=1e-3, weight_decay=0.1),
    Sgd(name="sgd", lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    Sgd(name="sgd", lr=1e-2),
    Lion(name="lion", lr=1e-3, weight_decay=0.1),
    RmsProp(name="rmsprop", lr=1e-3, weight_decay=0.1, momentum=0.9, centered=True),
    Adagrad(name="adagrad", lr=1e-2, weight_decay=0.1),
    NAdam(name="nadam", lr=1e-3, weight_decay=0.1),
    RAdam(name="radam", lr=1e-3, weight_decay=0.1),
]


def run(model: onnx.ModelProto, **feeds: Any) -> dict[str, Any]:
    onnx.checker.check_model(model)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    wanted = {given.name for given in session.get_inputs()}
    names = [made.name for made in session.get_outputs()]
    made = session.run(names, {name: array for name, array in feeds.items() if name in wanted})
    return dict(zip(names, made, strict=True))


def one(number: float) -> Any:
    return np.array([number], np.float32)


@pytest.mark.parametrize("max_norm", [math.inf, 0.1])
def test_without_a_loss_scale_the_bits_are_those_of_the_other_form(max_norm: float) -> None:
    random = np.random.default_rng(0)
    for weight in (1.0, 3.0, 7.0, 1023.0, 8191.0, 0.37):
        gradients = random.normal(size=640).astype(np.float32)
        mine = run(
            queued_gradient_graph(), gradients=gradients, loss=one(2.5), weight=one(weight), loss_scale=one(1),
            max_norm=one(max_norm),
        )  # fmt: skip
        inverse = np.array([1.0 / float(np.float32(weight))], np.float32)
        theirs = run(gradient_graph(), gradients=gradients, inverse_weight=inverse, max_norm=one(max_norm))
        assert mine["useful"] == 1
        for name in ("norm", "gradients.out"):
            np.testing.assert_array_equal(mine[name], theirs[name])
        scaled = run(
            queued_gradient_graph(), gradients=gradients * np.float32(4096), loss=one(2.5), weight=one(weight),
            loss_scale=one(4096), max_norm=one(max_norm),
        )  # fmt: skip
        for name in ("norm", "gradients.out"):
            np.testing.assert_array_equal(scaled[name], mine[name], err_msg="a power of two rounds nothing")


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss": math.nan}, {"loss": math.inf}, {"weight": 0.0}, {"weight": -1.0}, {"weight": math.nan},
        {"gradient": math.nan}, {"gradient": -math.inf}, {"gradient": 3e38},
    ],
    ids=str,
)  # fmt: skip
def test_an_unusable_gradient_is_nan_throughout(wrong: dict[str, float]) -> None:
    gradients = np.zeros(640, np.float32)
    gradients[[0, 77]] = 1, wrong.get("gradient", 1)
    sums = {name: one(wrong.get(name, 1)) for name in ("loss", "weight")}
    made = run(queued_gradient_graph(), gradients=gradients, loss_scale=one(1), max_norm=one(1), **sums)
    assert made["useful"] == 0
    assert np.isnan(made["gradients.out"]).all()


class SquareSum(OpRun):
    """By definition, in place of the GPU's kernel."""

    op_domain = CUDA_DOMAIN

    def _run(self, values: Any) -> tuple[Any]:
        return (np.sum(values.astype(np.float64) ** 2, keepdims=True),)


@pytest.mark.parametrize("loss", [2.5, math.nan])
def test_the_factor_is_what_the_gradients_are_else_multiplied_by(loss: float) -> None:
    feeds = {
        "gradients": np.random.default_rng(1).normal(size=640).astype(np.float32), "loss": one(loss),
        "weight": one(7), "loss_scale": one(2), "max_norm": one(0.1),
    }  # fmt: skip
    plain, fused = run(queued_gradient_graph(), **feeds), queued_gradient_graph(fused=True)
    found = ReferenceEvaluator(fused, new_ops=[SquareSum]).run([FACTOR, "norm", "useful"], feeds)
    np.testing.assert_array_equal(feeds["gradients"] * found[0], plain["gradients.out"])
    np.testing.assert_allclose(found[1], plain["norm"], rtol=1e-6)
    assert found[2] == plain["useful"] == float(not math.isnan(loss))


def feeds_of(optimizer: Optimizer) -> dict[str, Any]:
    random, feeds = np.random.default_rng(3), {"learning_rate": one(1e-2), "step": np.array([3])}
    for number, segment in enumerate(SEGMENTS):
        for name in ("parameters", "gradients", *moments(optimizer)):
            feeds[f"{name}.{number}"] = np.abs(random.normal(size=segment.count)).astype(np.float32)
    return feeds


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_an_update_keeps_what_has_no_gradient_and_is_else_the_same(optimizer: Optimizer) -> None:
    plain = compose(optimizer_graph(optimizer, SEGMENTS))
    feeds = feeds_of(optimizer)
    expected, mine = run(plain, **feeds), run(guarded(plain), **feeds)
    read = {name for node in plain.graph.node for name in node.input}
    assert [value.name for value in guarded(plain).graph.input if value.name not in read] == [], "step of SGD"
    assert list(mine) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(mine[name], array, err_msg=name)
        assert not np.array_equal(array, feeds[name.removesuffix(".out")])
    feeds |= {name: np.full_like(array, np.nan) for name, array in feeds.items() if name.startswith("gradients")}
    for name, array in run(guarded(plain), **feeds).items():
        np.testing.assert_array_equal(array, feeds[name.removesuffix(".out")], err_msg=name)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
@pytest.mark.parametrize("factor", [0.3, math.nan])
def test_an_update_multiplies_the_gradients_itself(optimizer: Optimizer, factor: float) -> None:
    plain = compose(optimizer_graph(optimizer, SEGMENTS))
    feeds = feeds_of(optimizer)
    multiplied = {
        name: array * np.float32(factor) if name.startswith("gradients") else array for name, array in feeds.items()
    }
    expected = run(guarded(plain), **multiplied)
    for name, array in run(guarded(plain, multiplied=True), **feeds, **{FACTOR: one(factor)}).items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_the_guard_costs_no_kernel_where_nodes_are_fused(optimizer: Optimizer) -> None:
    plain = compose(optimizer_graph(optimizer, SEGMENTS))
    before, *behind = (fuse(model)[0] for model in (plain, guarded(plain), guarded(plain, multiplied=True)))
    assert all(len(each.graph.node) <= len(before.graph.node) for each in behind)
