"""Keys of an evaluation set that is held out from the training set."""

from __future__ import annotations

from ortflow.workflow.spec.base import Fraction, Section, Text


class HeldOut(Section):
    """Samples of the training set that are used for evaluation alone. The run's seed and the content decide which."""

    fraction: Fraction | None = None
    """Share of the training set to hold out, instead of `path`."""
    group: Text | None = None
    """Column of a table: rows with the same value are held out together."""
    time: Text | None = None
    """Column of a table: the rows with its largest values are held out."""
    stratify: Text | None = None
    """Column of a table: of each of its values the same share is held out."""
