"""The table of PyTorch's names in a model file: untrusted text, and the values of what a run does not train."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from messages import mentions
from onnx import helper, numpy_helper

from ortflow.workflow.assembly.torch_names import torch_names
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.intake.source import Source
from ortflow.workflow.graph.roles.decide import Roles
from ortflow.workflow.weights.table import PROPERTY, Array, Entry, as_float32, from_json, to_json


def source(table: str, tensors: dict[str, Array], constants: dict[str, Array]) -> Source:
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    model = helper.make_model(helper.make_graph([], "model", [], [], initializers))
    model.metadata_props.add(key=PROPERTY, value=table)
    return Source(model, tensors, Roles([]), frozenset(), (), ())


@pytest.mark.parametrize(
    "row",
    [
        {"dtype": "F99", "shape": [2]},
        {"dtype": "F32", "shape": [float("inf")]},
        {"dtype": "F32", "shape": [-1]},
        {"dtype": "F32", "shape": [2], "value": "AAAA"},
        {"dtype": ["F32"], "shape": [2]},
        {"dtype": "F32", "shape": 2},
    ],
)
def test_a_damaged_row(row: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"'ortflow\.state_dict' is damaged"):
        from_json(json.dumps([{"name": "w", "tensor": "w", **row}]))


@pytest.mark.parametrize("shape", [[3, 3], [4]])
@pytest.mark.parametrize("place", ["tensors", "constants"])
def test_a_shape_that_is_not_the_tensor_s(shape: Sequence[int], place: str) -> None:
    arrays = {"tensors": {}, "constants": {}, place: {"w": np.zeros((2, 3), np.float32)}}
    table = to_json([Entry("body.w", "F32", tuple(shape), "w")])
    with pytest.raises(UserError) as caught:
        torch_names(source(table, arrays["tensors"], arrays["constants"]))
    assert mentions(str(caught.value), "'ortflow.state_dict' … body.w the shape", str(list(shape)), "w has 6 elements")


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32", "F64"])
def test_a_constant_has_the_type_of_the_module(dtype: str) -> None:
    """In the prepared graph it is of single precision, whose bytes are other numbers in another type."""
    values = np.array([[0.5, -1.25]], np.float32)
    table = to_json([Entry("body.w", dtype, (1, 2), "w")])
    entries = torch_names(source(table, {}, {"w": values}))
    assert entries is not None
    (entry,) = entries
    assert entry.tensor is None
    assert entry.value is not None
    np.testing.assert_array_equal(as_float32(entry.value, dtype), values)


def test_a_constant_that_the_type_cannot_represent() -> None:
    table = to_json([Entry("body.w", "F16", (1,), "w")])
    with pytest.raises(UserError, match=r"body\.w holds 70000, which fp16 cannot represent"):
        torch_names(source(table, {}, {"w": np.array([7e4], np.float32)}))
