"""The command line with Kubernetes: every verb by name, by directory or by handle, and options that do not apply."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from fake_kubernetes import FakeCluster
from kubernetes_objects import NOW, mpijob, pod
from messages import mentions

from ortflow.cli.app import command_line
from ortflow.launchers.base import find_launcher
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.run.rundir import RunDir

RUN = """\
name: digits
model: {path: m.onnx, loss: mse}
data: {train: {path: d.arrow}, micro_batch: 1}
train: {steps: 10, optimizer: {name: sgd, lr: 0.1}}
resources: {nodes: 2}
backends: {kubernetes: {image: "localhost/ortflow:test", volume: {create: {size: 1Gi}}}}
"""


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Person:
    """A user at a terminal: verbs run in this process, in which the slow imports are done."""

    fake: FakeCluster
    screen: pytest.CaptureFixture[str]

    def tell(self, *arguments: str) -> Done:
        self.screen.readouterr()
        code, reported = 0, ""
        try:
            code = command_line()(list(arguments), standalone_mode=False) or 0
        except OrtflowError as error:
            code, reported = error.exit_code, f"error: {error}"
        screen = self.screen.readouterr()
        return Done(code, screen.out, screen.err + reported)


@pytest.fixture
def person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Person]:
    monkeypatch.chdir(tmp_path)
    find_launcher.cache_clear()  # its connections lead to another test's cluster
    (tmp_path / "run.yaml").write_text(RUN)
    with FakeCluster(tmp_path) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        yield Person(cluster, capsys)


def test_a_run_from_submit_to_resume(person: Person, tmp_path: Path) -> None:
    fake = person.fake
    done = person.tell("submit", "-b", "kubernetes", "run.yaml")
    assert done.code == 0, done.err
    handle = done.out.splitlines()[0]
    job = handle.rpartition("/")[2]
    assert "follow it: ortflow logs -f digits" in done.out

    fake.objects["mpijobs", "default", job]["status"] = mpijob()["status"]
    for made in (pod("worker", 0), pod("worker", 1), pod("launcher")):
        made["metadata"]["labels"]["ortflow.dev/job"] = job
        fake.add(made)
    failure = {"event": "end", "attempt": 0, "outcome": "failure", "next": "restart"}
    for record in ({"event": "start", "attempt": 0, "time": NOW}, failure, {"event": "start", "attempt": 1}):
        fake.say(made["metadata"]["name"], "::ortflow " + json.dumps({"file": "attempts", "record": record}))
    fake.say(made["metadata"]["name"], "[1] hello")
    reported = json.loads(person.tell("status", "digits", "--json").out)
    assert (reported["state"], reported["job"], reported["launcher"], reported["total_steps"]) == (
        "running",
        job,
        "kubernetes",
        10,
    )
    assert person.tell("logs", "digits", "--rank", "1").out == "hello\n"

    other = tmp_path / "other"
    listed = person.tell("list", "-b", "kubernetes", "-A", "--runs-dir", str(other)).out.splitlines()
    assert handle in listed[1]
    assert "running" in person.tell("status", handle, "--runs-dir", str(other)).out
    assert (other / "digits" / "run.yaml").is_file()

    for arguments in (("submit", "-b", "kubernetes", "run.yaml"), ("resume", "digits")):
        refused = person.tell(*arguments)
        assert refused.code == 2, arguments
        assert f"is running as MPIJob {job}" in refused.err
        assert "no longer counted" not in refused.err

    def gone(plural: str, name: str) -> None:
        if plural == "mpijobs":
            for one in fake.of("pods"):
                fake.remove("pods", one["metadata"]["name"])

    fake.deleted = gone
    assert person.tell("cancel", "digits").out == "digits: cancelled at step 0\n"
    again = person.tell("resume", "digits")
    assert again.code == 0, again.err
    assert mentions(again.err, "1 failures and 0 preemptions")
    assert len(fake.of("mpijobs")) == 1


def test_resume_starts_a_suspended_run(person: Person, tmp_path: Path) -> None:
    done = person.tell("submit", "-b", "kubernetes", "run.yaml", "backends.kubernetes.suspend=true")
    handle = done.out.splitlines()[0]
    (job,) = person.fake.of("mpijobs")
    job["status"] = mpijob()["status"]
    RunDir(tmp_path / "runs" / "digits").record_attempt(event="end", attempt=0, outcome="failure", next="restart")
    assert mentions(person.tell("status", "digits").out, f"suspended … `ortflow resume {handle}`")
    refused = person.tell("resume", "digits", "train.steps=20")
    assert (refused.code, "is suspended as MPIJob" in refused.err) == (2, True)
    assert job["spec"]["runPolicy"]["suspend"] is True
    done = person.tell("resume", handle)
    assert (done.code, done.out.splitlines()[0]) == (0, handle), done.err
    assert job["spec"]["runPolicy"]["suspend"] is False
    assert person.fake.of("mpijobs") == [job]
    assert "no longer counted" not in done.err, "it is the submission that it was"


def applied(person: Person, namespace: str = "default") -> str:
    """Create the rendered documents as `kubectl apply` does, suspended; the MPIJob's name."""
    rendered = person.tell("render", "-b", "kubernetes", "run.yaml", "backends.kubernetes.suspend=true").out
    documents = [one for one in yaml.safe_load_all(rendered) if one]
    for one in documents:
        one["metadata"]["namespace"] = namespace
    person.fake.add(*documents)
    return str(next(one["metadata"]["name"] for one in documents if one["kind"] == "MPIJob"))


def test_a_run_that_was_applied_is_known_by_its_name(person: Person, tmp_path: Path) -> None:
    """It is known before any pod runs; verbs that change it need the handle until its status was read."""
    job = applied(person)
    handle = f"kubernetes://default/{job}"
    done = person.tell("cancel", "digits")
    assert (done.code, list(tmp_path.glob("runs/*"))) == (2, [])
    assert mentions(done.err, f"no run digits … cluster has {handle}")
    assert handle in person.tell("list", "-b", "kubernetes").out
    done = person.tell("status", "digits", "--json")
    assert done.code == 0, done.err
    reported = json.loads(done.out)
    assert (reported["state"], reported["job"]) == ("pending", job)
    assert "is suspended" in reported["waits"]
    assert "pending" in person.tell("list").out
    assert person.tell("resume", "digits").code == 0
    assert person.fake.objects["mpijobs", "default", job]["spec"]["runPolicy"]["suspend"] is False


def test_a_run_of_another_namespace_is_named_and_left_alone(person: Person, tmp_path: Path) -> None:
    handle = f"kubernetes://elsewhere/{applied(person, 'elsewhere')}"
    done = person.tell("status", "digits")
    assert (done.code, list(tmp_path.glob("runs/*"))) == (2, [])
    assert handle in done.err
    assert "-A searches all" in person.tell("list", "-b", "kubernetes").out
    assert mentions(person.tell("status", "digit").err, "digit ", "give its directory")
    person.fake.away = True
    assert mentions(person.tell("status", "digits").err, "digits", "give its directory")


@pytest.mark.parametrize(
    ("outcome", "cause", "why"),
    [
        ("failure", "rank 1 raised", "the budget of 0 failures is spent"),
        ("preempted", "saved and stopped", "5 attempts in a row ended before a step was done"),
    ],
)
def test_why_a_run_was_given_up_is_named(person: Person, tmp_path: Path, outcome: str, cause: str, why: str) -> None:
    done = person.tell("submit", "-b", "kubernetes", "run.yaml")
    assert done.code == 0, done.err
    run = RunDir(tmp_path / "runs" / "digits")
    run.record_attempt(event="start", attempt=0)
    run.record_attempt(event="end", attempt=0, outcome=outcome, next="stop", cause=cause, why=why)
    assert f"last end    {cause}; {why}\n" in person.tell("status", "digits").out


def test_render_refuses_what_kubectl_would_apply_by_half(person: Person) -> None:
    """Its annotation holds the whole ConfigMap: the API server refuses that one, and takes the others."""
    files = "backends.kubernetes.files=[more.py]"
    for size, fits in ((250_000, True), (320_000, False)):
        Path("more.py").write_text("x" * size)
        done = person.tell("render", "-b", "kubernetes", "run.yaml", files)
        assert (done.code, bool(done.out)) == ((0, True) if fits else (2, False))
    assert mentions(done.err, "backends.kubernetes.files", "ConfigMap", "256 KiB", "`ortflow submit`", "volume")
    Path("more.py").write_text("<&>" * 20_000)
    assert person.tell("render", "-b", "kubernetes", "run.yaml", files).code == 2, "six letters each"


def test_render_needs_no_cluster(person: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    done = person.tell("render", "-b", "kubernetes", "run.yaml")
    assert done.code == 0, done.err
    assert done.out == person.tell("render", "-b", "kubernetes", "run.yaml").out
    kinds = [document["kind"] for document in yaml.safe_load_all(done.out)]
    assert kinds == ["ServiceAccount", "ConfigMap", "MPIJob"], "deleting what is in the file keeps the checkpoints"
    assert mentions(done.out, "# … claim digits-data … not in this file")
    assert "kubectl delete pvc digits-data" in done.out
    claimed = person.tell("render", "-b", "kubernetes", "run.yaml", "--with-claim").out
    documents = list(yaml.safe_load_all(claimed))
    assert [document["kind"] for document in documents] == [
        "ServiceAccount", "ConfigMap", "PersistentVolumeClaim", "MPIJob"
    ]  # fmt: skip
    assert documents[2]["metadata"]["name"] == "digits-data"
    assert mentions(claimed, "`kubectl delete -f` … every checkpoint")
    reported = person.tell("render", "-b", "kubernetes", "run.yaml", "backends.kubernetes.volume={claim: mine}").out
    assert reported.startswith("---\n"), "an existing claim must not be deleted"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("submit", "-b", "kubernetes", "run.yaml", "--after", "x"),
            "kubernetes … add -b slurm",
        ),
        (
            ("submit", "-b", "kubernetes", "run.yaml", "--set", "seed=1,2"),
            "kubernetes … add -b slurm",
        ),
        (("submit", "-b", "kubernetes", "run.yaml", "--host", "login"), "--host is for login nodes"),
        (("render", "-b", "slurm", "run.yaml", "--with-claim"), "storage claim … add -b kubernetes"),
        (("list", "-A"), "namespaces … add -b kubernetes"),
        (("doctor", "-b", "kubernetes", "--job"), "kubernetes … add -b slurm"),
        (("status", "kubernetes://default/nobody"), "no MPIJob nobody … namespace default"),
        (("submit", "-b", "kubernetes", "run.yaml", "backends.kubernetes.context=b"), "unknown context b"),
        (("submit", "-b", "kubernetes", "run.yaml", "backends.kubernetes.image=null"), "backends.kubernetes.image"),
    ],
)
def test_what_does_not_apply(person: Person, arguments: tuple[str, ...], words: str) -> None:
    refused = person.tell(*arguments)
    assert refused.code == 2, refused.err
    assert mentions(refused.err, words)
    assert not person.fake.of("mpijobs")


def test_supervise_is_for_runs_on_kubernetes(person: Person, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "here"
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text("name: here\n")
    refused = person.tell("supervise", "here")
    assert refused.code == 2
    assert mentions(refused.err, "local", "`ortflow supervise`")


def test_without_the_package(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    script = "import sys; sys.modules['kubernetes'] = None; from ortflow.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "submit", "-b", "kubernetes", "run.yaml"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert mentions(line, "error: ", "kubernetes", "`pip install 'ortflow[kubernetes]'`")


def test_help_does_not_import_the_package(tmp_path: Path) -> None:
    script = (
        "import sys; sys.argv[1:] = ['--help']; from ortflow.cli.app import command_line\n"
        "try: command_line()()\nexcept SystemExit: pass\nassert 'kubernetes' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "supervise" in done.stdout
