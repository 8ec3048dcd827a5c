"""Gauges for Prometheus: `ortflow_step`, `ortflow_metric{metric="loss"}` …, each with the labels `run` and `attempt`.

The names are documented in docs/sinks.md, and used by docs/grafana.json.
"""

from __future__ import annotations

import time as clock
from collections.abc import Mapping

import prometheus_client

from ortflow.workflow.sinks.protocol import Run, State
from ortflow.workflow.spec.sinks import PrometheusSink

PERIOD = 2.0
"""Seconds between two writings of the file; Prometheus reads it every 15 s or so."""
STATES = ("running", "finished", "preempted", "failed")


class Prometheus:
    """The sink of a `PrometheusSink` section. Raises OSError if the file or port cannot be used."""

    def __init__(self, section: PrometheusSink) -> None:
        self._section = section
        self._written = 0.0

    def begin(self, run: Run) -> None:
        """Make the gauges; serve them, if a port is given."""
        registry = self._registry = prometheus_client.CollectorRegistry()
        labels = ["run", "attempt"]
        values = self._labels = (run.name, str(run.attempt))
        self._step = prometheus_client.Gauge("ortflow_step", "Steps done", labels, registry=registry).labels(*values)
        self._time = prometheus_client.Gauge(
            "ortflow_last_step_timestamp_seconds", "Unix time of the last step", labels, registry=registry
        ).labels(*values)
        self._metrics = prometheus_client.Gauge(
            "ortflow_metric", "Newest value of a metric", [*labels, "metric"], registry=registry
        )
        self._states = prometheus_client.Gauge(
            "ortflow_state", "1 for the state that the attempt is in", [*labels, "state"], registry=registry
        )
        self._file = None if self._section.file is None else run.folder / self._section.file
        if self._section.port is not None:
            prometheus_client.start_http_server(self._section.port, registry=registry)
        self._enter("running")

    def write(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Set the gauges."""
        self._step.set(step)
        self._time.set(time)
        for name, value in values.items():
            self._metrics.labels(*self._labels, name).set(value)
        if clock.monotonic() - self._written > PERIOD:
            self._replace_file()

    def end(self, state: State) -> None:
        """The last values stay in the file."""
        self._enter(state)

    def _enter(self, state: str) -> None:
        for name in STATES:
            self._states.labels(*self._labels, name).set(name == state)
        self._replace_file()

    def _replace_file(self) -> None:
        self._written = clock.monotonic()
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            prometheus_client.write_to_textfile(str(self._file), self._registry)
