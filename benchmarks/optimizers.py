"""Time of an optimizer's step over flat buffers on the CPU: ortflow's kernels, standard operators, and PyTorch.

    python benchmarks/optimizers.py [--threads 1 --width 384 --rounds 15]

The parameters are those of a GPT with 6 layers; the same numbers for all. PyTorch's are its fused ones; it has no LAMB,
which is a loop over the parameters then, as its users write it. All take turns, because a machine's speed drifts.
Prints medians and the median of the rounds' ratios, and how far the parameters are apart at the end, to the largest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.kernels.graph import with_kernels
from ortflow.workflow.kernels.library import find_library
from ortflow.workflow.layout import FlatIndex, Tensor
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.optim.graph import optimizer_graph
from ortflow.workflow.optim.segments import segments
from ortflow.workflow.spec.optimizers import Adam, Lamb, Optimizer, Sgd, moments

RATE, DECAY, LAYERS = 1e-3, 0.1, 6
RULES: dict[str, Optimizer] = {
    "adamw": Adam(name="adamw", lr=RATE, weight_decay=DECAY),
    "lamb": Lamb(name="lamb", lr=RATE, weight_decay=DECAY),
    "sgd": Sgd(name="sgd", lr=RATE, weight_decay=DECAY),
    "sgd with momentum": Sgd(name="sgd", lr=RATE, weight_decay=DECAY, momentum=0.9),
    "sgd, Nesterov": Sgd(name="sgd", lr=RATE, weight_decay=DECAY, momentum=0.9, nesterov=True),
}


def index_of(width: int) -> FlatIndex:
    """Matrices and vectors as transformers have them."""
    shapes: dict[str, tuple[int, ...]] = {"table": (8192, width)}
    for layer in range(LAYERS):
        for name, shape in (("qkv", (width, 3 * width)), ("out", (width, width)), ("in", (width, 4 * width))):
            shapes[f"{layer}.{name}"], shapes[f"{layer}.{name}.bias"] = shape, shape[1:]
        shapes[f"{layer}.down"], shapes[f"{layer}.norm"] = (4 * width, width), (width,)
    return FlatIndex.place(Tensor(n, s, "decay" if len(s) > 1 else "no_decay") for n, s in shapes.items())


class Ours:
    """The graph in place on flat buffers, as a rank binds it."""

    def __init__(self, rule: Optimizer, index: FlatIndex, start: np.ndarray, threads: int, kernels: bool) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.force_spinning_stop", "1")
        parts = segments(rule, index)
        model = optimizer_graph(rule, parts, kernels=kernels)
        if kernels:
            model = with_kernels(model)
            options.register_custom_ops_library(str(find_library().path))
        content = compose(model).SerializeToString()
        self.session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        self.binding = self.session.io_binding()
        self.buffers = {name: np.zeros(index.size, np.float32) for name in ("gradients", *moments(rule))}
        self.buffers["parameters"] = start.copy()
        self.step, self.rate = np.zeros(1, np.int64), np.full(1, RATE, np.float32)
        for name, array in (("learning_rate", self.rate), ("step", self.step)):
            self.binding.bind_input(name, "cpu", 0, array.dtype, (1,), array.ctypes.data)
        for i, part in enumerate(parts):
            for name, buffer in self.buffers.items():
                place = ("cpu", 0, np.float32, (part.count,), buffer.ctypes.data + 4 * part.start)
                self.binding.bind_input(f"{name}.{i}", *place)
                if name != "gradients":
                    self.binding.bind_output(f"{name}.{i}.out", *place)

    def __call__(self, gradients: np.ndarray) -> None:
        self.buffers["gradients"][:] = gradients
        self.step += 1
        self.session.run_with_iobinding(self.binding)

    def parameters(self) -> np.ndarray:
        return self.buffers["parameters"]


class Theirs:
    """PyTorch's optimizer on parameters that lie in one buffer."""

    def __init__(self, rule: Optimizer, index: FlatIndex, start: np.ndarray) -> None:
        self.whole, self.gradients = torch.from_numpy(start.copy()), torch.zeros(index.size)
        groups: dict[str, list[torch.nn.Parameter]] = {"decay": [], "no_decay": []}
        for entry in index:
            parameter = torch.nn.Parameter(self.whole[entry.offset : entry.end].view(entry.tensor.shape))
            parameter.grad = self.gradients[entry.offset : entry.end].view(entry.tensor.shape)
            groups[entry.tensor.group].append(parameter)
        named = [
            {"params": groups["decay"], "weight_decay": DECAY},
            {"params": groups["no_decay"], "weight_decay": 0.0},
        ]
        self.optimizer: torch.optim.Optimizer
        if isinstance(rule, Sgd):
            self.optimizer = torch.optim.SGD(named, lr=RATE, momentum=rule.momentum, nesterov=rule.nesterov, fused=True)
        elif isinstance(rule, Lamb):
            self.optimizer = TorchLamb(named, {"lr": RATE, "betas": rule.betas, "eps": rule.epsilon})
        else:
            self.optimizer = torch.optim.AdamW(named, lr=RATE, betas=rule.betas, eps=rule.epsilon, fused=True)

    def __call__(self, gradients: np.ndarray) -> None:
        self.gradients.numpy()[:] = gradients
        self.optimizer.step()

    def parameters(self) -> np.ndarray:
        return self.whole.numpy()


class TorchLamb(torch.optim.Optimizer):
    """Algorithm 2 of You et al. 2020, in place, parameter by parameter."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (one, two), rate, decay = group["betas"], group["lr"], group["weight_decay"]
            for w in group["params"]:
                state = self.state[w]
                if not state:
                    state.update(t=0, m=torch.zeros_like(w), v=torch.zeros_like(w))
                state["t"] += 1
                m = state["m"].mul_(one).add_(w.grad, alpha=1 - one)
                v = state["v"].mul_(two).addcmul_(w.grad, w.grad, value=1 - two)
                u = (v / (1 - two ** state["t"])).sqrt_().add_(group["eps"])
                u = (m / (1 - one ** state["t"])).div_(u).add_(w, alpha=decay)
                norms = w.norm(), u.norm()
                ratio = float(norms[0] / norms[1]) if norms[0] > 0 and norms[1] > 0 else 1.0
                w.add_(u, alpha=-rate * ratio)


def measure(name: str, rule: Optimizer, options: argparse.Namespace) -> None:
    """One line of the table."""
    index, random = index_of(options.width), np.random.default_rng(0)
    start, gradients = np.zeros((2, index.size), np.float32)
    for entry in index:
        start[entry.offset : entry.end] = 0.02 * random.standard_normal(entry.tensor.count)
        gradients[entry.offset : entry.end] = random.standard_normal(entry.tensor.count)
    sides: dict[str, Callable[[np.ndarray], None]] = {
        "torch": Theirs(rule, index, start),
        "kernels": Ours(rule, index, start, options.threads, kernels=True),
        "composed": Ours(rule, index, start, options.threads, kernels=False),
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(options.rounds):
        for side, step in sides.items():
            step(gradients)
            begun = time.perf_counter()
            step(gradients)
            times[side].append(time.perf_counter() - begun)
    middle = {side: 1e3 * statistics.median(found) for side, found in times.items()}
    expected, apart = sides["torch"].parameters(), 0.0  # type: ignore[attr-defined]
    ratios = []
    for side in ("kernels", "composed"):
        ratios.append(statistics.median(a / b for a, b in zip(times[side], times["torch"], strict=True)))
        found = sides[side].parameters()  # type: ignore[attr-defined]
        apart = max(apart, float(np.abs(found - expected).max() / np.abs(expected).max()))
    print(
        f"{name:<20}{middle['torch']:>9.2f}{middle['kernels']:>9.2f}{ratios[0]:>8.2f}{middle['composed']:>10.2f}"
        f"{ratios[1]:>8.2f}{apart:>12.1e}",
        flush=True,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, value in (("threads", 1), ("width", 384), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{options.threads} threads, {index_of(options.width).size:,} parameters, kernels: {find_library().note}")
    print(f"{'milliseconds':<20}{'torch':>9}{'kernels':>9}{'ratio':>8}{'composed':>10}{'ratio':>8}{'apart':>12}")
    for name, rule in RULES.items():
        measure(name, rule, options)


if __name__ == "__main__":
    main()
