"""Keys of the run file's sets of samples that are tables: what becomes of their columns."""

from __future__ import annotations

from typing import Literal

from ortflow.workflow.spec.base import Number, PositiveFloat, Section, Text


class Field(Section):
    """What becomes of some columns of a table. Classes, means and deviations are those of the training set."""

    columns: list[Text]
    """Names of columns, or glob patterns."""
    type: Literal["number", "text"] | None = None
    """Type of a CSV column; by default text if a value is not a number. With number, rows with other values are bad."""
    missing: Number | Text = "refuse"
    """What a missing value becomes: `refuse` stops, `mean` is the column's mean; or a number, or a class."""
    standardize: bool = False
    """Subtract the column's mean and divide by its standard deviation."""
    mean: Number | None = None
    """Subtract this mean."""
    std: PositiveFloat | None = None
    """Divide by this standard deviation."""
    classes: list[Text] | Literal["sorted"] | None = None
    """Replace values by the numbers of their classes, from 0: in this order, or sorted. Text is replaced by default."""
    one_hot: bool = False
    """Give each class its own column, with a 1 where it is the value."""
    unit: Literal["days", "seconds", "milliseconds", "microseconds"] | None = None
    """Replace dates and times by their number of these since 1970-01-01 (UTC)."""
