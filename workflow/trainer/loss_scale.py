"""The factor for the gradient of the loss in fp16, which keeps small gradients from underflow.

Pure: the trainer reads the scale before a step and reports afterwards whether the gradients overflowed. A dynamic scale
is then halved, and doubled after many steps without overflow (Micikevicius et al. 2018, section 3.2). Its state is in
each checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, log2, prod

from ortflow.workflow.data.inputs import BatchInput

START = 65536.0
SMALLEST, LARGEST = 1.0, 2.0**24
"""Powers of two, so that scaling does not round."""
PERIOD = 2000
"""Steps without overflow after which the scale is doubled."""
VALUE, GOOD = "loss_scale", "loss_scale_good_steps"
"""Names of the numbers in a checkpoint."""


@dataclass(frozen=True)
class LossScale:
    """The scale of the next step."""

    value: float = START
    good: int = 0
    """Steps without overflow since it last changed."""
    dynamic: bool = True

    @property
    def can_fall(self) -> bool:
        """Whether the scale may have caused an overflow: a smaller one follows."""
        return self.dynamic and self.value > SMALLEST

    def after(self, overflow: bool) -> LossScale:
        """The scale after a step that overflowed, or did not."""
        if not self.dynamic:
            return self
        if overflow:
            return replace(self, value=max(self.value / 2, SMALLEST), good=0)
        if self.good + 1 >= PERIOD:
            return replace(self, value=min(self.value * 2, LARGEST), good=0)
        return replace(self, good=self.good + 1)

    def numbers(self) -> dict[str, float]:
        """The numbers for a checkpoint."""
        return {VALUE: self.value, GOOD: self.good} if self.dynamic else {}

    def restored(self, numbers: Mapping[str, float]) -> LossScale:
        """Restore from a checkpoint; unchanged if it has no scale, or if the run file specifies the scale.

        Raises ValueError if the numbers are invalid.
        """
        if not self.dynamic or VALUE not in numbers:
            return self
        value, good = float(numbers[VALUE]), numbers.get(GOOD, 0)
        if not SMALLEST <= value <= LARGEST or not 0 <= good < PERIOD or good != int(good):
            raise ValueError(f"has {value:g} for {VALUE} and {good:g} for {GOOD}")
        return replace(self, value=value, good=int(good))


def unit_of(inputs: Sequence[BatchInput], micro_batch: int, elements: Mapping[str, int]) -> float:
    """The factor for a scale of 1 in a graph whose loss is a sum over the micro-batch: about one over its labels.

    The scale then means the same as in frameworks that differentiate the mean. A power of two. `elements` are those of
    an input in a micro-batch where the shape in the graph does not say it: a label per token of a sequence.
    """
    labels = [
        elements.get(batch_input.name, 0) or micro_batch * prod(size or 1 for size in batch_input.shape[1:])
        for batch_input in inputs
        if batch_input.role == "label"
    ]
    return 2.0 ** -floor(log2(max(labels, default=micro_batch)))


def loss_scale_of(setting: float | str) -> LossScale:
    """The scale for the run file's `train.loss_scale`: `dynamic` or a number."""
    return LossScale() if isinstance(setting, str) else LossScale(float(setting), dynamic=False)
