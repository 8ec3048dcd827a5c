"""Which keys may change when a run continues, and the batch size that it keeps. Pure.

Used by `run_directory_lock` for a directory that holds a run. A change that would make it another run is refused by
key; the number of samples per step changes only on explicit request.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.checks.batch import KEY, replicas, undivided
from ortflow.workflow.spec.run import RunSpec, TrainerRunSpec

MAY_CHANGE: tuple[str, ...] = (
    "name", "run_dir", "prepare", "program.args", "program.parameters", "program.cwd", "program.env",
    "program.start", "program.stop_seconds", "model.metrics", "model.accept_inference_export",
    "data.micro_batch", "data.eval", "data.eval_sets", "data.eval_mode", "data.eval_micro_batch", "data.eval_samples",
    "train.steps", "train.epochs", "train.global_batch", "train.gradient_accumulation", "train.clip_norm",
    "train.optimizer.lr", "train.optimizer.weight_decay", "train.optimizer.betas", "train.optimizer.epsilon",
    "train.schedule", "train.groups", "train.layer_decay", "train.evaluation", "train.early_stop",
    "train.max_skipped_steps", "train.loss_scale",
    "parallel", "checkpoint.every_steps", "checkpoint.every_seconds", "checkpoint.keep", "checkpoint.best",
    "checkpoint.asynchronous", "checkpoint.wait_for_room", "checkpoint.exact", "monitor", "export", "resources",
    "restart", "backends",
)  # fmt: skip
"""Keys and whole sections that may change: how long, how fast, how often, where. Model, loss, data, order
of the samples and kind of optimizer do not, nor does the program."""
LENGTHENS = ("train.steps", "train.epochs", "train.early_stop", "export", "program.args", "program.parameters")
"""Keys that can give a finished run more work."""
LISTED = 3
"""Number of differences that an error names."""


class Change(NamedTuple):
    """A key with another value."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.before} before, {self.now} now"


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[Change]:
    """Keys whose values differ, dotted."""
    changes: list[Change] = []
    for key in {**before, **now}:
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            changes += [Change(f"{key}.{inner}", a, b) for inner, a, b in differences(old, new)]
        elif old != new:
            changes.append(Change(key, old, new))
    return changes


def within(key: str, allowed: Sequence[str]) -> bool:
    """Whether a key is one of these or belongs to one of these sections."""
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in allowed)


def refuse(root: Path, changes: Sequence[Change]) -> None:
    """Raise UserError if one of the changes would make it another run."""
    refused = [change for change in changes if not within(change.key, MAY_CHANGE)]
    if not refused:
        return
    listed = ", ".join(f"{change.key} is {change.before} there and {change.now} here" for change in refused[:LISTED])
    rest = f", and {len(refused) - LISTED} other keys differ" if len(refused) > LISTED else ""
    keys = "this key" if len(refused) == 1 else "these keys"
    raise UserError(
        f"{root} holds another run: {listed}{rest}",
        fix=f"give {keys} the old value to continue, --fresh to start over and rename the old run, or another name "
        "(name=NAME, or run_dir)",
    )


def refuse_other_kind(root: Path, before: RunSpec, now: RunSpec) -> None:
    """Raise UserError if one run is of a program and the other is not."""
    if (before.program is None) == (now.program is None):
        return
    kinds = ["a program" if spec.program is not None else "a model" for spec in (before, now)]
    raise UserError(
        f"{root} holds a run of {kinds[0]}, and this run file is of {kinds[1]}",
        fix="give it another name (name=NAME, or run_dir), or --fresh to start over and rename the old run",
    )


def continued_run(before: TrainerRunSpec, now: TrainerRunSpec, batch: int) -> TrainerRunSpec:
    """Return the run to continue, with its previous `batch` samples per step.

    If the number of ranks or the micro-batch has changed, gradient accumulation is adapted. Raises UserError if the
    samples do not divide, or if another number is requested in another way than by `train.global_batch`.
    """
    was_asked = now.train.gradient_accumulation != before.train.gradient_accumulation
    if now.train.global_batch not in (None, batch):
        if was_asked:
            agree(now)
        return now
    micro_batch, grid = now.data.micro_batch, now.grid
    product = micro_batch * now.train.gradient_accumulation * grid.data
    if was_asked and product != batch:
        raise UserError(
            f"is {now.train.gradient_accumulation}, which makes {product} samples a step ({division(now, product)}), "
            f"and this run takes {batch}",
            where="train.gradient_accumulation",
            fix=f"leave it at {before.train.gradient_accumulation} to continue with {batch}, or accept the other batch "
            f"with {KEY}={product}",
        )
    if (error := undivided(batch, micro_batch, grid)) is not None:
        raise error
    if before.train.global_batch is None and product == batch:
        return now
    return now.model_copy(update={"train": now.train.model_copy(update={"global_batch": batch})})


def agree(spec: RunSpec) -> None:
    """Raise UserError if global batch and gradient accumulation are both given and contradict each other."""
    if not isinstance(spec, TrainerRunSpec):
        return
    accumulation = spec.train.gradient_accumulation
    if accumulation not in (1, spec.accumulation):
        raise UserError(
            f"is {accumulation}, and {KEY} {spec.global_batch} makes it {spec.accumulation} "
            f"({division(spec, spec.global_batch)})",
            where="train.gradient_accumulation",
            fix="leave out one of them",
        )


def batch_messages(before: TrainerRunSpec, now: TrainerRunSpec, batch: int) -> list[str]:
    """Messages about the samples of a step if their number or division has changed."""
    divided = division(now, now.global_batch)
    if now.global_batch != batch:
        return [f"a step takes {now.global_batch} samples from here on, {batch} before: {divided}"]
    shares = [(spec.grid, spec.data.micro_batch, spec.accumulation) for spec in (before, now)]
    if shares[0] != shares[1]:
        return [f"a step keeps its {batch} samples: {divided}"]
    return []


def division(spec: TrainerRunSpec, batch: int) -> str:
    """How replicas and micro-batches share the samples of a step, in the run file's terms."""
    copies, size = spec.replicas, spec.data.micro_batch
    return f"{replicas(spec.grid)} x micro_batch {size} x gradient_accumulation {batch // (size * copies)}"
