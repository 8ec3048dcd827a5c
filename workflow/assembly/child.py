"""A process in which ONNX Runtime first loads and times a graph, so that a crash becomes an error message.

Started by `build` and `variants` as `python -m ortflow.workflow.assembly.child`. This module contains both ends of its
pipes. The child imports little besides ONNX Runtime, and its output does not reach the user's terminal.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from ortflow.workflow.errors import check_signal
from ortflow.workflow.system.module_process import start_module

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class RuntimeFault(Exception):
    """ONNX Runtime raised `message`, or ended the process (`crashed`)."""

    def __init__(self, message: str, *, crashed: bool = False) -> None:
        super().__init__(message)
        self.message, self.crashed = message, crashed


class _Ended(Exception):
    """The process ended without a reply; the message says how."""


class Child:
    """The parent's end. Starts the process immediately, so that it is ready when needed."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return start_module(
            "ortflow.workflow.assembly.child", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._errors.close()

    def load(self, model: bytes, kernels: Path | None = None, *, optimized: bool = True) -> None:
        """Open a session of the graph, as a rank will, or without ONNX Runtime's optimizers.

        Raises
        ------
        RuntimeFault
            If a kernel is missing, or ONNX Runtime crashes twice.
        EndedBySignal
            If the process was ended by a signal from outside.
        """
        request = {"kernels": str(kernels or ""), "optimized": optimized}
        try:
            self._ask(request, model)
        except _Ended:
            # A signal from outside may look like a crash; a crash caused by the graph repeats.
            self._stop()
            self._errors.truncate(self._errors.seek(0))
            self.process = self._start()
            try:
                self._ask(request, model)
            except _Ended as error:
                raise RuntimeFault(str(error), crashed=True) from None

    def profile(
        self,
        model: bytes,
        feeds: Mapping[str, npt.NDArray[np.generic]],
        weights: Mapping[str, Sequence[int]],
        threads: int,
    ) -> dict[str, float]:
        """Seconds of the nodes of a graph, by their names; see `profile.profile`.

        Raises
        ------
        RuntimeFault
            If ONNX Runtime cannot run it, or crashes.
        EndedBySignal
            If the process was ended by a signal from outside.
        """
        arrays = {name: (array.dtype.str, array.shape) for name, array in feeds.items()}
        request = {"model": len(model), "arrays": arrays, "weights": dict(weights), "threads": threads}
        try:
            reply = self._ask(request, b"".join([model, *(array.tobytes() for array in feeds.values())]))
        except _Ended as error:
            raise RuntimeFault(str(error), crashed=True) from None
        seconds: dict[str, float] = reply["seconds"]
        return seconds

    def _ask(self, request: dict[str, Any], model: bytes) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            _send(self.process.stdin, request, model)
            reply = _receive(self.process.stdout)[0]
        except (BrokenPipeError, EOFError):
            raise _Ended(self._last_output()) from None
        if "error" in reply:
            raise RuntimeFault(reply["error"])
        return reply

    def _stop(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _last_output(self) -> str:
        """The last output of the dead process, or how it ended."""
        code = self.process.wait()
        check_signal(code, "the process in which ONNX Runtime loads the graphs")
        self._errors.seek(0)
        lines = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        end = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"{end}: {lines[-1]}" if lines and code >= 0 else end


def _send(pipe: IO[bytes], header: dict[str, Any], payload: bytes) -> None:
    pipe.write(json.dumps({**header, "size": len(payload)}).encode() + b"\n")
    pipe.write(payload)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    line = pipe.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    header: dict[str, Any] = json.loads(line)
    payload = pipe.read(header["size"])
    if len(payload) < header["size"]:
        raise EOFError
    return header, payload


def serve() -> None:
    """The child's loop: replies until its input ends."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # the output of ONNX Runtime must not mix with the replies
    requests = sys.stdin.buffer
    from ortflow.workflow.onnx_runtime import native as runtime

    while True:
        try:
            request, payload = _receive(requests)
        except EOFError:
            return
        try:
            reply = _profile(request, payload) if "arrays" in request else _load(runtime, request, payload)
        except Exception as error:  # noqa: BLE001 - the parent reports any exception
            reply = {"error": str(error)}
        _send(replies, reply, b"")


_SLOW_OPTIMIZERS = ("CommonSubexpressionElimination", "ConstantSharing")
"""They take time with the square of the nodes, 60% of the loading of 6,000 with ONNX Runtime 1.19.2. They share equal
values, which decides nothing about kernels."""


def _load(runtime: Any, request: dict[str, Any], model: bytes) -> dict[str, Any]:
    from ortflow.workflow.onnx_runtime import onnxruntime

    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    if not request["optimized"]:
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if request["kernels"]:
        options.register_custom_ops_library(request["kernels"])
    onnxruntime.InferenceSession(
        model, options, providers=["CPUExecutionProvider"], disabled_optimizers=[*_SLOW_OPTIMIZERS]
    )
    return {}


def _profile(request: dict[str, Any], payload: bytes) -> dict[str, Any]:
    import numpy as np

    from ortflow.workflow.assembly.profile import profile

    feeds, start = {}, request["model"]
    for name, (dtype, shape) in request["arrays"].items():
        count = int(np.prod(shape, dtype=np.int64))
        feeds[name] = np.frombuffer(payload, dtype, count, start).reshape(shape)
        start += feeds[name].nbytes
    return {"seconds": profile(payload[: request["model"]], feeds, request["weights"], request["threads"])}


if __name__ == "__main__":
    serve()
