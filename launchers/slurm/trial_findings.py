"""Findings from the reports of a trial job's nodes; `trial_ranks` has those of its ranks. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from statistics import median

from ortflow.launchers.findings import Finding, fault, ok, untested, warning
from ortflow.launchers.interpreter import Interpreter, check
from ortflow.launchers.slurm.probe import Start
from ortflow.launchers.slurm.trial import Results
from ortflow.launchers.slurm.trial_ranks import relevant_line, world_of
from ortflow.launchers.view.lines import duration, size
from ortflow.manifests.slurm.trial import REPORT_LIMIT, UNSEEN
from ortflow.workflow.errors import UserError

SKEW = 2.0
"""Seconds by which clocks may differ; tasks of a step begin within less."""
SLOW_SIGHT = 5.0
"""Seconds until another node's file is visible above which a restart may read outdated files."""
SLOW_DISK = 20e6
"""Bytes a second."""
LITTLE = 2e9
"""Bytes that should be free if the model is unknown."""
CHECKPOINTS = 11
"""Multiple of a model's size that a run writes: its newest two checkpoints and the one being written, each with the
weights and two moments, the graphs, and the export."""
MANY = 6
"""Number of nodes that a message names; the rest is counted."""
ENDED = {"COMPLETED", "FAILED", "UNKNOWN"}
"""States of a job whose script has ended by itself."""
FENCED = "ortflow uses a fence file instead; do not start a run a second time by hand"
ENVIRONMENT = "the environment must be on storage that every node mounts; set resources.python to one that is"


def findings(
    results: Results, world: int, start: Start, folder: str, model_bytes: int | None, gate: bool = False
) -> Iterator[Finding]:
    """All findings of the job.

    `folder` is the shared folder, `world` the number of ranks. With `gate`, the run has `preflight: true`, which a slow
    node does not pass.
    """
    nodes = results.nodes
    text = f"job {results.job.id} ran on {results.job.nodes or 'no node'}, waited {duration(results.waited)}"
    yield ok("job", text, waited=results.waited)
    unseen = [node for node in nodes if node not in results.seen]
    good = [node for node in nodes if node in results.reports]
    silent = [node for node in nodes if node in results.seen and node not in good]
    if (broken := _broken(results, unseen)) is not None:
        yield broken
        yield untested("nodes", "the job did not run the checks")
        return
    if unseen:
        text = f"{named(unseen)} {_do(unseen)} not see {folder}, or may not write there"
        yield fault("shared folder", text, "put the run directory (run_dir, --runs-dir) where every node sees it")
    if good:
        yield _sight(results, good, folder)
        yield _locks(results, good, folder)
    yield from _interpreters(results, good, silent)
    yield from _inputs(results, good)
    yield from _commands(results)
    if results.seen:
        yield _clocks(results)
    if good:
        yield _disk(results, good, folder, model_bytes)
    if unseen or silent:
        yield untested("MPI", f"ranks cannot start on {named([*unseen, *silent])}")
    else:
        yield from world_of(results, world, start, gate)


def _broken(results: Results, unseen: Sequence[str]) -> Finding | None:
    """The job itself failed, without reports from the nodes."""
    job, log = results.job, results.logs.get("job", "")
    if job.state not in ENDED:
        return fault("job", f"it ended as {job.state}, and not by itself", "try again; see backends.slurm.prologue")
    if job.code not in (0, UNSEEN) or job.signal:
        end = f"was ended by signal {job.signal}" if job.signal else f"ended with exit code {job.code}"
        message = f": {relevant_line(log)}" if log.strip() else ""
        return fault("job", f"its script {end} ({job.state.lower()}){message}", "see backends.slurm.prologue")
    if log.strip() and len(unseen) == len(results.nodes):
        return fault("job", f"srun could not start anything on its nodes: {relevant_line(log)}")
    return None


def _sight(results: Results, good: Sequence[str], folder: str) -> Finding:
    about, names = "shared folder", named(good)
    slowest = max(float(results.reports[node]["others"]["seconds"]) for node in good)
    for node in good:
        if blind := sorted(set(good) - set(results.reports[node]["others"]["seen"])):
            text = f"{node} does not see what {named(blind)} wrote to {folder}"
            return fault(about, text, "every node must mount the same folder")
    text = f"{names} {'sees' if len(good) == 1 else 'see'} {folder} and may write there"
    if len(good) == 1:
        return ok(about, text)
    if slowest > SLOW_SIGHT and len(good) == len(results.nodes):
        return warning(about, f"{text}; one sees what another wrote only after {duration(slowest)}")
    return ok(about, f"{text}, and each reads what the others wrote")


def _locks(results: Results, good: Sequence[str], folder: str) -> Finding:
    about, locks = "locks", {node: str(results.reports[node]["lock"]) for node in good}
    if not results.locked:
        return warning(about, f"{folder} has no locks (flock) here", FENCED)
    if all(lock == "held" for lock in locks.values()):
        return ok(about, "one that is held here is seen on every node")
    if free_nodes := [node for node, lock in locks.items() if lock == "free"]:
        return warning(about, f"one that is held here is not seen on {named(free_nodes)}", FENCED)
    return warning(about, f"there are none on the nodes: {', '.join(sorted({*locks.values()} - {'held'}))}", FENCED)


def _interpreters(results: Results, good: Sequence[str], silent: Sequence[str]) -> Iterator[Finding]:
    about = "interpreter on the nodes"
    for node in silent:
        code, message = results.codes.get(node), _last(results.logs.get(node, ""))
        if code in (126, 127):
            yield fault(about, f"{node} cannot run it: {message}", ENVIRONMENT)
        elif code is None:
            yield fault(about, f"{node} did not report within {REPORT_LIMIT} s", "its file system may be slow, or hang")
        else:
            yield fault(about, f"on {node} it ended with exit code {code}: {message}", ENVIRONMENT)
    wrong: dict[str, list[str]] = {}
    for node in good:
        if lacks := _lacks(results, node):
            wrong.setdefault(lacks, []).append(node)
    for lacks, nodes in wrong.items():
        yield fault(about, f"{named(nodes)}: {lacks}")
    if good and not wrong:
        versions = sorted({".".join(map(str, results.reports[node]["version"])) for node in good})
        yield ok(about, f"CPython {' and '.join(versions)} imports what ranks need, on {named(good)}")
    if (code := results.codes.get("run_supervisor")) and results.nodes[0] not in silent:
        message = _last(results.logs.get("run_supervisor", ""))
        lacks = f"the supervisor process ended with exit code {code} on {results.nodes[0]}: {message}"
        yield fault(
            "supervisor process",
            lacks,
            "set backends.slurm.python to an interpreter that the nodes have, with ortflow",
        )


def _commands(results: Results) -> Iterator[Finding]:
    """Whether the supervisor process can have the job queued again from inside it."""
    about, (node, *_) = "Slurm on the nodes", results.nodes
    code, follows = results.codes.get("scontrol"), results.codes.get("sbatch") == 0
    if code is None:
        return
    message = _last(results.logs.get("scontrol", ""))
    if code == 0:
        yield ok(about, f"scontrol on {node} shows the job, which can be queued again from there")
    elif follows:
        text = f"scontrol does not work on {node} ({message}): a job is not requeued, another follows it"
        yield warning(about, text, "put scontrol on the PATH of the nodes, for instance in backends.slurm.prologue")
    else:
        text = f"neither scontrol nor sbatch work on {node} ({message}): nothing starts the run again after a "
        text += "preemption or the time limit"
        fix = "put Slurm's commands on the PATH of the nodes, for instance in backends.slurm.prologue"
        yield fault(about, text, f"{fix}; without them `ortflow resume` continues the run")


def _lacks(results: Results, node: str) -> str:
    """The fault of a node's interpreter; empty if there is none."""
    report = results.reports[node]
    major, minor = report["version"]
    try:
        check(Interpreter(report["path"], (major, minor), report["platform"], report["packages"]))
    except UserError as error:
        return str(error)
    return f"importing what ranks need fails: {report['imports']}" if report["imports"] else ""


def _inputs(results: Results, good: Sequence[str]) -> Iterator[Finding]:
    missing: dict[str, list[str]] = {}
    for node in good:
        for path in results.reports[node]["missing"]:
            missing.setdefault(path, []).append(node)
    for path, nodes in missing.items():
        yield fault("input", f"{named(nodes)} {_do(nodes)} not see {path}", "put it where every node sees it")


def _clocks(results: Results) -> Finding:
    """Tasks of a step begin at about the same time, and between the submission and now."""
    about, moments = "clocks", {node: moment for node, moment in results.seen.items() if moment is not None}
    if not moments:
        return untested(about, "no node reported its time")
    middle = median(moments.values())
    off = {node: moment - middle for node, moment in moments.items() if abs(moment - middle) > SKEW}
    for node, moment in moments.items():
        if moment < results.submitted - SKEW:
            off[node] = moment - results.submitted
        elif moment > results.collected + SKEW:
            off[node] = moment - results.collected
    if off:
        text = ", ".join(f"{node} by {amount:+.0f} s or more" for node, amount in sorted(off.items()))
        return warning(about, f"differ: {text}", "times in the run's records will be wrong")
    among = f"; the nodes' by less than {max(moments.values()) - min(moments.values()) + 0.05:.1f} s" if moments else ""
    return ok(about, "agree with the one here" + (among if len(moments) > 1 else ""))


def _disk(results: Results, good: Sequence[str], folder: str, model_bytes: int | None) -> Finding:
    about, speeds = "disk", {node: float(results.reports[node]["bytes_per_second"]) for node in good}
    slowest, fastest = min(speeds.values()), max(speeds.values())
    free_bytes = min(int(results.reports[node]["free"]) for node in good)
    spread = f"{size(slowest)}/s" if fastest < 1.2 * slowest else f"{size(slowest)}/s to {size(fastest)}/s"
    text = f"{folder} takes {spread}{' a node, in parallel' if len(good) > 1 else ''}; {size(free_bytes)} free"
    need = LITTLE if model_bytes is None else float(CHECKPOINTS * model_bytes)
    if free_bytes < need:
        advice = f"{text}; a run's checkpoints may need {size(need)}"
        return warning(about, advice, "make room, or use another run_dir", bytes_per_second=speeds, free=free_bytes)
    if slowest < SLOW_DISK:
        return warning(about, f"{text}: slow", "save less often", bytes_per_second=speeds, free=free_bytes)
    return ok(about, text, bytes_per_second=speeds, free=free_bytes)


def named(nodes: Sequence[str]) -> str:
    """Nodes by name, as many as fit on a line."""
    rest = f" and {len(nodes) - MANY} more" if len(nodes) > MANY else ""
    return ", ".join(nodes[:MANY]) + rest


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"^sh: \d+: ", "", lines[-1]) if lines else "no output"


def _do(names: Sequence[str]) -> str:
    return "does" if len(names) == 1 else "do"
