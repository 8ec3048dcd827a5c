"""The image from the project's Dockerfile, and `ortflow image check` in it and in broken ones."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from kubernetes_testbed import Object, Space, image_pod

CHECK = "ortflow image check --json"
BREAKS = {
    "rm /usr/sbin/sshd": "sshd",
    "rm /usr/bin/ssh": "ssh",
    "rm /opt/ortflow/lib/libmpi*.so*": "MPI",
    "pip uninstall -qy onnxruntime-training-cpu onnxruntime": "interpreter",
    "chsh -s /bin/false": "login",
}
"""What is done to an image, and what is at fault then."""


def checked(space: Space, pods: list[Object]) -> list[tuple[dict[str, str], Any]]:
    """The check's findings in each pod: levels by subject, and its exit code. The pods run in parallel."""
    space.make_all(*pods)
    answers = []
    for pod in pods:
        name = pod["metadata"]["name"]
        space.until_phase(name, "Succeeded", "Failed")
        reported = json.loads(space.kubectl("logs", name))
        state = space.get("pod", name)["status"]["containerStatuses"][0]["state"]["terminated"]
        answers.append(({one["about"]: one["level"] for one in reported["findings"]}, state["exitCode"]))
    return answers


def as_user(uid: int, pod: Object, group: int = 0) -> Object:
    """The pod, run as another user."""
    pod["spec"]["securityContext"] = {"runAsUser": uid, "runAsGroup": group}
    return pod


def test_the_image_has_what_ranks_need(space: Space) -> None:
    """With both MPIs, and as root too; for a user unknown to the image it reports what is missing."""
    own = image_pod("own", ["bash", "-c", f"{CHECK} --mpi mpich"])
    other = image_pod("openmpi", ["bash", "-c", f"{CHECK} --mpi openmpi"], image="localhost/ortflow:openmpi")
    root = as_user(0, image_pod("root", ["bash", "-c", CHECK]))
    added = as_user(12345, image_pod("added", ["bash", "-c", CHECK]))
    unknown = as_user(12345, image_pod("unknown", ["bash", "-c", CHECK]), group=12345)
    *good, (to_add, able), (found, code) = checked(space, [own, other, root, added, unknown])
    for levels, status in good:
        assert status == 0
        assert set(levels.values()) <= {"ok", "warning"}
        assert levels["login"] == levels["MPI"] == levels["ssh keys"] == "ok"
    assert (to_add["user"], to_add["login"], able) == ("untested", "untested", 0), "group 0 may add an account"
    assert code == 1
    assert found["user"] == "fault"
    assert found["login"] == "untested"


@pytest.mark.rotates("Kubernetes")
def test_broken_images(space: Space) -> None:
    broken = [f"{{ {do}; }} >/dev/null 2>&1; exec {CHECK}" for do in BREAKS]
    pods = [as_user(0, image_pod(f"broken-{i}", ["bash", "-c", script])) for i, script in enumerate(broken)]
    for (found, code), at_fault in zip(checked(space, pods), BREAKS.values(), strict=True):
        assert code == 1
        assert found[at_fault] == "fault"


def test_the_kernels_are_compiled_already(space: Space) -> None:
    """For the testbed's processor and for others."""
    look = "from ortflow.workflow.kernels.library import find_library; print(find_library().path)"
    space.make_all(image_pod("kernels", ["python", "-c", look]))
    space.until_phase("kernels", "Succeeded")
    assert space.kubectl("logs", "kernels").startswith("/opt/ortflow/share/ortflow/kernels/x86_64-avx")


def test_nothing_of_the_place_where_it_was_built(space: Space) -> None:
    """No keys that every copy would share, no settings of this machine; by default the command runs as uid 1000."""
    here = os.environ.get("PIP_FIND_LINKS", "/wheels")
    script = f"""
    id -u
    find / -xdev \\( -name 'ssh_host_*' -o -name id_rsa -o -name pip.conf \\) 2>/dev/null
    env | grep -i pip
    ls -d {here} /build /wheel 2>/dev/null
    """
    pod = image_pod("look", ["bash", "-c", f"{script}\ntrue"])
    del pod["spec"]["securityContext"]
    space.make_all(pod)
    space.until_phase("look", "Succeeded")
    assert space.kubectl("logs", "look").splitlines() == ["1000"]
