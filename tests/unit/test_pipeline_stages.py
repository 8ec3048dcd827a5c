"""A model cut into stages gives the loss, the gradients and the statistics of the whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import stage_models
from graph_build_models import run_graph
from kernels import needs_kernels
from messages import mentions
from stage_models import assert_same, batch_of, chain, evaluated, opened

from ortflow.workflow.assembly.stages import Division, build_stages
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.parallel.stage import StageSet

MODELS = ["transformer", "convolutions", "skipping"]
CUTS = {
    "transformer": [["input"], ["h.1.output"], ["h.2.attended"]],
    "convolutions": [["0.result"], ["1.normal"], ["2.result"]],
    "skipping": [["1.result"], ["2.sum"], ["3.product"]],
}


def model_of(name: str, tmp_path: Path, **changes: object) -> stage_models.Model:
    return opened(getattr(stage_models, name)(tmp_path / "m.onnx"), **changes)


@pytest.mark.rotates
@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=needs_kernels)])
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_named_cuts_change_no_gradient(name: str, count: int, kernels: bool, tmp_path: Path) -> None:
    model = model_of(name, tmp_path)
    made = model.divided(Division(count, cuts=CUTS[name][: count - 1]), tmp_path)
    feeds = {**model.source.tensors, **batch_of(name)}
    assert_same(chain(made, feeds, kernels=kernels), model.undivided(feeds))


@pytest.mark.rotates
@pytest.mark.parametrize("count", [2, 3, 4, 5])
@pytest.mark.parametrize("name", MODELS)
def test_automatic_cuts_change_no_gradient(name: str, count: int, tmp_path: Path) -> None:
    model = model_of(name, tmp_path)
    made = model.divided(Division(count, rows=4, length=16), tmp_path)
    feeds = {**model.source.tensors, **batch_of(name)}
    assert len(made.stages.stages) == count
    assert_same(chain(made, feeds), model.undivided(feeds))


@pytest.mark.parametrize("name", MODELS)
def test_the_evaluation_graph_is_cut_at_the_same_places(name: str, tmp_path: Path) -> None:
    model = model_of(name, tmp_path, model__metrics=["accuracy"])
    made = model.divided(Division(4, cuts=CUTS[name]), tmp_path)
    feeds = {**model.source.tensors, **batch_of(name)}
    whole = run_graph(model.evaluate, feeds)
    assert_same(evaluated(made, feeds), {key: array for key, array in whole.items() if key.startswith("ortflow.")})


def test_padded_batches_count_their_valid_rows(tmp_path: Path) -> None:
    model = model_of("convolutions", tmp_path, data__last_batch="pad")
    made = model.divided(Division(2, cuts=[["1.result"]]), tmp_path)
    feeds = {**model.source.tensors, **batch_of("convolutions"), "ortflow.valid": np.array([3])}
    found = chain(made, feeds)
    assert found["ortflow.loss_weight"] == 3
    assert_same(found, model.undivided(feeds))
    assert [set(stage.batch) for stage in made.stages.stages] == [{"x"}, {"labels", "ortflow.valid"}]


def test_tied_weights_are_held_by_both_stages(tmp_path: Path) -> None:
    model = model_of("transformer", tmp_path)
    made = model.divided(Division(3, cuts=CUTS["transformer"][1:]), tmp_path)
    assert {name: ranks for name, ranks in made.stages.holders().items() if len(ranks) > 1} == {"wte.weight": [0, 2]}
    assert made.stages.holders(trained=True)["wte.weight"] == [0, 2]
    assert any(mentions(note, "wte.weight", "0, 2") for note in made.notes)
    # The transposed weight is made by each stage that reads it, and so is the mask.
    assert [[sent.name for sent in stage.sends] for stage in made.stages.stages] == [
        ["h.1.output"], ["h.2.attended"], [],
    ]  # fmt: skip


def test_a_skip_is_passed_on_and_its_gradient_comes_back(tmp_path: Path) -> None:
    model = model_of("skipping", tmp_path)
    made = model.divided(Division(4, cuts=CUTS["skipping"]), tmp_path)
    first, second, third, fourth = made.stages.stages
    assert [sent.name for sent in first.sends] == ["0.result", "1.result"]
    assert [sent.name for sent in second.sends] == ["0.result", "2.sum"]
    assert (second.passed, third.passed, fourth.passed) == ((), ("0.result",), ())
    assert all(each.gradient for stage in made.stages.stages for each in stage.receives)


def test_activations_are_saved_once_and_weights_not_at_all(tmp_path: Path) -> None:
    model = model_of("transformer", tmp_path)
    made = model.divided(Division(2, cuts=[["h.1.output"]]), tmp_path)
    for number, stage in enumerate(made.stages.stages):
        for form in (lambda path: path, Form.KERNELS.of):
            forward = onnx.load_from_string(made.files[form(made.stages.forward(number))]).graph
            backward = onnx.load_from_string(made.files[form(made.stages.backward(number))]).graph
            saved = {v.name for v in forward.output} & {v.name for v in backward.input}
            assert saved
            assert saved.isdisjoint(model.source.tensors)
            assert saved.isdisjoint(received.name for received in stage.receives)
            views = [node for node in forward.node if node.op_type in ("Reshape", "Unsqueeze", "Identity")]
            assert saved.isdisjoint(name for node in views for name in node.output)


def test_stages_are_plain_data(tmp_path: Path) -> None:
    made = model_of("skipping", tmp_path).divided(Division(2, 2, cuts=CUTS["skipping"]), tmp_path)
    made.write()
    found = StageSet.load(tmp_path)
    assert found == made.stages
    assert found.chunks == 2
    assert [stage.number for stage in found.of_rank(1)] == [1, 3]
    assert found.tensors_of(1) == ["2.weight", "4.weight", "out"]


WRONG = [
    ([["h.1.outpt"], ["h.2.output"]], "no tensor 'h.1.outpt'.*did you mean 'h.1.output'"),
    ([["tokens"], ["h.2.output"]], "'tokens' is an input of the model"),
    ([["wte.weight"], ["h.2.output"]], "'wte.weight' is a weight"),
    ([["h.2.output"], ["h.1.output"]], r"parallel.cuts\[1\]: .*'h.2.output' and 'h.1.output'"),
    ([["h.1.output"], []], r"parallel.cuts\[1\]: the cut names no tensor"),
    ([["h.1.output"]], "1 cuts .* 2 stages.* 3 ranks"),
    ([["head"], ["h.1.output"]], "'head' depends on weights alone"),
    ([["h.1.output", "h.1.output"], ["h.2.output"]], "'h.1.output' is named twice"),
    ([["h.1.output", "h.1.attended"], ["h.2.output"]], "'h.1.attended' does not separate two stages"),
    ([["h.1.output"], ["ortflow.loss_sum"]], "'ortflow.loss_sum' depends on the loss"),
]


@pytest.mark.parametrize(("cuts", "message"), WRONG)
def test_cuts_that_do_not_separate_the_graph_are_refused(cuts: list[list[str]], message: str, tmp_path: Path) -> None:
    model = model_of("transformer", tmp_path)
    with pytest.raises(UserError, match=message):
        model.divided(Division(3, cuts=cuts), tmp_path)


def test_more_stages_than_the_model_has_places_for_are_refused(tmp_path: Path) -> None:
    model = model_of("skipping", tmp_path)
    with pytest.raises(UserError, match=r"parallel.pipeline.*\d+ stages.*40"):
        model.divided(Division(40), tmp_path)


def test_a_statistic_that_training_and_evaluation_use_in_two_stages_is_refused(tmp_path: Path) -> None:
    # In training the mean of the batch, which each stage computes for itself, takes the statistic's place.
    head = """<ir_version: 10, opset_import: ["" : 21]>
        g (float[n, 4] x, float[4, 4] w0, float[4, 4] w1, float[4] mean) => """
    body = """
        p = MatMul(x, w0) h = Relu(p)
        both = Add(h, middle)
        out = MatMul(both, w1)
        "ortflow.loss_sum" = ReduceSum <keepdims = 0> (out)
        count = Size(out)
        "ortflow.loss_weight" = Cast <to = 1> (count)
    """
    axes = "axes = Constant <value = int64[1] {0}> () part = Constant <value = float {0.1}> ()"
    moved = "step = Mul(part, average) mean_new = Add(mean, step)"
    sums = 'float "ortflow.loss_sum", float "ortflow.loss_weight"'
    prepared, evaluate = (
        onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
        for text in (
            f"{head} ({sums}, float[4] mean_new) {{ {axes} average = ReduceMean <keepdims = 0> (x, axes) {moved}"
            f" middle = Sub(x, average) {body} }}",
            f"{head} ({sums}) {{ middle = Sub(x, mean) {body} }}",
        )
    )
    with pytest.raises(UserError, match="'mean'"):
        build_stages(prepared, evaluate, ["w0", "w1", "mean"], ["w0", "w1"], Division(2, cuts=[["h"]]), tmp_path)
