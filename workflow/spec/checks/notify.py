"""Rules of `monitor.notify`. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ortflow.workflow.spec.notify import EMail, Notify
from ortflow.workflow.spec.problem import Problem
from ortflow.workflow.spec.run import RunSpec
from ortflow.workflow.spec.sinks import PrometheusSink

_WEBHOOK = re.compile(r"(https?://|\$\{\w+\})\S*", re.ASCII)


def check_notify(spec: RunSpec) -> Iterator[Problem]:
    """Each has one of a command, a web address and a mail; a sink has a target."""
    for place, service in enumerate(spec.monitor.sinks):
        if isinstance(service, PrometheusSink) and service.file is None and service.port is None:
            yield Problem(("monitor", "sinks", place), "needs a file or a port", "give one of them")
    for place, sink in enumerate(spec.monitor.notify):
        path = ("monitor", "notify", place)
        targets = [name for name in ("command", "webhook", "mail") if getattr(sink, name) is not None]
        if len(targets) != 1:
            message = f"has {' and '.join(targets)}" if targets else "needs a command, a webhook or a mail"
            yield Problem(path, message, "give one of them")
        if "not_back" not in sink.on and sink.not_back_seconds != Notify.model_fields["not_back_seconds"].default:
            yield Problem((*path, "not_back_seconds"), "has no effect here", "add not_back to on")
        if sink.mail is not None:
            yield from _check_mail(sink.mail, (*path, "mail"))
        if sink.webhook is not None and not _WEBHOOK.fullmatch(sink.webhook):
            yield Problem(
                (*path, "webhook"), "is no http or https URL", "give one, such as https://example.org/${TOKEN}"
            )


def _check_mail(mail: EMail, path: tuple[str | int, ...]) -> Iterator[Problem]:
    """A login needs a user, one password and an encrypted connection."""
    sources = [name for name in ("password_variable", "password_file") if getattr(mail, name) is not None]
    if mail.user is not None and len(sources) != 1:
        message = "has two passwords" if sources else f"has no password for the user {mail.user}"
        yield Problem(path, message, "give one of password_variable and password_file")
    if mail.user is None and sources:
        yield Problem((*path, sources[0]), "is a password without a user", "give user, or leave it out")
    if mail.user is not None and mail.security == "none":
        yield Problem((*path, "security"), "would send the password unencrypted", "set starttls or tls")
    if mail.password_file is not None and not mail.password_file.startswith(("/", "~")):
        yield Problem(
            (*path, "password_file"), f"is relative ({mail.password_file})", "give an absolute path, or one with ~"
        )
