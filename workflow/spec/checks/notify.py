"""Rules of `monitor.notify`. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ortflow.workflow.spec.problem import Problem
from ortflow.workflow.spec.run import RunSpec
from ortflow.workflow.spec.sinks import PrometheusSink

_WEBHOOK = re.compile(r"(https?://|\$\{\w+\})\S*", re.ASCII)


def check_notify(spec: RunSpec) -> Iterator[Problem]:
    """Each has one of a command and a web address; a sink has a target."""
    for place, service in enumerate(spec.monitor.sinks):
        if isinstance(service, PrometheusSink) and service.file is None and service.port is None:
            yield Problem(("monitor", "sinks", place), "needs a file or a port", "give one of them")
    for place, sink in enumerate(spec.monitor.notify):
        path = ("monitor", "notify", place)
        if (sink.command is None) == (sink.webhook is None):
            what = "needs a command or a webhook" if sink.command is None else "has a command and a webhook"
            yield Problem(path, what, "give one of them")
        if sink.webhook is not None and not _WEBHOOK.fullmatch(sink.webhook):
            yield Problem(
                (*path, "webhook"), "is no http or https URL", "give one, such as https://example.org/${TOKEN}"
            )
