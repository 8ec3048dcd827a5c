"""The seam to memory: flat buffers on a device. `cpu` is the first implementation.

Nothing outside this folder may assume that a buffer lies in host memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Self


class Buffer(Protocol):
    """Elements of one type, one after the other, on a device."""

    @property
    def pointer(self) -> int:
        """Device address of the first element."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type."""

    @property
    def count(self) -> int:
        """Number of elements."""

    def slice(self, start: int, stop: int) -> Buffer:
        """Elements [start, stop), the same memory."""

    def read(self, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Copy to the host: into `out` if given, a new array if not."""

    def write(self, values: npt.NDArray[Any]) -> None:
        """Copy from the host."""

    def fill(self, value: float) -> None:
        """Set every element."""

    def add(self, other: Self) -> None:
        """Add another buffer, element by element."""


class Device(Protocol):
    """What holds buffers and runs sessions."""

    @property
    def kind(self) -> str:
        """ONNX Runtime's device name: cpu, cuda."""

    @property
    def index(self) -> int:
        """Which of its kind on this machine."""

    def allocate(self, count: int, dtype: npt.DTypeLike) -> Buffer:
        """A zeroed buffer."""

    def providers(self) -> list[str | tuple[str, dict[str, str]]]:
        """Execution providers of a session, in order of preference."""

    def synchronize(self) -> None:
        """Wait until everything queued is done."""
