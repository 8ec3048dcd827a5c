"""The defaults of the keys that documents look at, taken from the run file's types.

They are the chart's values.yaml, and what a run's values are laid over. A section that need not be there has none:
what its keys are where it is there, `own_default` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ortflow.manifests.kubernetes.tree import First, Node, Ref
from ortflow.workflow.spec.base import Section
from ortflow.workflow.spec.file.keys import sections
from ortflow.workflow.spec.run import RunSpec


def paths(node: Node) -> Iterator[str]:
    """Every key path that a tree refers to."""
    if isinstance(node, Ref):
        yield node.path
    elif isinstance(node, dict):
        for key, below in node.items():
            yield from paths(key)
            yield from paths(below)
    elif isinstance(node, list | tuple):
        for item in node:
            yield from paths(item)
    elif is_dataclass(node) and not isinstance(node, type):
        for field in fields(node):
            yield from paths(getattr(node, field.name))


def steps(path: str) -> Iterator[tuple[str, FieldInfo]]:
    """Each key of a path with its field."""
    section: type[Section] | None = RunSpec
    for key in path.split("."):
        assert section is not None, path
        field = section.model_fields[key]
        yield key, field
        below = sections(field)
        section = below[0] if len(below) == 1 else None


def plain_default(field: FieldInfo) -> Any:
    """A field's default as plain data; None where it has none."""
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return None
    return default.model_dump() if isinstance(default, Section) else default


def _may_be_left_out(section: FieldInfo) -> bool:
    """Whether a section that is not given has values all the same."""
    return section.default_factory is not None or not (section.default is None or section.default is PydanticUndefined)


def defaults(found: Iterable[str]) -> dict[str, Any]:
    """The defaults at key paths, as the run file would say them."""
    values: dict[str, Any] = {}
    for path in sorted(set(found)):
        holder = values
        *around, (last, field) = steps(path)
        for key, section in around:
            if not _may_be_left_out(section):
                break
            holder = holder.setdefault(key, {})
        else:
            default = plain_default(field)
            if default is not None and not sections(field):
                holder[last] = default
    return values


def own_default(path: str) -> Node:
    """A key of a section that need not be there: its value, or the key's own default."""
    default = plain_default([*steps(path)][-1][1])
    return Ref(path) if default is None else First((Ref(path), default))
