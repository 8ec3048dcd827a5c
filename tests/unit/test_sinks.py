"""Sinks: each against its real package, and sinks that fail or hang."""

from __future__ import annotations

import json
import math
import re
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from waits import PATIENCE, wait_until

from ortflow.workflow.errors import UserError
from ortflow.workflow.run.events import EventLog
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.sinks.__main__ import settings_of
from ortflow.workflow.sinks.delivery import Delivery
from ortflow.workflow.sinks.following import Following
from ortflow.workflow.sinks.kinds import check_packages
from ortflow.workflow.sinks.metrics import metrics_of
from ortflow.workflow.sinks.process import SinkProcess
from ortflow.workflow.sinks.protocol import Run
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.sinks import InstalledSink

SECONDS = 600.0
RUN = Run("gpt", "0123", Path("/nowhere"), 0, {})


def test_metrics_of_events() -> None:
    step = {"event": "step", "step": 3, "loss": 1.5, "seconds": 0.5, "samples": 8, "values": {"speed": 2, "note": "x"}}
    assert metrics_of(step) == {"loss": 1.5, "seconds": 0.5, "samples": 8, "speed": 2, "samples_per_second": 16}
    assert metrics_of({"event": "step", "step": 3, "loss": None, "grad_norm": math.inf, "seconds": 0}) == {"seconds": 0}
    evaluation = {"event": "evaluation", "time": 1.0, "attempt": 0, "rank": 0, "step": 3, "samples": 9, "loss": 2.0}
    assert metrics_of(evaluation) == {"eval/loss": 2.0}
    assert metrics_of({"event": "checkpoint", "step": 3, "seconds": 2.0, "bytes": 10}) == {
        "checkpoint_seconds": 2.0,
        "checkpoint_bytes": 10,
    }
    assert metrics_of({"event": "memory", "time": 1.0, "attempt": 0, "rank": 0, "peak": 5}) == {"memory/peak": 5}
    assert metrics_of({"event": "finished", "step": 3}) == {}


def test_events_of_an_attempt_are_read_once_although_the_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "rank-0000.jsonl"
    earlier = EventLog(path, 0, 0)
    for step in (1, 2, 3):
        earlier.write("step", step=step)
    earlier.close()
    following = Following(path, 1)
    log = EventLog(path, 0, 1)
    log.write("attempt_start", pid=1)
    assert [event["event"] for event in following.new()] == ["attempt_start"]
    log.rewind(1)
    for step in (2, 3):
        log.write("step", step=step)
    assert [(event["event"], event.get("step")) for event in following.new()] == [
        ("rewind", None),
        ("step", 2),
        ("step", 3),
    ]
    assert list(following.new()) == []
    with path.open("ab") as file:
        file.write(b'{"event": "step", "step": 4, "attempt": 1, "rank": 0, "time": 9e9')
    assert list(following.new()) == []
    log.close()


def test_services_get_no_secrets(tmp_path: Path) -> None:
    hook = "https://chat.example.org/hooks/hush"
    keys = {
        "name": "gpt",
        "model": {"path": "gpt.onnx", "loss": {"kind": "cross_entropy"}},
        "data": {"train": {"path": ["https://me:hush@host/a.csv?key=hush", "b.csv"]}, "micro_batch": 8},
        "train": {"steps": 1, "optimizer": {"name": "adamw", "lr": 1e-3}},
        "monitor": {"notify": [{"on": ["failed"], "webhook": hook}]},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(keys))
    settings = settings_of(load_run_file(tmp_path / "run.yaml", others=False))
    assert settings["data"]["train"]["path"] == ["https://host/a.csv?…", "b.csv"]
    assert "hush" not in str(settings)


class _Failing:
    def begin(self, run: Run) -> None:
        self.fails = True
        self.failed = 0
        self.received: list[int] = []

    def write(self, step: int, time: float, values: Mapping[str, float]) -> None:
        if self.fails:
            self.failed += 1
            raise RuntimeError("no route\nto the host")
        self.received.append(step)

    def end(self, state: str) -> None:
        self.received.append(-1)


def test_a_failing_sink_is_reported_once() -> None:
    warnings: list[str] = []
    sink = _Failing()
    delivery = Delivery("mine", lambda: sink, RUN, warnings.append)
    for step in range(3):
        delivery.write(step, 0.0, {})
    wait_until(lambda: hasattr(sink, "failed") and sink.failed == 3)
    sink.fails = False
    delivery.write(3, 0.0, {})
    delivery.end("finished", PATIENCE)
    assert warnings == ["sink mine fails: no route"]
    assert sink.received == [3, -1]


def test_a_sink_that_cannot_begin_is_reported_once() -> None:
    def make() -> _Failing:
        raise ImportError("no module")

    warnings: list[str] = []
    delivery = Delivery("mine", make, RUN, warnings.append)
    delivery.write(1, 0.0, {})
    delivery.end("failed", PATIENCE)
    assert warnings == ["sink mine fails: no module"]


def test_a_sink_that_hangs_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ortflow.workflow.sinks.delivery.MOST", 5)
    released = threading.Event()

    class Hanging(_Failing):
        def write(self, step: int, time: float, values: Mapping[str, float]) -> None:
            released.wait(3 * PATIENCE)

    warnings: list[str] = []
    delivery = Delivery("slow", Hanging, RUN, warnings.append)
    start = time.monotonic()
    for step in range(1000):
        delivery.write(step, 0.0, {})
    delivery.end("finished", 0.2)
    assert time.monotonic() - start < PATIENCE
    released.set()
    assert warnings == [
        "sink slow does not keep up: steps are left out there; the record has them",
        "sink slow was not done after 0.2 s: its last steps may be missing there",
    ]


def test_a_missing_sink_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"monitor\.sinks\.0\.name: there is no sink 'mine'"):
        check_packages([InstalledSink(kind="installed", name="mine")])
    monkeypatch.setattr("ortflow.workflow.sinks.kinds.find_spec", lambda name: None)
    from ortflow.workflow.spec.sinks import WandbSink

    with pytest.raises(UserError, match=r"monitor\.sinks\.0: needs a package .*pip install 'ortflow\[wandb\]'"):
        check_packages([WandbSink(kind="wandb")])


class _Collector(BaseHTTPRequestHandler):
    bodies: ClassVar[list[bytes]] = []

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[str]:
    """URL of a server that takes what OpenTelemetry sends."""
    with HTTPServer(("localhost", 0), _Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://localhost:{server.server_port}/v1/metrics"
        server.shutdown()
        thread.join()


def _attempt(root: Path, attempt: int, steps: range, code: int) -> list[dict[str, Any]]:
    """One attempt of a run that logs steps; returns its warnings."""
    run_dir = RunDir(root)
    with run_dir.attempts.open("a") as file:
        file.write(json.dumps({"event": "start", "attempt": attempt, "time": 1.0 + attempt}) + "\n")
    events = EventLog(run_dir.events(0), 0, attempt)
    events.write("attempt_start", pid=1)
    sinks = SinkProcess(run_dir, attempt, events, SECONDS)
    for step in steps:
        events.write("step", step=step, loss=1 / step, seconds=0.1, samples=4)
    events.write("evaluation", step=steps[-1], loss=0.25, samples=9)
    sinks.end(code)
    events.close()
    lines = run_dir.events(0).read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == "warning"]


def _wandb_records(data: bytes) -> Iterator[bytes]:
    """Records of a file of wandb: LevelDB's log format in blocks of 32 KiB, behind a header of 7 bytes."""
    position, parts = 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, last
            yield parts
            parts = b""


def test_the_services_get_two_attempts_of_a_run(
    tmp_path: Path, collector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("prometheus_client", "wandb", "mlflow", "opentelemetry.sdk"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs another package
    store = f"file://{tmp_path}/mlflow"
    settings = {
        "name": "gpt",
        "program": {"command": ["/bin/true"], "env": {"PASSWORD": "secret-of-the-user"}},
        "monitor": {
            "sinks_seconds": SECONDS,
            "sinks": [
                {"kind": "prometheus", "file": "metrics.prom"},
                {"kind": "wandb", "mode": "offline", "project": "trials"},
                {"kind": "mlflow", "tracking_uri": store},
                {"kind": "opentelemetry", "endpoint": collector},
            ],
        },
    }
    root = tmp_path / "runs/gpt"
    root.mkdir(parents=True)
    (root / "run.yaml").write_text(yaml.safe_dump(settings))
    assert _attempt(root, 0, range(1, 11), 75) == []
    assert _attempt(root, 1, range(6, 21), 0) == []

    text = (root / "metrics.prom").read_text()
    assert 'ortflow_step{attempt="1",run="gpt"} 20.0' in text
    assert 'ortflow_metric{attempt="1",metric="eval/loss",run="gpt"} 0.25' in text
    assert 'ortflow_state{attempt="1",run="gpt",state="finished"} 1.0' in text

    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("ortflow")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    losses = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "loss")}
    assert losses == {step: pytest.approx(1 / step) for step in range(1, 21)}
    assert "secret-of-the-user" not in str(run.data.params)

    from wandb.proto.wandb_internal_pb2 import Record

    logged: list[dict[str, float]] = []
    identities = set()
    for file in sorted(root.glob("sinks/wandb/offline-run-*/run-*.wandb")):
        for packed in _wandb_records(file.read_bytes()):
            record = Record.FromString(packed)
            if record.HasField("run"):
                identities.add(record.run.run_id)
            items = record.history.item
            logged.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
    assert len(identities) == 1
    assert [row["step"] for row in logged if "loss" in row] == [*range(1, 11), *range(6, 21)]
    assert [row["eval/loss"] for row in logged if "eval/loss" in row] == [0.25, 0.25]

    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    newest: dict[str, float] = {}
    for body in _Collector.bodies:
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.gauge.data_points:
                        names = [each.value.string_value for each in point.attributes if each.key == "metric"]
                        newest["/".join([metric.name, *names])] = point.as_double or point.as_int
    assert newest["ortflow.step"] == 20
    assert newest["ortflow.metric/eval/loss"] == 0.25


def test_a_service_that_is_not_there_costs_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    (tmp_path / "file").write_text("")
    settings = {
        "name": "gpt",
        "program": {"command": ["/bin/true"]},
        "monitor": {"sinks": [{"kind": "prometheus", "file": "file/metrics.prom"}]},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    (warning,) = _attempt(tmp_path, 0, range(1, 3), 0)
    assert warning["message"].startswith("sink prometheus fails: ")
    assert "file" in warning["message"]


def test_the_dashboard_uses_metrics_that_exist(tmp_path: Path) -> None:
    prometheus_client = pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    from prometheus_client.parser import text_string_to_metric_families

    from ortflow.workflow.sinks.prometheus import Prometheus
    from ortflow.workflow.spec.sinks import PrometheusSink

    assert prometheus_client.__name__
    sink = Prometheus(PrometheusSink(kind="prometheus", file="metrics.prom"))
    sink.begin(Run("gpt", "0123", tmp_path, 0, {}))
    values = {"loss": 1.0, "lr": 0.1, "grad_norm": 2.0, "seconds": 0.5, "samples": 8}
    sink.write(1, 2.0, metrics_of({"event": "step", "step": 1, **values}))
    sink.write(1, 2.0, metrics_of({"event": "evaluation", "step": 1, "loss": 1.0}))
    sink.end("finished")
    families = list(text_string_to_metric_families((tmp_path / "metrics.prom").read_text()))
    known = {sample.labels.get("metric", family.name) for family in families for sample in family.samples}
    known |= {family.name for family in families}
    dashboard = json.loads((Path(__file__).parents[2] / "docs/grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(expressions) == len({panel["id"] for panel in dashboard["panels"]})
    for expression in expressions:
        assert set(re.findall(r"ortflow_\w+", expression)) <= known
        assert set(re.findall(r'metric="([^"]+)"', expression)) <= known
