"""Slurm's output about a cluster, and `ortflow doctor`'s findings for a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from messages import mentions, says
from run_files import spec_of
from slurm_site import CONFIG, NODE, PARTITIONS, PLUGINS

from ortflow.launchers.findings import Finding, Level
from ortflow.launchers.slurm import checks
from ortflow.launchers.slurm.fit import Asked, asked, chosen, misfits
from ortflow.launchers.slurm.probe import Start
from ortflow.launchers.slurm.restart_checks import restarts
from ortflow.launchers.slurm.site import (
    Association,
    Node,
    read_associations,
    read_config,
    read_nodes,
    read_partitions,
    read_plugins,
    restart_delay,
)

NOTHING = Asked(1, 1, None, 0, None, (), None, None)


def test_settings() -> None:
    settings = read_config(CONFIG)
    assert settings["KillWait"] == "5 sec"
    assert settings["Prolog"] == ""
    assert settings["SlurmctldHost[0]"] == "vm(127.0.0.1)"
    assert restart_delay(settings) == (5, "cred_expire in AuthInfo")
    assert restart_delay({"AuthInfo": "socket=/x"}) == (120, "cred_expire by default")
    newer = {**settings, "SchedulerParameters": "bf_continue,requeue_delay=30"}
    assert restart_delay(newer) == (30, "requeue_delay in SchedulerParameters")
    assert restart_delay({**newer, "SchedulerParameters": "requeue_delay=0"})[0] == 0


def test_partitions() -> None:
    main, urgent = read_partitions(PARTITIONS)
    assert (main.name, main.default, main.nodes, main.max_nodes) == ("main", True, 4, 3)
    assert (main.max_time, main.default_time, main.grace) == (90000.0, 600.0, 30)
    assert main.allowed == {"accounts": frozenset({"lab", "x"})}
    assert main.memory_per_node is None
    assert (urgent.max_time, urgent.default_time, urgent.memory_per_cpu) == (None, None, 900)
    assert (urgent.state, urgent.default, urgent.allowed) == ("DRAIN", False, {})


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [("(null)", 0), ("gpu:2", 2), ("gpu:a100:4(S:0-1)", 4), ("nvme:1,gpu:tesla:2,gpu:k80:1", 3), ("gpu:3g.20gb:7", 7)],
)
def test_gpus_of_a_node(gres: str, gpus: int) -> None:
    (node,) = read_nodes(NODE.format(gres=gres, state="IDLE"))
    assert (node.cpus, node.memory, node.gpus) == (4, 4000, gpus)
    assert node.partitions == {"main", "urgent"}


@pytest.mark.parametrize(
    ("state", "up"),
    [("IDLE", True), ("MIXED", True), ("IDLE+CLOUD+POWERED_DOWN", False), ("DOWN*", False), ("ALLOCATED+DRAIN", False),
     ("IDLE*", False), ("MIXED+PLANNED", True), ("UNKNOWN+DRAIN", False)],
)  # fmt: skip
def test_node_is_up(state: str, up: bool) -> None:
    assert read_nodes(NODE.format(gres="gpu:2", state=state))[0].up is up


def test_plugins_and_associations() -> None:
    assert read_plugins(PLUGINS) == ["pmix", "none", "cray_shasta", "pmi2", "pmix_v4", "pmix_v5"]
    assert read_plugins("srun: MPI types are...\nsrun: none\nsrun: pmi2\n") == ["none", "pmi2"]
    assert read_associations("lab||normal,high\nroot|gpu|\n") == [
        Association("lab", "", ("normal", "high")),
        Association("root", "gpu", ()),
    ]


def nodes(*changes: Mapping[str, Any]) -> list[Node]:
    plain = Node("n", "IDLE", 4, 4000, 2, frozenset({"main", "urgent"}))
    return [replace(plain, **change) for change in changes]


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({}, []),
        ({"nodes": 3, "cpus": 4, "memory": 4000, "gpus": 2, "time": 90000, "account": "x"}, []),
        ({"time": 90001}, ["1-01:00:00 … asks for 1-01:00:01"]),
        ({"nodes": 4}, ["3 nodes … asks for 4"]),
        ({"account": "other"}, ["account other … lab, x"]),
        ({"cpus": 5}, ["4 cores … asks for 5 on each"]),
        ({"memory": 4001}, ["4000 MiB of memory … asks for 4001 on each"]),
        ({"nodes": 2, "gpus": 3}, ["1 nodes with 3 GPUs … asks for 2"]),
        ({"nodes": 2, "gpus": 3, "memory": 5000}, ["with 3 GPUs", "with more than 4000 MiB"]),
    ],
)
def test_what_does_not_fit(wanted: dict[str, Any], words: list[str]) -> None:
    main, _ = read_partitions(PARTITIONS)
    there = nodes({}, {}, {"gpus": 2}, {"gpus": 4}, {"gpus": 9, "partitions": frozenset({"other"})})
    found = misfits(replace(NOTHING, **wanted), main, there)
    assert len(found) == len(words)
    assert all(any(mentions(one.what, word) for one in found) for word in words), found
    assert all(one.never and one.fix for one in found)


def test_gpus_of_a_kind() -> None:
    main, _ = read_partitions(PARTITIONS)
    there = nodes({"gpus": 4, "kinds": (("a100", 3), ("h100", 1))}, {"kinds": (("a100", 2),)})
    wanted = replace(NOTHING, gpus=2, gpu_type="a100")
    assert says(str(wanted), "… 1 cores, 2 GPUs of type a100")
    assert misfits(wanted, main, there) == []
    (one,) = misfits(replace(wanted, gpu_type="h100"), main, there)
    assert says(one.what, "… 1 GPUs of type h100 … asks for 2 on each … a100, h100")
    (none,) = misfits(replace(wanted, gpu_type="b200"), main, there)
    assert says(none.what, "… GPUs of type b200 … asks for 2 on each")
    assert none.fix == "lower resources.ranks_per_node, or change resources.gpu_type"
    (typed,) = read_nodes(NODE.format(gres="nvme:1,gpu:tesla:2(S:0),gpu:k80:1", state="IDLE"))
    assert typed.kinds == (("tesla", 2), ("k80", 1))


def test_what_each_node_alone_has_too_little_of() -> None:
    main, _ = read_partitions(PARTITIONS)
    (one,) = misfits(replace(NOTHING, cpus=8, memory=9000), main, nodes({"cpus": 8}, {"memory": 9000}))
    assert says(one.what, "… 0 nodes … asks for 1")


def test_nodes_that_are_down_only_delay() -> None:
    main, urgent = read_partitions(PARTITIONS)
    there = nodes({}, {"state": "DOWN*"})
    (one,) = misfits(replace(NOTHING, nodes=2), main, there)
    assert not one.never
    assert [found.level for found in checks.fits(replace(NOTHING, nodes=2), [main], there)] == [Level.WARNING]
    (drained,) = misfits(NOTHING, urgent, there)
    assert (drained.what, drained.never) == ("is DRAIN", False)


def test_one_of_several_partitions_is_enough() -> None:
    main, urgent = read_partitions(PARTITIONS)
    open_one = replace(urgent, state="UP")
    both = replace(NOTHING, nodes=4, partitions=("main", "urgent"))
    (found,) = checks.fits(both, [main, open_one], nodes({}, {}, {}, {}))
    assert found.level is Level.OK
    assert mentions(found.what, "4 nodes", "1 cores each", "fits in urgent")
    (lost,) = checks.fits(replace(NOTHING, partitions=("nope",)), [main], [])
    assert (lost.level, lost.what) == (Level.FAULT, "there is no partition nope")
    (none,) = checks.fits(NOTHING, [open_one], [])
    assert (none.level, none.what) == (Level.FAULT, "there is no default partition")


def test_what_a_run_file_asks_for() -> None:
    resources = {"nodes": 2, "ranks_per_node": 4, "cpus_per_rank": 3, "memory": "3G", "time_limit": "1:00:00"}
    spec = spec_of(resources=resources, backends={"slurm": {"partition": "a, b", "account": "lab", "qos": "q"}})
    assert asked(spec) == Asked(2, 12, 2862, 0, 3600, ("a", "b"), "lab", "q")
    assert chosen(NOTHING, read_partitions(PARTITIONS))[0].name == "main"


def levels(found: Iterator[Finding]) -> list[tuple[str, str]]:
    return [(one.level.value, one.about) for one in found]


def test_accounts() -> None:
    settings, mine = read_config(CONFIG), [Association("lab", "", ("normal",))]
    wanted = replace(NOTHING, account="other", qos="normal")
    free = {**settings, "AccountingStorageEnforce": "none"}
    account = "backends.slurm.account"
    assert levels(checks.identity("me", mine, settings, wanted)) == [("ok", "user"), ("fault", account)]
    assert levels(checks.identity("me", mine, free, wanted)) == [("ok", "user"), ("warning", account)]
    assert levels(checks.identity("me", mine, settings, replace(wanted, account="lab"))) == [("ok", "user")]
    assert levels(checks.identity("me", [], settings, None)) == [("fault", "user")]
    assert levels(checks.identity("me", [], free, None)) == [("ok", "user")]
    assert levels(checks.identity("me", None, settings, wanted)) == [("ok", "user")]
    assert "forgets a job 5:00 min" in checks.accounting({"MinJobAge": "300 sec"}, False).what
    assert checks.accounting(settings, True).what == "slurmdbd, enforced: associations,limits,qos"
    assert checks.accounting(settings, False).level is Level.WARNING


def test_memory_and_time_that_are_not_given() -> None:
    main, urgent = read_partitions(PARTITIONS)
    wanted, settings = replace(NOTHING, cpus=4), read_config(CONFIG)
    assert mentions(checks.memory(wanted, 2, [main], settings).what, "400 MiB a rank … DefMemPerCPU is 200")
    assert checks.memory(wanted, 2, [urgent], settings).level is Level.OK
    assert "all that a node has" in checks.memory(wanted, 2, [main], {}).what
    assert levels(checks.time(wanted, [main])) == [("ok", "time")]
    assert levels(checks.time(wanted, [replace(main, default_time=60.0)])) == [("warning", "time")]
    assert levels(checks.time(replace(wanted, time=60), [main])) == []
    assert levels(checks.time(wanted, [urgent])) == []


@pytest.mark.parametrize(
    ("changes", "partition", "level", "words"),
    [
        ({}, {}, "ok", "35 s … grace 30 s, KillWait 5 s"),
        ({}, {"grace": 0}, "warning", "5 s to save"),
        ({"KillWait": "30 sec"}, {"grace": 0, "preempt_mode": "CANCEL"}, "ok", "ortflow submits another"),
        ({}, {"preempt_mode": "OFF"}, "ok", "jobs are not preempted"),
        ({"PreemptType": "preempt/none"}, {}, "ok", "jobs are not preempted"),
        ({}, {"preempt_mode": "SUSPEND,GANG"}, "ok", "resume by themselves"),
    ],
)
def test_preemption(changes: dict[str, str], partition: dict[str, Any], level: str, words: str) -> None:
    main, _ = read_partitions(PARTITIONS)
    reported = {
        one.about: one for one in restarts({**read_config(CONFIG), **changes}, [replace(main, **partition)], True)
    }
    assert reported["preemption"].level.value == level
    assert mentions(reported["preemption"].what, words)


def test_what_is_reported_about_restarts() -> None:
    settings = {**read_config(CONFIG), "SlurmctldParameters": "preempt_send_user_signal", "Prolog": "/site/prolog"}
    reported = {one.about: str(one) for one in restarts(settings, [], True)}
    assert "SIGUSR2" in reported["preempt_send_user_signal"]
    assert mentions(reported["restart delay"], "5.0 s … cred_expire in AuthInfo")
    assert mentions(reported["PrologFlags"], "Alloc,Contain … prolog … when the job begins")
    settings["SchedulerParameters"] = "requeue_delay=90"
    reported = {one.about: str(one) for one in restarts(settings, [], True)}
    assert mentions(reported["restart delay"], "1:30 min … requeue_delay in SchedulerParameters")
    plain = {one.about: str(one) for one in restarts({"JobRequeue": "0"}, [], False)}
    assert "SIGTERM" in plain["preempt_send_user_signal"]
    assert mentions(plain["restart delay"], "2:00 min … cred_expire by default")
    assert plain["requeue"].startswith("warning")
    assert "ortflow's do" in next(restarts({"JobRequeue": "0"}, [], True)).what


def test_mpi_plugins_and_the_start() -> None:
    found = checks.plugins({"none": True, "pmix": False, "pmi2": True})
    assert found.level is Level.OK
    assert mentions(found.what, "none, pmi2 load", "pmix … cannot be loaded")
    assert checks.plugins({"none": True, "pmix": False}).level is Level.WARNING
    loads = {"pmi2": True, "pmix": False}
    assert checks.start("auto", Start("pmi2", kind="mpich"), "/py", loads).level is Level.OK
    assert checks.start("pmi2", Start("pmi2", kind="openmpi"), "/py", loads).level is Level.WARNING
    assert checks.start("pmix", Start("pmix", kind="openmpi"), "/py", loads).level is Level.FAULT
    assert "/m inside the job" in checks.start("auto", Start("mpirun", "/m", "mpich"), "/py", loads).what
