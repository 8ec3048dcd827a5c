"""Groups parameters into layers, so that ranks exchange a few large messages. Pure.

A model repeats its blocks, and exporters keep the block's path with its number in the names of parameters or of the
nodes that read them: `h.0`, `encoder.layer.11`. Parameters with one such path form a layer, in the order of their first
use. Parameters without a number are grouped by module, and small layers join the next one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.origin import scopes_of

SMALL = 1 << 12
"""Elements below which a layer joins the next one: a shorter message takes hardly less time."""
PARTS = 64
"""A layer below this fraction of the model also joins the next one: blocks without a number come in pieces."""
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Layer:
    """Parameters that ranks exchange together, in the order of their first use."""

    name: str
    """Path of the block or module; the first one if several were joined."""
    tensors: tuple[str, ...]


def layers_of(nodes: Iterable[onnx.NodeProto], counts: Mapping[str, int]) -> list[Layer]:
    """The layers of the parameters in `counts`, a map from name to number of elements.

    `nodes` are those of the forward pass, sorted. A large parameter that several blocks read (tied embeddings) is its
    own layer: otherwise it would stay in memory as long as any of them. Parameters that no node reads come last.
    """
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in nodes:
        for name in sorted(walk.inputs(node)):
            if name in counts:
                readers.setdefault(name, []).append(node)
    limit = max(SMALL, sum(counts.values()) // PARTS)
    groups: dict[str, list[str]] = {}
    separate: set[str] = set()
    for name in (*readers, *(name for name in counts if name not in readers)):
        readers_of_name = readers.get(name, [])
        if counts[name] >= limit and len({_block_of_node(node) for node in readers_of_name}) > 1:
            separate.add(name)
            groups[f"{name} "] = [name]
        else:
            groups.setdefault(block_of(name, readers_of_name), []).append(name)
    return _joined(groups, counts, limit, separate)


def block_of(name: str, readers: Sequence[onnx.NodeProto] = ()) -> str:
    """Path of the block that a parameter belongs to: its own up to its first number, else that of its first reader;
    without a number, the path of its module.
    """
    numbered = _to_number(re.split(r"[./]", name))
    if numbered is None and readers:
        numbered = _block_of_node(readers[0])
    return numbered or name.rpartition(".")[0] or name


def _block_of_node(node: onnx.NodeProto) -> str | None:
    numbers = (_to_number(scope.split(".")) for scope in scopes_of(node))
    return next((path for path in numbers if path is not None), None)


def _to_number(steps: Sequence[str]) -> str | None:
    for place, step in enumerate(steps):
        if _NUMBER.fullmatch(step) and place:
            return ".".join(steps[: place + 1])
    return None


def _joined(groups: Mapping[str, list[str]], counts: Mapping[str, int], limit: int, separate: set[str]) -> list[Layer]:
    """Join layers with their neighbours until each has at least `limit` elements, if possible."""
    layers: list[Layer] = []
    waiting: list[str] = []
    first = ""
    for path, names in groups.items():
        if separate.intersection(names):
            layers.append(Layer(names[0], tuple(names)))
            continue
        first = first or path
        waiting += names
        if sum(counts[name] for name in waiting) >= limit:
            layers.append(Layer(first, tuple(waiting)))
            first, waiting = "", []
    if waiting:
        last = max(
            (place for place, layer in enumerate(layers) if not separate.intersection(layer.tensors)), default=-1
        )
        if last >= 0:
            layers[last] = Layer(layers[last].name, (*layers[last].tensors, *waiting))
        else:
            layers.append(Layer(first, tuple(waiting)))
    return layers
