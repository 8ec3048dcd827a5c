"""Slurm's commands: every failure and every timeout is one sentence, in time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from fake_slurm import Fake

from ortflow.launchers.slurm.commands import NoAnswer, Refused, Slurm
from ortflow.launchers.slurm.runner import Answer, Settings, outside_of_jobs, run_here
from ortflow.workflow.errors import EXIT_FAILURE, EXIT_USER, UserError


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder at the front of PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def write(folder: Path, name: str, text: str) -> None:
    script = folder / name
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o755)


def test_no_slurm_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"not installed here.*squeue") as raised:
        Slurm().mine()
    assert raised.value.exit_code == EXIT_USER


def test_commands_without_a_cluster(path: Path) -> None:
    write(path, "squeue", "echo 'squeue: fatal: Could not establish a configuration source' >&2; exit 1")
    with pytest.raises(UserError, match=r"find no cluster here: Could not establish.*SLURM_CONF"):
        Slurm().mine()


@pytest.mark.parametrize(
    "words",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "slurm_load_jobs error: Socket timed out on send/recv operation",
        "slurm_load_jobs error: Unexpected message received",
        "slurm_load_jobs error: Zero Bytes were transmitted or received",
        "slurm_load_jobs error: Slurm backup controller in standby mode",
    ],
)
def test_a_controller_that_is_away(path: Path, words: str) -> None:
    write(path, "squeue", f"echo '{words}' >&2; exit 1")
    with pytest.raises(NoAnswer, match=r"^the Slurm controller does not answer ") as raised:
        Slurm().mine()
    assert raised.value.exit_code == EXIT_FAILURE
    assert words in str(raised.value)


@pytest.mark.parametrize(
    "output",
    [
        "echo 'Job is pending execution for job 7' >&2",
        "echo '7_3: Job is pending execution'; echo 'ERROR: ld.so: object x.so cannot be preloaded' >&2",
    ],
)
def test_a_job_that_is_already_requeued_is_not_an_error(path: Path, output: str) -> None:
    write(path, "scontrol", f"{output}; exit 1")
    Slurm().requeue("7_3")


def test_a_job_that_may_not_be_queued_again(path: Path) -> None:
    write(path, "scontrol", "echo 'scontrol: error: Requested operation is presently disabled' >&2; exit 1")
    with pytest.raises(Refused) as raised:
        Slurm().requeue("7")
    assert raised.value.message == "Requested operation is presently disabled"


def test_a_command_that_hangs_is_given_up(path: Path) -> None:
    write(path, "squeue", "exec sleep 300")
    begun = time.monotonic()
    with pytest.raises(NoAnswer, match="squeue had no answer within"):
        Slurm().mine(0.3)
    assert time.monotonic() - begun < 100


def test_a_plugin_that_does_not_load(path: Path) -> None:
    write(path, "srun", "echo \"srun: error: Invalid MPI type 'pmix', --mpi=list for acceptable types\" >&2; exit 1")
    assert not Slurm().starts_with("pmix")
    write(path, "srun", "echo 'srun: error: Unable to confirm allocation for job 67108862' >&2; exit 1")
    assert Slurm().starts_with("pmix")


def test_a_plugin_has_loaded_where_the_controller_does_not_answer() -> None:
    assert Fake(away="hung").slurm.starts_with("pmi2")


@pytest.mark.parametrize(
    ("expected_text", "job"), [("123", "123"), ("123;cluster", "123"), ("Submitted batch job 77", "77")]
)
def test_the_job_that_sbatch_names(path: Path, expected_text: str, job: str) -> None:
    write(path, "sbatch", f"echo '{expected_text}'")
    assert Slurm().submit("/job.sh", {}) == job


def test_what_sbatch_refuses_is_on_one_line_without_its_name(path: Path) -> None:
    write(path, "sbatch", "printf 'sbatch: error: one\\nsbatch: error: two\\n' >&2; exit 255")
    with pytest.raises(Refused) as raised:
        Slurm().submit("/job.sh", {})
    assert raised.value.message == "one; two"


def test_an_answer_that_names_no_job_is_none(path: Path) -> None:
    write(path, "sbatch", "echo welcome")
    with pytest.raises(NoAnswer, match="without a job id"):
        Slurm().submit("/job.sh", {})


def test_cancelling_a_job_that_is_gone_is_not_an_error(path: Path) -> None:
    write(path, "scancel", "echo 'scancel: error: Kill job error on job id 1: Invalid job id specified' >&2; exit 1")
    Slurm().cancel("1")
    write(path, "scancel", "echo 'scancel: error: Kill job error on job id 1: Access/permission denied' >&2; exit 1")
    with pytest.raises(Exception, match="Access/permission denied"):
        Slurm().cancel("1")


@pytest.mark.parametrize(
    ("expected_text", "version"), [("slurm-wlm 22.05.8", (22, 5)), ("slurm 25.11.0-0rc1", (25, 11)), ("?", (0, 0))]
)
def test_versions(path: Path, expected_text: str, version: tuple[int, int]) -> None:
    write(path, "sbatch", f"echo '{expected_text}'")
    assert Slurm().version() == version


def test_a_site_without_accounting(path: Path) -> None:
    write(path, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    write(path, "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert not Slurm().accounts()
    assert Slurm().job("1") is None
    assert Slurm().accounted(["1", "2"]) == {}


def test_the_job_around_this_shell_is_left_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_TIME_FORMAT", "SQUEUE_FORMAT", "SQUEUE_STATES", "PMI_RANK", "SBATCH_ACCOUNT"):
        monkeypatch.setenv(name, "outer")
    monkeypatch.setenv("SLURM_CONF", "/there")
    write(path, "squeue", "env >&2; exit 1")
    with pytest.raises(Exception, match="SLURM_CONF=/there") as raised:
        Slurm().mine()
    reported = str(raised.value)
    assert "LC_ALL=C" in reported
    assert "SLURM_TIME_FORMAT=%s" in reported
    assert "SBATCH_ACCOUNT=outer" in reported, "a default of the site or the user stays"
    for name in ("SLURM_JOB_ID", "SQUEUE_FORMAT", "SQUEUE_STATES", "PMI_RANK"):
        assert name not in reported


def test_a_setting_of_none_takes_a_variable_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "outer")
    write(path, "probe", 'echo "$SBATCH_PARTITION$MORE"')
    assert run_here(["probe"], {"MORE": "x"}, 5.0).out == "outerx\n"
    assert run_here(["probe"], {"MORE": "x", "SBATCH_PARTITION": None}, 5.0).out == "x\n"


def test_a_way_to_another_machine_can_be_put_before(path: Path) -> None:
    write(path, "far", 'shift; exec "$@"')
    write(path, "sbatch", "echo slurm 23.02.1")
    asked: list[Sequence[str]] = []

    def over_there(command: Sequence[str], settings: Settings, seconds: float) -> Answer:
        asked.append(command)
        return run_here(["far", "login", *command], settings, seconds)

    assert Slurm(over_there).version() == (23, 2)
    assert asked == [("sbatch", "--version")]


def test_output_that_is_not_utf8(path: Path) -> None:
    write(path, "sbatch", "printf 'sbatch: error: caf\\351\\n' >&2; exit 1")
    with pytest.raises(Refused, match="caf"):
        Slurm().submit("/job.sh", {})


def test_outside_of_jobs_keeps_the_rest() -> None:
    assert outside_of_jobs({"HOME": "/h", "SLURM_NTASKS": "3", "SLURM_CONF": "/c"}) == {
        "HOME": "/h",
        "SLURM_CONF": "/c",
    }


def test_a_site_without_sacct_keeps_no_accounts() -> None:
    def runner(command: Sequence[str], settings: Settings, seconds: float) -> Answer:
        if command[0] == "sacct":
            raise FileNotFoundError(command[0])
        return Answer(1, "", "slurm_load_jobs error: Invalid job id specified")

    slurm = Slurm(runner)
    assert not slurm.accounts()
    assert slurm.accounted(["7"]) == {}
    assert slurm.job("7") is None
