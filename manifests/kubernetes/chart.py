"""The chart's values.schema.json: `python -m ortflow.manifests.kubernetes.chart charts/ortflow` writes it.

It is the run file's schema, in the draft that every Helm supports. The rest of the chart is written by hand; tests
compare its defaults with the run file's, and Helm's documents with those of `ortflow render`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortflow.manifests.kubernetes.values import defaults
from ortflow.workflow.spec.checks.kubernetes import STORAGE
from ortflow.workflow.spec.file.schema import run_file_schema

TITLE = "ortflow run file, as the chart's values"
LARGEST = 2**53 - 1
"""Helm reads numbers as floating point: a larger integer would be changed without an error."""


def chart_schema() -> dict[str, Any]:
    """The schema (draft 7): the run file's, with what Kubernetes requires and what Helm adds to values."""
    run_file = run_file_schema()
    _need_defaults(run_file, run_file, defaults())
    _need(run_file["$defs"]["KubernetesBackend"], "image", "volume")
    schema: dict[str, Any] = _older(run_file)
    schema["$schema"] = "http://json-schema.org/draft-07/schema#"
    schema["title"] = TITLE
    schema["properties"]["global"] = {"type": "object", "description": "Helm's own."}
    schema["properties"]["contents"] = {
        "type": "object",
        "additionalProperties": {"type": "string"},
        "description": "Texts of backends.kubernetes.files: --set-file contents.file-0=FILE.",
    }
    definitions = schema["definitions"]
    definitions["RunVolume"]["oneOf"] = [{"required": [kind], "properties": {kind: _given(kind)}} for kind in STORAGE]
    return schema


def _need(section: dict[str, Any], *keys: str) -> None:
    """Require a section's keys, with a value."""
    section["required"] = sorted({*section.get("required", ()), *keys})
    for key in keys:
        values = section["properties"][key]
        if "anyOf" in values:
            values["anyOf"] = [value for value in values["anyOf"] if value != {"type": "null"}]


def _need_defaults(schema: dict[str, Any], section: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Require the keys of values.yaml: Helm removes a default if a value is null."""
    section["required"] = sorted({*section.get("required", ()), *values})
    for key, value in values.items():
        kind = section["properties"][key].get("$ref", "").removeprefix("#/$defs/")
        if kind and isinstance(value, dict):
            _need_defaults(schema, schema["$defs"][kind], value)


def _given(kind: str) -> dict[str, Any]:
    return {"enum": [True]} if kind == "empty_dir" else {"not": {"type": "null"}}


def _older(schema: Any) -> Any:
    """Convert a schema to draft 7."""
    if isinstance(schema, list):
        return [_older(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    draft_7: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref":
            draft_7[key] = value.replace("#/$defs/", "#/definitions/")
        elif key == "$defs":
            draft_7["definitions"] = _older(value)
        elif key == "prefixItems":
            draft_7["items"] = _older(value)
        elif key == "maximum" and value > LARGEST:
            draft_7[key] = LARGEST
        elif key == "minimum" and value < -LARGEST:
            draft_7[key] = -LARGEST
        elif key == "properties":
            required = schema.get("required", ())
            draft_7[key] = {
                name: _older(below) if name in required else _or_null(_older(below)) for name, below in value.items()
            }
        elif key in ("discriminator", "$schema"):
            continue
        else:
            draft_7[key] = _older(value)
    return draft_7


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A key that may also be null."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    if "type" in schema and "enum" not in schema and "const" not in schema:
        return {**schema, "type": [schema["type"], "null"]}
    annotations: dict[str, Any] = {key: schema.pop(key) for key in ("title", "description", "default") if key in schema}
    return {**annotations, "anyOf": [schema, {"type": "null"}]}


def main(chart: Path) -> None:
    """Write the schema into a chart."""
    text = json.dumps(chart_schema(), indent=1) + "\n"
    (chart / "values.schema.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
