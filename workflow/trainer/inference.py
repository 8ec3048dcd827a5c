"""Is an exported model the one that was trained? Both are run on the same real samples.

Called by the graph trainer's export. The exported file runs as its users will run it: in a plain session, with ONNX
Runtime's own optimisations, its weights inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.sessions import Binding


def largest_difference(
    model: Path, evaluation: Binding, feed: Callable[[Binding, MicroBatch], None], samples: Sequence[MicroBatch]
) -> float:
    """Largest |exported - evaluated| / (1 + |evaluated|) over the outputs that both have, over all samples.

    `evaluation` is a fresh binding of the evaluation graph to the trained parameters, `feed` ties a batch to it.
    NaN where one of them gives what is no number and the other does not.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    inputs = [value.name for value in session.get_inputs()]
    outputs = [value.name for value in session.get_outputs() if value.name in evaluation.outputs]
    largest = 0.0
    for batch in samples:
        exported = session.run(outputs, {name: batch.arrays[name] for name in inputs})
        feed(evaluation, batch)
        evaluated = evaluation.fetch(outputs)
        for mine, theirs in zip(exported, evaluated, strict=True):
            largest = max(largest, relative(mine, theirs), key=lambda value: (np.isnan(value), value))
    return largest


def relative(exported: npt.NDArray[Any], evaluated: npt.NDArray[Any]) -> float:
    """The largest difference of two arrays, absolute where values are small and relative where they are large."""
    if exported.shape != evaluated.shape:
        return float("nan")
    a, b = exported.astype(np.float64), evaluated.astype(np.float64)
    difference = np.abs(a - b) / (1.0 + np.abs(b))
    difference[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
    return float(difference.max(initial=0.0))
