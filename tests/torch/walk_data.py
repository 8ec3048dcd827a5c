"""The samples of the pages in docs/walks."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image
from pyarrow import csv
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

PLANS = ["basic", "family", "plus", "team"]
OUTCOMES = ["leaves", "stays", "upgrades"]
STORY_TOKENS = 299
ANIMALS = ["bear", "cat", "dog", "fox", "owl", "wolf"]


def write_customers(folder: Path, rows: int = 200_000) -> None:
    """A CSV of an age that is missing at times, eight numbers, a plan and an outcome; 1,000 rows without outcome."""
    chance = np.random.default_rng(0)
    total = rows + 1000
    usage, plans = chance.normal(50, 20, (total, 8)).clip(0).round(3), chance.integers(0, len(PLANS), total)
    ages = chance.integers(18, 90, total)
    score = (usage - 50) / 20 @ chance.normal(size=(8, 3)) + np.eye(4, 3)[plans] * 2 + ages[:, None] / 30 * [0, 1, -1]
    outcomes = (score + chance.gumbel(size=score.shape)).argmax(1)
    columns = {"age": pa.array(ages, mask=chance.random(total) < 0.02)}
    columns |= {f"usage_{number}": pa.array(usage[:, number]) for number in range(8)}
    table = pa.table({**columns, "plan": np.array(PLANS)[plans], "outcome": np.array(OUTCOMES)[outcomes]})
    csv.write_csv(table[:rows], folder / "customers.csv")
    csv.write_csv(table[rows:].drop_columns("outcome"), folder / "new.csv")


def write_animals(folder: Path) -> None:
    """20 PNG files of each class, and 10 without: a colour is bright above, or below."""
    chance = np.random.default_rng(0)

    def write(path: Path, kind: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = chance.integers(0, 120, (40, 44, 3)).astype(np.uint8)
        pixels[kind // 3 * 20 :][:20, :, kind % 3] += 120
        Image.fromarray(pixels).save(path)

    for kind, name in enumerate(ANIMALS):
        for number in range(20):
            write(folder / "animals" / name / f"{number:02}.png", kind)
    for number in range(10):
        write(folder / "new" / f"{number:02}.png", number % len(ANIMALS))


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_reviews(folder: Path) -> None:
    """400 reviews and 80 without a class; a WordPiece tokenizer of letters and the words."""
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
    # Trainers of tokenizers break ties by chance: the pages' numbers would differ from run to run.
    whole = sorted({word for row in rows for word in row["text"].split()})
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    vocabulary = [*special, *letters, *(f"##{letter}" for letter in letters), *whole]
    model = models.WordPiece({token: number for number, token in enumerate(vocabulary)}, unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(special)
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
    vocabulary = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = []
    for word in sorted({word for row in rows for word in row["text"].split()}):
        for end in range(len(word)):
            left, right = f"Ġ{word[:end]}", word[end]
            if left + right not in vocabulary and len(vocabulary) < STORY_TOKENS:
                merges.append((left, right))
                vocabulary.append(left + right)
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(vocabulary)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
