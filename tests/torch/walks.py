"""The pages in docs/walks: their files, their commands, and PyTorch's own loop over the samples of a run."""

from __future__ import annotations

import json
import random
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from documentation import DOCS
from project import curve
from tiny_runs import Tiny
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from ortflow.workflow.data.augmented import augmented
from ortflow.workflow.data.batches import Batches
from ortflow.workflow.data.feed import Feed
from ortflow.workflow.data.order import SampleOrder
from ortflow.workflow.data.plan import Position
from ortflow.workflow.data.sources import open_evaluation, open_training
from ortflow.workflow.data.vocabulary import transforms_of
from ortflow.workflow.spec.file.load import load_run_text
from ortflow.workflow.spec.file.paths import resolve_paths
from ortflow.workflow.spec.mapping import ColumnReference

Arrays = Mapping[str, torch.Tensor]
LINES = 15
"""Of a walk's run file there are fewer."""
EPSILON = 1e-6
"""AdamW's, as in the pages: with 1e-8 two orders of summation in fp32 end more than 1e-5 apart."""


@dataclass(frozen=True)
class Page:
    """A page, its files, and what its commands print."""

    files: Mapping[str, str]
    commands: Mapping[str, list[str]]

    @classmethod
    def read(cls, name: str) -> Page:
        text = (DOCS / "walks" / f"{name}.md").read_text()
        files = dict(re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
        commands: dict[str, list[str]] = {}
        for block in re.findall(r"^```console\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            for line in block.splitlines():
                if line.startswith("$ "):
                    commands[line[2:]] = printed = []
                else:
                    printed.append(line)
        return cls(files, commands)

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the files; run the export, and return its variables."""
        for name, text in self.files.items():
            (folder / name).write_text(text)
            assert not name.endswith(".yaml") or len(text.splitlines()) <= LINES
        namespace: dict[str, Any] = {}
        exec(compile(self.files["export.py"], str(folder / "export.py"), "exec"), namespace)
        return namespace

    def run(self, folder: Path) -> None:
        """Run the commands as they are printed, with the record of every step; they print what the page says."""
        for command, printed in self.commands.items():
            program, *words = shlex.split(command)
            assert program == "ortflow"
            more = ["monitor.every_steps=1"] if words[0] == "run" else []
            done = Tiny(folder).command(*words, *more, timeout=200, ORTFLOW_CACHE=str(folder / "cache"))
            assert done.code == 0, done.said
            shown = [form(line) for line in done.said.splitlines()]
            missing = [line for line in printed if line != "…" and form(line) not in shown]
            assert not missing, (missing, done.said)


def form(line: str) -> str:
    """A printed line without its numbers and folders: those of an epoch's loss differ between processors."""
    return re.sub(r"[\d.,:+-]+(e-?\d+)?", "#", re.sub(r"\S*/", "", line)).strip()


def losses_of(folder: Path, name: str) -> list[float]:
    """The loss of each step."""
    return [loss for _, loss, _, _ in curve(folder / "runs" / name)]


def samples_of(folder: Path, name: str, inputs: Mapping[str, str]) -> tuple[Iterator[Arrays], list[Arrays], int]:
    """The batches of a run in its order, without end; its evaluation set in batches; and its number of steps."""
    file = folder / f"{name}.yaml"
    spec = resolve_paths(load_run_text(file.read_text(), file.name), file, folder)
    assert spec.data is not None
    data, size = spec.data, spec.data.micro_batch
    feeds = [Feed(to, np.dtype("int64"), ColumnReference(column), _pad(to)) for to, column in inputs.items()]
    train = augmented(open_training(data, spec.seed), transforms_of(data.train, "data.train"), spec.seed, "data.train")
    kind = {"micro_batch": size, "accumulation": 1, "rank": 0, "world_size": 1, "last_batch": data.last_batch}
    batches = Batches(train, SampleOrder(len(train), spec.seed), feeds, **kind)
    held_out = open_evaluation(data, spec.seed)
    evaluation = []
    if held_out is not None:
        every = Batches(held_out, SampleOrder(len(held_out), 0, shuffle=False), feeds, **{**kind, "last_batch": "keep"})
        with every.read_from(Position()) as reader:
            evaluation = [_tensors(next(reader)) for _ in range(every.plan.steps_per_epoch)]
    assert spec.train.epochs is not None

    def steps() -> Iterator[Arrays]:
        with batches.read_from(Position()) as reader:
            yield from map(_tensors, reader)

    return steps(), evaluation, spec.train.epochs * batches.plan.steps_per_epoch


def _tensors(step: Any) -> Arrays:
    (batch,) = step.micro_batches
    return {name: torch.from_numpy(np.array(array)) for name, array in batch.arrays.items()}


def _pad(name: str) -> int:
    return -100 if name == "labels" else 0


def train(
    module: torch.nn.Module,
    batches: Iterator[Arrays],
    steps: int,
    lr: float,
    loss: Callable[[Any, torch.Tensor], Any],
) -> list[float]:
    """PyTorch's loop: the loss before each step."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, eps=EPSILON, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        batch = dict(next(batches))
        labels = batch.pop("labels")
        value = loss(module(**batch).logits, labels)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Over the last axis."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_reviews(folder: Path) -> None:
    """400 reviews and 80 without a class; a WordPiece tokenizer of 120 tokens."""
    chance = random.Random(0)
    words = {
        "good": ["fresh", "sweet", "warm", "bright", "friendly", "quick"],
        "bad": ["stale", "bitter", "cold", "dark", "rude", "slow"],
    }
    nouns = ["bread", "soup", "coffee", "room", "service", "table", "garden", "cake", "tea", "music"]
    rows = []
    for _ in range(480):
        stars = chance.choice(["good", "bad"])
        parts = [
            f"the {chance.choice(nouns)} {chance.choice(['was', 'seemed'])} {chance.choice(words[stars])}"
            for _ in range(chance.randint(2, 6))
        ]
        rows.append({"text": " ".join(parts), "stars": stars})
    write_rows(folder / "reviews.jsonl", rows[:400])
    write_rows(folder / "new.jsonl", [{"text": row["text"]} for row in rows[400:]])
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([row["text"] for row in rows], trainer)
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    tokenizer.save(str(folder / "tokenizer.json"))


def write_stories(folder: Path) -> None:
    """300 stories of one to five sentences; a byte-level tokenizer of 299 tokens."""
    chance = random.Random(1)

    def sentence() -> str:
        first, second = (chance.choice(["a", "the"]) for _ in range(2))
        animal, place = chance.choice(["cat", "dog", "owl", "fox"]), chance.choice(["tree", "river", "house"])
        return f"{first} {animal} {chance.choice(['sees', 'hears', 'likes'])} {second} {place} ."

    rows = [{"text": " ".join(sentence() for _ in range(chance.randint(1, 5)))} for _ in range(300)]
    write_rows(folder / "stories.jsonl", rows)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([row["text"] for row in rows], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
