"""A resumed run removes what a kill left behind and nothing else; files that stay respect the umask."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from project import ORTFLOW, environment, of_kind
from tiny_runs import RUN, STEPS, Tiny
from waits import wait_until

from ortflow.launchers.mpi import find_mpi
from ortflow.launchers.supervision.attempt import Attempt, RankCommand
from ortflow.manifests.local import MpiKind
from ortflow.workflow.comm import daemon_files
from ortflow.workflow.comm import segments as segments_module
from ortflow.workflow.comm.segments import FOLDER, Start, sweep
from ortflow.workflow.run.rundir import RunDir

PAIR = {"resources": {"ranks_per_node": 2, "cpus_per_rank": 1}}


def ranks_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    found = psutil.Process(launcher.pid).children(recursive=True)
    return [one for one in found if "ortflow.workflow.rank" in one.cmdline() and "mpi" not in one.cmdline()[0]]


def segments(process: psutil.Process) -> set[str]:
    return set(re.findall(r"/dev/shm/(mpich_shm_\w+)", Path("/proc", str(process.pid), "maps").read_text()))


def test_killed_ranks_leave_no_shared_memory(tmp_path: Path) -> None:
    tiny = Tiny.make(tmp_path / "p", **PAIR, train={**RUN["train"], "steps": 100_000})
    launcher = tiny.start("run", "run.yaml")
    try:
        records = [tiny.run_dir / "events" / f"rank-{rank:04d}.jsonl" for rank in (0, 1)]
        while not all(path.exists() and of_kind(tiny.run_dir, "step", rank) for rank, path in enumerate(records)):
            assert launcher.poll() is None, launcher.communicate()
            time.sleep(0.05)
        mapped = {name for rank in ranks_of(launcher) for name in segments(rank)}
    finally:
        launcher.kill()
        launcher.communicate()
    if not mapped:
        pytest.skip("this MPI maps no segment of MPICH's")
    assert [name for name in mapped if (FOLDER / name).exists()] == []


WAITS_IN_MPI = """
import os, sys, time
from ortflow.workflow.comm import segments
done = segments.Start.done
def wait(self):
    # MPI has made its segments, and their names are there still.
    open(f"{sys.argv[1]}/{os.getpid()}", "w").close()
    time.sleep(600)
segments.Start.done = wait
from ortflow.workflow.comm.mpi import MpiCommunicator
MpiCommunicator()
"""
"""A rank that a kill meets before it has taken the names away."""


def present(names: set[str]) -> set[str]:
    return {name for name in names if (FOLDER / name).exists()}


def held(pids: set[str]) -> set[str]:
    """Records of the starts of these ranks, and their segments of MPI: other tests' are there, too."""
    links = {path: os.readlink(path) for pid in pids for path in Path("/proc", pid, "fd").iterdir()}
    maps = [Path("/proc", pid, "maps").read_text() for pid in pids]
    return present(set(re.findall(r"/dev/shm/((?:ortflow_mpi_|mpich_sh)\w+)", "\n".join([*links.values(), *maps]))))


def test_ranks_killed_while_mpi_starts_leave_nothing_behind_the_next_attempt(tmp_path: Path) -> None:
    mpi = find_mpi(sys.executable, "auto")
    if mpi is None:
        pytest.skip("no MPI here")
    marks = tmp_path / "marks"
    marks.mkdir()
    command = [mpi.executable, "-n", "2", sys.executable, "-c", WAITS_IN_MPI, str(marks)]
    waiting = subprocess.Popen(command, env=environment(), stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while len(list(marks.iterdir())) < 2:
            assert waiting.poll() is None
            time.sleep(0.05)
        alive = held({path.name for path in marks.iterdir()})
        records = {name for name in alive if name.startswith("ortflow_mpi_")}
        assert len(records) == 2
        # Living ranks' segments stay, whoever sweeps.
        sweep()
        assert present(alive) == alive
    finally:
        for process in reversed([psutil.Process(waiting.pid), *psutil.Process(waiting.pid).children(recursive=True)]):
            # When one rank has ended, MPI ends the other.
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        waiting.wait()
    assert present(records) == records
    tiny = Tiny.make(tmp_path / "p", **PAIR)
    done = tiny.command("run", "run.yaml")
    assert done.code == 0, done.said
    assert present(alive) == set()


class Ranks:
    """Ranks of which only the record is there, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def segment(self, name: str = "mpich_shm_0123abcd_0") -> Path:
        path = self.folder / name
        path.write_bytes(bytes(4096))
        return path

    def start(self) -> Start:
        return Start(self.folder)

    def die(self, start: Start) -> None:
        """The kernel lets go of the lock; nothing else happens."""
        os.close(start.descriptor)
        start.descriptor = -1

    def records(self) -> list[Path]:
        return sorted(self.folder.glob("ortflow_mpi_*"))


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)


def test_a_dead_start_loses_what_came_behind_its_beginning(ranks: Ranks) -> None:
    """What was there before is another program's, dead or not; the user's other files are nobody's business."""
    before, other = ranks.segment("mpich_shm_00000001_0"), ranks.segment("my_shm")
    start = ranks.start()
    left = [ranks.segment(name).name for name in ("mpich_shm_0123abcd_0", "ucx_shm_posix_69fb3fd")]
    assert sweep(ranks.folder) == []  # alive
    ranks.die(start)
    assert sweep(ranks.folder) == left
    assert before.exists()
    assert other.exists()
    assert ranks.records() == []


@contextlib.contextmanager
def room(size: int) -> Iterator[None]:
    """A write that passes this size of a file ends there, as in a full /dev/shm."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_folder_leaves_no_half_of_a_record(ranks: Ranks) -> None:
    """Such a record would be ignored, and nothing that its rank leaves be removed."""
    with room(10):
        start = ranks.start()
    assert start.descriptor == -1
    assert list(ranks.folder.iterdir()) == []
    start = ranks.start()
    (record,) = ranks.records()
    left = ranks.segment("sm_segment.host.0.abcd0001.1")
    with room(record.stat().st_size + 5):
        start.done()
    assert sweep(ranks.folder) == []  # alive
    ranks.die(start)
    assert sweep(ranks.folder) == [left.name]
    assert ranks.records() == []


@pytest.mark.parametrize("name", ["vader_segment.host.0.abcd0001.0", "sm_segment.host.0.abcd0001.1"])
def test_segments_of_open_mpi_go_with_the_rank_that_had_started(ranks: Ranks, name: str) -> None:
    start, segment = ranks.start(), ranks.segment(name)
    with segment.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        start.done()
        assert segment.exists()  # others may open it by its name
    unrelated = ranks.segment("sm_segment.host.0.other.0")
    ranks.die(start)
    assert sweep(ranks.folder) == [name]
    assert unrelated.exists()
    assert ranks.records() == []


@pytest.fixture(params=["ompi.4711", "ompi.node.0/pid.4711"])
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A session folder as Open MPI 5 and 4 make it, of this process."""
    path = tmp_path / "temporary" / request.param
    (path / "1").mkdir(parents=True)
    (path / "1" / "pmix-gds-shmem2").write_bytes(bytes(4096))
    monkeypatch.setenv("PMIX_SERVER_TMPDIR", str(path))
    return path


def test_a_session_folder_of_open_mpi_goes_with_the_last_rank_of_its_daemon(ranks: Ranks, session: Path) -> None:
    first, second = ranks.start(), ranks.start()
    second.done()
    ranks.die(first)
    assert sweep(ranks.folder) == []
    assert session.exists()
    ranks.die(second)
    sweep(ranks.folder)
    assert list((ranks.folder / "temporary").iterdir()) == []
    assert ranks.records() == []


def test_a_session_folder_whose_daemon_lives_stays_and_goes_later(ranks: Ranks, session: Path) -> None:
    ranks.die(ranks.start())
    with (session / "1/pmix-gds-shmem2").open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        sweep(ranks.folder)
        assert session.exists()
    sweep(ranks.folder)
    assert not session.exists()
    assert ranks.records() == []


@pytest.mark.parametrize("name", ["thesis", "ompi.4711/thesis", "ompi.4711/../thesis"])
def test_no_other_folder_is_taken_for_a_session_folder(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "ompi.4711").mkdir()
    (tmp_path / name).mkdir()
    monkeypatch.setenv("PMIX_SERVER_TMPDIR", f"{tmp_path}/{name}")
    ranks.die(ranks.start())
    sweep(ranks.folder)
    assert (tmp_path / name).is_dir()
    assert ranks.records() == []


def test_a_link_in_place_of_a_session_folder_is_not_followed(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "ompi.4711").symlink_to("thesis")
    monkeypatch.setenv("PMIX_SERVER_TMPDIR", f"{tmp_path}/ompi.4711")
    ranks.die(ranks.start())
    sweep(ranks.folder)
    assert (tmp_path / "thesis").is_dir()
    assert (tmp_path / "ompi.4711").is_symlink()


@pytest.mark.parametrize("name", ["ompi.4711", "ompi.node.0/pid.4711"])
def test_a_launcher_removes_the_session_folder_of_an_mpirun_that_it_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for other in (name, name.replace("4711", "4712")):
        (tmp_path / other / "0").mkdir(parents=True)
    daemon_files.remove_of(4711)
    assert not (tmp_path / name).exists()
    assert (tmp_path / name.replace("4711", "4712") / "0").is_dir()


@pytest.mark.parametrize(("mpi", "left"), [("openmpi", False), ("mpich", True), (None, True)])
def test_a_launcher_of_no_open_mpi_leaves_session_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mpi: MpiKind | None, *, left: bool
) -> None:
    """Of a process in another container that shares the temporary folder, and has the same id there."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    attempt = Attempt(RankCommand(RunDir(tmp_path / "run"), 0, ["sleep", "60"], os.environ), 1, mpi)
    session = tmp_path / f"ompi.{attempt.pid}"
    session.mkdir()
    attempt.kill()
    assert session.exists() == left


@pytest.mark.parametrize(("others", "left"), [([], False), ([4711], True)])
def test_topologies_of_dead_proxies_go_unless_another_proxy_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: list[int], left: bool
) -> None:
    monkeypatch.setattr(daemon_files, "proxies", lambda: iter([os.getppid(), *others]))
    file, other = tmp_path / "hydra_hwloc_xmlfile_a1B2c3", tmp_path / "hydra_hwloc_xmlfile_of_mine"
    for path in (file, other):
        path.write_text("<topology/>")
    daemon_files.remove_topologies(tmp_path)
    assert file.exists() == left
    assert other.exists()


def test_a_living_proxy_is_known_by_its_name(tmp_path: Path) -> None:
    shutil.copy("/bin/sleep", tmp_path / "hydra_pmi_proxy")
    with subprocess.Popen([tmp_path / "hydra_pmi_proxy", "60"]) as proxy:
        # The kernel lets the parent go on a moment before it names the process.
        wait_until(lambda: proxy.pid in daemon_files.proxies())
        proxy.kill()
    assert proxy.pid not in daemon_files.proxies()


def test_segments_of_mpich_lose_their_names_once_all_have_mapped_them(ranks: Ranks) -> None:
    start, segment = ranks.start(), ranks.segment()
    with segment.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        start.done()
    assert not segment.exists()
    start.close()
    assert ranks.records() == []


@pytest.mark.parametrize("name", ["mpich_shar_tmp{}1b2C3", "ucx_shm_posix_{}9fb3fd"])
def test_what_is_named_for_a_moment_goes_with_the_rank_that_had_started(ranks: Ranks, name: str) -> None:
    before, start = ranks.segment(name.format("A")), ranks.start()
    start.done()
    passing, unrelated = ranks.segment(name.format("B")), ranks.segment()
    ranks.die(start)
    assert sweep(ranks.folder) == [passing.name]
    assert before.exists()
    assert unrelated.exists()
    assert ranks.records() == []


def test_a_segment_that_a_living_process_maps_stays_and_goes_later(ranks: Ranks) -> None:
    start, segment = ranks.start(), ranks.segment()
    ranks.die(start)
    with segment.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert sweep(ranks.folder) == []
        assert segment.exists()
    assert sweep(ranks.folder) == [segment.name]
    assert ranks.records() == []


def test_what_a_living_start_may_have_made_stays_and_goes_later(ranks: Ranks) -> None:
    """It has made a segment and not mapped it yet, or is in a container whose processes are not seen here."""
    dead = ranks.start()
    ranks.die(dead)
    dead_segment = ranks.segment("mpich_shm_00000001_0")
    # The first look of a start is before its own segments, so the dead one's goes, and none of the living one.
    alive = ranks.start()
    assert not dead_segment.exists()
    other = ranks.start()
    ranks.die(other)
    made = ranks.segment()
    assert sweep(ranks.folder) == []
    assert made.exists()
    ranks.die(alive)
    assert sweep(ranks.folder) == [made.name]
    assert ranks.records() == []


def test_a_segment_that_is_mapped_in_a_moment_stays(ranks: Ranks) -> None:
    """Another program of this user's, between making it and mapping it."""
    ranks.die(ranks.start())
    path = ranks.segment()
    kept: list[mmap.mmap] = []

    def maps_it() -> None:
        with path.open("r+b") as file:
            kept.append(mmap.mmap(file.fileno(), 4096))

    def look(names: set[str]) -> set[str]:
        if names and not kept:
            found = unmapped(names)
            maps_it()
            return found
        return unmapped(names)

    unmapped = segments_module.unmapped
    segments_module.unmapped = look
    try:
        assert sweep(ranks.folder) == []
        assert path.exists()
    finally:
        segments_module.unmapped = unmapped
        for each in kept:
            each.close()


@pytest.mark.parametrize("text", ["", "[]", "7", '{"before": 7}', "{", "\0" * 100])
def test_an_empty_record_removes_nothing(ranks: Ranks, text: str) -> None:
    (ranks.folder / f"ortflow_mpi_{os.getuid()}_0123456789abcdef").write_text(text)
    path = ranks.segment()
    assert sweep(ranks.folder) == []
    assert path.exists()


def test_temporaries_of_dead_attempts_go_and_all_else_stays(tmp_path: Path) -> None:
    tiny = Tiny.make(tmp_path / "p")
    assert tiny.command("run", "run.yaml", f"train.steps={STEPS // 2}").code == 0
    root = tiny.run_dir
    gone = [
        root / ".run.yaml.0123abcd", root / ".plan.json.a0-0123abcd", root / "graphs/.train.onnx.a0-0123abcd",
        root / "events/.rank-0000.jsonl.a12-0123abcd", root / "export/.model.onnx.abcd_123/model.onnx",
    ]  # fmt: skip
    kept = [root / ".stop.0123abcd", root / ".vimrc.original", root / "export/.model.onnx.abcd_124/notes.txt"]
    for path in (*gone, *kept):
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    done = tiny.command("resume", "tiny", f"train.steps={STEPS}")
    assert done.code == 0, done.said
    assert [path for path in gone if path.exists()] == []
    assert not gone[-1].parent.exists()
    assert [path for path in kept if not path.exists()] == []


@pytest.mark.parametrize(("mask", "forbidden", "wanted"), [("077", 0o077, 0o600), ("002", 0o002, 0o660)])
def test_the_umask_holds(tmp_path: Path, mask: str, forbidden: int, wanted: int) -> None:
    tiny = Tiny.make(tmp_path / "p")
    subprocess.run(
        ["sh", "-c", f'umask {mask}; exec "$@"', "sh", *ORTFLOW, "run", "run.yaml"],
        cwd=tiny.folder, env=environment(), check=True, capture_output=True,
    )  # fmt: skip
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in tiny.run_dir.rglob("*") if path.is_file()}
    assert len(modes) > 15
    assert {str(path): oct(mode) for path, mode in modes.items() if mode & forbidden or mode & wanted != wanted} == {}
    folders = [path for path in tiny.run_dir.rglob("*") if path.is_dir()]
    assert [path for path in folders if stat.S_IMODE(path.stat().st_mode) & forbidden] == []
