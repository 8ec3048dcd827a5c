"""A checkpoint that is reshaped offline, loaded under another layout and saved again, has the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kernels import needs_kernels
from project import FEW_CORES, Project, command, logs
from real_ranks import on_ranks
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
"""In this order; the first trains."""


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
    for name in others:
        ranks = LAYOUTS[name][0]
        reshaped = project.folder / f"{name}-reshaped"
        done = command(
            "checkpoint", "reshape", str(saved), "--ranks", str(ranks), "--output", str(reshaped), folder=project.folder
        )
        assert done.returncode == 0, done.stderr
        same(tensors(project, reshaped), expected, f"reshaped for {name}")
        saved = project.folder / f"{name}-saved"
        on_ranks(
            ranks, RESAVE, str(files[name]), str(project.folder / name), str(reshaped), str(STEP), str(saved),
            timeout=300, OMP_NUM_THREADS="1", **FEW_CORES,
        )  # fmt: skip
        same(tensors(project, saved), expected, f"saved under {name}")


def tensors(project: Project, checkpoints: Path) -> dict[str, Any]:
    """Every parameter and moment of a checkpoint by name, as `ortflow checkpoint merge` writes it."""
    file = project.folder / f"{checkpoints.parent.name}-{checkpoints.name}.safetensors"
    done = command(
        "checkpoint", "merge", str(checkpoints), "--moments", "--step", str(STEP), "--output", str(file),
        folder=project.folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return load_file(file)


def same(found: dict[str, Any], expected: dict[str, Any], about: str) -> None:
    assert found.keys() == expected.keys(), about
    wrong = [name for name, values in expected.items() if found[name].tobytes() != values.tobytes()]
    assert not wrong, f"{about}: {wrong}"
