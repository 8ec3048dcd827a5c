"""Inlines the body of a function at a node that calls it.

Called by `opset` (the model's own functions, operators newer than opset 18) and by `expand` (operators without a
gradient). Functions of the model, ONNX's definitions of operators and ortflow's decompositions are all FunctionProtos,
so one routine serves all.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import defs

from ortflow.workflow.graph.ir.edit import replace
from ortflow.workflow.graph.ir.writer import Fresh


def fresh_names(graph: onnx.GraphProto) -> Fresh:
    """Return a function that makes names which no value of `graph` or its subgraphs has."""
    used_names: set[str] = set()

    def collect(part: onnx.GraphProto) -> None:
        used_names.update(value.name for value in part.input)
        used_names.update(tensor.name for tensor in part.initializer)
        for node in part.node:
            used_names.update(node.output)
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    collect(attribute.g)
                for inner in attribute.graphs:
                    collect(inner)

    collect(graph)
    return numbered(used_names)


def numbered(used_names: set[str], last: int = 0) -> Fresh:
    """A function that makes names not in `used_names`: the hint, else with the first free number above `last`."""
    counts: dict[str, int] = {}

    def fresh(hint: str) -> str:
        name, count = hint, counts.get(hint, last)
        while name in used_names:
            count += 1
            name = f"{hint}.{count}"
        used_names.add(name)
        counts[hint] = count
        return name

    return fresh


def instantiate(
    function: onnx.FunctionProto,
    node: onnx.NodeProto,
    fresh: Fresh,
    defaults: Mapping[str, onnx.AttributeProto] | None = None,
) -> list[onnx.NodeProto]:
    """Instantiate `function` at `node`: same inputs and outputs, inner values renamed.

    `defaults` are attributes that the caller may omit (an operator's schema has them); the function's own default
    values take precedence.
    """
    attributes = {
        **(defaults or {}),
        **{a.name: a for a in function.attribute_proto},
        **{a.name: a for a in node.attribute},
    }
    prefix = node.name or next((name for name in node.output if name), node.op_type)
    names = {"": ""}
    for place, formal in enumerate(function.input):
        names[formal] = node.input[place] if place < len(node.input) else ""
    after: list[onnx.NodeProto] = []
    produced = {name for inner in function.node for name in inner.output}
    for place, formal in enumerate(function.output):
        actual = node.output[place] if place < len(node.output) else ""
        if not actual:
            continue
        if formal in produced and formal not in names:
            names[formal] = actual
        else:
            # An input that is passed through, or one value under two output names.
            after.append(onnx.helper.make_node("Identity", [names.get(formal, formal)], [actual], f"{prefix}/{formal}"))
    for inner in function.node:
        for name in inner.output:
            if name not in names:
                names[name] = fresh(f"{prefix}/{name}")
    body = [_renamed(inner, names, attributes, prefix) for inner in function.node]
    return [*body, *after]


def _renamed(
    node: onnx.NodeProto, names: Mapping[str, str], attributes: Mapping[str, onnx.AttributeProto], prefix: str
) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.name = f"{prefix}/{node.name or node.op_type}"
    _rename(copy, names)
    values = []
    for attribute in copy.attribute:
        if attribute.ref_attr_name:
            if attribute.ref_attr_name in attributes:
                value = onnx.AttributeProto()
                value.CopyFrom(attributes[attribute.ref_attr_name])
                value.name = attribute.name
                values.append(value)
        else:
            values.append(attribute)
    values = [onnx.AttributeProto.FromString(a.SerializeToString()) for a in values]
    del copy.attribute[:]
    copy.attribute.extend(values)
    for attribute in copy.attribute:
        for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            inner = [_renamed(n, names, attributes, prefix) for n in graph.node]
            del graph.node[:]
            graph.node.extend(inner)
            for value in graph.output:
                value.name = names.get(value.name, value.name)
    return copy


def _rename(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    inputs = [names.get(name, name) for name in node.input]
    # An omitted input: at the end, ONNX Runtime treats an empty name as a present input.
    while inputs and not inputs[-1]:
        inputs.pop()
    node.input[:] = inputs
    node.output[:] = [names.get(name, name) for name in node.output]


def inline_functions(model: onnx.ModelProto) -> None:
    """Inline the model's own functions, in place. `structure` has checked that they are bounded and not recursive."""
    if not model.functions:
        return
    functions = {(f.domain, f.name): f for f in model.functions}
    fresh = fresh_names(model.graph)

    def inlined(nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
        result: list[onnx.NodeProto] = []
        for node in nodes:
            for attribute in node.attribute:
                for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                    inner = inlined(list(graph.node))
                    replace(graph.node, inner)
            function = functions.get((node.domain, node.op_type))
            if function is None:
                result.append(node)
            else:
                result.extend(inlined(instantiate(function, node, fresh)))
        return result

    replace(model.graph.node, inlined(list(model.graph.node)))
    del model.functions[:]


def schema_function(
    node: onnx.NodeProto, opset: int, types: Mapping[str, onnx.TypeProto]
) -> tuple[onnx.FunctionProto, int, dict[str, onnx.AttributeProto]] | None:
    """Return ONNX's definition of a node's operator in other operators: function, opset, and default attributes.

    None if the operator is defined only in prose, or if the definition needs a type that is not in `types`.
    """
    try:
        schema = defs.get_schema(node.op_type, opset, "")
    except defs.SchemaError:
        return None
    defaults = {
        name: attribute.default_value for name, attribute in schema.attributes.items() if attribute.default_value.name
    }
    fixed = [version for version in schema.function_opset_versions if version <= opset]
    if fixed:
        body = schema.get_function_with_opset_version(max(fixed))
        return onnx.FunctionProto.FromString(_bytes(body)), max(fixed), defaults
    depending = [version for version in schema.context_dependent_function_opset_versions if version <= opset]
    if depending and all(not name or name in types for name in node.input):
        inputs = [types[name].SerializeToString() if name else b"" for name in node.input]
        body = schema.get_context_dependent_function_with_opset_version(
            max(depending), node.SerializeToString(), inputs
        )
        return (onnx.FunctionProto.FromString(_bytes(body)), max(depending), defaults) if body else None
    return None


def _bytes(body: bytes | onnx.FunctionProto) -> bytes:
    return body if isinstance(body, bytes) else body.SerializeToString()
