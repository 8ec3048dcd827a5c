"""Text by a tokenizer.json: windows, documents and packed documents, tokenised once."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from ortflow.workflow.data import tokenised
from ortflow.workflow.data.digest import digest_of
from ortflow.workflow.data.documents import pieces
from ortflow.workflow.data.sources import open_samples
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.data import DataSet
from ortflow.workflow.spec.media import TextSection

WORDS = {word: number for number, word in enumerate(["<pad>", "<end>", *"abcdefghij"])}
LINES = ["a b c", "", "d e", "f g h i j a b", "c"]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORTFLOW_CACHE", str(tmp_path / "cache"))
    tokenizer = Tokenizer(models.WordLevel(WORDS, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.enable_truncation(2)  # would cut documents without a word
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("\n".join(LINES))
    return tmp_path


def opened(files: Path, name: str = "text.txt", **options: Any) -> Any:
    text = TextSection(tokenizer=str(files / "tokenizer.json"), **options)
    return open_samples(DataSet(path=str(files / name), text=text))


def ids(line: str) -> list[int]:
    return [WORDS[word] for word in line.split()]


def test_each_line_is_a_document(files: Path) -> None:
    samples = opened(files)
    assert samples.lengths("tokens").tolist() == [3, 2, 7, 1]
    assert [one.tolist() for one in samples.read_ragged("tokens", np.array([2, 0]))] == [ids(LINES[3]), ids(LINES[0])]
    whole = opened(files, documents="files", end="<end>")
    assert whole.read_ragged("tokens", np.array([0]))[0].tolist() == [*ids(" ".join(LINES)), 1]


def test_windows_run_over_the_ends_of_documents(files: Path) -> None:
    samples = opened(files, length=4, end="<end>")
    tokens = [token for line in LINES if line for token in (*ids(line), 1)]
    assert samples.read("tokens", np.arange(len(samples))).tolist() == [
        tokens[first : first + 5] for first in range(0, len(tokens) - 4, 4)
    ]


def test_packed_documents_have_masks_positions_and_labels(files: Path) -> None:
    samples = opened(files, length=6, pack=True)
    order = np.arange(len(samples))
    columns = {name: samples.read(name, order).tolist() for name in samples.columns}
    assert columns["tokens"] == [[*ids("a b c d e"), 0], ids("f g h i j a"), [*ids("b c"), 0, 0, 0, 0]]
    assert columns["labels"] == [
        [*ids("b c"), -100, *ids("e"), -100, -100],
        ids("g h i j a b"),
        [-100] * 6,
    ]
    assert columns["position_ids"] == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 0]]
    assert columns["document_ids"] == [[1, 1, 1, 2, 2, 0], [1] * 6, [1, 2, 0, 0, 0, 0]]
    assert columns["attention_mask"] == [[1] * 5 + [0], [1] * 6, [1, 1, 0, 0, 0, 0]]
    for name, column in samples.columns.items():
        assert column.minimum <= np.min(columns[name])
        assert np.max(columns[name]) <= column.maximum
    np.testing.assert_array_equal(next(samples.scan("labels"))[1], columns["labels"])


@pytest.mark.parametrize("length", [1, 3, 8, 50])
def test_packing_loses_and_repeats_no_token(length: int) -> None:
    ends = np.cumsum(np.random.default_rng(length).integers(1, 20, 40))
    parts, starts = pieces(ends, length)
    assert [token for _, first, count, _ in parts.tolist() for token in range(first, first + count)] == list(
        range(ends[-1])
    )
    for first, last in itertools.pairwise(starts):
        window = parts[first:last]
        assert len(window)
        assert window[:, 2].sum() <= length
        np.testing.assert_array_equal(window[:, 0], np.concatenate([[0], np.cumsum(window[:, 2])[:-1]]))


def test_text_is_tokenised_once(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = digest_of(opened(files))
    monkeypatch.setattr(tokenised, "_tokenise", None)
    assert digest_of(opened(files)) == expected
    monkeypatch.undo()
    monkeypatch.setenv("ORTFLOW_CACHE", str(files / "cache"))
    (files / "text.txt").write_text("a a\n")
    assert digest_of(opened(files)) != expected
    assert not list((files / "cache" / "tokens").glob(".*"))


def test_what_cannot_be_tokenised_is_named(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, message in (
        ({"length": 100}, r"text\.txt: has 13 tokens, fewer than a window of 101; lower length"),
        ({"end": "<stop>"}, r"tokenizer\.json: has no token '<stop>'; correct text\.end"),
        ({"pack": True}, r"text\.pack: packs windows, whose length is not given; set text\.length"),
    ):
        with pytest.raises(UserError, match=message):
            opened(files, **options)
    (files / "bad.txt").write_bytes(b"a b\n\xff\n")
    with pytest.raises(UserError, match=r"bad\.txt:2: is not UTF-8"):
        opened(files, "bad.txt")
    (files / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json: is not a tokenizer\.json"):
        opened(files)
    with pytest.raises(UserError, match=r"text\.txt: is text, and how it becomes tokens is not given; add text:"):
        open_samples(DataSet(path=str(files / "text.txt")))
    (files / "file").write_text("")
    monkeypatch.setenv("ORTFLOW_CACHE", str(files / "file"))
    (files / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json: No such file or directory; correct text\.tokenizer"):
        opened(files)
