"""Parts of long lists of cases: together they are the whole list, and a malformed part is refused."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import rotation
from rotation import left_out, piece, rotating

NAMES = [f"case-{number}" for number in range(23)]
ALWAYS = ("case-2", "case-19")
CONFTEST = "from rotation import rotate as pytest_collection_modifyitems"
pytest_plugins = ("pytester",)


def run(part: str) -> list[str]:
    return [parameter.id for parameter in rotating(NAMES, ALWAYS, part) if not parameter.marks]


def test_parts_together_run_each_case_once_and_some_always() -> None:
    parts = [run(f"{first}/7") for first in range(7)]
    assert all(set(ALWAYS) <= set(part) for part in parts)
    assert sorted(name for part in parts for name in part if name not in ALWAYS) == sorted({*NAMES} - {*ALWAYS})
    assert {len(part) for part in parts} == {5}


def test_without_a_part_only_some_run() -> None:
    assert run("") == list(ALWAYS)
    assert [parameter.id for parameter in rotating(NAMES, ALWAYS, "")] == NAMES


def test_pieces_of_a_walk_make_each_of_its_steps_once() -> None:
    walk = [0, 3, 1, 2, 0, 2, 3, 0]
    pieces = [piece(walk, f"{first}/3") for first in range(3)]
    assert [step for each in pieces for step in pairwise(each)] == list(pairwise(walk))
    assert piece(walk, "") == []


@pytest.mark.parametrize("part", ["7/7", "3", "a/b", "-1/7", "3/", "1/0"])
def test_a_wrong_part_is_refused(part: str) -> None:
    with pytest.raises(ValueError, match="ORTFLOW_PART"):
        run(part)


def test_a_case_that_always_runs_must_be_there() -> None:
    with pytest.raises(ValueError, match="pipelin-2"):
        rotating(NAMES, ("pipelin-2",), "")


def test_a_third_of_the_cases_runs_and_all_in_three_parts() -> None:
    groups = ["long"] * 8 + [None, "pair", "long", "pair", None, "alone"]
    kept = [set(range(len(groups))) - left_out(groups, f"{first}/3") for first in range(3)]
    assert {place for each in kept for place in each} == set(range(len(groups)))
    for each in kept:
        assert [groups[place] for place in sorted(each)].count("long") == 3
        assert {8, 12, 13} <= each, "what does not rotate, and a group of one"
        assert len(each & {9, 11}) == 1
    assert left_out(groups, "") == set()
    with pytest.raises(ValueError, match="ORTFLOW_CASES"):
        left_out(groups, "3/3")


def test_pytest_leaves_out_the_other_cases(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(rotation.__file__).parent))
    monkeypatch.setenv("ORTFLOW_CASES", "1/3")
    (pytester.path / "inner").mkdir()
    for folder in (pytester.path, pytester.path / "inner"):
        (folder / "conftest.py").write_text(CONFTEST)
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.rotates
        @pytest.mark.parametrize("number", range(7))
        def test_numbers(number): pass

        def test_always(): pass

        @pytest.mark.rotates("together")
        def test_one(): pass

        @pytest.mark.rotates("together")
        def test_other(): pass
        """
    )
    (pytester.path / "inner/test_inner.py").write_text("def test_inner(): pass")
    done = pytester.runpytest_subprocess("-v", "-p", "no:cacheprovider", "-W", "ignore")
    done.assert_outcomes(passed=5, deselected=6)
    done.stdout.fnmatch_lines(["*test_numbers?1?*", "*test_numbers?4?*", "*test_always*", "*test_other*"])


def test_of_what_runs_again_each_file_has_a_part(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what `ORTFLOW_CASES` has left: every test runs under one of the parts of both."""
    monkeypatch.setenv("PYTHONPATH", str(Path(rotation.__file__).parent))
    (pytester.path / "conftest.py").write_text(CONFTEST)
    numbers = "import pytest\n@pytest.mark.{}\n@pytest.mark.parametrize('number', range(7))\ndef test(number): pass\n"
    pytester.makepyfile(
        test_long=numbers.format("rotates"), test_plain=numbers.format("filterwarnings"), test_short="def test(): pass"
    )
    passed = set()
    for tree in range(6):
        monkeypatch.setenv("ORTFLOW_CASES", f"{tree % 2}/2")
        monkeypatch.setenv("ORTFLOW_AGAIN", f"{tree % 3}/3")
        done = pytester.runpytest_subprocess("-v", "-p", "no:cacheprovider", "-W", "ignore")
        tests = {line.split()[0] for line in done.outlines if " PASSED" in line}
        assert {test.partition("::")[0] for test in tests} == {"test_long.py", "test_plain.py", "test_short.py"}
        assert len(tests) <= 2 + 3 + 1
        passed |= tests
    assert len(passed) == 7 + 7 + 1


@pytest.mark.parametrize("file", ["unit/test_zero.py", "integration/test_layouts.py", "gridengine"])
def test_the_folders_of_tests_rotate(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTFLOW_CASES", "0/3")
    tests = Path(__file__).parent.parent
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", str(tests / file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tests.parent)
    assert " deselected" in done.stdout, done.stdout
