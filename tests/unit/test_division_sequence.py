"""Sequence parallelism: norms, dropout and additions on a share of the tokens give the undivided graph's gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from divided import CHANNEL, divide_all, divide_tokens, in_double, off, run, run_parts, run_ranks, training
from kernels import LIBRARY, needs_kernels
from parts import Parts
from transformers_by_hand import Model, Sizes, drawing_by_seed, transformer

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.division.divide import Divided
from ortflow.workflow.graph.division.sequence_graph import share_tokens
from ortflow.workflow.graph.ir.collective import Kind, is_collective, kind_of
from ortflow.workflow.graph.ir.shapes import shape, value_types
from ortflow.workflow.graph.types import LOSS_SUM
from ortflow.workflow.sessions import collectives

pytestmark = [needs_kernels, pytest.mark.rotates]
FORMS = {
    "plain": Sizes(),
    "packed": Sizes(packed=True),
    "packed Gemm": Sizes(packed=True, turned=False),
    "Gemm": Sizes(turned=False),
    "groups": Sizes(groups=2, head=3),
    "gated": Sizes(gated=True, bias=False, tied=False),
    "relative": Sizes(relative=True, bias=False),
    "head norms": Sizes(head_norm=True),
}


def compare(model: Model, parts: int, *, double: bool = False) -> list[onnx.ModelProto]:
    names = list(model.tensors)
    divided = divide_tokens(model.proto, model.shapes, names, parts)
    graphs = [training(each.model, names, kernels=not double) for each in divided]
    finished, whole = graphs, training(model.proto, names, kernels=not double)
    values = model.given
    if double:
        finished, whole = [in_double(graph) for graph in graphs], in_double(whole)
        values = {name: v.astype(np.float64) if v.dtype == np.float32 else v for name, v in values.items()}
    differences = off(run_parts(finished, divided, values), run(whole, values))
    assert len(differences) == len(names) + 2
    worst = max(differences, key=lambda name: differences[name])
    assert differences[worst] < (1e-10 if double else 1e-5), (worst, differences[worst])
    return graphs


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_layer_works_on_shares(form: str) -> None:
    model = transformer(FORMS[form])
    notes = divide_tokens(model.proto, model.shapes, list(model.tensors), 2)[0].notes
    assert notes[-1].startswith("5 sums scattered over the tokens: ")
    graph = compare(model, 2)[0].graph
    norms = [node for node in graph.node if "Norm" in node.op_type and "norm" in node.input[1]]
    assert norms


# 15 tokens over 2 and 4 parts are not divisible; 3 over 4 leave one part without any.
@pytest.mark.parametrize(("tokens", "parts"), [(4, 2), (5, 2), (5, 4), (1, 4)])
@pytest.mark.parametrize("turned", [True, False])
def test_numbers_of_tokens_that_do_not_divide(tokens: int, parts: int, turned: bool) -> None:
    model = transformer(Sizes(tokens=tokens, layers=1, turned=turned))
    assert model.batch["tokens"].shape == (3, tokens)
    compare(model, parts)
    compare(model, parts, double=True)


def kinds(graph: onnx.ModelProto) -> list[Kind]:
    return [kind_of(node) for node in graph.graph.node if is_collective(node)]


def test_sums_become_reduce_scatters_and_gathers_are_repeated() -> None:
    model = transformer(Sizes(layers=3))
    found = kinds(compare(model, 2)[0])
    # Forward: behind the table and two layers each, before two layers each and the head; backward the other way round,
    # and what each divided product reads is gathered once more.
    assert found.count(Kind.REDUCE_SCATTER) == 7 + 7
    assert found.count(Kind.ALL_GATHER) == 7 + 7 + 7
    # Scale and bias of 7 norms, 6 biases behind layers, the positions; the loss as before.
    assert found.count(Kind.ALL_REDUCE) == 2 * 7 + 6 + 1 + 2


def test_the_backward_pass_reads_no_value_of_whole_tokens_from_the_forward_pass() -> None:
    model = transformer(Sizes(layers=2, tokens=4))
    names = list(model.tensors)
    whole_values = []
    for divide in (divide_all, divide_tokens):
        made = training(divide(model.proto, model.shapes, names, 2)[0].model, names, kernels=True)
        nodes = list(made.graph.node)
        start = next(n for n, node in enumerate(nodes) if LOSS_SUM in node.output)
        forward = {name for node in nodes[: start + 1] for name in node.output if name}
        read = forward & {name for node in nodes[start + 1 :] for name in node.input}
        types = value_types(made)
        whole_values.append([name for name in read if (shape(types, name) or [])[1:] == [4, Sizes().width]])
    assert whole_values[0]
    assert not whole_values[1], whole_values[1]


def kept(graphs: list[onnx.ModelProto], divided: list[Divided], model: Model) -> int:
    """Bytes on the first part of the values that the backward pass reads of the forward pass, measured."""
    assert LIBRARY.path is not None
    for each in graphs:
        nodes = list(each.graph.node)
        start = next(n for n, node in enumerate(nodes) if LOSS_SUM in node.output)
        forward = {name for node in nodes[: start + 1] for name in node.output if name}
        read = forward & {name for node in nodes[start + 1 :] for name in node.input}
        outputs = {value.name for value in each.graph.output}
        # ONNX Runtime finds their types.
        each.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in sorted(read - outputs))
    parts, regions = Parts(len(graphs)), [each.regions for each in divided]
    collectives.connect(LIBRARY.path, {CHANNEL: parts})
    try:
        found = parts.run(
            lambda part: run(
                graphs[part],
                {n: regions[part][n].of(v) if n in regions[part] else v for n, v in model.given.items()},
            )
        )
    finally:
        collectives.connected.clear()
    gradients = {f"{name}_grad" for name in model.tensors}
    return sum(value.nbytes for name, value in found[0].items() if name not in gradients)


def test_less_is_kept_for_the_backward_pass() -> None:
    model = transformer(Sizes(layers=4, head=8, hidden=32, tokens=32))
    names, bytes_ = list(model.tensors), []
    for divide in (divide_all, divide_tokens):
        divided = divide(model.proto, model.shapes, names, 2)
        graphs = [training(each.model, names, kernels=True) for each in divided]
        bytes_.append(kept(graphs, divided, model))
    tokens, width = model.batch["tokens"].size, Sizes(head=8).width
    # Of the whole values, each layer keeps the results of two norms and the sums behind two divided layers.
    halves = 4 * 4 * tokens * width * 4 / 2
    assert bytes_[0] - bytes_[1] > 0.9 * halves, (bytes_, halves)


@pytest.mark.parametrize("form", ["packed", "gated", "Gemm"])
@pytest.mark.parametrize("tokens", [4, 5])
@pytest.mark.parametrize("ours", [False, True])
def test_real_ranks_drop_what_one_rank_drops(ours: bool, form: str, tokens: int, tmp_path: Path) -> None:
    model = transformer(replace(FORMS[form], dropout=0.3, tokens=tokens))
    if ours:
        model = drawing_by_seed(model)
    names = list(model.tensors)
    divided = divide_tokens(model.proto, model.shapes, names, 2)
    graphs = [training(each.model, names, kernels=True) for each in divided]
    assert {node.domain for node in graphs[1].graph.node if node.op_type == "Dropout"} == {"ortflow" if ours else ""}
    expected = run(training(model.proto, names, kernels=True), model.given)
    differences = off(run_ranks(graphs, divided, model.given, tmp_path), expected)
    assert max(differences.values()) < 1e-5, differences


def test_gradients_of_whole_tensors_have_the_same_bits_on_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    import divided as support

    model = transformer(Sizes(layers=1))
    names = list(model.tensors)
    divided = divide_tokens(model.proto, model.shapes, names, 2)
    results: list[Any] = []
    graphs = [training(each.model, names, kernels=True) for each in divided]
    monkeypatch.setattr(support, "run_together", lambda name, *rest: results.append((name, rest[-1])))
    run_parts(graphs, divided, model.given)
    checked = [name for name, _ in results if name.startswith("layer0.norm")]
    assert len(checked) == 4
    for name, (first, second) in results:
        region = divided[0].regions.get(name.removesuffix("_grad"))
        if region is None or region.whole:
            assert first[name].tobytes() == second[name].tobytes(), name


def test_what_reads_all_tokens_gets_them() -> None:
    # A mean over the tokens and the first token of each sample, of values that norms have shares of.
    model = transformer(Sizes(layers=1, tokens=5))
    graph = model.proto.graph
    stream = next(node.input[0] for node in reversed(graph.node) if node.op_type == "LayerNormalization")
    loss = next(node for node in graph.node if LOSS_SUM in node.output)
    loss.output[:] = ["loss of tokens" if name == LOSS_SUM else name for name in loss.output]
    one, zero = (onnx.numpy_helper.from_array(np.array([each]), name) for each, name in ((1, "one"), (0, "zero")))
    graph.initializer.extend([one, zero])
    make = onnx.helper.make_node
    graph.node.extend([
        make("ReduceMean", [stream, "one"], ["mean"], keepdims=0), make("Tanh", ["mean"], ["pooled"]),
        make("Slice", [stream, "zero", "one", "one"], ["first"]), make("Mul", ["first", "first"], ["squares"]),
        make("ReduceSum", ["pooled"], ["a"], keepdims=0), make("ReduceSum", ["squares"], ["b"], keepdims=0),
        make("Sum", ["loss of tokens", "a", "b"], [LOSS_SUM]),
    ])  # fmt: skip
    model.proto.CopyFrom(onnx.shape_inference.infer_shapes(model.proto))
    compare(model, 2, double=True)


def test_a_model_with_nothing_between_layers_is_refused() -> None:
    proto = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["" : 18]>
        g (float[n, 8] x, float[8, 12] a, float[12, 6] b) => (float "{LOSS_SUM}") {{
            ax = MatMul(x, a)
            ar = Tanh(ax)
            bx = MatMul(ar, b)
            "{LOSS_SUM}" = ReduceSum <keepdims = 0> (bx)
        }}""")
    shapes = {"a": (8, 12), "b": (12, 6)}
    (first, _) = divide_all(onnx.shape_inference.infer_shapes(proto), shapes, ["a", "b"], 2)
    held = {name: first.regions[name].shape(shape) for name, shape in shapes.items()}
    with pytest.raises(UserError, match="nothing between divided layers") as caught:
        share_tokens(first.model, held, ["a", "b"], LOSS_SUM, first.sums, 0, 2, CHANNEL)
    assert caught.value.where == "parallel.sequence_parallel"
