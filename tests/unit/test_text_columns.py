"""A column of text in a table becomes tokens: beside the other columns, or in windows over all rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from ortflow.workflow.data.augmented import augmented
from ortflow.workflow.data.digest import digest_of
from ortflow.workflow.data.sources import open_evaluation, open_other, open_samples, open_training
from ortflow.workflow.data.vocabulary import transforms_of
from ortflow.workflow.errors import UserError
from ortflow.workflow.planning.first_run import Array
from ortflow.workflow.planning.guessed_set import guess_for
from ortflow.workflow.spec.data import DataSection, DataSet
from ortflow.workflow.spec.file.paths import resolve_paths
from ortflow.workflow.spec.run import TrainerRunSpec

WORDS = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<mask>", *"abcdefghij"])}
ROWS = [("a b c", "cat"), ("d", "dog"), ("e f g h i j", "cat"), ("a", "dog"), ("b c", "cat"), ("d e", "dog")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORTFLOW_CACHE", str(tmp_path / "cache"))
    tokenizer = Tokenizer(models.WordLevel(WORDS, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>", "<mask>"])
    ends = [("<s>", 1), ("</s>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "rows.jsonl", [{"text": text, "kind": kind} for text, kind in ROWS])
    return tmp_path


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def section(folder: Path, name: str = "rows.jsonl", **text: Any) -> dict[str, Any]:
    return {"path": str(folder / name), "text": {"tokenizer": str(folder / "tokenizer.json"), **text}}


def opened(folder: Path, name: str = "rows.jsonl", **text: Any) -> Any:
    return open_samples(DataSet.model_validate(section(folder, name, **text)))


def ids(text: str) -> list[int]:
    return [1, *(WORDS[word] for word in text.split()), 2]


def test_each_row_has_its_tokens_beside_its_other_columns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = opened(folder)
    order = np.array([2, 1])
    assert [one.tolist() for one in samples.read_ragged("tokens", order)] == [ids(ROWS[2][0]), ids("d")]
    assert [one.tolist() for one in samples.read_ragged("attention_mask", order)] == [[1] * 8, [1] * 3]
    assert samples.read("kind", order).tolist() == [0, 1]
    assert samples.lengths("tokens").tolist() == [len(ids(text)) for text, _ in ROWS]
    assert not capsys.readouterr().err
    short = opened(folder, max_length=4)
    assert short.read_ragged("tokens", order)[0].tolist() == [1, *ids("e f")[1:]]
    assert "2 of 6 documents have more than 4 tokens and are cut" in capsys.readouterr().err
    assert len({digest_of(samples), digest_of(short), digest_of(opened(folder, end="</s>"))}) == 3
    write(folder / "named.jsonl", [{"review": "a"}, {"review": "b c"}])
    assert opened(folder, "named.jsonl", column="review").lengths("tokens").tolist() == [3, 4]


def test_windows_run_over_the_rows(folder: Path) -> None:
    (folder / "rows.txt").write_text("\n".join(text for text, _ in ROWS))
    for text in ({"length": 8, "pack": True}, {"length": 5}):
        table, plain = opened(folder, **text), opened(folder, "rows.txt", **text)
        assert list(table.columns) == list(plain.columns)
        for name in plain.columns:
            order = np.arange(len(plain))
            np.testing.assert_array_equal(table.read(name, order), plain.read(name, order))


def test_held_out_and_other_rows_are_read_in_the_same_way(folder: Path) -> None:
    values = {"train": section(folder), "eval": {"fraction": 1 / 3, "stratify": "kind"}, "micro_batch": 1}
    data = DataSection.model_validate(values)
    train, held_out = open_training(data, 0), open_evaluation(data, 0)
    assert held_out is not None
    tokens = [one.tolist() for each in (train, held_out) for one in each.read_ragged("tokens", np.arange(len(each)))]
    assert sorted(tokens) == sorted(ids(text) for text, _ in ROWS)
    assert len(held_out) == 2
    write(folder / "new.jsonl", [{"text": "j"}])
    other = open_other(DataSet(path=str(folder / "new.jsonl")), data, 0, "--data")
    assert other.read_ragged("tokens", np.array([0]))[0].tolist() == ids("j")


def test_rows_that_cannot_be_tokenised_are_named(folder: Path) -> None:
    write(folder / "empty.jsonl", [{"text": "a"}, {"text": None}])
    with pytest.raises(UserError, match=r"empty\.jsonl, line 2: has no value for 'text'"):
        opened(folder, "empty.jsonl")
    plain = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**plain, "post_processor": None}))
    write(folder / "blank.jsonl", [{"text": "a"}, {"text": "b"}, {"text": " "}])
    with pytest.raises(UserError, match=r"blank\.jsonl, line 3: has no token in 'text'; remove the row"):
        opened(folder, "blank.jsonl")


def test_wrong_sections_are_one_sentence(folder: Path) -> None:
    write(folder / "numbers.jsonl", [{"text": 1}, {"text": 2}])
    write(folder / "taken.jsonl", [{"text": "a", "tokens": 1}])
    (folder / "rows.txt").write_text("a\n")
    for name, text, message in (
        ("rows.jsonl", {"column": "review"}, r"text\.column: the table has no column 'review'; choose of: text, kind"),
        ("numbers.jsonl", {}, r"text\.column: column 'text' holds integer, not text; name another column, or read it"),
        ("rows.jsonl", {"documents": "files"}, r"text\.documents: .*rows\.jsonl is a table, whose rows are documents"),
        ("rows.jsonl", {"pack": True}, r"text\.pack: packs windows, whose length is not given; set text\.length"),
        ("rows.jsonl", {"max_length": 2}, r"text\.max_length: leaves no token of a document"),
        ("rows.txt", {"column": "a"}, r"text\.column: is 'a', but .*rows\.txt is not a table; remove it"),
        ("taken.jsonl", {}, r"taken\.jsonl: has a column 'tokens'; rename it"),
    ):
        with pytest.raises(UserError, match=message):
            opened(folder, name, **text)


def test_masking_takes_what_it_needs_from_the_tokenizer(folder: Path) -> None:
    made = DataSet.model_validate(
        {**section(folder), "transforms": [{"mask_tokens": {}}, {"mask_tokens": {"special": []}}]}
    )
    first, second = (each.mask_tokens for each in transforms_of(made, "data.train"))
    assert first is not None
    assert second is not None
    assert (first.mask_id, first.vocabulary, first.special) == (3, len(WORDS), [0, 1, 2, 3])
    assert (second.mask_id, second.special) == (3, [])
    samples = augmented(open_samples(made), transforms_of(made, "data.train")[:1], 0, "data.train")
    for epoch in range(20):
        labels = samples.at(epoch).read_ragged("labels", np.arange(6))
        assert all(one[0] == one[-1] == -100 for one in labels)
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text().replace("<mask>", "<hidden>"))
    with pytest.raises(UserError, match=r"transforms\[0\]\.mask_tokens\.mask_id: .* has none of the tokens \[MASK\]"):
        transforms_of(made, "data.train")


@pytest.mark.parametrize("largest", [(1 << 16) - 1, 70_000])
def test_ids_may_have_gaps(largest: int, folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "a": 5, "<mask>": largest}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    write(folder / "gaps.jsonl", [{"text": "a <mask>"}])
    samples = opened(folder, "gaps.jsonl")
    assert samples.read_ragged("tokens", np.array([0]))[0].tolist() == [5, largest]
    made = DataSet.model_validate({**section(folder, "gaps.jsonl"), "transforms": [{"mask_tokens": {}}]})
    mask = transforms_of(made, "data.train")[0].mask_tokens
    assert mask is not None
    assert (mask.mask_id, mask.vocabulary) == (largest, largest + 1)


def test_an_id_that_the_vocabulary_lacks_is_refused(folder: Path) -> None:
    definition = json.loads((folder / "tokenizer.json").read_text())
    definition["post_processor"]["special_tokens"]["</s>"]["ids"] = [70_000]
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(UserError, match=r"tokenizer\.json: gives the id 70000, .* largest is 13"):
        opened(folder)


def test_init_guesses_how_text_fills_a_model(folder: Path) -> None:
    tokens, mask = Array("input_ids", "int64", (None,)), Array("attention_mask", "int64", (None,))
    positions = Array("position_ids", "int64", (16,))
    words, classes = Array("logits", "float32", (None, 14)), Array("logits", "float32", (2,))
    text = {"tokenizer": str(folder / "tokenizer.json")}
    _, made = guess_for(folder / "rows.jsonl", [tokens, mask], [classes])
    assert made.columns == {"input_ids": "tokens"}
    assert made.loss == {"kind": "cross_entropy", "label": "kind"}
    assert (made.preparation, made.unused) == ({"text": text}, [])
    _, made = guess_for(folder / "rows.jsonl", [tokens, mask], [words])
    assert made.loss == {"kind": "cross_entropy"}
    assert made.preparation == {"text": text, "transforms": [{"mask_tokens": {}}]}
    assert made.unused == ["kind"]
    _, made = guess_for(folder / "rows.jsonl", [replace(tokens, shape=(16,)), positions], [words])
    assert made.columns == {"input_ids": "tokens"}
    assert made.loss == {"kind": "cross_entropy"}
    assert made.preparation == {"text": {**text, "length": 16, "pack": True}}
    plain = (folder / "tokenizer.json").read_text().replace("<mask>", "<hidden>")
    (folder / "tokenizer.json").write_text(plain)
    _, made = guess_for(folder / "rows.jsonl", [tokens], [words])
    assert made.columns == {"input_ids": "tokens[:-1]", "labels": "tokens[1:]"}


def test_files_of_every_set_are_relative_to_the_run_file(tmp_path: Path) -> None:
    values = {"path": "s", "text": {"tokenizer": "t.json"}, "transforms": [{"function": "f.py:g"}]}
    run = {
        "name": "x",
        "model": {"path": "m.onnx", "loss": {"kind": "mse"}},
        "train": {"steps": 1, "optimizer": {"name": "adamw", "lr": 1.0}},
        "data": {"micro_batch": 1, "train": values, "eval": values, "eval_sets": {"later": values}},
    }
    spec = resolve_paths(TrainerRunSpec.model_validate(run), tmp_path / "folder" / "run.yaml", tmp_path)
    assert spec.data is not None
    assert spec.data.eval is not None
    for each in (spec.data.train, spec.data.eval, spec.data.eval_sets["later"]):
        assert each.text is not None
        assert each.text.tokenizer == str(tmp_path / "folder" / "t.json")
        assert each.transforms[0].function == f"{tmp_path}/folder/f.py:g"
