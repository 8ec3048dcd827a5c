"""Parameters kept in 16 bits beside those in fp32: a step has the bits of one that rounds them itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graph_build_models import built, run_file
from onnx import TensorProto, helper
from queued import Fake, FakeDevice, network, state_of, steps_of, train
from safetensors.numpy import load_file

from ortflow.workflow.fusion.rounded import reading_rounded, writing_rounded
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.optim.graph import optimizer_graph
from ortflow.workflow.optim.segments import segments
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.trainer.rounded import Rounded

HALF = TensorProto.FLOAT16
STEPS = [[8], [8], [8], [8], [8], [8]]


def with_casts(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with every reader of w and u reading them rounded to fp16."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for name in ("w", "u"):
        for node in copy.graph.node:
            node.input[:] = [f"{name}.single" if each == name else each for each in node.input]
        dims = next(v for v in copy.graph.input if v.name == name).type.tensor_type.shape
        info = helper.make_tensor_value_info(f"{name}.half", HALF, [dim.dim_value for dim in dims.dim])
        copy.graph.value_info.append(info)
        copy.graph.node.insert(0, helper.make_node("Cast", [f"{name}.half"], [f"{name}.single"], to=TensorProto.FLOAT))
        copy.graph.node.insert(0, helper.make_node("Cast", [name], [f"{name}.half"], to=HALF))
    return copy


def graphs_in(folder: Path, optimizer: str = "adamw") -> tuple[GraphSet, Any]:
    folder.mkdir(exist_ok=True)
    model, rule = network(folder / "model.onnx"), {"name": optimizer, "lr": 1e-2}
    return built(model, train__optimizer=rule), run_file(model, train__optimizer=rule)


class Run:
    """A trainer whose training graph rounds parameters; `kept`: they are kept rounded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, *, kept: bool, written: int | None) -> None:
        fake = Fake(monkeypatch)
        fake.device = FakeDevice(fake.device.here(), fake.device.gpu, precision="fp16")
        self.graphs, spec = graphs_in(folder)
        rounded = with_casts(onnx.load(self.graphs.train))
        form = folder / "form.onnx"
        form.write_bytes(rounded.SerializeToString())
        self.rounds: list[str] = []
        refresh = Rounded.refresh

        def spy(this: Rounded) -> None:
            seen = this.seen
            refresh(this)
            self.rounds += ["rounded"] * (seen != this.seen)

        with monkeypatch.context() as patch:
            if kept:
                patch.setattr(Sessions, "form_of", lambda _, graph: form if graph == self.graphs.train else None)
            if written is not None:
                patch.setattr(
                    "queued.guarded", lambda update, **options: writing_rounded(guarded(update, **options), written)
                )
            self.trainer = fake.trainer(self.graphs, spec, train=None if kept else rounded)
        monkeypatch.setattr(Rounded, "refresh", spy)

    def go(self) -> tuple[Any, dict[str, Any]]:
        """Steps, one of which is skipped; then other parameters, and more steps."""
        losses = train(self.trainer, steps_of(STEPS, damaged=[3]))
        self.trainer.load_tensors({name: array * 1.25 for name, array in load_file(self.graphs.initial).items()})
        losses += train(self.trainer, steps_of(STEPS[:3]))
        return losses, state_of(self.trainer)


def guarded(update: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    from ortflow.workflow.optim.guard import guarded as plain

    return plain(update, **options)


def check_alike(one: tuple[Any, dict[str, Any]], other: tuple[Any, dict[str, Any]]) -> None:
    np.testing.assert_array_equal([each[:2] for each in one[0]], [each[:2] for each in other[0]])
    for name, array in one[1].items():
        np.testing.assert_array_equal(array, other[1][name], err_msg=name)


def test_parameters_that_the_update_rounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = Run(monkeypatch, tmp_path / "plain", kept=False, written=None)
    expected = plain.go()
    assert plain.trainer.parts.passes.graph.rounded is None
    assert expected[0][3][2] is not None, "a step is skipped"
    mine = Run(monkeypatch, tmp_path / "mine", kept=True, written=HALF)
    found = mine.go()
    check_alike(expected, found)
    assert len(mine.rounds) == 2, "only what was loaded is rounded by another graph, although statistics are written"


@pytest.mark.parametrize("written", [None, TensorProto.BFLOAT16], ids=["not written", "of another type"])
def test_an_update_that_does_not_round(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, written: int | None) -> None:
    expected = Run(monkeypatch, tmp_path / "plain", kept=False, written=None).go()
    mine = Run(monkeypatch, tmp_path / "mine", kept=True, written=written)
    check_alike(expected, mine.go())
    assert len(mine.rounds) == len(STEPS) + 3, "before every step"


def test_parameters_are_rounded_in_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = Run(monkeypatch, tmp_path / "plain", kept=False, written=None).go()
    monkeypatch.setattr("ortflow.workflow.trainer.rounded.AT_A_TIME", 50)
    check_alike(expected, Run(monkeypatch, tmp_path / "mine", kept=True, written=None).go())


def test_a_run_that_holds_a_part_keeps_its_casts(tmp_path: Path) -> None:
    _, spec = graphs_in(tmp_path)
    assert spec.holds_whole
    for changes in ({"parallel": spec.parallel.model_copy(update={"zero": 1})},
                    {"train": spec.train.model_copy(update={"offload": "optimizer"})}):  # fmt: skip
        assert not spec.model_copy(update=changes).holds_whole


def test_which_casts_become_inputs(tmp_path: Path) -> None:
    graphs, _ = graphs_in(tmp_path)
    model = with_casts(onnx.load(graphs.train))
    model.graph.node.append(helper.make_node("Cast", ["b"], ["b.half"], to=HALF))
    model.graph.node.append(helper.make_node("Cast", ["x"], ["x.half"], to=HALF))
    model.graph.node.append(helper.make_node("Cast", ["u"], ["u.double"], to=TensorProto.DOUBLE))
    model.graph.output.append(helper.make_tensor_value_info("b.half", HALF, [7]))
    before = model.SerializeToString()
    reading, found = reading_rounded(model, ["w", "b", "u"])
    assert model.SerializeToString() == before
    assert found == {"w.half": "w", "u.half": "u"}, "no output, no other type, and no input that is not trained"
    inputs = {value.name: value.type.tensor_type for value in reading.graph.input}
    assert inputs["w.half"].elem_type == HALF
    assert [dim.dim_value for dim in inputs["w.half"].shape.dim] == [5, 7]
    assert "w" not in inputs, "a parameter that is only read rounded is not an input in fp32"
    assert {node.output[0] for node in reading.graph.node} >= {"b.half", "x.half", "u.double"}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lamb"])
def test_an_update_makes_the_halves_of_every_segment(tmp_path: Path, optimizer: str) -> None:
    graphs, spec = graphs_in(tmp_path, optimizer)
    cuts = segments(spec.train.optimizer, graphs.index)
    model = writing_rounded(guarded(optimizer_graph(spec.train.optimizer, cuts)), HALF)
    made = {value.name: value.type.tensor_type.elem_type for value in model.graph.output}
    assert {name for name, kind in made.items() if kind == HALF} == {f"rounded.{i}" for i in range(len(cuts))}
    assert {name for name, kind in made.items() if name.startswith("parameters.")} == {
        f"parameters.{i}.out" for i in range(len(cuts))
    }
