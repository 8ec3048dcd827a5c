"""Any run file is either loaded or refused with messages; nothing else happens."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_files import FULL, reported

from ortflow.workflow.spec.file.keys import every_key

LINES = FULL.splitlines()
VALUES = [
    "", "3", "-1", "1.5", "x", "[1, 2]", "[[x]]", "{}", "{a: 1}", "{kind: mse}", "{name: sgd}", "null", "true", "*a",
    "&a 1", "!!int 3", "'", '"', "[", "{", "1e999", ".nan", "- 1", ": 1", "cross_entropy", "output",
    "[1, [2, {path: 3}]]",
    '"\\0"', '"\\ud800"', "9" * 30, "{path: {path: 1}}", "{kind: [1]}", "{kind: {a: 1}}", "{name: null}", "\t", "#",
]  # fmt: skip
KEYS = [".".join(path) for path, _ in every_key()]
quick = settings(max_examples=50, deadline=None, suppress_health_check=[*HealthCheck])


def all_are_sentences(factory: pytest.TempPathFactory, text: str, *overrides: str) -> None:
    for line in reported(factory.getbasetemp(), text, *overrides):
        assert line.isprintable()
        assert ": " in line
        assert "pydantic" not in line
        assert "Input should" not in line


@quick
@given(number=st.integers(0, len(LINES) - 1), value=st.sampled_from(VALUES), cut=st.booleans())
def test_a_line_changed(tmp_path_factory: pytest.TempPathFactory, number: int, value: str, cut: bool) -> None:
    key = LINES[number].partition(":")[0]
    changed = [*LINES[:number], f"{key}: {value}", *([] if cut else LINES[number + 1 :])]
    all_are_sentences(tmp_path_factory, "\n".join(changed) + "\n")


@quick
@given(key=st.sampled_from(KEYS), more=st.sampled_from(["", ".x", ".path", ".kind"]), value=st.sampled_from(VALUES))
def test_an_override(tmp_path_factory: pytest.TempPathFactory, key: str, more: str, value: str) -> None:
    all_are_sentences(tmp_path_factory, FULL, f"{key}{more}={value}")


@quick
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    all_are_sentences(tmp_path_factory, text)
    all_are_sentences(tmp_path_factory, FULL, text, f"name={text}")
