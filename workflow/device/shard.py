"""A flat buffer divided over the ranks (ZeRO): each rank holds only its own elements.

Created by a trainer; saved and restored by the steps, which do not depend on its use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ortflow.workflow.device import Buffer

if TYPE_CHECKING:
    import numpy as np


class Sliced(Protocol):
    """A flat buffer, or as much of one as is here."""

    def slice(self, start: int, stop: int) -> Buffer:
        """Elements [start, stop) of the whole buffer, the same memory; ValueError if they are not all here."""


@dataclass(frozen=True)
class Shard:
    """Elements [start, start + part.count) of a flat buffer of `count` elements, as `layout.share` divides it."""

    part: Buffer
    start: int
    count: int

    @property
    def stop(self) -> int:
        """First element after this part."""
        return self.start + self.part.count

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type."""
        return self.part.dtype

    def slice(self, start: int, stop: int) -> Buffer:
        """Elements [start, stop) of the whole buffer, as a view. Raises ValueError if they are not all in this part."""
        if not self.start <= start <= stop <= self.stop:
            raise ValueError(f"elements {start} to {stop} are not of this rank's {self.start} to {self.stop}")
        return self.part.slice(start - self.start, stop - self.start)
