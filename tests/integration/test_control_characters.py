"""Control characters in names are escaped wherever they are shown: standard output, logs, a panel."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from data_sets import write_batches
from project import logs
from terminal import Terminal
from tiny_runs import Tiny

from ortflow.workflow.system.streams import plain

TITLE = "\x1b]0;owned\x07"
EIGHT_BIT = "\x9b31m"


def test_what_is_written_out() -> None:
    assert plain(f"a{TITLE}b") == r"a\x1b]0;owned\x07b"
    assert plain(EIGHT_BIT) == r"\x9b31m"
    assert plain("tab\tand line\nstay, and Zoë") == "tab\tand line\nstay, and Zoë"
    assert plain("\u202eesrever") == r"\u202eesrever"
    assert plain("back\rspace\b\x7f") == r"back\rspace\x08\x7f"


def spoil(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    for node in model.graph.node:
        node.name += TITLE
        for names in (node.input, node.output):
            names[:] = [f"{name}{TITLE}" if name in ("w", "h", "n") else name for name in names]
    for tensor in model.graph.initializer:
        tensor.name += TITLE if tensor.name == "w" else ""
    model.producer_name = TITLE
    onnx.save(model, folder / "model.onnx")


@pytest.mark.parametrize("level", ["warning", "info"])
def test_no_control_character_of_a_model_or_of_data_passes(tmp_path: Path, level: str) -> None:
    tiny = Tiny.make(tmp_path / "p", monitor={"every_steps": 1, "runtime_log": level})
    spoil(tiny.folder)
    write_batches(tiny.folder / "odd.arrow", {f"x{TITLE}": np.zeros(3, np.float32)})
    for words in (
        ["inspect", "model.onnx", "--all"], ["data", "show", "odd.arrow"], ["validate", "run.yaml"],
        ["run", "run.yaml"], ["logs", "tiny"], ["status", "tiny"], ["data", "show", f"none{TITLE}"],
        ["status", f"none{TITLE}"], ["run", "run.yaml", f"data.train=odd{TITLE}", "--fresh"],
    ):  # fmt: skip
        done = tiny.command(*words)
        assert "\x1b" not in done.said, words
        assert "\x07" not in done.said, words
    assert r"\x1b]0;owned" in tiny.command("inspect", "model.onnx", "--all").out
    assert tiny.run_dir.exists()
    assert level != "warning" or "\x1b" not in logs(tiny.run_dir)


def test_a_terminal_sees_none_but_our_own(tmp_path: Path) -> None:
    tiny = Tiny.make(tmp_path / "p")
    spoil(tiny.folder)
    seen: list[bytes] = []
    terminal = Terminal([sys.executable, "-m", "ortflow", "run", "run.yaml"], tiny.folder, dict(os.environ))
    feed = terminal.screen.feed

    def keep(text: str) -> None:
        seen.append(text.encode())
        feed(text)

    terminal.screen.feed = keep  # type: ignore[method-assign]
    assert terminal.wait() == 0, str(terminal.screen)
    assert b"\x1b]0;" not in b"".join(seen)
