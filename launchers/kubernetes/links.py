"""Connections from record directories to clusters, and the status of runs through them.

A connection is kept for each context and namespace. After an API server does not answer, no request is sent for a
while, longer each time, so that following a run through an outage neither blocks nor floods the server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ortflow.launchers.kubernetes import objects
from ortflow.launchers.kubernetes.api import Cluster, Object, Refused, Unreachable
from ortflow.launchers.kubernetes.cluster_objects import ClusterObjects, foreign
from ortflow.launchers.kubernetes.log_replicator import LogReplicator
from ortflow.launchers.kubernetes.place import Place, is_real, read_place, write_place
from ortflow.launchers.kubernetes.refusals import refusal
from ortflow.launchers.kubernetes.snapshot import View, of_place, take_snapshot
from ortflow.launchers.kubernetes.status import is_settled, status
from ortflow.launchers.records import Outcome, State
from ortflow.launchers.status import RunStatus, read_status
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.system.clock import SYSTEM_CLOCK, Clock

LONGEST = 8.0
"""Seconds between two tries while the API server does not answer."""
AT_ONCE = 8
REFUSED = "wrong input is not tried again"
Connect = Callable[[str | None, str | None], Cluster]


def _connect(context: str | None, namespace: str | None) -> Cluster:
    from ortflow.launchers.kubernetes.contexts import connect

    return connect(context, namespace)


class Links:
    """Connections to clusters."""

    def __init__(self, connect: Connect = _connect, clock: Clock = SYSTEM_CLOCK) -> None:
        self._connect, self.clock = connect, clock
        self._known: dict[tuple[str | None, str | None], Cluster] = {}
        self._pause, self._until, self._silence = 0.0, 0.0, ""

    def connect(self, context: str | None, namespace: str | None) -> Cluster:
        """The cluster of a context; raises UserError if there is none."""
        key = (context, namespace)
        if key not in self._known:
            self._known[key] = self._connect(context, namespace)
        return self._known[key]

    def of(self, run: RunDir) -> tuple[Cluster, Place]:
        """The cluster of a run, and the run's place in it."""
        place = read_place(run)
        if place is not None:
            return self.connect(place.context, place.namespace), place
        spec = load_run_file(run.run_file)
        backend = spec.backends.kubernetes
        cluster = self.connect(backend.context, backend.namespace)
        jobs = [record["job"] for record in run.read_attempts() if record.get("event") == "submit" and "job" in record]
        return cluster, Place(cluster.namespace, spec.name, jobs[-1] if jobs else None, cluster.context)

    def status(self, run: RunDir) -> RunStatus:
        """A run's status, after an update of its records."""
        try:
            if self.clock.monotonic() < self._until:
                raise Unreachable(self._silence)
            cluster, place = self.of(run)
            view = take_snapshot(cluster, place)
            self._until = self._pause = 0.0
            return self._reported(run, cluster, place, view)
        except Unreachable as error:
            self._back_off(str(error))
            return status_from_records(run, self._silence)
        except OrtflowError as error:
            return status_from_records(run, message_of(error))

    def statuses(self, runs: Sequence[RunDir]) -> list[RunStatus]:
        """The status of many runs: MPIJobs and pods are listed once per namespace; logs of running ones are read."""
        places = [self._place(run) for run in runs]
        keys = {(link[1].context, link[1].namespace): link[0] for link in places if not isinstance(link, str)}
        herds = {key: _objects_or_message(cluster, key[1]) for key, cluster in keys.items()}

        def one(run: RunDir, link: tuple[Cluster, Place] | str) -> RunStatus:
            if isinstance(link, str):
                return status_from_records(run, link)
            cluster, place = link
            everything = herds[place.context, place.namespace]
            if isinstance(everything, str):
                return status_from_records(run, everything)
            try:
                return self._reported(run, cluster, place, everything.view(place))
            except OrtflowError as error:
                return status_from_records(run, message_of(error))

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(one, runs, places))

    def _place(self, run: RunDir) -> tuple[Cluster, Place] | str:
        try:
            return self.of(run)
        except OrtflowError as error:
            return message_of(error)

    def listed(self, runs: Sequence[RunDir], *, everywhere: bool) -> list[RunStatus]:
        """The status of our runs, and of those in the cluster without a directory here."""
        cluster = self.connect(None, None)
        own_statuses = self.statuses(runs)
        known_places = [place for run in runs if (place := read_place(run)) is not None]
        everything = ClusterObjects.gather(cluster, cluster.namespace, everywhere=everywhere)
        return [*own_statuses, *map(foreign, everything.unknown_runs(known_places))]

    def status_of_active(self, run: RunDir, cluster: Cluster, place: Place, mpijobs: Sequence[Object]) -> RunStatus:
        """The status of an MPIJob that may be active, of those in `mpijobs`, even if the directory does not know it."""
        view, recorded_place = take_snapshot(cluster, place), read_place(run)
        if is_real(run) or (
            recorded_place is not None and [*map(objects.name, of_place(mpijobs, recorded_place))][:1] == [place.job]
        ):
            return self._reported(run, cluster, place, view)
        return foreign(view)

    def _reported(self, run: RunDir, cluster: Cluster, place: Place, view: View) -> RunStatus:
        adopt_job(run, view)
        unread: frozenset[str] = frozenset()
        if view.pods and read_place(run) is not None:
            unread = LogReplicator(run, cluster).sync(view.pods)
        records = run.read_attempts()
        recorded = replace(read_status(run, records=records, alive=True), job=place.job)
        run_status = status(recorded, records, view, silent=silent(run), unread=unread)
        if run_status.state is State.FAILED and not is_settled(records) and read_place(run) is not None:
            # The event or pod that shows it disappears within an hour, or at the operator's next try.
            run.record_attempt(event="stop", outcome=Outcome.USER_ERROR.value, cause=run_status.cause, why=REFUSED)
        return run_status

    def _back_off(self, silence: str) -> None:
        """Wait longer each time; keep one message for one outage, even if the error changes between tries."""
        if not self._pause:
            self._silence = silence
        if self.clock.monotonic() >= self._until:
            self._pause = min(LONGEST, self._pause * 2 or 0.5)
            self._until = self.clock.monotonic() + self._pause


def silent(run: RunDir) -> frozenset[str]:
    """Uids of the launcher pods that have not reported the run's attempts yet."""
    place = read_place(run)
    cursors = place.cursors if place is not None else {}
    return frozenset(uid for uid, cursor in cursors.items() if not cursor.begun and not cursor.done)


def adopt_job(run: RunDir, view: View) -> None:
    """Record a submission that was made elsewhere, by a supervisor or a user: the run continues in it."""
    if view.mpijob is None or objects.over(view.mpijob) or is_real(run):
        return
    records = run.read_attempts()
    if records and not any(record.get("job") == view.name for record in records):
        run.record_attempt(event="submit", launcher="kubernetes", job=view.name)
        if (place := read_place(run)) is not None:
            write_place(run, place.at(view.name))


def status_from_records(run: RunDir, reason: str) -> RunStatus:
    """The status from the records alone; `reason` is why the cluster could not be queried."""
    records, place = run.read_attempts(), read_place(run)
    recorded = read_status(run, records=records, alive=True)
    recorded = replace(recorded, launcher="kubernetes", job=place.job if place is not None else None)
    return recorded if is_settled(records) else replace(recorded, waits=reason)


def message_of(error: OrtflowError) -> str:
    """The message of an error."""
    return str(refusal(error) if isinstance(error, Refused) else error)


def _objects_or_message(cluster: Cluster, namespace: str) -> ClusterObjects | str:
    try:
        return ClusterObjects.gather(cluster, namespace)
    except OrtflowError as error:
        return message_of(error)
