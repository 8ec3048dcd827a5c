"""Which samples each rank takes in each step of a map-style data set, whatever the number of ranks.

A batch sampler for `torch.utils.data.DataLoader(dataset, batch_sampler=Sampler(…))`. `Run.steps` moves it to the run's
position; a loop without `Run` calls `seek`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any

from ortflow.program.errors import ProgramError
from ortflow.program.order import Order, key_of
from ortflow.program.world import world

_AHEAD = 64
"""Steps whose samples are computed at a time."""


class Sampler:
    """Lists of this rank's samples, one list per step. The epochs follow each other without a gap.

    The samples of all epochs form one sequence: a permutation of all samples, then another one, and so on. Each step
    takes the next `batch` of them, and each rank an equal part. So none is lost or repeated within an epoch, every step
    has `batch` samples, and one at the end of an epoch takes the rest from the next. An iteration ends with the epoch.

    Raises ProgramError if the numbers do not fit together.

    Parameters
    ----------
    data
        The number of samples, or the data set.
    batch
        Samples of a step, over all ranks; divisible by the number of ranks.
    seed
        Selects the permutations, with the number of the epoch.
    lengths
        A length for each sample. Samples of similar length are then in the same step, and its lengths are shared out
        evenly among the ranks.
    rank, world_size
        This rank and the number of ranks among which a step is divided; by default those of the run. For models that
        are divided among ranks, those of the data-parallel group.
    """

    def __init__(
        self,
        data: int | Sized,
        *,
        batch: int,
        seed: int = 0,
        lengths: Sequence[float] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        place = world()
        self.rank = place.rank if rank is None else rank
        self.world_size = place.size if world_size is None else world_size
        self.count = data if isinstance(data, int) else len(data)
        self.batch, self.seed, self.balanced = batch, seed, lengths is not None
        if self.count < 1 or batch < 1:
            raise ProgramError(f"Sampler: {self.count} samples and batch={batch}: both must be at least 1")
        if batch % self.world_size:
            raise ProgramError(
                f"Sampler: batch={batch} is not divisible by {self.world_size} ranks. It is the samples of a step over "
                "all ranks, the same number on each: choose one that every number of ranks divides"
            )
        if lengths is not None and len(lengths) != self.count:
            raise ProgramError(f"Sampler: {len(lengths)} lengths for {self.count} samples")
        self._lengths = lengths
        self._order = Order(self.count, seed, lengths)
        self.position = 0
        """The step from which the next iteration begins."""
        self.keyed = False
        """Whether samples carry the key of their random numbers (`workers.py`)."""

    def seek(self, step: int) -> None:
        """Begin the next iteration at this step, counted from the first of the run."""
        self.position = step

    @property
    def epoch(self) -> int:
        """The epoch of the first sample of the step at `position`."""
        return self.position * self.batch // self.count

    def begins_epoch(self, step: int) -> bool:
        """Whether an iteration begins with this step."""
        return step == 0 or step * self.batch // self.count > (step - 1) * self.batch // self.count

    def __len__(self) -> int:
        """Return the steps that the next iteration has."""
        return self._end(self.position) - self.position

    def _end(self, step: int) -> int:
        """The first step that begins in a later epoch than this one begins."""
        return -(-(step * self.batch // self.count + 1) * self.count // self.batch)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's samples of each step until the end of the epoch, from which the next iteration goes on."""
        step, end = self.position, self._end(self.position)
        self.position = end
        while step < end:
            stop = min(end, step + _AHEAD)
            samples = self._samples(step * self.batch, stop * self.batch)
            for first in range(0, len(samples), self.batch):
                yield self._part(samples[first : first + self.batch])
            step = stop

    def step(self, step: int) -> list[int]:
        """Return the samples of one step, over all ranks."""
        return [int(sample) for sample in self._samples(step * self.batch, (step + 1) * self.batch)]

    def _samples(self, start: int, stop: int) -> list[int]:
        samples: list[int] = []
        while start < stop:
            epoch, first = divmod(start, self.count)
            last = min(self.count, first + stop - start)
            part = self._order.samples(epoch, first, last)
            samples += [Keyed(sample, key_of(self.seed, epoch, sample)) for sample in part] if self.keyed else part
            start += last - first
        return samples

    def _part(self, samples: list[int]) -> list[int]:
        size, rank = self.batch // self.world_size, self.rank
        if self._lengths is None:
            return samples[rank * size : (rank + 1) * size]
        # By falling length, there and back again among the ranks.
        lengths = self._lengths
        samples = sorted(samples, key=lambda sample: (-lengths[sample], sample))
        return [samples[turn * self.world_size + (rank if turn % 2 == 0 else self.world_size - 1 - rank)]
                for turn in range(size)]  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return the step from which the next iteration begins, and what its samples depend on."""
        return {"position": self.position, **self.identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. Raises ProgramError if it was that of other data."""
        self.check(state)
        self.position = state["position"]

    def check(self, state: dict[str, Any]) -> None:
        """Raise ProgramError if a state was that of other data."""
        for name, value in self.identity().items():
            if state[name] != value:
                raise ProgramError(
                    f"the checkpoint's Sampler has {name}={state[name]}, this one {value}: its position does not fit"
                )

    def identity(self) -> dict[str, Any]:
        """Return what the samples of a step depend on; the number of ranks is not among it."""
        return {"count": self.count, "batch": self.batch, "seed": self.seed, "balanced": self.balanced}


class Keyed(int):
    """A sample's number that carries the key of its random numbers to a loader worker."""

    key: int

    def __new__(cls, sample: int, key: int) -> Keyed:
        """Make the number."""
        number = super().__new__(cls, sample)
        number.key = key
        return number

    def __reduce__(self) -> tuple[type[Keyed], tuple[int, int]]:
        """Pickle the key, too."""
        return Keyed, (int(self), self.key)
