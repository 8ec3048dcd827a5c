"""`ortflow inspect --passes`: the passes that make a run's graphs, and the graph behind any of them."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest
import typer
from graph_build_models import built, linear, run_file
from typer.testing import CliRunner, Result

from ortflow.cli.inspect import inspect
from ortflow.workflow.assembly import targets
from ortflow.workflow.assembly.passes import passes_of
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.ir.passes import Pass, Passes, without_needs

MSE = {"kind": "mse", "label": "target"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return linear(tmp_path / "model.onnx")


def operators(graph: bytes | Path) -> Counter[str]:
    model = onnx.load_model_from_string(graph) if isinstance(graph, bytes) else onnx.load(graph)
    return Counter(node.op_type for node in model.graph.node)


def test_the_last_passes_have_the_graphs_of_the_run(model: Path) -> None:
    graphs, spec = built(model, MSE), run_file(model, MSE)
    for name, path in (
        ("training/order", graphs.train),
        ("kernels/order", Form.KERNELS.of(graphs.train)),
        ("evaluation/whole", graphs.eval),
        ("inference/whole", graphs.infer),
    ):
        recorder = passes_of(spec, name)
        assert recorder.graph is not None
        assert operators(recorder.graph) == operators(path), name


def test_the_effects_add_up(model: Path) -> None:
    recorder = passes_of(run_file(model, MSE))
    names = [effect.name for effect in recorder.effects]
    assert len(set(names)) == len(names)
    assert names[: len(targets.MODEL.passes) + 2] == ["read", *targets.MODEL.names(), "wrong-forms-avoided"]
    starts = {
        "training/loss": "wrong-forms-avoided", "kernels/operators": "training/recomputed",
        "evaluation/whole": "wrong-forms-avoided", "inference/whole": "wrong-forms-avoided",
    }  # fmt: skip
    nodes = {effect.name: effect.nodes for effect in recorder.effects}
    for before, effect in zip([None, *recorder.effects], recorder.effects, strict=False):
        start = nodes[starts[effect.name]] if effect.name in starts else before.nodes if before else 0
        assert effect.nodes == start + sum(effect.added.values()) - sum(effect.removed.values()), effect.name


@pytest.mark.parametrize("changes", [{}, {"resources__gpus_per_rank": 1, "train__precision": "bf16"}])
def test_the_passes_are_those_of_the_tables(changes: dict[str, Any], model: Path) -> None:
    names = {effect.name for effect in passes_of(run_file(model, MSE, **changes)).effects}
    lists = [one for one in targets.all_passes() if not one.graph.startswith(("stage", "part"))]
    for_gpus = [name for one in lists if one.graph in ("gpu", "cuda", "half") for name in one.names()]
    wanted = {"read", *(name for one in lists for name in one.names())}
    # The user's own training graph, of which there is none here, has them twice.
    wanted -= {*targets.OWN_FUSED.names()}
    if not changes:
        wanted -= {*for_gpus, "training/copies-dropped"}
    assert names == wanted


def test_every_pass_comes_behind_what_it_needs() -> None:
    lists = targets.all_passes()
    assert not without_needs(lists)
    early = Passes("training", (Pass("early", lambda model, _: None, "nothing", needs=("gradient",)),), "training/loss")
    assert without_needs([*lists, early]) == ["training/early needs gradient"]
    astray = Passes("kernels", early.passes, "training/lost")
    assert without_needs([*lists, astray])[0] == "kernels begins behind 'training/lost', which no list has"


def test_the_command(model: Path, tmp_path: Path) -> None:
    run, out = tmp_path / "run.yaml", tmp_path / "gradient.onnx"
    (tmp_path / "x.arrow").touch()
    run.write_text(
        "name: a\nmodel: {path: model.onnx, loss: {kind: mse, label: target}}\n"
        "data: {train: x.arrow, micro_batch: 2}\ntrain: {steps: 1, optimizer: {name: sgd, lr: 1}}\n"
    )
    app = typer.Typer()
    app.command()(inspect)

    def command(*arguments: str) -> Result:
        return CliRunner().invoke(app, [*arguments])

    listed = command("--passes", str(run))
    assert listed.exit_code == 0, listed.output
    assert [line.split()[0] for line in listed.output.splitlines()[:2]] == ["pass", "read"]
    assert any(line.startswith("training/gradient") and "+" in line for line in listed.output.splitlines())
    effects = json.loads(command("--passes", str(run), "--json").output)
    assert effects[0] == {"name": "read", "nodes": 3, "added": {"Add": 1, "MatMul": 1, "Reshape": 1}, "removed": {}}
    assert command("--passes", str(run), "--after", "training/gradient", "-o", str(out)).exit_code == 0
    assert {"w_grad", "b_grad"} <= {value.name for value in onnx.load(out).graph.output}
    for arguments, words in (
        (["--passes", str(run), "--after", "training/gradient", "-o", str(out)], "exists and is not replaced"),
        (["--passes", str(run), "--after", "fold", "-o", str(tmp_path / "b.onnx")], "no pass 'fold'.*training/loss"),
        (["--passes", str(run), "-o", str(tmp_path / "b.onnx")], "belong together"),
        (["--after", "training/loss", "-o", str(tmp_path / "b.onnx")], "belong together"),
        (["--passes", str(run), "--plan", str(run)], "cannot be combined"),
    ):
        error = command(*arguments).exception
        assert isinstance(error, UserError)
        assert re.search(words, str(error))
    assert not (tmp_path / "b.onnx").exists()
