"""One model of the survey in a separate process: PyTorch's run, the export, ortflow's run, and the differences.

Called by `__main__` as `worker.py CASE FOLDER`; prints one JSON object, the row of the table.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import yaml
from case import BATCH, Batch, Case
from flat import FlatRun
from torch import nn

import ortflow
from ortflow.exporter.reference import by_default
from ortflow.workflow.data.write import record_batch, write_set
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.optimizers import Adam
from ortflow.workflow.steps.export_weights import export_weights

STEPS = 20
LOSS_TOLERANCE = 3e-6
"""Relative to losses above 1, absolute below; or twice PyTorch's own distance from double precision."""
GRADIENT_TOLERANCE = 1e-4
"""Of a tensor's gradient, relative to its norm; or ten times PyTorch's own distance from double precision, or twice
the largest such distance of all tensors: a model that magnifies rounding does so anywhere."""
FLOOR = 1e-4
"""Gradients smaller than this part of the whole gradient, by element, are rounding."""
DROPS = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "StochasticDepth")
SHAKEN = 3
"""Runs whose parameters begin off by their last bit. PyTorch's say how far rounding alone takes curve and gradients. Of
our curves the nearest counts: a ReLU at its kink differs in one run and not in the next, a fault in all."""
PLACES = (1e-2, 3e-2, 5e-2)
"""How far trained parameters are moved, of their root mean square, where a gradient seems wrong. Two right gradients
differ at a kink, and in a deep network some do at each place; a gradient that is wrong differs at all of them."""
RATE, DECAY = 1e-3, 0.05
Arrays = dict[str, np.ndarray]
WITH_PEAK = (
    "import resource, subprocess, sys; code = subprocess.call(sys.argv[2:]); "
    "open(sys.argv[1], 'w').write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)); sys.exit(code)"
)
"""Between the command and this process, whose own memory a fork would count."""


def without_dropout(module: nn.Module) -> nn.Module:
    """Every kind of dropout at probability zero: two random generators cannot draw the same masks."""
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and ("drop" in name or (name == "p" and type(part).__name__ in DROPS)):
                setattr(part, name, 0.0)
    return module


def with_batched_experts(module: nn.Module) -> nn.Module:
    """Replace products in transformers' mixtures of experts by ones that exist in double precision too."""
    for part in module.modules():
        if hasattr(getattr(part, "config", None), "_experts_implementation"):
            part.config._experts_implementation = "batched_mm"
    return module


def shake(module: nn.Module, seed: int) -> nn.Module:
    """Move each parameter by about its last bit; 0 changes nothing."""
    if seed:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1 + 1e-7 * torch.randn(parameter.shape, generator=generator))
    return module


def move(module: nn.Module, share: float) -> nn.Module:
    """Move each trained parameter by this share of its root mean square; 0 changes nothing."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if share and parameter.requires_grad:
                step = share * max(float(parameter.square().mean().sqrt()), 1e-2)
                parameter.add_(step * torch.randn(parameter.shape, generator=generator))
    return module


class Reference:
    """PyTorch's run of a case in a precision, from its parameters, shaken by a seed or moved by a share.

    `skipped`: steps, from 1, whose update is left out, as a loss scale that is too large leaves it out. `wrap`: what
    the module is wrapped in.
    """

    def __init__(
        self,
        case: Case,
        batches: Sequence[Batch],
        dtype: torch.dtype,
        seed: int = 0,
        share: float = 0.0,
        device: str = "cpu",
        skipped: Collection[int] = (),
        wrap: Callable[[nn.Module], nn.Module] = lambda module: module,
    ) -> None:
        module = shake(with_batched_experts(move(without_dropout(case.module()), share)).to(dtype), seed).to(device)
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in trained.values() if p.ndim > 1], "weight_decay": DECAY},
                {"params": [p for p in trained.values() if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=RATE,
        )
        module = wrap(module)
        self.losses, seconds = [], []
        self.gradients: dict[str, np.ndarray] = {}
        for number, batch in enumerate(batches, 1):
            start = time.process_time()
            optimizer.zero_grad()
            with by_default(dtype):
                loss = case.torch_loss(module, _cast(batch, dtype))
            loss.backward()
            if not self.gradients:
                self.gradients = {
                    n: p.grad.double().cpu().numpy().copy() for n, p in trained.items() if p.grad is not None
                }
            if number not in skipped:
                optimizer.step()
            self.losses.append(loss.item())
            seconds.append(time.process_time() - start)
        self.seconds = float(np.median(seconds[1:]))


def in_double_precision(
    case: Case, batches: Sequence[Batch], share: float = 0.0, skipped: Collection[int] = ()
) -> Reference:
    """PyTorch's run in double precision. If the module needs it, its own `.float()` converts to double."""
    try:
        return Reference(case, batches, torch.float64, share=share, skipped=skipped)
    except RuntimeError as error:
        if not re.search("same dtype|without overflow", str(error)):
            raise
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        return Reference(case, batches, torch.float64, share=share, skipped=skipped)


def _cast(batch: Batch, dtype: torch.dtype) -> Batch:
    kind = np.float64 if dtype == torch.float64 else np.float32
    return {name: a.astype(kind) if a.dtype.kind == "f" else a for name, a in batch.items()}


def distance(values: Sequence[float], expected: Sequence[float]) -> float:
    """Largest difference of two loss curves: relative where `expected` is above 1, absolute below."""
    a, b = np.asarray(values, np.float64), np.asarray(expected, np.float64)
    return float(np.max(np.abs(a - b) / np.maximum(1, np.abs(b))))


def export(case: Case, model: Path, seed: int = 0) -> None:
    """Export a case's module. Raises UserError."""
    model.parent.mkdir(exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ortflow.export_for_training(shake(without_dropout(case.module()), seed), case.example(), model)


def run(case: Case, model: Path, batches: Sequence[Batch], *changes: str) -> tuple[list[float], Path]:
    """`ortflow run` over the same batches, in the model's folder, with keys changed; losses and the run directory.

    Raises UserError with its message.
    """
    folder = model.parent
    columns = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    write_set(folder / "train.arrow", [record_batch(columns)])
    spec = {
        "name": "survey",
        "run_dir": str(folder / "run"),
        "model": {"path": str(model), "loss": case.loss.model_dump(mode="json"), "labels": list(case.labels)},
        "data": {"train": str(folder / "train.arrow"), "shuffle": False, "micro_batch": BATCH},
        "train": {"steps": len(batches), "optimizer": {"name": "adamw", "lr": RATE, "weight_decay": DECAY}},
        "resources": {"cpus_per_rank": 1},
        "monitor": {"tensorboard": False},
        "restart": {"failures": 0},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(spec))
    command = [sys.executable, "-m", "ortflow", "run", str(folder / "run.yaml"), *changes]
    done = subprocess.run(
        [sys.executable, "-S", "-c", WITH_PEAK, str(folder / "peak"), *command],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise UserError(_last_output(done.stdout + done.stderr, done.returncode))
    events = [json.loads(line) for line in (folder / "run/events/rank-0000.jsonl").read_text().splitlines()]
    return [
        e["loss"] if e["loss"] is not None else float("nan") for e in events if e["event"] == "step"
    ], folder / "run"


def _last_output(text: str, code: int) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(error|Error|ortflow):?", line)] or lines[-3:]
    return f"exit code {code}: " + " ".join(errors)[-600:]


class Ours:
    """The gradients of the first batch and the seconds of a step, with the run's graphs."""

    def __init__(self, run_dir: Path, batches: Sequence[Batch]) -> None:
        self._run_dir = run_dir
        flat = self._flat()
        self.gradients = _gradients(flat, batches[0])
        seconds = []
        for batch in batches[:6]:
            start = time.process_time()
            flat.step(batch)
            seconds.append(time.process_time() - start)
        self.seconds = float(np.median(seconds[1:]))

    def _flat(self) -> FlatRun:
        return FlatRun(GraphSet.load(self._run_dir / "graphs"), Adam(name="adamw", lr=RATE, weight_decay=DECAY))

    def gradients_of(self, module: nn.Module, batch: Batch) -> dict[str, np.ndarray]:
        """The gradients of a batch with the module's trained parameters instead of the file's."""
        flat = self._flat()
        trained = {entry.name for entry in flat.index if entry.tensor.group in ("decay", "no_decay")}
        for name, parameter in module.named_parameters():
            if name in trained:
                view = flat.view("parameters", name)
                view[...] = parameter.detach().numpy().reshape(view.shape)
        return _gradients(flat, batch)


def _gradients(flat: FlatRun, batch: Batch) -> dict[str, np.ndarray]:
    _, weight = flat.gradients(batch)
    trained = [e.name for e in flat.index if e.tensor.group in ("decay", "no_decay")]
    return {name: flat.view("gradients", name).astype(np.float64) / weight for name in trained}


def gradient_errors(ours: dict[str, np.ndarray], float32: Sequence[Reference], float64: Reference) -> dict[str, float]:
    """The error of each tensor's gradient as a multiple of its tolerance.

    `float32`: runs of PyTorch; for each tensor the one furthest from double precision counts.
    """
    exact = float64.gradients
    whole = np.sqrt(sum(float((g**2).sum()) for g in exact.values()))
    count = sum(g.size for g in exact.values())
    least = {n: FLOOR * whole * np.sqrt(g.size / count) or 1.0 for n, g in exact.items()}  # some have no elements
    scales = {n: max(float(np.linalg.norm(g)), least[n]) for n, g in exact.items()}
    own = {n: max(float(np.linalg.norm(r.gradients[n] - g)) for r in float32) / scales[n] for n, g in exact.items()}
    rounding = max(own.values())
    errors = {}
    for name, gradient in exact.items():
        if name not in ours:
            missing = float(np.linalg.norm(gradient)) > scales[name] * GRADIENT_TOLERANCE
            errors[f"{name} is not trained"] = float("inf") if missing else 0.0
            continue
        error = float(np.linalg.norm(ours[name].reshape(gradient.shape) - gradient)) / scales[name]
        relative = error / max(GRADIENT_TOLERANCE, 10 * own[name], 2 * rounding)
        errors[name] = relative if np.isfinite(relative) else float("inf")
    return errors


def survey(case: Case, folder: Path) -> dict[str, Any]:
    """The row of a case."""
    row: dict[str, Any] = {"case": case.name}
    batches = list(case.batches(STEPS))
    float32 = Reference(case, batches, torch.float32)
    row["torch_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    float64 = in_double_precision(case, batches)
    row |= {"own": distance(float32.losses, float64.losses), "torch_seconds": float32.seconds}
    model = folder / "model.onnx"
    try:
        export(case, model)
    except UserError as error:
        return row | {"result": "refused", "by": "export", "why": str(error)}
    except Exception as error:  # noqa: BLE001 - a traceback is a result, too
        return row | {"result": "crashed", "by": "export", "why": f"{type(error).__name__}: {error}"[:600]}
    try:
        losses, run_dir = run(case, model, batches)
    except UserError as error:
        events = folder / "run/events/rank-0000.jsonl"
        begun = events.exists() and '"step"' in events.read_text()
        return row | {"result": "failed" if begun else "refused", "by": "run", "why": str(error)}
    if fault := weights_fault(case, run_dir):
        return row | {"result": "failed", "by": "weights", "why": fault}
    row["bytes"] = int((folder / "peak").read_text()) * 1024
    ours = Ours(run_dir, batches)

    def losses_again(seed: int) -> Sequence[float]:
        again = folder / str(seed) / "model.onnx"
        export(case, again, seed)
        return run(case, again, batches)[0]

    def gradients_of(moved: nn.Module, batch: Batch, share: float) -> Arrays:
        return ours.gradients_of(moved, batch)

    judgement = judged(case, batches, (float32, float64), losses, ours.gradients, gradients_of, losses_again)
    return row | judgement | {"seconds": ours.seconds}


def judged(
    case: Case,
    batches: Sequence[Batch],
    references: tuple[Reference, Reference],
    losses: Sequence[float],
    gradients: Arrays,
    gradients_of: Callable[[nn.Module, Batch, float], Arrays],
    losses_again: Callable[[int], Sequence[float]],
) -> dict[str, Any]:
    """The verdict on a run by its losses and the gradients of its first batch, and the numbers that it rests on.

    `references`: PyTorch's runs in float32 and in double precision. `gradients_of` returns those of a batch with the
    parameters moved by a share, and `losses_again` the curve with those shaken by a seed; both where they are needed.
    """
    float32, float64 = references
    singles, own = [float32], distance(float32.losses, float64.losses)
    loss = nearest(losses, float32, float64)
    errors = gradient_errors(gradients, singles, float64)
    if verdict(loss, own, max(errors.values())) != "right":
        singles += [Reference(case, batches, torch.float32, seed) for seed in range(1, SHAKEN + 1)]
        own = max(distance(single.losses, float64.losses) for single in singles)
        errors = gradient_errors(gradients, singles, float64)
    for share in PLACES:
        if max(errors.values()) > 1:
            elsewhere = errors_at(case, gradients_of, batches, share)
            errors = {name: min(error, elsewhere[name]) for name, error in errors.items()}
    error, tensor = max((error, name) for name, error in errors.items())
    for seed in range(1, SHAKEN + 1):
        if error <= 1 and verdict(loss, own, error) != "right":
            loss = min(loss, nearest(losses_again(seed), float32, float64))
    return {"result": verdict(loss, own, error), "loss": loss, "own": own, "gradient": error, "tensor": tensor}


def weights_fault(case: Case, run_dir: Path) -> str:
    """Why the run's weights do not go back to the module; empty if they load strictly."""
    try:
        written = export_weights(RunDir(run_dir), None, "state_dict", None).path
        case.module().load_state_dict(torch.load(written, weights_only=True), strict=True)
    except (UserError, RuntimeError) as error:
        return str(error)[:600]
    return ""


def errors_at(
    case: Case, gradients_of: Callable[[nn.Module, Batch, float], Arrays], batches: Sequence[Batch], share: float
) -> dict[str, float]:
    """As `gradient_errors`, with the trained parameters moved."""
    few = batches[:2]
    moved = move(without_dropout(case.module()), share)
    singles = [Reference(case, few, torch.float32, seed, share) for seed in range(SHAKEN + 1)]
    return gradient_errors(gradients_of(moved, few[0], share), singles, in_double_precision(case, few, share))


def nearest(losses: Sequence[float], *references: Reference) -> float:
    """Distance of a curve from the nearest of several."""
    if len(losses) < STEPS:
        return float("inf")
    return min(distance(losses, reference.losses) for reference in references)


def verdict(loss: float, own: float, gradient: float) -> str:
    """`off` means right gradients, and a curve somewhat beyond twice PyTorch's own distance. NaN is wrong."""
    if not gradient <= 1 or not loss <= max(10 * LOSS_TOLERANCE, 10 * own):
        return "wrong"
    return "right" if loss <= max(LOSS_TOLERANCE, 2 * own) else "off"


def main() -> None:
    """Print the row of the case named."""
    from catalogue import case_of

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    print(json.dumps(survey(case_of(sys.argv[1]), Path(sys.argv[2]))))


if __name__ == "__main__":
    main()
