"""The batch scripts, before sbatch itself."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from run_files import spec_of
from slurm_scripts import CASES, PLAIN
from testbed import Testbed

from ortflow.manifests.slurm import script

SITES_OWN = r"#SBATCH --(constraint|reservation|licenses|gres=tmpdisk|nodelist|exclude|requeue=expedite)"
"""Names that this site does not have, and what its Slurm is too old for."""


@pytest.mark.parametrize("name", [*CASES])
def test_sbatch_takes_it(cluster: Testbed, tmp_path: Path, name: str) -> None:
    lines = [line for line in script(*CASES[name]).splitlines() if not re.match(SITES_OWN, line)]
    file = tmp_path / "job.sh"
    file.write_text("\n".join(lines) + "\n")
    done = cluster.ask("sbatch", "--test-only", str(file))
    assert done.returncode == 0, done.stderr
    assert "to start at" in done.stderr


@pytest.mark.parametrize(
    "text", ["a b", "it's", '"q" \\ x', "#SBATCH --hold", "$(id) `id` ${HOME}", "x --uid=1", "é; |&"]
)
def test_every_value_arrives_unchanged(cluster: Testbed, tmp_path: Path, text: str) -> None:
    """The unit tests parse directives as sbatch 22.05 does; this is sbatch itself."""
    spec = spec_of(backends={"slurm": {"job_name": text, "directives": ["--hold", "--partition=main"]}})
    placement = replace(PLAIN, start="none", submission=text, run_dir=Path("/x 100%") / text.replace("\\", ""))
    file = tmp_path / "job.sh"
    file.write_text(script(spec, placement))
    job = cluster.sbatch(str(file))
    try:
        name, comment = cluster.reported("squeue", "--noheader", "--format=%j\n%k", f"--jobs={job}").split("\n")
        assert (name, comment) == (text, f"ortflow {text}")
        shown = cluster.reported("scontrol", "show", "job", job)
        assert f"StdOut={placement.run_dir}/logs/slurm-{job}.log".replace("%", "%%") in shown
        assert "UserId=root(0)" in shown
    finally:
        cluster.reported("scancel", job)
