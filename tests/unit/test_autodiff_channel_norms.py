"""Gradients of normalisations by channel."""

from __future__ import annotations

import numpy as np
import pytest
from gradients import check

RANDOM = np.random.default_rng(0)
SHAPES = [(4, 3), (3, 2, 5), (2, 3, 4, 3), (2, 2, 3, 2, 2)]


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
