"""Ranks that train by rules that read norms of whole tensors: a program for tests, and the rules.

mpirun -n RANKS python lars_ranks.py sharing RULE FOLDER    # the jobs in FOLDER/jobs.json, as in sharing_ranks
mpirun -n RANKS python lars_ranks.py dividing RULE FOLDER   # as in dividing_ranks
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dividing_ranks
import sharing_ranks
from real_ranks import on_ranks
from sharing_ranks import Job, Outcome

from ortflow.workflow.optim import graph
from ortflow.workflow.optim.builder import Builder
from ortflow.workflow.optim.segments import Segment
from ortflow.workflow.spec.optimizers import OPTIMIZERS, Properties, Sgd

Rule = Callable[[Builder, Any, Sequence[Segment]], None]
SETTINGS = {"train__optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}}
"""Of a run with a registered rule."""


def ratio(build: Builder, weights: str, gradients: str) -> str:
    """LARS's trust ratio, from two sums of squares."""
    both = build("Greater", build("Min", weights, gradients), build.constant([0.0], "float64"))
    quotient = build("Div", build.root(weights), build.root(gradients))
    return build(
        "Where", both, build("Mul", quotient, build.constant([0.05], "float32")), build.constant([1.0], "float32")
    )


def moved(build: Builder, optimizer: Sgd, i: int, rate: str) -> None:
    momentum = build("Mul", f"momentum.{i}", build.constant([optimizer.momentum], "float32"))
    step = build("Mul", build("Mul", f"gradients.{i}", rate), "learning_rate")
    summed = build("Add", momentum, step, output=f"momentum.{i}.out")
    build("Sub", f"parameters.{i}", summed, output=f"parameters.{i}.out")


def lars(build: Builder, optimizer: Sgd, segments: Sequence[Segment]) -> None:
    """LARS (You et al. 2017), without weight decay."""
    for i in range(len(segments)):
        moved(
            build, optimizer, i, ratio(build, build.square_sum(f"parameters.{i}"), build.square_sum(f"gradients.{i}"))
        )


def lars_of_steps(build: Builder, optimizer: Sgd, segments: Sequence[Segment]) -> None:
    """The same, all weights' norms first; the second norm is of what is computed."""
    weights = [build.square_sum(f"parameters.{i}") for i in range(len(segments))]
    for i, norm in enumerate(weights):
        doubled = build("Add", f"gradients.{i}", f"gradients.{i}")
        moved(build, optimizer, i, ratio(build, norm, build.square_sum(doubled)))


RULES: dict[str, Rule] = {"lars": lars, "lars_of_steps": lars_of_steps}


def registered(rule: Rule) -> tuple[dict[str, Properties], dict[str, Rule]]:
    """Entries of both tables under the name of SGD, whose keys and moments the rules have."""
    return {"sgd": Properties(moments={"momentum": "momentum"}, whole_tensors=True)}, {"sgd": rule}


def run_ranks(rule: str, count: int, folder: Path, jobs: list[Job]) -> list[dict[str, Outcome]]:
    """As `sharing_ranks.run_ranks`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps([asdict(job) for job in jobs]))
    on_ranks(count, __file__, "sharing", rule, str(folder), timeout=300, OMP_NUM_THREADS="1")
    return [{job.name: sharing_ranks._read(folder, job, rank) for job in jobs} for rank in range(count)]


if __name__ == "__main__":
    program, rule = sys.argv.pop(1), sys.argv.pop(1)
    properties, updates = registered(RULES[rule])
    OPTIMIZERS.update(properties)
    graph.UPDATES.update(updates)
    {"sharing": sharing_ranks, "dividing": dividing_ranks}[program].main()
