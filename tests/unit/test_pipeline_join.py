"""Stage models of several files are put together, and cut where they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from graph_build_models import Array, run_graph, save_model, value
from onnx import helper, numpy_helper
from stage_models import assert_same, chain, opened
from typer.testing import CliRunner

from ortflow.cli.app import command_line
from ortflow.workflow.assembly.joining import join_files
from ortflow.workflow.assembly.stages import Division
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.stages.join import join


def stage(
    path: Path, reads: list[str], makes: str, width: int = 6, opset: int = 18, **tensors: Array
) -> onnx.ModelProto:
    """tanh(weight times the first input), plus the other inputs."""
    random = np.random.default_rng(ord(makes[0]))
    nodes = [helper.make_node("MatMul", [reads[0], "weight"], ["product"], "/product")]
    nodes.append(helper.make_node("Tanh", ["product"], ["result" if reads[1:] else makes], "/tanh"))
    if reads[1:]:
        nodes.append(helper.make_node("Sum", ["result", *reads[1:]], [makes], "/sum"))
    weight = (random.normal(size=(6, width)) / 2).astype("float32")
    inputs = [value(name, ["batch", 6]) for name in reads]
    save_model(path, nodes, inputs, [value(makes, ["batch", width])], {"weight": weight, **tensors}, opset)
    return onnx.load(path)


@pytest.fixture
def stages(tmp_path: Path) -> list[onnx.ModelProto]:
    """The first one's output skips over the second."""
    reads = [["x"], ["a"], ["b", "a", "more"]]
    return [
        stage(tmp_path / f"stage{n}.onnx", each, name) for n, (each, name) in enumerate(zip(reads, "aby", strict=True))
    ]


def test_the_whole_computes_what_the_stages_do(stages: list[onnx.ModelProto]) -> None:
    joined = join(stages)
    whole = joined.model
    onnx.checker.check_model(whole, full_check=True)
    feeds: dict[str, Any] = {
        name: np.random.default_rng(3).normal(size=(4, 6)).astype("float32") for name in ("x", "more")
    }
    expected = dict(feeds)
    for model in stages:
        expected |= run_graph(model, expected)
    np.testing.assert_array_equal(run_graph(whole, feeds)["y"], expected["y"])
    assert [each.name for each in whole.graph.input] == ["x", "more"]
    assert [each.name for each in whole.graph.output] == ["y"]
    assert joined.cuts == [["a"], ["b"]]


def test_weights_of_one_name_stay_several(stages: list[onnx.ModelProto]) -> None:
    whole = join(stages).model
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in whole.graph.initializer}
    assert list(arrays) == ["weight", "stage1.weight", "stage2.weight"]
    for model, array in zip(stages, arrays.values(), strict=True):
        np.testing.assert_array_equal(numpy_helper.to_array(model.graph.initializer[0]), array)


def tied_stages(folder: Path) -> list[onnx.ModelProto]:
    """The table of the first stage is also that of the last one; all have scales of one."""
    random = np.random.default_rng(5)
    table, scale = random.normal(size=(6, 6)).astype("float32"), np.ones((6, 6), np.float32)
    models = []
    for number, (reads, makes) in enumerate((("x", "a"), ("a", "b"), ("b", "y"))):
        nodes = [helper.make_node("MatMul", [reads, "table"], ["product"])]
        nodes.append(helper.make_node("MatMul", ["product", "scale"], ["scaled"]))
        nodes.append(helper.make_node("Tanh", ["scaled"], [makes]))
        tensors = {"table": table if number != 1 else table + 1, "scale": scale}
        shapes = [value(reads, ["batch", 6])], [value(makes, ["batch", 6])]
        models.append(onnx.load(save_model(folder / f"tied{number}.onnx", nodes, *shapes, tensors)))
    return models


def test_a_weight_that_several_stages_have_is_one(tmp_path: Path) -> None:
    stages = tied_stages(tmp_path)
    feeds = {"x": np.random.default_rng(3).normal(size=(4, 6)).astype("float32")}
    expected = dict(feeds)
    for model in stages:
        expected |= run_graph(model, expected)
    joined = join(stages)
    onnx.checker.check_model(joined.model, full_check=True)
    np.testing.assert_array_equal(run_graph(joined.model, feeds)["y"], expected["y"])
    names = [tensor.name for tensor in joined.model.graph.initializer]
    assert names == ["table", "scale", "stage1.table", "stage1.scale", "stage2.scale"], "scales of one prove nothing"
    assert [(each.name, each.first, each.stage) for each in joined.tied] == [("table", 0, 2)]
    assert [(each.name, each.was.kind) for each in joined.apart] == [
        ("stage1.table", "other values"), ("stage1.scale", "equal numbers"), ("stage2.scale", "equal numbers"),
    ]  # fmt: skip


def test_the_gradients_of_a_tied_weight_are_summed(tmp_path: Path) -> None:
    joined = join(tied_stages(tmp_path))
    onnx.save(joined.model, tmp_path / "m.onnx")
    model = opened(tmp_path / "m.onnx", {"kind": "mse", "label": "goal"})
    made = model.divided(Division(3, cuts=joined.cuts), tmp_path)
    holders = [number for number, each in enumerate(made.stages.stages) if "table" in each.tensors]
    assert holders == [0, 2]
    arrays = {name: np.random.default_rng(3).normal(size=(4, 6)).astype("float32") for name in ("x", "goal")}
    feeds = {**model.source.tensors, **arrays}
    assert_same(chain(made, feeds), model.undivided(feeds))


def test_what_is_the_same_weight_is_a_matter_of_shape_type_role_and_the_users_word(tmp_path: Path) -> None:
    stages = tied_stages(tmp_path)
    assert [each.was.kind for each in join(stages, ["tab*"]).apart if each.was.name == "table"] == ["untied"] * 2
    stages[0].metadata_props.add(key="ortflow.parameters", value='["table", "scale"]')
    stages[2].metadata_props.add(key="ortflow.frozen", value='["table"]')
    assert join(stages).tied == [], "one stage trains it, and the other one does not"
    stages[1].metadata_props.add(key="ortflow.parameters", value='["table"]')
    stages[2].metadata_props[0].key = "ortflow.parameters"
    said = {prop.key: prop.value for prop in join(stages).model.metadata_props}
    assert said["ortflow.parameters"] == '["table", "scale", "stage1.table"]'
    stages[1].metadata_props[0].value = "table"
    with pytest.raises(UserError, match=r"ortflow\.parameters.*not a list of names"):
        join(stages)
    stages = tied_stages(tmp_path)
    (tensor,) = (each for each in stages[2].graph.initializer if each.name == "table")
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype("float64"), "table"))
    assert not {each.name for each in join(stages).tied}, "another type"


def test_the_command_says_what_became_of_weights_of_one_name(tmp_path: Path) -> None:
    tied_stages(tmp_path)
    files = [str(tmp_path / f"tied{number}.onnx") for number in range(3)]
    app, runner = command_line("join"), CliRunner()
    done = runner.invoke(app, ["join", *files, "--output", str(tmp_path / "whole.onnx")])
    assert done.exit_code == 0, done.output
    one, other, equal = (line for line in done.output.splitlines() if line.startswith("# "))
    assert one.endswith("in the stages 0 and 2: table")
    assert other.endswith(": stage1.table")
    assert equal.endswith(": stage1.scale, stage2.scale")
    assert yaml.safe_load(done.output)["parallel"] == {"pipeline": 3, "cuts": [["a"], ["b"]]}
    apart = runner.invoke(app, ["join", *files, "--output", str(tmp_path / "apart.onnx"), "--untied", "table"])
    assert "stages 0 and 2" not in apart.output
    names = [tensor.name for tensor in onnx.load(tmp_path / "apart.onnx").graph.initializer]
    assert [name for name in names if "table" in name] == ["table", "stage1.table", "stage2.table"]
    with pytest.raises(UserError, match=r"--untied: .*'tabel'.*did you mean 'table'"):
        join_files([Path(file) for file in files], tmp_path / "wrong.onnx", ["tabel"])
    assert not (tmp_path / "wrong.onnx").exists()


def test_the_cuts_give_the_stages_again(stages: list[onnx.ModelProto], tmp_path: Path) -> None:
    joined = join(stages)
    onnx.save(joined.model, tmp_path / "m.onnx")
    model = opened(tmp_path / "m.onnx", {"kind": "mse", "label": "goal"})
    made = model.divided(Division(3, cuts=joined.cuts), tmp_path)
    assert [each.tensors for each in made.stages.stages] == [("weight",), ("stage1.weight",), ("stage2.weight",)]
    arrays = {name: np.random.default_rng(3).normal(size=(4, 6)).astype("float32") for name in ("x", "more", "goal")}
    feeds = {**model.source.tensors, **arrays}
    assert_same(chain(made, feeds), model.undivided(feeds))


def test_what_does_not_fit_is_refused(stages: list[onnx.ModelProto], tmp_path: Path) -> None:
    first, second, third = stages
    with pytest.raises(UserError, match=r"stage 0.*'a'.*stage 1"):
        join([second, first, third])
    with pytest.raises(UserError, match=r"stage 1.*\('x'\)"):
        join([first, stage(tmp_path / "s.onnx", ["x"], "z")])
    with pytest.raises(UserError, match=r"stage 1.*'a'"):
        join([first, first])
    with pytest.raises(UserError, match=r"'a'.*\[batch, 6\].*\[batch, 5\]"):
        join([stage(tmp_path / "s.onnx", ["x"], "a", width=5), second])
    with pytest.raises(UserError, match=r"opset 17.*18"):
        join([first, stage(tmp_path / "s.onnx", ["a"], "b", opset=17)])
    with pytest.raises(UserError, match="one stage is a whole model"):
        join([first])
    wrong = onnx.ModelProto()
    wrong.CopyFrom(second)
    wrong.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    with pytest.raises(UserError, match=r"'a' is DOUBLE.*FLOAT"):
        join([first, wrong])


def test_what_export_for_training_said_of_tensors_is_taken_over(stages: list[onnx.ModelProto]) -> None:
    stages[0].metadata_props.add(key="ortflow.parameters", value='["weight"]')
    assert not join(stages).model.metadata_props
    for model in stages[1:]:
        model.metadata_props.add(key="ortflow.frozen", value='["weight"]')
    said = {prop.key: prop.value for prop in join(stages).model.metadata_props}
    assert said["ortflow.parameters"] == '["weight"]'
    assert said["ortflow.frozen"] == '["stage1.weight", "stage2.weight"]'


def test_the_command_writes_the_model_and_prints_the_cuts(stages: list[onnx.ModelProto], tmp_path: Path) -> None:
    files = [str(tmp_path / f"stage{number}.onnx") for number in range(3)]
    done = CliRunner().invoke(command_line("join"), ["join", *files, "--output", str(tmp_path / "whole.onnx")])
    assert done.exit_code == 0, done.output
    assert yaml.safe_load(done.output) == {
        "model": {"path": str(tmp_path / "whole.onnx")},
        "parallel": {"pipeline": 3, "cuts": [["a"], ["b"]]},
    }
    assert onnx.load(tmp_path / "whole.onnx") == join(stages).model


def test_the_command_replaces_no_file_and_leaves_none_behind(stages: list[onnx.ModelProto], tmp_path: Path) -> None:
    files = [str(tmp_path / f"stage{number}.onnx") for number in range(3)]
    there = tmp_path / "there.onnx"
    there.write_text("mine")
    with pytest.raises(UserError, match=r"there\.onnx: exists"):
        join_files([Path(file) for file in files], there)
    assert there.read_text() == "mine"
    (tmp_path / "stage2.onnx").write_text("nothing")
    with pytest.raises(UserError, match=r"stage2\.onnx: .*is not an ONNX model"):
        join_files([Path(file) for file in files], tmp_path / "whole.onnx")
    assert not (tmp_path / "whole.onnx").exists()


def test_a_value_inside_one_stage_may_have_the_name_of_anothers_input(tmp_path: Path) -> None:
    stages = [stage(tmp_path / "0.onnx", ["x", "more"], "a"), stage(tmp_path / "1.onnx", ["a", "product"], "weight.1")]
    feeds: dict[str, Any] = {
        name: np.random.default_rng(3).normal(size=(4, 6)).astype("float32") for name in ("x", "more", "product")
    }
    # The second stage reads an input of the model that has the name of a value inside the first one.
    for names in (stages[1].graph.node[0].output, stages[1].graph.node[1].input):
        names[:] = ["other" if name == "product" else name for name in names]
    expected = {**feeds, **run_graph(stages[0], feeds)}
    expected |= run_graph(stages[1], expected)
    whole = join(stages).model
    onnx.checker.check_model(whole, full_check=True)
    assert [each.name for each in whole.graph.input] == ["x", "more", "product"]
    np.testing.assert_array_equal(run_graph(whole, feeds)["weight.1"], expected["weight.1"])
