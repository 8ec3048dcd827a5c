"""ZeRO's stage 3 on GPUs, on fake ones: ranks are threads, streams work as late or as early as their order permits."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graph_build_models import Array, built, run_file
from lazy_cuda import FIRST, LazyCuda, LazyNccl, on_the_host
from onnx import TensorProto, helper
from operators_on_cpu import needs_compilers, operators_here
from queued import Fake, FakeDevice, outcomes_of, state_of
from safetensors.numpy import load_file
from sharing_ranks import tower
from test_queued_zero import divided, samples, settings
from thread_wire import on_threads
from trainers import trainer_on

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.nccl import NcclCommunicator
from ortflow.workflow.comm.nccl_library import NcclError
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.comm.staged import StagedCommunicator
from ortflow.workflow.device.cudart import Runtime
from ortflow.workflow.device.shard import Shard
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.shards import layer_groups as layers
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.layout import share
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.trainer import Report
from ortflow.workflow.trainer.check import first_gradient
from ortflow.workflow.trainer.export.exporter import LentExporter
from ortflow.workflow.trainer.opening import open_trainer
from ortflow.workflow.trainer.queued_exchange import QueuedExchange
from ortflow.workflow.trainer.queued_work import QueuedWork
from ortflow.workflow.trainer.step import GraphTrainer
from ortflow.workflow.trainer.work import HostWork

pytestmark = [needs_compilers, pytest.mark.rotates]
DEPTH = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tower(tmp_path_factory.mktemp("model") / "model.onnx", 24, DEPTH)


@pytest.fixture(scope="module")
def graphs(model: Path) -> GraphSet:
    return built(model)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "SMALL", 64)


class Rank:
    """What a rank has after its steps."""

    def __init__(self, trainer: GraphTrainer, curve: list[tuple[float, float]], fake: Fake) -> None:
        self.curve, self.log, self.warnings, self.library = curve, fake.log, fake.warnings, fake.library
        self.memory, self.held = dict(trainer.memory()), fake.device.held
        trainer.before_save()
        self.state: dict[str, Array] = {}
        for name, each in trainer.state().items():
            assert isinstance(each, Shard)
            self.state[name] = each.part.read()
        self.evaluation: Any = None
        self.lent: dict[str, Array] = {}


def on_gpus(
    graphs: GraphSet,
    spec: TrainerRunSpec,
    steps: list[dict[str, Array]],
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    *,
    ranks: int = 2,
    micro: int = 1,
    empty: int | None = None,
    eager: bool = False,
    start: dict[str, Array] | None = None,
    library: LazyNccl | None = None,
    cut: int = 0,
    checked: bool = False,
    single: onnx.ModelProto | None = None,
) -> list[Rank]:
    """Train; `start` is a whole state to begin with, `cut` the samples that no rank evaluates.

    `checked`: check the gradient first; `single` is then the graph in fp32.
    """
    library, opens = library or LazyNccl(), threading.Lock()
    on_the_host(monkeypatch)
    fakes = [Fake(monkeypatch, LazyCuda(eager=eager)) for _ in range(ranks)]
    opened = Sessions.open

    def open_alone(*given: Any, **named: Any) -> Any:
        # The library gives the next session the operators that were bound last.
        with opens:
            return opened(*given, **named)

    monkeypatch.setattr(Sessions, "open", open_alone)
    monkeypatch.setattr(QueuedWork, "squares_graph", HostWork.squares_graph)
    made = [operators_here(folder, monkeypatch) for _ in fakes]
    for one, fake in zip(made, fakes, strict=True):
        one.cuda = fake.library  # type: ignore[attr-defined]

    def program(below: Communicator) -> Rank:
        fake = fakes[below.rank]
        assert isinstance(fake.library, LazyCuda)
        library.here(fake.library)
        # Copies of other threads than the first one would have a stream of their own.
        fake.device.owner = threading.get_ident()
        world: Communicator = SoloCommunicator()
        if ranks > 1:
            world = NcclCommunicator(below, fake.device, library)
        sessions = Sessions(fake.device, 1, "error", fuse=False)
        sessions.operators = made[below.rank]
        report = Report(note=fake.log.append, warn=fake.warnings.append)
        trainer = open_trainer(graphs, spec, sessions, world, report, loop="queued")
        trainer.load_tensors(load_file(graphs.initial))
        if single is not None:
            device = fake.device
            device.comparisons = FakeDevice(
                Runtime(fake.library), device.gpu, stream=device.stream, captured=device.captured
            )
            world.barrier()
            graphs.train.write_bytes(single.SerializeToString())
            world.barrier()
        if checked:
            allocate, sizes = fake.device.allocate, [0]

            def noting(count: int, dtype: Any) -> Any:
                sizes.append(count)
                return allocate(count, dtype)

            fake.device.allocate = noting  # type: ignore[method-assign]
            trainer.check([divided(steps, 0, 1, 1)[0][0]])
            fake.device.allocate = allocate  # type: ignore[method-assign]
            # What graphs compute with is ONNX Runtime's memory, and a layer's at most.
            assert max(sizes) < graphs.index.trained / ranks / 2, "parameters or gradients were gathered"
        if start:
            for name, values in start.items():
                buffer = trainer.state()[name]
                assert isinstance(buffer, Shard)
                buffer.part.write(values[buffer.start : buffer.stop])
            trainer.after_load()
        mine = divided(steps, below.rank, ranks, micro, empty)
        outcomes = outcomes_of(trainer, mine)
        found = Rank(trainer, [(each.loss, each.grad_norm) for each in outcomes], fake)
        batches = [batches[0] for batches in mine][: len(mine) - (cut if below.rank else 0)]
        found.evaluation = trainer.evaluate(batches, lambda: [1.0])
        # The host waits for moments on their way to it where it reads them.
        assert fake.library.left == 0 or spec.train.offload != "none", "work that nobody waits for"
        trainer.before_export()
        if below.rank:
            trainer.lend()
        else:
            exporter = trainer.exporter
            assert isinstance(exporter, LentExporter)
            assert exporter.lent is not None
            found.lent = {**exporter.lent}
            trainer.after_export()
        trainer.end_training()
        assert not made[below.rank].shards
        if ranks > 1:
            world.close()
        return found

    return on_threads(ranks, program)


def whole(ranks: list[Rank], name: str) -> Array:
    return np.concatenate([rank.state[name] for rank in ranks])


def of_stage_3(rule: str, ranks: int, micro: int, **more: Any) -> dict[str, Any]:
    return {**settings(rule, 3, ranks, micro), "resources__kernels": "auto", **more}


def reference(
    model: Path, graphs: GraphSet, rule: str, steps: list[dict[str, Array]]
) -> tuple[Array, dict[str, Array]]:
    """The curve and the state of one rank on the CPU."""
    trainer = trainer_on(graphs, run_file(model, **settings(rule, 0, 1, 1)))
    outcomes = outcomes_of(trainer, divided(steps, 0, 1, 1))
    return np.array([(each.loss, each.grad_norm) for each in outcomes]), state_of(trainer)


@pytest.mark.parametrize("eager", [False, True], ids=["late", "early"])
@pytest.mark.parametrize(
    ("rule", "ranks", "micro", "offload"),
    [("adamw", 3, 2, "none"), ("lamb", 2, 1, "none"), ("nesterov", 1, 2, "none"), ("adamw", 2, 2, "optimizer")],
)
def test_the_curve_is_that_of_one_rank_and_a_rank_keeps_its_share(
    model: Path,
    graphs: GraphSet,
    rule: str,
    ranks: int,
    micro: int,
    offload: str,
    eager: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    steps = samples(8)
    spec = run_file(model, **of_stage_3(rule, ranks, micro, train__offload=offload))
    found = on_gpus(graphs, spec, steps, monkeypatch, tmp_path, ranks=ranks, micro=micro, eager=eager)
    monkeypatch.undo()
    curve, state = reference(model, graphs, rule, steps)
    for rank in found:
        np.testing.assert_allclose(rank.curve, curve, 1e-5)
        assert rank.evaluation == found[0].evaluation
    for name, values in state.items():
        np.testing.assert_allclose(whole(found, name), values, rtol=1e-5, atol=1e-6, err_msg=name)
    parameters = whole(found, "parameters")
    for entry in graphs.index:
        np.testing.assert_array_equal(found[0].lent[entry.name].reshape(-1), parameters[entry.offset : entry.end])
    trained = graphs.index.trained
    for number, rank in enumerate(found):
        first, last = share(trained, number, ranks)
        assert rank.memory["parameters"] == rank.memory["gradients"] == 4 * (last - first)
        formula = sum(rank.memory[part] for part in ("parameters", "gradients", "moments", "messages"))
        assert formula <= rank.held < formula + 16_000
    library = found[0].library
    assert isinstance(library, LazyCuda)
    assert (library.deferred == 0) == eager


def test_a_pass_is_captured_with_what_it_exchanges(
    model: Path, graphs: GraphSet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps, curves = samples(8), []
    for captured in (True, False):
        spec = run_file(model, **of_stage_3("adamw", 2, 2, resources__cuda_graph=captured))
        library = LazyNccl()
        found = on_gpus(graphs, spec, steps, monkeypatch, tmp_path, micro=2, library=library)
        monkeypatch.undo()
        curves.append([rank.curve for rank in found])
        lines = [line for line in found[0].log if "captured" in line]
        names = ["a micro-batch", "another micro-batch", "the norm of the gradient", "the scaling of the gradient"]
        names.append("the update")
        assert sorted(lines) == ([f"{name} is captured as a CUDA graph" for name in names] if captured else [])
        # Each layer is gathered for the forward and for the backward pass, except where the two meet.
        assert library.calls.count("ncclReduce") > library.calls.count("ncclBroadcast") / 3 > 0
    assert curves[0] == curves[1]


def test_everything_on_the_second_stream_begins_behind_the_graph(
    model: Path, graphs: GraphSet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Memory that is gathered into, or reduced from, may have had readers and writers just before."""
    spec = run_file(model, **of_stage_3("adamw", 2, 1, resources__cuda_graph=False))
    found = on_gpus(graphs, spec, samples(2), monkeypatch, tmp_path)
    library = found[0].library
    assert isinstance(library, LazyCuda)
    parted = False
    begun = 0
    for what, stream in library.order:
        if what.startswith("wait") and stream != FIRST:
            parted = True
        elif what.startswith("mark") and stream != FIRST:
            parted = False
        elif what == "work" and stream != FIRST:
            assert parted, "work that does not wait for the graph"
            begun += 1
    assert begun > 2 * 3 * DEPTH


def test_a_rank_without_samples_takes_part(
    model: Path, graphs: GraphSet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps = samples(6)
    for micro in (1, 2):
        spec = run_file(model, **of_stage_3("adamw", 2, micro))
        found = on_gpus(graphs, spec, steps, monkeypatch, tmp_path, micro=micro, empty=4, cut=2)
        monkeypatch.undo()
        kept, size = list(steps), 24 // 2 // micro
        kept[4] = {name: array[:-size] for name, array in steps[4].items()}
        curve, _ = reference(model, graphs, "adamw", kept)
        np.testing.assert_allclose(found[1].curve, curve, 1e-5)
        assert found[0].evaluation == found[1].evaluation


def test_a_run_continues_under_another_number_of_ranks(
    model: Path, graphs: GraphSet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps = samples(9)
    curve, expected = reference(model, graphs, "nesterov", steps)
    state: dict[str, Array] | None = None
    losses: list[float] = []
    for place, ranks in enumerate((3, 1, 2)):
        spec = run_file(model, **of_stage_3("nesterov", ranks, 1))
        part = steps[3 * place : 3 * place + 3]
        found = on_gpus(graphs, spec, part, monkeypatch, tmp_path, ranks=ranks, start=state)
        monkeypatch.undo()
        state = {name: whole(found, name) for name in found[0].state}
        losses += [loss for loss, _ in found[0].curve]
    np.testing.assert_allclose(losses, curve[:, 0], 1e-5)
    assert state is not None
    for name, values in expected.items():
        np.testing.assert_allclose(state[name], values, rtol=1e-5, atol=1e-6, err_msg=name)


def rounding(train: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with weights of hidden layers that it rounds to fp16 before each use, as in half precision."""
    copy = onnx.ModelProto()
    copy.CopyFrom(train)
    names = [value.name for value in copy.graph.input if value.name.startswith("h.")]
    nodes = []
    for name in names:
        nodes.append(helper.make_node("Cast", [name], [f"{name}.half"], to=TensorProto.FLOAT16))
        nodes.append(helper.make_node("Cast", [f"{name}.half"], [f"{name}.single"], to=TensorProto.FLOAT))
    for node in copy.graph.node:
        node.input[:] = [f"{name}.single" if name in names else name for name in node.input]
    nodes += copy.graph.node
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    return copy


def test_weights_that_are_read_rounded_are_gathered_rounded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.onnx").write_bytes(model.read_bytes())
    graphs = built(tmp_path / "model.onnx")
    train = rounding(onnx.load(graphs.train))
    steps = samples(8)
    graphs.train.write_bytes(train.SerializeToString())
    spec = run_file(model, **of_stage_3("adamw", 2, 1))
    found = on_gpus(graphs, spec, steps, monkeypatch, tmp_path)
    monkeypatch.undo()
    curve, state = reference(model, graphs, "adamw", steps)
    np.testing.assert_allclose(found[0].curve, curve, 1e-5)
    np.testing.assert_allclose(whole(found, "parameters"), state["parameters"], rtol=1e-5, atol=1e-6)


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """No check has passed, and none is remembered."""
    monkeypatch.setattr(first_gradient, "has_passed", lambda key: False)
    monkeypatch.setattr(first_gradient, "remember", lambda key: None)


@pytest.mark.parametrize("eager", [False, True], ids=["late", "early"])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (2, 1), (3, 2)])
def test_all_ranks_check_the_gradient_with_shares(
    ranks: int,
    micro: int,
    eager: bool,
    model: Path,
    graphs: GraphSet,
    unknown: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    steps = samples(6)
    spec = run_file(model, **of_stage_3("adamw", ranks, micro))
    found = on_gpus(
        graphs, spec, steps, monkeypatch, tmp_path, ranks=ranks, micro=micro, eager=eager, checked=True
    )  # fmt: skip
    monkeypatch.undo()
    lines = [[line for line in rank.log if "gradient checked" in line] for rank in found]
    assert [len(each) for each in lines] == [1, *[0] * (ranks - 1)]
    assert "differences of the loss" in lines[0][0]
    # Parameters and gradients are as before.
    curve, _ = reference(model, graphs, "adamw", steps)
    np.testing.assert_allclose(found[0].curve, curve, 1e-5)


def test_a_gradient_that_is_lost_on_its_way_is_found(
    model: Path, graphs: GraphSet, unknown: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reduce = QueuedExchange.reduce

    def losing(exchange: QueuedExchange, channel: int, number: int, given: list[int]) -> None:
        mine = exchange._mine(exchange._steps[channel][number])
        reduce(exchange, channel, number, given)
        for piece in mine[:1]:
            exchange._device.view(exchange._pointer(exchange._gradients, piece), piece.count, np.float32).fill(0)

    monkeypatch.setattr(QueuedExchange, "reduce", losing)
    spec = run_file(model, **of_stage_3("adamw", 2, 1))
    with pytest.raises(UserError, match="disagrees with finite differences"):
        on_gpus(graphs, spec, samples(1), monkeypatch, tmp_path, eager=True, checked=True)


@pytest.mark.parametrize(("factor", "warned"), [(8.0, False), (-1.0, True)])
def test_a_gradient_of_training_that_points_elsewhere_is_reported_once(
    factor: float, warned: bool, model: Path, unknown: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "model.onnx").write_bytes(model.read_bytes())
    graphs = built(tmp_path / "model.onnx")
    plain, other = onnx.load(graphs.train), onnx.load(graphs.train)
    name = "out.w_grad"
    for node in other.graph.node:
        node.output[:] = ["made" if each == name else each for each in node.output]
    other.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(factor), "factor"))
    other.graph.node.append(helper.make_node("Mul", ["made", "factor"], [name]))
    graphs.train.write_bytes(other.SerializeToString())
    spec = run_file(model, **of_stage_3("adamw", 2, 1))
    found = on_gpus(graphs, spec, samples(1), monkeypatch, tmp_path, checked=True, single=plain)
    warnings = [line for rank in found for line in rank.warnings]
    assert len(warnings) == warned, warnings
    assert all(repr(name.removesuffix("_grad")) in line and "100%" in line for line in warnings)


class Failing(LazyNccl):
    """Its groups of calls fail, as where another rank is gone."""

    def ncclGroupEnd(self) -> int:  # noqa: N802
        super().ncclGroupEnd()
        return 6

    def ncclGetErrorString(self, code: int) -> bytes:  # noqa: N802
        return b"remote process exited or there was a network error"

    def ncclGetLastError(self, world: Any) -> bytes:  # noqa: N802
        return b""


def test_a_failure_of_nccl_within_a_pass_is_no_fault_of_the_batch(
    model: Path, graphs: GraphSet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It may be retried, so that it must not end the run like wrong input does."""
    spec = run_file(model, **of_stage_3("adamw", 2, 1))
    with pytest.raises(NcclError, match="ncclGroupEnd"):
        on_gpus(graphs, spec, samples(1), monkeypatch, tmp_path, library=Failing())


def test_ranks_that_share_a_gpu_are_refused_in_one_sentence(
    model: Path, graphs: GraphSet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = run_file(model, **of_stage_3("adamw", 2, 1))
    fakes = [Fake(monkeypatch, LazyCuda()) for _ in range(2)]
    made = [operators_here(tmp_path, monkeypatch) for _ in fakes]

    def program(below: Communicator) -> None:
        sessions = Sessions(fakes[below.rank].device, 1, "error", fuse=False)
        sessions.operators = made[below.rank]
        open_trainer(graphs, spec, sessions, StagedCommunicator(below), loop="queued")

    with pytest.raises(UserError, match=r"parallel\.zero.*NCCL.*GPU"):
        on_threads(2, program)
    sessions = Sessions(fakes[0].device, 1, "error", fuse=False)
    with pytest.raises(UserError, match=r"parallel\.zero.*kernels of ortflow's for GPUs"):
        open_trainer(graphs, spec, sessions, SoloCommunicator(), loop="queued")
