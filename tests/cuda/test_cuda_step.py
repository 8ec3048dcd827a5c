"""A step on a real GPU: captured as CUDA graphs it gives the same bits as uncaptured, and loses nothing in a kill."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graph_build_models import built, run_file
from messages import alike, mentions
from project import ORTFLOW, Project, curve, environment, logs, of_kind
from queued import halved, network, outcomes_of, state_of, steps_of, train
from safetensors.numpy import load_file
from test_cuda_runs import GPU, killed, state, wait_for

from ortflow.workflow.assembly.updates import write_forms
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.device.capture import Repeated
from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.device.cudart import TO_DEVICE, Runtime
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.optimize.on_cuda import on_cuda
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.optim.gradient import gradient_graph
from ortflow.workflow.optim.graph import optimizer_graph
from ortflow.workflow.optim.segments import segments
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.trainer import Report
from ortflow.workflow.trainer.opening import open_trainer
from ortflow.workflow.trainer.step import GraphTrainer

COUNT = 100_003


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return network(tmp_path_factory.mktemp("model") / "model.onnx")


@pytest.fixture(scope="module")
def graphs(model: Path) -> GraphSet:
    return built(model, resources__gpus_per_rank=1)


@pytest.fixture(scope="module")
def project(cuda: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project.make(tmp_path_factory.mktemp("cuda-step"), dropout=0.0)


def trainer_on(
    device: CudaDevice, graphs: GraphSet, *, whole: onnx.ModelProto | None = None, **changes: Any
) -> tuple[GraphTrainer, list[str]]:
    """A trainer as `builder` opens it, and its log; `whole` in place of the training graph."""
    log: list[str] = []
    spec = run_file(graphs.root.parent / "model.onnx", **changes)
    update = compose(optimizer_graph(spec.train.optimizer, segments(spec.train.optimizer, graphs.index)))
    graphs.optimizer.write_bytes(update.SerializeToString())
    graphs.gradient.write_bytes(gradient_graph().SerializeToString())
    write_forms(graphs, spec.train.precision)
    if whole is not None:
        Form.FUSED.of(graphs.train).unlink(missing_ok=True)
        Form.CUDA.of(graphs.train).write_bytes(whole.SerializeToString())
    sessions = Sessions(device, 1, "error")
    trainer = open_trainer(graphs, spec, sessions, SoloCommunicator(), Report(note=log.append))
    trainer.load_tensors(load_file(graphs.initial))
    return trainer, log


def test_values_sent_and_read_back_are_those_of_the_stream(device: CudaDevice) -> None:
    buffer, other = device.allocate(COUNT, np.float32), device.allocate(COUNT, np.float32)
    readback = device.readback(other)
    for step in range(50):
        values = np.full(COUNT, step, np.float32)
        buffer.send(values)
        values[:] = -1  # values may change as soon as they are sent
        other.copy_from(buffer)
        other.scale(2)
        readback.queue()
        other.fill(7)  # work that is queued later has no effect
        np.testing.assert_array_equal(readback.read(), np.full(COUNT, 2 * step, np.float32))


def test_another_thread_reads_what_is_settled(device: CudaDevice) -> None:
    mine = CudaDevice(device.here(), device.gpu)
    buffer = mine.allocate(COUNT, np.float32)
    buffer.send(np.full(COUNT, 3, np.float32))
    mine.settle()
    seen: list[float] = []
    reader = threading.Thread(target=lambda: seen.extend(np.unique(buffer.read())))
    reader.start()
    reader.join()
    assert seen == [3]


def repeated(device: CudaDevice, queue: Callable[[], None]) -> tuple[Repeated, list[str]]:
    log: list[str] = []
    return Repeated(device, "it", queue, log.append), log


def test_captured_work_is_done_as_often_as_it_is_queued(device: CudaDevice) -> None:
    one, total = device.allocate(COUNT, np.float32), device.allocate(COUNT, np.float32)
    device.blas()
    work, log = repeated(device, lambda: total.add(one))
    for number in range(10):
        one.send(np.full(COUNT, number, np.float32))
        work.run()
        assert total.read()[-1] == number * (number + 1) / 2, (number, log)
    assert work.captured, log
    work.forget()
    work.run()
    assert total.read()[0] == 45 + 9


def test_what_must_not_be_captured_is_not(device: CudaDevice) -> None:
    target, number = device.allocate(1, np.float32), np.ones(1, np.float32)
    device.blas()

    def from_host() -> None:
        device.here().copy(target.pointer, number.ctypes.data, 4, TO_DEVICE, device.stream)
        target.scale(2)

    def waiting() -> None:
        target.scale(2)
        target.read()

    def allocating() -> None:
        target.add(device.allocate(1, np.float32))

    said = []
    for queue in (from_host, waiting, allocating):
        work, log = repeated(device, queue)
        for _ in range(6):
            work.run()
        assert not work.captured, queue
        said.append(log)
        target.write(number)
        work.run()
        assert target.read()[0] == (1 if queue is allocating else 2), (queue, log)
    assert alike(said[0], ["it … not captured … a copy from the host"]), said
    assert all(len(log) == 1 and "not captured" in log[0] for log in said), said


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "sgd"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_captured_steps_equal_the_others_bit_for_bit(
    device: CudaDevice, graphs: GraphSet, accumulation: int, optimizer: str
) -> None:
    # Smaller last batches, and samples without a usable gradient; the same memory is used again.
    sizes = [[8] * accumulation if step % 7 != 5 else [8] * (accumulation - 1) + [5] for step in range(20)]
    steps, damaged = steps_of(sizes, damaged=(2, 9, 10)), [2, 9, 10]
    found = []
    for captures in (True, False):
        trainer, log = trainer_on(
            device, graphs,
            train__gradient_accumulation=accumulation, train__clip_norm=1.0, resources__cuda_graph=captures,
            train__optimizer={"name": optimizer, "lr": 1e-3, "weight_decay": 0.1},
        )  # fmt: skip
        losses = train(trainer, steps)
        assert [step for step, (*_, skipped) in enumerate(losses) if skipped] == damaged, losses
        found.append((losses, state_of(trainer), log))
    (mine, state_mine, log), (theirs, state_theirs, quiet) = found
    np.testing.assert_array_equal([one[:2] for one in mine], [one[:2] for one in theirs], err_msg=str(log))
    for name, flat in state_theirs.items():
        np.testing.assert_array_equal(state_mine[name], flat, err_msg=f"{name} {log}")
    assert not quiet
    names = {"a micro-batch", "the scaling of the gradient", "the update", "the change of the running statistics"}
    names |= {"another micro-batch"} if accumulation > 1 else set()
    assert {line.removesuffix(" is captured as a CUDA graph") for line in log} == names, log


def test_freed_memory_ends_the_graphs(device: CudaDevice, graphs: GraphSet, monkeypatch: pytest.MonkeyPatch) -> None:
    made, instantiate = list[int](), Runtime.instantiate

    def counted(runtime: Runtime, graph: int) -> int:
        made.append(graph)
        return instantiate(runtime, graph)

    monkeypatch.setattr(Runtime, "instantiate", counted)
    steps = steps_of([[8]] * 16)
    (plain, _), (trainer, log) = (trainer_on(device, graphs, resources__cuda_graph=on) for on in (False, True))
    expected = train(plain, steps)
    mine = []
    for number, batches in enumerate(steps):
        if number in (6, 7, 12):
            trainer.give_memory_back()
        rate = 1e-3 * (1 - number / len(steps))
        outcome = trainer.step(batches, learning_rate=rate, update=number + 1, seeds=[1], control_values=[2.0])
        mine.append((outcome.loss, outcome.grad_norm, outcome.skipped))
    assert mine == expected, log
    # Micro-batch, scaling, update and statistics, at the start and after 7 and 12; after 6 not again before 7.
    assert len(made) == 12, log


@pytest.mark.parametrize("scaled", [False, True], ids=["fp32", "fp16"])
def test_steps_whose_passes_begin_early_have_the_bits_of_steps_one_by_one(
    device: CudaDevice, model: Path, tmp_path: Path, *, scaled: bool
) -> None:
    shutil.copy(model, tmp_path / "model.onnx")
    graphs = built(tmp_path / "model.onnx")
    whole = halved(on_cuda(onnx.load(graphs.train))) if scaled else None
    steps = steps_of([[8]] * 40, damaged=(12, 13, 30))
    found = []
    for ahead in (False, True):
        trainer, log = trainer_on(device, graphs, whole=whole, train__clip_norm=1.0)
        assert trainer.begins, log
        outcomes = outcomes_of(trainer, steps, ahead=ahead)
        found.append(([str(outcome) for outcome in outcomes], state_of(trainer), trainer.numbers()))
    (alone, state_alone, numbers), (early, state_early, numbers_early) = found
    assert [number for number, said in enumerate(alone) if "loss is nan" in said] == [12, 13, 30]
    assert (alone, numbers) == (early, numbers_early)
    for name, flat in state_alone.items():
        np.testing.assert_array_equal(flat, state_early[name], err_msg=name)


def test_the_gradient_of_batch_norm_is_checked(device: CudaDevice, graphs: GraphSet) -> None:
    trainer, _ = trainer_on(device, graphs)
    (batch,) = steps_of([[8]])[0]
    checked = trainer.training.checker.gradient.run(batch, 0)
    assert checked is not None
    assert mentions(checked.compared, "ONNX Runtime's operators … differences of the loss")


def test_overflows_lower_the_loss_scale_and_a_trainer_resumes_bit_for_bit(
    device: CudaDevice, model: Path, tmp_path: Path
) -> None:
    shutil.copy(model, tmp_path / "model.onnx")
    graphs = built(tmp_path / "model.onnx")
    whole, steps, part = halved(on_cuda(onnx.load(graphs.train))), steps_of([[8]] * 20), 4
    trainer, log = trainer_on(device, graphs, whole=whole, train__clip_norm=1.0)
    outcomes = outcomes_of(trainer, steps)
    overflows = [number for number, outcome in enumerate(outcomes) if outcome.overflow]
    assert overflows[:1] == [0], [outcome.skipped for outcome in outcomes]
    assert len(overflows) < 12, [outcome.skipped for outcome in outcomes]
    assert outcomes[0].skipped == "overflow at loss scale 65536"
    assert trainer.numbers()["loss_scale"] == 65536 / 2 ** len(overflows)

    before, _ = trainer_on(device, graphs, whole=whole, train__clip_norm=1.0)
    done = outcomes_of(before, steps[:part])
    after, _ = trainer_on(device, graphs, whole=whole, train__clip_norm=1.0)
    for name, buffer in after.state().items():
        buffer.write(before.state()[name].read())
    after.restore(before.numbers())
    done += outcomes_of(after, steps[part:], updates=sum(outcome.skipped is None for outcome in done))
    assert [one.skipped for one in done] == [one.skipped for one in outcomes]
    np.testing.assert_array_equal([one.loss for one in done], [one.loss for one in outcomes], err_msg=str(log))
    for name, flat in state_of(trainer).items():
        np.testing.assert_array_equal(flat, state_of(after)[name], err_msg=name)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_captured_run_equals_the_other_bit_for_bit(project: Project, accumulation: int) -> None:
    settings = {**GPU, "train__steps": 24, "train__gradient_accumulation": accumulation}
    captured = project.run(f"captured-{accumulation}", **settings)
    plain = project.run(f"queued-{accumulation}", resources__cuda_graph=False, **settings)
    said = [line for line in logs(captured).splitlines() if "CUDA graph" in line]
    assert any("a micro-batch is captured as a CUDA graph" in line for line in said), said
    assert any("the update is captured as a CUDA graph" in line for line in said), said
    assert "CUDA graph" not in logs(plain)
    assert curve(captured) == curve(plain), said
    assert state(captured) == state(plain), said


def test_a_smaller_last_batch_gives_the_same_curve(project: Project) -> None:
    settings = {**GPU, "train__steps": None, "train__epochs": 2, "data__micro_batch": 7, "data__last_batch": "keep"}
    captured = project.run("last-captured", **settings)
    plain = project.run("last-queued", resources__cuda_graph=False, **settings)
    samples = {record["samples"] for record in of_kind(captured, "step") if "samples" in record}
    assert curve(captured) == curve(plain), samples
    assert state(captured) == state(plain)


def test_a_killed_captured_run_resumes_bit_for_bit(project: Project) -> None:
    settings = {**GPU, "train__steps": 300}
    whole = project.run("captured-whole", **settings)
    run_dir = killed(project, "captured-killed", (30, 120), **settings)
    assert "a micro-batch is captured as a CUDA graph" in logs(run_dir)
    assert curve(run_dir) == curve(whole)
    assert state(run_dir) == state(whole)


TWO = {"resources__gpus_per_rank": 1}


def of_two(project: Project, cuda: Runtime) -> Path:
    """The undisturbed run."""
    if cuda.count() < 2:
        pytest.skip("needs two GPUs")
    whole = project.run_dir("two-whole")
    return whole if whole.exists() else project.run("two-whole", train__steps=300, **TWO)


def test_two_gpus_capture_the_sums_too(project: Project, cuda: Runtime) -> None:
    whole = of_two(project, cuda)
    plain = project.run("two-queued", train__steps=300, resources__cuda_graph=False, **TWO)
    log = (whole / "logs" / "attempt-00" / "rank-0000.log").read_text()
    assert "sums over the ranks' GPUs: NCCL" in log
    assert "a micro-batch is captured as a CUDA graph" in log
    assert curve(whole) == curve(plain)
    assert state(whole) == state(plain)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_rank_ends_the_attempt_and_the_run_resumes_bit_for_bit(
    project: Project, cuda: Runtime, how: signal.Signals
) -> None:
    whole, name = of_two(project, cuda), f"two-lost-{how.name.lower()}"
    limit = {} if how == signal.SIGKILL else {"restart__hung_seconds": 10}
    file, run_dir = project.write(name, train__steps=300, **TWO, **limit), project.run_dir(name)
    with subprocess.Popen(
        [*ORTFLOW, "run", file.name], cwd=project.folder, env=environment(), stdout=subprocess.DEVNULL
    ) as running:
        try:
            wait_for(run_dir, 0, 50, running)
            os.kill(of_kind(run_dir, "attempt_start", rank=1)[-1]["pid"], how)
            begun = time.monotonic()
            while len(of_kind(run_dir, "attempt_start")) < 2 and time.monotonic() < begun + 60:
                time.sleep(0.05)
            ended = time.monotonic() - begun
            assert running.wait(120) == 0, logs(run_dir)
        finally:
            running.kill()
    # A new attempt takes some seconds to write its first line.
    assert ended < (25 if how == signal.SIGKILL else 45), f"{ended:.1f} s\n{logs(run_dir)}"
    assert curve(run_dir) == curve(whole)
    assert state(run_dir) == state(whole)
