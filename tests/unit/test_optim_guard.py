"""A guarded update: where a gradient is NaN nothing changes, elsewhere it is the update itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto

from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.onnx_runtime import onnxruntime as ort
from ortflow.workflow.optim.builder import Builder
from ortflow.workflow.optim.gradient import FACTOR
from ortflow.workflow.optim.graph import optimizer_graph
from ortflow.workflow.optim.guard import CHANGES, guarded
from ortflow.workflow.optim.segments import Segment
from ortflow.workflow.spec.optimizers import Adam, Optimizer, Sgd

Array = npt.NDArray[Any]
COUNT = 64
SEGMENTS = [Segment(0, COUNT, 0.1), Segment(COUNT, 2 * COUNT, 0.0)]
OPTIMIZERS: list[Optimizer] = [
    Sgd(name="sgd", lr=0.1),
    Sgd(name="sgd", lr=0.1, momentum=0.9),
    Adam(name="adamw", lr=0.1),
]


def values_of(model: onnx.ModelProto) -> dict[str, Array]:
    """Random inputs, the same for the same names; moments and rates are positive."""
    found: dict[str, Array] = {"learning_rate": np.array([0.1], np.float32), "step": np.array([3])}
    for value in model.graph.input:
        if value.name not in found:
            random = np.random.default_rng(sum(map(ord, value.name)))
            found[value.name] = random.random(value.type.tensor_type.shape.dim[0].dim_value).astype(np.float32)
    return {value.name: found[value.name] for value in model.graph.input}


def run(model: onnx.ModelProto, given: dict[str, Array]) -> dict[str, Array]:
    onnx.checker.check_model(model)
    session = ort.InferenceSession(compose(model).SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, given), strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: f"{optimizer.name} {optimizer.lr}")
@pytest.mark.parametrize("factor", [None, 0.5])
def test_nothing_changes_where_the_gradient_is_nan(optimizer: Optimizer, factor: float | None) -> None:
    plain = optimizer_graph(optimizer, SEGMENTS)
    before = plain.SerializeToString()
    model = guarded(plain, multiplied=factor is not None)
    assert plain.SerializeToString() == before
    given = values_of(model)
    assert (FACTOR in given) == (factor is not None)
    assert ("step" in given) == (optimizer.name == "adamw"), "what is not read is no input"
    gradients = {name: array for name, array in values_of(plain).items() if name.startswith("gradients.")}
    scaled = {name: array * np.float32(factor or 1.0) for name, array in gradients.items()}
    expected = run(plain, {**values_of(plain), **scaled})
    if factor is not None:
        given[FACTOR] = np.array([factor], np.float32)
    found = run(model, given)
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_array_equal(found[name], expected[name])
    given["gradients.1"][5] = np.nan
    kept = run(model, given)
    for name, array in kept.items():
        if name.endswith(".1.out"):
            old = given[name.removesuffix(".out")]
            assert array[5] == old[5], name
            assert (np.delete(array, 5) == np.delete(found[name], 5)).all(), name
            assert found[name][5] != old[5], name
        else:
            np.testing.assert_array_equal(array, found[name])
    if factor is not None:
        # A gradient that is infinite on another rank makes the factor NaN: then nothing changes at all.
        for name, array in run(model, {**given, FACTOR: np.array([np.nan], np.float32)}).items():
            np.testing.assert_array_equal(array, given[name.removesuffix(".out")])


def test_what_has_no_gradient_of_its_own_is_not_guarded() -> None:
    build = Builder("test")
    change, parameters = build.input("change.0", COUNT), build.input("parameters.0", COUNT)
    norms = build("Neg", parameters, output="norms")
    build.output("norms", COUNT)
    # A buffer is read before its new value is made, so the difference comes from what has read it.
    build("Neg", build("Add", norms, change), output="parameters.0.out")
    build.output("parameters.0.out", COUNT)
    build("Neg", change, output="sum.0.out")  # no input has this name
    build.output("sum.0.out", COUNT)
    build.input("other.0", COUNT, TensorProto.FLOAT)
    model = guarded(build.model(), change=CHANGES)
    assert [value.name for value in model.graph.input] == ["change.0", "parameters.0"]
    given = values_of(model)
    given["change.0"][7] = np.nan
    found = run(model, given)
    assert found["parameters.0.out"][7] == given["parameters.0"][7]
    assert np.isnan(found["sum.0.out"][7])
    np.testing.assert_array_equal(found["norms"], -given["parameters.0"])
    by_gradients = run(guarded(build.model()), given)
    assert np.isnan(by_gradients["parameters.0.out"][7])
