"""Nodes in reserve: what a run with spares asks of Slurm, and which nodes its attempts take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from messages import mentions
from run_files import spec_of
from slurm_scripts import CASES, PLAIN
from views import Lines

from ortflow.launchers.attempts.exclusion import is_among
from ortflow.launchers.batch.reserve import ReservedNodes
from ortflow.launchers.slurm.current_job import SlurmJob
from ortflow.launchers.slurm.fit import asked
from ortflow.launchers.slurm.runner import Answer, Settings
from ortflow.manifests.slurm import script
from ortflow.manifests.slurm.launch import launch, sized
from ortflow.manifests.slurm.trial import trial_spec
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.spec.checks.check import check

SPEC = spec_of(resources={"nodes": 2, "spares": 1, "ranks_per_node": 2})


class FakeJob:
    """The job of a scheduler that has given n1, n2 and n3, of which some are lost."""

    scheduler = "Slurm"

    def __init__(self, *lost: str) -> None:
        self.lost = lost

    def nodes(self) -> list[str]:
        return ["n1", "n2", "n3"]

    def lost_nodes(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name in self.lost]


def never() -> None:
    return None


def test_a_job_asks_for_spares_and_outlives_a_lost_node() -> None:
    lines = script(SPEC, PLAIN).splitlines()
    assert {"#SBATCH --nodes=3", "#SBATCH --no-kill", "#SBATCH --ntasks-per-node=2"} <= set(lines)
    assert asked(SPEC).nodes == 3
    assert "--no-kill" not in script(spec_of(resources={"nodes": 2}), PLAIN)
    trial = trial_spec(SPEC, None)
    assert (trial.resources.nodes, trial.resources.spares) == (3, 0), "the doctor looks at all of them"


def test_ranks_are_started_on_the_chosen_nodes() -> None:
    words = sized(launch(SPEC, CASES["elastic"][1]), SPEC, ["n1", "n3"])
    assert words[:5] == ["srun", "--nodes=2", "--ntasks=4", "--nodelist=n1,n3", "--overlap"]
    for name, option in (("mpirun-mpich", ["-hosts", "n1,n3"]), ("mpirun-openmpi", ["--host", "n1:2,n3:2"])):
        words = sized(launch(SPEC, CASES[name][1]), SPEC, ["n1", "n3"])
        assert words[1:3] == option
        assert words[words.index("-n") + 1] == "4"


@pytest.mark.parametrize(
    ("lost", "out", "names", "words"),
    [
        ([], [], ("n1", "n2"), "all 2 nodes, 1 node in reserve"),
        (["n2"], [], ("n1", "n3"), "all 2 nodes: n2 is lost, 0 nodes in reserve"),
        ([], ["n1.cluster"], ("n2", "n3"), "all 2 nodes: n1 is excluded, 0 nodes in reserve"),
    ],
)
def test_the_nodes_of_an_attempt(lost: list[str], out: list[str], names: tuple[str, ...], words: str) -> None:
    nodes = ReservedNodes(SPEC, FakeJob(*lost), lambda: out)  # type: ignore[arg-type]
    chosen = nodes.choose(Lines(), never)
    assert chosen is not None
    assert (chosen.names, chosen.summary, chosen.world_size) == (names, words, 4)


def test_too_few_healthy_nodes() -> None:
    nodes = ReservedNodes(SPEC, FakeJob("n2"), lambda: ["n3"])  # type: ignore[arg-type]
    assert mentions(nodes.lack(["n3"]) or "", "1 node would be left … needs 2")
    assert nodes.lack([]) is None
    with pytest.raises(OrtflowError, match="Slurm has given too few nodes"):
        nodes.choose(Lines(), never)


def test_slurm_keeps_the_nodes_out_that_the_user_excludes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    asked_for: list[list[str]] = []

    def run(command: Sequence[str], settings: Settings, seconds: float) -> Answer:
        asked_for.append(list(command))
        return Answer(0, "JobId=7 ReqNodeList=(null) ExcNodeList=n9 NodeList=n[1-3]", "")

    from ortflow.launchers.slurm.commands import Slurm

    SlurmJob("7", 0, "n1", Slurm(run)).exclude(["n2"])
    assert asked_for[-1] == ["scontrol", "update", "JobId=7", "ExcNodeList=n9,n2"]


def test_names_of_nodes_with_and_without_a_domain() -> None:
    assert is_among("n1", ["n1.cluster.example"])
    assert is_among("n1.cluster.example", ["n1"])
    assert not is_among("n1", ["n11"])


def test_an_elastic_run_has_no_spares() -> None:
    resources: dict[str, Any] = {"nodes": 4, "min_nodes": 2, "spares": 1}
    found = [str(problem.path) + problem.what for problem in check(spec_of(resources=resources))]
    assert any("spares" in one and "min_nodes" in one for one in found)
