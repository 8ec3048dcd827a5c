"""The help text of a key: the string under it in the section's class.

Read from the source when needed. Pydantic could keep the texts (`use_attribute_docstrings`), but would read all sources
at each start of each command.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from typing import Any

from ortflow.workflow.spec.base import Section
from ortflow.workflow.spec.file.keys import sections


def fill(of: type[Section]) -> list[type[Section]]:
    """Set `description` of every field of a section and of those below it to its text. Returns these sections.

    Not of every section that is loaded: the source of one that a package brings may be gone.
    """
    all_sections = [of]
    for section in all_sections:
        for key, field in section.model_fields.items():
            field.description = field.description or _text(section, key)
            all_sections += [below for below in sections(field) if below not in all_sections]
    return all_sections


def describe(schema: dict[str, Any], of: type[Section]) -> None:
    """Add the texts to the JSON schema of a section and of its subsections."""
    below = fill(of)
    parts = [(of, schema), *((_of_schema(name, part, below), part) for name, part in schema.get("$defs", {}).items())]
    for section, part in parts:
        if section is None:
            continue
        for key, key_schema in part.get("properties", {}).items():
            if text := section.model_fields[key].description:
                # Last, also where pydantic has put it in: what is printed must not depend on what ran before.
                key_schema["description"] = key_schema.pop("description", text)


def _of_schema(name: str, part: dict[str, Any], below: Iterable[type[Section]]) -> type[Section] | None:
    """The section that a definition was generated from. Packages may have sections of the same name with other keys."""
    keys = part.get("properties", {}).keys()
    return next(
        (section for section in below if section.__name__ == name and keys <= section.model_fields.keys()), None
    )


def _text(section: type[Section], key: str) -> str | None:
    """The text for a key in the class or its base classes."""
    for cls in section.__mro__:
        if issubclass(cls, Section) and (text := _texts(cls.__module__).get((cls.__name__, key))) is not None:
            return text
    return None


@cache
def _texts(module: str) -> dict[tuple[str, str], str]:
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):  # a package that is installed without its source
        return {}
    texts = {}
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for key, under in pairwise(cls.body):
            if not (isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name)):
                continue
            if (
                isinstance(under, ast.Expr)
                and isinstance(under.value, ast.Constant)
                and isinstance(under.value.value, str)
            ):
                texts[cls.name, key.target.id] = inspect.cleandoc(under.value.value)
    return texts
