"""charts/ortflow as users work with it: installed, upgraded, rolled back, tested, uninstalled on a real cluster."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_cluster import MOUNT, PLACE, SHAPE, STARTS, Run
from kubernetes_cluster import Cluster as OnVolume
from kubernetes_testbed import Space, wait_until
from project import FEW_CORES, Project, curve, of_kind

from ortflow.workflow.spec.file.load import load_run_text

CHART = Path(__file__).parents[2] / "charts" / "ortflow"
SUPPORT = Path(__file__).parents[1] / "support"
INPUTS, FAULTS = "/inputs", "/faults"
OPTIONS = ("supervisor", "tensorboard", "network_policy", "disruption_budget")
KINDS = (
    "mpijobs,jobs,deployments,replicasets,pods,services,configmaps,secrets,serviceaccounts,roles,rolebindings,"
    "networkpolicies,poddisruptionbudgets"
)
WRONG = {
    'train.steps="many"': "/train/steps",
    "train.stepz=3": "stepz",
    "backends.kubernetes.image=null": "image",
    'backends.kubernetes.spread="sometimes"': "/backends/kubernetes/spread",
    "resources.nodes=0": "/resources/nodes",
    'backends.kubernetes.volume.claim="other"': "volume",
}
"""Values, and what Helm says of them."""
USUAL = {"kube-root-ca.crt", "default"}
MIDDLE = 12


def host_path(folder: Path) -> dict[str, Any]:
    """A folder of this machine that all nodes of a testbed see."""
    return {"hostPath": {"path": str(folder), "type": "Directory"}}


@dataclass(frozen=True)
class Release:
    """A run file with every option of the chart on, and Helm."""

    space: Space
    project: Project
    folder: Path
    helm: str

    @property
    def run(self) -> Run:
        """The run directory on the volume that the chart claims."""
        volume = self.space.volume("chart-data")
        return Run(OnVolume(self.space, self.project, volume, self.folder), "chart")

    def values(self, **changes: Any) -> str:
        """The run file: inputs are in folders that all nodes see; steps are slowed down."""
        own = {
            **{key: PLACE["backends__kubernetes"][key] for key in ("image", "grace_seconds")},
            **dict.fromkeys(OPTIONS, True),
            "folder": INPUTS,
            "volume": {"mount": MOUNT, "create": {"size": "1Gi"}},
            "volumes": [
                {"name": "inputs", "mount": INPUTS, "read_only": True, "source": host_path(self.project.folder)},
                {"name": "faults", "mount": FAULTS, "read_only": True, "source": host_path(SUPPORT / "faults")},
            ],
            "env": {**FEW_CORES, "PYTHONPATH": FAULTS, "SLOW": "0.25 1000"},
        }
        shape = {**SHAPE, "resources": PLACE["resources"], "backends__kubernetes": own}
        return str(Project(self.folder).write("chart", **{**shape, **changes}))

    def ask(self, *words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run `helm WORDS` in the namespace."""
        return self.space.testbed.ask(self.helm, "-n", self.space.name, *words, timeout=timeout)

    def reported(self, *words: str, timeout: float = 120) -> str:
        """Run `helm WORDS`; it must succeed."""
        done = self.ask(*words, timeout=timeout)
        assert done.returncode == 0, done.stdout + done.stderr + self.space.transcript()
        return done.stdout

    def left(self) -> set[str]:
        """The objects in the namespace, without those that every namespace has."""
        found = self.space.get(KINDS)["items"]
        return {f"{item['kind']}/{item['metadata']['name']}" for item in found} - {
            f"{kind}/{name}" for kind in ("ConfigMap", "ServiceAccount") for name in USUAL
        }


@pytest.fixture(params=["helm"])
def release(request: pytest.FixtureRequest, space: Space, kubernetes_project: Project, tmp_path: Path) -> Release:
    return Release(space, kubernetes_project, tmp_path, request.param)


def test_what_helm_itself_refuses(release: Release) -> None:
    """Values that are not a valid run file are refused before anything is created; lint accepts valid ones."""
    file = release.values()
    release.reported("lint", str(CHART), "-f", file, "--strict")
    for wrong, words in WRONG.items():
        done = release.ask("install", "chart", str(CHART), "-f", file, "--set-json", wrong)
        assert done.returncode == 1, wrong
        assert "specifications of the schema" in done.stderr, done.stderr
        for word in words.split():
            assert word in done.stderr, done.stderr
    assert release.left() == set()
    assert json.loads(release.reported("list", "-o", "json")) == []


@pytest.mark.parametrize("release", ["helm", "helm3"], indirect=True)
def test_helm_makes_what_render_prints(release: Release) -> None:
    """Compares a run with every option, document by document, and the ConfigMap's run file by its values."""
    file = release.values()
    namespace = f"backends.kubernetes.namespace={release.space.name}"
    planned = release.reported(
        "install", "chart", str(CHART), "-f", file, "--set", namespace, "--dry-run=server", "-o", "json"
    )
    done = release.run.cluster.ortflow("render", "-b", "kubernetes", "--with-claim", file, namespace)
    assert done.returncode == 0, done.stderr
    assert documents(json.loads(planned)["manifest"]) == documents(done.stdout)
    assert release.left() == set()


def documents(text: str) -> dict[str, Any]:
    """Documents by kind and name, with one job name: it depends on the text of the run file, which differs."""
    every = [one for one in yaml.safe_load_all(text) if one]
    (job,) = (one["metadata"]["name"] for one in every if one["kind"] == "MPIJob")
    every = [one for one in yaml.safe_load_all(text.replace(job, "chart-job")) if one]
    for document in every:
        if document["kind"] == "ConfigMap":
            document["data"]["run.yaml"] = load_run_text(document["data"]["run.yaml"], "run.yaml")
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in every}


@pytest.mark.chaos
@pytest.mark.parametrize("release", ["helm", "helm3"], indirect=True)
def test_a_release_from_install_to_uninstall(release: Release) -> None:
    """Installed, upgraded and rolled back while it trains, finished, tested, viewed, and uninstalled."""
    run, space = release.run, release.space
    file = release.values(train__steps=50)
    release.reported("install", "chart", str(CHART), "-f", file)
    first = name_of(run)
    assert {f"PodDisruptionBudget/{first}", f"NetworkPolicy/{first}", f"Role/{first}"} <= release.left()
    run.until_step(MIDDLE, timeout=120)
    before = run.job()["metadata"]["uid"]
    release.reported("upgrade", "chart", str(CHART), "-f", file)
    assert run.job()["metadata"]["uid"] == before, "nothing has changed"
    release.reported("upgrade", "chart", str(CHART), "-f", release.values(train__steps=80))
    assert name_of(run) != first
    until_attempt(run, 1)
    release.reported("rollback", "chart", "1")
    assert name_of(run) == first
    run.finish()
    assert run.outcomes() == ["preempted", "preempted", "finished"]
    assert not of_kind(run.run_dir, "rewind"), "each continues where the one before saved"
    assert [step for step, *_ in curve(run.run_dir)] == [*range(1, 51)]
    assert not {one for one in release.left() if one.startswith("MPIJob")} - {f"MPIJob/{first}"}
    reported = release.reported("test", "chart", timeout=300)
    assert "Phase:          Succeeded" in reported
    assert f"{first}-doctor" in reported
    shows_the_curve(release)
    ends_at_once(release)
    release.reported("uninstall", "chart")
    wait_until(lambda: not release.left(), 120, lambda: str(release.left()))
    assert [item["metadata"]["name"] for item in space.get("pvc")["items"]] == ["chart-data"]
    assert of_kind(run.run_dir, "finished"), "what was trained is on the volume"


def name_of(run: Run) -> str:
    """Of its only MPIJob."""
    (job,) = run.space.get("mpijobs")["items"]
    return str(job["metadata"]["name"])


def until_attempt(run: Run, attempt: int) -> None:
    """Wait until this attempt has made a few steps."""
    made: list[int] = []

    def there() -> bool:
        nonlocal made
        made = [one["step"] for one in of_kind(run.run_dir, "step") if one["attempt"] == attempt]
        return len(made) > 3

    wait_until(there, STARTS, run.transcript)


def shows_the_curve(release: Release) -> None:
    """Check that TensorBoard serves the run's scalars at its Service's address."""
    space = release.space
    proxy = f"/api/v1/namespaces/{space.name}/services/chart-tensorboard:6006/proxy"

    def scalars() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(space.kubectl("get", "--raw", f"{proxy}/data/plugin/scalars/tags"))
        return found

    wait_until(lambda: {"loss", "lr", "eval/loss"} <= {*scalars().get(".", {})}, 120, lambda: str(scalars()))
    points = json.loads(space.kubectl("get", "--raw", f"{proxy}/data/plugin/scalars/scalars?run=.&tag=loss"))
    assert points[-1][1] == 50
    look = "from urllib.request import urlopen; print(urlopen('http://localhost:6006/').status)"
    assert space.kubectl("exec", "deployment/chart-tensorboard", "--", "python", "-c", look) == "200"


def ends_at_once(release: Release) -> None:
    """Check that the TensorBoard pod ends when asked, even while it is starting."""
    space = release.space
    late = space.volume("chart-data") / "late"
    late.mkdir()
    (late / "sitecustomize.py").write_text("import time\n\ntime.sleep(600)\n")
    space.kubectl("set", "env", "deployment/chart-tensorboard", f"PYTHONPATH={MOUNT}/late")
    board = "ortflow.dev/component=tensorboard"

    def new() -> list[str]:
        return [
            pod["metadata"]["name"]
            for pod in space.pods(board)
            if pod["status"]["phase"] == "Running" and pod["spec"]["containers"][0].get("env")
        ]

    wait_until(new, 120, space.transcript)
    space.kubectl("delete", "pod", *new(), "--timeout=20s")
