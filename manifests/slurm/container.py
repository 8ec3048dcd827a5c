"""A rank in a container. The supervisor process, srun and mpirun stay outside, with Slurm and its MPI."""

from __future__ import annotations

import glob
import itertools
import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from typing_extensions import assert_never

from ortflow.manifests.slurm.placement import Placement
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.checks.slurm_syntax import MOUNT
from ortflow.workflow.spec.file.paths import input_files
from ortflow.workflow.spec.problem import printable

if TYPE_CHECKING:
    from ortflow.workflow.spec.run import RunSpec
    from ortflow.workflow.spec.slurm import Container

_PASS_ON = (
    "exec enroot start"
    ' $(compgen -e | sed -nE "s/^((ORTFLOW|SLURM|PMI|PMIX|OMPI|PRTE|MPIR|FI|UCX|NCCL|CUDA)_.*)/--env=\\1/p")'
    ' "$@"'
)
"""Variables that Enroot must pass by name to a container; without them a rank does not know its place."""


def inside(spec: RunSpec) -> Container | None:
    """The container that ranks run in."""
    container = spec.backends.slurm.container
    return container if container is not None and container.kind != "none" else None


def srun_options(spec: RunSpec, placement: Placement) -> list[str]:
    """Options of srun: with Pyxis, the image and the mounts."""
    container = inside(spec)
    if container is None or container.kind != "pyxis":
        return []
    mounts = ",".join(":".join(mount).removesuffix(":") for mount in _mounts(spec, placement, container))
    return [f"--container-image={container.image}", f"--container-mounts={mounts}", *container.arguments]


def rank_prefix(spec: RunSpec, placement: Placement) -> list[str]:
    """The prefix of a rank's command."""
    container = inside(spec)
    if container is None:
        return []
    mounts = [*_mounts(spec, placement, container)]
    gpus = spec.resources.gpus_per_rank > 0
    match container.kind:
        case "none" | "pyxis":
            return []
        case "enroot":
            flags = [
                # As in fstab; x-create=auto makes a mount point that the image lacks (Enroot, doc/image-format.md).
                f"--mount={source}:{target}:none:x-create=auto,rbind{',ro' if mode == 'ro' else ''}"
                for source, target, mode in mounts
            ]
            return ["bash", "-c", _PASS_ON, "enroot", *flags, *container.arguments, container.image]
        case "apptainer" | "singularity":
            flags = [f"--bind={':'.join(mount).removesuffix(':')}" for mount in mounts]
            return [container.kind, "exec", *(["--nv"] if gpus else []), *flags, *container.arguments, container.image]
        case other:
            assert_never(other)


def settings(spec: RunSpec) -> dict[str, str]:
    """Variables for Enroot's hook to show the GPUs to a container whose image does not request them."""
    container = inside(spec)
    if container is None or container.kind not in ("enroot", "pyxis") or spec.resources.gpus_per_rank == 0:
        return {}
    return {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}


def _mounts(spec: RunSpec, placement: Placement, container: Container) -> Iterator[tuple[str, str, str]]:
    """(outside, inside, mode): the run directory and the run's inputs under their own paths, then the user's."""
    matches = [MOUNT.fullmatch(mount) for mount in container.mounts]
    users = [(match[1], match[2] or match[1], match[3] or "") for match in matches if match]
    mounted_folders = {PurePosixPath(source) for source, target, _ in users if source == target}
    for path in _needed(spec, placement):
        if not any(path.is_relative_to(folder) for folder in mounted_folders):
            mounted_folders.add(path)
            yield _plain(str(path)), str(path), ""
    yield from users


def _needed(spec: RunSpec, placement: Placement) -> Iterator[PurePosixPath]:
    yield PurePosixPath(placement.run_dir)
    if placement.code is not None:
        yield PurePosixPath(placement.code)
    data_sets = (spec.data.train, spec.data.eval, *spec.data.eval_sets.values()) if spec.data is not None else ()
    sets = [path for data in data_sets if data is not None for path in data.paths]
    for file in input_files(spec):
        # A model's weights may lie beside it, and a program's modules.
        path = _without_pattern(PurePosixPath(file)) if file in sets else PurePosixPath(file).parent
        if path.is_absolute():
            yield path
    if spec.program is not None and spec.program.cwd is not None:
        yield PurePosixPath(spec.program.cwd)


def _without_pattern(path: PurePosixPath) -> PurePosixPath:
    """The folder in which a glob pattern of a set begins; a path without one as it is."""
    fixed = list(itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
    return PurePosixPath(*fixed)


def _plain(path: str) -> str:
    if re.search(r"[\s,:]", path):
        raise UserError(
            f"{printable(path)} cannot be mounted into a container: its path contains a blank, a comma or a colon",
            where="backends.slurm.container",
            fix="move or rename it",
        )
    return path
