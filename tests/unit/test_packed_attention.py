"""Attention reads one packed value in place of copies by a Split, and computes the same bits."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from composed_attention import compose_attention
from cuda_composed import composed
from graph_build_models import built
from onnx import numpy_helper, parser
from safetensors.numpy import load_file

from ortflow.workflow.fusion import halved as form
from ortflow.workflow.fusion.packed import pack
from ortflow.workflow.graph.attention.find import GRADIENT, OPERATOR
from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.onnx_runtime import onnxruntime as ort

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))
from model import Config, build

BATCH, TIME, HEADS, SIZE = 2, 7, 4, 8
GPT = Config(vocabulary=64, context=32, width=64, heads=4, layers=2)


def reshaped(queries: str, keys: str = "") -> str:
    return f"q = Reshape (xq, {queries}) k = Reshape (xk, {keys or queries}) v = Reshape (xv, {keys or queries})"


PLAIN = reshaped("by_head", "by_shared")


def forward(
    shared: int = HEADS, split: str = "Split <axis = -1> (all, widths)", heads: str = PLAIN,
    read: str = "q, k, v", after: str = "more = Identity (loss_of_o)", mask: str = "", flags: str = "",
) -> onnx.ModelProto:  # fmt: skip
    """Attention with packed operands: `heads` computes q, k and v, `after` computes `more`."""
    width, packed = HEADS * SIZE, (HEADS + 2 * shared) * SIZE
    text = f"""
    <ir_version: 9, opset_import: ["": 18, "com.microsoft": 1, "ortflow.cuda": 1]>
    attention (float[batch, time, {width}] x, float[{width}, {packed}] w, bool[batch, 1, 1, time] keys)
        => (float loss) <float[batch, time, {HEADS}, {SIZE}] o, float[batch, {HEADS}, time, 1] stats>
    {{
        all = MatMul (x, w)
        xq, xk, xv = {split}
        {heads}
        o, stats = ortflow.cuda.Attention <scale = 0.25 {flags}> ({read} {mask})
        flat = Reshape (o, whole)
        squares = Mul (flat, flat)
        loss_of_o = ReduceSum <keepdims = 0> (squares)
        {after}
        loss = Add (loss_of_o, more)
    }}
    """
    made = parser.parse_model(text)
    constants = {
        "widths": np.array([HEADS * SIZE, shared * SIZE, shared * SIZE]),
        "by_head": np.array([0, 0, HEADS, SIZE]),
        "by_shared": np.array([0, 0, shared, SIZE]),
        "whole": np.array([0, 0, width]),
        "wide": np.array([0, 0, 3 * HEADS, SIZE]),
        "narrow": np.array([0, -1, HEADS // 2, SIZE]),
        "joined": np.array([1, -1, HEADS, SIZE]),
        "two": np.float32(2),
    }
    named = {name for node in made.graph.node for name in node.input}
    made.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items() if name in named
    )
    return onnx.shape_inference.infer_shapes(made)


def training(model: onnx.ModelProto) -> onnx.ModelProto:
    train, _ = differentiate(model, ["w"], "loss")
    return train


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = ort.InferenceSession(
        composed(compose_attention(model)).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [value.name for value in session.get_outputs()]
    given = {value.name: feeds[value.name] for value in session.get_inputs()}
    return dict(zip(names, session.run(names, given), strict=True))


def feeds_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    sizes = {"batch": BATCH, "time": TIME}
    made: dict[str, np.ndarray] = {}
    for value in model.graph.input:
        shape = [sizes.get(d.dim_param, d.dim_value) for d in value.type.tensor_type.shape.dim]
        made[value.name] = random.standard_normal(shape, np.float32)
    made["keys"] = np.arange(TIME) < np.array([TIME, TIME - 3]).reshape(BATCH, 1, 1, 1)
    return made


def operators(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


TAKEN = {
    "plain": (forward(), HEADS),
    "causal": (forward(flags=", causal = 1, heads_first = [0, 0, 0]"), HEADS),
    "masked": (forward(mask=", keys"), HEADS),
    "equal-parts": (forward(split="Split <axis = 2, num_outputs = 3> (all)"), HEADS),
    "grouped": (forward(shared=2), 2),
    "grouped-masked-causal": (forward(shared=1, mask=", keys", flags=", causal = 1"), 1),
    "sizes-read": (
        forward(
            after="""whole_size = Shape (k) width_of_v = Shape <start = -1> (xv) leading = Shape <end = 2> (xq)
                     tokens = Shape <start = 1, end = 3> (q)
                     sizes = Concat <axis = 0> (whole_size, width_of_v, leading, tokens)
                     numbers = Cast <to = 1> (sizes) more = ReduceSum <keepdims = 0> (numbers)""",
            shared=2,
        ),
        2,
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_packed_attention_computes_the_same(name: str) -> None:
    model, shared = TAKEN[name]
    train = training(model)
    packed = pack(train)
    assert operators(train)["Split"] == 1
    assert not operators(packed)["Split"]
    for operator in (OPERATOR, GRADIENT):
        (before,), (node,) = ([n for n in each.graph.node if n.op_type == operator] for each in (train, packed))
        assert attributes_of(node)["packed"] == [HEADS, shared, SIZE]
        assert len(node.input) == len(before.input) - 2
        assert "all" in node.input
    if name != "sizes-read":
        assert not operators(packed)["Concat"]
    feeds = feeds_of(train)
    expected, found = run(train, feeds), run(packed, feeds)
    assert expected.keys() == found.keys()
    for each, array in expected.items():
        np.testing.assert_array_equal(found[each], array, err_msg=each)
    onnx.checker.check_model(composed(compose_attention(packed)))


LEFT = {
    "part-read": forward(after="more = ReduceSum <keepdims = 0> (xq)"),
    "heads-read": forward(after="more = ReduceSum <keepdims = 0> (k)"),
    "turned": forward(heads=PLAIN.replace("q = Reshape (xq", "turned = Mul (xq, two) q = Reshape (turned")),
    "rotated": forward(heads=PLAIN.replace("q =", "plain_q =") + " q = Mul (plain_q, two)"),
    "other-order": forward(read="k, q, v"),
    "heads-first": forward(flags=", heads_first = [1, 1, 1]"),
    "other-axis": forward(heads=reshaped("wide"), split="Split <axis = 1, num_outputs = 3> (all)"),
    "tokens-split": forward(heads=reshaped("narrow")),
    "samples-joined": forward(heads=reshaped("joined")),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_attention_is_left_unchanged(name: str) -> None:
    for model in (LEFT[name], training(LEFT[name])):
        assert pack(model) == model


def test_attention_without_a_gradient_reads_the_packed_value() -> None:
    model = forward(shared=2, mask=", keys")
    packed = pack(model)
    assert not operators(packed)["Split"]
    assert run(packed, feeds_of(model)) == run(model, feeds_of(model))


def _concat(model: onnx.ModelProto) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.op_type == "Concat")


def test_gradients_in_another_order_are_left_unchanged() -> None:
    train = training(forward())
    concat = _concat(train)
    concat.input[:] = [concat.input[place] for place in (0, 2, 1)]
    assert pack(train) == train


def test_a_gradient_that_is_read_alone_is_left_unchanged() -> None:
    train = training(forward())
    name = _concat(train).input[1]
    train.graph.output.extend(value for value in train.graph.value_info if value.name == name)
    assert pack(train) == train
    del train.graph.output[-1]
    assert pack(train) != train


@pytest.mark.parametrize(("again", "count"), [([], 2), (["h.0"], 3)], ids=["kept", "computed again"])
def test_the_example_gpt_computes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: list[str], count: int
) -> None:
    given: list[onnx.ModelProto] = []

    def noted(model: onnx.ModelProto) -> onnx.ModelProto:
        given.append(model)
        return pack(model)

    for name, instead in {"half": lambda model, **rest: model, "on_cuda": lambda model: model, "pack": noted}.items():
        monkeypatch.setattr(form, name, instead)
    monkeypatch.setattr(form, "fused", lambda model: model)
    onnx.save(build(GPT), tmp_path / "model.onnx")
    graphs = built(
        tmp_path / "model.onnx", resources__gpus_per_rank=1, data__micro_batch=4, train__precision="bf16",
        model__recompute=again,
    )  # fmt: skip
    (before,), after = given, onnx.load(Form.HALF.of(graphs.train))
    assert (operators(before)["Split"], operators(after)["Split"]) == (count, 0)
    assert operators(before)["Concat"] - operators(after)["Concat"] == GPT.layers
    random = np.random.default_rng(0)
    feeds = {name: random.integers(0, GPT.vocabulary, (4, GPT.context)) for name in ("tokens", "labels")}
    feeds |= load_file(graphs.initial)
    expected, found = run(before, feeds), run(after, feeds)
    assert expected.keys() == found.keys()
    for each, array in expected.items():
        np.testing.assert_array_equal(found[each], array, err_msg=each)
