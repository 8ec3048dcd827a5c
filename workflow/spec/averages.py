"""The run file's `train.average`: averaged weights, which are evaluated and exported in place of the trained ones."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ortflow.workflow.spec.base import Fraction, Section, Text


class Ema(Section):
    """An exponential moving average of the weights."""

    name: Literal["ema"]
    """The average."""
    decay: Fraction = 0.999
    """What is kept of the average in an update of it."""
    warmup: bool = False
    """Use min(decay, (1 + n) / (10 + n)) behind n updates of the average, so that it forgets the start."""
    start: Text | None = None
    """Duration until the average begins, such as `2 epochs`; until then it equals the weights."""
    every: Text = "1 step"
    """Duration between two updates of the average."""


class Swa(Section):
    """Stochastic weight averaging (Izmailov et al. 2018): the mean of the weights at several times."""

    name: Literal["swa"]
    """The average."""
    start: Text
    """Duration until the first weights are taken, such as `75 epochs`; until then the average equals the weights."""
    every: Text = "1 epoch"
    """Duration between two weights of the mean."""


Average = Annotated[Ema | Swa, Field(discriminator="name")]
BUFFER = "average"
"""Name of the flat buffer of the averaged weights, in the trainer and in checkpoints."""
