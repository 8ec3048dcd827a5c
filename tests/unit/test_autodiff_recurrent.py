"""Gradients of recurrent networks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gradients import check, model_of

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.autodiff.reverse import differentiate

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
STEPS, BATCH, INPUTS, SIZE = 3, 2, 3, 2
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("LSTM", {}),
    ("GRU", {"linear_before_reset": 1}),
    ("GRU", {"linear_before_reset": 0}),
    ("RNN", {}),
]


def arrays(operator: str, directions: int, *, steps: int = STEPS) -> dict[str, np.ndarray | None]:
    random = np.random.default_rng(0)
    gates = GATES[operator] * SIZE
    shapes = {
        "x": (steps, BATCH, INPUTS),
        "weight": (directions, gates, INPUTS),
        "recurrence": (directions, gates, SIZE),
        "bias": (directions, 2 * gates),
        "lengths": None,
        "hidden": (directions, BATCH, SIZE),
    }
    if operator == "LSTM":
        shapes["cell"] = (directions, BATCH, SIZE)
    return {name: None if shape is None else random.uniform(-1, 1, shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(("operator", "attributes"), KINDS, ids=str)
def test_every_input_and_output(operator: str, attributes: dict[str, Any], direction: str) -> None:
    given = arrays(operator, 1 + (direction == "bidirectional"))
    wanted = [name for name, array in given.items() if array is not None]
    uses = (0, 1, 2) if operator == "LSTM" else (0, 1)
    check(operator, given, wanted, uses=uses, direction=direction, hidden_size=SIZE, **attributes)


@pytest.mark.parametrize("uses", [(0,), (1,), (2,)], ids=str)
@pytest.mark.parametrize(("operator", "attributes"), KINDS, ids=str)
def test_one_output_without_what_is_optional(operator: str, attributes: dict[str, Any], uses: tuple[int]) -> None:
    if uses == (2,) and operator != "LSTM":
        return
    given = arrays(operator, 1)
    for name in ("bias", "hidden", "cell"):
        if name in given:
            given[name] = None
    check(operator, given, ["x", "weight", "recurrence"], uses=uses, hidden_size=SIZE, **attributes)


@pytest.mark.parametrize("wanted", [["x"], ["weight"], ["recurrence"], ["bias"], ["hidden"]], ids=str)
@pytest.mark.parametrize(("operator", "attributes"), KINDS, ids=str)
def test_one_input(operator: str, attributes: dict[str, Any], wanted: list[str]) -> None:
    check(operator, arrays(operator, 2, steps=1), wanted, direction="bidirectional", hidden_size=SIZE, **attributes)


@pytest.mark.parametrize(
    ("operator", "attributes", "reason"),
    [
        ("LSTM", {"input_forget": 1}, "its input and forget gates are coupled"),
        ("LSTM", {"activations": ["Sigmoid", "Relu", "Tanh"]}, "its activations are not sigmoid and tanh"),
        ("GRU", {"clip": 3.0}, "it clips its gates"),
        ("RNN", {"activations": ["Relu"]}, "its activations are not tanh"),
        ("GRU", {"layout": 1}, "its layout is 1"),
    ],
)
def test_forms_without_a_gradient(operator: str, attributes: dict[str, Any], reason: str) -> None:
    model = model_of(operator, arrays(operator, 1), ["weight"], hidden_size=SIZE, **attributes)
    with pytest.raises(UserError, match=reason):
        differentiate(model, ["weight"], "loss")


def test_lengths_and_peepholes_have_no_gradient() -> None:
    given = arrays("LSTM", 1)
    for more, reason in (
        ({"lengths": np.array([3, 2], np.int32)}, "it has sequence lengths"),
        ({"peepholes": np.zeros((1, 3 * SIZE))}, "it has peepholes"),
    ):
        model = model_of("LSTM", {**given, **more}, ["weight"], hidden_size=SIZE)
        with pytest.raises(UserError, match=reason):
            differentiate(model, ["weight"], "loss")
