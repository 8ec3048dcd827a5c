"""Which sink a section of `monitor.sinks` is, and the package that it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec

from typing_extensions import assert_never

from ortflow.workflow.errors import UserError
from ortflow.workflow.sinks.protocol import GROUP, Sink
from ortflow.workflow.spec.sinks import InstalledSink, MlflowSink, OpenTelemetrySink, PrometheusSink, WandbSink
from ortflow.workflow.spec.sinks import Sink as Section

PACKAGES = {
    "prometheus": ("prometheus_client",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "opentelemetry": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
}
"""Kind, which is also the extra of ortflow -> modules that it imports."""


def check_packages(sections: Sequence[Section]) -> None:
    """Raise UserError if the package of a sink is not installed."""
    for number, section in enumerate(sections):
        key_path = f"monitor.sinks.{number}"
        if isinstance(section, InstalledSink):
            names = sorted(point.name for point in entry_points(group=GROUP))
            if section.name not in names:
                raise UserError(
                    f"there is no sink {section.name!r}",
                    where=f"{key_path}.name",
                    fix=f"install the package that provides it; installed are {', '.join(names) or 'none'}",
                )
        elif not all(_is_installed(module) for module in PACKAGES[section.kind]):
            raise UserError(
                f"needs a package that is not installed for the ranks ({PACKAGES[section.kind][0]})",
                where=key_path,
                fix=f"install it with `pip install 'ortflow[{section.kind}]'`, or remove the sink",
            )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def name_of(section: Section) -> str:
    """The sink, for messages."""
    return section.name if isinstance(section, InstalledSink) else section.kind


def maker_of(section: Section) -> Callable[[], Sink]:
    """What makes the sink; called in the sink's thread, where it imports its package."""

    def make() -> Sink:
        if isinstance(section, PrometheusSink):
            from ortflow.workflow.sinks.prometheus import Prometheus

            return Prometheus(section)
        if isinstance(section, WandbSink):
            from ortflow.workflow.sinks.wandb import Wandb

            return Wandb(section)
        if isinstance(section, MlflowSink):
            from ortflow.workflow.sinks.mlflow import Mlflow

            return Mlflow(section)
        if isinstance(section, OpenTelemetrySink):
            from ortflow.workflow.sinks.opentelemetry import OpenTelemetry

            return OpenTelemetry(section)
        if isinstance(section, InstalledSink):
            (point,) = entry_points(group=GROUP, name=section.name)
            sink: Sink = point.load()(**section.options)
            return sink
        assert_never(section)

    return make
