"""Level 2 of `ortflow.program`: killed programs continue bit-identically, also on another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from program_server import ProgramServer

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "level2.py"


def run(folder: Path, *arguments: str, ranks: int = 1, attempt: int = 0, period: int | None = 3) -> list[list[str]]:
    """Run the program with a checkpoint every three steps; returns the lines of each rank."""
    with ProgramServer(folder, ranks, attempt, period={"steps": period, "seconds": None}) as server:
        processes = server.start(PROGRAM, *arguments)
        texts = [process.communicate(timeout=240)[0] for process in processes]
    return [text.splitlines() for text in texts]


def trained(lines: list[str]) -> list[str]:
    """The program's own lines, of a training that is complete."""
    own = [line for line in lines if line[:1].isdigit() or line.startswith("final")]
    assert own[-1:] == [line for line in own if line.startswith("final")], "\n".join(lines[-20:])
    return own


def check_resumed(folder: Path, *arguments: str, ranks: int = 1, kill: int = 11) -> None:
    """Compare a calm run with one that is killed."""
    calm = run(folder / "calm", *arguments, ranks=ranks)
    struck = run(folder / "killed", *arguments, f"kill={kill}", ranks=ranks)
    again = run(folder / "killed", *arguments, ranks=ranks, attempt=1)
    for before, first, second in zip(calm, struck, again, strict=True):
        before = trained(before)
        steps = [line for line in first if line[:1].isdigit()]
        assert len(steps) == kill
        assert steps == before[:kill]
        second = trained(second)
        assert second == before[int(second[0].split()[0]) :]
        assert 0 < kill - int(second[0].split()[0]) <= 4  # the steps since the last checkpoint, and no more


@pytest.mark.rotates
@pytest.mark.parametrize(
    "loader", ["plain", "workers", "persistent", "generator", "sampler", "sampler-workers", "sampler-persistent"]
)
def test_a_killed_program_continues_bit_identically(tmp_path: Path, loader: str) -> None:
    check_resumed(tmp_path, f"loader={loader}")


def test_a_loader_with_its_own_state_continues(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    check_resumed(tmp_path, "loader=stateful")


@pytest.mark.rotates
@pytest.mark.parametrize("model", ["ddp", "fsdp"])
def test_two_ranks_continue_bit_identically(tmp_path: Path, model: str) -> None:
    loader = "distributed" if model == "ddp" else "sampler"
    check_resumed(tmp_path, f"model={model}", f"loader={loader}", "scaler=0", ranks=2)


@pytest.mark.rotates
@pytest.mark.parametrize("model", ["ddp", "fsdp"])
def test_another_number_of_ranks_sees_the_same_samples(tmp_path: Path, model: str) -> None:
    """Without random numbers the losses are those of one rank to rounding, whatever the ranks."""
    arguments = ("loader=sampler", f"model={model}", "dropout=0", "scaler=0")
    (alone,) = run(tmp_path / "alone", *arguments)
    folder = tmp_path / "changing"
    lines: list[str] = []
    for attempt, (ranks, total) in enumerate([(2, 5), (1, 9), (2, 14)]):
        parts = run(folder, *arguments, f"total={total}", ranks=ranks, attempt=attempt)
        for own in zip(*map(trained, parts), strict=True):
            if own[0].startswith("final"):
                continue
            numbers = {line.split()[0] for line in own}
            assert len(numbers) == 1
            samples = sorted(sample for line in own for sample in eval(line.partition("[")[2].join("[]")[:-1]))
            losses = [float(line.split()[1]) for line in own]
            lines.append(f"{numbers.pop()} {sum(losses) / len(losses):.5f} {samples}")
    expected = [
        f"{line.split()[0]} {float(line.split()[1]):.5f} {line[line.index('[') :]}" for line in trained(alone)[:-1]
    ]
    assert lines == expected


def test_a_loader_that_cannot_follow_other_ranks_is_refused(tmp_path: Path) -> None:
    arguments = ("loader=distributed", "model=ddp", "scaler=0")
    for part in run(tmp_path, *arguments, "total=4", ranks=2):
        trained(part)
    (lines,) = run(tmp_path, *arguments, attempt=1)
    assert "the checkpoint is of 2 ranks, and this run has 1" in lines[-1]
    assert "ortflow.program.Sampler" in lines[-1]
    assert "ProgramError" in lines[-1]


def test_a_save_waits_for_the_end_of_an_accumulation(tmp_path: Path) -> None:
    check_resumed(tmp_path, "loader=plain", "accumulate=4", "total=16")
    steps = sorted(int(path.name[5:]) for path in (tmp_path / "calm").glob("step-*"))
    assert steps == [4, 8, 12, 16]


def test_a_stop_saves_and_ends_and_the_total_is_reached(tmp_path: Path) -> None:
    with ProgramServer(tmp_path, period={"steps": None, "seconds": None}) as server:
        (process,) = server.start(PROGRAM, "total=2000")
        server.wait(lambda s: s.steps() and s.steps()[-1] > 5)
        server.ask("preemption")
        lines = process.communicate(timeout=60)[0].splitlines()
        assert process.returncode == 0
        newest = server.newest()
    assert not lines[-1].startswith("final")  # nothing after the loop has run
    assert newest is not None
    assert int(newest.name[5:]) == len(lines)
    (again,) = run(tmp_path, f"total={len(lines) + 5}", attempt=1)
    assert trained(again)[0].split()[0] == str(len(lines))


def test_the_period_in_seconds_is_agreed(tmp_path: Path) -> None:
    with ProgramServer(tmp_path, 2, period={"steps": None, "seconds": 0.5}) as server:
        processes = server.start(PROGRAM, "total=4000", "loader=sampler", "model=ddp", "scaler=0")
        server.wait(lambda s: s.newest() is not None, 120)
        for process in processes:
            process.kill()
            process.communicate()
        assert server.of_kind("save_requested")
