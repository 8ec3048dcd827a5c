"""The methods that every trainer has. Others are optional: `capabilities`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from ortflow.workflow.data.inputs import MicroBatch
from ortflow.workflow.device import Buffer
from ortflow.workflow.device.shard import Shard
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.trainer_protocol.outcomes import EvaluationOutcome, StepOutcome

if TYPE_CHECKING:
    from pathlib import Path


class Trainer(Protocol):
    """Its state is in flat buffers; except for shards, they are equal on all ranks between steps."""

    index: FlatIndex
    """Position of each tensor in the buffer `parameters`."""
    together: bool = False
    """Whether no rank can train alone, because each has a part of the model: all ranks then call `check`."""
    before_update: Callable[[], None]
    """`step` must call it before it changes anything in `state`, because a save may still be reading. Step `runtime`
    sets it; until then it does nothing.
    """

    def state(self) -> Mapping[str, Buffer | Shard]:
        """Return the flat buffers of a checkpoint by name, including `parameters`; the same objects at each call.

        A buffer that is sharded over the ranks is returned as a `Shard` with this rank's `layout.share`.
        """

    def environment(self) -> Mapping[str, str]:
        """Return everything besides the run file that bit-identical results depend on, as short texts by name.

        A run resumes from a checkpoint only if these are equal, except `device`, `instructions`, `library` and
        `threads`, which may differ between machines.
        """
        return {}

    def check(self, samples: Iterable[MicroBatch]) -> None:
        """Try training on real samples; called before the first step of every attempt, by all ranks if `together` is
        set, otherwise only by rank 0.

        Must not change the state. If `together` is set, an error of any rank ends all of them.

        Raises
        ------
        UserError
            If training would give wrong results.
        """
        return

    def step(
        self,
        batches: Sequence[MicroBatch],
        *,
        learning_rate: float,
        update: int,
        seeds: Sequence[int],
        control_values: Sequence[float],
    ) -> StepOutcome:
        """Run one optimizer step over this rank's micro-batches.

        If loss or gradient is not finite, the state is not changed.

        Parameters
        ----------
        batches
            Micro-batches; some may have no real sample.
        learning_rate
            Learning rate of this step.
        update
            Number of the parameter update, from 1.
        seeds
            One seed per micro-batch.
        control_values
            At most 16 numbers, summed over the ranks with the gradients.

        Returns
        -------
        StepOutcome
            Equal on all ranks.
        """

    def evaluate(
        self, batches: Iterable[MicroBatch], control_values: Callable[[], Sequence[float]]
    ) -> EvaluationOutcome:
        """Compute the metrics over the batches of all ranks.

        Parameters
        ----------
        batches
            This rank's micro-batches.
        control_values
            Called after the last batch; its numbers are summed over the ranks with the metrics.

        Returns
        -------
        EvaluationOutcome
            Equal on all ranks.
        """

    def export(
        self, path: Path, samples: Sequence[MicroBatch], tolerance: float | None, *, trial: bool = False
    ) -> float | None:
        """Write the inference model; called only by rank 0.

        Parameters
        ----------
        path
            File to write.
        samples
            Real samples for the comparison with the trained model.
        tolerance
            Largest allowed difference; if None, it is derived from the model's rounding.
        trial
            Check the export without writing the file.

        Returns
        -------
        float or None
            Largest difference from the trained model on the samples; None if they could not be compared.

        Raises
        ------
        UserError
            If the model is invalid or the difference is larger than the tolerance. An earlier export is then kept.
        """
