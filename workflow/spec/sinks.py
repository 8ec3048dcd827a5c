"""The run file's `monitor.sinks`: services that get a run's metrics besides its own record."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ortflow.workflow.spec.base import Section, Text, no_keys


class PrometheusSink(Section):
    """Gauges for Prometheus: a file for node_exporter's textfile collector, or an endpoint."""

    kind: Literal["prometheus"]
    """The service."""
    file: Text | None = None
    """File that is replaced every few seconds; relative to the run directory."""
    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of rank 0's host at which `/metrics` is served while the run goes on; 0 chooses a free one."""


class WandbSink(Section):
    """A run of Weights & Biases, continued by each attempt. Reads WANDB_API_KEY from the environment."""

    kind: Literal["wandb"]
    """The service."""
    project: Text = "ortflow"
    """Its project."""
    entity: Text | None = None
    """Its user or team."""
    mode: Literal["online", "offline"] = "online"
    """Offline writes to the run directory, from where `wandb sync` uploads it."""


class MlflowSink(Section):
    """A run of MLflow, continued by each attempt. Reads MLFLOW_TRACKING_USERNAME and _PASSWORD or _TOKEN."""

    kind: Literal["mlflow"]
    """The service."""
    tracking_uri: Text
    """Its server, or `sqlite:///FILE`."""
    experiment: Text = "ortflow"
    """Its experiment, which is made if there is none."""


class OpenTelemetrySink(Section):
    """Gauges by OpenTelemetry's protocol over HTTP. Reads the OTEL_EXPORTER_OTLP variables from the environment."""

    kind: Literal["opentelemetry"]
    """The service."""
    endpoint: Text | None = None
    """URL of the collector's metrics, such as http://collector:4318/v1/metrics; by default the environment's."""


class InstalledSink(Section):
    """A sink of an installed package: an entry point of the group `ortflow.sinks`."""

    kind: Literal["installed"]
    """A package's."""
    name: Text
    """Name of the entry point."""
    options: dict[Text, Any] = Field(default_factory=no_keys)
    """Keyword arguments."""


Sink = Annotated[
    PrometheusSink | WandbSink | MlflowSink | OpenTelemetrySink | InstalledSink, Field(discriminator="kind")
]
