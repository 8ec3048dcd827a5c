"""`ortflow inspect`: its output, and that any file gives a report or one sentence."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from messages import mentions
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

from ortflow.cli.inspect import inspect
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.intake.inspect import findings
from ortflow.workflow.spec.model import ParameterPatterns


def encoder() -> onnx.ModelProto:
    """A small network with a bit of everything: table, norm, convolution, recurrence, function, subgraph, constants."""
    rng = np.random.default_rng(0)

    def weights(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    tensors = {
        "table": weights(10, 8),
        "norm.weight": np.ones(8, np.float32),
        "norm.bias": np.zeros(8, np.float32),
        "conv.weight": weights(8, 8, 3),
        "scale": np.ones(8, np.float32),
        "shift": np.zeros(8, np.float32),
        "mean": np.zeros(8, np.float32),
        "var": np.ones(8, np.float32),
        "W": weights(1, 24, 8),
        "R": weights(1, 24, 8),
        "causal_mask": np.tril(np.ones((8, 8), np.float32)),
        "unused": weights(3),
    }
    branch = helper.make_graph(
        [helper.make_node("Identity", ["ten"], ["chosen"])],
        "branch",
        [],
        [helper.make_tensor_value_info("chosen", TensorProto.FLOAT, [])],
    )
    ten = numpy_helper.from_array(np.float32(10))
    nodes = [
        helper.make_node("Gather", ["table", "tokens"], ["e"], "embed"),
        helper.make_node("LayerNormalization", ["e", "norm.weight", "norm.bias"], ["n"], "norm"),
        helper.make_node("Transpose", ["n"], ["t"], "turn", perm=[0, 2, 1]),
        helper.make_node("Conv", ["t", "conv.weight"], ["c"], "conv", pads=[1, 1]),
        helper.make_node("BatchNormalization", ["c", "scale", "shift", "mean", "var"], ["b"], "batch_norm"),
        helper.make_node("Swishish", ["b"], ["s"], "swish", domain="own", slope=0.5),
        helper.make_node("Transpose", ["s"], ["g"], "first", perm=[2, 0, 1]),
        helper.make_node("GRU", ["g", "W", "R"], ["", "h"], "gru", hidden_size=8, linear_before_reset=1),
        helper.make_node("Squeeze", ["h"], ["last"], "last"),
        helper.make_node("Constant", [], ["ten"], "ten", value=ten),
        helper.make_node("Constant", [], ["yes"], "yes", value=numpy_helper.from_array(np.array(True))),
        helper.make_node("If", ["yes"], ["limit"], "if", then_branch=branch, else_branch=branch),
        helper.make_node("Clip", ["last", "", "limit"], ["clipped"], "clip"),
        helper.make_node("MatMul", ["clipped", "causal_mask"], ["m"], "masked"),
        helper.make_node("HardSwish", ["m"], ["logits"], "head"),
    ]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    slope = onnx.AttributeProto(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT)
    body = [helper.make_node("HardSigmoid", ["a"], ["c"]), helper.make_node("Mul", ["a", "c"], ["b"])]
    body[0].attribute.append(slope)
    return helper.make_model(
        helper.make_graph(
            nodes,
            "encoder",
            [helper.make_tensor_value_info("tokens", TensorProto.INT64, ["batch", 7])],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, None)],
            initializer=[numpy_helper.from_array(array, name) for name, array in tensors.items()],
        ),
        functions=[helper.make_function("own", "Swishish", ["a"], ["b"], body, opsets, attributes=["slope"])],
        opset_imports=opsets,
        ir_version=8,
        producer_name="test",
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "model.onnx").write_bytes(encoder().SerializeToString())
    return tmp_path / "model.onnx"


def test_findings(path: Path) -> None:
    report = findings(path)
    assert (report.opset, report.ir_version, report.producer) == (18, 8, "test")
    assert [(v.name, v.dtype, v.shape) for v in report.inputs] == [("tokens", "int64", ["batch", 7])]
    assert [(v.name, v.dtype) for v in report.outputs] == [("logits", "float")]
    assert [role.name for role in report.trained] == [
        "table", "norm.weight", "norm.bias", "conv.weight", "scale", "shift", "W", "R", "causal_mask"
    ][:-1]  # fmt: skip
    assert report.parameters == 80 + 16 + 192 + 16 + 2 * 192
    assert [role.name for role in report.state] == ["mean", "var"]
    assert "causal_mask" in [role.name for role in report.constants]
    assert report.undifferentiable == []
    assert report.tied == {}


def test_findings_follow_the_run_file(path: Path) -> None:
    report = findings(path, ParameterPatterns(freeze=["norm.*"], constant=["W"]), outputs=["logits"])
    assert [role.name for role in report.frozen] == ["norm.weight", "norm.bias"]
    assert "W" in [role.name for role in report.constants]


def test_a_node_without_a_gradient_is_shown(path: Path) -> None:
    model = encoder()
    model.graph.node[-1].op_type = "Unique"
    path.write_bytes(model.SerializeToString())
    assert findings(path).undifferentiable == ["node 'head' (Unique)"]


def test_nothing_to_train_names_the_file(path: Path) -> None:
    model = encoder()
    del model.graph.node[:]
    model.graph.node.append(helper.make_node("Cast", ["tokens"], ["logits"], "cast", to=1))
    path.write_bytes(model.SerializeToString())
    with pytest.raises(UserError, match=f"^{path}: the model has no parameter to train"):
        findings(path)


def test_nothing_to_train_lists_what_could_be(path: Path) -> None:
    """`inspect` refuses such a model as a run does: a message that refers to it would lead in a circle."""
    names = [tensor.name for tensor in encoder().graph.initializer if tensor.data_type == TensorProto.FLOAT]
    with pytest.raises(UserError) as caught:
        findings(path, ParameterPatterns(freeze=["*"]))
    assert "inspect" not in str(caught.value)
    assert f"`model.parameters.train`: it has {', '.join(names[:8])}" in str(caught.value)


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command()(inspect)
    return app


def test_command_prints_tables(app: typer.Typer, path: Path) -> None:
    result = CliRunner().invoke(app, [str(path)])
    assert result.exit_code == 0, result.output
    for text in ("tokens  int64 ['batch', 7]", "688 values trained in 8 tensors", "conv.weight", "weight of Conv"):
        assert text in result.output
    assert mentions(result.output, "more constants … --all")
    assert "ten " not in result.output
    assert "ten " in CliRunner().invoke(app, [str(path), "--all"]).output


def test_names_are_not_shortened_without_a_terminal(app: typer.Typer, path: Path) -> None:
    model = onnx.load(path)
    name = "encoder." + "layers.11." * 20 + "weight"
    for tensor in model.graph.initializer:
        tensor.name = name if tensor.name == "conv.weight" else tensor.name
    for node in model.graph.node:
        node.input[:] = [name if one == "conv.weight" else one for one in node.input]
    onnx.save(model, path)
    (row,) = [line for line in CliRunner().invoke(app, [str(path)]).output.splitlines() if "layers.11" in line]
    assert row.startswith(f"{name}  [")
    assert row.endswith("weight of Conv")


def test_command_prints_json(app: typer.Typer, path: Path) -> None:
    result = CliRunner().invoke(app, [str(path), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.output) == json.loads(json.dumps(findings(path).to_json()))


def test_command_hands_on_what_is_wrong(app: typer.Typer, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [str(tmp_path / "none.onnx")])
    assert isinstance(result.exception, UserError)


# Hostile and broken files, made from the bytes of a good one.

GOOD = encoder().SerializeToString()
NUMBERS = [0, 1, -1, 2, 3, 7, 11, 13, 19, 23, 100, 2**31 - 1, 2**40, -(2**63), 2**62]
FAST = settings(
    # A list of its own replaces the one of the profile `ci`, which has `too_slow`.
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)  # fmt: skip


def ends_well(folder: Path, data: bytes) -> None:
    """Check for a report or one sentence: no other exception, and no crash, which would end the tests."""
    file = folder / "model.onnx"
    file.write_bytes(data)
    messages = ""
    try:
        findings(file)
    except UserError as error:
        messages = str(error)
    assert "\n" not in messages
    assert len(messages) < 1500


@FAST
@given(place=st.integers(0, len(GOOD) - 1), cut=st.integers(0, 40), insert=st.binary(max_size=8))
def test_broken_bytes_end_well(tmp_path: Path, place: int, cut: int, insert: bytes) -> None:
    ends_well(tmp_path, GOOD[:place] + insert + GOOD[place + cut :])


@FAST
@given(seed=st.integers(0, 2**32), changes=st.integers(1, 3))
def test_broken_structure_ends_well(tmp_path: Path, seed: int, changes: int) -> None:
    rng = random.Random(seed)
    model = encoder()
    for _ in range(changes):
        change(rng, model)
    ends_well(tmp_path, model.SerializeToString())


def fields(message: Any) -> list[tuple[Any, Any]]:
    """Each field of a protobuf message and of nested ones."""
    found = []
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is None:
            found.append((message, field))
        elif field.is_repeated:
            found += [(message, field)] if len(value) else []
            found += [pair for inner in value for pair in fields(inner)]
        elif message.HasField(field.name):
            found += [(message, field), *fields(value)]
    return found


def change(rng: random.Random, model: onnx.ModelProto) -> None:
    """Remove or duplicate one field of the model, or give it another's value."""
    names = sorted({"", *(name for node in model.graph.node for name in [*node.input, *node.output, node.op_type])})
    message, field = rng.choice(fields(model))
    value = getattr(message, field.name)
    scalar = {
        field.CPPTYPE_STRING: lambda: rng.choice(names) if field.type == field.TYPE_STRING else rng.randbytes(8),
        field.CPPTYPE_ENUM: lambda: rng.choice(field.enum_type.values).number,
        field.CPPTYPE_FLOAT: lambda: rng.choice([0.0, -1.0, float("nan"), float("inf")]),
    }.get(field.cpp_type, lambda: rng.choice(NUMBERS))
    try:
        if field.is_repeated:
            if len(value) and rng.random() < 0.4:
                del value[rng.randrange(len(value))]
            elif field.message_type is not None:
                value.add().CopyFrom(rng.choice(value))
            elif len(value) and rng.random() < 0.7:
                value[rng.randrange(len(value))] = scalar()
            else:
                value.append(scalar())
        elif field.message_type is not None or rng.random() < 0.3:
            message.ClearField(field.name)
        else:
            setattr(message, field.name, scalar())
    except (ValueError, OverflowError, TypeError):
        # The number does not fit the field; another change will.
        message.ClearField(field.name)
