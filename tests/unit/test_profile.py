"""The parts of a profile: what is recorded of sessions, modules of nodes, clocks of ranks, the table and the advice."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from run_files import SMALL, reported

from ortflow.launchers.report.advice import advice
from ortflow.launchers.report.profile import Profile, of_records
from ortflow.launchers.report.profile_section import profile_section
from ortflow.launchers.report.profile_table import head, table
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.graph.ir.modules import modules_in
from ortflow.workflow.graph.ir.origin import SCOPES
from ortflow.workflow.run import profile_records as profile
from ortflow.workflow.run.operator_records import RUN
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.flops import flops_of
from ortflow.workflow.sessions.recording import nodes_of
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.spec.file.dump import dump_run_file
from ortflow.workflow.spec.file.load import read_run_file
from ortflow.workflow.steps.profile import aligned


def graph(*nodes: onnx.NodeProto) -> onnx.ModelProto:
    """A model of x [4, 8] and w [8, 3] to y [4, 3]."""
    inputs = [helper.make_tensor_value_info(*value) for value in (("x", 1, [4, 8]), ("w", 1, [8, 3]))]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 3])]
    made = helper.make_graph(nodes, "g", inputs, outputs)
    return helper.make_model(made, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


def test_a_recording_takes_the_runs_of_a_session_over() -> None:
    sessions = Sessions(CpuDevice(), 1, "error")
    model = graph(
        helper.make_node("MatMul", ["x", "w"], ["h"], name="/fc/MatMul"),
        helper.make_node("Relu", ["h"], ["y"], name="/act/Relu"),
    )
    binding = Binding(sessions.open(model.SerializeToString()), sessions.device)
    random = np.random.default_rng(0)
    for name, shape in (("x", (4, 8)), ("w", (8, 3))):
        binding.feed(name, random.normal(size=shape).astype(np.float32))
    (before,) = binding.fetch(["y"])
    recording = sessions.record()
    started = time.perf_counter()
    runs = [binding.fetch(["y"])[0] for _ in range(2)]
    ended = time.perf_counter()
    nodes = recording.end()
    (after,) = binding.fetch(["y"])
    assert all(np.array_equal(before, run) for run in (*runs, after))
    assert sorted(node.operator for node in nodes) == ["MatMul", "MatMul", "Relu", "Relu", RUN, RUN]
    assert {node.module for node in nodes} == {"fc", "act", ""}
    assert all(started - 1e-3 <= node.start <= node.start + node.seconds <= ended + 1e-3 for node in nodes)
    (product,) = {(node.inputs, node.flops, node.bytes) for node in nodes if node.operator == "MatMul"}
    assert product == (((4, 8), (8, 3)), 2 * 4 * 8 * 3, 4 * (32 + 24 + 12))
    assert sessions.record().end() == []


def test_a_record_that_a_full_disk_cut_off_is_refused() -> None:
    record = b'[{"cat": "Node", "name": "a_kernel_time", "ts": 1, "dur": 2, "args": {"op_name": "Add"}},\n'
    with pytest.raises(ValueError, match="Expecting"):
        nodes_of(record, "train", lambda seconds: seconds)
    (node,) = nodes_of(record.rstrip(b",\n") + b"]", "train", lambda seconds: 10 + seconds)
    assert (node.operator, node.start, node.seconds) == ("Add", 10 + 1e-6, 2e-6)


@pytest.mark.parametrize(
    ("operator", "inputs", "output", "expected"),
    [
        ("MatMul", ((4, 8), (8, 3)), (4, 3), 2 * 4 * 8 * 3),
        ("MatMul", ((2, 5, 4, 8), (2, 5, 8, 3)), (2, 5, 4, 3), 2 * 10 * 4 * 8 * 3),
        ("FusedMatMul", ((2, 5, 8), (8, 3)), (2, 5, 3), 2 * 10 * 8 * 3),
        ("Product", ((2, 5, 8), (2, 5, 3)), (8, 3), 2 * 10 * 8 * 3),
        ("Gemm", ((8, 4), (3, 8), (3,)), (4, 3), 2 * 4 * 8 * 3),
        # The heads lie between the axes of one of them: [batch, tokens, heads, width].
        ("Product", ((2, 4, 7, 7), (2, 7, 4, 6)), (2, 7, 4, 6), 2 * 2 * 4 * 7 * 7 * 6),
        ("Product", ((4, 8), (7, 3)), (4, 3), None),
        ("Conv", ((1, 3, 8, 8), (5, 3, 3, 3)), (1, 5, 6, 6), 2 * 5 * 36 * 27),
        ("Conv", (), (), None),
        ("Relu", ((4, 8),), (4, 8), 0),
    ],
)
def test_operations(
    operator: str, inputs: Sequence[Sequence[int]], output: Sequence[int], expected: int | None
) -> None:
    assert flops_of(operator, inputs, [output] if output else []) == expected


def test_nodes_have_the_module_of_their_forward_node(tmp_path: Path) -> None:
    noted = helper.make_node("MatMul", ["x", "w"], ["linear"], name="node_linear")
    noted.metadata_props.add(key=SCOPES, value=str(["", "encoder.0.fc", "linear"]))
    plain = graph(
        noted,
        helper.make_node("Relu", ["linear"], ["a"], name="/act/Relu"),
        helper.make_node("Mul", ["a", "a"], ["d"], name="/act/Relu_Grad/Mul"),
        helper.make_node("MatMul", ["d", "x"], ["w_grad"], name="w_grad/MatMul"),
        helper.make_node("MatMul", ["d", "w"], ["e"], name="node_linear_Grad/MatMul"),
    )
    form = graph(helper.make_node("Product", ["x", "w"], ["linear"], name="linear/Product"), *plain.graph.node[2:])
    for name, model in (("train.onnx", plain), ("train.kernels.onnx", form)):
        (tmp_path / name).write_bytes(model.SerializeToString())
    assert modules_in(tmp_path / "train.kernels.onnx") == {
        "linear/Product": "encoder.0.fc", "/act/Relu_Grad/Mul": "act", "w_grad/MatMul": "encoder.0.fc",
        "node_linear_Grad/MatMul": "encoder.0.fc",
    }  # fmt: skip
    assert modules_in(tmp_path / "missing.onnx") == {}


class Peer(SoloCommunicator):
    """Rank 0 of two ranks; the clock of the other is ahead, and its answers take a while."""

    world_size = 2

    def __init__(self, ahead: float, delays: Sequence[float]) -> None:
        self.now, self._ahead, self._delays = 0.0, ahead, list(delays)
        self.answer: Any = None

    def broadcast_object(self, value: Any) -> Any:
        self.answer = value
        return value

    def gather(self, value: Any) -> list[Any]:
        self.now += (delay := self._delays.pop() if self._delays else 1.0)
        there = self.now + self._ahead
        self.now += 2 * delay
        return [value, there]


@pytest.mark.parametrize(("ahead", "expected"), [(7.0, 7.0), (0.0, 0.0), (-3.0, -3.0)])
def test_clocks_are_compared_in_the_shortest_round(ahead: float, expected: float) -> None:
    world = Peer(ahead, [1e-3, 1e-4, 5e-3])
    zero, offset, error = aligned(world, lambda: world.now)
    assert (zero, offset, error) == (world.now, 0.0, 0.0)
    measured, error = world.answer[1][1]
    assert error == pytest.approx(1.5e-4)
    assert abs(measured - expected) <= error


def records(*, ends: bool = True) -> dict[int, list[dict[str, Any]]]:
    """Two ranks and two steps of 100 ms, of which rank 0 waits 30 for its samples and rank 1 50 for rank 0."""
    found: dict[int, list[dict[str, Any]]] = {}
    for rank, (data, comm, busy) in enumerate(((0.03, 0.01, 0.05), (0.0, 0.06, 0.03))):
        lines: list[dict[str, Any]] = [
            {
                "kind": "window", "rank": rank, "host": f"node{rank}", "world_size": 2, "first": 5, "to": 6,
                "micro_batch": 4, "gradient_accumulation": 1, "clock_error": 1e-5, "device": "cpu",
            }
        ]  # fmt: skip
        for step in (0, 1):
            start = 0.1 * step
            spans = (("steps", f"step {5 + step}", start, 0.1), ("data", "data wait", start, data))
            lines += [
                {"kind": "span", "lane": lane, "name": name, "start": at, "seconds": seconds}
                for lane, name, at, seconds in spans
            ]
            lines.append(
                {
                    "kind": "span", "lane": "collectives", "name": "all_reduce", "start": start + 0.09 - comm,
                    "seconds": comm, "bytes": 1_000_000,
                }
            )  # fmt: skip
        rows = (("fc", "MatMul", 20, busy, 4e9 * busy), ("act", "Relu", 20, 2 * 0.09 - 2 * data - 2 * comm - busy, 0))
        nodes = [
            {
                "step": True, "graph": "train", "module": module, "operator": operator, "by": "CPUExecutionProvider",
                "calls": calls, "seconds": seconds, "bytes": 1000 if flops else 9e11 * seconds, "flops": flops,
            }
            for module, operator, calls, seconds, flops in rows
        ]  # fmt: skip
        lines.append({"kind": "nodes", "rows": nodes})
        if ends:
            lines += [{"kind": "work", "flops": 400_000_000}] if rank == 0 else []
            lines += [{"kind": "limits", "flops": 1e10, "bytes": 1e12}, {"kind": "end", "step": 6}]
        found[rank] = lines
    return found


def test_the_rows_of_a_table_add_up(tmp_path: Path) -> None:
    found = of_records(tmp_path, records())
    assert found is not None
    assert found.complete
    assert found.wall == pytest.approx(0.4)
    rows = {row.name: row for row in found.rows()}
    assert sum(row.seconds for row in rows.values()) == pytest.approx(0.4)
    assert rows["data wait"].seconds == pytest.approx(0.06)
    assert rows["all_reduce"].seconds == pytest.approx(0.14)
    assert rows["between operators"].seconds == pytest.approx(0.04)
    assert found.of_limit(rows["MatMul"]) == pytest.approx(0.4)
    assert rows["MatMul"].largest == "fc"
    assert found.mfu == pytest.approx(4e8 / 0.1 / 2e10)
    assert {row.name for row in found.rows("module")} >= {"fc", "act"}
    assert head(found) == (
        "steps 5 to 6 of 2 ranks: 100 ms a step; clocks agree within 10 us; MFU 20.0% of 20 GFLOP/s, the fastest "
        "matrix product in fp32 that was measured on the ranks' cores"
    )
    text = profile_section(found)
    assert "data wait takes 30%" in text
    assert '<th scope="row">MatMul</th>' in text
    assert table(found, "operator", 2)[-1][0] == f"{len(rows) - 2} more"
    json.dumps(found.to_json())


def test_operators_that_a_host_queues_on_a_gpu_have_no_rate(tmp_path: Path) -> None:
    lines = records()
    for rank_lines in lines.values():
        for line in rank_lines:
            for row in line.get("rows", ()):
                row["by"] = "CUDAExecutionProvider"
    found = of_records(tmp_path, lines)
    assert found is not None
    assert "operators have the time in which the host queued them, and the GPU computes them later" in head(found)
    assert found.to_json()["queued"]
    assert [row.rate for row in found.rows() if row.kind == "operator"] == [None, None]
    assert not [text for text in advice(found) if "MatMul" in text or "between operators" in text]
    on_cpus = of_records(tmp_path, records())
    assert on_cpus is not None
    assert not on_cpus.queued
    assert None not in [row.rate for row in on_cpus.rows() if row.kind == "operator"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(4.2e-6, "4.2 us"), (0.00123456, "1.23 ms"), (0.0234, "23.4 ms"), (2.345, "2.35 s"), (75.0, "1:15 min")],
)
def test_short_steps_have_digits(tmp_path: Path, seconds: float, words: str) -> None:
    lines = [
        {"kind": "window", "rank": 0, "host": "n", "world_size": 1, "first": 1, "to": 1, "clock_error": None},
        {"kind": "span", "lane": "steps", "name": "step 1", "start": 0.0, "seconds": seconds},
    ]
    found = of_records(tmp_path, {0: lines})
    assert found is not None
    assert f"{words} a step" in head(found)


def test_advice_names_the_largest_savings_with_numbers(tmp_path: Path) -> None:
    found = of_records(tmp_path, records())
    assert found is not None
    first, second, third = advice(found)
    assert first.startswith("data wait takes 30% on rank 0, 30 ms a step: raise data.workers")
    assert second.startswith("ranks wait 25% of the time for others, most for rank 0, which takes 50 ms a step longer")
    assert third.startswith("MatMul takes 20% and reaches 40% of what this machine can do")


def test_a_rank_that_was_killed_leaves_a_table_and_a_trace(tmp_path: Path) -> None:
    folder = profile.folder_of(tmp_path, 3)
    folder.mkdir(parents=True)
    for rank, lines in records(ends=False).items():
        kept = lines if rank == 0 else lines[:4]
        profile.append(profile.record_of(folder, rank), kept)
    with open(profile.record_of(folder, 1), "ab") as file:
        file.write(b'{"kind": "span", "lane": "st')
    with gzip.open(profile.nodes_of(folder, 0), "wb") as packed:
        packed.write(
            profile.line_of({"kind": "node", "name": "MatMul", "start": 0.01, "seconds": 0.02, "module": "fc"})
        )
    whole = profile.nodes_of(folder, 0).read_bytes()
    profile.nodes_of(folder, 0).write_bytes(whole[:-8])
    assert profile.attempts(tmp_path) == [folder]
    found = of_records(folder, profile.records(folder))
    assert isinstance(found, Profile)
    assert not found.complete
    assert (found.steps, len(found.ranks)) == (1, 2)
    assert "the window to step 6 is incomplete" in head(found)
    trace = json.loads(gzip.decompress(profile.write_trace(folder).read_bytes()))
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}
    profile.nodes_of(folder, 0).write_bytes(whole[:40] + b"\xff" * 20 + whole[60:])
    trace = json.loads(gzip.decompress(profile.write_trace(folder).read_bytes()))
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}, "a damaged file of nodes costs its nodes alone"


def test_a_trace_is_whole_or_missing(tmp_path: Path) -> None:
    folder = profile.folder_of(tmp_path, 0)
    folder.mkdir(parents=True)
    profile.append(profile.record_of(folder, 0), [{"kind": "span", "lane": "steps", "name": "step 1"}])
    profile.append(profile.record_of(folder, 0), [{"kind": "nodes", "rows": [{}]}, {"kind": "window", "first": -1}])
    assert profile.records(folder) == {0: []}
    profile.nodes_of(folder, 0).mkdir()
    with pytest.raises(OSError, match="is a folder"):
        profile.write_trace(folder)
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["attempt-00"]


@pytest.mark.parametrize(
    ("window", "words"),
    [
        ("{from: 5, to: 4}", "is 4, before the first step 5"),
        ("{from: 1, to: 1001}", "records 1001 steps"),
        ("{from: 0, to: 4}", "must be more than 0, not 0"),
        ("{to: 4}", "is missing"),
    ],
)
def test_a_window_in_the_wrong_order(tmp_path: Path, window: str, words: str) -> None:
    (found,) = reported(tmp_path, SMALL + f"monitor:\n  profile: {window}\n")
    assert words in found


def test_a_run_file_with_a_window_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(SMALL + "monitor:\n  profile: {from: 20, to: 29}\n")
    first = read_run_file(path, files=False)
    assert not first.faults
    assert first.spec is not None
    assert first.spec.monitor.profile is not None
    assert (first.spec.monitor.profile.first, first.spec.monitor.profile.to) == (20, 29)
    path.write_text(dump_run_file(first.spec))
    assert read_run_file(path, files=False).spec == first.spec
