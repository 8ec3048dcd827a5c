"""Writes the tables of docs/run-file.md from the run file's types: `python docs/run_file_tables.py`.

With names of launchers it prints the tables of their sections instead, for the pages of a package.

A test fails while the tables differ from the types. Everything outside the two marker lines is written by hand.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.base import Section
from ortflow.workflow.spec.file.help import fill
from ortflow.workflow.spec.file.installed import find_options
from ortflow.workflow.spec.file.keys import SectionType, discriminator, sections, tags
from ortflow.workflow.spec.metrics import METRICS
from ortflow.workflow.spec.optimizers import OPTIMIZERS
from ortflow.workflow.spec.run import RunSpec

PAGE = Path(__file__).with_name("run-file.md")
BEGIN = "<!-- tables: written by docs/run_file_tables.py -->"
END = "<!-- end of tables -->"


def tables() -> str:
    """Markdown: one heading and table a section, in the order of the run file."""
    fill(RunSpec)
    return "\n".join([*_section(RunSpec, (), ""), *_metrics(), *_optimizers()])


def launcher_tables(name: str) -> str:
    """Markdown of the section `backends.NAME` of an installed launcher; raises UserError if there is none."""
    kind = find_options(name)
    if kind is None:
        raise UserError(f"no launcher {name!r} with options is installed")
    fill(kind)
    return "\n".join(_section(kind, ("backends", name), ""))


def updated(page: str) -> str:
    """The page with its tables made anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


def _section(section: SectionType, path: tuple[str, ...], which: str) -> Iterator[str]:
    title = f"`{'.'.join(path)}`{which}" if path else "The top level"
    yield f"### {title}\n"
    yield f"{_line(section.__doc__ or '')}\n"
    yield "| key | type | default | meaning |\n|---|---|---|---|"
    schema = section.model_json_schema()
    below: list[tuple[str, FieldInfo]] = []
    for name, field in section.model_fields.items():
        inner = sections(field)
        if inner:
            below.append((name, field))
            kind = "list of sections" if get_origin(field.annotation) is list else "section"
        else:
            kind = _type(schema["properties"][name])
        yield f"| `{name}` | {kind} | {_default(field)} | {_line(field.description or '')} |"
    yield ""
    for name, field in below:
        key = discriminator(field)
        for inner_section in sections(field):
            which = (
                "" if key is None else f" with `{key}` " + " or ".join(f"`{tag}`" for tag in tags(inner_section, key))
            )
            yield from _section(inner_section, (*path, name), which)


def _metrics() -> Iterator[str]:
    """What each evaluation metric is, for each loss that it is computed for."""
    yield "### Metrics\n"
    yield (
        "What `model.metrics` may name. Results, `train.early_stop.metric` and `ortflow list --by` name them by the"
        " metric, its average, output and label as far as they are given: `f1`, `f1_micro`, `top_5`, `mae.price`.\n"
    )
    yield "| metric | meaning | labels | what counts | better is |\n|---|---|---|---|---|"
    for name, known in METRICS.items():
        better = "higher" if known.higher_is_better else "lower"
        kinds = dict(known.tasks) if name != "graph" else {"any": "`sum` / `weight`; `better` says which is"}
        for kind, counts in (kinds or {"none": "the losses " + ", ".join(sorted(known.losses))}).items():
            yield f"| `{name}` | {known.meaning} | {kind} | {counts} | {better} |"
    yield ""


def _optimizers() -> Iterator[str]:
    """What each optimizer keeps and what its update looks at."""
    yield "### Optimizers\n"
    yield "What each `train.optimizer.name` keeps for every trained parameter besides value and gradient.\n"
    yield "| optimizer | kept | updates |\n|---|---|---|"
    for name, known in OPTIMIZERS.items():
        kept = ", ".join(f"`{moment}`" + (f" with `{key}`" if key else "") for moment, key in known.moments.items())
        updates = "tensor by tensor" if known.whole_tensors else "element by element"
        yield f"| `{name}` | {kept or 'nothing'} | {updates} |"
    yield ""


def _type(schema: dict[str, Any]) -> str:
    """A type in plain words, from its JSON schema."""
    if "anyOf" in schema:
        kinds = [_type(arm) for arm in schema["anyOf"] if arm.get("type") != "null"]
        return "number" if kinds == ["whole number", "number"] else " or ".join(kinds)
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{choice}`" for choice in schema.get("enum", [schema.get("const")]))
    match schema.get("type"):
        case "array" if "prefixItems" in schema:
            return f"list of {len(schema['prefixItems'])}: {_type(schema['prefixItems'][0])}"
        case "array":
            return f"list of {_type(schema['items'])}"
        case "object":
            values = next(iter(schema.get("patternProperties", {}).values()), {})
            return f"{_type(values)} per key" if "type" in values or "anyOf" in values else "keys of its own"
        case "boolean":
            return "`true`, `false`"
        case "integer":
            return "whole number" + _bounds(schema)
        case "number":
            return "number" + _bounds(schema)
    return "text"


def _bounds(schema: dict[str, Any]) -> str:
    words = [
        f"{sign} {schema[key]:g}"
        for key, sign in (("exclusiveMinimum", ">"), ("minimum", "≥"), ("exclusiveMaximum", "<"), ("maximum", "≤"))
        if key in schema and abs(schema[key]) < 2**31 - 1
    ]
    return "".join(f" {word}" for word in words)


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "required"
    if isinstance(default, Section):
        return ""
    return "none" if default is None or default == [] or default == {} else f"`{json.dumps(default)}`"


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    for launcher in sys.argv[1:]:
        print(launcher_tables(launcher))
    if not sys.argv[1:]:
        PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
