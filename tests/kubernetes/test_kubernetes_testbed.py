"""The testbed itself, on which the launcher's tests depend."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from kubernetes_testbed import SCRIPTS, Object, Space, Testbed, image_pod, wait_until
from mpijob_by_hand import mpijob

READY = 20.0
"""Seconds from built pieces to a cluster that is ready, on two cores that have nothing else to do."""
BUSY = 2.0
"""How many times as long it may take beside another testbed."""


def ended(pod: Object | None) -> Object:
    """How the container of a pod ended."""
    assert pod is not None
    return dict(pod["status"]["containerStatuses"][0]["state"]["terminated"])


def interfaces() -> set[str]:
    return set(os.listdir("/sys/class/net"))


def groups() -> set[str]:
    return {str(path) for path in Path("/sys/fs/cgroup").glob("*/ortflow-testbed-*")}


def sysctls() -> list[str]:
    names = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops")
    return [Path("/proc/sys", name).read_text() for name in names]


def test_up_is_quick_and_down_leaves_nothing(cluster_testbed: Testbed) -> None:
    """A second testbed beside the first."""
    folder = Path(f"/var/tmp/ortflow-kubernetes-second-{os.getpid()}")
    before = interfaces(), groups(), sysctls()
    start = time.monotonic()
    up = [str(SCRIPTS / "up"), "--testbed", str(folder), "--without-image"]
    done = subprocess.run(up, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start < READY * BUSY, done.stderr
    assert done.stdout == f"{folder}/env\n"
    second = Testbed(folder)
    assert [node["metadata"]["name"] for node in second.get("nodes")["items"]] == ["n1", "n2"]
    start = time.monotonic()
    subprocess.run(up, capture_output=True, timeout=120, check=True)
    assert time.monotonic() - start < 5 * BUSY, "what is up is not started again"
    space = Space.make(second, "left")
    space.make_all(image_pod("sleeper", ["sleep", "600"]))
    space.until_phase("sleeper", "Running")
    subprocess.run([str(SCRIPTS / "down"), "--testbed", str(folder)], check=True, timeout=120)
    assert not folder.exists()
    assert str(folder) not in Path("/proc/mounts").read_text()
    assert (interfaces(), groups(), sysctls()) == before
    assert [process for process in psutil.process_iter() if _of(process, folder)] == []
    assert cluster_testbed.kubectl("get", "nodes"), "the other testbed still runs"


def _of(process: psutil.Process, folder: Path) -> bool:
    try:
        return str(folder) in " ".join([*process.cmdline(), *process.environ().values()])
    except psutil.Error:
        return False


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nodes"], "--nodes needs a value"),
        (["--frobnicate", "1"], "no such option here: --frobnicate"),
        (["--testbed", "/run/testbed"], "a testbed cannot lie there, nodes cover it: /run/testbed"),
    ],
)
def test_up_reports_what_is_wrong(tmp_path: Path, options: list[str], words: str) -> None:
    up = [str(SCRIPTS / "up"), "--testbed", str(tmp_path / "none"), *options]
    done = subprocess.run(up, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert words in done.stderr
    assert not (tmp_path / "none").exists()


def test_down_removes_only_testbeds(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    done = subprocess.run(
        [str(SCRIPTS / "down"), "--testbed", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert (tmp_path / "precious").exists()


@pytest.mark.parametrize(("mpi", "tag", "word"), [("MPICH", "testbed", "MPICH"), ("OpenMPI", "openmpi", "Open")])
def test_an_mpijob_by_hand(space: Space, mpi: str, tag: str, word: str) -> None:
    space.make_all(mpijob("by-hand", mpi=mpi, image=f"localhost/ortflow:{tag}"))
    wait_until(lambda: space.condition("by-hand", "Succeeded"), 120, space.transcript)
    reported = space.kubectl("logs", "-l", "training.kubeflow.org/job-role=launcher")
    assert reported.splitlines()[-1] == f"by-hand-worker-0 uid 1000; by-hand-worker-1 uid 1000 {word}"


def test_what_a_person_has(cluster_testbed: Testbed) -> None:
    """From outside, with the testbed's kubeconfig."""
    assert cluster_testbed.environment["KUBECONFIG"].startswith(str(cluster_testbed.folder))
    assert "Server Version: v1.34.4" in cluster_testbed.kubectl("version")
    assert cluster_testbed.reported("helm", "version", "--short").startswith("v4.")
    assert cluster_testbed.reported("helm3", "version", "--short").startswith("v3.")
    cpus = [node["status"]["capacity"]["cpu"] for node in cluster_testbed.get("nodes")["items"]]
    assert cpus == ["8", "8"]


def test_logs_exec_names_and_the_api_from_a_pod(space: Space) -> None:
    program = (
        "from kubernetes import client, config; config.load_incluster_config();"
        "print(client.VersionApi().get_code().git_version, flush=True); import time; time.sleep(600)"
    )
    service = {"clusterIP": "None", "selector": {"app": "named"}, "ports": [{"port": 80}]}
    pod = image_pod("named", ["python", "-c", program])
    pod["metadata"]["labels"] = {"app": "named"}
    pod["spec"] |= {"hostname": "host", "subdomain": "names"}
    space.make_all({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "names"}, "spec": service}, pod)
    wait_until(
        lambda: "v1.34.4" in space.testbed.ask("kubectl", "-n", space.name, "logs", "named").stdout,
        60,
        space.transcript,
    )
    assert space.kubectl("exec", "named", "--", "id", "-un") == "ortflow"
    address = space.get("pod", "named")["status"]["podIP"]
    for name in (f"host.names.{space.name}.svc.cluster.local", f"names.{space.name}.svc", "names"):
        asked = f"import socket; print(socket.gethostbyname({name!r}))"
        found = ["kubectl", "-n", space.name, "exec", "named", "--", "python", "-c", asked]
        wait_until(
            lambda found=found: space.testbed.ask(*found).stdout.strip() == address, 10, f"{name} is not {address}"
        )


def test_volumes(space: Space) -> None:
    """The other node and this machine see what one node writes; it is deleted with the claim."""
    folder = space.claim()
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}
    for name, script in (("n1", "echo from n1 > /data/file"), ("n2", "until grep n1 /data/file; do sleep .1; done")):
        pod = image_pod(f"on-{name}", ["bash", "-c", script], volumeMounts=[{"name": "data", "mountPath": "/data"}])
        pod["spec"] |= {"volumes": [volume], "nodeName": name}
        space.make_all(pod)
    for name in ("on-n1", "on-n2"):
        space.until_phase(name, "Succeeded")
    assert (folder / "file").read_text() == "from n1\n"
    assert (folder / "file").stat().st_uid == 1000
    space.kubectl("delete", "pods", "--all")
    space.kubectl("delete", "pvc", "data")
    wait_until(lambda: not folder.exists(), 120)


def test_a_volume_without_a_class(space: Space) -> None:
    spec = {"storageClassName": "", "accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "static"}, "spec": spec}
    for _ in range(4):  # more often than there are volumes: each is released after use
        space.make_all(claim)
        wait_until(lambda: space.get("pvc", "static")["status"].get("phase") == "Bound", 120, space.transcript)
        space.kubectl("delete", "pvc", "static")


def test_limits_are_held(space: Space) -> None:
    """The kernel enforces memory limits, the kubelet disk limits."""
    greedy = ["python", "-c", "x = b'x' * 300_000_000; print(len(x))"]
    filling = ["bash", "-c", "head -c 60M /dev/zero > /tmp/full; sleep 600"]
    space.make_all(
        image_pod("greedy", greedy, resources={"limits": {"memory": "64Mi"}}),
        image_pod("filling", filling, resources={"limits": {"ephemeral-storage": "20Mi"}}),
    )
    space.until_phase("greedy", "Failed", timeout=120)
    assert ended(space.pod("greedy"))["reason"] == "OOMKilled"
    space.until_phase("filling", "Failed", timeout=120)
    pod = space.pod("filling")
    assert pod is not None
    assert pod["status"]["reason"] == "Evicted"
    assert "ephemeral" in pod["status"]["message"]


@pytest.mark.chaos
def test_the_operator_comes_back(kubernetes_testbed: Testbed, space: Space) -> None:
    """It is restarted after an exit, as by its Deployment; after a kill it stays down until it is started."""
    enter = [str(SCRIPTS / "enter"), "--testbed", str(kubernetes_testbed.folder)]
    kubernetes_testbed.reported(*enter, "kill", kubernetes_testbed.reported(*enter, "pgrep", "-x", "mpi-operator"))
    space.make_all(mpijob("after-exit"))
    wait_until(lambda: space.condition("after-exit", "Succeeded"), 180, space.transcript)
    with kubernetes_testbed.without("operator"):
        space.make_all(mpijob("meanwhile"))
        time.sleep(3)
        assert "status" not in space.get("mpijob", "meanwhile")
    wait_until(lambda: space.condition("meanwhile", "Succeeded"), 120, space.transcript)


@pytest.mark.chaos
def test_a_node_goes_off_and_on(kubernetes_testbed: Testbed, space: Space) -> None:
    pod = image_pod("there", ["sleep", "600"])
    pod["spec"]["nodeName"] = "n2"
    space.make_all(pod)
    space.until_phase("there", "Running")
    kubernetes_testbed.node("off", "n2")
    wait_until(lambda: not kubernetes_testbed.ready("n2"), 120)
    assert kubernetes_testbed.ready("n1")
    wait_until(lambda: "deletionTimestamp" in (space.pod("there") or {}).get("metadata", {}), 120, space.transcript)
    kubernetes_testbed.node("on", "n2")
    wait_until(lambda: kubernetes_testbed.ready("n2"), 120)
    wait_until(lambda: space.pod("there") is None, 120, space.transcript)


@pytest.mark.chaos
def test_a_cable_is_out_and_in(kubernetes_testbed: Testbed, space: Space) -> None:
    """Ranks that do nothing over the network meanwhile survive."""
    pod = image_pod("there", ["sleep", "600"])
    pod["spec"]["nodeName"] = "n2"
    space.make_all(pod)
    space.until_phase("there", "Running")
    kubernetes_testbed.node("cut", "n2")
    wait_until(lambda: not kubernetes_testbed.ready("n2"), 120)
    kubernetes_testbed.node("heal", "n2")
    wait_until(lambda: kubernetes_testbed.ready("n2"), 120)
    assert space.kubectl("exec", "there", "--", "hostname") == "there"


@pytest.mark.chaos
def test_the_api_server_is_away(kubernetes_testbed: Testbed, space: Space) -> None:
    space.make_all(mpijob("by-hand", seconds=25))
    wait_until(lambda: space.condition("by-hand", "Running"), 120, space.transcript)
    with kubernetes_testbed.without("apiserver"):
        done = kubernetes_testbed.ask("kubectl", "get", "nodes", "--request-timeout=3s")
        assert done.returncode != 0
        time.sleep(15)
    wait_until(lambda: space.condition("by-hand", "Succeeded"), 120, space.transcript)
