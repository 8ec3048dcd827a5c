"""Findings about a cluster's settings for a job that is preempted, out of time, or loses a node. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ortflow.launchers.findings import Finding, ok, warning
from ortflow.launchers.slurm.site import Partition, Settings, listed, restart_delay, seconds
from ortflow.launchers.view.lines import duration

SHORT_GRACE = 20.0
"""Seconds below which a large model's checkpoint may not finish."""
SUSPENDING = {"SUSPEND", "GANG", "SUSPEND,GANG", "GANG,SUSPEND"}


def restarts(settings: Settings, places: Sequence[Partition], requeue: bool) -> Iterator[Finding]:
    """All findings; `places` are the partitions that the run may go to, `requeue` is the run file's."""
    yield _requeue(settings, requeue)
    yield _preemption(settings, places)
    yield _signal(settings)
    yield _delay(settings)
    yield _prolog(settings)


def _requeue(settings: Settings, requeue: bool) -> Finding:
    about, value = "requeue", settings.get("JobRequeue", "")
    if not requeue:
        text = "backends.slurm.requeue is false: a job that has lost a node is not started again"
        return warning(about, text, "set it to true, unless the site does not allow it")
    asks = "" if value == "1" else ": only jobs that ask for it are queued again, and ortflow's do"
    return ok(about, f"JobRequeue={value or 'unknown'}{asks}")


def _preemption(settings: Settings, places: Sequence[Partition]) -> Finding:
    about, plugin = "preemption", settings.get("PreemptType", "preempt/none").removeprefix("preempt/")
    kill = seconds(settings.get("KillWait", "")) or 30.0
    modes = {place.preempt_mode for place in places} or {settings.get("PreemptMode", "OFF")}
    if plugin == "none" or modes <= {"OFF", ""}:
        return ok(about, f"jobs are not preempted; ranks of one that is ended have KillWait {kill:g} s to save")
    if modes <= SUSPENDING:
        return ok(about, "jobs are suspended, and resume by themselves")
    grace = min((place.grace for place in places), default=0)
    text = f"{plugin}, {' and '.join(sorted(modes)).lower()}: ranks have {grace + kill:g} s to save "
    text += f"(grace {grace} s, KillWait {kill:g} s)"
    if "CANCEL" in modes and not grace:
        text += "; a job is cancelled, not queued again, and ortflow submits another in its place"
    if grace + kill < SHORT_GRACE:
        return warning(about, text, "set checkpoint.every_seconds to limit the loss if that is too short")
    return ok(about, text)


def _signal(settings: Settings) -> Finding:
    about = "preempt_send_user_signal"
    if about in listed(settings, "SlurmctldParameters"):
        return ok(about, "set: ranks are notified by SIGUSR2")
    return ok(about, "not set: ranks are notified by SIGTERM, which they handle as well")


def _delay(settings: Settings) -> Finding:
    delay, source = restart_delay(settings)
    return ok("restart delay", f"a requeued job is delayed by up to {duration(delay)} (BeginTime): {source}")


def _prolog(settings: Settings) -> Finding:
    flags, prolog = settings.get("PrologFlags", ""), settings.get("Prolog") or settings.get("Prolog[0]")
    if not prolog:
        return ok("PrologFlags", f"{flags or 'none'}; the site has no prolog")
    # Contain and X11 imply Alloc (slurm.conf(5)).
    early = listed(settings, "PrologFlags").keys() & {"Alloc", "Contain", "X11"}
    when = "when the job begins" if early else "with the first step on each node"
    return ok("PrologFlags", f"{flags or 'none'}: the site's prolog runs {when}")
