"""What a module does in training only, in evaluation only, or between calls: a run does it too, or it is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
import numpy as np
import onnx
import torch
from flat import FlatRun, graphs_of
from onnx import numpy_helper
from reference import OPTIMIZER
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import ortflow
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.export.inference import export_inference
from ortflow.workflow.graph.intake.inspect import findings
from ortflow.workflow.onnx_runtime import onnxruntime as ort
from ortflow.workflow.spec.model import CrossEntropy
from ortflow.workflow.spec.optimizers import Adam

pytestmark = pytest.mark.rotates
CLASSES, STEPS = 3, 5
LOSS = CrossEntropy(kind="cross_entropy", output="output")
ADAM = Adam(name="adamw", lr=1e-2, weight_decay=0.0, epsilon=1e-3)
"""Makes no steps of the rounding in a gradient that is zero."""


class DropPath(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        return x * torch.empty(x.shape[0], 1).bernoulli_(0.7) / 0.7


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.3 * torch.randn_like(x) if self.training else x


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x + 0.5 if self.training else x


class Mean(nn.Module):
    """Subtracts a mean over earlier batches, which it moves after it has read it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = x - self.mean
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return result


class Annealed(nn.Module):
    """A factor that depends on the number of calls in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return x * (1 + self.calls / 4)


class Statistics(nn.Module):
    """Normalises by fixed statistics that are no BatchNorm's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.linspace(-1, 1, 8))
        self.register_buffer("variance", torch.linspace(0.5, 2, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, self.mean, self.variance, training=False)


def layers(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), *middle, nn.Linear(8, CLASSES))


def planes(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), norm, nn.Flatten(), nn.Linear(16, CLASSES))


def hooked() -> nn.Module:
    module, kept = layers(), torch.ones(8, 1)
    kept[:3] = 0
    module[0].weight.register_hook(lambda gradient: gradient * kept)
    module[0].bias.register_hook(lambda gradient: None)
    return module


MODULES = {
    "scaled": lambda: layers(Scaled()),
    "mean": lambda: layers(Mean()),
    "annealed": lambda: layers(Annealed()),
    "statistics": lambda: layers(Statistics()),
    "cumulative": lambda: layers(nn.BatchNorm1d(8, momentum=None)),
    "instances": lambda: planes(nn.InstanceNorm1d(4, affine=True, track_running_stats=True)),
    "spectral": lambda: layers(parametrizations.spectral_norm(nn.Linear(8, 8))),
    "spectral by a hook": lambda: layers(spectral_norm(nn.Linear(8, 8))),
    "weight": lambda: layers(parametrizations.weight_norm(nn.Linear(8, 8))),
    "hooked": hooked,
}


def made(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODULES[name]() if name in MODULES else layers(weight_norm(nn.Linear(8, 8)))


def export(module: nn.Module, path: Path, example: torch.Tensor | None = None) -> onnx.ModelProto:
    ortflow.export_for_training(module, torch.randn(5, 6) if example is None else example, path)
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.mark.parametrize("name", [*MODULES, "weight by a hook"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_run_follows_the_module_and_exports_its_evaluation(name: str, tmp_path: Path) -> None:
    module = made(name)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    export(module, tmp_path / "model.onnx")
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert all(part.training for part in module.modules())
    graphs = graphs_of(tmp_path / "model.onnx", LOSS, ADAM, tmp_path / "graphs")
    run = FlatRun(graphs, ADAM)
    optimizer = torch.optim.AdamW(module.parameters(), lr=ADAM.lr, weight_decay=0.0, eps=ADAM.epsilon)
    generator = np.random.default_rng(5)
    for _ in range(STEPS):
        x = generator.standard_normal((4, 6)).astype(np.float32)
        labels = generator.integers(0, CLASSES, 4)
        loss = F.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert run.step({"input": x, "labels": labels}) == pytest.approx(loss.item(), abs=2e-5)

    path = tmp_path / "trained.onnx"
    export_inference(graphs.infer, {entry.name: run.view("parameters", entry.name) for entry in graphs.index}, path)
    module.eval()
    x = torch.randn(3, 6)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_outputs()] == ["output"]
    np.testing.assert_allclose(session.run(None, {"input": x.numpy()})[0], module(x).detach(), atol=1e-4)
    evaluation = ort.InferenceSession(str(graphs.eval), providers=["CPUExecutionProvider"])
    feeds = {v.name: run.view("parameters", v.name) for v in evaluation.get_inputs() if v.name in graphs.index}
    labels = np.array([0, 1, 2])
    total, weight = evaluation.run(
        ["ortflow.loss_sum", "ortflow.loss_weight"], {**feeds, "input": x.numpy(), "labels": labels}
    )
    assert total / weight == pytest.approx(F.cross_entropy(module(x), torch.from_numpy(labels)).item(), abs=1e-4)


@pytest.mark.parametrize("part", [DropPath, Noise])
def test_what_is_random_in_training_is_not_in_evaluation(part: type[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(3)
    module = layers(part())
    path = tmp_path / "model.onnx"
    export(module, path)
    graphs = graphs_of(path, LOSS, OPTIMIZER, tmp_path / "graphs")
    random = {"RandomNormalLike", "Bernoulli", "RandomUniformLike"}
    assert not random & {node.op_type for node in onnx.load(graphs.infer).graph.node}
    assert not any("ortflow.seed" in node.input for node in onnx.load(graphs.eval).graph.node)
    weights = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    export_inference(graphs.infer, {entry.name: weights[entry.name] for entry in graphs.index}, tmp_path / "out.onnx")
    x = torch.randn(7, 6)
    session = ort.InferenceSession(str(tmp_path / "out.onnx"), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"input": x.numpy()})[0], module.eval()(x).detach(), atol=1e-6)
    report = findings(path)
    assert [value.name for value in report.outputs] == ["output"]
    assert any("evaluation mode" in note for note in report.notes)


def test_dropout_and_batch_statistics_alone_need_no_second_form(tmp_path: Path) -> None:
    model = export(layers(nn.Dropout(0.3), nn.BatchNorm1d(8)), tmp_path / "model.onnx")
    assert [value.name for value in model.graph.output] == ["output"]
    assert "ortflow.evaluation" not in {prop.key for prop in model.metadata_props}


class Auxiliary(nn.Module):
    """Two outputs in training, one in evaluation, as GoogLeNet."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(6, 8), nn.Linear(8, CLASSES), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor] | torch.Tensor:
        hidden = self.body(x).relu()
        if not self.training:
            return self.head(hidden)
        return {"logits": self.head(hidden), "auxiliary": self.other(hidden)}


def test_auxiliary_outputs_are_not_exported(tmp_path: Path) -> None:
    model = export(Auxiliary(), tmp_path / "model.onnx")
    assert [value.name for value in model.graph.output] == ["logits", "auxiliary", "evaluation/logits"]
    loss = CrossEntropy(kind="cross_entropy", output="logits")
    graphs = graphs_of(tmp_path / "model.onnx", loss, OPTIMIZER, tmp_path / "graphs")
    assert [value.name for value in onnx.load(graphs.infer).graph.output] == ["logits"]
    other = CrossEntropy(kind="cross_entropy", output="auxiliary")
    graphs = graphs_of(tmp_path / "model.onnx", other, OPTIMIZER, tmp_path / "other")
    assert "other.weight" in graphs.index


class Unexportable(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            return x
        return x if x.sum() > 1e9 else 2 * x


class Remembering(nn.Module):
    """Keeps its last result, which is no buffer."""

    last = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = x if self.last is None else x + self.last
        self.last = result.detach().mean()
        return result


def clipped() -> nn.Module:
    module = layers()
    module[0].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return module


def stepping() -> nn.Module:
    module = layers()
    module[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return module


class Shrinking(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (layers(Unexportable()), r"evaluation mode in module '2' \(Unexportable\).*data-dependent"),
        (layers(nn.Linear(8, 8), Remembering()), r"of a second step is [\d.]+% off"),
        (clipped(), r"'0.weight' has a hook that changes its gradient"),
        (stepping(), r"'0.weight' has a hook .*register_post_accumulate_grad_hook"),
        (layers(Shrinking(8, 8)), r"forward changes the parameter '2.weight'"),
    ],
)
def test_what_no_file_can_express_is_refused_by_name(module: nn.Module, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        export(module, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


TOKENS = torch.arange(12).reshape(4, 3) % 5


def looked_up(**options: object) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(9, 4, **options), nn.Flatten(), nn.Linear(12, CLASSES))


def test_max_norm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'0' has max_norm=0.5.*set max_norm to None"):
        export(looked_up(max_norm=0.5), tmp_path / "model.onnx", TOKENS)


def test_gradients_by_frequency(tmp_path: Path) -> None:
    """The comparison with PyTorch finds the same gradients: nothing is refused, and nothing is left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        export(looked_up(scale_grad_by_freq=True), tmp_path / "model.onnx", TOKENS)


class Clamped(nn.Module):
    """Two clamps of one value, of which onnxscript's optimizer makes a Clip without bounds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-1, 1) + (x.clamp(-1, 1).sign() - x.clamp(-1, 1)).detach()


class Limited(nn.Module):
    """One value limited several times."""

    def __init__(self, limit: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.limit = nn.Linear(8, 8), limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        return self.limit(hidden) + hidden


@pytest.mark.parametrize(
    "limit",
    [
        lambda x: x.clamp(-1, 1).clamp(-1, 1),
        lambda x: x.clamp(0.5, 0.5),
        lambda x: x.clamp(1, -1),
        # onnxscript's optimizer merges these into the wrong one.
        lambda x: x.clamp(-2, -1).clamp(1, 2),
        lambda x: x.clamp(-2.0, -1.0).clamp(1.0, 2.0),
        lambda x: x.clamp(-2, -1).relu(),
        lambda x: x.relu().clamp(-2, -1),
        lambda x: x.clamp(max=-1).clamp(min=1),
        lambda x: F.hardtanh(F.hardtanh(x, -2, -1), 1, 2),
        lambda x: x.clamp(-2, -1).clamp(1, 2).clamp(3, 4),
        # PyTorch's exporter takes no bounds of two types.
        lambda x: x.clamp(-1, 0.5),
        lambda x: torch.clip(x, 0.5, 2),
        lambda x: (x * 1).clamp_(-1, 0.5),
    ],
    ids=[
        "equal bounds", "one number", "crossed", "apart", "apart as floats", "apart, relu", "relu, apart",
        "apart one-sided", "apart hardtanh", "three", "mixed", "mixed clip", "mixed in place",
    ],
)  # fmt: skip
def test_a_value_is_limited_as_in_pytorch(limit: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path) -> None:
    """The comparison with PyTorch covers the output and the gradient."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        export(Limited(limit), tmp_path / "model.onnx", torch.randn(4, 8))
    onnx.checker.check_model(onnx.load(tmp_path / "model.onnx"))


class Angle(nn.Module):
    """Zeros of both signs on the negative axis, and the origin."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        zeros = torch.stack([torch.zeros_like(x[:, 0]), -torch.zeros_like(x[:, 0])], 1)
        return torch.cat([torch.atan2(x[:, :4], x[:, 4:]), torch.atan2(zeros, -x[:, :2].abs()), x[:, :2]], 1)


class Spread(nn.Module):
    """The deviation of rows of which some are zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.where(torch.arange(x.shape[0]).unsqueeze(1) == 0, 0.0, 1.0) * x
        return torch.cat([x, x.std(1, keepdim=True) - torch.std(x, dim=1, keepdim=True), x.std(1, keepdim=True)], 1)


@pytest.mark.parametrize(
    "module", [layers(Clamped()), layers(Angle()), nn.Sequential(nn.Linear(6, 8, bias=False), Spread())]
)
def test_the_file_is_valid_and_compared(module: nn.Module, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        export(module, tmp_path / "model.onnx")


def test_dropout_that_is_on_in_evaluation_stays_on(tmp_path: Path) -> None:
    class Always(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(x, 0.25)

    torch.manual_seed(3)
    export(layers(Always()), tmp_path / "model.onnx")
    graphs = graphs_of(tmp_path / "model.onnx", LOSS, OPTIMIZER, tmp_path / "graphs")
    kinds = [node.op_type for node in onnx.load(graphs.infer).graph.node]
    assert "Bernoulli" in kinds
    assert "Dropout" in {node.op_type for node in onnx.load(graphs.train).graph.node}


def test_an_example_of_one_sample(tmp_path: Path) -> None:
    module = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    model = export(module, tmp_path / "model.onnx", torch.randn(1, 4, 8))
    assert model.graph.output[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    x = torch.randn(3, 4, 8)
    (output,) = ort.InferenceSession(str(tmp_path / "model.onnx")).run(["output"], {"src": x.numpy()})
    np.testing.assert_allclose(output, module(x).detach(), atol=1e-5)


def test_a_buffer_that_changes_in_evaluation_too_is_said(tmp_path: Path) -> None:
    class Always(Mean):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
            return x - self.mean

    with pytest.warns(UserWarning, match=r"buffer '2.mean' changes in evaluation mode, too"):
        export(layers(Always()), tmp_path / "model.onnx")
