"""What saving and loading a checkpoint cost, as ratios against the disk itself and against undisturbed steps.

    python benchmarks/checkpoint.py [--directory FOLDER] [--megabytes 500] [--rounds 7]

1. Save and load against a plain write with fsync, and a plain read, of the same bytes into the same folder, by turns.
   Reads are cold: the page cache is dropped for the files before each. Wanted: at least 0.7 of the plain throughput.
2. What training steps lose while a state is saved in the background, as a share of the time the save takes. A step
   here is matrix products on every core, then an update that reads and writes the state. Wanted: under 5%.
   As many steps beside no save are measured alike: other programs disturb this more than a save does.

Medians of the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from ortflow.workflow.checkpoint.commit import commit
from ortflow.workflow.checkpoint.load import load
from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.checkpoint.writer import Writer, specs
from ortflow.workflow.device.cpu import CpuDevice, HostBuffer
from ortflow.workflow.layout import FlatIndex, Tensor
from ortflow.workflow.run.progress import Progress

CHUNK = 8 << 20
WARM_UP = 3
STEPS = 10
"""Undisturbed steps before and behind each save."""


def main() -> None:
    """Print both results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(), help="where to write (current folder)")
    parser.add_argument("--megabytes", type=int, default=500, help="size of the state")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="checkpoint-benchmark-") as folder:
        state = State(arguments.megabytes, Path(folder))
        throughput(state, arguments.rounds)
        lost_steps(state, arguments.rounds)


class State:
    """Parameters and two moments, and what saves them."""

    def __init__(self, megabytes: int, folder: Path) -> None:
        count = megabytes * 1_000_000 // 12
        device, random = CpuDevice(), np.random.default_rng(0)
        self.index = FlatIndex.place([Tensor("w", (count,), "decay")])
        self.buffers: dict[str, HostBuffer] = {}
        for name in ("parameters", "moment_1", "moment_2"):
            self.buffers[name] = device.allocate(self.index.size, np.float32)
            self.buffers[name].write(random.random(self.index.size, np.float32))
        self.folder, self.store = folder, DirectoryStore(folder / "checkpoints")
        self.writer = Writer(self.store, self.buffers, rank=0, world_size=1, attempt=0)
        self.size = self.writer.size

    def commit(self, step: int) -> None:
        """Finish the save of a step."""
        status = self.writer.wait()
        assert status.record is not None, status.reason
        commit(
            self.store, step, 0, [status.record], buffers=specs(self.buffers), index=self.index,
            progress=Progress(step=step).to_json(), environment={},
        )  # fmt: skip


def throughput(state: State, rounds: int) -> None:
    """Save and load beside a plain write and read of as many bytes."""
    plain, data = state.folder / "plain", memoryview(bytearray(state.size))
    data[:] = os.urandom(1 << 20) * (state.size >> 20) + bytes(state.size % (1 << 20))
    out = {name: buffer.read() for name, buffer in state.buffers.items()}

    def plain_write() -> None:
        with open(plain, "wb", buffering=0) as file:
            for start in range(0, len(data), CHUNK):
                file.write(data[start : start + CHUNK])
            os.fsync(file.fileno())

    def plain_read() -> None:
        with open(plain, "rb", buffering=0) as file:
            for start in range(0, len(data), CHUNK):
                file.readinto(data[start : start + CHUNK])

    def save() -> None:
        state.writer.start(1, urgent=True)
        state.commit(1)

    def load_back() -> None:
        load(state.store, 1, out)

    ours_on_disk = state.store.place(1) / "rank-0000.safetensors"
    work = {"write": plain_write, "save": save, "read": plain_read, "load": load_back}
    taken: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 1):
        # By turns also in who comes first, and no read finds the other's pages in memory.
        order = list(work) if number % 2 else ["save", "write", "load", "read"]
        for name in order:
            forget(plain, ours_on_disk)
            seconds = timed(work[name])
            if number:
                taken[name].append(seconds)
        plain.unlink()
        state.store.remove(1)
    for verb, peer in (("save", "write"), ("load", "read")):
        mine, other = statistics.median(taken[verb]), statistics.median(taken[peer])
        print(
            f"{verb}: {state.size / mine / 1e6:,.0f} MB/s, plain {peer} {state.size / other / 1e6:,.0f} MB/s, "
            f"ratio {other / mine:.2f} (at least 0.7)"
        )


def lost_steps(state: State, rounds: int) -> None:
    """Steps beside a save, and beside none, each against as many steps before and behind."""
    step = training_step(state)
    for _ in range(WARM_UP):
        step()
    lost, quiet, saves, undisturbed = [], [], [], []
    for number in range(rounds):
        before = [timed(step) for _ in range(STEPS)]
        beside = []
        state.writer.start(number)
        while state.writer.poll().state == "writing":
            beside.append(timed(step))
        state.commit(number)
        state.store.remove(number)
        saves.append(state.writer.poll().seconds)
        between = [timed(step) for _ in range(STEPS)]
        control = [timed(step) for _ in beside]
        behind = [timed(step) for _ in range(STEPS)]
        lost.append(sum(beside) - len(beside) * statistics.median(before + between))
        quiet.append(sum(control) - len(control) * statistics.median(between + behind))
        undisturbed += before + between + control + behind
    save = statistics.median(saves)
    print(
        f"steps of {statistics.median(undisturbed) * 1e3:.0f} ms lose {statistics.median(lost) * 1e3:.0f} ms a save of "
        f"{save:.2f} s, {statistics.median(lost) / save:.1%} of it (under 5%); "
        f"beside no save they lose {statistics.median(quiet) / save:.1%}, which is the noise"
    )


def training_step(state: State) -> Callable[[], None]:
    """About a fifth of a second of matrix products on every core, then an update of the whole state."""
    threads, size = len(os.sched_getaffinity(0)), 1024
    matrix = np.random.default_rng(0).random((size, size), np.float32) / size
    session = matrix_products(size, 8 * threads, threads)
    pool = ThreadPoolExecutor(threads)
    parameters, *moments = (buffer.array for buffer in state.buffers.values())

    def update(thread: int) -> None:
        first, last = len(parameters) * thread // threads, len(parameters) * (thread + 1) // threads
        for start in range(first, last, 1 << 18):
            part = slice(start, min(start + (1 << 18), last))
            for moment in moments:
                moment[part] *= np.float32(0.9)
                parameters[part] -= moment[part]

    def step() -> None:
        session.run(None, {"x": matrix})
        state.writer.wait_copied()
        list(pool.map(update, range(threads)))

    return step


def matrix_products(size: int, count: int, threads: int) -> onnxruntime.InferenceSession:
    """A session that multiplies a square matrix by itself `count` times."""
    names = ["x", *(f"y{number}" for number in range(count))]
    nodes = [helper.make_node("MatMul", [a, "x"], [b]) for a, b in pairwise(names)]
    matrix = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [size, size]) for name in ("x", names[-1])]
    graph = helper.make_graph(nodes, "products", matrix[:1], matrix[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def timed(work: Callable[[], None]) -> float:
    """Seconds that it took."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def forget(*paths: Path) -> None:
    """Drop what there is of files from the page cache."""
    for path in paths:
        if path.exists():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
