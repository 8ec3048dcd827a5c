"""What ORTModule does with captured graphs, with graphs on a CPU that are repeated on the same memory as CUDA's are.

tests/cuda has the same on GPUs. Here, a launch runs the session again: it reads the addresses and writes the outputs of
the run that was captured, whatever they are by now.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
from fake_cuda import FakeCuda
from ortmodule_models import Gpt

from ortflow.torch import ORTModule, captured, leases, plans, runtime
from ortflow.torch.captured import CapturedGraph
from ortflow.torch.execution import Graph
from ortflow.torch.half_weights import HalfWeights
from ortflow.torch.memory import tensor_over
from ortflow.workflow.device import capture, choice
from ortflow.workflow.device.capture import WARM
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.device.cudart import Runtime
from ortflow.workflow.sessions.session import Sessions

pytestmark = pytest.mark.torch


class Stream:
    """A stream on which all has run."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    device = torch.device("cpu")


class Repeated:
    """In place of the one that captures CUDA graphs: the same decisions, on a CPU."""

    def __init__(self, device: Any, name: str, queue: Callable[[], None], note: Any, obstacle: str) -> None:
        self._queue, self._owner = queue, queue.__self__  # type: ignore[attr-defined]
        self._seen: Any = None
        self._times = 0
        self._run: Any = None
        self._outputs: list[Any] = []
        self.launches = 0
        self.obstacle: str | None = obstacle or None

    @property
    def captured(self) -> bool:
        return self._run is not None

    def run(self, memory: Any) -> None:
        if self.captured and memory == self._seen:
            self._launch()
            return
        self._queue()
        if self.captured:
            return
        self._times = self._times + 1 if memory == self._seen else 1
        self._seen = memory
        if self._times > WARM:
            self._run = self._owner._queued[-1].binding
            self._outputs = [tensor_over(value, torch.device("cpu")) for value in self._run.get_outputs()]

    def _launch(self) -> None:
        self.launches += 1
        graph = self._owner._graph
        graph._session._sess.run_with_iobinding(self._run, graph._options)
        for there, value in zip(self._outputs, self._run.get_outputs(), strict=True):
            there.copy_(tensor_over(value, torch.device("cpu")))

    def forget(self) -> None:
        self._run, self._times, self._outputs = None, 0, []


class Device:
    """A GPU that is none."""

    kind, index, stream, capturing = "cuda", 0, 0, False


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """ORTModule on a CPU with captured graphs."""
    monkeypatch.setattr(captured, "Repeated", Repeated)
    for name in ("ExternalStream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    opened = plans.Plans._open

    def open_captured(self: Any, pair: Any, threads: int) -> Any:
        plan = opened(self, pair, threads)
        if pair.backward is None or not self._settings.cuda_graphs:
            return plan
        stable = {*self._traced.tensors, *pair.kept, *pair.halves} - {*self.forward.moved}
        graphs = [CapturedGraph(each, Device(), "graph", stable, "") for each in (plan.forward, plan.backward)]  # type: ignore[arg-type]
        return replace(plan, forward=graphs[0], backward=graphs[1])

    monkeypatch.setattr(plans.Plans, "_open", open_captured)
    yield
    assert not [lease for lease in leases._leases if lease.pending]


def tokens() -> Any:
    return torch.randint(0, 61, (4, 32))


def pair_of(**keywords: Any) -> tuple[Any, Any]:
    eager = Gpt(width=64)
    return eager, ORTModule(copy.deepcopy(eager), cuda_graphs=True, **keywords)


def loss_of(module: Any, batch: Any) -> Any:
    return module(batch, batch)[1]


def plan_of(module: Any) -> Any:
    (plan,) = [plan for each in module._engine._structures.values() for one in each for plan in one._known.values()]
    return plan


def check_gradients(module: Any, eager: Any, where: Any) -> None:
    for mine, other in zip(module.parameters(), eager.parameters(), strict=True):
        assert (mine.grad - other.grad).norm() <= 1e-4 * other.grad.norm() + 1e-7, where


def train(modules: tuple[Any, ...], batches: list[Any]) -> None:
    for batch in batches:
        for module in modules:
            module.zero_grad()
            loss_of(module, batch).backward()


def launches(module: Any) -> list[int]:
    plan = plan_of(module)
    return [graph._repeated.launches for graph in (plan.forward, plan.backward)]


def test_steps_are_launched_and_gradients_are_not_copied() -> None:
    torch.manual_seed(1)
    eager, module = pair_of()
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (eager, module)]
    addresses = set()
    for step in range(12):
        batch = tokens()
        for each, optimizer in zip((eager, module), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(each, batch).backward()
        check_gradients(module, eager, step)
        addresses.add(next(module.parameters()).grad.data_ptr())
        for optimizer in optimizers:
            optimizer.step()
    forward, backward = launches(module)
    # The comparison of the first step ran each graph once on other memory.
    assert forward >= 12 - WARM - 2
    # It may find kept values elsewhere at each call until the forward graph is captured.
    assert backward >= 12 - 2 * WARM - 2
    assert len(addresses) == 1


def test_gradients_that_are_held_later_are_not_overwritten() -> None:
    torch.manual_seed(2)
    eager, module = pair_of()
    train((eager, module), [tokens() for _ in range(8)])
    held = [(p.grad, p.grad.clone()) for p in module.parameters()]
    for round_ in range(4):
        for each in (eager, module):
            each.zero_grad()
        for batch in [tokens() for _ in range(3)]:
            for each in (eager, module):
                loss_of(each, batch).backward()
        check_gradients(module, eager, round_)
    plan = plan_of(module)
    assert plan.backward.captured, "it is captured again"
    assert not plan.backward._lends
    for now, then in held:
        assert torch.equal(now, then)


def test_gradients_that_are_added_up_from_the_start_are_copied() -> None:
    torch.manual_seed(3)
    eager, module = pair_of()
    for round_ in range(4):
        for each in (eager, module):
            each.zero_grad(set_to_none=round_ < 2)
        for batch in [tokens() for _ in range(3)]:
            for each in (eager, module):
                loss_of(each, batch).backward()
        check_gradients(module, eager, round_)
    assert min(launches(module)) >= 12 - 2 * WARM - 2, launches(module)


def test_one_module_between_the_passes_of_another() -> None:
    """The first is captured first: its backward graph may write where the second one keeps values."""
    torch.manual_seed(4)
    pairs = [pair_of(), pair_of()]
    for pair in pairs:
        train(pair, [tokens() for _ in range(8)])
    before = [launches(module) for _, module in pairs]
    batches = [tokens(), tokens()]
    for number in (0, 1):
        first, second = pairs[0][number], pairs[1][number]
        for each in (first, second):
            each.zero_grad()
        waiting = loss_of(second, batches[0])
        loss_of(first, batches[1]).backward()
        waiting.backward()
    for eager, module in pairs:
        check_gradients(module, eager, "between")
    assert launches(pairs[0][1]) == before[0], "the first one's graphs were launched while the second one waited"
    assert launches(pairs[1][1]) == [count + 1 for count in before[1]]


def test_half_weights_are_read_where_they_are() -> None:
    """By a captured graph: the same memory at each call, with the weights of that call."""
    f, half = TensorProto.FLOAT, TensorProto.FLOAT16
    nodes = [
        helper.make_node("Cast", ["x"], ["h"], to=half),
        helper.make_node("Mul", ["h", "w/half"], ["m"]),
        helper.make_node("Cast", ["m"], ["y"], to=f),
    ]
    inputs = [helper.make_tensor_value_info("x", f, [8]), helper.make_tensor_value_info("w/half", half, [8])]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("y", f, [8])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.checker.check_model(model)
    session = Sessions(CpuDevice(), 1, "error").open(model.SerializeToString())
    runs: Any = CapturedGraph(Graph(session, CpuDevice()), Device(), "graph", {"w/half"}, "")  # type: ignore[arg-type]
    weights, weight = HalfWeights({"w/half": "w"}, torch.float16, stays=True), torch.randn(8)
    x = torch.randn(8)
    factor = torch.ones(8, dtype=torch.float16, requires_grad=True)
    waiting = None
    for step in range(12):
        weight += 0.5
        given = weights.of({"w": weight})
        result = runs.run({"x": x, **given})["y"].clone()
        if step == 9:
            waiting, expected = (factor * given["w/half"]).sum(), weight.half()
        del given
        np.testing.assert_allclose(result, x.half() * weight.half(), rtol=2e-3, atol=1e-3, err_msg=str(step))
    assert runs._repeated.launches >= 12 - WARM - 1 - 2, "two calls found memory that somebody still had"
    assert waiting is not None
    waiting.backward()
    assert factor.grad is not None
    assert torch.equal(factor.grad, expected)


def test_one_batch_of_another_size_leaves_a_captured_backward_graph() -> None:
    """A gradient of an input, in a graph whose other inputs are a scalar and kept values."""
    f = TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info("kept", f, ["n"]), helper.make_tensor_value_info("dy", f, [])]
    nodes = [helper.make_node("Mul", ["kept", "dy"], ["x_grad"])]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("x_grad", f, ["n"])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    session = Sessions(CpuDevice(), 1, "error").open(model.SerializeToString())
    runs: Any = CapturedGraph(Graph(session, CpuDevice()), Device(), "graph", {"kept"}, "")  # type: ignore[arg-type]
    large, small = torch.randn(8), torch.randn(4)
    for step in range(16):
        kept, dy = (small if step == 8 else large), torch.tensor(float(step))
        gradient = runs.gradients({"kept": kept, "dy": dy}, {"x_grad": kept.shape})["x_grad"]
        assert torch.equal(gradient, kept * step), step
        del gradient
    assert runs._repeated.launches >= 16 - WARM - 1 - 1, "no batch was launched behind the one of another size"


def test_sessions_of_any_precision_and_stream_discard_captured_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They allocate their constants from the arena in which the graphs have values in between."""
    library = FakeCuda()
    # As on a GPU: each call describes the library anew.
    monkeypatch.setattr(choice, "cuda_runtime", lambda: Runtime(library))
    runtime._captured_on.cache_clear()
    place = runtime.Place("cuda", 0, 0, "bf16")
    device = runtime._gpu(place, own_stream=True)
    assert isinstance(device, CudaDevice)
    values = device.allocate(4, np.float32)
    for other in (place, replace(place, precision="fp32")):
        work = capture.Repeated(device, "work", lambda: values.fill(0), lambda line: None)
        for _ in range(WARM + 1):
            work.run()
        assert work.captured
        runtime._gpu(other, own_stream=False).memory_moves()
        assert not work.captured, other
    runtime._captured_on.cache_clear()
