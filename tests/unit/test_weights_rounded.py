"""Weights in half precision: numbers are rounded as everywhere else, and what is not a number stays none."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from messages import mentions

from ortflow.workflow.errors import UserError
from ortflow.workflow.weights.table import as_dtype, as_float32

NANS = np.arange(1, 1 << 23, dtype=np.uint32) | np.uint32(0x7F800000)
"""The bits of all that are positive."""


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("sign", [0, 1 << 31])
def test_no_nan_becomes_a_number(dtype: str, sign: int) -> None:
    stored = as_dtype((NANS | np.uint32(sign)).view(np.float32), dtype, "w")
    back = as_float32(stored, dtype)
    assert np.isnan(back).all()
    assert (np.signbit(back) == bool(sign)).all()


def test_bfloat16_is_rounded_to_the_nearest() -> None:
    kind = pytest.importorskip("ml_dtypes").bfloat16
    high = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    values: npt.NDArray[np.float32] = (high[:, None] | low).view(np.float32)
    finite = ~np.isnan(values)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values.astype(kind).view(np.uint16)
    overflow = np.isinf(expected.view(kind).astype(np.float32)) & np.isfinite(values)
    kept = np.where(overflow, np.float32(0), values)
    expected = np.where(overflow, np.uint16(0), expected)
    assert (as_dtype(kept, "BF16", "w")[finite] == expected[finite]).all()


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F64", "I64"])
def test_a_single_number_has_no_axis(dtype: str) -> None:
    stored = as_dtype(np.array(2.0, np.float32), dtype, "w")
    assert stored.shape == ()
    assert as_float32(stored, dtype) == 2.0


@pytest.mark.parametrize(
    ("dtype", "largest", "beyond", "word"), [("F16", 65504, 65520, "fp16"), ("BF16", 3.3895314e38, 3.4e38, "bf16")]
)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_that_would_become_infinite_is_refused(
    dtype: str, largest: float, beyond: float, word: str, sign: int
) -> None:
    values = np.array([[0, sign * largest, np.inf, -np.inf, np.nan]], np.float32)
    assert np.isfinite(as_float32(as_dtype(values, dtype, "w"), dtype)).sum() == 2
    values[0, 0] = sign * beyond
    with pytest.raises(UserError) as caught:
        as_dtype(values, dtype, "body.w")
    assert mentions(str(caught.value), f"body.w holds {np.float32(sign * beyond):g}", word)
