"""A node that communicates with the GPUs of other ranks: see `ortflow.workflow.graph.ir.collective`.

Collective (value, token of the collective before?) -> value, token fp32 [] of no meaning?. `Operators.on_collective`
queues the work.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from ortflow.workflow.cuda.call import Call
from ortflow.workflow.cuda.registry import operator

_GATHER, _SCATTER = 2, 3
"""Kinds whose result has more, or fewer, rows than the value."""


@operator()
class Collective:
    """See the module."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self._kind, self._channel, self._parts = (int(attributes[name]) for name in ("kind", "channel", "parts"))

    def run(self, call: Call) -> None:
        """Queue the collective."""
        source = call.given(0)
        shape = list(source.shape)
        if self._kind == _GATHER:
            shape[0] *= self._parts
        elif self._kind == _SCATTER:
            shape[0] //= self._parts
        target = call.output(0, shape)
        if len(call.types) > 1:
            call.output(1, ())
        if target and prod(source.shape):
            call.collect(self._kind, self._channel, self._parts, source, target)
