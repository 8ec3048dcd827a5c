"""The main job end to end: real ranks under the real mpirun, through the command line."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
from messages import mentions
from project import Project, command, curve, evaluations, events, leftovers, logs, of_kind

from ortflow.workflow.kernels.library import find_library

PHASES = ["configure", "runtime", "shard", "train", "checkpoint", "monitor", "export"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project.make(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def undisturbed(project: Project) -> Path:
    """An undisturbed run."""
    return project.run("undisturbed")


def exported(run_dir: Path) -> str:
    return hashlib.sha256((run_dir / "export" / "model.onnx").read_bytes()).hexdigest()


def test_all_seven_steps_run_in_order_on_every_rank(undisturbed: Path) -> None:
    for rank in (0, 1):
        record = events(undisturbed, rank)
        begun, ended = ([r["phase"] for r in record if r["event"] == f"phase_{end}"] for end in ("start", "end"))
        # The check of the gradient is timed apart from the step that it is in.
        assert begun == [*PHASES[:3], "check", *PHASES[2:]]
        assert ended == [*PHASES[:2], "check", *PHASES[2:]]
        assert all({"event", "time", "attempt", "rank"} <= r.keys() for r in record)
        assert record[-1]["event"] == "finished"
    assert [step for step, *_ in curve(undisturbed)] == list(range(1, 31))
    assert curve(undisturbed, 0) == curve(undisturbed, 1)
    assert curve(undisturbed)[-1][1] < curve(undisturbed)[0][1] - 1
    assert [r["step"] for r in of_kind(undisturbed, "checkpoint")] == [5, 10, 15, 20, 25, 30]
    assert [step for step, *_ in evaluations(undisturbed)] == [10, 20, 30]
    assert {(r["samples"], r["tokens"]) for r in of_kind(undisturbed, "step")} == {(8, 8 * 32)}
    assert leftovers(undisturbed) == []


def test_the_same_run_twice_is_bit_identical(project: Project, undisturbed: Path) -> None:
    again = project.run("again")
    assert curve(again) == curve(undisturbed)
    assert evaluations(again) == evaluations(undisturbed)
    assert exported(again) == exported(undisturbed)


def test_a_rank_with_two_threads_is_bit_identical_to_itself(project: Project) -> None:
    """In some kernels two threads add in varying order: the graph must not contain any of those."""
    alone = {"resources__ranks_per_node": 1, "resources__cpus_per_rank": 2, "train__steps": 12}
    assert curve(project.run("alone-a", **alone)) == curve(project.run("alone-b", **alone))


def test_two_ranks_follow_one_rank_with_twice_the_batch(project: Project) -> None:
    plain = Project.make(project.folder / "plain", dropout=0.0)
    two = curve(plain.run("two", train__steps=12))
    alone = {"resources__ranks_per_node": 1, "train__steps": 12}
    one = curve(plain.run("one", **alone, data__micro_batch=8))
    accumulated = curve(plain.run("accumulated", **alone, train__gradient_accumulation=2))
    assert len(two) == 12
    for other in (one, accumulated):
        for (step, loss, norm, _), (same_step, same_loss, same_norm, _) in zip(two, other, strict=True):
            assert step == same_step
            assert loss == pytest.approx(same_loss, rel=2e-5)
            assert norm == pytest.approx(same_norm, rel=2e-3)


def test_an_extended_run_continues_exactly(project: Project) -> None:
    """Stopped at step 6 and extended to 12 with other metrics, a run with a constant rate is that of 12 steps."""
    constant = {"train__schedule": {"name": "constant"}, "train__steps": 12}
    whole = project.run("whole", **constant)
    project.run("parts", **{**constant, "train__steps": 6})
    parts = project.run("parts", **constant, model__metrics=["accuracy", "perplexity"], monitor__every_steps=3)
    assert len(curve(whole)) == 12
    assert curve(parts) == curve(whole)
    assert exported(parts) == exported(whole)


@pytest.mark.rotates("numbers of ranks")
def test_another_number_of_ranks_follows_the_same_curve(project: Project) -> None:
    """4 ranks, then 2, then 1: every step takes the same 16 samples under the same dropout masks."""
    epochs = {"train__steps": None, "train__epochs": 1, "train__schedule": {"name": "constant"}}
    whole = project.run("elastic-whole", **epochs, train__global_batch=16, resources__ranks_per_node=1)
    for steps, ranks in ((6, 4), (11, 2), (15, 1)):
        project.run(
            "elastic", **{**epochs, "train__steps": steps, "train__epochs": None}, resources__ranks_per_node=ranks
        )
    file = project.write("elastic", **epochs, resources__ranks_per_node=3)
    refused = command("run", file.name, folder=project.folder)
    assert refused.returncode == 2
    assert mentions(refused.stderr, "train.global_batch", "16 samples", "3 ranks x 4")
    parts = project.run("elastic", **epochs, data__micro_batch=8)
    assert [(r["samples"], r["epoch"]) for r in of_kind(parts, "step")] == [
        (r["samples"], r["epoch"]) for r in of_kind(whole, "step")
    ]
    for (step, loss, norm, _), (same_step, same_loss, same_norm, _) in zip(
        curve(parts)[:15], curve(whole), strict=False
    ):
        assert step == same_step
        assert loss == pytest.approx(same_loss, rel=2e-5)
        assert norm == pytest.approx(same_norm, rel=2e-3)
    # Masks are drawn for a micro-batch, so another size draws others.
    assert curve(parts)[-1][1] == pytest.approx(curve(whole)[-1][1], rel=2e-2)
    assert [(r["world_size"], r["gradient_accumulation"]) for r in of_kind(parts, "resume")] == [(2, 2), (1, 4), (2, 1)]
    changed = [(r["key"], r["before"], r["now"]) for r in of_kind(parts, "changed") if "train.global" in r["key"]]
    assert changed == [("train.global_batch", None, 16)]
    assert "a step takes 16 samples: 1 rank(s) x micro_batch 4 x gradient_accumulation 4" in logs(parts)


@pytest.mark.rotates("numbers of ranks")
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3)])
def test_a_run_continues_with_another_number_of_ranks_and_another_batch(
    project: Project, before: int, after: int
) -> None:
    name = f"ranks-{before}-{after}"
    common = {"train__epochs": 2, "train__steps": None, "data__last_batch": "keep", "data__micro_batch": 8}
    count = sum(r["samples"] for r in of_kind(project.run(f"{name}-whole", **common), "step"))
    first = project.run(name, **{**common, "train__epochs": None, "train__steps": 7}, resources__ranks_per_node=before)
    second = project.run(name, **common, train__global_batch=8 * after, resources__ranks_per_node=after)
    assert first == second
    (resumed,) = of_kind(second, "resume")
    assert resumed["step"] == 7
    assert sum(r["samples"] for r in of_kind(second, "step")) == count


def test_unconnected_ranks_are_reported(project: Project) -> None:
    """A rank started alone although the run file requires two: MPI silently gives a world of size 1."""
    file = project.write("lonely")
    shutil.rmtree(project.run_dir("lonely"), ignore_errors=True)
    project.run_dir("lonely").mkdir(parents=True)
    from ortflow.workflow.spec.file.dump import dump_run_file
    from ortflow.workflow.spec.file.load import load_run_file
    from ortflow.workflow.spec.file.paths import resolve_paths

    spec = resolve_paths(load_run_file(file), file, project.folder)
    (project.run_dir("lonely") / "run.yaml").write_text(dump_run_file(spec))
    done = command("rank", str(project.run_dir("lonely")), folder=project.folder)
    assert done.returncode == 2
    assert "2 ranks were asked for" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_the_kernels_are_named_and_the_run_file_can_do_without_them(tmp_path: Path) -> None:
    """Both follow the same curve, without dropout, whose masks differ; without a compiler, both are ONNX Runtime's."""
    project = Project.make(tmp_path / "without-dropout", dropout=0.0)
    alone = {"resources__ranks_per_node": 1, "train__steps": 12}
    own = project.run("own-kernels", **alone)
    plain = project.run("plain-kernels", **alone, resources__kernels="onnxruntime")
    line = next(line for line in logs(own).splitlines() if "CPU kernels: " in line)
    assert line.endswith(f"CPU kernels: {find_library().note}")
    assert "CPU kernels" not in logs(plain)
    for (_, ours, _, our_norm), (_, theirs, _, their_norm) in zip(curve(own), curve(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
        assert our_norm == pytest.approx(their_norm, rel=1e-3)
    if find_library().path is not None:
        assert curve(own) != curve(plain)


def test_no_rank_and_no_verb_imports_torch(project: Project, tmp_path: Path) -> None:
    package = tmp_path / "packages" / "torch"
    package.mkdir(parents=True)
    note = tmp_path / "imports"
    spy = f"import traceback\nwith open({str(note)!r}, 'a') as note: traceback.print_stack(file=note)\n"
    (package / "__init__.py").write_text(spy + "raise ImportError('a spy')\n")
    file = project.write("without-torch", train__steps=6, resources__ranks_per_node=1)
    for arguments in (
        ("inspect", "model.onnx"),
        ("validate", file.name),
        ("run", file.name),
        ("export", "without-torch"),
    ):
        done = command(*arguments, folder=project.folder, PYTHONPATH=str(package.parent))
        assert done.returncode == 0, done.stderr
        assert not note.exists(), f"{arguments[0]}: {note.read_text()}"


def test_after_a_wrong_guess_a_run_continues_with_other_values(project: Project) -> None:
    """Learning rate, decay, metrics and length may change; another seed is refused."""
    constant = {"train__schedule": {"name": "constant"}, "resources__ranks_per_node": 1, "train__steps": 8}
    run_dir = project.run("guess", **constant)
    before = curve(run_dir)
    again = command("resume", "guess", folder=project.folder)
    assert again.returncode == 0
    assert mentions(again.stdout, "finished … `ortflow resume guess train.steps=16`")
    changes = ["train.optimizer.lr=1e-3", "train.optimizer.weight_decay=0.2", "model.metrics=[accuracy, perplexity]"]
    for words in (changes, ["train.schedule.warmup_steps=2"]):
        idle = command("resume", "guess", *words, folder=project.folder)
        assert (idle.returncode, "train.steps=16" in idle.stdout) == (0, True), "there is nothing left to train"
    longer = command("resume", "guess", "train.steps=12", *changes, folder=project.folder)
    assert longer.returncode == 0, longer.stderr
    assert "train.optimizer.lr: 0.005 before, 0.001 now" in longer.stdout
    assert curve(run_dir)[:8] == before
    assert [lr for *_, lr in curve(run_dir)[8:]] == [1e-3] * 4
    assert "perplexity" in of_kind(run_dir, "evaluation")[-1]
    changed = {r["key"]: (r["before"], r["now"]) for r in of_kind(run_dir, "changed")}
    assert changed["train.optimizer.lr"] == (0.005, 0.001)
    assert changed["train.steps"] == (8, 12)
    refused = command("resume", "guess", "train.steps=20", "seed=4", folder=project.folder)
    assert refused.returncode == 2
    assert mentions(refused.stderr, "seed is 3", "4 here")
    assert (
        "train.optimizer.name"
        in command("resume", "guess", "train.optimizer={name: sgd, lr: 0.1}", folder=project.folder).stderr
    )


def test_a_run_does_not_continue_with_other_samples(project: Project) -> None:
    alone = {"resources__ranks_per_node": 1, "data__train__path": "other/train.arrow"}
    shutil.copytree(project.folder / "set", project.folder / "other")
    run_dir = project.run("other-set", **alone, train__steps=5)
    plan = (run_dir / "plan.json").read_bytes()
    shutil.copy(project.folder / "set" / "eval.arrow", project.folder / "other" / "train.arrow")
    refused = command("resume", "other-set", "train.steps=10", folder=project.folder)
    assert refused.returncode == 2
    assert "data.train.path: " in refused.stderr
    assert "this run began with" in refused.stderr
    assert (run_dir / "plan.json").read_bytes() == plan
    assert [step for step, *_ in curve(run_dir)] == [1, 2, 3, 4, 5]


def test_a_model_that_cannot_be_exported_is_refused_before_it_is_trained(project: Project) -> None:
    file = project.write("no-export", export__tolerance=0.0, resources__ranks_per_node=1)
    done = command("run", file.name, folder=project.folder)
    assert done.returncode == 2
    assert "error: export.tolerance: " in done.stdout + done.stderr
    assert not any(project.run_dir("no-export").rglob("step-*"))
    assert "loss" not in done.stdout


def test_a_failed_export_names_the_checkpoint(project: Project) -> None:
    alone = {"resources__ranks_per_node": 1, "train__steps": 6}
    run_dir = project.run("late-export", **alone, export__enabled=False)
    file = project.write("late-export", **alone, export__tolerance=0.0, restart__failures=0)
    done = command("run", file.name, folder=project.folder)
    assert done.returncode == 2
    output = done.stdout + done.stderr
    assert mentions(output, f"saved in {run_dir / 'checkpoints' / 'step-00000006'} … export failed")
    assert f"`ortflow export {run_dir}` tries again" in output
    assert len(of_kind(run_dir, "step")) == 6
    assert command("export", str(run_dir), folder=project.folder).returncode == 2
    file.write_text(file.read_text().replace("tolerance: 0.0", "tolerance: 0.1"))
    assert command("run", file.name, folder=project.folder).returncode == 0
    assert len(of_kind(run_dir, "step")) == 6
    assert command("export", str(run_dir), folder=project.folder).returncode == 0
