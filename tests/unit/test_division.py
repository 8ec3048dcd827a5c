"""Graphs divided over ranks: the parts' losses and gradients, put together, are the undivided graph's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from divided import CHANNEL, divide_all, finished, in_double, off, run, run_parts, run_ranks, training
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import needs_kernels
from onnx import helper
from transformers_by_hand import Model, Sizes, drawing_by_seed, transformer

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.division.divide import Divided, divide
from ortflow.workflow.graph.ir.collective import Kind, is_collective, kind_of
from ortflow.workflow.graph.types import LOSS_SUM
from ortflow.workflow.parallel.region import Region

pytestmark = [needs_kernels, pytest.mark.rotates("division")]
FORMS = {
    "plain": Sizes(),
    "packed": Sizes(packed=True),
    "packed Gemm": Sizes(packed=True, turned=False),
    "Gemm": Sizes(turned=False),
    "groups": Sizes(groups=2, head=3),
    "gated": Sizes(gated=True, bias=False, tied=False),
    "relative": Sizes(relative=True, bias=False),
    "head norms": Sizes(head_norm=True),
    "smoothing": Sizes(smoothing=0.1, tied=False),
}


def compare(model: Model, parts: int, *, kernels: bool = True, double: bool = False) -> list[Divided]:
    """Divide, run, compare; in fp64 without our kernels, which are fp32's."""
    names = list(model.tensors)
    divided = divide_all(model.proto, model.shapes, names, parts)
    graphs = [training(each.model, names, kernels=kernels and not double) for each in divided]
    whole = training(model.proto, names, kernels=kernels and not double)
    values = model.given
    if double:
        graphs, whole = [in_double(graph) for graph in graphs], in_double(whole)
        values = {name: v.astype(np.float64) if v.dtype == np.float32 else v for name, v in values.items()}
    differences = off(run_parts(graphs, divided, values), run(whole, values))
    assert len(differences) == len(names) + 2
    worst = max(differences, key=lambda name: differences[name])
    assert differences[worst] < (1e-10 if double else 1e-5), (worst, differences[worst])
    return divided


def share(divided: Divided, model: Model) -> float:
    """Of the values of matrices in layers, those that are divided."""
    layers = {n: array.size for n, array in model.tensors.items() if n.startswith("layer") and array.ndim == 2}
    return sum(size for name, size in layers.items() if not divided.regions[name].whole) / sum(layers.values())


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_layer_is_divided(form: str) -> None:
    model = transformer(replace(FORMS[form], layers=1))
    divided = compare(model, 2)
    assert share(divided[0], model) == 1
    assert not divided[0].regions["table"].whole
    assert not any(region.whole for name, region in divided[0].regions.items() if name in ("head", "relative"))
    assert all(region.whole for name, region in divided[0].regions.items() if "norm" in name)


@settings(max_examples=8, deadline=None)
@given(
    parts=st.sampled_from([2, 3, 4]),
    times=st.sampled_from([1, 2]),
    shared=st.sampled_from([1, 2]),
    head=st.integers(1, 6),
    hidden=st.integers(1, 5),
    vocabulary=st.integers(64, 90),
    tokens=st.integers(2, 6),
    packed=st.booleans(),
    flags=st.tuples(*[st.booleans()] * 5),
    seed=st.integers(0, 1000),
)
def test_parts_of_random_transformers(
    parts: int, times: int, shared: int, head: int, hidden: int, vocabulary: int, tokens: int, packed: bool,
    flags: tuple[bool, ...], seed: int,
) -> None:  # fmt: skip
    groups = parts * times
    gated, tied, bias, relative, turned = flags
    sizes = Sizes(
        heads=groups * (1 if packed else shared), groups=groups, head=head, hidden=parts * hidden,
        vocabulary=vocabulary, layers=1, tokens=tokens, packed=packed, gated=gated, tied=tied, bias=bias,
        relative=relative, turned=turned,
    )  # fmt: skip
    model = transformer(sizes, seed)
    divided = compare(model, parts, double=True)
    assert share(divided[0], model) == 1


def test_packed_weights_are_divided_block_by_block() -> None:
    model = transformer(FORMS["packed"])
    regions = [each.regions for each in divide_all(model.proto, model.shapes, list(model.tensors), 2)]
    assert regions[0]["layer0.attention.qkv.weight"] == Region(0, ((0, 8), (16, 24), (32, 40)))
    assert regions[1]["layer0.attention.qkv.bias"] == Region(0, ((8, 16), (24, 32), (40, 48)))
    assert regions[1]["layer0.attention.out.weight"] == Region(1, ((8, 16),))
    assert regions[1]["layer0.attention.out.bias"].whole
    # 35 and 35 rows of 70; over 3 parts they would be 23, 23 and 24.
    assert regions[1]["table"] == Region(0, ((35, 70),))


def test_there_are_two_sums_a_layer_each_way_and_no_gathered_scores() -> None:
    model = transformer(Sizes(layers=3))
    divided = divide_all(model.proto, model.shapes, list(model.tensors), 2)
    graph = training(divided[0].model, list(model.tensors), kernels=True).graph
    kinds = [kind_of(node) for node in graph.node if is_collective(node)]
    # One for the table, three for the loss; backward, one for what the head reads.
    assert kinds.count(Kind.ALL_REDUCE) == 2 * 3 + 1 + 2 + 2 * 3 + 1
    assert kinds.count(Kind.ALL_REDUCE_MAX) == 1
    assert len(kinds) == kinds.count(Kind.ALL_REDUCE) + 1
    assert "6 layers divided over 2 ranks" in divided[0].notes[0]
    assert divided[0].notes[1] == "vocabulary divided over 2 ranks: table"


def test_a_vocabulary_need_not_be_divisible() -> None:
    model = transformer(Sizes(vocabulary=67, layers=1))
    divided = compare(model, 4)
    rows = [each.regions["table"].shape((67, 16))[0] for each in divided]
    assert rows == [16, 17, 17, 17]
    graphs = [[node.op_type for node in each.model.graph.node] for each in divided]
    assert graphs[0] == graphs[1] == graphs[3]


def test_fewer_heads_of_keys_than_parts_stay_whole() -> None:
    model = transformer(Sizes(groups=2, layers=1))
    regions = compare(model, 4)[0].regions
    assert regions["layer0.attention.k.weight"].whole
    assert regions["layer0.attention.v.weight"].whole
    assert not regions["layer0.attention.q.weight"].whole


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (Sizes(heads=3, groups=3), r"'layer0.attention.out.weight'.*3 heads.*divisible"),
        (
            Sizes(heads=3, groups=3, packed=True),
            r"3 heads.*divisor of 3",
        ),
        (Sizes(hidden=15), r"'layer0.mlp.down.weight'.*15.*divisible"),
    ],
)
def test_lengths_that_do_not_divide_are_named(sizes: Sizes, words: str) -> None:
    model = transformer(sizes)
    with pytest.raises(UserError, match=words) as caught:
        divide_all(model.proto, model.shapes, list(model.tensors), 2)
    assert caught.value.where == "parallel.horizontal"


def test_what_is_listed_stays_whole() -> None:
    model = transformer(Sizes(hidden=15, layers=1))
    kept = ["layer0.mlp.down.weight", "table"]
    names = list(model.tensors)
    divided = divide_all(model.proto, model.shapes, names, 2, named={"whole": kept})
    assert divided[0].regions["table"].whole
    assert divided[0].regions["layer0.mlp.up.weight"].whole
    assert not divided[0].regions["layer0.attention.q.weight"].whole
    assert divided[0].notes[-1].startswith("whole on each rank: table, layer0.mlp.up.weight, layer0.mlp.down.weight,")
    graphs = [training(each.model, names, kernels=True) for each in divided]
    differences = off(
        run_parts(graphs, divided, model.given), run(training(model.proto, names, kernels=True), model.given)
    )
    assert max(differences.values()) < 1e-5


def test_a_model_without_layers_is_refused() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("ReduceSum", ["y"], [LOSS_SUM], keepdims=0),
    ]
    inputs = [helper.make_tensor_value_info(name, 1, dims) for name, dims in (("x", ["n", 4]), ("w", [4, 6]))]
    graph = helper.make_graph(nodes, "one", inputs, [helper.make_tensor_value_info(LOSS_SUM, 1, [])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    with pytest.raises(UserError, match=r"parallel.horizontal"):
        divide(model, {"w": (4, 6)}, ["w"], LOSS_SUM, 0, 2, CHANNEL)


def evaluation_of(model: Model) -> onnx.ModelProto:
    """The graph with its logits as an output, and the number of right labels."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model.proto)
    loss = next(node for node in copy.graph.node if node.op_type == "SoftmaxCrossEntropyLoss")
    copy.graph.node.append(helper.make_node("ArgMax", [loss.input[0]], ["best"], axis=1, keepdims=0))
    copy.graph.node.append(helper.make_node("Equal", ["best", loss.input[1]], ["right"]))
    copy.graph.node.append(helper.make_node("Cast", ["right"], ["rights"], to=1))
    copy.graph.node.append(helper.make_node("ReduceSum", ["rights"], ["accuracy"], keepdims=0))
    copy.graph.output.append(helper.make_tensor_value_info("accuracy", 1, []))
    copy.graph.output.append(helper.make_tensor_value_info(loss.input[0], 1, None))
    return copy


@pytest.mark.parametrize("form", ["packed", "groups", "gated"])
@pytest.mark.parametrize("parts", [2, 4])
def test_evaluation_reads_the_same_regions_and_gives_the_undivided_metrics(form: str, parts: int) -> None:
    model = transformer(replace(FORMS[form], vocabulary=67))
    names = list(model.tensors)
    evaluate = evaluation_of(model)
    trained = divide_all(model.proto, model.shapes, names, parts)
    divided = [
        divide(evaluate, model.shapes, (), LOSS_SUM, part, parts, CHANNEL, like=each)
        for part, each in enumerate(trained)
    ]
    assert [each.regions for each in divided] == [each.regions for each in trained]
    graphs = [finished(each.model) for each in divided]
    differences = off(run_parts(graphs, divided, model.given), run(evaluate, model.given))
    assert max(differences.values()) < 1e-5, differences


def test_evaluation_puts_tensors_together_that_it_cannot_read_in_part() -> None:
    model = transformer(Sizes(layers=1))
    names = list(model.tensors)
    trained = divide_all(model.proto, model.shapes, names, 2)
    evaluate = evaluation_of(model)
    # The sum over a weight: nothing of the training graph reads it so.
    evaluate.graph.node.append(helper.make_node("ReduceSum", ["layer0.mlp.up.weight"], ["more"], keepdims=0))
    evaluate.graph.output.append(helper.make_tensor_value_info("more", 1, []))
    divided = [
        divide(evaluate, model.shapes, (), LOSS_SUM, part, 2, CHANNEL, like=each) for part, each in enumerate(trained)
    ]
    assert [each.regions for each in divided] == [each.regions for each in trained]
    graphs = [finished(each.model) for each in divided]
    differences = off(run_parts(graphs, divided, model.given), run(evaluate, model.given))
    assert max(differences.values()) < 1e-5, differences


@pytest.mark.parametrize("form", ["packed", "gated"])
def test_the_gradient_of_a_share_of_a_mask_computes_no_more_shapes(form: str) -> None:
    counts = []
    for dropout in (0.0, 0.3):
        model = transformer(replace(FORMS[form], dropout=dropout))
        names = list(model.tensors)
        divided = divide_all(model.proto, model.shapes, names, 2)
        nodes = training(divided[1].model, names, kernels=True).graph.node
        counts.append(sum(node.op_type == "NonZero" for node in nodes))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("form", ["packed", "gated"])
@pytest.mark.parametrize("ours", [False, True])
def test_real_ranks_drop_what_one_rank_drops(ours: bool, form: str, tmp_path: Path) -> None:
    model = transformer(replace(FORMS[form], dropout=0.3, vocabulary=67))
    if ours:
        model = drawing_by_seed(model)
    names = list(model.tensors)
    divided = divide_all(model.proto, model.shapes, names, 2)
    graphs = [training(each.model, names, kernels=True) for each in divided]
    assert {node.domain for node in graphs[1].graph.node if node.op_type == "Dropout"} == {"ortflow" if ours else ""}
    expected = run(training(model.proto, names, kernels=True), model.given)
    differences = off(run_ranks(graphs, divided, model.given, tmp_path), expected)
    assert max(differences.values()) < 1e-5, differences
    without = replace(FORMS[form], vocabulary=67)
    other = run(training(transformer(without).proto, names, kernels=True), model.given)
    assert abs(float(other[LOSS_SUM]) - float(expected[LOSS_SUM])) > 1e-3


def test_the_gradient_of_a_whole_tensor_has_the_same_bits_on_all_parts() -> None:
    model = transformer(Sizes(layers=1))
    names = list(model.tensors)
    divided = divide_all(model.proto, model.shapes, names, 2)
    results: list[Any] = []
    graphs = [training(each.model, names, kernels=True) for each in divided]
    with pytest.MonkeyPatch.context() as patch:
        import divided as support

        patch.setattr(support, "run_together", lambda name, *rest: results.append((name, rest[-1])))
        run_parts(graphs, divided, model.given)
    for name, (first, second) in results:
        if divided[0].regions.get(name.removesuffix("_grad"), Region()).whole:
            assert first[name].tobytes() == second[name].tobytes(), name


def test_sizes_of_scores_that_are_put_together_are_those_of_the_whole() -> None:
    random = np.random.default_rng(0)
    table = random.normal(size=(80, 8)).astype("float32")
    # A running sum over the axis of a product keeps both layers and scores from being divided further.
    proto = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>
        g (int64[n, t] ids, float[80, 8] table) => (float "ortflow.loss_sum") {
            rows = Gather(table, ids)
            last = Constant <value = int64 {2}> ()
            state = CumSum(rows, last)
            turned = Transpose <perm = [1, 0]> (table)
            scores = MatMul(state, turned)
            running = CumSum(scores, last)
            total = ReduceSum <keepdims = 0> (running)
            size = Size(scores)
            shape = Shape(scores)
            count = ReduceSum <keepdims = 0> (shape)
            both = Add(size, count)
            divisor = Cast <to = 1> (both)
            "ortflow.loss_sum" = Div(total, divisor)
        }""")
    model = Model(onnx.shape_inference.infer_shapes(proto), {"table": table}, {"ids": random.integers(0, 80, (3, 5))})
    divided = divide_all(model.proto, model.shapes, ["table"], 2)
    assert divided[0].regions["table"] == Region(0, ((0, 40),))
    graphs = [training(each.model, ["table"], kernels=False) for each in divided]
    expected = run(training(model.proto, ["table"], kernels=False), model.given)
    differences = off(run_parts(graphs, divided, model.given), expected)
    assert max(differences.values()) < 1e-5, differences
