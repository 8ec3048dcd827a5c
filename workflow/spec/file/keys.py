"""The keys of a run file, found by walking the section types.

Used for error messages, short forms, and the tables of docs/run-file.md. Depends on types only, not on values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from ortflow.workflow.spec.base import Section
from ortflow.workflow.spec.problem import KeyPath
from ortflow.workflow.spec.run import RunSpec

SectionType = type[Section]


def discriminator(field: FieldInfo) -> str | None:
    """The key that selects one of several section types: `kind` of a loss, `name` of an optimizer."""
    fields = (field, *(part for part in _parts(field.annotation) if isinstance(part, FieldInfo)))
    return next((info.discriminator for info in fields if isinstance(info.discriminator, str)), None)


def sections(field: FieldInfo) -> list[SectionType]:
    """The section types of a field: none for a plain value, several for a loss or an optimizer."""
    return [part for part in _parts(field.annotation) if isinstance(part, type) and issubclass(part, Section)]


def _parts(annotation: Any) -> Iterator[Any]:
    """A type, and what it consists of: the arms of a union, the items of a list, the metadata of an annotated type."""
    yield annotation
    for part in get_args(annotation):
        yield from _parts(part)


def tags(section: SectionType, key: str) -> tuple[str, ...]:
    """Values of the discriminator `key` that select this section."""
    return tuple(get_args(section.model_fields[key].annotation))


def choices(field: FieldInfo) -> list[str]:
    """Every value of a field's discriminator."""
    key = discriminator(field)
    assert key is not None
    return [tag for section in sections(field) for tag in tags(section, key)]


def every_key(
    section: SectionType = RunSpec, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Each key path with its field, depth first, in the order of the run file."""
    for name, field in section.model_fields.items():
        yield (*path, name), field
        for below in sections(field):
            yield from every_key(below, (*path, name))


def follow(
    location: tuple[Any, ...], values: Any, root: SectionType = RunSpec
) -> tuple[KeyPath, SectionType | None, FieldInfo | None]:
    """Translate a pydantic location in `root`, which also names the arm of a union, into a key path of `values`.

    Returns the path, the section of its last key, and that key's field. An unknown key has no field; a path into a
    plain value (an item of a list) has the value's field.
    """
    path: list[str | int] = []
    section: SectionType | None = root
    arms: list[SectionType] = []
    arm_key: str | None = None
    holder, field = section, None
    expects_name = arm_named = False
    for part in location:
        if expects_name:
            # The name of one of several sections, as of an evaluation set.
            expects_name = False
            path.append(part)
            values = values[part] if isinstance(values, dict) and part in values else None
            arm_named = True
            continue
        if arm_named:
            # A section or a list, as in `tune.space`: pydantic names the arm, also if the value has such a key.
            arm_named = False
            if section is not None and part == section.__name__:
                continue
            if isinstance(part, str) and part.startswith("list["):
                section = None
                continue
        if arm_key is not None and not isinstance(part, int):
            section = next(arm for arm in arms if part in tags(arm, arm_key))
            arm_key = None
            continue
        if section is not None and not isinstance(part, int):
            holder, field = section, section.model_fields.get(part)
            arms = sections(field) if field else []
            arm_key = discriminator(field) if field else None
            section = arms[0] if len(arms) == 1 else None
            expects_name = section is not None and field is not None and get_origin(field.annotation) is dict
        elif section is None and not (isinstance(values, dict | list) and _has(values, part)):
            break
        path.append(part)
        values = values[part] if isinstance(values, dict | list) and _has(values, part) else None
    return tuple(path), holder, field


def _has(values: dict[str, Any] | list[Any], part: Any) -> bool:
    if isinstance(values, dict):
        return part in values
    return isinstance(part, int) and part < len(values)
