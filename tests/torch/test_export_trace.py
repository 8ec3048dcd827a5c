"""What export_for_training makes exportable during the export, and its messages for what cannot be exported."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
import numpy as np
import onnx
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import ortflow
import ortflow.exporter.trace
from ortflow.workflow.errors import UserError
from ortflow.workflow.onnx_runtime import onnxruntime as ort

Tensors = dict[str, torch.Tensor]


def outputs(path: Path, inputs: Tensors) -> dict[str, np.ndarray]:
    session = ort.InferenceSession(str(path))
    names = [output.name for output in session.get_outputs()]
    feed = {value.name: inputs[value.name].numpy() for value in session.get_inputs()}
    return dict(zip(names, session.run(names, feed), strict=True))


class Losses(nn.Module):
    """Every form of cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)
        self.register_buffer("weights", torch.linspace(0.5, 2, 5))

    def forward(self, x, image, classes, pixels, shares) -> Tensors:
        rows, planes = self.linear(x), self.linear(image).movedim(-1, 1)
        losses = {}
        for reduction in ("mean", "sum", "none"):
            for smoothing in (0.0, 0.1):
                for weight in (None, self.weights):
                    how = {"weight": weight, "reduction": reduction, "label_smoothing": smoothing}
                    name = f"{reduction}_{int(smoothing * 10)}_{'plain' if weight is None else 'weighted'}"
                    losses[f"rows_{name}"] = F.cross_entropy(rows, classes, **how)
                    losses[f"ignored_{name}"] = F.cross_entropy(rows, classes, ignore_index=2, **how)
                    losses[f"planes_{name}"] = F.cross_entropy(planes, pixels, ignore_index=1, **how)
                    losses[f"shares_{name}"] = F.cross_entropy(rows, shares.softmax(1), **how)
                    losses[f"single_{name}"] = F.cross_entropy(rows[0], classes[0], **how)
        # A scalar would not allow this.
        losses["each"] = nn.CrossEntropyLoss(reduction="none")(rows, classes).view(3, -1)
        return losses


def test_every_cross_entropy_is_pytorchs(tmp_path: Path) -> None:
    def batch(size: int) -> Tensors:
        classes = torch.arange(size) % 5
        pixels = torch.randint(0, 5, (size, 3, 2))
        x, image, shares = torch.randn(size, 4), torch.randn(size, 3, 2, 4), torch.randn(size, 5)
        return {"x": x, "image": image, "classes": classes, "pixels": pixels, "shares": shares}

    torch.manual_seed(1)
    module = Losses()
    ortflow.export_for_training(module, batch(6), tmp_path / "losses.onnx")
    inputs = batch(9)
    expected, actual = module(**inputs), outputs(tmp_path / "losses.onnx", inputs)
    assert set(actual) == set(expected)
    for name, loss in expected.items():
        assert actual[name].shape == loss.shape, name
        np.testing.assert_allclose(actual[name], loss.detach().numpy(), rtol=1e-6, atol=1e-6, err_msg=name)


class Attention(nn.Module):
    """Attention with four heads of width 4; with `shared`, two of them for keys and values."""

    def __init__(self, shared: bool = False, **options) -> None:
        super().__init__()
        self.queries, self.keys = nn.Linear(6, 16), nn.Linear(6, 16 if not shared else 8)
        self.options = {**options, "enable_gqa": shared}

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        query, key = (part(x).unflatten(-1, (-1, 4)).transpose(-3, -2) for part in (self.queries, self.keys))
        return F.scaled_dot_product_attention(query, key, key + 1, attn_mask=mask, **self.options)


SEEN = torch.tensor([[True, False, True], [True, True, False], [False, False, False]])


@pytest.mark.parametrize(
    ("module", "rank", "mask"),
    [
        (Attention(), 3, None),
        (Attention(), 2, None),
        (Attention(scale=0.3), 3, None),
        (Attention(is_causal=True), 3, None),
        (Attention(shared=True), 3, SEEN),
        (Attention(), 3, SEEN),
        (Attention(), 3, torch.where(SEEN, 0.5, -torch.inf)),
        (Attention(), 3, torch.randn(2, 1, 3, 3)),
        (Attention(), 3, SEEN[None, None, :1].expand(2, 1, 1, 3)),
    ],
)
def test_attention_in_every_form(module: nn.Module, rank: int, mask: torch.Tensor | None, tmp_path: Path) -> None:
    inputs = {"x": torch.randn(2, 3, 6) if rank == 3 else torch.randn(3, 6)}
    inputs |= {} if mask is None else {"mask": mask}
    ortflow.export_for_training(module, inputs, tmp_path / "attention.onnx", dynamic_shapes={})
    (output,) = outputs(tmp_path / "attention.onnx", inputs).values()
    expected = module(**inputs).detach().numpy()
    np.testing.assert_allclose(output, expected, atol=2e-6)


def test_dropout_of_attention_stays(tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.25, batch_first=True)
    ortflow.export_for_training(layer, torch.randn(2, 3, 8), tmp_path / "layer.onnx")
    graph = onnx.load(tmp_path / "layer.onnx").graph
    after = {name: node.op_type for node in graph.node for name in node.output}
    dropped = [after.get(node.input[0]) for node in graph.node if node.op_type == "Dropout"]
    assert len(dropped) == 4
    assert "Softmax" in dropped


@pytest.mark.parametrize("mask", ["mask", "src_key_padding_mask"])
def test_encoder_with_a_mask_of_any_values(mask: str, tmp_path: Path) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            return self.encoder(x, **{mask: hidden})

    torch.manual_seed(1)
    module = Encoder()
    hidden = torch.tensor([[False, True, True], [False, False, True], [False, False, False]])
    inputs = {"x": torch.randn(3, 3, 8), "hidden": hidden}
    shapes = {"x": {0: "batch"}, "hidden": None if mask == "mask" else {0: "batch"}}
    ortflow.export_for_training(module, inputs, tmp_path / "encoder.onnx", dynamic_shapes=shapes)
    for values in (hidden, hidden.flip(1), ~hidden.T):  # the last hides everything from one
        inputs = {"x": torch.randn(3, 3, 8), "hidden": values}
        (output,) = outputs(tmp_path / "encoder.onnx", inputs).values()
        np.testing.assert_allclose(output, module(**inputs).detach().numpy(), atol=2e-6)


def language_model() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MixtralConfig(vocab_size=50, num_key_value_heads=1, num_local_experts=4, **sizes)
    return transformers.MixtralForCausalLM(config)


TOKENS = {"input_ids": torch.arange(12).reshape(2, 6)}


def test_mixture_of_experts_without_a_cache(tmp_path: Path) -> None:
    module = language_model()
    before = (module.config._experts_implementation, module.config.use_cache)
    ortflow.export_for_training(module, TOKENS, tmp_path / "moe.onnx")
    assert (module.config._experts_implementation, module.config.use_cache) == before == ("grouped_mm", True)
    actual = outputs(tmp_path / "moe.onnx", TOKENS)
    assert list(actual) == ["logits"]
    np.testing.assert_allclose(actual["logits"], module(**TOKENS).logits.detach().numpy(), atol=1e-6)


def test_distances_of_points_that_may_be_equal(tmp_path: Path) -> None:
    """Gradients are compared by export_for_training itself."""

    class Prototypes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.points = nn.Parameter(torch.arange(12.0).reshape(4, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cdist(x, self.points)

    module = Prototypes()
    inputs = {"x": torch.cat([torch.randn(2, 3), module.points.detach()[:1]])}
    ortflow.export_for_training(module, inputs, tmp_path / "distances.onnx")
    (output,) = outputs(tmp_path / "distances.onnx", inputs).values()
    np.testing.assert_allclose(output, module(**inputs).detach().numpy(), atol=1e-5)


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)


class Decides(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if x.sum() > 0 else -self.linear(x)


class FixesTheBatch(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).reshape(2, 3)


class Unknown(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svdvals(self.linear(x))


class Raises(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return {"x": self.linear(x)}["y"]


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.lstm(packed)[0].data


X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("module", "example", "says", "line"),
    [
        (Decides(), X, "a branch depends on .* torch.where", 1),
        (
            FixesTheBatch(),
            X,
            r"axis 0 of input 'x' .*size 2 .*dynamic_shapes=\{\}",
            0,
        ),
        (Unknown(), X, "aten._linalg_svd.*use other operators", 1),
        (Raises(), X, "KeyError: 'y', at", 1),
        (Packed(), (torch.ones(2, 4, 3), torch.tensor([4, 2])), "pass the padded batch to the RNN", 2),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_refusal_names_the_users_line_and_what_helps(
    module: nn.Module, example, says: str, line: int, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=rf"PyTorch cannot export {type(module).__name__}: .*{says}") as caught:
        ortflow.export_for_training(module, example, tmp_path / "model.onnx")
    message = str(caught.value)
    assert len(message) < 500
    assert "\n" not in message
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    place = f"{Path(__file__).name} line {module.forward.__code__.co_firstlineno + line}"
    assert place in message or line == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("cache", "says"),
    [(True, r"DynamicCache.*; set module.config.use_cache = False"), (False, '_experts_implementation = "batched_mm"')],
)
def test_settings_of_transformers_that_help(
    cache: bool, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration of another kind than those of transformers, on which they cannot be set."""
    monkeypatch.setattr(ortflow.exporter.trace, "configurations", lambda module: [])
    module = language_model()
    module.config.use_cache = cache
    with pytest.raises(UserError, match=says):
        ortflow.export_for_training(module, TOKENS, tmp_path / "moe.onnx")


class Trilinear(nn.Module):
    """A product of three tensors, in both forms that `torch.einsum` takes."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        named = torch.einsum("bij,jk,ik->bk", x, self.left, self.right)
        return named + torch.einsum(x, [0, 1, 2], self.left, [2, 3], self.right, [1, 3], [0, 3])


def test_opt_einsum_fixes_no_size(tmp_path: Path) -> None:
    """JAX installs that package; PyTorch lets it order products of three tensors by their sizes."""
    package = pytest.importorskip("opt_einsum", reason="opt_einsum is not installed")
    own = package.contract_path
    module, path = Trilinear(), tmp_path / "model.onnx"
    ortflow.export_for_training(module, torch.randn(3, 3, 4), path)
    x = torch.randn(5, 3, 4)
    (value,) = outputs(path, {"x": x}).values()
    np.testing.assert_allclose(value, module(x).detach().numpy(), rtol=1e-5, atol=1e-6)
    assert package.contract_path is own


class Sizes(nn.Module):
    """Numbers that are sizes of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, n = self.layer(x), x.shape[0]
        rows = y[torch.arange(n) % n] + y[torch.remainder(torch.arange(n) + 1, n)]
        return rows + y**n + y.roll(n // 2, 0) + y.roll(shifts=(1 - n,), dims=(0,)) + y.pow(exponent=2)


def test_numbers_may_be_sizes_that_vary(tmp_path: Path) -> None:
    module, path = Sizes(), tmp_path / "model.onnx"
    ortflow.export_for_training(module, torch.randn(3, 4), path)
    for size in (2, 5):
        x = torch.randn(size, 4)
        (value,) = outputs(path, {"x": x}).values()
        np.testing.assert_allclose(value, module(x).detach().numpy(), rtol=1e-4, atol=1e-5)
