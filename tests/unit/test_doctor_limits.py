"""Limits of a QOS or an account that a run exceeds by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from messages import alike, says

from ortflow.launchers.slurm.fit import Asked
from ortflow.launchers.slurm.limits import ACCOUNT_COLUMNS, QOS_COLUMNS, breaks, read_limits

# As `sacctmgr -nP` of 22.05 prints them.
QOS = "small|cpu=2,node=1|gres/gpu=1|cpu=4||cpu=8,mem=4G|cpu=1|00:10:00\n"
ACCOUNT = "lab|node=3|||1-00:00:00\nroot||||\n"
RUN = Asked(nodes=1, cpus=2, memory=None, gpus=0, time=None, partitions=(), account=None, qos=None)


def test_rows_are_read() -> None:
    (small,) = read_limits(QOS, QOS_COLUMNS)
    assert small.bounds["MaxTRESPerJob"] == {"cpu": 2, "node": 1}
    assert small.bounds["GrpTRES"] == {"cpu": 8, "mem": 4096}
    assert small.wall == 600
    lab, root = read_limits(ACCOUNT, ACCOUNT_COLUMNS)
    assert (lab.name, lab.bounds, lab.wall) == ("lab", {"MaxTRESPerJob": {"node": 3}}, 86400)
    assert (root.bounds, root.wall) == ({}, None)


@pytest.mark.parametrize(
    ("asks", "reported"),
    [
        ({}, []),
        ({"cpus": 3}, ["… 2 cores (MaxTRESPerJob) … asks for 3"]),
        ({"nodes": 2, "cpus": 1}, ["… 1 node (MaxTRESPerJob) … asks for 2"]),
        ({"gpus": 2}, ["… each node … 1 GPU (MaxTRESPerNode) … asks for 2"]),
        ({"memory": 5000}, ["… all jobs … 4096 MiB of memory (GrpTRES) … asks for 5000"]),
        ({"time": 601}, ["… 00:10:00 (MaxWall) … asks for 00:10:01"]),
        ({"time": 600}, []),
    ],
)
def test_what_a_run_breaks(asks: dict[str, int], reported: list[str]) -> None:
    (small,) = read_limits(QOS, QOS_COLUMNS)
    assert alike([one.what for one in breaks(replace(RUN, **asks), small)], reported)  # type: ignore[arg-type]


def test_too_little() -> None:
    (big,) = read_limits(QOS.replace("|cpu=1|", "|gres/gpu=4|"), QOS_COLUMNS)
    (found,) = breaks(RUN, big)
    assert says(found.what, "… less than 4 GPUs (MinTRESPerJob) … asks for 0")
