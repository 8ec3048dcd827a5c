"""ortflow.export_for_training: the file's contents, warnings, refusals, and what stays untouched."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
from messages import alike

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import nn

import ortflow
import ortflow.export
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.onnx_runtime import onnxruntime as ort


class Net(nn.Module):
    """A bit of everything: equal norms, tied weights, a frozen layer, buffers, dropout, batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.batch_norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.25)
        self.fixed = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.linspace(0, 1, 8))
        self.register_buffer("other", torch.ones(8), persistent=False)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(tokens) * self.other + self.table
        for norm in self.norms:
            x = norm(x) + self.fixed(x)
        x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        return {"logits": self.head(self.dropout(x)), "hidden": (x, x.mean())}


PARAMETERS = ["embed.weight", *(f"norms.{i}.{kind}" for i in range(3) for kind in ("weight", "bias"))]
PARAMETERS += ["batch_norm.weight", "batch_norm.bias"]
TOKENS = torch.arange(10).reshape(2, 5)


def export(module: nn.Module, example, path: Path, **options) -> onnx.ModelProto:
    returned = ortflow.export_for_training(module, example, path, **options)
    assert returned == path
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    return model


def listed(model: onnx.ModelProto, key: str) -> list[str]:
    return json.loads({p.key: p.value for p in model.metadata_props}[f"ortflow.{key}"])


def shapes(values) -> dict[str, list[int | str]]:
    return {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}


@dataclass(frozen=True)
class Exported:
    """A module in evaluation mode, and its file, exported from a batch of one."""

    module: nn.Module
    path: Path
    model: onnx.ModelProto
    state: dict[str, torch.Tensor]
    """Copies of all its tensors before the export."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    path = tmp_path_factory.mktemp("export") / "net.onnx"
    module = Net().eval()
    module.fixed.train()
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return Exported(module, path, export(module, {"tokens": TOKENS[:1]}, path), state)


def test_every_tensor_survives_under_its_name(exported: Exported) -> None:
    model = exported.model
    assert listed(model, "parameters") == PARAMETERS
    assert listed(model, "frozen") == ["fixed.weight", "fixed.bias"]
    assert {"table", "other"} <= set(listed(model, "constants"))
    statistics = {"batch_norm.running_mean", "batch_norm.running_var"}
    everything = [set(listed(model, key)) for key in ("parameters", "frozen", "constants")] + [statistics]
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert set.union(*everything) == set(stored)
    assert sum(map(len, everything)) == len(stored)
    for name, tensor in exported.state.items():
        if name in stored:
            np.testing.assert_array_equal(stored[name], tensor.numpy(), err_msg=name)


def test_training_nodes_survive_from_evaluation_mode(exported: Exported) -> None:
    kinds = [node.op_type for node in exported.model.graph.node]
    assert kinds.count("Dropout") == 1
    assert kinds.count("BatchNormalization") == 1
    assert kinds.count("LayerNormalization") == 3
    (opset,) = (o.version for o in exported.model.opset_import if o.domain == "")
    assert opset == 18
    assert exported.model.ir_version <= 10


def test_module_is_left_as_it_was(exported: Exported) -> None:
    module = exported.module
    assert [name for name, part in module.named_modules() if part.training] == ["fixed"]
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, exported.state[name]), name


def test_names_and_a_batch_that_varies_though_the_example_was_of_one(exported: Exported) -> None:
    graph = exported.model.graph
    assert shapes(graph.input) == {"tokens": ["batch", 5]}
    assert shapes(graph.output) == {"logits": ["batch", 5, 11], "hidden_0": ["batch", 5, 8], "hidden_1": []}


def test_nothing_of_this_machine_in_the_file(exported: Exported) -> None:
    assert str(Path(__file__).parent).encode() not in exported.path.read_bytes()


def test_a_refused_node_is_named_by_the_users_module_and_line(tmp_path: Path) -> None:
    class Pooled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_exporting():
                return x
            pooled = torch.onnx.ops.symbolic("MaxRoiPool", (x.reshape(-1, 1, 4, 2), regions), attributes, **options)
            return x + 0.0 * pooled.reshape(1, 1)

    # PyTorch does not have this operator.
    regions, attributes = torch.zeros(1, 5), {"pooled_shape": [1, 1]}
    options = {"dtype": torch.float32, "shape": (1, 1, 1, 1), "version": 1}
    module = nn.Sequential(nn.Linear(8, 8), Pooled())
    with pytest.warns(UserWarning, match=r"not compared with PyTorch.*module '1'.* no gradient"):
        model = export(module, torch.randn(2, 8), tmp_path / "net.onnx")
    (node,) = (node for node in model.graph.node if node.op_type == "MaxRoiPool")
    line = Pooled.forward.__code__.co_firstlineno + 3
    assert walk.called(node) == f"node {node.name!r} (MaxRoiPool; module '1', {Path(__file__).name} line {line})"


def test_fixed_and_named_axes(tmp_path: Path) -> None:
    fixed = export(Net(), TOKENS, tmp_path / "fixed.onnx", dynamic_shapes={})
    assert shapes(fixed.graph.input) == {"tokens": [2, 5]}
    axes = {"tokens": {0: "batch", 1: "time"}}
    names = {"input_names": ["ids"], "output_names": ["scores", "states", "level"]}
    model = export(Net(), (TOKENS,), tmp_path / "named.onnx", dynamic_shapes=axes, **names)
    assert shapes(model.graph.input) == {"ids": ["batch", "time"]}
    assert [output.name for output in model.graph.output] == ["scores", "states", "level"]


def test_values_of_another_batch_size(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 2))
    export(module, torch.zeros(1, 3), tmp_path / "net.onnx")
    session = ort.InferenceSession(str(tmp_path / "net.onnx"))
    x = torch.randn(7, 3)
    (output,) = session.run(["output"], {"input": x.numpy()})
    np.testing.assert_allclose(output, module(x).detach().numpy(), atol=1e-6)


def test_several_inputs_and_a_loss(tmp_path: Path) -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 4)

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, scale: float = 1.0):
            logits = self.linear(x) * scale
            return nn.functional.cross_entropy(logits, labels), logits, None

    example = {"x": torch.randn(4, 3), "labels": torch.tensor([0, 1, 2, 3])}
    model = export(WithLoss(), example, tmp_path / "loss.onnx")
    assert list(shapes(model.graph.input)) == ["x", "labels"]
    assert shapes(model.graph.output) == {"output_0": [], "output_1": ["batch", 4]}


def test_output_names_that_are_taken(tmp_path: Path) -> None:
    class Echo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor):
            return {"x": x * self.w, "w": x + self.w}

    model = export(Echo(), torch.ones(2, 3), tmp_path / "echo.onnx")
    assert [output.name for output in model.graph.output] == ["x_", "w_"]


def test_output_names_are_those_of_forward_whatever_the_exporter_calls_its_values(tmp_path: Path) -> None:
    class Swapped(nn.Linear):
        def forward(self, x: torch.Tensor):
            y = super().forward(x)
            return {"mul": y + 1, "add": y * 2, "linear": y * 3, "mul_1": y}

    module = Swapped(3, 3)
    export(module, X, tmp_path / "model.onnx")
    session = ort.InferenceSession(str(tmp_path / "model.onnx"))
    expected = module(X)
    assert [output.name for output in session.get_outputs()] == list(expected)
    for name, value in zip(expected, session.run(None, {"x": X.numpy()}), strict=True):
        np.testing.assert_allclose(value, expected[name].detach().numpy(), atol=1e-6)


def test_what_onnx_cannot_express_is_warned_about(tmp_path: Path) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 4)
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.norm(self.embed(tokens))

    module = Counting()
    module.norm.eval()
    with pytest.warns(UserWarning) as caught:  # noqa: PT030
        export(module, torch.arange(4), tmp_path / "net.onnx")
    messages = sorted(str(warning.message) for warning in caught)
    assert alike(messages, ["buffer 'calls' changes in forward …"])
    assert {warning.filename for warning in caught} == {__file__}


class Unexportable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if x.sum() > 0 else -self.linear(x)


class FixedBatch(Unexportable):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).reshape(2, 3)


class TwoBatches(Unexportable):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum() + self.linear(y).sum()


def shared_memory() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = nn.Parameter(module[0].weight.data)
    return module


X = torch.ones(2, 3)


def earlier_export(path: Path) -> bytes:
    """A file that export_for_training may replace: a model with its metadata."""
    graph = onnx.helper.make_graph([], "earlier", [], [])
    model = onnx.helper.make_model(graph)
    model.metadata_props.add(key="ortflow.parameters", value="[]")
    onnx.save(model, path)
    return path.read_bytes()


@pytest.mark.parametrize(
    ("module", "example", "sentence"),
    [
        (Unexportable(), X, r"PyTorch cannot export Unexportable: .*data-dependent"),
        (FixedBatch(), X, r"PyTorch cannot export FixedBatch: .*; .*dynamic_shapes=\{\}"),
        (Unexportable(), {"z": X}, r"Unexportable.forward: missing a required argument: 'x'"),
        (TwoBatches(), (X, X[:1]), r"first axes .*1, 2.*name the axes"),
        (nn.Linear(3, 3).half(), X, r"'weight' is float16.*call module.float\(\)"),
        (nn.Linear(3, 3, device="meta"), X, r"'weight' .*meta device.*load"),
        (shared_memory(), X, r"'0.weight' and '1.weight' .*share memory.*tie them"),
    ],
)
def test_refused_with_one_sentence_and_nothing_written(module, example, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    before = earlier_export(path)
    with pytest.raises(UserError, match=sentence) as caught:
        ortflow.export_for_training(module, example, path)
    assert "\n" not in str(caught.value)
    assert [child.name for child in tmp_path.iterdir()] == ["model.onnx"]
    assert path.read_bytes() == before


def test_unwritable_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/model.onnx: .*\(File exists\)"):
        ortflow.export_for_training(nn.Linear(3, 3), X, tmp_path / "file" / "model.onnx")


def test_large_models_have_external_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    small = export(module, torch.zeros(2, 64), tmp_path / "deep" / "small.onnx")
    monkeypatch.setattr(ortflow.export, "EXTERNAL_DATA_BYTES", 1000)
    earlier_export(tmp_path / "large.onnx")
    with pytest.warns(UserWarning, match="not compared with PyTorch.*weights"):
        large = export(module, torch.zeros(2, 64), tmp_path / "large.onnx")
    assert sorted(child.name for child in tmp_path.iterdir()) == ["deep", "large.onnx", "large.onnx.data"]
    assert (tmp_path / "large.onnx").stat().st_size < 10_000
    assert {t.name: numpy_helper.to_array(t).tobytes() for t in large.graph.initializer} == {
        t.name: numpy_helper.to_array(t).tobytes() for t in small.graph.initializer
    }


def test_no_warning_of_pytorch_reaches_the_user(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        export(nn.LSTM(3, 4), torch.zeros(5, 2, 3), tmp_path / "lstm.onnx")
    assert [str(warning.message) for warning in caught] == []
