"""Speed of our CUDA kernels, against PyTorch's on the same GPU in the same run.

    python benchmarks/cuda_operators.py [--only norm --type bf16 --rounds 5 --no-compile]

Each kernel works in turn on as many sets of tensors as do not fit into the GPU's cache together. All calls of a round
are queued while the GPU waits, so that the host's time does not count. Prints the median time of a call, bytes that
have to be read and written over that time, and PyTorch's time, eager and compiled, as multiples of ours: above 1 we are
faster. Results have to agree before anything is timed.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from onnx import TensorProto
from torch.nn import functional

from ortflow.workflow.cuda.nvrtc import Compiler
from ortflow.workflow.cuda.operators import Tensor
from ortflow.workflow.cuda.table import OPERATORS

_KINDS = {
    torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16, torch.bfloat16: TensorProto.BFLOAT16,
    torch.int64: TensorProto.INT64,
}  # fmt: skip
_TYPES = {int(kind): torch_type for torch_type, kind in _KINDS.items()}
_CACHE = 256 << 20
_CALLS = 20
_WAIT = 400_000_000
"""Cycles for which the GPU waits while calls are queued."""


class Call:
    """One execution of one node, over PyTorch's memory."""

    compiler: Compiler
    kept: torch.Tensor | None = None
    zeros: torch.Tensor | None = None

    def __init__(self, inputs: Sequence[torch.Tensor], types: Sequence[torch.dtype]) -> None:
        self.inputs = [Tensor(one.data_ptr(), tuple(one.shape), int(_KINDS[one.dtype])) for one in inputs]
        self.types = [int(_KINDS[one]) for one in types]
        self.made: dict[int, torch.Tensor] = {}

    @property
    def stream(self) -> int:
        return int(torch.cuda.current_stream().cuda_stream)

    def given(self, place: int) -> Tensor:
        return self.inputs[place]

    def output(self, place: int, shape: Sequence[int]) -> int:
        self.made[place] = torch.empty(tuple(shape), dtype=_TYPES[self.types[place]], device="cuda")
        return self.made[place].data_ptr()

    def scratch(self, size: int) -> int:
        if Call.kept is None or Call.kept.numel() < size:
            Call.kept = torch.empty(size, dtype=torch.uint8, device="cuda")
        return Call.kept.data_ptr()

    def counters(self, count: int) -> int:
        if Call.zeros is None or Call.zeros.numel() < count:
            Call.zeros = torch.zeros(count, dtype=torch.int32, device="cuda")
        return Call.zeros.data_ptr()

    def launch(
        self, source: str, function: str, grid: Any, block: Any, *arguments: Any, shared: int = 0, options: Any = ()
    ) -> None:
        kernel = self.compiler.function(source, function, options)
        grids, blocks = (([*size, 1, 1] if not isinstance(size, int) else [size, 1, 1])[:3] for size in (grid, block))
        values = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(value) for value in arguments))
        stream = ctypes.c_void_p(self.stream)
        code = self.compiler.driver.cuLaunchKernel(kernel, *grids, *blocks, shared, stream, values, None)
        if code:
            raise RuntimeError(f"CUDA cannot launch {function} (error {code})")


@dataclass(frozen=True)
class Case:
    """An operator of ours on tensors, and the same in PyTorch."""

    name: str
    operator: str
    attributes: dict[str, Any]
    tensors: Callable[[], Sequence[torch.Tensor]]
    types: tuple[torch.dtype, ...]
    """Of the outputs."""
    peer: Callable[..., Any]
    """Of the tensors; what it makes first is compared with our first output."""
    bytes: int
    prepare: Callable[..., Callable[[], Any]] | None = None
    """Of the tensors: the peer of a gradient, whose forward pass is not timed; with `peer` for the forward pass."""


def cases(half: torch.dtype) -> Iterator[Case]:
    size, fp32 = half.itemsize, torch.float32

    def normal(*dims: int, dtype: torch.dtype = half) -> torch.Tensor:
        return torch.randn(dims, device="cuda").to(dtype)

    for rows, width in ((16384, 768), (8192, 4096), (16384, 769)):

        def tensors(rows: int = rows, width: int = width) -> Sequence[torch.Tensor]:
            return normal(rows, width), normal(width, dtype=fp32), normal(width, dtype=fp32)

        def layer_norm(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return functional.layer_norm(x, x.shape[-1:], scale.to(x.dtype), bias.to(x.dtype))

        name = f"layer norm {rows} x {width}"
        types = (half, fp32, fp32)
        yield Case(name, "LayerNormalization", {}, tensors, types, layer_norm, 2 * rows * width * size)

        def with_gradient(rows: int = rows, width: int = width) -> Sequence[torch.Tensor]:
            x, scale = normal(rows, width), normal(width, dtype=fp32)
            mean, variance = x.float().mean(-1, keepdim=True), x.float().var(-1, correction=0, keepdim=True)
            return normal(rows, width), x, scale, mean, (variance + 1e-5).rsqrt()

        def backward(forward: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Callable[[], Any]:
            dy, x, scale = tensors[0], tensors[1].detach().requires_grad_(), tensors[2].to(half).requires_grad_()
            bias = torch.zeros_like(scale).requires_grad_()
            y = forward(x, scale, bias)
            return lambda: torch.autograd.grad(y, (x, scale, bias), dy, retain_graph=True)

        yield Case(f"{name}, gradient", "LayerNormalizationGrad", {}, with_gradient, types, layer_norm,
                   3 * rows * width * size, backward)  # fmt: skip
    for rows, classes in ((16384, 50257), (16384, 50304), (65536, 1000)):

        def scores(rows: int = rows, classes: int = classes) -> Sequence[torch.Tensor]:
            return torch.randint(0, classes, (rows,), device="cuda"), normal(rows, classes)

        def cross_entropy(labels: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(scores.float(), labels, reduction="sum")

        name, count = f"cross-entropy {rows} x {classes}", rows * classes * size
        yield Case(name, "CrossEntropy", {}, scores, (fp32, fp32), cross_entropy, count)

        def with_logarithms(scores: Callable[[], Sequence[torch.Tensor]] = scores) -> Sequence[torch.Tensor]:
            labels, x = scores()
            lse = torch.cat([part.float().logsumexp(-1) for part in x.split(1024)])
            return labels, torch.ones((), device="cuda"), x, lse

        def backward_of_loss(forward: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Callable[[], Any]:
            labels, one, x = tensors[0], tensors[1], tensors[2].detach().requires_grad_()
            loss = forward(labels, x)
            return lambda: torch.autograd.grad(loss, (x,), one, retain_graph=True)

        yield Case(f"{name}, gradient", "CrossEntropyGrad", {}, with_logarithms, (half,), cross_entropy, 2 * count,
                   backward_of_loss)  # fmt: skip
    for rows, width in ((16384, 3072), (16384, 768), (16384, 50257), (8, 786432)):
        yield Case(
            f"column sums {rows} x {width}", "ColumnSums", {}, lambda rows=rows, width=width: (normal(rows, width),),
            (fp32,), lambda x: x.sum(0, dtype=fp32), rows * width * size,
        )  # fmt: skip
    for rows, entries, width in ((50257, 16384, 768), (1024, 16384, 768), (2, 16384, 768), (128256, 8192, 4096)):

        def look_up(rows: int = rows, entries: int = entries, width: int = width) -> Sequence[torch.Tensor]:
            # As words are distributed: the frequent ones have low numbers.
            places = (torch.rand(entries, device="cuda") ** 4 * rows).long().clamp(max=rows - 1)
            return places, normal(entries, width)

        def embedding(places: torch.Tensor, gradient: torch.Tensor, rows: int = rows) -> torch.Tensor:
            return torch.ops.aten.embedding_dense_backward(gradient, places, rows, -1, False)

        name = f"table {rows} x {width}, {entries} places"
        count = (rows + entries) * width * size
        yield Case(name, "TableGrad", {"rows": rows}, look_up, (half,), embedding, count)
    for dims in ((4, 32, 2048, 64), (4, 4, 2048, 64)):

        def rotated(dims: tuple[int, ...] = dims) -> Sequence[torch.Tensor]:
            batch, heads, tokens, width = dims
            angles = torch.rand(1, 1, tokens, width, device="cuda")
            return normal(batch, tokens, heads, width), angles.cos(), angles.sin()

        def rotary(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
            x = x.transpose(1, 2)
            a, b = x.chunk(2, -1)
            return (x * cosine.to(x.dtype) + torch.cat([-b, a], -1) * sine.to(x.dtype)).contiguous()

        yield Case(f"rotary positions {dims}", "Rotary", {"tokens_first": 1}, rotated, (half,), rotary,
                   2 * math.prod(dims) * size)  # fmt: skip
    for dims in ((8, 12, 1024, 1024), (64, 12, 197, 197)):
        count = math.prod(dims) * size

        def attention(dims: tuple[int, ...] = dims) -> Sequence[torch.Tensor]:
            return normal(*dims), normal(*dims[-2:])

        yield Case(f"softmax {dims}, mask", "Softmax", {}, attention, (half,),
                   lambda x, mask: functional.softmax(x + mask, -1), 2 * count)  # fmt: skip

        def weights(dims: tuple[int, ...] = dims) -> Sequence[torch.Tensor]:
            return normal(*dims), functional.softmax(normal(*dims), -1)

        def softmax_gradient(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype)

        yield Case(f"softmax {dims}, gradient", "SoftmaxGrad", {}, weights, (half,), softmax_gradient, 3 * count)


def agree(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    ours, theirs = ours.float().reshape(theirs.shape), theirs.float()
    off = float((ours - theirs).abs().max() / theirs.abs().max())
    if not off < 2e-2:
        raise SystemExit(f"{name}: results differ by {off} of the largest")


def time_of(calls: Sequence[Callable[[], Any]], rounds: int) -> float:
    """Microseconds of a call."""
    for one in calls:
        one()
    found = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(_WAIT)
        begin.record()
        for number in range(_CALLS):
            calls[number % len(calls)]()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1000 / _CALLS)
    return statistics.median(found)


def measure(case: Case, rounds: int, *, compiled: bool) -> str:
    copies = max(1, min(8, math.ceil(_CACHE / case.bytes)))
    sets = [case.tensors() for _ in range(copies)]
    operator = OPERATORS[case.operator](case.attributes)

    def ours(tensors: Sequence[torch.Tensor]) -> Call:
        call = Call(tensors, case.types)
        operator.run(call)  # type: ignore[arg-type]
        return call

    def theirs(forward: Callable[..., Any]) -> list[Callable[[], Any]]:
        if case.prepare is not None:
            return [case.prepare(forward, tensors) for tensors in sets]
        return [lambda tensors=tensors: forward(*tensors) for tensors in sets]  # type: ignore[misc]

    peers = {"eager": case.peer, **({"compiled": torch.compile(case.peer, dynamic=False)} if compiled else {})}
    mine = time_of([lambda tensors=tensors: ours(tensors) for tensors in sets], rounds)  # type: ignore[misc]
    words = [f"{case.name:45} {mine:9.1f} us {case.bytes / mine / 1e3:7.0f} GB/s"]
    result = ours(sets[0]).made[0]
    for name, forward in peers.items():
        try:
            calls = theirs(forward)
            first = calls[0]()
            agree(case.name, result, first[0] if isinstance(first, tuple) else first)
            del first
            words.append(f"{name} {time_of(calls, rounds) / mine:6.2f}")
            del calls
        except torch.OutOfMemoryError:
            words.append(f"{name} out of memory")
    return "  ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a name")
    parser.add_argument("--type", default="fp16", choices=("fp16", "bf16", "fp32"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-compile", action="store_true", help="against PyTorch's eager kernels alone")
    given = parser.parse_args()
    torch.manual_seed(0)
    Call.compiler = Compiler(torch.cuda.get_device_capability())
    print(f"{torch.cuda.get_device_name()}, {given.type}, PyTorch {torch.__version__}: its time as a multiple of ours")
    half = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[given.type]
    for case in cases(half):
        if given.only in case.name:
            torch._dynamo.reset()
            print(measure(case, given.rounds, compiled=not given.no_compile), flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
