"""A checkpoint that is reshaped offline, loaded under another layout and saved again, has the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from in_process import command_here
from kernels import needs_kernels
from project import Project, command, logs
from real_ranks import on_ranks
from resaving_ranks import Job, write_jobs
from safetensors.numpy import load_file

RESAVE = str(Path(__file__).parent.parent / "support" / "resaving_ranks.py")
STEP = 3
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pipeline": (2, {"pipeline": 2}),
    "sharded": (3, {"zero": 3}),
    "grid": (4, {"pipeline": 2, "horizontal": 2}),
    "moments": (2, {"zero": 1}),
    "parts": (4, {"horizontal": 2, "zero": 2}),
    "chunks": (2, {"pipeline": 2, "schedule": "interleaved", "chunks": 2}),
    "one": (1, {}),
}
"""The first trains."""


@needs_kernels
def test_parameters_and_moments_keep_their_bits_through_layouts(tmp_path: Path) -> None:
    project = Project.make(tmp_path / "layouts", dropout=0.0)
    shape: dict[str, Any] = {
        "train__global_batch": 12, "data__micro_batch": 1, "resources__cpus_per_rank": 1, "train__steps": STEP,
        "train__evaluation": None, "data__eval": None, "export__enabled": False,
        "train__schedule": {"name": "constant"},
    }  # fmt: skip
    files = {
        name: project.write(name, **shape, resources__ranks_per_node=ranks, parallel=parallel)
        for name, (ranks, parallel) in LAYOUTS.items()
    }
    first, *others = LAYOUTS
    done = command("run", files[first].name, folder=project.folder, timeout=300)
    assert done.returncode == 0, logs(project.run_dir(first))
    saved = project.run_dir(first) / "checkpoints"
    expected = tensors(project, saved)
    assert len({name.partition("/")[0] for name in expected if "/" in name}) == 2
    assert all(values.any() for name, values in expected.items() if name.startswith("moment"))
    jobs = {
        name: Job(
            LAYOUTS[name][0], str(files[name]), str(project.folder / name),
            source=str(reshaped(project, saved, name)), output=str(project.folder / f"{name}-saved"),
        )
        for name in others
    }  # fmt: skip
    for name, job in jobs.items():
        same(tensors(project, Path(job.source)), expected, f"reshaped for {name}")
    most = max(job.ranks for job in jobs.values())
    jobs_file = write_jobs(project.folder / "jobs", sorted(jobs.values(), key=lambda job: -job.ranks))
    printed = on_ranks(most, RESAVE, str(STEP), str(jobs_file), timeout=300, OMP_NUM_THREADS="1")
    assert printed.count("good") == most, printed
    for name, following in zip(others, [*others[1:], first], strict=True):
        saved = Path(jobs[name].output)
        same(tensors(project, saved), expected, f"saved under {name}")
        same(tensors(project, reshaped(project, saved, following)), expected, f"{name} reshaped for {following}")


def reshaped(project: Project, checkpoints: Path, name: str) -> Path:
    """A checkpoint for the ranks of a layout, as `ortflow checkpoint reshape` writes it."""
    output = project.folder / f"{checkpoints.parent.name}-{checkpoints.name}-for-{name}"
    done = command_here(
        "checkpoint", "reshape", str(checkpoints), "--ranks", str(LAYOUTS[name][0]), "--output", str(output),
        folder=project.folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return output


def tensors(project: Project, checkpoints: Path) -> dict[str, Any]:
    """Every parameter and moment of a checkpoint by name, as `ortflow checkpoint merge` writes it."""
    file = project.folder / f"{checkpoints.parent.name}-{checkpoints.name}.safetensors"
    done = command_here(
        "checkpoint", "merge", str(checkpoints), "--moments", "--step", str(STEP), "--output", str(file),
        folder=project.folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return load_file(file)


def same(found: dict[str, Any], expected: dict[str, Any], about: str) -> None:
    assert found.keys() == expected.keys(), about
    wrong = [name for name, values in expected.items() if found[name].tobytes() != values.tobytes()]
    assert not wrong, f"{about}: {wrong}"
