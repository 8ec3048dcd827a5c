"""Runs an exported file, before it is written, on the arguments of its module.

Called by `ortflow.exporter.comparison`. Gradients are those of a sum of the outputs with fixed weights; random
operators are replaced by fixed sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir.recorded_forms import UPDATED
from ortflow.workflow.graph.ir.recorded_roles import STATE, recorded

if TYPE_CHECKING:
    import onnx
    import torch

    from ortflow.exporter.reference import Call, Result


class ExportedFile:
    """An exported file that is about to be compared with its module: runs it as the module is called."""

    def __init__(self, model: onnx.ModelProto, module: torch.nn.Module) -> None:
        import torch

        from ortflow.exporter.file_gradients import without_values
        from ortflow.exporter.random import NotFixed, fix_in_onnx
        from ortflow.exporter.reference import NotCompared
        from ortflow.exporter.stops import keeps_stops

        stored = {tensor.name for tensor in model.graph.initializer}
        self.module = module
        self.parameters = {name: p for name, p in module.named_parameters() if name in stored}
        self.states = recorded(model).get(STATE, [])
        self.model = without_values(model, [*self.parameters, *self.states])
        self._random = without_values(model, [*self.parameters, *self.states])
        try:
            fix_in_onnx(self.model.graph)
        except NotFixed as error:
            raise NotCompared(f"{error} is random") from None
        fed = {*self.parameters, *self.states}
        self.inputs = [value.name for value in self.model.graph.input if value.name not in fed]
        self.outputs = [v.name for v in self.model.graph.output if not v.name.startswith(UPDATED)]
        rows = {
            id(part.weight): part.padding_idx
            for part in module.modules()
            if isinstance(part, torch.nn.Embedding) and part.padding_idx is not None and not keeps_stops()
        }
        self.padding = {name: rows[id(p)] for name, p in self.parameters.items() if id(p) in rows}
        """Table -> its row that is not compared."""
        self.left_out = ""
        self._graph: Any = None

    @property
    def is_differentiated(self) -> bool:
        """Whether a training graph could be built."""
        return self._graph is not None

    def _feed(self, call: Call, states: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        from ortflow.exporter.reference import NotCompared, tensors_of

        tensors = tensors_of(call, self.module.forward)
        if len(tensors) != len(self.inputs):
            raise NotCompared("the file has other inputs than forward")
        values = {name: parameter.detach().numpy() for name, parameter in self.parameters.items()}
        buffers = dict(call.module.named_buffers())
        values |= {name: buffers[name].detach().numpy() for name in self.states}
        return {**values, **(states or {}), **dict(zip(self.inputs, tensors, strict=True))}

    def computed(
        self, call: Call, weights: list[np.ndarray | None], states: Mapping[str, np.ndarray] | None = None
    ) -> Result | None:
        """Outputs and gradients in training mode; None if they cannot be computed, which is then reported."""
        from ortflow.exporter.file_gradients import run, training_graph
        from ortflow.exporter.reference import Result

        trained = [name for name, parameter in self.parameters.items() if parameter.requires_grad]
        weights_by_output = {
            name: weight for name, weight in zip(self.outputs, weights, strict=False) if weight is not None
        }
        if not trained or not weights_by_output or len(weights) != len(self.outputs):
            return None
        by = {name: f"ortflow.weights.{place}" for place, name in enumerate(weights_by_output)}
        try:
            if self._graph is None:
                self._graph = training_graph(self.model, trained, self._frozen(), by)
            graph, reached = self._graph
            values = run(
                graph, {**self._feed(call, states), **{by[name]: weight for name, weight in weights_by_output.items()}}
            )
        except (UserError, RuntimeError) as error:
            self.left_out = f"gradients were not compared with PyTorch's: {error}"
            return None
        gradients = {name: np.zeros(tuple(self.parameters[name].shape), np.float32) for name in trained}
        gradients |= {name: values[f"{name}_grad"] for name in reached}
        updates = {name: values[UPDATED + name] for name in self.states}
        return Result([values[name] for name in self.outputs], gradients, updates)

    def evaluated(self, call: Call, *, dropout: bool = True) -> Result:
        """Outputs, with running statistics."""
        from ortflow.exporter.file_gradients import evaluation_graph, run
        from ortflow.exporter.random import NotFixed, fix_in_onnx
        from ortflow.exporter.reference import NotCompared, Result

        try:
            model = evaluation_graph(self.model if dropout else self._random)
            fix_in_onnx(model.graph)
            values = run(model, self._feed(call))
        except NotFixed as error:
            raise NotCompared(f"{error} is random") from None
        except (UserError, RuntimeError) as error:
            raise NotCompared(str(error)) from None
        return Result([values[name] for name in self.outputs], {})

    def _frozen(self) -> set[str]:
        """Running statistics of normalisations that stay in evaluation mode."""
        import torch

        return {
            f"{name}.{buffer}" if name else buffer
            for name, part in self.module.named_modules(remove_duplicate=False)
            if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and not part.training
            for buffer in ("running_mean", "running_var")
        }
