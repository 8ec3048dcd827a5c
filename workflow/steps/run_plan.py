"""What configure resolved: the sizes that every rank uses. Pure; stored as plan.json in the run directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from ortflow.workflow.data.epoch_positions import Plan as Division
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import write_atomically
from ortflow.workflow.spec.checks.batch import replicas
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.system.files import read_whole

VERSION = 1


@dataclass(frozen=True)
class Plan:
    """Resolved sizes of a run."""

    fingerprint: str
    """Hash of everything that the graphs were made from."""
    world_size: int
    replicas: int
    """Copies of the model. In plans of versions without other layouts it is missing and equals the number of ranks."""
    micro_batch: int
    """Samples per replica and micro-step."""
    gradient_accumulation: int
    global_batch: int
    """Samples per step over all ranks."""
    samples: int
    """Samples in the training set."""
    steps_per_epoch: int
    total_steps: int
    """Steps of the whole run."""
    parameters: int
    """Number of trained elements."""
    graphs: Mapping[str, str]
    """Hash of each file in the folder of graphs, by its name."""
    data: str = ""
    """Hash of the training set's samples; empty in plans of versions without it."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Size and hash of the other files that the run reads, by key path; empty in plans of versions without it."""
    classes: Mapping[str, str] = field(default_factory=dict)
    """Name of each class by its number, where the training set names them."""
    run: Mapping[str, str] = field(default_factory=dict)
    """Record of the run's identity, the same in all its plans; empty in plans of versions without it."""
    version: int = VERSION

    def save(self, path: Path) -> None:
        """Write as JSON, with a hash of its content."""
        body = asdict(self)
        write_atomically(path, (json.dumps({**body, "hash": _hash(body)}, indent=2) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read a plan that `save` of this or an earlier version wrote.

        Raises ValueError if the file is not a valid plan, or OSError.
        """
        try:
            body = {"graphs": {}, **json.loads(read_whole(path))}
            if body.pop("hash", _hash(body)) != _hash(body):
                raise ValueError(f"{path} does not match its hash")
            body.setdefault("replicas", body.get("world_size"))
            plan = cls(**body)
        except (TypeError, RecursionError) as error:
            raise ValueError(f"{path} is not a valid plan: {error}") from None
        for plan_field in fields(cls):
            if not _fits(str(plan_field.type), value := getattr(plan, plan_field.name)):
                raise ValueError(f"{path} is not a valid plan: {plan_field.name} is {str(value)[:40]!r}")
        return plan


def number_in(path: Path, key: str) -> int | None:
    """A positive integer of a plan, which a client's copy has too; None if it is missing."""
    try:
        plan = json.loads(read_whole(path))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(plan, dict) or plan.pop("hash", _hash(plan)) != _hash(plan):
        return None
    value = plan.get(key)
    return value if type(value) is int and 0 < value < 2**63 else None


def _hash(body: Mapping[str, object]) -> str:
    """Hash of everything but itself; missing in plans of earlier versions."""
    return hashlib.blake2b(json.dumps({**body, "hash": ""}, sort_keys=True).encode(), digest_size=16).hexdigest()


def _fits(declared: str, value: object) -> bool:
    if declared == "int":
        # For isinstance, True is an int.
        return type(value) is int and 0 <= value < 2**63
    if declared == "str":
        return isinstance(value, str)
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


def resolve(
    spec: TrainerRunSpec, *, samples: int, data: str, parameters: int, fingerprint: str, graphs: Mapping[str, str]
) -> Plan:
    """The plan of a run over `samples` samples with the hash `data`.

    Raises UserError if the training set is smaller than one global batch and the remainder is dropped.
    """
    batch, accumulation = spec.data.micro_batch, spec.accumulation
    division = Division(samples, batch, accumulation, spec.replicas, spec.data.last_batch)
    global_batch, steps_per_epoch = division.global_batch, division.steps_per_epoch
    if steps_per_epoch == 0:
        raise UserError(
            f"the training set has {samples} samples, fewer than one global batch of {global_batch} "
            f"({batch} samples x {accumulation} micro-batches x {replicas(spec.grid)})",
            where="data.last_batch",
            fix="lower data.micro_batch, or set data.last_batch to keep or pad",
        )
    if spec.train.steps is not None:
        total = spec.train.steps
    else:
        assert spec.train.epochs is not None
        total = spec.train.epochs * steps_per_epoch
    return Plan(
        fingerprint=fingerprint,
        world_size=spec.world_size,
        replicas=spec.replicas,
        micro_batch=batch,
        gradient_accumulation=accumulation,
        global_batch=global_batch,
        samples=samples,
        steps_per_epoch=steps_per_epoch,
        total_steps=total,
        parameters=parameters,
        graphs=graphs,
        data=data,
    )


def total_steps(plan: Plan, spec: TrainerRunSpec, *, step: int, epoch: int, sample: int) -> int:
    """Steps of the whole run, from the current position: another number of replicas may change the global batch.

    A run of N steps ends at step N; a run of N epochs ends when its samples are used up.
    """
    epochs = spec.train.epochs
    if epochs is None or step == 0:
        return plan.total_steps
    if epoch >= epochs:
        return step
    rest = Division(
        plan.samples - sample, plan.micro_batch, plan.gradient_accumulation, plan.replicas, spec.data.last_batch
    )
    return step + rest.steps_per_epoch + (epochs - epoch - 1) * plan.steps_per_epoch
