"""Removes from a model file the metadata that passes write into nodes of their own graphs. Called by `read`.

Passes rely on these marks: one from outside would end a run with a traceback or, if it can be parsed, give wrong
gradients.
"""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import replace
from ortflow.workflow.graph.ir.stops import KEY

_PREFIX = "ortflow."


def forget_marks(model: onnx.ModelProto) -> None:
    """Remove all of ortflow's metadata of nodes but that of the exporter, in place."""
    for node in walk.all_nodes(model):
        entries = node.metadata_props
        if any(_is_internal(entry.key) for entry in entries):
            replace(entries, [entry for entry in entries if not _is_internal(entry.key)])


def _is_internal(key: str) -> bool:
    return key.startswith(_PREFIX) and key != KEY
