"""Distances from double precision: training through ortflow's graphs, and PyTorch's own run of a module."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import exporters
import numpy as np
import torch
from case import Batch, Case
from flat import FlatRun, graphs_of
from reference import OPTIMIZER

from ortflow.workflow.graph.types import LOSS_SUM, LOSS_WEIGHT
from ortflow.workflow.onnx_runtime import onnxruntime as ort

STEPS = 5
TOLERANCE = 3e-6
"""Of losses and gradients, where PyTorch's own distance from double precision is not larger."""


@dataclass(frozen=True)
class Distance:
    """Distances from double precision, relative to the largest value of each quantity where that is above 1."""

    what: str
    ours: float
    torch: float

    @property
    def wrong(self) -> bool:
        return not self.ours <= max(TOLERANCE, 3 * self.torch)


@dataclass(frozen=True)
class Trace:
    """Results of a run: the evaluation loss before it, the first gradients, the losses, the final norms."""

    evaluated: float
    gradients: dict[str, np.ndarray]
    losses: np.ndarray
    norms: dict[str, float]


def distances(case: Case, folder: Path, exporter: exporters.Exporter = exporters.for_training) -> list[Distance]:
    """One distance for each quantity that is compared."""
    single, double = torch_trace(case, torch.float32), torch_trace(case, torch.float64)
    ours = own_trace(case, folder, exporter)
    found = [
        Distance("evaluation", _far(ours.evaluated, double.evaluated), _far(single.evaluated, double.evaluated)),
        Distance("losses", _far(ours.losses, double.losses), _far(single.losses, double.losses)),
    ]
    for name, exact in double.gradients.items():
        mine = ours.gradients.get(name, np.zeros_like(exact))
        found.append(Distance(f"gradient of {name}", _far(mine, exact), _far(single.gradients[name], exact)))
    for name, norm in double.norms.items():
        if name in ours.norms and not case.is_free(name):
            found.append(Distance(f"norm of {name}", _far(ours.norms[name], norm) / 7, _far(single.norms[name], norm)))
    return found


def torch_trace(case: Case, dtype: torch.dtype) -> Trace:
    """PyTorch's own run, in a precision."""
    module = case.module().to(dtype)
    with torch.no_grad():
        evaluated = case.torch_loss(module.eval(), next(_cast(case, dtype))).item()
    module = case.module().to(dtype)
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": OPTIMIZER.weight_decay},
            {"params": [p for p in named.values() if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=OPTIMIZER.lr,
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.epsilon,
    )
    losses, gradients = [], {}
    for batch in _cast(case, dtype):
        optimizer.zero_grad()
        loss = case.torch_loss(module, batch)
        loss.backward()
        gradients = gradients or {n: p.grad.double().numpy().copy() for n, p in named.items() if p.grad is not None}
        optimizer.step()
        losses.append(loss.item())
    return Trace(evaluated, gradients, np.array(losses), {n: p.norm().item() for n, p in named.items()})


def _cast(case: Case, dtype: torch.dtype):
    kind = np.float64 if dtype == torch.float64 else np.float32
    for batch in case.batches(STEPS):
        yield {name: a.astype(kind) if a.dtype == np.float32 else a for name, a in batch.items()}


def own_trace(case: Case, folder: Path, exporter: exporters.Exporter) -> Trace:
    """ortflow's run."""
    path = folder / "model.onnx"
    exporter(case, case.module(), path)
    graphs = graphs_of(path, case.loss, OPTIMIZER, folder / "graphs", labels=case.labels)
    run = FlatRun(graphs, OPTIMIZER)
    batches = list(case.batches(STEPS))
    evaluated = _evaluated(graphs.eval, run, batches[0])
    module = case.module()
    losses, gradients = [], {}
    for batch in batches:
        if not gradients:
            _, weight = run.gradients(batch)
            for name, parameter in module.named_parameters():
                if name in run.index and parameter.requires_grad:
                    gradients[name] = run.view("gradients", name) / np.float64(weight)
        losses.append(run.step(batch))
    return Trace(evaluated, gradients, np.array(losses), dict(run.norms()))


def _evaluated(graph: Path, run: FlatRun, batch: Batch) -> float:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    feeds = {}
    for value in session.get_inputs():
        feeds[value.name] = batch[value.name] if value.name in batch else run.view("parameters", value.name)
    total, weight = session.run([LOSS_SUM, LOSS_WEIGHT], feeds)
    return float(total) / float(weight)


def _far(value: np.ndarray | float, exact: np.ndarray | float) -> float:
    value, exact = np.asarray(value, np.float64), np.asarray(exact, np.float64)
    return float(np.max(np.abs(value - exact), initial=0) / max(1e-2, np.max(np.abs(exact), initial=0)))
