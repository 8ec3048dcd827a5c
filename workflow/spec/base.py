"""What every section of the run file shares: strict, frozen, unknown keys refused.

The types below are the building blocks of the sections. Nothing here reads a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

PLUGINS = "PYDANTIC_DISABLE_PLUGINS"
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


def no_items() -> list[Any]:
    """Default of a list. Of `list` itself pydantic would parse the signature, which takes its time."""
    return []


def no_keys() -> dict[Any, Any]:
    """Default of a mapping."""
    return {}


class Section(BaseModel):
    """A section of the run file. The string under a field is its help text (`help`).

    A section that stands as a default is made with `model_construct`, which checks nothing: the whole run file's
    validator is then built once, when a file is read, and none beside it for each section.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_not_given(cls, values: Any) -> Any:
        """Treat a key without a value (`restart:` with its lines commented out) as absent."""
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if value is not None or key not in cls.model_fields}

    @classmethod
    def model_rebuild(
        cls,
        *,
        force: bool = False,
        raise_errors: bool = True,
        _parent_namespace_depth: int = 2,
        _types_namespace: Mapping[str, Any] | None = None,
    ) -> bool | None:
        """Build the validator, without a look through all that is installed for pydantic's plug-ins."""
        with _without_plugins():
            return super().model_rebuild(
                force=force,
                raise_errors=raise_errors,
                _parent_namespace_depth=_parent_namespace_depth + 1,
                _types_namespace=_types_namespace,
            )


@contextmanager
def _without_plugins() -> Iterator[None]:
    before = os.environ.get(PLUGINS)
    os.environ[PLUGINS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[PLUGINS]
        else:
            os.environ[PLUGINS] = before
