"""The graphs of a structure on a GPU, queued by one call each once they are captured as CUDA graphs. Used by `plans`.

Queueing the nodes of a step takes the host longer than the GPU needs for them in models of a few hundred million
parameters. A captured graph works on the same memory every time: parameters are read where they are, other inputs are
copied to memory of the graph, and what it returns is copied out of it. Kept values stay in it, so that the captured
forward graph must not run again before they have been read: a second call before the backward pass of the first one is
queued node by node, on memory of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch

from ortflow.torch.execution import Graph, Queued
from ortflow.torch.leases import ARENA, Lease, any_captured, any_pending, note, note_captured, overwrite
from ortflow.workflow.device.capture import Repeated
from ortflow.workflow.device.cuda import CudaDevice

Tensors = Mapping[str, torch.Tensor]
LARGEST_ON_HOST = 64
"""Elements of a tensor on the host, such as sizes, that are compared with those at the capture."""


class CapturedGraph:
    """A graph as `Graph` runs it, on a stream of its own, for which PyTorch's current stream waits.

    Parameters
    ----------
    graph
        The graph, whose session computes on the device's stream.
    device
        The GPU, with a stream that can be captured.
    name
        Of the graph.
    stable
        Inputs that are at the same address in all calls: parameters, buffers and kept values.
    obstacle
        Why it must not be captured; empty if it may.
    """

    def __init__(self, graph: Graph, device: CudaDevice, name: str, stable: Collection[str], obstacle: str) -> None:
        self._graph, self._device, self._stable = graph, device, frozenset(stable)
        self._stream = torch.cuda.ExternalStream(device.stream, device=device.index)
        # Nobody reads a note: a graph that is not captured is only slower.
        # Queueing the nodes of GPT-2 124M at micro-batch 8 took the host 36 ms, and the GPU needs 15.
        self._repeated = Repeated(device, name, self._queue, lambda line: None, obstacle)
        self._given: dict[str, torch.Tensor] = {}
        """Memory of the graph for inputs that are not stable."""
        self._into: dict[str, torch.Tensor] = {}
        """Memory of the graph for outputs that a caller wants in tensors of its own."""
        self._feed: dict[str, torch.Tensor] = {}
        self._queued: list[Queued] = []
        self._captured_run: Queued | None = None
        self._made: dict[str, torch.Tensor] = {}
        """The outputs of the captured graph."""
        self._memory: object = None

    @property
    def inputs(self) -> dict[str, int]:
        """See Graph."""
        return self._graph.inputs

    @property
    def obstacle(self) -> str | None:
        """Why it is not captured; None if it is, or may be."""
        return self._repeated.obstacle

    @property
    def captured(self) -> bool:
        """Whether a call of the same sizes is launched as a whole."""
        return self._repeated.captured

    def handed_out(self, outputs: Tensors, names: Iterable[str]) -> list[torch.Tensor]:
        """See Graph. Copies: also what is queued apart may be where a captured graph has values in between."""
        return [outputs[name].clone() if any_captured() else outputs[name] for name in names]

    def run(self, inputs: Tensors, into: Tensors | None = None, lease: Lease | None = None) -> dict[str, torch.Tensor]:
        """See Graph; `lease` is of the call that later reads the kept values."""
        current, feed = torch.cuda.current_stream(self._device.index), self._placed(inputs)
        memory = feed and tuple((name, tuple(t.shape), _contents(t)) for name, t in feed.items())
        apart = feed is None or (self.captured and (any_pending(self) or memory != self._memory))
        if feed is None or apart:
            self._stream.wait_stream(current)
            # There, the graph reads inputs behind their conversions.
            with torch.cuda.stream(self._stream):
                outputs = self._graph.run(inputs, into)
            current.wait_stream(self._stream)
        else:
            for name, tensor in self._given.items():
                tensor.copy_(inputs[name])
            for name, tensor in (into or {}).items():
                # Other sizes than before come only until the graph is captured: it reads inputs of one size.
                if name not in self._into or self._into[name].shape != tensor.shape:
                    self._into[name] = torch.empty_like(tensor)
            self._feed, self._memory = feed, memory
            self._stream.wait_stream(current)
            outputs = self._repeat()
            current.wait_stream(self._stream)
            if into:
                torch._foreach_copy_([*into.values()], [self._into[name] for name in into])
                outputs = outputs | dict(into)
        if lease is not None:
            note(lease, self if self.captured and not apart else ARENA)
        return outputs

    def _repeat(self) -> dict[str, torch.Tensor]:
        if self.captured:
            overwrite(self)
        self._queued.clear()
        self._repeated.run(self._memory)
        if not self._queued:
            return self._made
        run = self._queued.pop()
        outputs = self._graph.results(run, self._into)
        if self.captured:
            self._made, self._captured_run = outputs, run
            note_captured(self)
        return outputs

    def _placed(self, inputs: Tensors) -> dict[str, torch.Tensor] | None:
        """The inputs as the captured graph reads them; None if it cannot, or not in the sizes of the first call."""
        feed: dict[str, torch.Tensor] = {}
        for name in self._graph.inputs:
            tensor = inputs[name]
            if self._graph.copies_to_host(name, tensor) or (not tensor.is_cuda and tensor.numel() > LARGEST_ON_HOST):
                return None
            if not tensor.is_cuda or (name in self._stable and self._graph.reads_in_place(name, tensor)):
                feed[name] = tensor
                continue
            if name not in self._given:
                self._given[name] = self._graph.memory_for(name, tensor.shape)
            if self._given[name].shape != tensor.shape:
                return None
            feed[name] = self._given[name]
        return feed

    def _queue(self) -> None:
        """Called by `Repeated`: outright, or while the stream is captured."""
        self._queued = [self._graph.queue(self._feed, self._into, waits=not self._device.capturing)]


def _contents(tensor: torch.Tensor) -> object:
    """What a captured graph has of an input: its address, or the numbers that the host has read from it."""
    return tensor.data_ptr() if tensor.is_cuda else tuple(tensor.reshape(-1).tolist())
