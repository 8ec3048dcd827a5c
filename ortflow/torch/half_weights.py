"""Copies in half precision of the parameters that graphs convert under autocast. Used by `plans`.

A kernel converts many of them at the start of a call. As nodes, GPT-2 124M had 134 conversions in its two graphs, which
took an H200 0.6 ms of the 16 ms of a step at micro-batch 8.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ortflow.torch.memory import Block


class HalfWeights:
    """The copies of one pair of graphs.

    Parameters
    ----------
    parameters
        Name of the copy, as the graphs read it -> the parameter's.
    dtype
        Of the copies.
    stays
        Whether calls use the same memory: a captured graph reads it.
    """

    def __init__(self, parameters: Mapping[str, str], dtype: torch.dtype | None, *, stays: bool) -> None:
        self._parameters, self._dtype, self._stays = dict(parameters), dtype, stays
        self._block: Block | None = None

    def of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The copies of these parameters now. Called without gradients."""
        if not self._parameters:
            return {}
        assert self._dtype is not None
        sources = [tensors[name].detach() for name in self._parameters.values()]
        copies = self._memory([source.shape for source in sources], self._dtype, sources[0].device)
        together = [place for place, source in enumerate(sources) if source.is_contiguous()]
        # One other layout, such as channels last, would make it a kernel for each tensor.
        torch._foreach_copy_([copies[place] for place in together], [sources[place] for place in together])
        for place in {*range(len(sources))} - {*together}:
            copies[place].copy_(sources[place])
        return dict(zip(self._parameters, copies, strict=True))

    def _memory(self, shapes: list[torch.Size], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
        if not self._stays:
            return Block(shapes, dtype, device).lend()
        block = self._block
        if block is None or block.shapes != tuple(shapes) or block.device != device:
            block = self._block = Block(shapes, dtype, device)
        # The backward pass of an earlier call reads the weights of that call, which may have changed since.
        return Block(shapes, dtype, device).lend() if block.in_use else block.lend()
