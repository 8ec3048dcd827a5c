"""The run file's `resources` section: machines, ranks, cores, GPUs, memory and time."""

from __future__ import annotations

from typing import Literal

from ortflow.workflow.spec.base import Count, Positive, Section, Text


class Resources(Section):
    """The resources of a run."""

    nodes: Positive = 1
    """Machines."""
    min_nodes: Positive | None = None
    """Smallest number of machines that an elastic run continues with when some are lost; by default the run always has
    `nodes`."""
    spares: Count = 0
    """Machines in reserve: they are asked for with the others, hold no rank, and take the place of one that is lost or
    too slow, without another wait in the queue."""
    ranks_per_node: Positive = 1
    """Ranks on each."""
    cpus_per_rank: Positive | None = None
    """Cores of a rank; by default an equal share of the machine's cores."""
    gpus_per_rank: Count = 0
    """GPUs of a rank: 1 to train on the GPU of the local rank, 0 for the CPU."""
    gpu_type: Text | None = None
    """GPU type, by the scheduler's name: h100 in Slurm, in Kubernetes the value of `gpu.type_label`."""
    memory: Text | None = None
    """Memory of a node: a number and a unit, such as 16G or 16Gi."""
    time_limit: Text | None = None
    """Wall-clock limit: [days-]hours:minutes:seconds, or minutes."""
    kernels: Literal["auto", "onnxruntime"] = "auto"
    """Kernels: ortflow's if a C compiler is found (auto), or only ONNX Runtime's."""
    cuda_graph: bool = True
    """On GPUs, capture the repeated work of a step as CUDA graphs, which saves host time."""
    python: Text | None = None
    """Interpreter of the ranks; by default the one that runs ortflow."""
