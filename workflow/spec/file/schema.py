"""The JSON schema of a run file as people write it: RunSpec's own, plus the short forms.

Called by `ortflow schema`. It cannot express the rules of `check` between several keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ortflow.workflow.spec.base import Section
from ortflow.workflow.spec.file import installed
from ortflow.workflow.spec.file.help import describe
from ortflow.workflow.spec.file.shorthand import OWN
from ortflow.workflow.spec.problem import KeyPath
from ortflow.workflow.spec.run import OF_TRAINERS

NAMED_ITEMS: Mapping[tuple[str, ...], str] = {("model", "metrics"): "name"}
"""Lists of sections -> the key that a bare text in place of a section gives."""


def run_file_schema(
    trainers: Mapping[str, type[Section]] | None = None, launchers: Iterable[str] = ()
) -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a run file.

    Parameters
    ----------
    trainers
        Options of trainers from packages, by name.
    launchers
        Names of launchers from packages, whose sections are added.
    """
    names = sorted(launchers)
    kind = installed.spec_type(names)
    schema = kind.model_json_schema()
    describe(schema, kind)
    forms = OWN + installed.forms(names)
    for name, options in (trainers or {}).items():
        _options(schema, name, options)
    for path, key in forms.sections.items():
        _also(schema, path, _short_form(schema, _property(schema, path), key))
    for place, key in NAMED_ITEMS.items():
        described = _property(schema, place)
        (reference,) = _references(described["items"])
        described["items"] = {"anyOf": [_section(schema, reference)["properties"][key], described["items"]]}
    for path in forms.commands + forms.lines:
        _also(schema, path, {"type": "string"})
    for path in forms.minutes:
        _also(schema, path, {"type": "integer", "exclusiveMinimum": 0})
    schema |= {
        "if": _given("program"),
        "then": {"not": {"anyOf": [_given(key) for key in OF_TRAINERS]}},
        "else": {"allOf": [_given(key) for key in ("data", "train")]},
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "ortflow run file"}


def _given(key: str) -> dict[str, Any]:
    """The key is there, with a value."""
    return {"required": [key], "properties": {key: {"not": {"type": "null"}}}}


def _options(schema: dict[str, Any], name: str, options: type[Section]) -> None:
    """Insert the types of a trainer's options at the place where a run file selects it."""
    described = options.model_json_schema(ref_template=f"#/$defs/{name}.{{model}}")
    describe(described, options)
    schema["$defs"] |= {f"{name}.{key}": part for key, part in described.pop("$defs", {}).items()}
    condition = {"properties": {"name": {"const": name}}, "required": ["name"]}
    rules = schema["$defs"]["TrainerSection"].setdefault("allOf", [])
    rules.append({"if": condition, "then": {"properties": {"options": described}}})


def _also(schema: dict[str, Any], path: KeyPath, form: dict[str, Any]) -> None:
    """Also allow `form` at `path`."""
    described = _property(schema, path)
    full = {key: described.pop(key) for key in [*described] if key not in ("title", "description", "default")}
    described["anyOf"] = [form, full]


def _short_form(schema: dict[str, Any], described: dict[str, Any], key: str) -> dict[str, Any]:
    """The schema of a bare text in place of a section: that of the section's `key`."""
    if "discriminator" in described:
        return {"type": "string", "enum": [*described["discriminator"]["mapping"]]}
    short: dict[str, Any] = _section(schema, _references(described)[0])["properties"][key]
    # A key may take a list, too, which only its full form does.
    return next((arm for arm in short.get("anyOf", ()) if arm.get("type") == "string"), short)


def _property(schema: dict[str, Any], path: KeyPath) -> dict[str, Any]:
    section = schema
    for name in path[:-1]:
        described = section["properties"][name]
        (reference,) = _references(described)
        section = _section(schema, reference)
    property_schema: dict[str, Any] = section["properties"][path[-1]]
    return property_schema


def _references(described: dict[str, Any]) -> list[str]:
    """The sections that a property may be; a short form is an arm around those of an optional section."""
    if "$ref" in described:
        return [described["$ref"]]
    return [reference for arm in described.get("anyOf", ()) for reference in _references(arm)]


def _section(schema: dict[str, Any], reference: str) -> dict[str, Any]:
    section: dict[str, Any] = schema["$defs"][reference.rpartition("/")[2]]
    return section
