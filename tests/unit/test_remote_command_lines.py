"""Arguments for another machine's shell: it must not interpret anything in them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waits import PATIENCE

from ortflow.launchers.remote import command_lines

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
NASTY = st.text("$`'\"\\!*?~#&|;<>(){}[] \n\t\r=%^-a", max_size=12)


def shell(line: str) -> str:
    done = subprocess.run(
        ["sh", "-c", line], capture_output=True, check=True, timeout=PATIENCE, env={"HOME": "/h", "PATH": "/bin"}
    )
    return done.stdout.decode()


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXT | NASTY, min_size=1, max_size=4))
def test_words_arrive_as_they_are(given_words: list[str]) -> None:
    arrived = shell(command_lines.line(["printf", "%s\\0", *("x" + one for one in given_words)])).split("\0")[:-1]
    assert arrived == ["x" + one for one in given_words]


LEAVES = TEXT | NASTY | st.integers() | st.none()


@settings(max_examples=100)
@given(
    st.recursive(LEAVES, lambda one: st.lists(one, max_size=4) | st.dictionaries(TEXT, one, max_size=4), max_leaves=8)
)
def test_a_wish_has_no_letter_that_a_shell_reads(wish: object) -> None:
    packed = command_lines.pack(wish)
    assert set(packed) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=")
    assert command_lines.word(packed) == packed or "=" in packed


def test_the_start_has_no_letter_that_other_shells_read_inside_quotes() -> None:
    """csh reads `!` and line breaks there, fish backslashes."""
    line = command_lines.python_line("python3", "print('a')\nprint('!')\n", {"a": "!\n\\"})
    assert not set("!\n\\`") & set(line)


@pytest.mark.parametrize(
    ("python", "word"),
    [("python3", "python3"), ("~/a b/python", "\"$HOME\"/'a b/python'"), ("~", '"$HOME"'), ("$(x)", "'$(x)'")],
)
def test_the_home_folder_is_the_other_side_s(python: str, word: str) -> None:
    assert command_lines.word(python) == word


def test_a_python_runs_the_source_with_its_request() -> None:
    source = "import base64, json, sys\nprint(json.loads(base64.urlsafe_b64decode(sys.argv[2]))['say'])\n"
    output = "it's $HOME `x` \\ \" é"
    assert shell(command_lines.python_line(sys.executable, source, {"say": output})) == output + "\n"


def test_an_old_python_reports_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_lines, "START", command_lines.START.replace("(3, 10)", "(9, 9)"))
    line = command_lines.python_line(sys.executable, "print('ran')")
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"{command_lines.TOO_OLD} {sys.version_info[0]}.{sys.version_info[1]}\n"


def test_pack_is_json() -> None:
    import base64

    assert json.loads(base64.urlsafe_b64decode(command_lines.pack({"a": [1, "ü"]}))) == {"a": [1, "ü"]}
