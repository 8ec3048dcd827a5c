"""A kernel of one thread for nodes that compute with single numbers: see `ortflow.workflow.fusion.scalars`.

Scalars (inputs of one element...) -> outputs of one element and `ranks` axes; `source` is the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import c_void_p
from typing import Any

from ortflow.workflow.cuda.call import Call
from ortflow.workflow.cuda.nvrtc import EXACT
from ortflow.workflow.cuda.registry import operator
from ortflow.workflow.cuda.source import size_of
from ortflow.workflow.errors import OrtflowError


@operator()
class Scalars:
    """See the module."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self._source, self._ranks = str(attributes["source"]), [int(rank) for rank in attributes["ranks"]]

    def run(self, call: Call) -> None:
        """See Operator. Raises OrtflowError if an input has more than one element."""
        scalars = [call.given(place) for place in range(len(call.inputs))]
        if any(size_of(scalar) != 1 for scalar in scalars):
            raise OrtflowError(f"single numbers, and the inputs are {[list(scalar.shape) for scalar in scalars]}")
        targets = [call.output(place, (1,) * rank) for place, rank in enumerate(self._ranks)]
        call.launch(
            self._source,
            "scalars",
            1,
            1,
            *map(c_void_p, [*(scalar.pointer for scalar in scalars), *targets]),
            options=EXACT,
        )
