"""Loss and metrics of a model's outputs, whatever computed them: of a quantised export. One process, on the CPU.

Made by the builder for step `export`, from the evaluation graph of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortflow.workflow.data.inputs import MicroBatch
from ortflow.workflow.graph.types import VALID
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.spec.model import ModelSection
from ortflow.workflow.trainer.evaluation import evaluated, gathered_metrics, joined

Array = npt.NDArray[Any]


class OutputMetrics:
    """The metrics of one run."""

    def __init__(self, evaluation: Path, model: ModelSection) -> None:
        """`evaluation`: the evaluation graph; `model`: section of the run file."""
        self._evaluation, self._model = evaluation, model

    def of(
        self, names: Sequence[str], results: Iterable[tuple[Sequence[Array], MicroBatch]]
    ) -> dict[str, float] | None:
        """Values by name, the loss first; None if the loss or a metric reads more of the model than its outputs.

        `results` are the outputs `names` of each batch.
        """
        import onnx

        from ortflow.workflow.graph.objective.of_outputs import objective_of_outputs

        session = None
        totals: dict[str, npt.NDArray[np.float64]] = {}
        pieces: dict[str, list[np.ndarray]] = {}
        for arrays, batch in results:
            if session is None:
                graph = objective_of_outputs(onnx.load(self._evaluation), names, batch.arrays)
                if graph is None:
                    return None
                session = _session(graph.SerializeToString())
            feeds = self._feeds(session, {**batch.arrays, **dict(zip(names, arrays, strict=True))}, batch.count)
            outputs = [value.name for value in session.get_outputs()]
            for name, array in zip(outputs, session.run(outputs, feeds), strict=True):
                if name.endswith(("_scores", "_truths")):
                    pieces.setdefault(name, []).append(array)
                else:
                    totals[name] = totals.get(name, 0.0) + np.asarray(array, np.float64).reshape(-1)
        if not totals:
            return None
        values, _ = evaluated(totals, joined([pieces], gathered_metrics(self._model)), self._model)
        return values

    def _feeds(self, session: Any, arrays: Mapping[str, Array], count: int) -> dict[str, Array]:
        inputs = {**arrays, VALID: np.array([count])}
        return {value.name: inputs[value.name] for value in session.get_inputs()}


def _session(content: bytes) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
