"""Random damages to every file of a half-done run: it ends bit-identical, or in a sentence that names the file.

ORTFLOW_TRIALS=1000 pytest -m chaos tests/chaos/test_damages.py      # a thousand; 30 if nothing is said
    ... -n 16 -p no:cacheprovider                                    # side by side, with pytest-xdist
pytest -m chaos 'tests/chaos/test_damages.py::test_a_random_damage[17]'    # number 17 again
"""

from __future__ import annotations

import os
import random
import re
import shutil
from pathlib import Path

import pytest
from damages import Damage, draw
from project import of_kind
from tiny_runs import STEPS, Done, Tiny, has_traceback

pytestmark = pytest.mark.chaos
TRIALS = int(os.environ.get("ORTFLOW_TRIALS", "30"))
SECONDS = 60.0
FAULT = re.compile(r"error: (\S*/)?run\.yaml(:\d+)? [\w.]+: ")
LOOKS = (
    ["status", "tiny"], ["list"], ["logs", "tiny"], ["checkpoint", "list", "tiny"], ["checkpoint", "verify", "tiny"],
    ["status", "tiny", "--json"], ["export", "tiny", "--output", "other.onnx"],
)  # fmt: skip


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has done half of its steps, beside the folder it was made in: there trials put it back."""
    place = tmp_path_factory.mktemp("half")
    done = Tiny.make(place / "p").command("run", "run.yaml", f"train.steps={STEPS // 2}")
    assert done.code == 0, done.said
    return (place / "p").rename(place / "template")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = Tiny.make(tmp_path_factory.mktemp("whole"))
    assert tiny.command("run", "run.yaml").code == 0
    return tiny.run_dir


def has_no_guard(path: Path) -> bool:
    """Where another text may be as good as the old one, and nobody can know: what people write, and records."""
    return path.suffix in (".arrow", ".onnx", ".yaml", ".jsonl") and path.parent.name != "graphs"


@pytest.mark.rotates
@pytest.mark.parametrize("number", range(TRIALS))
def test_a_random_damage(half: Path, whole: Path, number: int) -> None:
    chance = random.Random(number)
    tiny = Tiny(half.with_name("p"))
    shutil.rmtree(tiny.folder, ignore_errors=True)
    shutil.copytree(half, tiny.folder)
    done = draw(tiny.folder, has_no_guard, chance)
    reported = "; ".join(map(str, done))
    look = tiny.command(*chance.choice(LOOKS), timeout=SECONDS)
    check_words(look, done, reported)
    way = chance.choice((["run", "run.yaml"], ["resume", "tiny", f"train.steps={STEPS}"]))
    end = tiny.command(*way, timeout=SECONDS)
    check_words(end, done, reported)
    for log in tiny.run_dir.glob("logs/*/rank-*.log"):
        assert not log.is_file() or log.is_symlink() or not has_traceback(beginning(log)), reported
    if end.code == 0 and "this run began with" not in end.said:
        # A run without a checkpoint begins again with the samples that are there now, and says so.
        exported = (tiny.run_dir / "export/model.onnx").read_bytes()
        assert exported == (whole / "export/model.onnx").read_bytes(), reported
        expected = {record["step"]: record["loss"] for record in of_kind(whole, "step")}
        found = {record["step"]: record["loss"] for record in of_kind(tiny.run_dir, "step")}
        assert all(expected[step] == loss for step, loss in found.items() if step > STEPS // 2), reported
        assert STEPS in found, reported


def beginning(log: Path) -> str:
    """All of a log that is whole: one that was made a file of 1 TB of holes does not fit into memory."""
    with log.open("rb") as file:
        return file.read(1 << 20).decode(errors="replace")


def check_words(end: Done, done: list[Damage], reported: str) -> None:
    assert not has_traceback(end.said), f"{reported}\n{end.said}"
    assert end.code in (0, 1, 2), f"{reported}\n{end.said}"
    if end.code:
        assert any(damage.path.name in end.said for damage in done), f"{reported}\n{end.said}"
        # A run file of which a part is gone has several faults, each in a sentence that names it.
        lines = end.err.splitlines()
        faults = [line for line in lines if FAULT.match(line) and "run.yaml" in {damage.path.name for damage in done}]
        assert len(lines) <= 1 or faults == lines, f"{reported}\n{end.err}"
