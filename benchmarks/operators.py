"""Time of single operators, forward and backward, on the CPU: ortflow against PyTorch.

    python benchmarks/operators.py [--threads 2 --rounds 15 --only pool --clock cpu]

The same data in both, fp32. The loss is the sum of the output times a tensor, so that the gradient is no constant; both
sides pay for that product. Gradients have to agree before anything is timed. Both take turns, because a machine's speed
drifts. Prints medians and the median of the rounds' ratios, with ortflow's kernels and without the compiled library.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch.nn import functional

from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.autodiff.expand import make_differentiable
from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.optimize import rewrites
from ortflow.workflow.kernels.graph import with_kernels
from ortflow.workflow.kernels.library import find_library
from ortflow.workflow.onnx_runtime import onnxruntime

TOLERANCE = 2e-5
"""Of gradients, to the largest element."""


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Case:
    """An operator of ONNX, and the same in PyTorch: `x` and the parameters are differentiated."""

    name: str
    x: tuple[int, ...]
    operator: str
    peer: Callable[..., torch.Tensor]
    attributes: dict[str, Any] = field(default_factory=dict)
    parameters: tuple[tuple[int, ...], ...] = ()
    constants: tuple[tuple[int, ...], ...] = ()
    """Shapes of further inputs that are no parameters: running mean 0 and variance 1."""
    outputs: int = 1
    nodes: tuple[onnx.NodeProto, ...] = ()
    """What computes `y` from `x` and the further inputs `c0`, `c1`, … if that is more than one operator."""
    integers: dict[str, int] = field(default_factory=dict)
    """Constants that `nodes` read, as vectors of one element."""


def max_pool(name: str, x: tuple[int, ...], kernel: int, stride: int, pad: int = 0) -> Case:
    window = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4}
    return Case(name, x, "MaxPool", lambda x: functional.max_pool2d(x, kernel, stride, pad), window)


def average_pool(name: str, x: tuple[int, ...], kernel: int, stride: int, pad: int = 0) -> Case:
    window = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4, "count_include_pad": 1}
    return Case(name, x, "AveragePool", lambda x: functional.avg_pool2d(x, kernel, stride, pad), window)


def batch_norm(name: str, x: tuple[int, ...]) -> Case:
    def peer(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return functional.batch_norm(x, mean.clone(), variance.clone(), scale, bias, training=True)

    vector = (x[1],)
    mean, variance = torch.zeros(vector), torch.ones(vector)
    return Case(
        name,
        x,
        "BatchNormalization",
        peer,
        {"training_mode": 1, "momentum": 0.0},
        (vector, vector),
        (vector, vector),
        3,
    )


def group_norm(name: str, x: tuple[int, ...], groups: int) -> Case:
    def peer(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return functional.group_norm(x, groups, scale, bias)

    return Case(name, x, "GroupNormalization", peer, {"num_groups": groups}, ((x[1],), (x[1],)))


def instance_norm(name: str, x: tuple[int, ...]) -> Case:
    def peer(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return functional.instance_norm(x, weight=scale, bias=bias)

    return Case(name, x, "InstanceNormalization", peer, {}, ((x[1],), (x[1],)))


def rms_norm(name: str, x: tuple[int, ...]) -> Case:
    def peer(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], scale, 1e-6)

    return Case(name, x, "SimplifiedLayerNormalization", peer, {"axis": -1, "epsilon": 1e-6}, (x[-1:],))


def convolution(name: str, x: tuple[int, ...], out: int, kernel: int, stride: int, pad: int, group: int = 1) -> Case:
    def peer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(x, weight, None, stride, pad, 1, group)

    window = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4, "group": group}
    return Case(name, x, "Conv", peer, window, ((out, x[1] // group, kernel, kernel),))


def rotary(name: str, x: tuple[int, int, int, int]) -> Case:
    """Of [batch, tokens, heads, size], as transformers writes it."""
    half, table = x[3] // 2, (x[1], x[3])

    def peer(x: torch.Tensor) -> torch.Tensor:
        t = x.transpose(1, 2)
        a, b = t[..., :half], t[..., half:]
        return t * torch.zeros(table) + torch.cat([-b, a], -1) * torch.ones(table)

    numbers = {"zero": 0, "half": half, "end": 2 * half, "last": 3}
    nodes = []
    for operator, given, made, attributes in (
        ("Transpose", ["x"], "t", {"perm": [0, 2, 1, 3]}),
        ("Slice", ["t", "zero", "half", "last"], "a", {}),
        ("Slice", ["t", "half", "end", "last"], "b", {}),
        ("Neg", ["b"], "n", {}),
        ("Concat", ["n", "a"], "turned", {"axis": -1}),
        ("Mul", ["t", "c0"], "along", {}),
        ("Mul", ["turned", "c1"], "across", {}),
        ("Add", ["along", "across"], "y", {}),
    ):
        nodes.append(helper.make_node(operator, given, [made], made, **attributes))
    return Case(name, x, "rotary", peer, constants=(table, table), nodes=tuple(nodes), integers=numbers)


CASES = (
    max_pool("max pool 3 x 3 / 2, 64 at 112 (resnet)", (4, 64, 112, 112), 3, 2, 1),
    max_pool("max pool 2 x 2 / 2, 64 at 112 (vgg)", (4, 64, 112, 112), 2, 2),
    max_pool("max pool 3 x 3 / 1, 192 at 28 (googlenet)", (4, 192, 28, 28), 3, 1, 1),
    average_pool("average pool 2 x 2 / 2, 128 at 56 (densenet)", (4, 128, 56, 56), 2, 2),
    average_pool("average pool 3 x 3 / 1, 192 at 35 (inception)", (4, 192, 35, 35), 3, 1, 1),
    batch_norm("batch norm 64 at 56", (8, 64, 56, 56)),
    batch_norm("batch norm 512 at 7", (8, 512, 7, 7)),
    group_norm("group norm 32 of 320 at 32 (stable diffusion)", (2, 320, 32, 32), 32),
    group_norm("group norm 8 of 64 at 64 (U-Net)", (4, 64, 64, 64), 8),
    group_norm("group norm 32 of 1280 at 8", (2, 1280, 8, 8), 32),
    group_norm("group norm 32 of 1280 at 4", (2, 1280, 4, 4), 32),
    instance_norm("instance norm 64 at 64", (4, 64, 64, 64)),
    instance_norm("instance norm 256 at 14", (4, 256, 14, 14)),
    rotary("rotary positions 8 x 64, 512 tokens", (4, 512, 8, 64)),
    rms_norm("RMS norm 512", (4, 512, 512)),
    rms_norm("RMS norm 2048", (2, 1024, 2048)),
    convolution("convolution 3 x 3, 64 at 56", (4, 64, 56, 56), 64, 3, 1, 1),
    convolution("depthwise 3 x 3, 96 at 56", (4, 96, 56, 56), 96, 3, 1, 1, 96),
    convolution("depthwise 3 x 3 / 2, 96 at 112 (mobilenet)", (4, 96, 112, 112), 96, 3, 2, 1, 96),
    convolution("depthwise 5 x 5 / 2, 240 at 28 (efficientnet)", (4, 240, 28, 28), 240, 5, 2, 2, 240),
    convolution("depthwise 7 x 7, 96 at 56 (convnext)", (4, 96, 56, 56), 96, 7, 1, 3, 96),
)


def graph_of(case: Case) -> onnx.ModelProto:
    """The operator and the loss, differentiated."""
    given = {"x": case.x, **{f"p{i}": dims for i, dims in enumerate(case.parameters)}}
    fixed = [numpy_helper.from_array(np.full(dims, i, np.float32), f"c{i}") for i, dims in enumerate(case.constants)]
    names = [*given, *(tensor.name for tensor in fixed)]
    fixed += [numpy_helper.from_array(np.array([number]), name) for name, number in case.integers.items()]
    outputs = ["y", *(f"y{i}" for i in range(1, case.outputs))]
    computing = case.nodes or [helper.make_node(case.operator, names, outputs, case.operator, **case.attributes)]
    nodes = [
        *computing,
        helper.make_node("Mul", ["y", "seed"], ["product"], "product"),
        helper.make_node("ReduceSum", ["product"], ["loss"], "loss", keepdims=0),
    ]
    shape = tuple(torch_run(case, [torch.zeros(dims) for dims in given.values()]).shape)
    inputs = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, dims) for n, dims in (*given.items(), ("seed", shape))
    ]
    kept = [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])]
    kept += [helper.make_tensor_value_info(name, TensorProto.FLOAT, case.parameters[0]) for name in outputs[1:]]
    graph = helper.make_graph(nodes, "operator", inputs, kept, fixed)
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid(MICROSOFT, 1)], ir_version=9
    )
    model = onnx.shape_inference.infer_shapes(model)
    forward, _ = make_differentiable(model, list(given), "loss")
    rewrites.before(forward.graph)
    made, _ = differentiate(forward, list(given), "loss")
    return made


def torch_run(case: Case, values: list[torch.Tensor]) -> torch.Tensor:
    return case.peer(*values)


def session_of(model: onnx.ModelProto, threads: int, kernels: bool) -> onnxruntime.InferenceSession:
    """As a rank opens it."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.enable_mem_pattern = options.enable_mem_reuse = False
    options.log_severity_level = 3
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if kernels:
        options.register_custom_ops_library(str(find_library().path))
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def ours(case: Case, arrays: dict[str, np.ndarray], threads: int, kernels: bool) -> Callable[[], dict[str, np.ndarray]]:
    """Runs the graph; returns the gradients."""
    made = graph_of(case)
    if kernels:
        made = with_kernels(made)
    rewrites.after(made.graph)
    session = session_of(compose(made), threads, kernels)
    wanted = [f"{name}_grad" for name in arrays if name != "seed"]
    binding = session.io_binding()
    for name, array in arrays.items():
        binding.bind_cpu_input(name, array)
    for name in wanted:
        binding.bind_output(name, "cpu")

    def step() -> dict[str, np.ndarray]:
        session.run_with_iobinding(binding)
        return {name: value.numpy() for name, value in zip(wanted, binding.get_outputs(), strict=True)}

    return step


def theirs(case: Case, arrays: dict[str, np.ndarray]) -> Callable[[], dict[str, np.ndarray]]:
    """PyTorch's forward and backward pass."""
    values = {name: torch.from_numpy(array).requires_grad_(name != "seed") for name, array in arrays.items()}
    leaves = [value for name, value in values.items() if name != "seed"]

    def step() -> dict[str, np.ndarray]:
        for leaf in leaves:
            leaf.grad = None
        (torch_run(case, leaves) * values["seed"]).sum().backward()
        return {f"{name}_grad": value.grad.numpy() for name, value in values.items() if value.grad is not None}

    return step


def measure(case: Case, threads: int, rounds: int, clock: Callable[[], float]) -> None:
    """One line of the table."""
    random = np.random.default_rng(0)
    shapes = {"x": case.x, **{f"p{i}": dims for i, dims in enumerate(case.parameters)}}
    arrays = {name: random.standard_normal(dims).astype(np.float32) for name, dims in shapes.items()}
    whole = torch_run(case, [torch.from_numpy(array) for array in arrays.values()])
    arrays["seed"] = random.standard_normal(tuple(whole.shape)).astype(np.float32)
    sides = {
        "kernels": ours(case, arrays, threads, kernels=True),
        "composed": ours(case, arrays, threads, kernels=False),
        "torch": theirs(case, arrays),
    }
    expected = sides["torch"]()
    for name in ("kernels", "composed"):
        for key, found in sides[name]().items():
            off = np.abs(found - expected[key]).max() / np.abs(expected[key]).max()
            assert off < TOLERANCE, (case.name, name, key, off)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, step in sides.items():
            step()
            begun = clock()
            step()
            times[name].append(clock() - begun)
    ratios = [
        statistics.median(mine / peer for mine, peer in zip(times[name], times["torch"], strict=True))
        for name in ("kernels", "composed")
    ]
    middle = [1e3 * statistics.median(times[name]) for name in ("torch", "kernels", "composed")]
    print(
        f"{case.name:<50}{middle[0]:>9.2f}{middle[1]:>9.2f}{ratios[0]:>8.2f}{middle[2]:>10.2f}{ratios[1]:>8.2f}",
        flush=True,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--only", default="", help="part of a name")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    print(
        f"{asked.threads} threads, torch {torch.__version__}, onnxruntime {onnxruntime.__version__}, kernels:"
        f" {find_library().note}"
    )
    print(f"{'milliseconds':<50}{'torch':>9}{'kernels':>9}{'ratio':>8}{'composed':>10}{'ratio':>8}")
    for case in CASES:
        if asked.only in case.name:
            measure(case, asked.threads, asked.rounds, CLOCKS[asked.clock])


if __name__ == "__main__":
    main()
