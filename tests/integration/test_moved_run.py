"""A run directory that was moved or copied is the same run at its new place."""

from __future__ import annotations

import shutil
from pathlib import Path

from project import curve
from tiny_runs import STEPS, Tiny, result


def test_every_verb_works_where_the_directory_lies(tmp_path: Path) -> None:
    tiny = Tiny.make(tmp_path / "p")
    assert tiny.command("run", "run.yaml", f"train.steps={STEPS // 2}").code == 0
    elsewhere = tmp_path / "elsewhere" / "renamed"
    elsewhere.parent.mkdir()
    tiny.run_dir.rename(elsewhere)
    before = {path: path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()}
    for words in (["status"], ["logs"], ["checkpoint", "list"], ["checkpoint", "verify"], ["checkpoint", "show"]):
        done = tiny.command(*words, str(elsewhere))
        assert done.code == 0, done.said
        assert words == ["logs"] or str(tiny.run_dir) not in done.out, words
    assert (
        f"{elsewhere}/checkpoints/step-{STEPS // 2:08d}: whole"
        in tiny.command("checkpoint", "verify", str(elsewhere)).out
    )
    assert {path: path.read_bytes() for path in before} == before, "reading changes nothing"
    exported = tiny.command("export", str(elsewhere))
    assert exported.code == 0, exported.said
    assert str(elsewhere / "export/model.onnx") in exported.out
    assert not tiny.run_dir.exists()
    resumed = tiny.command("resume", str(elsewhere), f"train.steps={STEPS}")
    assert resumed.code == 0, resumed.said
    assert not tiny.run_dir.exists()
    assert tiny.command("run", "run.yaml").code == 0
    assert result(elsewhere) == result(tiny.run_dir)


def test_a_copy_leaves_the_original_alone(tmp_path: Path) -> None:
    tiny = Tiny.make(tmp_path / "p")
    assert tiny.command("run", "run.yaml", f"train.steps={STEPS // 2}").code == 0
    copy = tiny.run_dir.with_name("copy")
    shutil.copytree(tiny.run_dir, copy)
    before = {path: path.read_bytes() for path in tiny.run_dir.rglob("*") if path.is_file()}
    for words in (["checkpoint", "verify", "copy"], ["export", "copy"], ["resume", "copy", f"train.steps={STEPS}"]):
        done = tiny.command(*words)
        assert done.code == 0, done.said
    assert {path: path.read_bytes() for path in tiny.run_dir.rglob("*") if path.is_file()} == before
    assert [step for step, *_ in curve(copy)] == list(range(1, STEPS + 1))


def test_changes_are_reported_in_the_background_too(tmp_path: Path) -> None:
    tiny = Tiny.make(tmp_path / "p", data={"train": "set.arrow", "micro_batch": 4})
    assert tiny.command("run", "run.yaml", f"train.steps={STEPS // 2}").code == 0
    changes = ["resources.ranks_per_node=2", "data.micro_batch=2", f"train.steps={STEPS}"]
    assert tiny.command("run", "run.yaml", "--detach", *changes).code == 0
    assert tiny.command("logs", "-f", "tiny").code == 0
    output = (tiny.run_dir / "logs/supervisor.log").read_text()
    assert "resources.ranks_per_node: 1 before, 2 now" in output
    assert "a step keeps its 4 samples: 2 ranks" in output
