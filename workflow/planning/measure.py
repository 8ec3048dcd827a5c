"""Measures on this machine how long a rank takes for a micro-batch and for an update, with the run's own trainer."""

from __future__ import annotations

import time
from dataclasses import replace

from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.planning.built import Built
from ortflow.workflow.planning.rates import Link, Rates
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.steps.trainers import builder_of
from ortflow.workflow.system.cores import cores_per_rank
from ortflow.workflow.trainer import Report

REPEATS = 3
"""Steps of each kind that are timed, after one that is not; the fastest counts."""


def threads_of(spec: TrainerRunSpec) -> int:
    """Cores of a rank: those of the run file, or an equal share of this machine's."""
    return cores_per_rank(spec.resources.cpus_per_rank, spec.resources.ranks_per_node)


def micro_batch_seconds(built_run: Built, spec: TrainerRunSpec, threads: int) -> tuple[float, float]:
    """Seconds of the two passes of a micro-batch, and of an update of all parameters.

    Steps of one and of two micro-batches are timed. They differ by the passes of one, and by adding its gradients.

    Parameters
    ----------
    built_run
        The built model.
    spec
        The run on one rank, with two micro-batches a step.
    threads
        Cores of a rank.
    """
    builder = builder_of(spec, built_run.run_dir, Report())
    trainer = builder.open(SoloCommunicator(), CpuDevice(), threads, [builder.check_machine()])
    fastest = {1: float("inf"), 2: float("inf")}
    for update in range(1 + REPEATS):
        for count in fastest:
            start = time.perf_counter()
            trainer.step(
                [built_run.batch] * count, learning_rate=0.0, update=update + 1, seeds=[0] * count, control_values=[]
            )
            # Not the first step, in which ONNX Runtime's arena grows.
            if update:
                fastest[count] = min(fastest[count], time.perf_counter() - start)
    passes = max(fastest[2] - fastest[1], fastest[1] / 2)
    return min(passes, fastest[1]), max(0.0, fastest[1] - passes)


def measured(rates: Rates, seconds: tuple[float, float], operations: int, elements: int, threads: int) -> Rates:
    """Rates with the measured speed of a rank.

    Parameters
    ----------
    rates
        The others.
    seconds
        Of the passes of a micro-batch and of an update.
    operations, elements
        What these compute and update.
    threads
        Cores that were used.
    """
    passes, update = seconds
    if not update:
        # Shorter than what the passes vary by.
        update = rates.update * elements
    explanations = (
        f"One micro-batch of the undivided model took {passes:.3g} s forward and backward on {threads} core(s) of this "
        f"machine, and an update {update:.2g} s; passes of a layout take the share that its operations have of it, as "
        "if each rank had cores of its own.",
    )
    return replace(
        rates,
        operations=operations / passes,
        update=update / max(1, elements),
        explanations=(*explanations, *rates.explanations[1:]),
        measured=True,
    )


def linked(rates: Rates, inside: Link) -> Rates:
    """Rates with a measured link within a machine."""
    explanations = (
        f"Messages take {inside.bandwidth / 1e9:.2g} GB/s and {inside.latency * 1e6:.2g} us each, measured with an "
        "all-reduce of two ranks here.",
    )
    return replace(rates, inside=inside, explanations=(*rates.explanations[:1], *explanations))
