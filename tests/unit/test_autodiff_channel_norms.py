"""Gradients of normalisations by channel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gradients import check, differences_of, gradients_of, model_of
from onnx.reference.op_run import OpRun

RANDOM = np.random.default_rng(0)
SHAPES = [(4, 3), (3, 2, 5), (2, 3, 4, 3), (2, 2, 3, 2, 2)]


class GroupNormalization(OpRun):
    op_domain = "com.microsoft"

    def _run(self, x: Any, scale: Any, bias: Any, num_groups: Any = None, epsilon: Any = None, **_: Any) -> Any:
        rows = x.reshape(x.shape[0], num_groups, -1)
        centred = rows - rows.mean(-1, keepdims=True)
        normal = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
        column = (-1, *[1] * (x.ndim - 2))
        return (normal.reshape(x.shape) * scale.reshape(column) + bias.reshape(column),)


def arrays(shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    channels = shape[1]
    return {
        "x": RANDOM.normal(0.5, 1.5, shape),
        "scale": RANDOM.uniform(0.5, 2, channels),
        "bias": RANDOM.uniform(-1, 1, channels),
    }


@pytest.mark.parametrize("wanted", [["x", "scale", "bias"], ["x"], ["scale"], ["bias"]], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_instance_normalization(shape: tuple[int, ...], wanted: list[str]) -> None:
    if len(shape) > 2:
        check("InstanceNormalization", arrays(shape), wanted, epsilon=0.01)


@pytest.mark.parametrize("wanted", [["x", "scale", "bias"], ["x"], ["scale"], ["bias"]], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("shape", [(3, 6, 5), (2, 6, 4, 3), (2, 6, 3, 2, 2)], ids=str)
def test_group_normalization(shape: tuple[int, ...], groups: int, wanted: list[str]) -> None:
    """The node is inserted where the number of channels is known, so their sizes are."""
    given: dict[str, Any] = {"domain": "com.microsoft", "num_groups": groups, "epsilon": 0.01}
    inputs = arrays(shape)
    precise = model_of("GroupNormalization", inputs, wanted, real="float64", **given)
    expected = differences_of(precise, inputs, wanted, [GroupNormalization])
    found = gradients_of(model_of("GroupNormalization", inputs, wanted, **given), inputs, wanted)
    for name in wanted:
        assert found[name].shape == expected[name].shape
        scale = max(1.0, float(np.abs(expected[name]).max()))
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-4, atol=2e-5 * scale, err_msg=name)


@pytest.mark.parametrize("wanted", [["x", "scale", "bias"], ["x"], ["scale"], ["bias"]], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batch_normalization_by_fixed_statistics(shape: tuple[int, ...], wanted: list[str]) -> None:
    given = arrays(shape)
    given |= {"mean": RANDOM.normal(size=shape[1]), "variance": RANDOM.uniform(0.5, 2, shape[1])}
    check("BatchNormalization", given, wanted, epsilon=0.01)


@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("wanted", [["x", "scale", "bias"], ["x"], ["scale"], ["bias"]], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batch_normalization_by_the_batch(shape: tuple[int, ...], wanted: list[str], momentum: float) -> None:
    given = arrays(shape)
    given |= {"mean": np.zeros(shape[1]), "variance": np.ones(shape[1])}
    check("BatchNormalization", given, wanted, training_mode=1, epsilon=0.01, momentum=momentum, outputs=3)
