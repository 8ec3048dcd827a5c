"""Divides one model in several ways, reading it once. Called by `planning`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import onnx

from ortflow.workflow.assembly.child import Child
from ortflow.workflow.assembly.divide import divide
from ortflow.workflow.assembly.evaluating import batch_input, eval_graph
from ortflow.workflow.assembly.timing import Timing, costs_of, wants_costs
from ortflow.workflow.assembly.training import training_forms, with_loss
from ortflow.workflow.graph.intake.source import read_source
from ortflow.workflow.graph.objective.loss import outputs_of
from ortflow.workflow.graph.stages.node_costs import NodeCosts
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.layout import TRAINED
from ortflow.workflow.parallel.division import Division
from ortflow.workflow.run.rundir import write_atomically
from ortflow.workflow.spec.run import TrainerRunSpec


class Variants:
    """The model of a run, to divide.

    Parameters
    ----------
    spec
        The run, with absolute paths.
    graphs
        Its undivided graphs.
    length, lengths, timing
        As in `build_graphs`.

    Raises
    ------
    UserError
        If the model and the run file do not fit together.
    """

    def __init__(
        self,
        spec: TrainerRunSpec,
        graphs: GraphSet,
        length: int,
        lengths: Mapping[str, int],
        timing: Timing | None = None,
    ) -> None:
        self._index, self._length, self._lengths = graphs.index, length, lengths
        self._graphs, self._timing = graphs, timing
        self._source = read_source(spec.onnx_model)
        outputs = [*outputs_of(self._source.skeleton.graph, spec.onnx_model.loss).values()]
        forward = self._source.forward(outputs)
        batch = batch_input(forward.graph, self._source)
        self._prepared, _ = with_loss(forward, spec, self._source, batch)
        self._evaluate, _ = eval_graph(outputs, spec, self._source, batch)
        self.costs: NodeCosts | None = None
        """Of the nodes, by which stages were balanced; none are known where operations were counted. None if no run on
        CPUs without named cuts was divided."""

    def write(self, spec: TrainerRunSpec, root: Path) -> Division:
        """Divide the model as a run file wants, and write the graphs of part 0 into a folder.

        Raises
        ------
        UserError
            If the model cannot be divided like this.
        """

        trained = [entry.name for entry in self._index if entry.tensor.group in TRAINED]

        def train_graph(forward: onnx.ModelProto) -> dict[str, onnx.ModelProto]:
            return training_forms(forward, spec, self._source, self._length, trained)

        divided = divide(
            spec,
            root,
            self._index,
            self._prepared,
            self._evaluate,
            trained,
            self._length,
            train_graph,
            parts=(0,),
            lengths=self._lengths,
            measured=self._costs(spec) if wants_costs(spec) else None,
        )
        for name, content in divided.files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
        return divided.division

    def _costs(self, spec: TrainerRunSpec) -> NodeCosts:
        """The costs that a run would record, measured once."""
        if self.costs is None:
            with Child() if self._timing is not None else nullcontext() as child:
                costs = costs_of(
                    self._prepared, self._source.tensors, self._graphs.inputs, spec, self._length, self._graphs.root,
                    child, self._timing,
                )  # fmt: skip
            self.costs = costs or NodeCosts("", {})
        return self.costs
