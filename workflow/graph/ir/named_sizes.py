"""Sizes that shape inference does not find, recorded in the nodes that make values of these sizes.

Written by `division`. `autodiff.sizes` reads them, so that the gradients of values of one size are not summed over axes
that might have been broadcast.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import onnx

_KEY = "ortflow.sizes"
"""Metadata key: the sizes of a node's outputs as a JSON list; null for an unknown one."""


def name_sizes(node: onnx.NodeProto, sizes: Sequence[int | str | None]) -> None:
    """Record the sizes of all axes of a node's outputs, as numbers or names, in place."""
    node.metadata_props.add(key=_KEY, value=json.dumps(list(sizes)))


def named_sizes(node: onnx.NodeProto) -> list[int | str | None]:
    """The sizes recorded in a node, or an empty list."""
    return next((json.loads(entry.value) for entry in node.metadata_props if entry.key == _KEY), [])
