"""Further forms of an exported model: optimised by ONNX Runtime, or quantised, each measured on real samples.

Called by step `export`. A form that differs by more than its tolerance is refused and not written.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
from typing_extensions import assert_never

from ortflow.workflow.data.inputs import MicroBatch
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.head import PRODUCER, check_export
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.spec.export import ExportSection
from ortflow.workflow.system.own_files import name_start
from ortflow.workflow.weights.table import Array

Kind = Literal["optimized", "int8", "fp16"]
OPTIMIZED_TOLERANCE = 1e-4
"""Relative difference that another order of additions may make."""
ROUNDS = 5
"""Times that the samples are run for the latency; the median counts."""
# protobuf reads and writes at most 2 GiB.
LARGEST = 1_500_000_000
"""Bytes of a model file; larger ones have their weights beside them."""


@dataclass(frozen=True)
class Variant:
    """A further form, and what was measured of both."""

    kind: Kind
    path: Path
    difference: float
    """Root of the mean squared difference of the outputs on the samples, relative to that of the exported model's."""
    agreement: float | None
    """Fraction of rows whose largest element is the same; None if no output has rows of several elements."""
    bytes: tuple[int, int]
    """Size of the form and of the exported model."""
    seconds: tuple[float, float]
    """Median time of a micro-batch, of both."""
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Loss and metrics of both; empty if they were not measured."""

    def __str__(self) -> str:
        (size, before), (now, then) = self.bytes, self.seconds
        agreement_text = (
            "" if self.agreement is None else f", the largest output the same in {self.agreement:.2%} of rows"
        )
        return (
            f"{self.path}: {size / before:.2f} of the size and {now / then:.2f} of the time of the exported model,"
            f" relative difference {self.difference:.2g}{agreement_text}{self._metrics()}"
        )

    def _metrics(self) -> str:
        if not self.metrics:
            return "; no metric was measured, because it needs more than the model's outputs"
        shown = ", ".join(f"{name} {now:.4g} instead of {then:.4g}" for name, (now, then) in self.metrics.items())
        return f"; {shown}"

    def to_json(self) -> dict[str, Any]:
        """Fields of the event."""
        return {
            "kind": self.kind, "path": str(self.path), "difference": self.difference, "agreement": self.agreement,
            "bytes": self.bytes[0], "seconds": self.seconds[0], "exported_bytes": self.bytes[1],
            "exported_seconds": self.seconds[1],
            "metrics": {name: now for name, (now, _) in self.metrics.items()},
            "exported_metrics": {name: then for name, (_, then) in self.metrics.items()},
        }  # fmt: skip


def kinds_of(section: ExportSection) -> list[Kind]:
    """The forms that a run file wants."""
    kinds: list[Kind] = ["optimized"] if section.optimize else []
    return kinds + ([section.quantize] if section.quantize else [])


def path_of(model: Path, kind: Kind) -> Path:
    """The file of a form: `model.int8.onnx` beside `model.onnx`."""
    return model.with_name(f"{model.stem}.{kind}{model.suffix}")


@dataclass(frozen=True)
class Judge:
    """What measures the metrics of a model, and which of them decides."""

    measure: Callable[[Sequence[str], Iterable[tuple[Sequence[Array], MicroBatch]]], Mapping[str, float] | None]
    """From the names of outputs, and their values for each batch, to values by name."""
    batches: Callable[[], Iterable[MicroBatch]]
    """The samples."""
    metric: str
    higher_is_better: bool

    def of(self, session: Any) -> Mapping[str, float]:
        """The values of a model; empty if its outputs do not determine them."""
        names = [value.name for value in session.get_outputs()]
        inputs = [value.name for value in session.get_inputs()]
        results = (
            (session.run(names, {name: batch.arrays[name] for name in inputs}), batch) for batch in self.batches()
        )
        return self.measure(names, results) or {}

    def worse(self, now: float, then: float) -> float:
        """How much worse a value is, relative to the one before; not above 0 if it is not."""
        if math.isnan(then):
            return 0.0
        lost = then - now if self.higher_is_better else now - then
        return math.inf if math.isnan(lost) else lost / (abs(then) or 1.0)


def write_variants(
    model: Path, section: ExportSection, samples: Sequence[MicroBatch], judge: Judge | None = None
) -> Iterator[Variant]:
    """Write and measure the forms of an exported model.

    Raises UserError if one cannot be made, or differs by more than its tolerance, in its outputs or in its metric.
    """
    for kind in kinds_of(section):
        yield _variant(model, kind, section, samples, judge)


def _variant(
    model: Path, kind: Kind, section: ExportSection, samples: Sequence[MicroBatch], judge: Judge | None
) -> Variant:
    key = "export.optimize" if kind == "optimized" else "export.quantize"
    out = path_of(model, kind)
    check_export(out)
    if model.stat().st_size > LARGEST or list(model.parent.glob(f"{model.stem}-*.data")):
        raise UserError("the model is too large for one file", where=key, fix="remove the key")
    before = _session(model, key)
    inputs = [value.name for value in before.get_inputs()]
    if not samples or any(name not in batch.arrays for batch in samples for name in inputs):
        raise UserError("there are no samples with the model's inputs to measure on", where=key, fix="remove the key")
    feeds = [{name: batch.arrays[name] for name in inputs} for batch in samples]
    with tempfile.TemporaryDirectory(prefix=f".{name_start(out.name)}.", dir=out.parent) as folder:
        part = Path(folder) / out.name
        _make(model, part, kind, feeds, key)
        after = _session(part, key)
        difference, agreement = _compared(before, after, feeds)
        allowed = OPTIMIZED_TOLERANCE if kind == "optimized" else section.quantize_tolerance
        if not difference <= allowed:
            raise UserError(
                f"the {kind} model differs by {difference:.3g} from the exported one on real samples, more than"
                f" {allowed:.3g}, and is not written",
                where=key,
                fix="raise export.quantize_tolerance if the model tolerates that, or remove the key",
            )
        metrics = {} if judge is None else _judged(judge, before, after, kind, key, section.metric_tolerance)
        seconds = _seconds(after, before, feeds)
        sizes = part.stat().st_size, model.stat().st_size
        os.replace(part, out)
    return Variant(kind, out, difference, agreement, sizes, seconds, metrics)


def _judged(
    judge: Judge, before: Any, after: Any, kind: Kind, key: str, tolerance: float
) -> dict[str, tuple[float, float]]:
    """Loss and metrics with both models. Raises UserError if the metric that decides is worse beyond the tolerance."""
    then, now = judge.of(before), judge.of(after)
    pairs = {name: (now[name], then[name]) for name in then if name in now}
    if judge.metric in pairs and not judge.worse(*pairs[judge.metric]) <= tolerance:
        value, exported = pairs[judge.metric]
        raise UserError(
            f"the {kind} model has the {judge.metric} {value:.4g} on real samples, and the exported one {exported:.4g}:"
            f" it is worse by more than {tolerance:.3g} of that, and is not written",
            where=key,
            fix="raise export.metric_tolerance if that is good enough, or remove the key",
        )
    return pairs


def _make(model: Path, out: Path, kind: Kind, feeds: Sequence[Mapping[str, Array]], key: str) -> None:
    import onnx

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if kind == "optimized":
                _optimize(model, out)
            elif kind == "fp16":
                _halve(model, out)
            elif kind == "int8":
                _quantize(model, out, feeds)
            else:
                assert_never(kind)
        converted = onnx.load(out)
    except Exception as error:  # whatever ONNX Runtime's tools raise
        first = str(error).strip().partition("\n")[0]
        raise UserError(
            f"ONNX Runtime cannot make the {kind} model ({type(error).__name__}: {first})", where=key,
            fix="remove the key",
        ) from error  # fmt: skip
    converted.producer_name = PRODUCER
    onnx.save(converted, out)


def _optimize(model: Path, out: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    # Not ALL: its layouts are those of this machine's processor.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(out)
    onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])


def _halve(model: Path, out: Path) -> None:
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(model), keep_io_types=True), out)


def _quantize(model: Path, out: Path, feeds: Sequence[Mapping[str, Array]]) -> None:
    """Weights and activations of 8 bits: calibrated on the samples for convolutions, else scaled in each run."""
    import logging

    import onnx
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_dynamic,
        quantize_static,
    )

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._left = iter(feeds)

        def get_next(self) -> Any:
            return next(self._left, None)

    # Weights of 7 bits (`reduce_range`): on x86 without VNNI, ONNX Runtime adds two products of 8 bits in 16, which
    # saturate without a word (its guide to quantization; 1.19: 14% off instead of 2%). The model may run anywhere.
    # It logs advice to the root logger.
    logging.getLogger().setLevel(max(logging.ERROR, logging.getLogger().level))
    if any(node.op_type == "Conv" for node in onnx.load(model).graph.node):
        quantize_static(
            model, out, Reader(), quant_format=QuantFormat.QDQ, per_channel=True, weight_type=QuantType.QInt8,
            activation_type=QuantType.QUInt8, reduce_range=True,
        )  # fmt: skip
    else:
        quantize_dynamic(model, out, per_channel=True, weight_type=QuantType.QInt8, reduce_range=True)


def _session(path: Path, key: str) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime has a class for each kind
        raise UserError(
            f"ONNX Runtime cannot load {path.name} ({str(error).strip()[:200]})", where=key, fix="remove the key"
        ) from error


def _compared(before: Any, after: Any, feeds: Sequence[Mapping[str, Array]]) -> tuple[float, float | None]:
    """The largest relative difference of an output, and the fraction of rows with the same largest element."""
    names = [value.name for value in before.get_outputs()]
    squares = {name: np.zeros(2) for name in names}
    agreements = rows = 0
    for feed in feeds:
        for name, a, b in zip(names, after.run(names, dict(feed)), before.run(names, dict(feed)), strict=True):
            variant, reference = np.asarray(a, np.float64), np.asarray(b, np.float64)
            squares[name] += [np.sum((variant - reference) ** 2), np.sum(reference**2)]
            if reference.ndim > 1 and reference.shape[-1] > 1 and reference.size:
                agreements += int(np.sum(variant.argmax(-1) == reference.argmax(-1)))
                rows += reference.size // reference.shape[-1]
    differences = [float(np.sqrt(off / (size or 1.0))) for off, size in squares.values()]
    worst = max(differences, key=lambda value: (np.isnan(value), value), default=0.0)
    return worst, agreements / rows if rows else None


def _seconds(after: Any, before: Any, feeds: Sequence[Mapping[str, Array]]) -> tuple[float, float]:
    """Median time of a micro-batch of both sessions, which take turns: the speed of a machine drifts."""
    times: tuple[list[float], list[float]] = ([], [])
    for feed in [feed for _ in range(ROUNDS) for feed in feeds]:
        for session, durations in zip((after, before), times, strict=True):
            begun = time.perf_counter()
            session.run(None, dict(feed))
            durations.append(time.perf_counter() - begun)
    return median(times[0]), median(times[1])
