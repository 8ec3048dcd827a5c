"""The walks of docs/walks: commands run as they are printed, and their numbers are those of PyTorch's own loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
import numpy as np
import pyarrow.parquet as pq
import torch
from in_process import command_here
from project import of_kind
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM
from walks import Page, cross_entropy, losses_of, samples_of, train, write_reviews, write_stories

CLOSE = 1e-5


def exported(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """A run's weights under PyTorch's names."""
    done = command_here("export", name, "--to", "safetensors", "-o", f"{name}.safetensors", folder=folder)
    assert done.returncode == 0, done.stderr
    return load_file(folder / f"{name}.safetensors")


def agree(weights: dict[str, torch.Tensor], module: torch.nn.Module) -> None:
    """The weights load strictly and are those of the module.

    Gradients of a key's bias are 0 but for rounding, which AdamW divides by itself: softmax does not depend on it.
    """
    state = module.state_dict()
    assert weights.keys() == state.keys()
    apart = {name: (weights[name] - state[name]).abs().max().item() for name in state if "k_lin.bias" not in name}
    assert max(apart.values()) < CLOSE, sorted(apart.items(), key=lambda item: -item[1])[:4]


@pytest.mark.rotates("walks")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_from_json_lines_to_a_classifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORTFLOW_CACHE", str(tmp_path / "cache"))
    write_reviews(tmp_path)
    page = Page.read("text")
    made = page.write(tmp_path)
    page.run(tmp_path)
    masked, classifier = made["masked"].train(), made["classifier"].train()

    inputs = {"input_ids": "tokens", "attention_mask": "attention_mask"}
    batches, _, steps = samples_of(tmp_path, "masked", {**inputs, "labels": "labels"})
    losses = train(masked, batches, steps, 3e-3, cross_entropy)
    np.testing.assert_allclose(losses_of(tmp_path, "masked"), losses, rtol=CLOSE)
    agree(exported(tmp_path, "masked"), masked)

    classifier.distilbert.load_state_dict(masked.distilbert.state_dict())
    batches, held_out, steps = samples_of(tmp_path, "classify", {**inputs, "labels": "stars"})
    losses = train(classifier, batches, steps, 1e-3, cross_entropy)
    np.testing.assert_allclose(losses_of(tmp_path, "classify"), losses, rtol=CLOSE, atol=CLOSE)
    agree(exported(tmp_path, "classify"), classifier)
    with torch.no_grad():
        rows = [(classifier(**{k: batch[k] for k in inputs}).logits, batch["labels"]) for batch in held_out]
    logits, labels = (torch.cat(part) for part in zip(*rows, strict=True))
    last = of_kind(tmp_path / "runs" / "classify", "evaluation")[-1]
    assert len(labels) == 40
    assert last["loss"] == pytest.approx(cross_entropy(logits, labels).item(), rel=CLOSE, abs=CLOSE)
    assert last["accuracy"] == pytest.approx((logits.argmax(1) == labels).float().mean().item())

    table = pq.read_table(tmp_path / "out.parquet").to_pydict()
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(24)
    for number, line in enumerate((tmp_path / "new.jsonl").read_text().splitlines()):
        with torch.no_grad():
            expected = classifier(torch.tensor([tokenizer.encode(json.loads(line)["text"]).ids])).logits[0]
        np.testing.assert_allclose(table["logits"][number], expected, atol=CLOSE)
        assert table["predicted_class"][number] == ["bad", "good"][int(expected.argmax())]


class Adapter(torch.nn.Module):
    """A weight with a low-rank adapter."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.a, self.b, self.scale = torch.nn.Parameter(a), torch.nn.Parameter(b), scale

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.scale * self.b @ self.a


def adapt(module: torch.nn.Module, initial: dict[str, torch.Tensor], scale: float) -> None:
    """Put adapters on the module's weights, and freeze the rest."""
    module.requires_grad_(False)
    for name in sorted(initial):
        if name.endswith(".weight.lora_A"):
            layer = module.get_submodule(name.removesuffix(".weight.lora_A"))
            a, b = initial[name], initial[name.removesuffix("A") + "B"]
            parametrize.register_parametrization(layer, "weight", Adapter(a, b, scale))


@pytest.mark.rotates("walks")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_language_model_with_adapters_and_back_to_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORTFLOW_CACHE", str(tmp_path / "cache"))
    write_stories(tmp_path)
    page = Page.read("language-model")
    module = page.write(tmp_path)["module"].train()
    page.run(tmp_path)

    adapt(module, load_file(tmp_path / "runs" / "story" / "graphs" / "initial.safetensors"), 2.0)
    adapters = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    assert len(adapters) == 2 * 2 * 4
    module.model.embed_tokens.weight.requires_grad_(True)
    inputs = {"input_ids": "tokens", "position_ids": "position_ids", "labels": "labels"}
    batches, held_out, steps = samples_of(tmp_path, "story", inputs)
    losses = train(module, batches, steps, 1e-3, cross_entropy)
    np.testing.assert_allclose(losses_of(tmp_path, "story"), losses, rtol=CLOSE)
    last = of_kind(tmp_path / "runs" / "story", "evaluation")[-1]
    expected = _evaluated(module, held_out)
    assert last["loss"] == pytest.approx(expected, rel=CLOSE)
    assert last["perplexity"] == pytest.approx(np.exp(expected), rel=1e-4)

    for layer in module.modules():
        if parametrize.is_parametrized(layer, "weight"):
            parametrize.remove_parametrizations(layer, "weight")
    weights = load_file(tmp_path / "trained" / "model.safetensors")
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    agree(weights, module)
    apart = load_file(tmp_path / "adapters.safetensors")
    names = [name.replace("parametrizations.weight.0.", "lora_").replace("lora_a", "lora_A") for name in adapters]
    names = [f"base_model.model.{name.replace('lora_b', 'lora_B')}.weight" for name in names]
    assert apart.keys() == set(names)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", output_loading_info=True)
    assert not any(report.values()), report
    loaded.load_state_dict(weights, strict=True)
    assert _evaluated(loaded, held_out) == pytest.approx(expected, rel=CLOSE)


def _evaluated(module: Any, batches: Any) -> float:
    """The mean loss of all targets."""
    with torch.no_grad():
        rows = [(module(b["input_ids"], position_ids=b["position_ids"]).logits, b["labels"]) for b in batches]
    logits, labels = (torch.cat(part) for part in zip(*rows, strict=True))
    return cross_entropy(logits, labels).item()
