"""Dropout on a GPU: numpy's masks, captured as queued, the CPU's curve, and attention whose weights are dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graph_build_models import built, run_file
from onnx import TensorProto, helper, numpy_helper
from philox import Array, dropped
from project import Project, curve, logs, of_kind
from queued import network, state_of, steps_of
from test_cuda_runs import CONSTANT, GPU, ONE, killed, near, state
from test_cuda_step import trainer_on
from trainers import trainer_on as on_cpu

from ortflow.workflow.cuda.cudnn import available
from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.device.cudart import Runtime
from ortflow.workflow.fusion.groups import fuse
from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.types import SEED
from ortflow.workflow.kernels.dropout import attributes
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.trainer.step import GraphTrainer

RATIO, NUMBER = 0.3, 5
FLAGS = attributes(RATIO)


@pytest.fixture(scope="module")
def project(cuda: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project.make(tmp_path_factory.mktemp("cuda-dropout"), dropout=0.1)


def branch(shape: tuple[int, ...], kind: int) -> onnx.ModelProto:
    """A bias, a dropout, and the sum with what passes by, stored as `kind`."""
    info = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Add", ["x", "bias"], ["h"]),
        helper.make_node("Dropout", [SEED, "number", "h"], ["d"], domain=CUDA_DOMAIN, **FLAGS),
        helper.make_node("Add", ["d", "residual"], ["s"]),
        helper.make_node("Cast", ["s"], ["y"], to=kind),
    ]
    sizes = {"x": shape, "bias": shape[-1:], "residual": shape}
    graph = helper.make_graph(
        nodes,
        "graph",
        [info(SEED, TensorProto.INT64, [1]), *(info(name, TensorProto.FLOAT, dims) for name, dims in sizes.items())],
        [info("y", kind, shape)],
        [numpy_helper.from_array(np.array([NUMBER], np.int64), "number")],
        value_info=[info("d", TensorProto.FLOAT, shape)],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(CUDA_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=9)
    shapes.infer(model, list(model.graph.value_info))
    fused, taken = fuse(model)
    assert taken == 4
    plain = helper.make_node("Cast", ["y"], ["out"], to=TensorProto.FLOAT)
    fused.graph.node.append(plain)
    fused.graph.value_info.append(fused.graph.output[0])
    fused.graph.output[0].CopyFrom(info("out", TensorProto.FLOAT, shape))
    return fused


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.FLOAT16])
@pytest.mark.parametrize("shape", [(6, 5, 32), (3, 7, 33), (1, 1, 8), (8, 1024, 768), (4096, 4100)], ids=str)
def test_the_masks_are_those_of_numpy(device: CudaDevice, shape: tuple[int, ...], kind: int) -> None:
    random = np.random.default_rng(0)
    x, residual = (random.normal(size=shape).astype(np.float32) for _ in range(2))
    bias = random.normal(size=shape[-1]).astype(np.float32)
    binding = Binding(Sessions(device, 1, "error").open(branch(shape, kind).SerializeToString()), device)
    assert SEED not in binding.read_on_host
    for seed in (3, 2**40 + 1):
        for name, array in {"x": x, "bias": bias, "residual": residual, SEED: np.array([seed])}.items():
            binding.feed(name, array)
        (y,) = binding.fetch(["out"])
        expected = dropped(x + bias, seed, NUMBER, int(FLAGS["dropped"]), float(FLAGS["scale"])) + residual
        rounded = expected if kind == TensorProto.FLOAT else expected.astype(np.float16).astype(np.float32)
        np.testing.assert_array_equal(y, rounded)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_captured_steps_draw_the_masks_of_queued_ones_and_of_a_cpu(
    device: CudaDevice, tmp_path: Path, accumulation: int
) -> None:
    model = network(tmp_path / "model.onnx", "Dropout")
    graphs = built(model, resources__gpus_per_rank=1)
    sizes = [[8] * accumulation if step % 7 != 5 else [8] * (accumulation - 1) + [5] for step in range(20)]
    steps = steps_of(sizes)
    changes: dict[str, Any] = {"train__gradient_accumulation": accumulation, "train__clip_norm": 1.0}

    def train(trainer: GraphTrainer, first: int = 0) -> list[float]:
        return [
            trainer.step(
                batches, learning_rate=1e-3, update=number + 1, control_values=[],
                seeds=[first + 10 * number + place for place in range(len(batches))],
            ).loss
            for number, batches in enumerate(steps)
        ]  # fmt: skip

    captured, log = trainer_on(device, graphs, **changes)
    queued, quiet = trainer_on(device, graphs, resources__cuda_graph=False, **changes)
    found = train(captured)
    assert "a micro-batch is captured as a CUDA graph" in log, log
    assert not quiet
    np.testing.assert_array_equal(found, train(queued))
    for name, flat in state_of(queued).items():
        np.testing.assert_array_equal(state_of(captured)[name], flat, err_msg=name)
    np.testing.assert_allclose(found, train(on_cpu(graphs, run_file(model, **changes))), rtol=1e-5)
    other, _ = trainer_on(device, graphs, **changes)
    assert abs(np.array(train(other, first=1000)) - found).max() > 1e-2


TOKENS = 64
"""As many as a head has elements: with the unit matrix for its values, attention is the dropped weights."""


def attention(kind: int, ratio: float, *, causal: bool) -> onnx.ModelProto:
    """q, k, v, do and a seed to o, dq, dk and dv; batch, tokens, heads, size."""
    info, half = helper.make_tensor_value_info, "qkv"
    flags = {"scale": 0.125, "causal": int(causal), "dropout": ratio, "domain": CUDA_DOMAIN, "heads_first": [0, 0, 0]}
    names = [*half, "do"]
    nodes = [helper.make_node("Cast", [name], [f"{name}.half"], to=kind) for name in names]
    operands, drawn = [f"{name}.half" for name in half], ["", "key", "offset"]
    made = [f"d{name}.half" for name in half]
    nodes += [
        helper.make_node("Add", [SEED, "apart"], ["key"]),
        helper.make_node("Attention", [*operands, *drawn], ["o.half", "stats"], "a", **flags),
        helper.make_node("AttentionGrad", ["do.half", *operands, "o.half", "stats", *drawn], made, "g", **flags),
        *(helper.make_node("Cast", [f"{name}.half"], [name], to=TensorProto.FLOAT) for name in ("o", "dq", "dk", "dv")),
    ]
    dims = [2, TOKENS, 3, TOKENS]
    graph = helper.make_graph(
        nodes,
        "graph",
        [info(SEED, TensorProto.INT64, [1]), *(info(name, TensorProto.FLOAT, dims) for name in names)],
        [info(name, TensorProto.FLOAT, dims) for name in ("o", "dq", "dk", "dv")],
        [numpy_helper.from_array(np.array([n], np.int64), name) for name, n in (("apart", 12345), ("offset", 0))],
        value_info=[
            info("stats", TensorProto.FLOAT, None), *(info(name, kind, None) for name in ("o.half", *made)),
        ],
    )  # fmt: skip
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(CUDA_DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


def by_heads(array: Array) -> Array:
    return array.astype(np.float64).transpose(0, 2, 1, 3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_attention_drops_weights_and_its_gradient_drops_the_same(device: CudaDevice, kind: int, causal: bool) -> None:
    if (reason := available(device.gpu.capability)) is not None:
        pytest.skip(reason)
    random, ratio, dims = np.random.default_rng(0), 0.25, (2, TOKENS, 3, TOKENS)
    feeds = {name: random.normal(size=dims).astype(np.float16).astype(np.float32) for name in ("q", "k", "do")}
    feeds["v"] = np.ascontiguousarray(np.broadcast_to(np.eye(TOKENS, dtype=np.float32)[None, :, None], dims))
    if kind == TensorProto.BFLOAT16:
        feeds = {
            name: (array.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) for name, array in feeds.items()
        }
    model = attention(kind, ratio, causal=causal).SerializeToString()
    binding = Binding(Sessions(device, 1, "error").open(model), device)
    assert SEED not in binding.read_on_host
    for name, array in feeds.items():
        binding.feed(name, array)
    found = []
    for seed in (7, 7, 8):
        binding.feed(SEED, np.array([seed]))
        found.append(
            dict(zip(("o", "dq", "dk", "dv"), map(np.array, binding.fetch(["o", "dq", "dk", "dv"])), strict=True))
        )
    first, again, other = found
    for name, array in first.items():
        np.testing.assert_array_equal(array, again[name], err_msg=f"{name}: one seed, two results")
    q, k, v, do = (by_heads(feeds[name]) for name in ("q", "k", "v", "do"))
    scores = 0.125 * q @ k.swapaxes(2, 3)
    seen = np.tri(TOKENS, dtype=bool) if causal else np.ones((TOKENS, TOKENS), bool)
    scores = np.where(seen, scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    o, later = by_heads(first["o"]), by_heads(other["o"])
    large = (p > 1e-4) & seen
    mask, of_other = o > p / 2, later > p / 2
    tolerance = 2e-2 if kind == TensorProto.BFLOAT16 else 4e-3
    np.testing.assert_allclose(o[large], (p * mask / (1 - ratio))[large], rtol=tolerance, atol=1e-6)
    count = large.sum()
    deviation = (ratio * (1 - ratio) / count) ** 0.5
    # cuDNN compares a few bits of its random numbers.
    assert abs(mask[large].mean() - (1 - ratio)) < 5 * deviation + 2.0**-8
    alike = ratio**2 + (1 - ratio) ** 2
    assert abs((mask == of_other)[large].mean() - alike) < 0.02
    planes = ((mask[0], mask[1], large[0] & large[1]), (mask[:, 0], mask[:, 1], large[:, 0] & large[:, 1]))
    for one, two, both in planes:
        assert abs((one == two)[both].mean() - alike) < 0.03, "two samples or two heads drop alike"
    weights = p * mask / (1 - ratio)
    slope = (do @ v.swapaxes(2, 3)) * mask / (1 - ratio)
    ds = 0.125 * p * (slope - (slope * p).sum(-1, keepdims=True))
    expected = {"dq": ds @ k, "dk": ds.swapaxes(2, 3) @ q, "dv": weights.swapaxes(2, 3) @ do}
    for name, wanted in expected.items():
        error = np.linalg.norm(by_heads(first[name]) - wanted) / np.linalg.norm(wanted)
        assert error < 2 * tolerance, (name, error)


def test_a_run_in_bf16_is_captured_and_resumes_bit_for_bit(project: Project) -> None:
    settings = {**GPU, "train__steps": 160, "train__precision": "bf16"}
    whole = project.run("bf16-whole", **settings)
    words = logs(whole)
    assert "a micro-batch is captured as a CUDA graph" in words
    assert "is not captured" not in words
    assert "is not fused" not in words
    run_dir = killed(project, "bf16-killed", (60,), **settings)
    assert curve(run_dir) == curve(whole)
    assert state(run_dir) == state(whole)


def test_a_run_that_moves_to_the_cpu_and_back_keeps_its_curve(project: Project) -> None:
    whole = project.run("turns-whole", train__steps=45, **CONSTANT, **ONE)
    for steps, place in ((15, GPU), (30, {**ONE, "resources__gpus_per_rank": 0}), (45, GPU)):
        run_dir = project.run("turns", train__steps=steps, **CONSTANT, **place)
    assert [record["step"] for record in of_kind(run_dir, "resume")] == [15, 30]
    near(run_dir, whole, 1e-4)
