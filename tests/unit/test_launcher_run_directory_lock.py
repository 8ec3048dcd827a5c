"""Taking over a run directory: what is refused, what continues, and that nothing is left behind."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from messages import alike, mentions
from run_files import spec_of as run_of
from trees import tree

from ortflow.launchers.attempts.locks import HeldError, hold, holder_of, wait_free
from ortflow.launchers.base import Submission
from ortflow.launchers.changes import Change, agree, batch_messages, continued_run, differences, refuse
from ortflow.launchers.prepare import prepare
from ortflow.launchers.run_directory_lock import opened
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.events import EventLog
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.checks.check import check
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.file.paths import moved, resolve_paths
from ortflow.workflow.spec.run import TrainerRunSpec


def submission(folder: Path, fresh: bool = False, **train: Any) -> Submission:
    spec = TrainerRunSpec.model_validate(
        {
            "name": "gpt",
            "run_dir": str(folder / "runs" / "gpt"),
            "model": {"path": "m.onnx", "loss": {"kind": "mse"}},
            "data": {"train": {"path": "d.arrow"}, "micro_batch": 1},
            "train": {"steps": 10, "optimizer": {"name": "sgd", "lr": 0.1}, **train},
        }
    )
    return Submission(resolve_paths(spec, folder / "run.yaml"), RunDir(folder / "runs" / "gpt"), folder, fresh=fresh)


def take(wanted: Submission, outcome: str = "failure", step: int = 3) -> None:
    """A run that ran one attempt."""
    with opened(wanted) as ours:
        ours.run.record_attempt(event="start", attempt=0)
        EventLog(ours.run.events(0), 0, 0).write("step", step=step)
        ours.run.record_attempt(event="end", attempt=0, outcome=outcome, next="stop")


def test_a_new_directory_is_made_with_the_resolved_run_file(tmp_path: Path) -> None:
    wanted = submission(tmp_path)
    take(wanted)
    assert load_run_file(wanted.run.run_file) == wanted.spec
    assert holder_of(wanted.run.lock) is None


def test_nothing_is_left_where_nothing_was_started(tmp_path: Path) -> None:
    wanted = submission(tmp_path)
    with pytest.raises(ZeroDivisionError), opened(wanted):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs" / "other").mkdir(parents=True)
    with opened(wanted):
        pass
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["other"]
    wanted.run.root.mkdir()
    with opened(wanted) as ours:
        ours.run.record_attempt(event="start", attempt=0)
        ours.run.record_attempt(event="end", attempt=0, outcome="user_error", next="stop")
    assert list(wanted.run.root.iterdir()) == [], "a folder of the user's own stays"


def test_a_detached_run_stays(tmp_path: Path) -> None:
    wanted = submission(tmp_path)
    with opened(wanted) as ours:
        ours.handed_over = True
    assert wanted.run.run_file.exists()


def test_the_same_run_continues_and_may_become_longer(tmp_path: Path) -> None:
    take(submission(tmp_path))
    with opened(submission(tmp_path, steps=20)) as ours:
        assert ours.notes == ("train.steps: 10 before, 20 now",)
    assert load_run_file(ours.run.run_file).train.steps == 20


def test_a_finished_run_is_not_run_again_unless_it_became_longer(tmp_path: Path) -> None:
    take(submission(tmp_path), outcome="finished")
    with opened(submission(tmp_path)) as ours:
        assert ours.finished
    with opened(submission(tmp_path, steps=20)) as ours:
        assert not ours.finished


def test_another_run_is_refused_and_fresh_puts_the_old_one_aside(tmp_path: Path) -> None:
    take(submission(tmp_path))
    with pytest.raises(UserError) as refused, opened(submission(tmp_path, gradient_accumulation=2)):
        pass
    assert "accept the other batch with train.global_batch=2" in str(refused.value)
    other = submission(tmp_path)
    other = replace(other, spec=other.spec.model_copy(update={"seed": 1}))
    with pytest.raises(UserError) as refused, opened(other):
        pass
    assert mentions(
        str(refused.value), f"{tmp_path}/runs/gpt", "seed is 0", "1 here", "--fresh", "name=NAME", "run_dir"
    )
    take(submission(tmp_path, fresh=True, gradient_accumulation=2))
    take(submission(tmp_path, fresh=True, gradient_accumulation=3))
    runs = {path.name: load_run_file(path / "run.yaml") for path in (tmp_path / "runs").iterdir()}
    assert {name: spec.train.gradient_accumulation for name, spec in runs.items()} == {"gpt.1": 1, "gpt.2": 2, "gpt": 3}
    assert runs["gpt.1"].checkpoint.directory == str(tmp_path / "runs" / "gpt.1" / "checkpoints")


def test_fresh_puts_aside_nothing_where_there_is_no_run(tmp_path: Path) -> None:
    wanted = submission(tmp_path, fresh=True)
    take(wanted)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["gpt"]


def test_a_run_that_only_refused_its_input_makes_way(tmp_path: Path) -> None:
    wanted = submission(tmp_path)
    with opened(wanted) as ours:
        ours.handed_over = True
        ours.run.record_attempt(event="start", attempt=0)
        ours.run.record_attempt(event="end", attempt=0, outcome="user_error", next="stop")
    take(submission(tmp_path, gradient_accumulation=2))
    assert load_run_file(wanted.run.run_file).train.gradient_accumulation == 2


def test_a_run_file_that_a_killed_launcher_left_half_written_makes_way(tmp_path: Path) -> None:
    wanted = submission(tmp_path)
    wanted.run.root.mkdir(parents=True)
    wanted.run.lock.touch()
    (wanted.run.root / ".run.yaml.a1b2c3d4").write_text("name: g")
    take(wanted)
    assert load_run_file(wanted.run.run_file) == wanted.spec


def test_an_invalid_run_directory_is_refused(tmp_path: Path) -> None:
    wanted = submission(tmp_path)
    wanted.run.root.mkdir(parents=True)
    (wanted.run.root / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"run directory.*choose another run_dir"), opened(wanted):
        pass
    assert sorted(path.name for path in wanted.run.root.iterdir()) == ["thesis.tex"]


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(UserError, match=r"run_dir: .*/runs/gpt .*Not a directory"):  # noqa: SIM117
        with opened(submission(tmp_path)):
            pass


def test_the_lock_is_held_by_one_and_inherited(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = hold(path)
    assert holder_of(path) == {"pid": os.getpid(), "host": os.uname().nodename}
    with pytest.raises(HeldError):
        hold(path)
    inherited = os.dup(first)
    os.close(first)
    assert holder_of(path) is not None
    assert not wait_free(path, 0.05)
    os.close(inherited)
    assert holder_of(path) is None
    assert wait_free(path, 0.0)


def test_a_moved_directory_writes_where_it_is(tmp_path: Path) -> None:
    spec = submission(tmp_path).spec
    there = moved(spec, Path("/elsewhere/gpt"))
    assert (there.run_dir, there.checkpoint.directory) == ("/elsewhere/gpt", "/elsewhere/gpt/checkpoints")
    assert there.model.path == spec.model.path
    assert moved(spec, Path(str(spec.run_dir))) is spec


def test_differences_are_reported_by_key() -> None:
    before = {"a": {"b": 1, "c": [1]}, "d": None}
    now = {"a": {"b": 2, "c": [1]}, "d": {"e": 1}}
    assert differences(before, now) == [("a.b", 1, 2), ("d", None, {"e": 1})]


MAY = (
    "train.steps", "train.optimizer.lr", "train.optimizer.weight_decay", "train.schedule.name", "train.early_stop",
    "train.evaluation.every_steps", "train.clip_norm", "model.metrics", "data.eval", "data.eval.path",
    "data.eval_samples", "data.micro_batch", "checkpoint.keep.newest", "monitor.every_steps", "export.tolerance",
    "resources.ranks_per_node", "restart.failures", "parallel.zero",
    "parallel.pipeline", "parallel.horizontal", "parallel.cuts",
)  # fmt: skip
STAYS = (
    "model.path", "model.loss.kind", "model.loss", "model.parameters.freeze", "data.train.path", "data.last_batch",
    "data.shuffle", "data.by_length", "train.optimizer.name", "train.optimizer.no_decay", "train.optimizer.momentum",
    "checkpoint.directory", "seed",
)  # fmt: skip


def test_what_may_change_when_a_run_continues() -> None:
    refuse(Path("/r"), [Change(key, 1, 2) for key in MAY])
    for key in STAYS:
        with pytest.raises(UserError, match=f"{key} is 1 there and 2 here"):
            refuse(Path("/r"), [Change(key, 1, 2)])


def spec_of(ranks: int, micro_batch: int = 4, **train: Any) -> TrainerRunSpec:
    return run_of(
        data={"train": {"path": "d.arrow"}, "micro_batch": micro_batch},
        train={"steps": 10, "optimizer": {"name": "sgd", "lr": 0.1}, **train},
        resources={"ranks_per_node": ranks},
    )


def test_going_on_keeps_the_batch() -> None:
    """4 ranks of 4 samples take 16 a step; so do 2, 1 and 8 ranks after them, however they are divided."""
    begun = spec_of(4)
    for ranks, micro_batch, accumulation in ((4, 4, 1), (2, 4, 2), (1, 4, 4), (8, 2, 1), (1, 16, 1), (2, 1, 8)):
        now = continued_run(begun, spec_of(ranks, micro_batch), 16)
        assert (now.global_batch, now.accumulation) == (16, accumulation)
        assert check(now) == []
        again = continued_run(now, spec_of(ranks, micro_batch), 16)
        assert again == now, "the same run file a second time"
        assert continued_run(now, begun, 16).accumulation == 1, "and back"
    asked = spec_of(1, gradient_accumulation=4)
    halved = continued_run(asked, spec_of(2, gradient_accumulation=4), 16)
    assert (halved.global_batch, halved.accumulation) == (16, 2)
    assert continued_run(halved, spec_of(2, gradient_accumulation=2), 16).accumulation == 2
    assert alike(
        batch_messages(begun, continued_run(begun, spec_of(2), 16), 16),
        ["… keeps … 16 samples … 2 ranks x micro_batch 4 x gradient_accumulation 2"],
    )
    assert batch_messages(begun, begun, 16) == []


def test_another_batch_is_refused_unless_it_is_named() -> None:
    begun = spec_of(4)
    with pytest.raises(UserError) as refused:
        continued_run(begun, spec_of(3), 16)
    assert mentions(
        str(refused.value),
        "train.global_batch",
        "16 samples",
        "3 ranks x 4",
        "2 ranks or 4 ranks",
        "train.global_batch=12 or train.global_batch=24",
    )
    with pytest.raises(UserError, match=r"data\.micro_batch=2.*4 ranks"):
        continued_run(begun, spec_of(8), 16)
    with pytest.raises(UserError) as refused:
        continued_run(begun, spec_of(4, gradient_accumulation=2), 16)
    assert mentions(
        str(refused.value),
        "train.gradient_accumulation",
        "2",
        "32 samples",
        "16",
        "leave it at 1",
        "train.global_batch=32",
    )
    wider = continued_run(begun, spec_of(3, global_batch=24), 16)
    assert (wider.global_batch, wider.accumulation) == (24, 2)
    assert alike(
        batch_messages(begun, wider, 16),
        ["… 24 samples … 16 before … 3 ranks x micro_batch 4 x gradient_accumulation 2"],
    )
    assert continued_run(wider, spec_of(3), 24).global_batch == 24, "the next submission keeps it"
    with pytest.raises(UserError, match=r"train\.gradient_accumulation.*5.*train\.global_batch 32"):
        continued_run(begun, spec_of(4, gradient_accumulation=5, global_batch=32), 16)
    with pytest.raises(UserError, match="leave out one of them"):
        agree(spec_of(4, gradient_accumulation=5, global_batch=32))


def test_the_batch_of_a_run_is_that_of_its_plan(tmp_path: Path) -> None:
    """If the directory's run file was edited by hand, the original values are lost."""
    take(submission(tmp_path))
    run = submission(tmp_path).run
    run.plan.write_text('{"global_batch": 4}')
    with opened(submission(tmp_path)) as ours:
        assert ours.spec.accumulation == 4
        assert alike(ours.notes, ["… keeps … 4 samples … 1 rank x micro_batch 1 x gradient_accumulation 4"])
    (changed,) = [record for record in run.read_attempts() if record["event"] == "changed"]
    assert (changed["attempt"], changed["notes"]) == (1, list(ours.notes))
    with opened(submission(tmp_path)) as ours:
        assert (ours.spec.accumulation, ours.notes) == (4, ())


def test_prepare_runs_in_the_folder_of_the_run_file_only_if_something_is_missing(tmp_path: Path) -> None:
    wanted = submission(tmp_path)
    script = "touch m.onnx d.arrow; echo ran >> ran"
    spec = wanted.spec.model_copy(update={"prepare": ["sh", "-c", script]})
    prepare(spec, tmp_path, "/bin/sh")
    prepare(spec, tmp_path, "/bin/sh")
    assert (tmp_path / "ran").read_text() == "ran\n"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["sh", "-c", "exit 3"], r"prepare: `sh -c 'exit 3'`.*code 3"),
        (["true"], r"model.path: .*m.onnx"),
        (["no-such-command"], r"prepare: .*no-such-command.*No such file"),
        (["python", "-c", "exit 7"], r"ended with exit code 0|model.path"),
    ],
)
def test_prepare_that_fails_is_one_sentence(tmp_path: Path, command: list[str], words: str) -> None:
    spec = submission(tmp_path).spec.model_copy(update={"prepare": command})
    with pytest.raises(UserError, match=words):
        prepare(spec, tmp_path, "/bin/true")  # a leading python is the ranks' interpreter: here one that does nothing


def stranger(folder: Path, wanted: Submission) -> dict[str, str]:
    """A user's project in the place of the run directory: their run file, other files, a link."""
    wanted.run.root.mkdir(parents=True)
    for name in ("thesis.txt", "run.yaml", "events/notes.txt", "graphs/train.onnx"):
        (wanted.run.root / name).parent.mkdir(exist_ok=True)
        (wanted.run.root / name).write_text(f"run_dir: . # {name}")
    (folder / "outside").mkdir()
    (folder / "outside" / "a.onnx").write_text("precious")
    (wanted.run.root / "logs").symlink_to(folder / "outside")
    return tree(folder)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_that_is_not_a_run_is_left_alone(tmp_path: Path, fresh: bool) -> None:
    wanted = submission(tmp_path, fresh=fresh)
    before = stranger(tmp_path, wanted)
    for _ in range(2):
        with pytest.raises(UserError, match="neither empty nor a run directory"), opened(wanted):
            pass
        assert tree(tmp_path) == before


def test_of_a_run_that_refused_its_input_only_own_files_go(tmp_path: Path) -> None:
    wanted = submission(tmp_path)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "train.onnx").write_text("precious")
    with opened(wanted) as ours:
        ours.run.record_attempt(event="start", attempt=0)
        for name in ("thesis.txt", "graphs/model.txt", "graphs/train.onnx", "events/rank-0000.jsonl", ".owner"):
            (ours.run.root / name).parent.mkdir(exist_ok=True)
            (ours.run.root / name).write_text("")
        (ours.run.root / "logs").symlink_to(tmp_path / "outside")
        ours.run.record_attempt(event="end", attempt=0, outcome="user_error", next="stop")
    assert sorted(tree(wanted.run.root)) == ["graphs", "graphs/model.txt", "logs", "thesis.txt"]
    assert (tmp_path / "outside" / "train.onnx").read_text() == "precious"


def test_a_run_directory_may_be_a_link(tmp_path: Path) -> None:
    wanted = submission(tmp_path)
    (tmp_path / "disk").mkdir()
    wanted.run.root.parent.mkdir()
    wanted.run.root.symlink_to(tmp_path / "disk")
    with opened(wanted):
        pass
    assert list((tmp_path / "disk").iterdir()) == []
    take(wanted)
    take(submission(tmp_path, fresh=True))
    assert (tmp_path / "runs" / "gpt.1").is_symlink()
    assert RunDir(tmp_path / "disk").is_ours


@pytest.mark.parametrize("what", ["missing", "folder", "link"])
def test_a_run_without_its_run_file_is_named(tmp_path: Path, what: str) -> None:
    wanted = submission(tmp_path)
    run = wanted.run
    run.root.mkdir(parents=True)
    run.attempts.write_text('{"event": "start", "attempt": 0}\n')
    if what == "folder":
        run.run_file.mkdir()
    elif what == "link":
        run.run_file.symlink_to("nowhere")
    state = "is missing" if what == "missing" else "is not a file"
    before = tree(run.root)
    with pytest.raises(UserError, match=rf"run\.yaml {state}"), opened(wanted):
        pass
    assert tree(run.root) == before
