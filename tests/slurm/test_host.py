"""A cluster used from outside: every verb through a real sshd, on a login node without ortflow."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, Run, slow
from forks import run_command
from login import HOST, Login, missing
from messages import mentions
from project import FEW_CORES, ORTFLOW, Project
from testbed import Testbed, wait_until

from ortflow.launchers.remote.code import Code

SMALL: dict[str, Any] = {"train__steps": 6, "resources": {"nodes": 1, "ranks_per_node": 2, "memory": "3Gi"}}
ODD = "true $(touch /var/tmp/never) ; `touch /var/tmp/never` ! \\ * ~ é"
"""A line that no shell on the way may read."""


@pytest.fixture(scope="module")
def login(cluster: Testbed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Login]:
    why = missing()
    if why is not None:
        pytest.skip(why)
    site = {"SLURM_CONF": cluster.environment["SLURM_CONF"], "PATH": os.environ["PATH"], **FEW_CORES}
    node = Login.start(tmp_path_factory.mktemp("login"), site)
    try:
        yield node
    finally:
        node.stop()


@pytest.fixture
def laptop(login: Login, project: Project) -> Laptop:
    """A folder with a model, data and run files."""
    return Laptop(login, project)


class Laptop:
    """Run what a user types, in the folder."""

    def __init__(self, login: Login, project: Project) -> None:
        self.login, self.project = login, project

    def environment(self, **changes: str) -> dict[str, str]:
        return {**self.login.environment, **changes}

    def ortflow(self, *arguments: str, timeout: float = 180, **changes: str) -> subprocess.CompletedProcess[str]:
        return run_command(
            *arguments, folder=self.project.folder, environment=self.environment(**changes), timeout=timeout
        )

    def far(self, verb: str, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return self.ortflow(verb, "--host", HOST, "--host-python", "~/venv/bin/python", *arguments, **changes)

    def run(self, testbed: Testbed, name: str) -> Run:
        """The directory of a run on the cluster."""
        return Run(Cluster(testbed, replace(self.project, folder=self.login.home / "ortflow")), name)


def files_of(folder: Path) -> dict[str, bytes]:
    """The contents of a folder, without Python's caches."""
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def test_a_run_from_outside(testbed: Testbed, laptop: Laptop) -> None:
    file = laptop.project.write("outside", **SMALL)
    done = laptop.far("submit", file.name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"slurm://\d+", done.stdout)
    assert f"ortflow status --host {HOST} outside" in done.stdout
    assert not laptop.project.run_dir("outside").exists(), "nothing of the run is on the laptop"
    run = laptop.run(testbed, "outside")
    run.finish()

    # The Python is known from now on.
    done = laptop.ortflow("status", "outside", "--json", "--host", HOST)
    reported = json.loads(done.stdout)
    assert (reported["state"], reported["step"]) == ("finished", 6)
    assert reported["directory"] == str(laptop.login.home / "ortflow/runs/outside")
    assert "outside" in laptop.ortflow("list", ORTFLOW_HOST=HOST).stdout
    done = laptop.far("logs", "outside", "--rank=1")
    assert done.stdout == (run.run_dir / "logs/attempt-00/rank-0001.log").read_text()
    assert "is not running: finished" in laptop.far("cancel", "outside").stdout

    (shipped,) = (laptop.login.home / "ortflow/code").iterdir()
    assert [record["code"] for record in run.records("submit")] == [shipped.name]
    assert Code(files_of(shipped)).hash == shipped.name
    assert files_of(shipped) == files_of(laptop.login.installed)
    spec = (run.run_dir / "run.yaml").read_text()
    assert str(laptop.project.folder) not in spec, "the run reads nothing from the laptop"
    data = [path for path in (laptop.login.home / "ortflow/inputs").rglob("*.arrow") if path.name == "train.arrow"]
    before = [path.stat().st_mtime_ns for path in data]

    # Again: the same code and files exist there, and the same run continues.
    done = laptop.far("submit", file.name, "train.steps=8", "--follow")
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.steps() == 8
    assert [path.stat().st_mtime_ns for path in data] == before
    assert len(list((laptop.login.home / "ortflow/code").iterdir())) == 1


def test_render_is_what_is_submitted(testbed: Testbed, laptop: Laptop) -> None:
    file = laptop.project.write("shown", **SMALL)
    done = laptop.far("render", file.name, f"backends.slurm.prologue=[{json.dumps(ODD)}]")
    assert done.returncode == 0, done.stderr
    assert f"export PYTHONPATH={laptop.login.home}/ortflow/code/" in done.stdout
    assert f"\n{ODD}\n" in done.stdout
    assert not (laptop.login.home / "ortflow/runs/shown").exists()
    assert not Path("/var/tmp/never").exists()


def test_follow_and_leave(testbed: Testbed, laptop: Laptop) -> None:
    """Ctrl-C here ends the follower there, which reports it; the run continues and no process is left."""
    file = laptop.project.write("left", **{**SMALL, **slow(0.5), "train__steps": 40})
    follow = subprocess.Popen(
        [*ORTFLOW, "submit", "--host", HOST, "--host-python", "~/venv/bin/python", "--follow", file.name],
        cwd=laptop.project.folder, env=laptop.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    run = laptop.run(testbed, "left")
    with follow:
        try:
            run.until_step(2)
            os.killpg(follow.pid, signal.SIGINT)
            out, err = follow.communicate(timeout=120)
        finally:
            follow.kill()
    assert follow.returncode == 130
    assert mentions(err, f"continues … ortflow logs -f --host {HOST} left"), out
    left = f"{laptop.login.home}/venv/bin/python -c"
    wait_until(lambda: left not in testbed.ask("ps", "axww", "-o", "args").stdout, 120, "a command stayed over there")
    assert run.steps() < 40
    done = laptop.far("cancel", "left", timeout=90)
    assert done.returncode == 0, done.stderr
    reported = json.loads(laptop.far("status", "left", "--json").stdout)
    assert reported["state"] == "cancelled"


def test_prepare_on_the_host(testbed: Testbed, laptop: Laptop) -> None:
    """What does not exist here is made on the host, by files that are copied there.

    The job does not inherit the environment, and has another PYTHONPATH: the copied code still takes precedence.
    """
    folder = laptop.project.folder
    (folder / "make.py").write_text("import helper\nhelper.copy('twin.arrow')\n")
    source = folder / "set/train.arrow"
    (folder / "helper.py").write_text(
        f"import shutil\n\n\ndef copy(name: str) -> None:\n    shutil.copy({str(source)!r}, name)\n"
    )
    changes = {**SMALL, "prepare": ["python", "make.py"], "data__train__path": "twin.arrow"}
    changes |= {"backends__slurm__directives": ["--export=NONE"], "resources": {"nodes": 1, "ranks_per_node": 1}}
    changes["backends__slurm__prologue"] = ["export PYTHONPATH=/nowhere"]
    file = laptop.project.write("made", **changes)
    done = laptop.far("submit", file.name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert mentions(done.stderr, "twin.arrow", "`prepare`", "login", "helper.py, make.py")
    assert not (folder / "twin.arrow").exists()
    laptop.run(testbed, "made").finish()


def test_what_the_user_has_to_fix(login: Login, laptop: Laptop, tmp_path: Path) -> None:
    """One sentence each."""
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\necho 'ortflow-python-too-old 3.6' >&2; exit 1\n")
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {login.home}/venv/bin/python -S "$@"\n')
    for path in (old, bare):
        path.chmod(0o755)
    config = login.write_config
    other = login.write_config(tmp_path / "other", UserKnownHostsFile=str(tmp_path / "known"))
    (tmp_path / "known").write_text(f"[127.0.0.1]:{login.port} {(login.laptop / 'stranger.pub').read_text()}")
    cases: list[tuple[list[str], dict[str, Path], int, str]] = [
        (["--host", HOST, "--host-python", "~/no/python"], {}, 2, "there is no ~/no/python on login"),
        (["--host", HOST, "--host-python", str(old)], {}, 2, "is Python 3.6, and ortflow needs 3.10"),
        (["--host", HOST, "--host-python", str(bare)], {}, 2, "-m pip install 'pydantic"),
        (["--host", "-oProxyCommand=x"], {}, 2, "is not a host"),
        (["--host", "nosuch.invalid"], {}, 2, "there is no host nosuch.invalid"),
        (["--host", HOST], {"c": config(tmp_path / "a", Port="23099")}, 1, "login cannot be reached"),
        (["--host", HOST], {"c": config(tmp_path / "b", IdentityFile=str(login.laptop / "stranger"))}, 2,
         "login rejects your login"),
        (["--host", HOST], {"c": config(tmp_path / "d", UserKnownHostsFile="/dev/null")}, 2,
         "the host key of login is not known here"),
        (["--host", HOST], {"c": other}, 2, "login shows another host key than before"),
    ]  # fmt: skip
    login.hang_up()
    elsewhere = login.runtime / "x"
    elsewhere.mkdir()
    for options, files, code, words in cases:
        # An existing connection would be reused.
        settings = {"ORTFLOW_SSH_CONFIG": str(files["c"]), "XDG_RUNTIME_DIR": str(elsewhere)} if files else {}
        done = laptop.ortflow("status", "x", *options, **settings)
        assert (done.returncode, done.stdout) == (code, ""), done
        assert words in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr


def test_no_disk_space_on_the_host(login: Login, laptop: Laptop) -> None:
    small = login.home / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(small)], check=True)
    try:
        done = laptop.far("list", "--host-dir", str(small / "ortflow"))
        assert done.returncode == 1
        assert "there is no room left for" in done.stderr
        assert done.stderr.count("\n") == 1
        left = [path for path in small.rglob("*") if path.is_file()]
        assert left == [], "an incomplete copy is removed"
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
        memory = login.laptop / ".local/state/ortflow/hosts.json"
        memory.unlink()


def test_slurm_where_only_a_login_finds_it(testbed: Testbed, laptop: Laptop, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nPATH=/nowhere exec {laptop.login.python} "$@"\n')
    bare.chmod(0o755)
    file = laptop.project.write("profile", **SMALL, backends__slurm__begin="now+1hour")
    options = ["--host", HOST, "--host-python", str(bare)]
    profile = laptop.login.home / ".bash_profile"
    profile.write_text("echo welcome; export PATH=/nowhere\n")
    done = laptop.ortflow("submit", *options, file.name)
    profile.unlink()
    assert (done.returncode, done.stdout) == (2, "")
    assert mentions(done.stderr, f"error: Slurm … not installed on {HOST} … PATH")
    done = laptop.ortflow("submit", *options, file.name)
    assert done.returncode == 0, done.stderr
    for again in (True, False):
        done = laptop.ortflow("cancel", *options, "profile")
        assert done.stdout == "profile: cancelled at step 0\n"
        if again:
            assert "slurm://" in laptop.ortflow("resume", *options, "profile").stdout


def test_inputs_that_are_nowhere(laptop: Laptop) -> None:
    file = laptop.project.write("nowhere", **SMALL)
    done = laptop.far("submit", file.name, "data.train.path=set/none.arrow")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "data.train.path: there is no file set/none.arrow here" in done.stderr
    done = laptop.far("submit", file.name, "data.train.path=/no/where/none.arrow")
    assert mentions(done.stderr, "/no/where/none.arrow", "login")
