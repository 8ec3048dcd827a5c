"""Memory of a device: flat buffers, implemented by `cpu` and `cuda`.

Code outside this folder must not assume that a buffer is in host memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ortflow.workflow.spec import train as spec_train

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Self

    from ortflow.workflow.device.copying import Copying
    from ortflow.workflow.errors import OrtflowError


HALF_PRECISIONS = spec_train.HALF_PRECISIONS


class Buffer(Protocol):
    """A one-dimensional array of one element type on a device."""

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
        """Return elements [start, stop) as a view of the same memory."""

    def read(self, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Copy the buffer to the host.

        Parameters
        ----------
        out
            Array [count] of the buffer's type to copy into; a new array if None.

        Returns
        -------
        array
            `out`, or the new array.
        """

    def write(self, values: npt.NDArray[Any]) -> None:
        """Copy an array [count] of the host into the buffer."""

    def copy_from(self, other: Self) -> None:
        """Copy from another buffer of the same device, type and length."""

    def fill(self, value: float) -> None:
        """Set every element to `value`."""

    def add(self, other: Self) -> None:
        """Add another buffer of the same type and length, element by element."""

    def scale(self, factor: float) -> None:
        """Multiply every element of an fp32 buffer."""


class Device(Protocol):
    """A device that allocates buffers and runs sessions."""

    @property
    def kind(self) -> str:
        """ONNX Runtime's device name: cpu, cuda."""

    @property
    def index(self) -> int:
        """Index of the device on this machine."""

    @property
    def name(self) -> str:
        """The product name of the processor."""

    @property
    def precision(self) -> str:
        """Precision of the training graphs, as in `train.precision`."""

    @property
    def capturing(self) -> bool:
        """Whether queued work is being captured, so that nothing may wait for it."""

    @property
    def arenas(self) -> str:
        """ONNX Runtime's memory arenas of this device, in the syntax of run options."""

    def allocate(self, count: int, dtype: npt.DTypeLike) -> Buffer:
        """Return a zeroed buffer of `count` elements."""

    def view(self, pointer: int, count: int, dtype: npt.DTypeLike) -> Buffer:
        """Return a buffer over `count` elements of memory of this device that belongs to someone else."""

    def lend(self, array: npt.NDArray[Any], before: Buffer | None = None, *, prefetched: bool = False) -> Buffer:
        """Return a buffer with an array's values, valid until the next call.

        Parameters
        ----------
        array
            Array in host memory. On the CPU the buffer is the array itself.
        before
            A buffer of an earlier call, whose memory may be reused.
        prefetched
            Whether arrays for this buffer may be given to `prefetch` first.
        """

    def prefetch(self, array: npt.NDArray[Any], buffer: Buffer) -> None:
        """Start to copy an array to the device, if that is worthwhile; may be called by another thread.

        Parameters
        ----------
        array
            An array that a later `lend` will be called with. It must not change until then.
        buffer
            The buffer that `lend` returned before for the same input. At most one array that has not been lent may be
            prefetched for it when this is called.
        """

    def providers(self) -> list[str | tuple[str, dict[str, str]]]:
        """Return the execution providers of a session, in order of preference."""

    def memory(self) -> Mapping[str, int]:
        """Return what was measured in the device's own memory; see `Trainer.device_memory`."""

    def copying(self, room: int) -> Copying:
        """Return how to copy a state from here before it is saved; see `Trainer.copying`."""

    def memory_moves(self) -> None:
        """Invalidate captured work.

        Must be called before a session allocates memory or unused memory is released, because captured work uses memory
        that is allocated only while it runs.
        """

    def free_memory(self) -> None:
        """Free memory that is no longer used, if that was put off because it waits for messages between devices.

        Called where this rank has queued everything that others wait for.
        """

    def exact(self) -> Device:
        """Return the same device with fp32 products in fp32, for comparisons."""

    def failure(self, message: str) -> OrtflowError:
        """Return an error for ONNX Runtime's message about this device; if memory ran out, with a fix."""

    def synchronize(self) -> None:
        """Wait until all queued work is done."""
