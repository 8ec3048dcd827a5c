"""What is said of a gradient in half precision beside the one in fp32."""

from __future__ import annotations

import numpy as np
import pytest
from messages import mentions

from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.errors import UserError
from ortflow.workflow.layout import FlatIndex, Tensor
from ortflow.workflow.trainer.check.checked_part import CheckedPart
from ortflow.workflow.trainer.check.precision_check import COMPARED_SCALES, Vector, compare

INDEX = FlatIndex.place([Tensor("large", (40,), "decay"), Tensor("small", (20,), "decay")])
EXACT = np.random.default_rng(0).normal(size=INDEX.trained).astype(np.float32)


def compared(other: Vector, *, scales: bool, largest: float = np.inf) -> tuple[str, list[float]]:
    """The warning, and the scales that were tried; above `largest` the gradient overflows."""
    tried: list[float] = []

    def gradient(scale: float) -> Vector:
        tried.append(scale)
        return np.float32(scale if scale <= largest else np.inf) * other

    buffers = (HostBuffer(np.zeros(INDEX.trained, np.float32)) for _ in range(2))
    part = CheckedPart(INDEX, *buffers)
    with np.errstate(invalid="ignore"):
        said = compare(EXACT, gradient, lambda found: bool(np.isfinite(found).all()), part, "fp16", scales)
    return said, tried


@pytest.mark.parametrize(
    ("scales", "largest", "tried"),
    [(False, np.inf, [1.0]), (True, np.inf, [65536.0]), (True, 20.0, [65536.0, 1024.0, 16.0])],
)
def test_the_largest_loss_scale_without_an_overflow_counts(scales: bool, largest: float, tried: list[float]) -> None:
    assert compared(EXACT, scales=scales, largest=largest) == ("", tried)
    assert tried[-1] in COMPARED_SCALES


def test_another_direction_is_named_and_another_length_is_not() -> None:
    wrong, entry = EXACT.copy(), INDEX["small"]
    wrong[entry.offset : entry.end] *= -1
    assert compared(3 * EXACT, scales=False)[0] == ""
    assert mentions(compared(wrong, scales=True)[0], "'small'", "fp16", "100%", "train.precision: fp32")


@pytest.mark.parametrize("scales", [False, True])
def test_a_gradient_that_is_finite_only_in_fp32_ends_the_run(scales: bool) -> None:
    wrong, entry = EXACT.copy(), INDEX["small"]
    wrong[entry.offset] = np.nan
    with pytest.raises(UserError, match="'small' is not finite in fp16") as caught:
        compared(wrong, scales=scales)
    assert caught.value.where == "train.precision"


def test_a_tensor_with_a_tiny_gradient_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = INDEX["small"]
    exact = EXACT.copy()
    exact[entry.offset : entry.end] *= 1e-3
    wrong = exact.copy()
    wrong[entry.offset : entry.end] *= -1
    monkeypatch.setitem(globals(), "EXACT", exact)
    assert compared(wrong, scales=False)[0] == ""
