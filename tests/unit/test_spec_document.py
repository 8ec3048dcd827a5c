"""Reading YAML: values, positions of keys, and what is refused."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
from messages import alike, mentions, says
from unprivileged import unprivileged

from ortflow.workflow.spec.file.document import DEPTH_LIMIT, SIZE_LIMIT, parse_document, read_document
from ortflow.workflow.spec.file.scalars import scalar


def problems(text: str) -> list[tuple[int | None, str]]:
    return [(problem.line, problem.what) for problem in parse_document(text, "f").problems]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 1e5),
        ("-.5", -0.5),
        ("2.", 2.0),
        ("007", 7),
        ("1_000", 1000),
        ("+3", 3),
        (".inf", math.inf),
        ("-.Inf", -math.inf),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("NULL", None),
    ],
)
def test_words_with_a_meaning(text: str, value: object) -> None:
    assert scalar(text) == value
    assert type(scalar(text)) is type(value)


def test_a_number_that_others_read_as_octal_is_refused() -> None:
    """Helm gives a pod uid 511 for 0777."""
    ((line, what),) = problems("a: 1\nb: {run_as_user: 0777}")
    assert line == 2
    assert mentions(what, "0777", "511")
    assert problems("a: [007, 0, -0, 0.5, 08, 0x1F, '0777', 0_7, 10]") == []


@pytest.mark.parametrize(
    "text",
    [
        "yes",
        "no",
        "on",
        "off",
        "12:30:00",
        "2024-01-01",
        "0x1F",
        "1_",
        "_1",
        "1e",
        ".",
        "e5",
        "1.2.3",
        "<<",
        "=",
        "9" * 5000,
    ],
)
def test_words_that_are_text(text: str) -> None:
    assert scalar(text) == text


def test_nan() -> None:
    value = scalar(".nan")
    assert isinstance(value, float)
    assert math.isnan(value)


def test_quotes_make_text() -> None:
    assert parse_document("a: \"1\"\nb: '1'\nc: 1\nd: |\n  1\n", "f").values == {"a": "1", "b": "1", "c": 1, "d": "1\n"}


def test_every_key_and_item_has_its_line() -> None:
    document = parse_document("a:\n  b: 1\n\n  c:\n  - 5\n  - {d: 6}\ne: {f: 1,\n  g: 2}\n", "f")
    assert document.lines == {
        ("a",): 1,
        ("a", "b"): 2,
        ("a", "c"): 4,
        ("a", "c", 0): 5,
        ("a", "c", 1): 6,
        ("a", "c", 1, "d"): 6,
        ("e",): 7,
        ("e", "f"): 7,
        ("e", "g"): 8,
    }


def test_keys_are_text_whatever_they_look_like() -> None:
    assert parse_document("{1: a, on: b, null: c, ~: d}", "f").values == {"1": "a", "on": "b", "null": "c", "~": "d"}


def test_a_key_that_stands_twice() -> None:
    document = parse_document("a: 1\nb:\n  c: 1\n  c: {d: 2}\na: 2\n", "f")
    assert [(problem.line, problem.path) for problem in document.problems] == [(4, ("b", "c")), (5, ("a",))]
    assert alike([problem.what for problem in document.problems], ["… twice … line 3", "… twice … line 1"])
    assert document.values == {"a": 1, "b": {"c": 1}}


def test_anchors_aliases_and_tags() -> None:
    found = problems("a: &x 1\nb: *x\nc: !!int 3\n!!str d: 1\n&y e: 1\n")
    assert [line for line, _ in found] == [1, 2, 3, 4, 5]
    assert all("which run files do not allow" in what for _, what in found)


def test_a_bomb_of_aliases_goes_nowhere() -> None:
    text = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))
    document = parse_document(text, "f")
    assert document.values["a59"] == [None, None]
    assert document.problems


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("a: b: c", 1, "quotes"),
        ("a:\n\t- b", 2, "tabs"),
        ("x: 1\na: *.bias", 2, "quotes"),
        ("a: @x", 1, "quotes"),
        ("a: 1\n b: 2", 2, "indentation"),
        ("a: 1\nb\nc: 2", 3, "`key: value`"),
        ("- a\nb: 1", 2, "indentation"),
    ],
)
def test_yaml_mistakes_give_the_fix(text: str, line: int, word: str) -> None:
    (problem,) = parse_document(text, "f").problems
    assert problem.line == line
    assert problem.what.startswith("is not valid YAML")
    assert problem.fix is not None
    assert word in problem.fix


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a: 1\n---\nb: 2", (2, "contains a second YAML document")),
        ("a: 1\n{b: c}: 2", (2, "has a key that is not plain text")),
        ("? [a]\n: 2", (1, "has a key that is not plain text")),
        ("a: 1\nb: \x01", (2, "contains the character U+0001")),
        ("[" * 1000, (1, f"is nested more than {DEPTH_LIMIT} levels deep")),
        ("a:\n  " + "{" * 1000, (2, f"is nested more than {DEPTH_LIMIT} levels deep")),
        ("- " * 1000, (1, f"is nested more than {DEPTH_LIMIT} levels deep")),
    ],
)
def test_what_is_refused(text: str, what: tuple[int, str]) -> None:
    assert what in problems(text)


@pytest.mark.parametrize("unit", ["[", "{", "- ", "? ", "a: [", "&a ", "x ", ":", '"', "#\n"])
def test_a_hostile_file_takes_little_time(unit: str) -> None:
    start = time.process_time()
    parse_document(unit * (SIZE_LIMIT // len(unit)), "f")
    assert time.process_time() - start < 5


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    def what(path: Path) -> tuple[int | None, str]:
        (problem,) = read_document(path).problems
        return problem.line, problem.what

    large, binary = tmp_path / "large.yaml", tmp_path / "binary.yaml"
    large.write_text("#" * (SIZE_LIMIT + 1))
    binary.write_bytes(b"a: 1\nb: \xff\n")
    assert what(tmp_path / "none.yaml") == (None, "there is no such file")
    assert what(tmp_path) == (None, "this is a folder")
    assert says(what(large)[1], "… larger than 256 KiB …")
    assert what(binary) == (2, "is not UTF-8 text")
    assert what(tmp_path / "a\0b")[1].startswith("cannot be read")
    assert what(large / "below")[1] == "cannot be read: Not a directory"


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.touch(mode=0)
    found = unprivileged(lambda: read_document(file).problems[0].what)
    assert found == "cannot be read: Permission denied"


def test_a_byte_order_mark_is_not_part_of_the_first_key(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(b"\xef\xbb\xbfname: x\n")
    assert read_document(file).values == {"name": "x"}
