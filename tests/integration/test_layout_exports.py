"""One checkpoint, resumed with no more steps under each layout: the exported files have the same bytes.

pytest tests/integration/test_layout_exports.py                             # a few layouts
pytest -m "chaos or not chaos" tests/integration/test_layout_exports.py     # all
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from kernels import needs_kernels
from layout_table import PARALLEL
from project import FEW_CORES, Project, command, curve, logs, of_kind
from rotation import rotating

pytestmark = [needs_kernels, pytest.mark.rotates]
FAULTS = str(Path(__file__).parent.parent / "support" / "faults")
STEPS = 3
SHAPE: dict[str, Any] = {
    "train__steps": STEPS, "train__global_batch": 8, "data__micro_batch": 1, "resources__cpus_per_rank": 1,
    "train__schedule": {"name": "constant"}, "train__evaluation": None, "restart__failures": 0,
}  # fmt: skip
MODEL = Path("export", "model.onnx")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {"one-rank": (1, {}), **PARALLEL}
ALWAYS = ("zero-3-of-4", "pipeline-2-sequence-2")


class Interrupted(NamedTuple):
    """A run of which a rank was killed in the export, after the checkpoint of the last step."""

    project: Project
    run_dir: Path
    before: Path
    """What the run directory was then."""
    exported: bytes
    """What `ortflow export` makes of the checkpoint."""


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    project = Project.make(tmp_path_factory.mktemp("exports"), dropout=0.1)
    file = project.write("run", **SHAPE, resources__ranks_per_node=2, parallel={"zero": 3})
    run_dir, faults = project.run_dir("run"), {"PYTHONPATH": FAULTS, "LENDER": "1 0"}
    done = command("run", file.name, folder=project.folder, timeout=300, **faults)
    assert (done.returncode, "rank 1 was killed by SIGKILL" in done.stderr) == (1, True), f"{done}\n{logs(run_dir)}"
    assert len(curve(run_dir)) == STEPS
    assert not (run_dir / MODEL).exists()
    before = shutil.copytree(run_dir, project.folder / "before")
    offline = command("export", "run", "--output", "offline.onnx", folder=project.folder)
    assert offline.returncode == 0, offline.stderr
    return Interrupted(project, run_dir, before, (project.folder / "offline.onnx").read_bytes())


@pytest.mark.parametrize("name", rotating(LAYOUTS, ALWAYS))
def test_every_layout_exports_the_same_bytes(name: str, interrupted: Interrupted) -> None:
    project, run_dir, before, exported = interrupted
    shutil.rmtree(run_dir)
    shutil.copytree(before, run_dir)
    ranks, parallel = LAYOUTS[name]
    file = project.write("run", **SHAPE, resources__ranks_per_node=ranks, parallel=parallel)
    done = command("run", file.name, folder=project.folder, timeout=300, **FEW_CORES)
    assert done.returncode == 0, f"{name}\n{done.stdout}\n{done.stderr}\n{logs(run_dir)}"
    resumed = [(record["step"], record["world_size"]) for record in of_kind(run_dir, "resume")]
    assert resumed == [(STEPS, ranks)], name
    assert len(curve(run_dir)) == STEPS, f"{name}: trained on"
    assert (run_dir / MODEL).read_bytes() == exported, f"the export of {name} differs from that of `ortflow export`"
