"""--host on the command line: the same command runs on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from ortflow.cli import host
from ortflow.cli.app import command_line
from ortflow.launchers.remote.memory import Used, recall, remember

REACHABLE = ("submit", "render", "status", "list", "logs", "cancel", "resume", "doctor")


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command that would run on the host."""
    reported: list[list[str]] = []

    def carry_out(ctx: typer.Context, *where: Any) -> int:
        reported.append([*map(str, where), *host.retyped(ctx, "inputs/x/run.yaml", ["model.path=there"])])
        return 3

    monkeypatch.setattr(host, "carry_out", carry_out)
    for name in ("HOST", "HOST_DIR", "HOST_PYTHON", "RUNS"):
        monkeypatch.delenv(f"ORTFLOW_{name}", raising=False)
    return reported


@pytest.mark.parametrize(
    ("line", "there"),
    [
        ("submit --host u@l run.yaml a.b=c", "u@l None None submit --backend=slurm inputs/x/run.yaml a.b=c"),
        ("submit run.yaml --host l -b local --fresh --after a --after b,c --retry 5",
         "l None None submit --backend=local --fresh --after=a --after=b,c --retry=5.0 inputs/x/run.yaml"),
        ("render --host l --host-dir d --host-python p run.yaml", "l d p render --backend=slurm inputs/x/run.yaml"),
        ("status --host l --json", "l None None status --json"),
        ("status --host l -- -odd", "l None None status -- -odd"),
        ("list --host l --runs-dir elsewhere", "l None None list --runs-dir=elsewhere"),
        ("logs --host l -f --rank 2 name", "l None None logs --follow --rank=2 -- name"),
        ("cancel --host l --now name", "l None None cancel --now -- name"),
        ("resume --host l name -d", "l None None resume --detach -- name"),
        ("resume --host l name train.steps=9", "l None None resume -- name train.steps=9"),
    ],
)  # fmt: skip
def test_typed_again(typed: list[list[str]], line: str, there: str) -> None:
    result = CliRunner().invoke(command_line(), line.split(), env={"ORTFLOW_RUNS": "of/this/side"})
    assert result.exit_code == 3, result.output
    words = there.split()
    assert typed == [[*words, "model.path=there"] if words[3] in ("submit", "render") else words]


def test_the_doctor_s_run_file(typed: list[list[str]], tmp_path: Path) -> None:
    assert CliRunner().invoke(command_line(), ["doctor", "--host", "l", "run.yaml", "a=b"]).exit_code == 3
    assert typed[0][3:] == ["doctor", "--backend=slurm", "--", "inputs/x/run.yaml", "a=b", "model.path=there"]


def test_without_a_host_the_verb_is_as_it_was(typed: list[list[str]], tmp_path: Path) -> None:
    result = CliRunner().invoke(command_line(), ["list", "--runs-dir", str(tmp_path)], env={"ORTFLOW_HOST": ""})
    assert result.output == f"no runs in {tmp_path}\n"
    assert typed == []


def test_every_verb_about_runs_is_reachable(typed: list[list[str]]) -> None:
    for verb in REACHABLE:
        assert "--host-python" in CliRunner().invoke(command_line(), [verb, "--help"]).output
    assert "--host" not in CliRunner().invoke(command_line(), ["run", "--help"]).output


def test_flags_with_two_names(typed: list[list[str]]) -> None:
    def verb(on: Annotated[bool, typer.Option("--on/--off")] = True, level: int = 1) -> None:
        """A verb."""

    small = typer.Typer()
    small.command("verb")(host.reachable(verb))
    assert CliRunner().invoke(small, ["--host", "l", "--off"]).exit_code == 3
    assert typed[0][3:] == ["verb", "--off"]


def test_what_was_last_used_on_a_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert recall("l") == Used()
    remember("l", Used("py", "~/x"))
    remember("m", Used(None, "/scratch"))
    assert (recall("l"), recall("m"), recall("n")) == (Used("py", "~/x"), Used(None, "/scratch"), Used())
    (tmp_path / "ortflow/hosts.json").write_text('{"l": [1], "m": {"python": 3}')
    assert recall("l") == Used()


@pytest.mark.parametrize(
    ("python", "folder", "chosen"),
    [
        (None, None, Used("before", "~/before")),
        ("now", None, Used("now", "~/before")),
        (None, "work/runs/", Used("before", "~/work/runs")),
        (None, "/scratch/me/", Used("before", "/scratch/me")),
        (None, "~/x", Used("before", "~/x")),
    ],
)
def test_options_win_over_what_was_last_used(python: str | None, folder: str | None, chosen: Used) -> None:
    assert host.choose(Used("before", "~/before"), python, folder) == chosen
