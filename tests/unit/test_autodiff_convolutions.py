"""Gradients of convolutions and transposed convolutions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gradients import check, model_of

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.autodiff.reverse import differentiate

CASES: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    # data, weight, attributes
    ((2, 3, 7), (4, 3, 3), {}),
    ((2, 4, 8), (6, 2, 3), {"group": 2, "strides": [2], "pads": [1, 0]}),
    ((1, 2, 5), (3, 2, 1), {"strides": [2], "pads": [2, 1]}),
    ((2, 3, 5, 6), (4, 3, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((2, 3, 5, 6), (4, 3, 1, 1), {}),
    ((1, 2, 5, 6), (3, 2, 1, 1), {"strides": [2, 2]}),
    ((2, 3, 6, 7), (2, 3, 3, 2), {"strides": [2, 3], "pads": [1, 0, 2, 1]}),
    ((1, 2, 8, 7), (2, 2, 3, 2), {"dilations": [2, 3], "pads": [0, 1, 1, 2]}),
    ((1, 2, 9, 8), (3, 2, 2, 3), {"dilations": [2, 1], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ((2, 4, 5, 5), (6, 2, 3, 3), {"group": 2, "pads": [1, 1, 1, 1]}),
    ((2, 4, 6, 5), (4, 2, 3, 2), {"group": 2, "strides": [2, 2], "dilations": [1, 2]}),
    ((2, 3, 5, 5), (3, 1, 3, 3), {"group": 3, "pads": [1, 1, 1, 1]}),
    ((2, 3, 6, 5), (6, 1, 3, 3), {"group": 3, "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ((1, 2, 5, 4), (4, 1, 3, 2), {"group": 2, "pads": [1, 0, 1, 1]}),
    ((2, 2, 5, 4), (2, 1, 1, 1), {"group": 2}),
    ((2, 2, 6, 5), (2, 1, 2, 3), {"group": 2, "dilations": [2, 1], "pads": [1, 0, 1, 1]}),
    ((1, 17, 5, 4), (2, 17, 3, 2), {"strides": [2, 1], "pads": [1, 0, 1, 1]}),
    ((1, 16, 5, 4), (2, 16, 2, 2), {"dilations": [2, 1], "pads": [0, 1, 1, 0]}),
    ((1, 3, 8, 8), (4, 3, 4, 4), {"strides": [4, 4]}),
    ((1, 2, 7, 6), (2, 2, 3, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 3]}),
    ((1, 2, 7, 6), (2, 2, 2, 3), {"auto_pad": "SAME_LOWER", "strides": [2, 1]}),
    ((1, 2, 6, 6), (2, 2, 2, 3), {"auto_pad": "SAME_UPPER"}),
    ((1, 4, 6, 6), (2, 2, 2, 3), {"auto_pad": "SAME_LOWER", "group": 2}),
    ((1, 2, 6, 5, 4), (2, 2, 2, 3, 2), {"auto_pad": "SAME_UPPER", "strides": [2, 1, 3]}),
    ((1, 2, 6, 6), (2, 2, 2, 3), {"auto_pad": "VALID", "strides": [2, 2]}),
    ((1, 2, 4, 5, 4), (3, 2, 2, 3, 2), {"pads": [1, 0, 1, 0, 1, 0]}),
    ((1, 2, 4, 5, 4), (2, 1, 2, 3, 2), {"group": 2, "strides": [2, 1, 2], "pads": [1, 1, 0, 0, 1, 1]}),
    ((1, 2, 6, 5), (2, 2, 1, 1), {"pads": [3, 1, 0, 2], "strides": [2, 2]}),
]
TRANSPOSED: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 5), (3, 2, 3), {"strides": [2], "pads": [1, 0], "output_padding": [1]}),
    ((2, 3, 4, 3), (3, 2, 3, 3), {}),
    ((1, 3, 4, 3), (3, 2, 2, 2), {"strides": [2, 2]}),
    ((1, 3, 4, 3), (3, 2, 3, 2), {"strides": [2, 3], "pads": [1, 0, 1, 1], "output_padding": [1, 2]}),
    ((1, 4, 4, 3), (4, 2, 3, 2), {"group": 2, "strides": [2, 1], "dilations": [1, 2]}),
    ((1, 3, 4, 3), (3, 1, 3, 3), {"group": 3, "strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]}),
    ((1, 2, 4, 3), (2, 2, 4, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ((1, 2, 4, 3), (2, 2, 4, 4), {"auto_pad": "SAME_LOWER", "strides": [3, 1]}),
    ((1, 2, 3, 2, 3), (2, 2, 2, 3, 2), {"strides": [2, 1, 1], "pads": [0, 1, 0, 1, 1, 0]}),
]


def arrays(data: tuple[int, ...], weight: tuple[int, ...], outputs: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {"x": data, "w": weight, "b": (outputs,)}
    return {name: random.uniform(-1, 1, shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_convolution(case: tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]) -> None:
    data, weight, attributes = case
    check("Conv", arrays(data, weight, weight[0]), ["x", "w", "b"], kernel_shape=list(weight[2:]), **attributes)


@pytest.mark.parametrize("wanted", [["x"], ["w"], ["b"], ["w", "b"], ["x", "w"]], ids=str)
@pytest.mark.parametrize("group", [1, 3])
def test_convolution_of_which_some_inputs_are_fixed(wanted: list[str], group: int) -> None:
    given = arrays((2, 3, 5, 4), (3, 3 // group, 3, 2), 3)
    check("Conv", given, wanted, kernel_shape=[3, 2], group=group)
    if "b" not in wanted:
        del given["b"]
        check("Conv", given, wanted, kernel_shape=[3, 2], group=group)


@pytest.mark.parametrize("case", TRANSPOSED, ids=str)
def test_transposed_convolution(case: tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]) -> None:
    data, weight, attributes = case
    given = arrays(data, weight, weight[1] * attributes.get("group", 1))
    check("ConvTranspose", given, ["x", "w", "b"], kernel_shape=list(weight[2:]), **attributes)


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"dilations": [3, 1], "strides": [2, 1], "output_padding": [2, 0]}, "output_padding .*str"),
        ({"output_shape": [20, 20]}, "output .*kernel reaches"),
    ],
)
def test_transposed_convolution_without_a_gradient(attributes: dict[str, Any], reason: str) -> None:
    given = arrays((1, 2, 4, 3), (2, 2, 3, 3), 2)
    model = model_of("ConvTranspose", given, ["x"], kernel_shape=[3, 3], **attributes)
    with pytest.raises(UserError, match=reason):
        differentiate(model, ["x"], "loss")


def test_convolution_by_a_kernel_of_unknown_size() -> None:
    model = model_of("Conv", arrays((1, 2, 4, 3), (2, 2, 3, 3), 2), ["x", "w"], unknown=True)
    with pytest.raises(UserError, match="weight"):
        differentiate(model, ["x"], "loss")
