"""Gradients at points where a function has two one-sided derivatives: there they are PyTorch's.

Such points are common: padding, zeros from a ReLU, and layers initialised to zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_graph_intake_gradients import Case, gradient_of, ints, session, with_loss

from ortflow.workflow.graph.autodiff.expand import make_differentiable
from ortflow.workflow.graph.normalize.prepare import prepare

AROUND = [0.0, 1.0, -1.0]
ALPHA, GAMMA, E = 1.67326319217681884765625, 1.05070102214813232421875, float(np.exp(-1))


def gradient(case: Case) -> np.ndarray:
    model = prepare(case.model())[0]
    output = model.graph.output[0].name
    ready, _ = make_differentiable(with_loss(model, output, np.ones((), np.float32)), ["i0"], "loss")
    return np.asarray(session(gradient_of(ready, ["i0"])).run(["i0_grad"], {"i0": case.trained[0]})[0])


@pytest.mark.parametrize(
    ("op_type", "x", "expected", "attributes", "constant"),
    [
        ("Relu", AROUND, [0, 1, 0], {}, {}),
        ("LeakyRelu", AROUND, [0.1, 1, 0.1], {"alpha": 0.1}, {}),
        ("PRelu", AROUND, [0.3, 1, 0.3], {}, {1: [0.3]}),
        ("Elu", AROUND, [0.5, 1, 0.5 * E], {"alpha": 0.5}, {}),
        ("Celu", AROUND, [1, 1, float(np.exp(-2))], {"alpha": 0.5}, {}),
        ("Selu", AROUND, [ALPHA * GAMMA, GAMMA, ALPHA * GAMMA * E], {}, {}),
        ("Softplus", AROUND, [0.5, 1 / (1 + E), E / (1 + E)], {}, {}),
        ("Mish", [0.0], [0.6], {}, {}),
        ("Softsign", AROUND, [1, 0.25, 0.25], {}, {}),
        ("Abs", AROUND, [0, 1, -1], {}, {}),
        ("HardSigmoid", [-3.0, 3.0, 0.0], [0, 0, 0.25], {"alpha": 0.25, "beta": 0.25}, {}),
        ("HardSwish", [-3.0, 3.0, 0.0], [0, 1, 0.5], {}, {}),
        ("Clip", [0.0, 6.0, 0.5, 7.0, -1.0], [0, 0, 1, 0, 0], {}, {1: 0.0, 2: 6.0}),
        ("Clip", [0.0, 6.0], [0, 1], {}, {1: 0.0}),
        ("Max", AROUND, [0.5, 1, 0], {}, {1: [0.0]}),
        ("Min", AROUND, [0.5, 0, 1], {}, {1: [0.0]}),
        ("ReduceMax", [[0.0, 0.0, -1.0]], [[0.5, 0.5, 0]], {}, {1: ints(1)}),
        ("ReduceL2", [[0.0, 0.0], [1.0, 0.0]], [[0, 0], [1, 0]], {}, {1: ints(1)}),
        ("GlobalMaxPool", [[[[0.0, 0.0], [-1.0, 0.0]]]], [[[[1, 0], [0, 0]]]], {}, {}),
        ("MaxPool", [[[[0.0, 0.0], [-1.0, 0.0]]]], [[[[1, 0], [0, 0]]]], {"kernel_shape": [2, 2]}, {}),
        ("Pow", AROUND, [0, 3, 3], {}, {1: 3.0}),
    ],
)
def test_gradient_at_a_kink(op_type: str, x: Any, expected: Any, attributes: Any, constant: Any) -> None:
    held = {k: v if isinstance(v, np.ndarray) else np.array(v, np.float32) for k, v in constant.items()}
    case = Case(op_type, {0: np.array(x, np.float32)}, held, attributes)
    np.testing.assert_allclose(gradient(case), expected, atol=1e-6)


@pytest.mark.parametrize("op_type", ["Softplus", "Mish"])
def test_far_below_zero_a_softplus_is_not_a_rounding_error(op_type: str) -> None:
    """Its logarithm is a log-likelihood, and in single precision 1 + exp(-17) is 1."""
    x = np.array([-20, -17, -10, -7, -3, 0.5, 20], np.float32)
    case = Case(op_type, {0: x})
    model = prepare(case.model())[0]
    name = model.graph.output[0].name
    ready, _ = make_differentiable(with_loss(model, name, np.ones((), np.float32)), ["i0"], "loss")
    ready.graph.output[0].name = name
    exact = np.log1p(np.exp(x.astype(np.float64)))
    exact = exact if op_type == "Softplus" else x * np.tanh(exact)
    ready.graph.output[0].type.tensor_type.shape.dim.add().dim_value = len(x)
    np.testing.assert_allclose(session(ready).run(None, {"i0": x})[0], exact, rtol=1e-6)
