"""How long the steps of four walks wait for data; benchmarks/documented_walks.py compares with PyTorch's numbers.

    python benchmarks/walks.py [--only table images masked language] [--rows 200000]

Each walk is one run on this machine's cores: a CSV into a network of three layers, two classes of JPEG files with
augmentation into timm's resnet18, JSON lines with dynamic masking into DistilBERT of two layers, and packed JSON lines
into Llama of two layers with LoRA. Prints the share of the steps' time in which they waited for samples, from the
run's own record.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ortflow

CLASSES = 3
NUMBERS = 10
EPOCHS = 3
BATCH = 256
LR = 1e-3


def write_table(folder: Path, rows: int) -> None:
    """Ten numbers, one of them missing at times, a plan of four, and a class that depends on them."""
    chance = np.random.default_rng(0)
    numbers, plans = chance.normal(size=(rows, NUMBERS)).round(5), chance.integers(0, 4, rows)
    score = numbers @ chance.normal(size=(NUMBERS, CLASSES)) + np.eye(4, CLASSES)[plans] * 2
    labels = (score + chance.gumbel(size=score.shape)).argmax(1)
    with (folder / "table.csv").open("w") as file:
        file.write(",".join([*(f"v{n}" for n in range(NUMBERS)), "plan", "outcome"]) + "\n")
        for row, plan, label in zip(numbers.tolist(), plans.tolist(), labels.tolist(), strict=True):
            file.write(f"{','.join(map(str, row))},{'abcd'[plan]},{('low', 'mid', 'top')[label]}\n")


def network() -> torch.nn.Module:
    """Three layers of 128."""
    torch.manual_seed(0)
    sizes = [(NUMBERS + 4, 128), (128, 128)]
    layers = [part for size in sizes for part in (torch.nn.Linear(*size), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers, torch.nn.Linear(128, CLASSES))


def table(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A CSV."""
    write_table(folder, options.rows)
    names = ["x"]
    ortflow.export_for_training(network(), torch.zeros(2, NUMBERS + 4), folder / "model.onnx", input_names=names)
    fields = [{"columns": ["v*"], "standardize": True}, {"columns": ["plan"], "one_hot": True}]
    columns = {"x": ["v*", "plan"], "labels": "outcome"}
    return {
        "model": {"path": "model.onnx", "loss": {"kind": "cross_entropy"}, "metrics": ["accuracy", "f1"]},
        "data": {
            "train": {"path": "table.csv", "columns": columns, "fields": fields},
            "eval": {"fraction": 0.1, "stratify": "outcome"},
            "micro_batch": BATCH,
        },
        "train": {"epochs": EPOCHS, "optimizer": {"name": "adamw", "lr": LR}},
    }


def images(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Two classes of JPEG files."""
    import timm
    from PIL import Image

    chance = np.random.default_rng(0)
    for number in range(256):
        place = folder / "animals" / ("cat", "dog")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(chance.integers(0, 256, (8, 8, 3), np.uint8))
        coarse.resize((128, 128), Image.Resampling.BICUBIC).save(place / f"{number:03}.jpg", quality=90)
    module = timm.create_model("resnet18", num_classes=2)
    ortflow.export_for_training(module, torch.zeros(2, 3, 64, 64), folder / "model.onnx", input_names=["pixels"])
    return {
        "model": {"path": "model.onnx", "loss": {"kind": "cross_entropy"}},
        "data": {
            "train": {
                "path": "animals",
                "images": {"resize": 72, "crop": 64, "mean": [0.5] * 3, "std": [0.25] * 3},
                "columns": {"pixels": "image", "labels": "label"},
                "transforms": [
                    {"random_crop": {"scale": [0.3, 1.0]}},
                    {"flip": "horizontal"},
                    {"color_jitter": {"brightness": 0.3, "contrast": 0.3}},
                ],
            },
            "micro_batch": 32,
        },
        "train": {"steps": 40, "optimizer": {"name": "sgd", "lr": 1e-2, "momentum": 0.9}},
    }


def write_lines(folder: Path, special: list[str]) -> int:
    """2,000 lines of text, and a byte-level tokenizer of them; returns its size."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    chance = random.Random(0)
    words = ["".join(chance.choices("aeioubcdfglmnrst", k=chance.randint(2, 8))) for _ in range(800)]
    rows = [" ".join(chance.choices(words, k=chance.randint(8, 80))) for _ in range(2000)]
    (folder / "lines.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(rows, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return int(tokenizer.get_vocab_size())


def masked(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """DistilBERT with dynamic masking."""
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    size = write_lines(folder, ["[PAD]", "[MASK]"])
    module = DistilBertForMaskedLM(DistilBertConfig(vocab_size=size, dim=128, n_layers=2, n_heads=4, hidden_dim=256))
    example = {"input_ids": torch.zeros(2, 9, dtype=torch.long), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    axes = {name: {0: "batch", 1: "time"} for name in example}
    ortflow.export_for_training(module, example, folder / "model.onnx", dynamic_shapes=axes)
    return {
        "model": {"path": "model.onnx", "loss": {"kind": "cross_entropy", "output": "logits"}},
        "data": {
            "train": {
                "path": "lines.jsonl",
                "text": {"tokenizer": "tokenizer.json", "max_length": 128},
                "columns": {"input_ids": "tokens"},
                "transforms": [{"mask_tokens": {}}],
            },
            "micro_batch": 16,
        },
        "train": {"steps": 100, "optimizer": {"name": "adamw", "lr": LR}},
    }


def language(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Llama over packed documents, with adapters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = write_lines(folder, ["<|endoftext|>"])
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    module = LlamaForCausalLM(LlamaConfig(vocab_size=size, **sizes, use_cache=False))
    example = {"input_ids": torch.zeros(2, 128, dtype=torch.long), "position_ids": torch.arange(128).repeat(2, 1)}
    axes = {name: {0: "batch"} for name in example}
    ortflow.export_for_training(module, example, folder / "model.onnx", dynamic_shapes=axes)
    text = {"tokenizer": "tokenizer.json", "length": 128, "pack": True, "end": "<|endoftext|>"}
    return {
        "model": {
            "path": "model.onnx",
            "loss": {"kind": "cross_entropy", "output": "logits"},
            "lora": {"match": ["*.self_attn.?_proj.weight"]},
        },
        "data": {
            "train": {"path": "lines.jsonl", "text": text, "columns": {"input_ids": "tokens"}},
            "micro_batch": 16,
        },
        "train": {"steps": 100, "optimizer": {"name": "adamw", "lr": LR}},
    }


WALKS: dict[str, Callable[[Path, argparse.Namespace], dict[str, Any]]] = {
    "table": table, "images": images, "masked": masked, "language": language,
}  # fmt: skip


def run(folder: Path, values: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a run on this machine's cores."""
    run = {"name": "walk", **values, "resources": {"ranks_per_node": 1, "cpus_per_rank": os.cpu_count()}}
    (folder / "run.yaml").write_text(json.dumps(run))
    variables = {**os.environ, "ORTFLOW_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "ortflow", "run", "run.yaml"]
    done = subprocess.run(command, cwd=folder, env=variables, text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    file = folder / "runs" / "walk" / "events" / "rank-0000.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def main() -> None:
    """Run the walks, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(WALKS), default=list(WALKS))
    parser.add_argument("--rows", type=int, default=200_000)
    options = parser.parse_args()
    for name in options.only:
        with tempfile.TemporaryDirectory() as made:
            folder, load = Path(made), os.getloadavg()[0]
            values = WALKS[name](folder, options)
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            events = run(folder, values)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            (wait,) = (event for event in events if event["event"] == "data_wait")
            shown = f"{name:9} waits {wait['share']:.1%} of the steps' time for data ({wait['seconds']:.2f} s)"
            print(f"{shown}, {spent:.1f} processor seconds, load {load:.1f}", flush=True)


if __name__ == "__main__":
    main()
