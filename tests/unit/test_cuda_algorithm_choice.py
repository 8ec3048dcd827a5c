"""Which of cuDNN's algorithms computes a convolution, on a library that stands in for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from onnx import TensorProto

from ortflow.workflow.cuda import convolution
from ortflow.workflow.cuda.algorithms import Choices
from ortflow.workflow.cuda.operators import Tensor
from ortflow.workflow.device import timing
from ortflow.workflow.errors import OrtflowError, UserError

BF16 = int(TensorProto.BFLOAT16)
SPEEDS = {"slow": 3e-3, "declined": None, "large": 1e-5, "quick": 5e-4, "usual": 2e-3}
"""Algorithm -> seconds; None: it cannot be built. `large` needs more memory than is given."""


class Value:
    """A value of a graph; its description is noted."""

    def __init__(self, **given: Any) -> None:
        self.given = given

    def __getattr__(self, name: str) -> Any:
        def note(value: Any) -> Value:
            self.given[name.removeprefix("set_")] = value
            return self

        return note


class Graph:
    """What of cuDNN's graph is used."""

    made: ClassVar[list[Graph]] = []
    clock: ClassVar[float] = 0.0
    """Seconds; time passes only while an algorithm runs."""
    supports = True

    def __init__(self, **types: Any) -> None:
        self.types, self.notes, self.built, self.ran = types, [], [], []
        self.selected = next(iter(SPEEDS))
        self.operation: dict[str, Any] = {}
        Graph.made.append(self)

    def tensor(self, **given: Any) -> Value:
        return Value(**given)

    def _operation(self, **given: Any) -> Value:
        self.operation = given
        return Value()

    conv_fprop = conv_dgrad = conv_wgrad = _operation

    def validate(self) -> None: ...
    def build_operation_graph(self) -> None: ...
    def create_execution_plans(self, modes: Any) -> None: ...
    def build_plans(self) -> None: ...
    def deselect_workspace_greater_than(self, size: int) -> None: ...

    def deselect_numeric_notes(self, notes: list[str]) -> None:
        self.notes = notes

    def check_support(self) -> None:
        if not self.supports:
            raise RuntimeError("no\n engine")

    def get_execution_plan_count(self) -> int:
        return len(SPEEDS)

    def get_plan_name_at_index(self, place: int) -> str:
        return list(SPEEDS)[place]

    def build_plan_at_index(self, place: int) -> None:
        name = self.get_plan_name_at_index(place)
        if SPEEDS[name] is None:
            raise RuntimeError("declined")
        self.selected = name
        self.built.append(name)

    def get_workspace_size(self) -> int:
        return convolution.LARGEST_WORKSPACE + 1 if self.selected == "large" else 1000

    def execute(self, values: dict[Value, int], workspace: int, handle: Any) -> None:
        self.ran.append((self.selected, list(values.values()), workspace))
        Graph.clock += SPEEDS[self.selected] or 0


class Call:
    """One execution of a node; scratch memory grows as on a GPU."""

    stream, gpu, rounds, captured = 7, "GPU", False, False

    def __init__(self, inputs: list[Tensor]) -> None:
        self.inputs, self.launched, self.size, self.base = inputs, [], 0, 1 << 40

    def given(self, place: int) -> Tensor:
        return self.inputs[place]

    def output(self, place: int, shape: Any) -> int:
        self.shape = tuple(shape)
        return 99

    def scratch(self, size: int) -> int:
        if size > self.size:
            self.size, self.base = size, self.base + (1 << 30)
        return self.base

    def launch(self, source: str, function: str, grid: int, block: int, *arguments: Any) -> None:
        self.launched.append((function, [each.value for each in arguments]))


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Choices:
    kept = Choices([tmp_path])
    notes = SimpleNamespace(**{name: name for name in (*convolution._UNWANTED, "DOWN_CONVERT_INPUTS", "TENSOR_CORE")})
    package = SimpleNamespace(
        data_type=SimpleNamespace(FLOAT="float", HALF="half", BFLOAT16="bfloat16"), numerical_note=notes,
        pygraph=Graph, heur_mode=SimpleNamespace(A="a", FALLBACK="fallback"), backend_version=lambda: 91900,
    )  # fmt: skip
    monkeypatch.setattr(convolution, "cudnn", lambda: package)
    monkeypatch.setattr(convolution, "available", lambda what: None)
    monkeypatch.setattr(convolution, "choices", lambda: kept)
    monkeypatch.setattr(convolution, "runtime", lambda: SimpleNamespace(wait=lambda stream: None))
    monkeypatch.setattr(timing, "captured", lambda *_: 1 / 0)
    monkeypatch.setattr(convolution, "handle_on", lambda stream: "handle")
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: Graph.clock))
    monkeypatch.setattr(Graph, "made", [])
    monkeypatch.setattr(Graph, "supports", True)
    fresh(monkeypatch)
    return kept


def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in another process."""
    plans = convolution.Plans()
    monkeypatch.setattr(convolution, "plans", lambda: plans)


def forward(kind: int = BF16, *, captured: bool = False, rounds: bool = False) -> Graph:
    """One execution of a convolution; its graph."""
    call = Call([Tensor(1, (2, 9, 9, 8), kind), Tensor(2, (4, 3, 3, 8), kind)])
    call.captured, call.rounds = captured, rounds
    convolution.Convolution({"kernel_shape": (3, 3), "channels_last": 1}).run(call)  # type: ignore[arg-type]
    assert call.shape == (2, 7, 7, 4)
    return Graph.made[-1]


def test_the_fastest_that_fits_is_taken_and_measured_once() -> None:
    graph = forward()
    assert graph.ran[-1][:2] == ("quick", [1, 2, 99])
    tried = {name for name, *_ in graph.ran}
    assert tried == {"slow", "quick", "usual"}
    count = len(graph.ran)
    assert forward() is graph
    assert len(graph.ran) == count + 1


def test_another_process_takes_what_was_chosen(monkeypatch: pytest.MonkeyPatch, library: Choices) -> None:
    first = forward()
    monkeypatch.setitem(SPEEDS, "usual", 1e-6)
    fresh(monkeypatch)
    second = forward()
    assert second is not first
    assert [name for name, *_ in second.ran] == ["quick"]


def test_nothing_is_measured_while_a_graph_is_captured() -> None:
    graph = forward(captured=True)
    assert [name for name, *_ in graph.ran] == ["slow"]
    assert forward() is graph
    assert graph.ran[-1][0] == "quick"


def test_fp32_is_not_rounded_unless_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"TENSOR_CORE", "NONDETERMINISTIC"} <= {*forward(int(TensorProto.FLOAT)).notes}
    rounded = forward(int(TensorProto.FLOAT), rounds=True).notes
    assert "TENSOR_CORE" not in rounded
    assert "NONDETERMINISTIC" in rounded
    assert "TENSOR_CORE" not in forward().notes


def test_the_gradient_of_a_weight_is_converted_from_where_it_was_written() -> None:
    call = Call([Tensor(1, (2, 7, 7, 4), BF16), Tensor(2, (2, 9, 9, 8), BF16)])
    convolution.ConvolutionWeightGrad({"kernel_shape": (3, 3), "channels_last": 1}).run(call)  # type: ignore[arg-type]
    assert call.shape == (4, 8, 3, 3), "channels first"
    name, (dy, x, written), workspace = Graph.made[-1].ran[-1]
    assert (name, dy, x) == ("quick", 1, 2)
    assert written == call.base
    assert workspace >= written + 2 * 4 * 3 * 3 * 8
    assert call.launched == [("channels_first", [written, 99, 4 * 8, 3 * 3, 8, 8])]


def test_what_cudnn_does_not_support_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graph, "supports", False)
    with pytest.raises(OrtflowError, match=r"cuDNN .* forward of .*no engine"):
        forward()


def test_without_cudnn_half_precision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "available", lambda what: f"{what} needs something")
    with pytest.raises(UserError, match="convolution needs something"):
        convolution.Convolution({})
