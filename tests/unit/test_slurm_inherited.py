"""Variables of an allocation around sbatch: what a script removes of them, as bash runs it."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from run_files import spec_of
from slurm_scripts import PLAIN
from waits import PATIENCE

from ortflow.manifests.slurm import script
from ortflow.manifests.slurm.inherited import OPTIONS, variable

NOT_OPTIONS = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_NTASKS": "4",
}
OF_A_STEP = {"SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_CPU_BIND_TYPE": "mask_cpu:", "SLURM_MEM_BIND": "local"}


def seen(tmp_path: Path, given: dict[str, str], slurm: dict[str, object], **sections: object) -> dict[str, str]:
    """The variables of Slurm that reach the supervisor process of a script."""
    run_supervisor = tmp_path / "run_supervisor"
    run_supervisor.write_text("#!/bin/sh\nenv\n")
    run_supervisor.chmod(0o755)
    text = script(
        spec_of(backends={"slurm": slurm}, **sections), replace(PLAIN, run_supervisor_python=str(run_supervisor))
    )
    (tmp_path / "job.sh").write_text(text)
    done = subprocess.run(
        ["bash", "job.sh"], cwd=tmp_path, env={"PATH": "/usr/bin:/bin", **given}, capture_output=True, text=True,
        check=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.stderr == ""
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if line.startswith("SLURM_"))


def test_the_requests_of_another_job_are_removed(tmp_path: Path) -> None:
    given = {variable(option): "1" for option in OPTIONS} | OF_A_STEP | NOT_OPTIONS
    resources = {"memory": "1Gi", "nodes": 2, "ranks_per_node": 2, "cpus_per_rank": 1}
    own = {"SLURM_MEM_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK"}
    assert seen(tmp_path, given, {}, resources=resources).keys() == own | NOT_OPTIONS.keys()
    assert variable("mem-per-cpu") in seen(tmp_path, given, {"memory_per": "cpu"}, resources=resources)
    # In either form of a user's own directives.
    assert "SLURM_HINT" in seen(tmp_path, given, {"directives": ["--hint=nomultithread"]})
    assert "SLURM_THREADS_PER_CORE" in seen(tmp_path, given, {"additional_parameters": {"threads_per_core": 1}})


def test_what_the_prologue_sets_stays(tmp_path: Path) -> None:
    assert seen(tmp_path, OF_A_STEP, {"prologue": ["export SLURM_CPU_BIND=none"]}) == {"SLURM_CPU_BIND": "none"}


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
@pytest.mark.parametrize("epilogue", [[], ["echo over"]])
def test_either_warning_reaches_the_supervisor_process(
    tmp_path: Path, number: signal.Signals, epilogue: list[str]
) -> None:
    """`--signal=B:USR1@…` in place of our USR2, from before the supervisor process starts."""
    run_supervisor = tmp_path / "run_supervisor"
    run_supervisor.write_text(
        f"#!{sys.executable}\nimport signal, time\nprint('here', flush=True)\ntime.sleep(0.5)\n"
        # Blocked meanwhile: an earlier signal may come only now, on a busy machine.
        "both = (signal.SIGUSR1, signal.SIGUSR2)\nsignal.pthread_sigmask(signal.SIG_BLOCK, both)\n"
        "for one in both: signal.signal(one, lambda *_: exit(5))\n"
        "print('listens', flush=True)\nsignal.pthread_sigmask(signal.SIG_UNBLOCK, both)\ntime.sleep(300)\n"
    )
    run_supervisor.chmod(0o755)
    slurm = {"prologue": ["echo begins; sleep 0.3"], "epilogue": epilogue}
    placement = replace(PLAIN, run_supervisor_python=str(run_supervisor))
    (tmp_path / "job.sh").write_text(script(spec_of(backends={"slurm": slurm}), placement))
    with subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        for word in ("begins", "here", "listens"):
            assert shell.stdout.readline() == f"{word}\n"
            shell.send_signal(number)
        assert shell.stdout.read() == ("over\n" if epilogue else "")
        assert shell.wait(PATIENCE) == 5
