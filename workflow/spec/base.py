"""Base class and field types of the run file's sections: strict, immutable, unknown keys are errors.

Nothing here reads a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

PLUGINS = "PYDANTIC_DISABLE_PLUGINS"
LARGEST = 2**63 - 1
"""Largest integer: seeds, steps and positions are stored in 63 bits."""

Positive = Annotated[int, Field(gt=0, le=LARGEST)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Number = Annotated[int, Field(ge=-LARGEST - 1, le=LARGEST)] | Annotated[float, Field(allow_inf_nan=False)]
Text = Annotated[str, Field(pattern=r"^[^\x00]+$")]
"""Names, patterns and paths: not empty, without NUL, which the operating system would truncate at."""


def no_items() -> list[Any]:
    """Default of a list. For `list` itself, pydantic would inspect the signature, which is slow."""
    return []


def no_keys() -> dict[Any, Any]:
    """Default of a mapping."""
    return {}


class Section(BaseModel):
    """A section of the run file. The string under a field is its help text (`help`).

    Default sections are created with `model_construct`, which validates nothing: then only one validator is built, for
    the whole run file, when a file is read.
    """

    # Not strict, pydantic would take "10" and true for an integer, and "yes" for true.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_not_given(cls, values: Any) -> Any:
        """Treat a key without a value (`restart:`, its lines commented out) as absent, except where null is a value."""
        if not isinstance(values, dict):
            return values
        return {
            key: value
            for key, value in values.items()
            if value is not None
            or key not in cls.model_fields
            or type(None) in get_args(cls.model_fields[key].annotation)
        }

    @classmethod
    def model_rebuild(
        cls,
        *,
        force: bool = False,
        raise_errors: bool = True,
        _parent_namespace_depth: int = 2,
        _types_namespace: Mapping[str, Any] | None = None,
    ) -> bool | None:
        """Build the validator, without searching all installed packages for pydantic plug-ins."""
        with _without_plugins():
            return super().model_rebuild(
                force=force,
                raise_errors=raise_errors,
                # pydantic resolves names in annotations from the frame so many calls up (2.14): this method adds a
                # call.
                _parent_namespace_depth=_parent_namespace_depth + 1,
                _types_namespace=_types_namespace,
            )


@contextmanager
def _without_plugins() -> Iterator[None]:
    # pydantic reads the variable whenever it builds a validator (2.14, plugin/_loader.py). It is put back, so that
    # models of the user's program keep their plug-ins.
    before = os.environ.get(PLUGINS)
    os.environ[PLUGINS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[PLUGINS]
        else:
            os.environ[PLUGINS] = before
