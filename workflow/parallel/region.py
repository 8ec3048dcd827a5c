"""The part of a tensor that a rank holds: all of it, or ranges along one axis. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Region:
    """Ranges [start, stop) along an axis, in ascending order and joined; the whole tensor if `axis` is None."""

    axis: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def whole(self) -> bool:
        """Whether it is the whole tensor."""
        return self.axis is None

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the region of a tensor of `shape`."""
        if self.axis is None:
            return shape
        length = sum(stop - start for start, stop in self.ranges)
        return (*shape[: self.axis], length, *shape[self.axis + 1 :])

    def of(self, array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        """The region of an array, as a copy; the array itself if it is the whole."""
        if self.axis is None:
            return array
        places = np.concatenate([np.arange(start, stop) for start, stop in self.ranges])
        return np.take(array, places, self.axis)


WHOLE = Region()
"""The region of a tensor that every rank of a stage holds whole."""
