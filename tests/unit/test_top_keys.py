"""`ortflow top` in a terminal of 80 columns: keys, and a terminal whose keyboard it may not read."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from project import environment
from recorded_runs import write_run
from terminal import Terminal
from waits import PATIENCE

from ortflow.cli import top_keys
from ortflow.cli.top_keys import Keys, decoded

TOP = [sys.executable, "-m", "ortflow", "top"]


def rows(terminal: Terminal) -> list[str]:
    return [line.split()[0] for line in terminal.screen.lines if line.startswith(("alpha", "beta", "gamma"))]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for place, name in enumerate(("alpha", "beta", "gamma")):
        run = write_run(tmp_path / "runs" / name, steps=20, ranks=1, kills=0, begin=1000.0 * place)
        log = run.log(0, 0)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"a line of {name}\n")
    return tmp_path


def test_keys_select_sort_show_a_log_and_write_a_report(runs: Path) -> None:
    # The installed command: `python -m ortflow` searches the current folder itself.
    terminal = Terminal([str(Path(sys.executable).with_name("ortflow")), "top", "runs"], runs, environment(), width=80)
    terminal.until(lambda: "q quit" in str(terminal.screen))
    assert rows(terminal) == ["gamma", "beta", "alpha"]  # the newest first
    assert max(map(len, str(terminal.screen).splitlines())) <= 80

    terminal.press(b"s")
    terminal.until(lambda: "by name" in str(terminal.screen))
    assert rows(terminal) == ["alpha", "beta", "gamma"]

    terminal.press(b"\x1b[A")  # the selected run is still gamma, now the last
    terminal.press(b"l")
    terminal.until(lambda: "a line of beta" in str(terminal.screen))
    terminal.press(b"\x1b")
    terminal.until(lambda: "LOSS" in str(terminal.screen))

    for name in ("copy", "queue", "ortflow"):
        (runs / f"{name}.py").write_text("raise SystemExit('a module of a stranger')\n")
    terminal.press(b"\x1bOBr")
    terminal.until(lambda: "wrote gamma.html" in str(terminal.screen))
    assert "<html" in (runs / "gamma.html").read_text()
    terminal.press(b"q")
    assert terminal.wait() == 0


def test_a_terminal_without_keys_shows_the_table_until_ctrl_c(runs: Path) -> None:
    command = ["sh", "-c", f"exec {' '.join(TOP)} runs </dev/null"]
    terminal = Terminal(command, runs, environment(), width=80)
    terminal.until(lambda: "Ctrl-C ends" in str(terminal.screen))
    assert rows(terminal) == ["gamma", "beta", "alpha"]
    assert "q quit" not in str(terminal.screen)
    os.kill(terminal.pid, signal.SIGINT)
    assert terminal.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_terminal_is_as_before_after_a_signal(runs: Path, number: int) -> None:
    script = f"stty -a >before; sh -c 'echo $$ >pid; exec {' '.join(TOP)} runs'; stty -a >after"
    terminal = Terminal(["sh", "-ic", script], runs, environment(), width=80)
    terminal.until(lambda: "q quit" in str(terminal.screen))
    if number == signal.SIGINT:
        terminal.press(b"\x03")
    else:
        os.kill(int((runs / "pid").read_text()), number)
    terminal.wait()
    assert (runs / "before").read_text() == (runs / "after").read_text()


def test_styles_of_the_demo_reach_the_terminal(tmp_path: Path) -> None:
    """Escaped, they would be text on it; control characters of a name are escaped."""
    program = (
        "from ortflow.cli.demo import _say\nfrom ortflow.workflow.system.streams import guarded\n"
        "with guarded():\n    _say('a folder\\x07')\n    print('end')"
    )
    terminal = Terminal([sys.executable, "-c", program], tmp_path, environment(), width=80)
    assert terminal.wait() == 0
    assert str(terminal.screen).split("\n")[-2:] == [r"a folder\x07", "end"]


def test_keys_are_decoded() -> None:
    assert decoded(b"jk\x1b[A\x1bOB\rq") == ["j", "k", "up", "down", "enter", "q"]
    assert decoded(b"\x1bq") == ["escape", "q"]
    assert decoded(b"\x1b[15~\x1b[1;5Cs\xc3\xa4") == ["s"]  # F5, Ctrl with an arrow, and a letter of two bytes


def test_an_arrow_may_arrive_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As over ssh. An escape that nothing follows is the key Esc; a closed terminal is an end."""
    reads, writes = os.pipe()
    keys = Keys(reads)
    os.write(writes, b"\x1b")
    child = os.fork()
    if child == 0:
        time.sleep(0.02)
        os.write(writes, b"[A")
        os._exit(0)
    with monkeypatch.context() as patched:
        patched.setattr(top_keys, "_REST_SECONDS", PATIENCE)
        assert keys.wait(PATIENCE) == ["up"]
    os.waitpid(child, 0)
    os.write(writes, b"s\x1b")
    assert keys.wait(PATIENCE) == ["s", "escape"]
    assert keys.wait(0.01) == []
    os.close(writes)
    with pytest.raises(EOFError):
        keys.wait(PATIENCE)
    os.close(reads)
