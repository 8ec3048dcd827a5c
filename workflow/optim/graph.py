"""The optimizer graph: one update rule over every segment of the flat buffers, in place.

Built by `configure`, bound and run by the trainer. Outputs may share the memory of their inputs: in every graph built
here, each reader of an input comes before, or is, the elementwise node that writes its output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx
from onnx import TensorProto

from ortflow.workflow.optim import adafactor, adagrad, adam, average, lamb, lion, muon, nadam, radam, rmsprop, sgd
from ortflow.workflow.optim.builder import Builder
from ortflow.workflow.optim.segments import Segment
from ortflow.workflow.spec.optimizers import Optimizer, moments


def optimizer_graph(optimizer: Optimizer, segments: Sequence[Segment], *, kernels: bool = False) -> onnx.ModelProto:
    """Graph of one step of an optimizer over segments.

    Inputs are `learning_rate` fp32 [1], `step` int64 [1] (1 for the first step; only if the rule has bias correction),
    and for segment i `parameters.i`, `gradients.i` and `<moment>.i`, fp32 [count]. Outputs are `parameters.i.out` and
    `<moment>.i.out`, to be bound to the memory of the inputs. With averaged segments there is the input `average_rate`
    fp32 [1] too, and `average.i` is one more moment. The contents of the gradients are undefined afterwards.

    Parameters
    ----------
    optimizer
        `train.optimizer` of the run file.
    segments
        Slices of the flat buffer.
    kernels
        Use our own operators, which need their library.
    """
    return update_of(optimizer, segments, kernels=kernels).model()


def update_of(optimizer: Optimizer, segments: Sequence[Segment], *, kernels: bool = False) -> Builder:
    """The graph of `optimizer_graph`, which can be read and changed."""
    build = Builder("optimizer", kernels=kernels)
    build.input("learning_rate", 1)
    build.input("step", 1, TensorProto.INT64)
    for i, segment in enumerate(segments):
        states = [f"{name}.{i}" for name in ("parameters", *moments(optimizer))]
        if optimizer.name == "muon" and segment.shape is not None:
            states = [f"{name}.{i}" for name in ("parameters", "moment_1")]
        for name in (*states, f"gradients.{i}"):
            build.input(name, segment.count)
        for name in states:
            build.output(f"{name}.out", segment.count)
    UPDATES[optimizer.name](build, optimizer, segments)
    average.update(build, segments)
    return build


UPDATES: dict[str, Callable[[Builder, Any, Sequence[Segment]], None]] = {
    "adam": adam.update,
    "adamw": adam.update,
    "lamb": lamb.update,
    "sgd": sgd.update,
    "lion": lion.update,
    "rmsprop": rmsprop.update,
    "adagrad": adagrad.update,
    "nadam": nadam.update,
    "radam": radam.update,
    "adafactor": adafactor.update,
    "muon": muon.update,
}
"""Optimizer name -> the function that appends its update."""
