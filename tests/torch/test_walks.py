"""The walks of docs/walks: commands run as they are printed, and their numbers are those of PyTorch's own loop."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
import numpy as np
import pyarrow.parquet as pq
import torch
from in_process import command_here
from PIL import Image
from project import curve, of_kind
from pyarrow import csv
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn.utils import parametrize
from walk_data import ANIMALS, OUTCOMES, PLANS, write_animals, write_customers, write_reviews, write_stories
from walk_pages import Page
from walk_peers import PEERS, Peer, evaluated

CLOSE = 1e-5
COUNTED = ("accuracy", "f1", "top_5")
"""Metrics that are shares of samples, the same to the last one."""


def exported(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """A run's weights under PyTorch's names."""
    done = command_here("export", name, "--to", "safetensors", "-o", f"{name}.safetensors", folder=folder)
    assert done.returncode == 0, done.stderr
    return load_file(folder / f"{name}.safetensors")


def agree(weights: Mapping[str, torch.Tensor], module: torch.nn.Module) -> None:
    """The weights load strictly and are those of the module.

    Gradients of a key's bias are 0 but for rounding, which AdamW divides by itself: softmax does not depend on it.
    Counts of batches are those of the export: PyTorch does not read them.
    """
    state = module.state_dict()
    assert weights.keys() == state.keys()
    compared = [name for name in state if "k_lin.bias" not in name and "num_batches_tracked" not in name]
    apart = {name: (weights[name] - state[name]).abs().max().item() for name in compared}
    assert max(apart.values()) < CLOSE, sorted(apart.items(), key=lambda item: -item[1])[:4]


def walked(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], dict[str, Peer]]:
    """The page's commands, and PyTorch over the same samples: all losses and the last evaluations agree."""
    monkeypatch.chdir(folder)
    torch.set_num_threads(1)  # with models this small, threads only wait for each other
    monkeypatch.setenv("ORTFLOW_CACHE", str(folder / "cache"))
    page = Page.read(name)
    made = page.write(folder)
    lines = page.run(folder)
    for command, renewed in page.renewed(lines).items():
        assert len(renewed) == len(page.commands[command]), (command, lines[command])
    peers = PEERS[name](folder, made)
    for run, peer in peers.items():
        losses = [loss for _, loss, _, _ in curve(folder / "runs" / run)]
        np.testing.assert_allclose(losses, peer.losses, rtol=CLOSE, atol=CLOSE, err_msg=run)
        if peer.held_out:
            last = of_kind(folder / "runs" / run, "evaluation")[-1]
            names = last.keys() & peer.evaluation.keys()
            assert len(names) > 1
            for key in names:
                near = 1e-6 if key in COUNTED else CLOSE
                assert last[key] == pytest.approx(peer.evaluation[key], rel=near, abs=near), key
    return made, peers


@pytest.mark.rotates("walks")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_from_a_csv_to_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_customers(tmp_path)
    _, peers = walked("table", tmp_path, monkeypatch)
    module = peers["customers"].module
    agree(exported(tmp_path, "customers"), module)

    table = pq.read_table(tmp_path / "out.parquet").to_pydict()
    record = json.loads((tmp_path / "runs" / "customers" / "export" / "inputs.json").read_text())
    rows, new = (csv.read_csv(tmp_path / name) for name in ("customers.csv", "new.csv"))
    columns = []
    for part in record["x"]["parts"]:
        values = new[part["column"]]
        if part["one_hot"]:
            assert part["classes"] == PLANS
            columns += [np.array([plan == name for plan in values.to_pylist()]) for name in PLANS]
            continue
        everything = rows[part["column"]].drop_null().to_numpy()
        assert part["mean"] == pytest.approx(everything.mean(), rel=1e-2), "of nine tenths"
        assert part["std"] == pytest.approx(everything.std(), rel=1e-2)
        numbers = values.fill_null(-1).to_numpy()
        columns.append((np.where(numbers < 0, part["mean"], numbers) - part["mean"]) / part["std"])
    with torch.no_grad():
        logits = module(torch.from_numpy(np.stack(columns, 1).astype(np.float32)))
    np.testing.assert_allclose(table["logits"], logits, atol=CLOSE, rtol=CLOSE)
    assert table["predicted_class"] == [OUTCOMES[kind] for kind in logits.argmax(1)]


@pytest.mark.rotates("walks")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_from_images_to_a_timm_model_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed")
    transforms = pytest.importorskip("torchvision.transforms", reason="torchvision is not installed")
    write_animals(tmp_path)
    _, peers = walked("images", tmp_path, monkeypatch)
    module = peers["animals"].module
    weights = torch.load(tmp_path / "runs" / "animals" / "export" / "state_dict.pt", weights_only=True)
    agree(weights, module)

    loaded = timm.create_model("resnet18", num_classes=len(ANIMALS)).eval()
    loaded.load_state_dict(weights, strict=True)
    table = pq.read_table(tmp_path / "out.parquet").to_pydict()
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    chain = [transforms.Resize(36), transforms.CenterCrop(32), transforms.ToTensor(), transforms.Normalize(mean, std)]
    chain = transforms.Compose(chain)
    pixels = torch.stack([chain(Image.open(tmp_path / "new" / f"{number:02}.png")) for number in range(10)])
    with torch.no_grad():
        logits = loaded(pixels)
        np.testing.assert_allclose(logits, module(pixels), atol=CLOSE, rtol=CLOSE)
    np.testing.assert_allclose(table["logits"], logits, atol=CLOSE, rtol=CLOSE)
    assert table["predicted_class"] == [ANIMALS[kind] for kind in logits.argmax(1)]


@pytest.mark.rotates("walks")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_from_json_lines_to_a_classifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    write_reviews(tmp_path)
    _, peers = walked("text", tmp_path, monkeypatch)
    for name, peer in peers.items():
        agree(exported(tmp_path, name), peer.module)
    assert sum(len(batch["labels"]) for batch in peers["classify"].held_out) == 40

    table = pq.read_table(tmp_path / "out.parquet").to_pydict()
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(24)
    for number, line in enumerate((tmp_path / "new.jsonl").read_text().splitlines()):
        tokens = torch.tensor([tokenizer.encode(json.loads(line)["text"]).ids])
        with torch.no_grad():
            expected = peers["classify"].module(tokens).logits[0]
        np.testing.assert_allclose(table["logits"][number], expected, atol=CLOSE)
        assert table["predicted_class"][number] == ["bad", "good"][int(expected.argmax())]


@pytest.mark.rotates("walks")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_language_model_with_adapters_and_back_to_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    write_stories(tmp_path)
    _, peers = walked("language-model", tmp_path, monkeypatch)
    peer = peers["story"]
    adapters = [name for name, value in peer.module.named_parameters() if value.requires_grad and "embed" not in name]
    assert len(adapters) == 2 * 2 * 4

    for layer in peer.module.modules():
        if parametrize.is_parametrized(layer, "weight"):
            parametrize.remove_parametrizations(layer, "weight")
    weights = load_file(tmp_path / "trained" / "model.safetensors")
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    agree(weights, peer.module)
    apart = load_file(tmp_path / "adapters.safetensors")
    names = [name.replace("parametrizations.weight.0.", "lora_").replace("lora_a", "lora_A") for name in adapters]
    names = [f"base_model.model.{name.replace('lora_b', 'lora_B')}.weight" for name in names]
    assert apart.keys() == set(names)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained", output_loading_info=True)
    assert not any(report.values()), report
    loaded.load_state_dict(weights, strict=True)
    again = evaluated(lambda b: loaded(b["input_ids"], position_ids=b["position_ids"]).logits, peer.held_out)
    assert again["loss"] == pytest.approx(peer.evaluation["loss"], rel=CLOSE)
