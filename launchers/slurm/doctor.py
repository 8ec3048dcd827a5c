"""`ortflow doctor --backend slurm`: whether a run can work on this cluster, checked before submission.

Reads only and starts nothing, except the trial job on request. A check that cannot be made is also a finding.
"""

from __future__ import annotations

import os
import pwd
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ortflow.launchers.batch.job_submission import new_submission
from ortflow.launchers.capabilities import Trial
from ortflow.launchers.file_system import existing, filesystem
from ortflow.launchers.findings import Finding, Level, fault, from_error, ok, untested, warning
from ortflow.launchers.interpreter import check, examine, interpreter_line, locate
from ortflow.launchers.named_programs import unconfirmed
from ortflow.launchers.slurm import checks
from ortflow.launchers.slurm.commands import Refused
from ortflow.launchers.slurm.fit import Asked, asked, chosen
from ortflow.launchers.slurm.launcher import SlurmLauncher
from ortflow.launchers.slurm.limits import breaks
from ortflow.launchers.slurm.probe import Start
from ortflow.launchers.slurm.refusals import refusal
from ortflow.launchers.slurm.restart_checks import restarts
from ortflow.launchers.slurm.sbatch import settings
from ortflow.launchers.slurm.site import Association, Partition, Settings, listed
from ortflow.launchers.slurm.survey import FINE_TO_HAVE, NEEDED, Survey
from ortflow.launchers.slurm.trial import NotRun, run_trial
from ortflow.launchers.slurm.trial_findings import findings
from ortflow.launchers.view.lines import duration
from ortflow.manifests.slurm.container import inside
from ortflow.manifests.slurm.trial import trial_spec
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.spec.file.paths import input_files

if TYPE_CHECKING:
    from ortflow.launchers.base import Submission
    from ortflow.launchers.slurm.launcher import SlurmRequest

SLOW_ANSWER = 2.0
"""Seconds after which the controller is noticeably slow."""

NO_PLACE = "node configuration is not available"


def examine_cluster(
    submission: Submission, trial: Trial | None, slurm: Survey | None = None, *, of_user: bool = True
) -> Iterator[Finding]:
    """All findings, as each check ends; `of_user` False: the run stands for an unknown one."""
    slurm = slurm or Survey()
    try:
        yield from _commands(slurm)
        yield from _site(submission, slurm, of_user)
    except OrtflowError as error:
        yield from_error("Slurm", error) if isinstance(error, UserError) else fault("controller", str(error))
        yield from _here(submission)
        yield untested("everything else", "it needs an answer from Slurm")
        return
    yield from _here(submission)
    yield from _nodes(submission, slurm, trial)


def _commands(slurm: Survey) -> Iterator[Finding]:
    missing = [name for name in (*NEEDED, *FINE_TO_HAVE) if not slurm.has(name)]
    if needed_names := [name for name in missing if name in NEEDED]:
        raise UserError(
            f"there is no {', '.join(needed_names)} on the PATH", fix="log in to the cluster, or load the site's module"
        )
    major, minor = slurm.version()
    present = [name for name in (*NEEDED, *FINE_TO_HAVE) if name not in missing]
    summary = f"{major}.{minor:02d}, with {', '.join(present)}"
    yield ok("Slurm", summary + (f"; without {', '.join(missing)}" if missing else ""))
    seconds = slurm.ping()
    text = f"answers in {1000 * seconds:.0f} ms" if seconds < 1 else f"answers in {duration(seconds)}"
    yield ok("controller", text) if seconds < SLOW_ANSWER else warning("controller", text)


def _site(submission: Submission, slurm: Survey, of_user: bool) -> Iterator[Finding]:
    spec, request = submission.spec, asked(submission.spec)
    config, partitions, nodes, jobs = slurm.config(), slurm.partitions(), slurm.nodes(), slurm.mine()
    yield ok("queue", f"its output is as expected; {sum(job.active for job in jobs)} jobs of yours are in it")
    yield checks.accounting(config, slurm.accounts())
    user = pwd.getpwuid(os.geteuid()).pw_name
    yield from checks.identity(user, _associations(slurm, config, user), config, request if of_user else None)
    yield from (checks.partition_line(partition, nodes) for partition in partitions)
    places = chosen(request, partitions)
    if of_user:
        yield from checks.fits(request, partitions, nodes)
        yield from _limits(slurm, config, user, request, places)
        yield checks.memory(request, spec.resources.ranks_per_node, places, config)
        yield from checks.time(request, places)
    yield from restarts(config, places, spec.backends.slurm.requeue)
    yield from _starts(submission, slurm, of_user)


def _associations(slurm: Survey, config: Settings, user: str) -> list[Association] | None:
    if not config.get("AccountingStorageType", "").endswith("slurmdbd"):
        return None
    try:
        return slurm.associations(user)
    except OrtflowError:
        return None


def _limits(
    slurm: Survey, config: Settings, user: str, request: Asked, places: Sequence[Partition]
) -> Iterator[Finding]:
    """Limits of the run's QOS, its account and its partitions' QOS, if Slurm enforces them."""
    if not listed(config, "AccountingStorageEnforce").keys() & {"limits", "safe", "qos"}:
        return
    try:
        for whose, limits in slurm.limits(user, request, places):
            yield from (fault("request", f"{whose} {misfit.what}", misfit.fix) for misfit in breaks(request, limits))
    except OrtflowError as error:
        yield untested("limits", str(error))


def _starts(submission: Submission, slurm: Survey, of_user: bool) -> Iterator[Finding]:
    """MPI plug-ins, the start of the ranks, and sbatch's check of the script."""
    names = slurm.plugins()
    with ThreadPoolExecutor(len(names) or 1) as pool:
        loads = dict(zip(names, pool.map(slurm.starts_with, names), strict=True))
    yield checks.plugins(loads)
    if inside(submission.spec) is None and (reason := unconfirmed(submission.spec, submission.overrides)) is not None:
        yield untested("MPI", reason)
        return
    request = _request(submission, slurm)
    if isinstance(request, Finding):
        yield request
        return
    placement, setting = request.placement, submission.spec.backends.slurm.mpi
    yield checks.start(setting, Start(placement.start, placement.mpirun, placement.kind), placement.rank_python, loads)
    if of_user:
        yield _sbatch(request, slurm)


def _request(submission: Submission, slurm: Survey) -> SlurmRequest | Finding:
    try:
        return SlurmLauncher(slurm).request(submission)
    except UserError as error:
        return from_error("MPI", error)


def _sbatch(request: SlurmRequest, slurm: Survey) -> Finding:
    """sbatch's check of the script, without submission."""
    about = "sbatch"
    try:
        text = request.script(new_submission())
        with tempfile.NamedTemporaryFile("w", prefix="ortflow-doctor-", suffix=".sh") as file:
            file.write(text)
            file.flush()
            text = slurm.would_take(file.name, settings(text, os.environ, Path.cwd()))
    except Refused as error:
        if NO_PLACE in error.message:
            # Without --test-only it would accept the job and let it wait.
            advice = "nodes may be down, or backends.slurm.constraint, nodelist and exclude leave too few"
            return warning(about, f"cannot place the job now: {error.message}", advice)
        return from_error(about, refusal(error.message))
    except UserError as error:
        return from_error(about, error)
    return ok(about, f"takes the job {text}")


def _here(submission: Submission) -> Iterator[Finding]:
    """Checks that need no Slurm: the interpreter, the folder of the runs."""
    yield _interpreter(submission)
    folder, about = existing(submission.run.root.parent), "run directory"
    if os.access(folder, os.W_OK):
        yield ok(about, f"{submission.run.root}, on {filesystem(folder) or 'an unknown file system'}")
    else:
        yield fault(about, f"{folder} may not be written", "give another run_dir, or --runs-dir")


def _interpreter(submission: Submission) -> Finding:
    spec = submission.spec
    about, python = "interpreter", spec.resources.python
    if (box := inside(spec)) is not None:
        return untested(about, f"it is inside {box.image}, which is opened only on the nodes")
    if python is not None and os.path.isabs(python) and not os.path.exists(python):
        return untested(about, f"{python} is not here; the nodes may have it")
    if (reason := unconfirmed(spec, submission.overrides)) is not None:
        return untested(about, reason)
    try:
        examined = examine(locate(python))
        check(examined, program=spec.program is not None)
    except UserError as error:
        return from_error(about, error)
    return ok(about, interpreter_line(examined))


def _nodes(submission: Submission, slurm: Survey, trial: Trial | None) -> Iterator[Finding]:
    """Checks that only a job can make."""
    about = "nodes"
    if trial is None:
        checks = (
            "whether they see the run directory and the interpreter, whether ranks connect; their disk, clocks, NCCL"
        )
        yield untested(about, checks, "a job of at most two minutes checks that: add --job")
        return
    spec = trial_spec(submission.spec, trial.nodes)
    request = _request(replace(submission, spec=spec, after=()), slurm)
    if isinstance(request, Finding):
        yield untested(about, "no job was tried, because the ranks cannot be started")
        return
    placement = replace(request.placement, submission=new_submission(), dependency=None)
    paths = [path for path in input_files(spec) if os.path.exists(path)]
    try:
        results, leftovers = run_trial(spec, placement, paths, slurm, trial.wait, trial.report)
    except NotRun as error:
        yield error.finding
        if error.finding.level is not Level.FAULT:
            yield untested(about, "the job did not run")
        return
    start, model = Start(placement.start, placement.mpirun, placement.kind), Path(spec.model.path if spec.model else "")
    folder, size = str(existing(placement.run_dir.parent)), model.stat().st_size if model.is_file() else None
    yield from findings(results, spec.world_size, start, folder, size, spec.preflight)
    yield from leftovers
