"""The graphs of a structure on a GPU, queued by one call each once they are captured as CUDA graphs. Used by `plans`.

Queueing the nodes of a step takes the host longer than the GPU needs for them in models of a few hundred million
parameters. A captured graph works on the same memory every time: parameters are read where they are, other inputs are
copied to memory of the graph, and outputs are copied out of it. Kept values stay in it, so that the captured
forward graph must not run again before they have been read: a second call before the backward pass of the first one is
queued node by node, on memory of its own. Gradients are given out where the graph writes them as long as the caller has
none of the last call any more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch

from ortflow.torch.execution import Graph, Queued
from ortflow.torch.leases import (
    ARENA,
    Lease,
    any_captured,
    any_pending,
    note,
    note_captured,
    note_forgotten,
    overwrite,
)
from ortflow.torch.memory import Block
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
        self._into: Tensors = {}
        """Memory of the graph for outputs that a caller wants as tensors of PyTorch's."""
        self._block: Block | None = None
        self._lends = True
        """Whether gradients are given out where the graph writes them."""
        self._feed: dict[str, torch.Tensor] = {}
        self._queued: list[Queued] = []
        self._binding: object = None
        """Of the captured run: it has the memory of the outputs."""
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

    def run(self, inputs: Tensors, lease: Lease | None = None) -> dict[str, torch.Tensor]:
        """See Graph; `lease` is of the call that later reads the kept values."""
        feed = self._placed(inputs)
        outputs = None if feed is None else self._in_place(inputs, feed, {})
        if lease is not None:
            note(lease, self if self.captured and outputs is not None else ARENA)
        return self._apart(inputs) if outputs is None else outputs

    def gradients(self, inputs: Tensors, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
        """See Graph; in memory of the graph while the caller has none of them any more at the next call."""
        feed = self._placed(inputs)
        if feed is not None:
            block = self._block_of(shapes)
            if block is not None and self._fills(block, inputs, feed, shapes):
                if self._lends:
                    return dict(zip(shapes, block.lend(), strict=True))
                copies = self._graph.memory_of(shapes)
                torch._foreach_copy_([*copies.values()], block.tensors)
                return copies
        gradients = self._graph.memory_of(shapes)
        self._apart(inputs, gradients)
        return gradients

    def _fills(self, block: Block, inputs: Tensors, feed: dict[str, torch.Tensor], names: Iterable[str]) -> bool:
        """Run the graph on its memory, into the block; False if `_in_place` does not."""
        return self._in_place(inputs, feed, dict(zip(names, block.tensors, strict=True))) is not None

    def _block_of(self, shapes: Mapping[str, torch.Size]) -> Block | None:
        """The memory that the graph writes the gradients to; None if it is captured for other sizes."""
        block = self._block
        if block is not None and block.in_use:
            # Gradients are added up over several calls, or held: from now on they are copied.
            self._lends, block = False, None
            if self.captured:
                self._repeated.forget()
                note_forgotten(self)
        if block is None or block.shapes != tuple(shapes.values()):
            if self.captured:
                return None
            block = self._block = Block([*shapes.values()], torch.float32, self._stream.device)
        return block

    def _apart(self, inputs: Tensors, into: Tensors | None = None) -> dict[str, torch.Tensor]:
        """Queue the nodes, on memory of the call's own."""
        current = torch.cuda.current_stream(self._device.index)
        self._stream.wait_stream(current)
        # There, the graph reads inputs behind their conversions.
        with torch.cuda.stream(self._stream):
            outputs = self._graph.run(inputs, into)
        current.wait_stream(self._stream)
        return outputs

    def _in_place(
        self, inputs: Tensors, feed: dict[str, torch.Tensor], into: Tensors
    ) -> dict[str, torch.Tensor] | None:
        """Run the graph on its memory; None if the captured graph is of other memory, or must not be launched now."""
        memory = (
            tuple((name, tuple(tensor.shape), self._contents(tensor)) for name, tensor in feed.items()),
            tuple(tensor.data_ptr() for tensor in into.values()),
        )
        if self.captured and (any_pending(self) or memory != self._memory):
            return None
        current = torch.cuda.current_stream(self._device.index)
        for name, tensor in self._given.items():
            tensor.copy_(inputs[name])
        self._feed, self._into, self._memory = feed, into, memory
        self._stream.wait_stream(current)
        outputs = self._repeat()
        current.wait_stream(self._stream)
        self._feed = {}
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
            # Without the tensors that it read: lent ones, such as half weights, would stay in use.
            self._made, self._binding = outputs, run.binding
            note_captured(self)
        return outputs

    def _placed(self, inputs: Tensors) -> dict[str, torch.Tensor] | None:
        """The inputs as the captured graph reads them; None if it cannot, or not in the sizes of the first call."""
        feed: dict[str, torch.Tensor] = {}
        for name in self._graph.inputs:
            tensor = inputs[name]
            here = self._graph.is_here(tensor)
            if self._graph.copies_to_host(name, tensor) or (not here and tensor.numel() > LARGEST_ON_HOST):
                return None
            if not here or (name in self._stable and self._graph.reads_in_place(name, tensor)):
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

    def _contents(self, tensor: torch.Tensor) -> object:
        """What a captured graph has of an input: its address, or the numbers that the host has read from it."""
        return tensor.data_ptr() if self._graph.is_here(tensor) else tuple(tensor.reshape(-1).tolist())
