"""Training graphs in half precision on a real GPU: the gradient equals that of the fp32 graph, to half's rounding."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file

from ortflow.workflow.assembly.build import build_graphs
from ortflow.workflow.assembly.updates import write_forms
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.device.cudart import Runtime
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.types import LOSS_SCALE, LOSS_SUM, GraphSet
from ortflow.workflow.optim.gradient import gradient_graph
from ortflow.workflow.optim.graph import optimizer_graph
from ortflow.workflow.optim.segments import segments
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.opening import open_trainer
from ortflow.workflow.trainer.whole_passes import WholePasses

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))
from model import Config, build

SCALE = 1024.0
GPT = Config(vocabulary=1000, context=128, width=256, heads=4, layers=3)


@pytest.fixture(scope="module", params=["fp16", "bf16"])
def graphs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, GraphSet]:
    folder = tmp_path_factory.mktemp(request.param)
    onnx.save(build(GPT), folder / "model.onnx")
    spec = TrainerRunSpec.model_validate(
        {
            "name": "half",
            "model": {"path": str(folder / "model.onnx"), "loss": {"kind": "cross_entropy"}},
            "data": {"train": {"path": "none"}, "micro_batch": 4},
            "train": {"steps": 1, "precision": request.param, "optimizer": {"name": "adamw", "lr": 1e-3}},
            "resources": {"gpus_per_rank": 1},
        }
    )
    graphs = build_graphs(spec, folder / "graphs")
    update = optimizer_graph(spec.train.optimizer, segments(spec.train.optimizer, graphs.index))
    graphs.optimizer.write_bytes(compose(update).SerializeToString())
    write_forms(graphs, request.param)
    graphs.gradient.write_bytes(gradient_graph().SerializeToString())
    (folder / "spec.json").write_text(spec.model_dump_json())
    return request.param, graphs


def gradients(device: CudaDevice, graphs: GraphSet, path: Path, scale: float) -> Mapping[str, np.ndarray]:
    """Loss and all gradients of one batch, from the model's initial parameters."""
    session = Sessions(device, 1, "error").open(path)
    binding = Binding(session, device)
    for name, array in load_file(graphs.initial).items():
        if name in binding.inputs:
            binding.feed(name, array)
    random = np.random.default_rng(0)
    for name in ("tokens", "labels"):
        binding.feed(name, random.integers(0, GPT.vocabulary, (4, GPT.context)))
    if LOSS_SCALE in binding.inputs:
        binding.feed(LOSS_SCALE, np.array([scale], np.float32))
    return dict(zip(binding.outputs, binding.fetch(binding.outputs), strict=True))


def test_the_gradient_is_that_of_fp32(cuda: Runtime, device: CudaDevice, graphs: tuple[str, GraphSet]) -> None:
    precision, files = graphs
    rounding = CudaDevice(cuda, cuda.describe(0), precision=precision)
    exact = gradients(device, files, files.train, 1.0)
    scale = SCALE if precision == "fp16" else 1.0
    mine, again = (gradients(rounding, files, Form.HALF.of(files.train), scale) for _ in range(2))
    assert float(mine[LOSS_SUM]) == pytest.approx(float(exact[LOSS_SUM]), rel=1e-3)
    apart = {}
    for name, array in exact.items():
        assert mine[name].dtype == array.dtype, name
        np.testing.assert_array_equal(mine[name], again[name], err_msg=f"{name} differs from run to run")
        if name.endswith("_grad"):
            apart[name] = float(np.linalg.norm(mine[name] / scale - array) / np.linalg.norm(array))
    assert len(apart) > 20
    worst = max(apart, key=lambda name: apart[name])
    assert apart[worst] < (5e-3 if precision == "fp16" else 4e-2), sorted(apart.items(), key=lambda each: -each[1])[:8]


def test_parameters_that_the_update_rounds(
    cuda: Runtime, device: CudaDevice, graphs: tuple[str, GraphSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps whose update writes the halves of the parameters have the bits of steps that round these themselves."""
    precision, files = graphs
    spec = TrainerRunSpec.model_validate_json((files.root.parent / "spec.json").read_text())
    found = []
    for kept in (True, False):
        monkeypatch.setattr(TrainerRunSpec, "holds_whole", kept)
        sessions = Sessions(CudaDevice(cuda, cuda.describe(0), precision=precision), 1, "error")
        trainer = open_trainer(files, spec, sessions, SoloCommunicator())
        trainer.load_tensors(load_file(files.initial))
        passes = trainer.parts.passes
        assert isinstance(passes, WholePasses)
        rounded = passes.graph.rounded
        assert (rounded is not None) == kept
        random, losses = np.random.default_rng(0), []
        for step in range(8):
            if step == 6:
                trainer.load_tensors({name: 0.9 * array for name, array in load_file(files.initial).items()})
            arrays = {name: random.integers(0, GPT.vocabulary, (4, GPT.context)) for name in ("tokens", "labels")}
            outcome = trainer.step(
                [MicroBatch(arrays, 4)], learning_rate=1e-3, update=step + 1, seeds=[0], control_values=()
            )
            losses.append(outcome.loss)
        if kept:
            assert rounded is not None
            assert rounded.written, "the update's graph writes them"
        found.append((losses, {name: buffer.read() for name, buffer in trainer.state().items()}))
        trainer.end_training()
    (losses, state), (others, expected) = found
    assert losses == others
    for name, array in expected.items():
        np.testing.assert_array_equal(state[name], array, err_msg=name)
