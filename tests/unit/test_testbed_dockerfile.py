"""The testbed's Dockerfile parser: it supports the project's file, and refuses unknown instructions."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
TOOL: dict[str, Any] = runpy.run_path(str(ROOT / "tests/testbeds/kubernetes/dockerfile.py"))
read, expand, Unknown = TOOL["read"], TOOL["expand"], TOOL["Unknown"]


def test_the_projects_own() -> None:
    recipe = read((ROOT / "Dockerfile").read_text())
    assert " ".join(stage.name for stage in recipe.stages) == "cpu cuda base requirements kernels wheel image"
    assert {argument.value.split("=")[0] for argument in recipe.arguments} == {"CPU_BASE", "VARIANT"}
    words = {one.word: one.value for one in recipe.stages[-1].instructions}
    assert words["USER"] == "1000:1000"


def test_lines_that_continue() -> None:
    recipe = read('FROM a AS b\nRUN one \\\n  # said in between\n    two && \\\n  three\n# no\nCMD ["x"]\n')
    assert [one.value for one in recipe.stages[0].instructions] == ["one     two &&   three", '["x"]']
    assert [one.line for one in recipe.stages[0].instructions] == [2, 7]


def test_flags() -> None:
    (copy,) = read("FROM a\nCOPY --from=b /x /y\n").stages[0].instructions
    assert (copy.flags, copy.value) == ({"from": "b"}, "/x /y")


@pytest.mark.parametrize("text", ["FROM a\nADD x /y", "RUN true\nFROM a", "FROM a b c d", "FROM a\nONBUILD RUN x"])
def test_unknown(text: str) -> None:
    with pytest.raises(Unknown):
        read(text)


def test_expand() -> None:
    values = {"A": "1", "LONG_NAME": "x"}
    assert expand("${A}-$A-$LONG_NAME-${NONE:-d}-$NONE.", values) == "1-1-x-d-."
