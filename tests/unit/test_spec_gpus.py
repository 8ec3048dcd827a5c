"""Requests for GPUs that no scheduler can satisfy, one sentence each."""

from __future__ import annotations

from typing import Any

import pytest
from messages import mentions
from run_files import spec_of

from ortflow.workflow.spec.checks.check import check
from ortflow.workflow.spec.checks.gpus import is_slice
from ortflow.workflow.spec.problem import dotted

ONE, EIGHT = {"gpus_per_rank": 1}, {"gpus_per_rank": 1, "ranks_per_node": 8}
MIG = {"kubernetes": {"gpu": {"resource": "nvidia.com/mig-1g.10gb"}}}


def reported(resources: dict[str, Any], backends: dict[str, Any] | None = None) -> list[str]:
    found = check(spec_of(resources=resources, backends=backends or {}))
    return [f"{dotted(problem.path)}: {problem.what}; {problem.fix}" for problem in found]


@pytest.mark.parametrize(
    ("resources", "backends", "words"),
    [
        ({"gpu_type": "h100"}, {}, "resources.gpu_type: is h100, and resources.gpus_per_rank is 0"),
        ({**ONE, "gpu_type": "h 100"}, {}, "resources.gpu_type: … 'h 100'"),
        ({**ONE, "gpu_type": "h:1"}, {}, "resources.gpu_type: … 'h:1'"),
        ({}, {"slurm": {"gpu_bind": "closest"}}, "gpu_bind: … resources.gpus_per_rank is 0"),
        (ONE, {"slurm": {"gpu_bind": "near"}}, "gpu_bind: … 'near'"),
        (
            ONE,
            {"slurm": {"gpu_bind": "none", "mpi": "mpirun"}},
            "gpu_bind: … srun … backends.slurm.mpi is mpirun",
        ),
        (
            {**EIGHT, "gpu_type": "a100"},
            {"slurm": {"gpus_as": "gres", "gres": "gpu:a100:8"}},
            "resources.gpu_type: … a100 … backends.slurm.gres … gpu:a100:8",
        ),
        (
            {**EIGHT, "gpu_type": "1g.10gb"},
            {"slurm": {"gpus_as": "gpus-per-node"}},
            "gpus_as: … gpus-per-node … 1g.10gb … 8 ranks",
        ),
        (
            EIGHT,
            MIG,
            "gpu.resource: … nvidia.com/mig-1g.10gb … first of 8",
        ),
        (
            {**ONE, "gpu_type": "h100"},
            {"kubernetes": {"node_selector": {"nvidia.com/gpu.product": "x"}}},
            "node_selector.nvidia.com/gpu.product: cannot be combined with resources.gpu_type",
        ),
        (
            {**ONE, "memory": "1Gi"},
            {"kubernetes": {"shared_memory": "2Gi"}},
            "shared_memory: … 2Gi … memory of 1Gi",
        ),
    ],
)
def test_impossible_requests(resources: dict[str, Any], backends: dict[str, Any], words: str) -> None:
    (found,) = reported(resources, backends)
    assert mentions(found, words)
    assert "; " in found, "the fix"


@pytest.mark.parametrize(
    ("resources", "backends"),
    [
        ({**EIGHT, "gpu_type": "h100"}, {}),
        ({**EIGHT, "gpu_type": "1g.10gb"}, {}),
        (ONE, MIG),
        ({"ranks_per_node": 8}, MIG),
        (ONE, {"slurm": {"gpu_bind": "verbose,map_gpu:0,1*2"}}),
        ({**ONE, "memory": "4Gi"}, {"kubernetes": {"shared_memory": "4Gi"}}),
    ],
)
def test_possible_requests(resources: dict[str, Any], backends: dict[str, Any]) -> None:
    assert reported(resources, backends) == []


@pytest.mark.parametrize(("length", "problems"), [(62, 0), (63, 0), (64, 1)])
def test_a_type_is_as_long_as_a_label_of_kubernetes(length: int, problems: int) -> None:
    assert len(reported({**ONE, "gpu_type": "h" * length})) == problems


def test_names_of_slices() -> None:
    slices = ("nvidia.com/mig-1g.10gb", "1g.10gb", "3g.20gb", "nvidia.com/mig-1g.10gb.me", "a100_1g.5gb")
    assert all(is_slice(name) for name in slices)
    assert not any(is_slice(name) for name in ("nvidia.com/gpu", "h100", "NVIDIA-H100-80GB-HBM3", "a100-80gb"))
