"""The sessions of a structure: graphs built, or read from the cache, and opened. Called by `structures`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
import torch

from ortflow.torch.cache import cached
from ortflow.torch.captured import CapturedGraph
from ortflow.torch.execution import Graph
from ortflow.torch.graphs import Forward, Pair, Target, forward_of, on_host, pair_of
from ortflow.torch.half_weights import HalfWeights
from ortflow.torch.runtime import HALF, Place, sessions_for
from ortflow.torch.settings import Settings
from ortflow.torch.tracing import Traced
from ortflow.torch.verify import fixed
from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.trainer.obstacles import obstacle_of

_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Plan:
    """The sessions of a pair of graphs."""

    pair: Pair
    forward: Graph | CapturedGraph
    backward: Graph | CapturedGraph | None
    threads: int
    kernels: str
    """What computes them besides ONNX Runtime."""
    half_weights: HalfWeights

    def fed(self, feed: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What a call gives and the copies of parameters in half precision: all that the forward graph reads."""
        return {**feed, **self.half_weights.of(feed)}

    @functools.cached_property
    def reads(self) -> tuple[str, ...]:
        """Inputs of both graphs that a call gives."""
        names = [*self.forward.inputs]
        if self.backward is not None:
            inner = {*self.pair.kept, *self.pair.given.values(), *names}
            names += [name for name in self.backward.inputs if name not in inner]
        return tuple(names)


class Plans:
    """Makes the sessions of a structure."""

    def __init__(
        self,
        trace: Traced,
        forward: Forward,
        variables: Sequence[str],
        settings: Settings,
        place: Place,
        training: bool,
        frozen: frozenset[str],
    ) -> None:
        self._traced, self.forward, self.wanted, self._settings = trace, forward, tuple(variables), settings
        self.place = place
        half = HALF.get(place.precision)
        halves = [output.name for output in trace.outputs if output.kind == "graph" and output.dtype is half]
        self._target = Target(place.kind, place.precision, settings.memory_level, tuple(halves))
        self._mode, self._frozen = "training" if training else "evaluation", frozen

    def opened(self, roots: frozenset[str], threads: int) -> Plan:
        """Sessions for gradients of these outputs. Raises UserError."""
        forward, settings = self.forward, self._settings
        order = [name for name in forward.outputs if name in roots]

        def made() -> Pair:
            return pair_of(forward, self.wanted, order, self._traced.tensors, self._target)

        key = [*self.wanted, "", *order, repr(self._target), *sorted(self._frozen)]
        pair = cached(settings.cache, self._traced.model, key, made) if settings.cache else made()
        if settings.debug.save_onnx:
            self._save(pair)
        return self._open(pair, threads)

    def without_randomness(self, plan: Plan) -> Plan | None:
        """Sessions in which a fixed sequence replaces random numbers; None if one cannot be replaced."""
        model = fixed(self._traced.model)
        if model is None:
            return None
        forward = forward_of(model, self._frozen)
        pair = pair_of(forward, self.wanted, [*plan.pair.given], self._traced.tensors, self._target)
        return self._open(pair, plan.threads)

    def _open(self, pair: Pair, threads: int) -> Plan:
        captures = self.place.kind == "cuda" and self._settings.cuda_graphs and pair.backward is not None
        level = self._settings.debug.log_level.name.lower()
        sessions = sessions_for(self.place, threads, level, own_stream=captures)

        def opened(model: onnx.ModelProto, name: str, aliases: Mapping[str, str]) -> Graph | CapturedGraph:
            graph = Graph(sessions.open(model.SerializeToString()), sessions.device, on_host(model), aliases)
            if not captures:
                return graph
            assert isinstance(sessions.device, CudaDevice)
            # Buffers that a call changes are copies where it can be repeated (`function`).
            stable = {*self._traced.tensors, *pair.kept, *pair.halves} - {*self.forward.moved}
            return CapturedGraph(graph, sessions.device, name, stable, obstacle_of(model))

        forward = opened(pair.forward, "the forward graph", pair.aliases)
        backward = None if pair.backward is None else opened(pair.backward, "the backward graph", {})
        half_weights = HalfWeights(pair.halves, HALF.get(self.place.precision), stays=captures)
        return Plan(pair, forward, backward, threads, sessions.kernels, half_weights)

    def _save(self, pair: Pair) -> None:
        debug = self._settings.debug
        prefix = f"{debug.onnx_prefix}_{self._mode}_{next(_NUMBERS)}"
        for name, model in (("exported", self._traced.model), ("forward", pair.forward), ("backward", pair.backward)):
            if model is not None:
                onnx.save(model, debug.folder / f"{prefix}_{name}.onnx")
