"""The seam to memory: flat buffers on a device, of which there are two: `cpu` and `cuda`.

Nothing outside this folder may assume that a buffer lies in host memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Self

    from ortflow.workflow.errors import OrtflowError


HALF_PRECISIONS = ("fp16", "bf16")
"""Those of `train.precision` that store numbers in 16 bits."""


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

    def copy_from(self, other: Self) -> None:
        """Copy another buffer of the same device, type and length."""

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

    @property
    def name(self) -> str:
        """The processor, as its maker calls it."""

    @property
    def precision(self) -> str:
        """What training graphs compute with, as in `train.precision`."""

    @property
    def capturing(self) -> bool:
        """Whether what is queued is noted for later, so that nothing may wait for it."""

    @property
    def arenas(self) -> str:
        """ONNX Runtime's arenas that hold memory for it, as run options name them."""

    def allocate(self, count: int, dtype: npt.DTypeLike) -> Buffer:
        """A zeroed buffer."""

    def lend(self, array: npt.NDArray[Any], before: Buffer | None = None) -> Buffer:
        """An array's values where graphs read them, until the next call; the memory of the buffer `before` may serve.

        On the CPU that is the array itself.
        """

    def providers(self) -> list[str | tuple[str, dict[str, str]]]:
        """Execution providers of a session, in order of preference."""

    def memory_moves(self) -> None:
        """Called before a session takes memory for itself, or unused memory is given back: what was captured on memory
        that is in use only while it runs is void."""

    def exact(self) -> Device:
        """The same device with products of fp32 in fp32, for comparisons."""

    def failure(self, message: str) -> OrtflowError:
        """An error with what ONNX Runtime says of this device; where memory ran out, with what helps."""

    def synchronize(self) -> None:
        """Wait until everything queued is done."""
