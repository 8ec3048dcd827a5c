"""Damaged or foreign files in a run directory are skipped, rebuilt, or refused in one sentence that names them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from messages import says
from project import curve, environment
from tiny_runs import STEPS, Done, Tiny, has_traceback, result
from waits import PATIENCE

from ortflow.workflow.data.dataset import Dataset

pytestmark = pytest.mark.rotates

STRANGE = ("fifo", "socket", "device", "folder", "endless link", "holes")
QUICK, SMALL = 10.0, 100 << 20
"""Seconds and bytes that a refusal may take on top of the same command on a file that is missing."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    tiny = Tiny.make(tmp_path_factory.mktemp("whole"))
    assert tiny.command("run", "run.yaml").code == 0
    return tiny


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of half the length, which equals a run that was stopped there."""
    tiny = Tiny.make(tmp_path_factory.mktemp("half"))
    done = tiny.command("run", "run.yaml", f"train.steps={STEPS // 2}")
    assert done.code == 0, done.said
    return tiny.run_dir


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    return Tiny.make(tmp_path / "p")


def put(path: Path, what: str) -> None:
    """Put a special file, or one with invalid contents, at a path."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if what == "fifo":
        os.mkfifo(path)
    elif what == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            os.chdir(path.parent)  # a socket's path is short
            server.bind(path.name)
    elif what == "device":
        path.symlink_to("/dev/zero")
    elif what == "folder":
        path.mkdir()
    elif what == "endless link":
        path.symlink_to(path.name)
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)


def spoil(path: Path, kind: str) -> None:
    lines = path.read_text().splitlines()
    record = json.loads(lines[1])
    changed: dict[str, object] = {
        "key": {"evnt" if key == "event" else key: value for key, value in record.items()},
        "null": {**record, "event": None, "attempt": None},
        "type": {**record, "attempt": "one", "time": [1], "outcome": "odd", "step": -1.5},
        "huge": {**record, "time": 1e300, "attempt": 10**40},
        "list": [record],
    }
    # Of phases, a status reads the newest alone.
    text = {"nan": lines[2].replace('"time":', '"time":NaN,"was":'), "deep": "[" * 100_000, "zeros": "\0" * 500}
    lines[2 if kind == "nan" else 1] = text[kind] if kind in text else json.dumps(changed[kind])
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("attempts.jsonl", kind) for kind in ("key", "type", "deep", "zeros")]
    + [("events/rank-0000.jsonl", kind) for kind in ("null", "huge", "list", "nan")],
)
def test_an_invalid_line_is_set_aside_and_reported_once(
    tiny: Tiny, half: Path, whole: Tiny, name: str, kind: str
) -> None:
    tiny.half(half)
    spoil(tiny.run_dir / name, kind)
    for verb in (["status", "tiny"], ["list"], ["status", "tiny", "--json"]):
        done = tiny.command(*verb)
        assert done.code == 0, done.said
        assert not has_traceback(done.said)
    assert f"{Path(name).name}: " in done.out
    assert "skipped" in done.out
    resumed = tiny.command("resume", "tiny", f"train.steps={STEPS}")
    assert resumed.code == 0, resumed.said
    assert resumed.said.count(".damaged") == 1, resumed.said
    assert (tiny.run_dir / f"{name}.damaged").read_bytes()
    assert "damaged" not in tiny.command("status", "tiny").out
    assert len(curve(tiny.run_dir)) == STEPS or "step" in (tiny.run_dir / f"{name}.damaged").read_text(errors="replace")


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("plan.json", "truncated"), ("plan.json", "list"), ("graphs/train.onnx", "zeroed"),
        ("graphs/graphs.json", "missing"), ("graphs/initial.safetensors", "truncated"),
    ],
)  # fmt: skip
def test_plan_and_graphs_are_made_again(tiny: Tiny, half: Path, name: str, how: str) -> None:
    tiny.half(half)
    path = tiny.run_dir / name
    if how == "missing":
        path.unlink()
    else:
        size = path.stat().st_size
        path.write_bytes({"truncated": path.read_bytes()[: size // 2], "zeroed": bytes(size), "list": b"[]"}[how])
    for verb in (["status", "tiny"], ["list"], ["export", "tiny", "--output", "x.onnx"]):
        done = tiny.command(*verb)
        assert done.code == 0, done.said
    assert "were rebuilt for this export" in done.err
    done = tiny.command("resume", "tiny", f"train.steps={STEPS}")
    assert done.code == 0, done.said
    assert [step for step, *_ in curve(tiny.run_dir)] == list(range(1, STEPS + 1))
    assert tiny.command("export", "tiny", "--output", "y.onnx").code == 0


def test_an_export_that_fails_after_a_rebuild_reports_one_error(tiny: Tiny, half: Path) -> None:
    tiny.half(half)
    os.truncate(tiny.run_dir / "graphs/initial.safetensors", 10)
    shutil.rmtree(tiny.run_dir / "checkpoints")
    done = tiny.command("export", "tiny", "--output", "x.onnx")
    assert (done.code, done.out) == (2, "")
    assert says(done.err, f"error: {tiny.run_dir}/checkpoints: no complete checkpoint …")


def measured(tiny: Tiny, *arguments: str) -> Done:
    """Run a command in a process of its own, so that its memory is measured separately."""
    program = (
        "import sys; sys.path[:0] = sys.argv[1].split(':'); from pathlib import Path; from tiny_runs import Tiny;"
        "import dataclasses, json; done = Tiny(Path(sys.argv[2])).command(*sys.argv[3:], timeout=120);"
        "print(json.dumps(dataclasses.asdict(done)))"
    )
    support = str(Path(__file__).parent.parent / "support")
    reported = subprocess.run(
        [sys.executable, "-c", program, support, str(tiny.folder), *arguments],
        env=environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return Done(**json.loads(reported.stdout))


FILES: dict[str, list[str]] = {
    "runs/tiny/run.yaml": ["status", "tiny"],
    "runs/tiny/attempts.jsonl": ["status", "tiny"],
    "runs/tiny/events/rank-0000.jsonl": ["status", "tiny"],
    "runs/tiny/plan.json": ["status", "tiny"],
    "runs/tiny/.launcher.lock": ["status", "tiny"],
    "runs/tiny/logs/attempt-00/rank-0000.log": ["logs", "tiny"],
    "runs/tiny/checkpoints/step-00000012/manifest.json": ["checkpoint", "verify", "tiny"],
    "runs/tiny/checkpoints/step-00000012/COMMITTED": ["checkpoint", "verify", "tiny"],
    "runs/tiny/checkpoints/step-00000012/rank-0000.safetensors": ["checkpoint", "verify", "tiny"],
    "set.arrow": ["data", "show", "set.arrow"],
    "model.onnx": ["inspect", "model.onnx"],
    "run.yaml": ["validate", "run.yaml"],
    "x.npz": ["data", "convert", "x.npz", "--output", "y"],
    "x.txt": ["data", "convert", "--lines", "x.txt", "--output", "y"],
}


PAIRS = [(name, what) for number, name in enumerate(FILES) for what in ("fifo", STRANGE[1 + number % 5])]
"""The rest of them is in tests/chaos/test_damages.py."""


@pytest.mark.parametrize(("name", "what"), PAIRS)
def test_special_files_are_refused_immediately(tiny: Tiny, whole: Tiny, name: str, what: str) -> None:
    tiny.half(whole.run_dir)
    path = tiny.folder / name
    path.unlink(missing_ok=True)
    missing = measured(tiny, *FILES[name])
    put(path, what)
    done = measured(tiny, *FILES[name])
    assert not has_traceback(done.said), done.said
    assert len(done.err.splitlines()) <= 2, done.err
    assert done.seconds < missing.seconds + QUICK, done.said
    assert done.peak < missing.peak + SMALL
    if name not in ("runs/tiny/plan.json", "runs/tiny/.launcher.lock"):
        assert path.name in done.said, done.said
    assert tiny.command("list").code == 0


PLACES = (
    "attempts.jsonl", "events/rank-0000.jsonl", "plan.json", ".launcher.lock", ".ranks.lock", ".heartbeat", ".stop",
    "logs/attempt-01/rank-0000.log", "logs/attempt-01/launcher.log", "graphs/train.onnx", "graphs", "logs",
    "events", "checkpoints", "checkpoints/step-00000006/rank-0000.safetensors", "export/model.onnx", "tensorboard",
)  # fmt: skip


@pytest.mark.parametrize(("name", "what"), [(name, STRANGE[number % 6]) for number, name in enumerate(PLACES)])
def test_a_run_continues_or_ends_with_one_sentence(tiny: Tiny, half: Path, name: str, what: str) -> None:
    tiny.half(half)
    path = tiny.run_dir / name
    path.parent.mkdir(exist_ok=True)
    put(path, what)
    done = tiny.command("resume", "tiny", f"train.steps={STEPS}", timeout=PATIENCE)
    assert not has_traceback(done.said), done.said
    if done.code:
        assert path.name in done.said, done.said
    else:
        assert [step for step, *_ in curve(tiny.run_dir)][-6:] == list(range(7, 13))


def test_result_is_that_of_the_whole_run(whole: Tiny, tiny: Tiny) -> None:
    assert tiny.command("run", "run.yaml").code == 0
    assert result(tiny.run_dir) == result(whole.run_dir)


@pytest.mark.parametrize("deep", ["[" * 50_000, '{"a":' * 50_000, "- " * 50_000])
def test_a_run_file_with_deep_nesting(half: Path, tiny: Tiny, deep: str) -> None:
    shutil.copytree(half, tiny.run_dir)
    (tiny.run_dir / "run.yaml").write_text(deep)
    for command in (["status", "tiny"], ["list"]):
        done = tiny.command(*command)
        assert done.code == 0, done.said
        assert "tiny" in done.out


def test_other_samples_are_refused_after_a_checkpoint(tiny: Tiny) -> None:
    """They would silently give another curve."""
    assert tiny.command("run", "run.yaml", f"train.steps={STEPS // 2}").code == 0
    data = tiny.folder / "set.arrow"
    content = data.read_bytes()
    place = content.index(np.float32(samples_of(data)[40, 2]).tobytes())
    data.write_bytes(content[:place] + np.float32(7).tobytes() + content[place + 4 :])
    done = tiny.command("run", "run.yaml")
    assert done.code == 2, done.said
    assert "data.train.path" in done.err
    assert "other samples" in done.err
    data.write_bytes(content)
    assert tiny.command("run", "run.yaml").code == 0


def samples_of(path: Path) -> np.ndarray:
    return Dataset.open(path).read("x", np.arange(64))
