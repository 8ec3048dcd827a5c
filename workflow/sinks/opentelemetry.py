"""Gauges by OpenTelemetry's protocol over HTTP: `ortflow.step`, and `ortflow.metric` with the attribute `metric`."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from ortflow.workflow.sinks.protocol import Run, State
from ortflow.workflow.spec.sinks import OpenTelemetrySink

PERIOD = 5.0
"""Seconds between two sendings, each with the newest values."""


class OpenTelemetry:
    """The sink of an `OpenTelemetrySink` section."""

    def __init__(self, section: OpenTelemetrySink) -> None:
        self._section = section

    def begin(self, run: Run) -> None:
        """Start the exporter, which sends from a separate thread."""
        reader = PeriodicExportingMetricReader(
            OTLPMetricExporter(endpoint=self._section.endpoint), export_interval_millis=PERIOD * 1000
        )
        resource = Resource.create(
            {"service.name": "ortflow", "service.instance.id": run.identity, "ortflow.run": run.name}
        )
        self._provider = MeterProvider([reader], resource=resource)
        meter = self._provider.get_meter("ortflow")
        self._step = meter.create_gauge("ortflow.step", description="Steps done")
        self._metric = meter.create_gauge("ortflow.metric", description="Newest value of a metric")
        self._attempt = run.attempt

    def write(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Set the gauges."""
        self._step.set(step, {"attempt": self._attempt})
        for name, value in values.items():
            self._metric.set(value, {"attempt": self._attempt, "metric": name})

    def end(self, state: State) -> None:
        """Send the last values. Raises RuntimeError if the collector does not take them."""
        delivered = self._provider.force_flush(timeout_millis=5000)
        self._provider.shutdown(timeout_millis=1000)
        if not delivered:
            raise RuntimeError("the collector has not taken the last values")
