"""Volumes and overlays of `backends.kubernetes` without a schema: which key is wrong, and what identifies an item."""

from __future__ import annotations

from typing import Any

import pytest
from messages import mentions
from run_files import spec_of

from ortflow.workflow.spec.checks.kubernetes_native import MERGE_KEYS, OWN_VOLUMES, check_native


def reported(**values: Any) -> dict[str, str]:
    """The problems below `backends.kubernetes`: key path, and what is wrong with the fix."""
    problems = list(check_native(spec_of(backends={"kubernetes": values})))
    assert all(problem.path[:2] == ("backends", "kubernetes") for problem in problems)
    found = {".".join(map(str, one.path[2:])): f"{one.what}; {one.fix}" for one in problems}
    assert len(found) == len(problems)
    return found


def volume(**changes: Any) -> dict[str, Any]:
    return {"name": "sets", "mount": "/sets", "source": {"emptyDir": {}}, **changes}


def of_patch(patch: Any) -> dict[str, str]:
    found = reported(overlay=[{"kind": "MPIJob", "patch": {}}, {"kind": "MPIJob", "patch": patch}])
    assert all(key.startswith("overlay.1.patch") for key in found)
    return {key.removeprefix("overlay.1.patch").lstrip("."): what for key, what in found.items()}


def test_volumes_and_overlays_that_are_right() -> None:
    volumes = [volume(), volume(name="a-1", sub_path="a/b"), volume(name="b" * 63, mount="/a/b")]
    assert reported(volumes=volumes) == {}
    for patch in (
        {"spec": {"$patch": "replace", "a": 1}, "metadata": {"labels": {"$patch": "delete"}}},
        {"containers": [{"name": "a", "env": [{"name": "X", "$patch": "delete"}]}, {"$patch": "replace"}]},
        {"args": [1, {"a": "b"}], "ports": [{"containerPort": 1}]},
        {"ports": [{"port": 1}, {"port": 2}]},
    ):
        assert of_patch(patch) == {}


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"source": {}}, "source", ("is empty", "nfs")),
        ({"source": {"nfs": {}, "emptyDir": {}}}, "source", ("several: nfs, emptyDir", "one source")),
        ({"name": "Sets"}, "name", ("'Sets'",)),
        ({"name": "a" * 64}, "name", ("aaa",)),
        ({"mount": "sets"}, "mount", ("'sets'", "absolute")),
        ({"mount": "/a/../b"}, "mount", ("'/a/../b'", "..")),
        ({"sub_path": "/a"}, "sub_path", ("inside",)),
        ({"sub_path": "../a"}, "sub_path", ("inside",)),
        *(({"name": name}, "name", (f"is {name}", "another name")) for name in sorted(OWN_VOLUMES)),
    ],
)
def test_a_wrong_volume(changes: dict[str, Any], key: str, words: tuple[str, ...]) -> None:
    (found,) = reported(volumes=[volume(name="first"), volume(**changes)]).items()
    assert found[0] == f"volumes.1.{key}"
    assert mentions(found[1], *words)


def test_each_volume_has_a_name_of_its_own() -> None:
    found = reported(volumes=[volume(name=name) for name in ("a", "b", "a", "c", "b", "a")])
    assert list(found) == ["volumes.2.name", "volumes.4.name", "volumes.5.name"]
    assert mentions(found["volumes.4.name"], "is b", "another volume", "different")


@pytest.mark.parametrize(
    ("patch", "key", "words"),
    [
        ({"$patch": "merge"}, "$patch", ("delete or replace", "'merge'")),
        ({"a": [{"b": {"$patch": None}}]}, "a.0.b.$patch", ("delete or replace",)),
        ({"a": {"$retainKeys": []}}, "a.$retainKeys", ("not a directive", "$patch: delete")),
        ({"env": [{"name": "A"}, 5]}, "env.1", ("a mapping", "5")),
        ({"env": [{"value": "1"}]}, "env.0", ("no name",)),
        ({"env": [{"$patch": "replace", "name": "A"}]}, "env.0.$patch", ("replaces one item", "separate item")),
        ({"env": [{"name": "A", "$patch": "remove"}]}, "env.0.$patch", ("delete or replace", "'remove'")),
        ({"env": [{"name": "A", "valueFrom": {"$x": 1}}]}, "env.0.valueFrom.$x", ("not a directive",)),
        ({"ports": [{"containerPort": 1, "port": 2}]}, "ports.0", ("no containerPort or port",)),
        ({"env": [{"$patch": "replace"}, {"value": "1"}]}, "env.1", ("no name",)),
        ({"ports": [{"protocol": "TCP"}]}, "ports.0", ("no containerPort or port",)),
    ],
)
def test_a_wrong_patch(patch: Any, key: str, words: tuple[str, ...]) -> None:
    (found,) = of_patch(patch).items()
    assert found[0] == key
    assert mentions(found[1], *words)


def test_all_items_of_a_list_are_identified_by_the_same_key() -> None:
    assert list(of_patch({"ports": [{"containerPort": 1}, {"port": 2}]})) == ["ports.0", "ports.1"]


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        *((name, ("name",)) for name in ("containers", "initContainers", "env", "volumes", "imagePullSecrets")),
        ("volumeMounts", ("mountPath",)),
        ("volumeDevices", ("devicePath",)),
        ("ports", ("containerPort", "port")),
        ("hostAliases", ("ip",)),
        ("topologySpreadConstraints", ("topologyKey",)),
    ],
)
def test_what_identifies_the_items_of_a_list(name: str, keys: tuple[str, ...]) -> None:
    """As in Kubernetes' API, `x-kubernetes-patch-merge-key`; of ports, that of a container or of a Service."""
    assert MERGE_KEYS[name] == keys
    for key in keys:
        assert of_patch({name: [{key: "a"}, {key: "b"}]}) == {}
    assert list(of_patch({name: [{"other": "a"}]})) == [f"{name}.0"]
