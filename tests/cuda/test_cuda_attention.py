"""Attention by cuDNN and its gradient against float64: shapes, masks, both half types, the same bits each time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.cuda.cudnn import available
from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.graph.attention.find import MASKED
from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir.order import sort_nodes
from ortflow.workflow.graph.ir.replacement import set_attribute
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions

INPUTS = ("q", "k", "v", "do")
MADE = ("o", "stats", "dq", "dk", "dv")
LARGEST_ERROR = {TensorProto.FLOAT16: 2e-3, TensorProto.BFLOAT16: 1.6e-2}
"""Of a result, as a share of its norm: two roundings of the type, and some."""


@dataclass(frozen=True)
class Case:
    """Sizes of an attention; `mask` is the kind of mask."""

    batch: int = 2
    tokens: int = 128
    keys: int = 128
    heads: int = 4
    shared: int = 4
    size: int = 64
    causal: bool = False
    mask: str = ""
    heads_first: tuple[int, int, int] = (0, 0, 0)

    def __str__(self) -> str:
        sizes = f"{self.batch}x{self.tokens}x{self.keys}x{self.heads}/{self.shared}x{self.size}"
        turned = ["".join(map(str, self.heads_first))] if any(self.heads_first) else []
        return "-".join([sizes, *turned, *(["causal"] if self.causal else []), *([self.mask] if self.mask else [])])


CASES = [
    Case(causal=True),
    Case(),
    Case(tokens=1024, keys=1024, heads=12, shared=12, causal=True),
    Case(tokens=77, keys=77, causal=True),
    Case(tokens=77, keys=77),
    Case(batch=1, tokens=77, keys=50),
    Case(batch=1, tokens=50, keys=77, mask="keys"),
    Case(batch=1, tokens=257, keys=257, size=80, causal=True),
    Case(size=80, mask="keys"),
    Case(size=128, causal=True),
    Case(size=128, heads=8, shared=2, tokens=200, keys=200, causal=True),
    Case(heads=8, shared=1, tokens=77, keys=77),
    Case(heads=8, shared=2, causal=True, mask="keys"),
    Case(size=8, tokens=12, keys=12, causal=True),
    Case(size=8, tokens=12, keys=12, causal=True, mask="keys"),
    Case(size=40, tokens=33, keys=65, mask="pairs"),
    Case(mask="keys"),
    Case(mask="pairs"),
    Case(mask="added"),
    Case(mask="added-keys"),
    Case(tokens=77, keys=77, mask="added"),
    Case(tokens=77, keys=77, causal=True, mask="added-keys"),
    Case(tokens=2, keys=2, causal=True),
    Case(heads=8, shared=2, tokens=77, keys=77, causal=True, heads_first=(1, 1, 0)),
    Case(tokens=50, keys=77, heads_first=(0, 1, 1), mask="keys"),
    Case(tokens=256, keys=4, heads=1, shared=1, size=32),
    Case(tokens=64, keys=4, heads=2, shared=2, size=32, heads_first=(1, 1, 1)),
    Case(tokens=16, keys=4, heads=5, shared=5, size=32),
]


def mask_of(case: Case, random: np.random.Generator) -> np.ndarray | None:
    lengths = random.integers(case.keys // 2, case.keys + 1, (case.batch, 1, 1, 1))
    keys = np.arange(case.keys) < lengths
    if case.mask == "keys":
        return keys
    if case.mask == "pairs":
        pairs = random.random((case.batch, 1, case.tokens, case.keys)) < 0.6
        pairs[..., 0] = True
        return pairs
    if case.mask == "added":
        return random.normal(size=(1, case.heads, case.tokens, case.keys)).astype(np.float32)
    return np.where(keys, np.float32(0), np.float32(-np.inf)) if case.mask == "added-keys" else None


def model_of(case: Case, kind: int, mask: np.ndarray | None) -> onnx.ModelProto:
    """q, k, v and do in fp32 to all outputs of attention and its gradient, and the rounded inputs."""
    queries, keys = [case.batch, case.tokens, case.heads, case.size], [case.batch, case.keys, case.shared, case.size]
    sizes = {"q": queries, "k": keys, "v": keys, "do": queries}
    for name, first in zip("qkv", case.heads_first, strict=True):
        b, t, h, d = sizes[name]
        sizes[name] = [b, h, t, d] if first else [b, t, h, d]
    flags = {
        "scale": case.size**-0.5,
        "causal": int(case.causal),
        "domain": CUDA_DOMAIN,
        "heads_first": case.heads_first,
    }
    fed = [] if mask is None else ["mask"]
    nodes = [helper.make_node("Cast", [name], [f"{name}_half"], to=kind) for name in INPUTS]
    half = {name: f"{name}_half" for name in INPUTS}
    nodes.append(
        helper.make_node("Attention", [half["q"], half["k"], half["v"], *fed], ["o_half", "stats_raw"], "a", **flags)
    )
    nodes.append(
        helper.make_node(
            "AttentionGrad", [half["do"], half["q"], half["k"], half["v"], "o_half", "stats_raw", *fed],
            ["dq_half", "dk_half", "dv_half"], "g", **flags,
        )
    )  # fmt: skip
    results = [*INPUTS, "o", "dq", "dk", "dv"]
    nodes += [helper.make_node("Cast", [f"{name}_half"], [f"{name}_out"], to=TensorProto.FLOAT) for name in results]
    nodes.append(helper.make_node("Identity", ["stats_raw"], ["stats_out"]))
    types = [helper.make_tensor_value_info(f"{name}_half", kind, None) for name in ("o", "dq", "dk", "dv")]
    types.append(helper.make_tensor_value_info("stats_raw", TensorProto.FLOAT, None))
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in sizes.items()]
    if mask is not None:
        of_mask = TensorProto.BOOL if mask.dtype == bool else TensorProto.FLOAT
        inputs.append(helper.make_tensor_value_info("mask", of_mask, mask.shape))
    outputs = [helper.make_tensor_value_info(f"{n}_out", TensorProto.FLOAT, None) for n in (*results, "stats")]
    graph = helper.make_graph(nodes, "attention", inputs, outputs, value_info=types)
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid(CUDA_DOMAIN, 1)], ir_version=9
    )


def expected(case: Case, given: dict[str, np.ndarray], mask: np.ndarray | None) -> dict[str, np.ndarray]:
    """The reference in float64, in the case's order of axes."""
    first = dict(zip("qkv", case.heads_first, strict=True))
    group, scale = case.heads // case.shared, case.size**-0.5
    q, k, v, do = (
        given[name].astype(np.float64).transpose(*((0, 1, 2, 3) if first.get(name) else (0, 2, 1, 3)))
        for name in INPUTS
    )
    k, v = (np.repeat(each, group, 1) for each in (k, v))
    s = scale * q @ k.swapaxes(2, 3)
    if mask is not None:
        s = s + (np.where(mask, 0, MASKED) if mask.dtype == bool else np.maximum(mask, MASKED))
    if case.causal:
        s = np.where(np.tri(case.tokens, case.keys, dtype=bool), s, -np.inf)
    largest = s.max(-1, keepdims=True)
    total = np.exp(s - largest).sum(-1, keepdims=True)
    p, stats = np.exp(s - largest) / total, largest + np.log(total)
    o = p @ v
    ds = p * (do @ v.swapaxes(2, 3) - (do * o).sum(-1, keepdims=True)) * scale
    dk, dv = ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ do
    dk, dv = (each.reshape(case.batch, case.shared, group, case.keys, case.size).sum(2) for each in (dk, dv))
    made = {"o": o, "dq": ds @ k, "dk": dk, "dv": dv}
    turned = {n: value if first.get(n[-1]) and n != "o" else value.transpose(0, 2, 1, 3) for n, value in made.items()}
    return {"stats": stats, **turned}


def run(
    device: CudaDevice, case: Case, kind: int, mask: np.ndarray | None, times: int,
    model: Callable[[Case, int, np.ndarray | None], onnx.ModelProto] = model_of,
) -> list[dict[str, np.ndarray]]:  # fmt: skip
    """The GPU's outputs, several times in one session."""
    random = np.random.default_rng(7)
    binding = Binding(Sessions(device, 1, "error").open(model(case, kind, mask).SerializeToString()), device)
    for name in INPUTS:
        tokens, heads = (case.tokens, case.heads) if name in ("q", "do") else (case.keys, case.shared)
        array = random.normal(size=(case.batch, tokens, heads, case.size)).astype(np.float32)
        turned = dict(zip("qkv", case.heads_first, strict=True)).get(name)
        binding.feed(name, np.ascontiguousarray(array.transpose(0, 2, 1, 3)) if turned else array)
    if mask is not None:
        binding.feed("mask", mask)
    names = [*INPUTS, *MADE]
    return [
        dict(zip(names, (np.array(v) for v in binding.fetch([f"{n}_out" for n in names])), strict=True))
        for _ in range(times)
    ]


@pytest.fixture(autouse=True)
def _cudnn_is_there(device: CudaDevice) -> None:
    if (reason := available(device.gpu.capability)) is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("kind", LARGEST_ERROR, ids=lambda kind: TensorProto.DataType.Name(kind).lower())
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_and_gradient(device: CudaDevice, case: Case, kind: int) -> None:
    mask = mask_of(case, np.random.default_rng(3))
    first, second = run(device, case, kind, mask, 2)
    (other,) = run(device, case, kind, mask, 1)
    wanted = expected(case, first, mask)
    errors = {name: np.linalg.norm(first[name] - wanted[name]) / np.linalg.norm(wanted[name]) for name in MADE}
    said = f"{case} {TensorProto.DataType.Name(kind)}: " + ", ".join(f"{n} {e:.1e}" for n, e in errors.items())
    print(said)
    assert {name: first[name].shape for name in MADE} == {name: wanted[name].shape for name in MADE}
    assert max(errors.values()) < LARGEST_ERROR[kind], said
    for name in MADE:
        np.testing.assert_array_equal(first[name], second[name], err_msg=f"{said}: {name} differs in a second run")
        np.testing.assert_array_equal(first[name], other[name], err_msg=f"{said}: {name} differs in a second session")


PACKED = [
    Case(causal=True),
    Case(),
    Case(tokens=1024, keys=1024, heads=12, shared=12, causal=True),
    Case(tokens=77, keys=77, causal=True),
    Case(batch=3, tokens=33, keys=33),
    Case(batch=1, tokens=257, keys=257, size=80, causal=True),
    Case(size=8, tokens=13, keys=13, causal=True),
    Case(heads=8, shared=2, tokens=77, keys=77, causal=True),
    Case(heads=8, shared=1, tokens=77, keys=77),
    Case(size=128, heads=8, shared=2, tokens=200, keys=200, causal=True),
    Case(tokens=77, keys=77, mask="keys"),
    Case(tokens=77, keys=77, mask="added"),
    Case(heads=8, shared=2, tokens=77, keys=77, causal=True, mask="keys"),
    Case(tokens=77, keys=77, causal=True, mask="added-keys"),
]


def packed_model_of(case: Case, kind: int, mask: np.ndarray | None) -> onnx.ModelProto:
    """As `model_of`, with q, k and v side by side in one value, and their gradients split from one."""
    made = model_of(case, kind, mask)
    graph = made.graph
    heads = {"q": case.heads, "k": case.shared, "v": case.shared}
    nodes = [helper.make_node("Reshape", [f"{name}_half", "flat"], [f"{name}_flat"]) for name in heads]
    nodes.append(helper.make_node("Concat", [f"{name}_flat" for name in heads], ["packed"], axis=-1))
    for node in graph.node:
        if node.domain != CUDA_DOMAIN:
            continue
        place = 1 if node.op_type == "AttentionGrad" else 0
        node.input[:] = [*node.input[:place], "packed", *node.input[place + 3 :]]
        set_attribute(node, "heads_first", None)
        set_attribute(node, "packed", [case.heads, case.shared, case.size])
        if place:
            node.output[:] = ["dpacked"]
    nodes.append(helper.make_node("Split", ["dpacked", "widths"], [f"d{name}_flat" for name in heads], axis=-1))
    for name in heads:
        nodes.append(helper.make_node("Reshape", [f"d{name}_flat", f"{name}_heads"], [f"d{name}_half"]))
        by_heads = np.array([0, 0, heads[name], case.size])
        graph.initializer.append(numpy_helper.from_array(by_heads, f"{name}_heads"))
    graph.initializer.append(numpy_helper.from_array(np.array([0, 0, -1]), "flat"))
    graph.initializer.append(numpy_helper.from_array(np.array([n * case.size for n in heads.values()]), "widths"))
    graph.node.extend(nodes)
    sort_nodes(graph)
    graph.value_info.append(helper.make_tensor_value_info("packed", kind, None))
    graph.value_info.append(helper.make_tensor_value_info("dpacked", kind, None))
    return made


@pytest.mark.parametrize("kind", LARGEST_ERROR, ids=lambda kind: TensorProto.DataType.Name(kind).lower())
@pytest.mark.parametrize("case", PACKED, ids=str)
def test_packed_attention_and_gradient_are_those_of_three_values(device: CudaDevice, case: Case, kind: int) -> None:
    mask = mask_of(case, np.random.default_rng(3))
    (apart,) = run(device, case, kind, mask, 1)
    first, second = run(device, case, kind, mask, 2, packed_model_of)
    for name in [*INPUTS, *MADE]:
        np.testing.assert_array_equal(first[name], second[name], err_msg=f"{case}: {name} differs in a second run")
        np.testing.assert_array_equal(first[name], apart[name], err_msg=f"{case}: {name} differs from that of parts")


def test_a_packed_value_of_another_width_is_refused(device: CudaDevice) -> None:
    def wrong(case: Case, kind: int, mask: np.ndarray | None) -> onnx.ModelProto:
        made = packed_model_of(case, kind, mask)
        for node in made.graph.node:
            if node.domain == CUDA_DOMAIN:
                set_attribute(node, "packed", [case.heads, case.shared, 2 * case.size])
        return made

    with pytest.raises(Exception, match="heads of size 128 in a value"):
        run(device, CASES[0], TensorProto.FLOAT16, None, 1, wrong)


def test_a_fully_masked_query_gets_finite_numbers(device: CudaDevice) -> None:
    case = Case(mask="keys")
    mask = np.zeros((case.batch, 1, 1, case.keys), bool)
    mask[0] = True
    (found,) = run(device, case, TensorProto.FLOAT16, mask, 1)
    for name in MADE:
        assert np.isfinite(found[name]).all(), name


def test_what_cudnn_does_not_take_is_reported(device: CudaDevice) -> None:
    # ONNX Runtime's own error, with our words in it.
    with pytest.raises(Exception, match="cuDNN does not support attention"):
        run(device, replace(CASES[0], size=12), TensorProto.FLOAT16, None, 1)


def test_a_mask_that_does_not_fit_is_reported(device: CudaDevice) -> None:
    with pytest.raises(Exception, match="a mask of shape"):
        run(device, CASES[0], TensorProto.FLOAT16, np.ones((1, 1, 5, 128), bool), 1)
