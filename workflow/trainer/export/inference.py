"""Writes the inference model and compares it on real samples with the graph it was made from.

Called by the graph trainer and by the export of a checkpoint. The file runs as its users will run it: in a plain
session, with ONNX Runtime's optimisations, and with its weights inside. The graph runs unoptimised, with the trained
parameters as inputs bound to their flat buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortflow.workflow.device import Buffer
from ortflow.workflow.device.shard import Sliced
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.export.inference import as_function, export_inference
from ortflow.workflow.graph.export.model_file import Written
from ortflow.workflow.graph.normalize.randomness import seed_random_operators
from ortflow.workflow.graph.types import SEED, GraphSet
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.failures import SESSION_ERRORS, run_failure
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.trainer import MicroBatch

TOLERANCE = 1e-4
"""Largest difference if the run file specifies none and the model's own rounding is smaller."""
UNITS = 16
"""Units in the last place by which every parameter is moved to measure the model's rounding."""
PIECE = 1 << 20
"""Elements that are compared, or moved, at a time."""

Array = npt.NDArray[Any]
Outputs = Callable[[MicroBatch], list[Array]]
Watch = Callable[[Mapping[str, Array]], None]
"""Called with the outputs of the exported model on the first sample, by name."""


class FlatTensors(Mapping[str, Array]):
    """The tensors of a flat buffer by name; each is copied to the host on access."""

    def __init__(self, index: FlatIndex, buffer: Buffer) -> None:
        self._index, self._buffer = index, buffer

    def __getitem__(self, name: str) -> Array:
        entry = self._index[name]
        return self._buffer.slice(entry.offset, entry.end).read().reshape(entry.tensor.shape)

    def __iter__(self) -> Iterator[str]:
        return (entry.name for entry in self._index)

    def __len__(self) -> int:
        return len(self._index)


def export_checked(
    graphs: GraphSet,
    parameters: Buffer,
    sessions: Sessions,
    path: Path,
    samples: Sequence[MicroBatch],
    tolerance: float | None,
    *,
    trial: bool = False,
    watch: Watch | None = None,
) -> float | None:
    """Write the inference model with the parameters to `path`, or with `trial` only try; the file or the old one.

    Returns the largest difference of any output on the samples; None if there are no samples, or if they lack an
    input of the model. Raises UserError if the model does not load, or if the difference is larger than the
    tolerance, by default TOLERANCE or what the model's own rounding makes of it.
    """
    shapes = {entry.name: entry.tensor.shape for entry in graphs.index}
    difference: float | None = None

    def check(model_file: Written) -> None:
        nonlocal difference
        session = open_plain(model_file.path)
        difference = compared(
            graphs, session, parameters, lambda: _moved(parameters, sessions), sessions, samples, tolerance, watch
        )

    export_inference(graphs.infer, FlatTensors(graphs.index, parameters), path, check, shapes=shapes, trial=trial)
    return difference


def compared(
    graphs: GraphSet,
    session: onnxruntime.InferenceSession,
    parameters: Sliced,
    moved: Callable[[], Sliced],
    sessions: Sessions,
    samples: Sequence[MicroBatch],
    tolerance: float | None,
    watch: Watch | None = None,
) -> float | None:
    """The largest difference between an exported model and the graph it was made from; None if there is no sample.

    Parameters
    ----------
    graphs
        Of the run.
    session
        Of the exported model.
    parameters
        The trained ones.
    moved
        Returns a copy of them with the elements moved by UNITS, to measure the model's rounding.
    sessions
        Open the graph.
    samples, tolerance, watch
        As in `export_checked`.

    Raises
    ------
    UserError
        If the difference is larger than the tolerance.
    """
    inputs = {value.name for value in session.get_inputs()}
    if not samples or any(inputs - batch.arrays.keys() for batch in samples):
        return None
    names = [value.name for value in session.get_outputs()]
    model = as_function(graphs.infer, {entry.name: entry.tensor.shape for entry in graphs.index})[0]
    draws = seed_random_operators(model)
    content = model.SerializeToString()
    graph = sessions.open(content, as_written=True)

    def outputs_with(tensors: Sliced) -> Outputs:
        return _outputs_with(Binding(graph, sessions.device), graphs.index, tensors, names)

    expected = outputs_with(parameters)
    exported = _outputs_of(session)
    if draws:
        # The file draws other numbers each time, so the graph stands in for it, optimised as it is.
        binding = Binding(sessions.open(content), sessions.device)
        exported = _outputs_with(binding, graphs.index, parameters, names)
    if watch is not None:
        exported = _watched(exported, names, watch)
    difference = _difference(exported, expected, samples)
    allowed = TOLERANCE if tolerance is None else tolerance
    if tolerance is None and not difference <= allowed:
        allowed = max(allowed, _difference(outputs_with(moved()), expected, samples))
    if not difference <= allowed:
        raise UserError(
            f"the exported model differs by {difference:.3g} from the graph it was made from on real samples, "
            f"more than {allowed:.3g}",
            where="export.tolerance",
            fix="raise it if the model tolerates that, or set export.enabled to false",
        )
    return difference


def open_plain(
    file: Path, entries: Mapping[str, str] | None = None, disabled: Sequence[str] = (), *, threads: int = 0
) -> onnxruntime.InferenceSession:
    """A session of an exported model as its users open it; `entries`, `disabled` optimizers and `threads` change that.

    Raises UserError if ONNX Runtime refuses the model.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    for key, value in (entries or {}).items():
        options.add_session_config_entry(key, value)
    try:
        return onnxruntime.InferenceSession(
            str(file), options, providers=["CPUExecutionProvider"], disabled_optimizers=[*disabled] or None
        )
    except SESSION_ERRORS as error:
        raise UserError(
            f"ONNX Runtime cannot load the exported model: {' '.join(str(error).split())}",
            where="export",
            fix="set export.enabled to false to train without an export",
        ) from None


def _outputs_of(session: onnxruntime.InferenceSession) -> Outputs:
    names = [value.name for value in session.get_inputs()]

    def run(batch: MicroBatch) -> list[Array]:
        try:
            values: list[Array] = session.run(None, {name: batch.arrays[name] for name in names})
        except SESSION_ERRORS as error:
            raise run_failure(str(error)) from error
        return values

    return run


def _watched(outputs: Outputs, names: Sequence[str], watch: Watch) -> Outputs:
    """The same, shown to `watch` the first time."""
    watches = [watch]

    def run(batch: MicroBatch) -> list[Array]:
        values = outputs(batch)
        while watches:
            watches.pop()(dict(zip(names, values, strict=True)))
        return values

    return run


def _outputs_with(binding: Binding, index: FlatIndex, parameters: Sliced, names: Sequence[str]) -> Outputs:
    binding.read_tensors(index, parameters)

    def run(batch: MicroBatch) -> list[Array]:
        for name in binding.inputs & batch.arrays.keys():
            binding.feed(name, batch.arrays[name])
        if SEED in binding.inputs:
            binding.feed(SEED, np.zeros(1, np.int64))
        return binding.fetch(names)

    return run


def _moved(parameters: Buffer, sessions: Sessions) -> Buffer:
    moved = sessions.device.allocate(parameters.count, parameters.dtype)
    random = np.random.default_rng(0)
    for start in range(0, parameters.count, PIECE):
        stop = min(start + PIECE, parameters.count)
        moved.slice(start, stop).write(moved_values(parameters.slice(start, stop).read(), random))
    return moved


def moved_values(values: Array, random: np.random.Generator) -> Array:
    """The values, each UNITS units in its last place larger or smaller, by chance."""
    step = np.float32(UNITS * np.finfo(np.float32).eps)
    signs = random.integers(0, 2, len(values), np.int8) * np.float32(2) - np.float32(1)
    moved: Array = values * (np.float32(1) + signs * step)
    return moved


def _difference(exported: Outputs, expected: Outputs, samples: Sequence[MicroBatch]) -> float:
    """Largest difference of any output over all samples; NaN where only one of the two gives a number."""
    return max((_difference_on(batch, exported, expected) for batch in samples), key=_or_nan, default=0.0)


def _difference_on(batch: MicroBatch, exported: Outputs, expected: Outputs) -> float:
    return max(
        (relative(*pair) for pair in zip(exported(batch), expected(batch), strict=True)), key=_or_nan, default=0.0
    )


def relative(exported: Array, expected: Array) -> float:
    """Largest |exported - expected| / (1 + |expected|): absolute where values are small, relative where they are large.

    NaN where only one is a number, or where the shapes differ.
    """
    if exported.shape != expected.shape:
        return float("nan")
    flat_exported, flat_expected = exported.reshape(-1), expected.reshape(-1)
    largest = 0.0
    for start in range(0, flat_exported.size, PIECE):
        a, b = (flat[start : start + PIECE].astype(np.float64) for flat in (flat_exported, flat_expected))
        with np.errstate(invalid="ignore"):
            difference = np.abs(a - b) / (1.0 + np.abs(b))
        difference[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
        worst = float(np.max(difference, initial=0.0))
        largest = max(largest, worst, key=_or_nan)
    return largest


def _or_nan(value: float) -> tuple[bool, float]:
    """Sorts NaN behind every number."""
    return np.isnan(value), value
