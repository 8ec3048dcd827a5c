"""The passes that make the graphs of a run, and the graph behind any of them. Called by `ortflow inspect --passes`.

Applies what `build_graphs` applies, without the tests of sessions. Parts of a divided model are made from the graph
behind `training/loss`, by the same passes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from ortflow.workflow.assembly.evaluating import batch_input, eval_graph, inference_graph
from ortflow.workflow.assembly.targets import all_passes
from ortflow.workflow.assembly.training import training_of
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.intake.lora import with_lora
from ortflow.workflow.graph.intake.source import read_source
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.passes import copied
from ortflow.workflow.graph.objective.loss import outputs_of
from ortflow.workflow.run.rundir import write_atomically
from ortflow.workflow.spec.run import TrainerRunSpec

_LARGEST = 1 << 31
"""Bytes of a protobuf message."""


@dataclass(frozen=True)
class Effect:
    """What a pass has changed."""

    name: str
    """Such as `training/gradient`: the graph and the pass. Passes of the model itself have no graph before them."""
    nodes: int
    """Nodes of the graph behind it, with those of subgraphs and functions."""
    added: dict[str, int]
    """Operator -> how many more of it there are than behind the pass before it."""
    removed: dict[str, int]


class Recorder:
    """A Watch that records the effect of every pass, and the graph behind one."""

    def __init__(self, name: str | None = None) -> None:
        self.effects: list[Effect] = []
        self.graph: bytes | None = None
        self._name = name
        self._operators: dict[str, Counter[str]] = {}
        lists = reversed(all_passes())
        self._beginnings = {passes.graph: passes.behind for passes in lists}
        """Graph -> the pass behind which its first list begins."""

    def __call__(self, name: str, model: onnx.ModelProto) -> None:
        graph = name.rpartition("/")[0]
        operators = Counter(str(node.op_type) for node in walk.all_nodes(model))
        before = self._operators.get(graph, self._operators.get(self._beginnings.get(graph, ""), Counter()))
        self._operators[graph] = self._operators[name] = operators
        added, removed = operators - before, before - operators
        self.effects.append(Effect(name, operators.total(), dict(added), dict(removed)))
        if name == self._name:
            if model.ByteSize() >= _LARGEST:
                raise UserError(f"the graph behind {name} is larger than 2 GiB, which no ONNX file is")
            self.graph = model.SerializeToString(deterministic=True)


def passes_of(spec: TrainerRunSpec, after: str | None = None) -> Recorder:
    """Make the graphs of a run whose paths are absolute, and record the passes; `after` names the one to keep.

    Raises UserError if the model and the run file do not fit together, or if there is no such pass.
    """
    recorder = Recorder(after)
    section = spec.onnx_model
    source = with_lora(read_source(section, recorder), section.lora, spec.seed)
    outputs = [*outputs_of(source.skeleton.graph, section.loss).values()]
    forward = source.forward(outputs)
    batch = batch_input(forward.graph, source)
    training = training_of(forward, spec, source, batch, 0, recorder)
    if training.prepared is None:
        recorder("training/own-graph", training.plain)
    if spec.on_gpus:
        from ortflow.workflow.assembly.gpu_forms import gpu_forms

        gpu_forms(copied(training.plain), training.forms.get(Form.PLACED), recorder)
    eval_graph(outputs, spec, source, batch, recorder)
    inference_graph(spec, source, recorder)
    if after is not None and recorder.graph is None:
        names = ", ".join(effect.name for effect in recorder.effects)
        raise UserError(f"there is no pass {after!r}", where="--after", fix=f"give one of {names}")
    return recorder


def write_graph(recorder: Recorder, output: Path) -> None:
    """Write the recorded graph to `output`, which must not exist. Raises UserError if it does."""
    assert recorder.graph is not None
    if os.path.lexists(output):
        raise UserError("exists and is not replaced", where=str(output), fix="choose another path, or remove it")
    write_atomically(output, recorder.graph)


def lines(effects: Sequence[Effect], shown: int = 3) -> Iterator[tuple[str, str, str]]:
    """A row for each pass: its name, the nodes behind it, and what it added and removed."""
    for effect in effects:
        changes = [f"+{count} {operator}" for operator, count in _largest(effect.added, shown)]
        changes += [f"-{count} {operator}" for operator, count in _largest(effect.removed, shown)]
        rest = len(effect.added) + len(effect.removed) - len(changes)
        yield effect.name, str(effect.nodes), ", ".join(changes) + (f" and {rest} more operators" if rest else "")


def _largest(counts: dict[str, int], shown: int) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:shown]
