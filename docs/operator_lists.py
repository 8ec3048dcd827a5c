"""Writes the lists of docs/models.md from the rules: `python docs/operator_lists.py`.

A test fails while the lists differ from the rules. Everything outside the two marker lines is written by hand.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path

from onnx import defs

from ortflow.workflow.graph.autodiff.rules import RULES
from ortflow.workflow.graph.decompose.operators import DECOMPOSITIONS
from ortflow.workflow.graph.normalize.opset import OPSET
from ortflow.workflow.graph.optimize.group_norm import OPERATOR

PAGE = Path(__file__).with_name("models.md")
BEGIN = "<!-- operators: written by docs/operator_lists.py -->"
END = "<!-- end of operators -->"
_REAL = "tensor(float)"
_WITHOUT = {
    *("If", "Optional", "OptionalGetElement"),
    *("Bernoulli", "EyeLike", "MelWeightMatrix", "OneHot", "RandomNormalLike", "RandomUniformLike", "Range", "Unique"),
    *("CastLike", "DequantizeLinear", "DynamicQuantizeLinear"),
}
"""Control flow, what has no derivative, and what `lower` has taken out before."""


def lists() -> str:
    """Markdown: each operator of ONNX's opset 18 that makes fp32 values from fp32 values, in one of four lists."""
    rules = {operator for domain, operator in RULES if domain == ""}
    schemas = {schema.name: schema for schema in _newest() if _makes_reals(schema)}
    left = set(schemas) - rules - set(DECOMPOSITIONS)
    defined = {name for name in left if schemas[name].has_function or schemas[name].has_context_dependent_function}
    # One of them ortflow alone makes.
    contributed = {operator for domain, operator in RULES if domain == "com.microsoft"} - {OPERATOR}
    return "\n".join(
        textwrap.fill(line, 120, subsequent_indent="  ")
        for line in [
            f"- By a rule: {_joined(rules)}; of ONNX Runtime's own operators {_joined(contributed)}.",
            f"- Decomposed into operators that have a rule: {_joined(set(DECOMPOSITIONS) - rules)}.",
            f"- By ONNX's own definition, as far as that has rules: {_joined(defined)}.",
            f"- Not at all: {_joined(left - defined)}.",
        ]
    )


def updated(page: str) -> str:
    """The page with its lists made anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{lists()}\n\n{END}{after}"


def _newest() -> Iterable[defs.OpSchema]:
    """The schemas of ONNX's own domain that opset 18 has."""
    newest: dict[str, defs.OpSchema] = {}
    for schema in defs.get_all_schemas_with_history():
        if schema.domain == "" and schema.since_version <= OPSET:
            old = newest.get(schema.name)
            newest[schema.name] = schema if old is None or schema.since_version > old.since_version else old
    return [schema for schema in newest.values() if not schema.deprecated]


def _makes_reals(schema: defs.OpSchema) -> bool:
    if schema.name in _WITHOUT or schema.name.startswith("Sequence"):
        return False
    return any(_REAL in value.types for value in schema.inputs) and any(
        _REAL in value.types for value in schema.outputs
    )


def _joined(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
