"""Hands over what a look-up's gradient is made of: see `ortflow.workflow.fusion.table_rows`.

TableRows (indices, gradient of the rows, token of the node before?) -> token fp32 [1], of no meaning. `table` is the
number that `Operators.on_rows` gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ortflow.workflow.cuda.call import Call
from ortflow.workflow.cuda.registry import operator


@operator()
class TableRows:
    """See the module."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self._table = int(attributes["table"])

    def run(self, call: Call) -> None:
        """Computes nothing itself."""
        call.output(0, (1,))
        call.rows(self._table, call.given(0), call.given(1))
