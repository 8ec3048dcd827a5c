"""What every section of the run file shares: strict, frozen, unknown keys refused.

The types below are the building blocks of the sections. Nothing here reads a file.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

LARGEST = 2**63 - 1
"""Largest whole number: what seeds, steps and positions are stored as further down."""

Positive = Annotated[int, Field(gt=0, le=LARGEST)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Number = Annotated[int, Field(ge=-LARGEST - 1, le=LARGEST)] | Annotated[float, Field(allow_inf_nan=False)]
Text = Annotated[str, Field(pattern=r"^[^\x00]+$")]
"""Names, patterns and paths: never empty, and nothing that the operating system cuts off."""


class Section(BaseModel):
    """A section of the run file. The string under a field is its help text (`help`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_not_given(cls, values: Any) -> Any:
        """A key without a value (`restart:` with its lines commented out) is as good as no key."""
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if value is not None or key not in cls.model_fields}
