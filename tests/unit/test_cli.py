"""The command line: start-up, exit codes, how runs are named, and messages of the plain install."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from messages import mentions
from terminal import Terminal

from ortflow.cli.app import GROUPS, VERBS, main
from ortflow.cli.extras import needs_extra
from ortflow.cli.runs import complete_run, find_run, reference
from ortflow.cli.status import cut, fitted, table
from ortflow.workflow.errors import UserError

HEAVY = ("onnx", "onnxruntime", "numpy", "pyarrow", "rich", "psutil", "yaml", "mpi4py", "torch")
RUN_FILE = """
name: gpt
model: {path: m.onnx, loss: mse}
data: {train: d.arrow, micro_batch: 1}
train: {steps: 1, optimizer: {name: sgd, lr: 0.1}}
"""


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


Call = Callable[..., Done]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Call `ortflow ARGUMENTS` in a folder, in this process."""

    def ortflow(*arguments: str, folder: Path, **environment: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["ortflow", *arguments])
        monkeypatch.chdir(folder)
        monkeypatch.delenv("ORTFLOW_RUNS", raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as end:
            main()
        return Done(int(end.value.code or 0), *capfd.readouterr())

    return ortflow


def process(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The same in a separate process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ORTFLOW_")}
    return subprocess.run(
        [sys.executable, "-m", "ortflow", *arguments],
        cwd=folder, env={**kept, **environment}, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    for name in ("m.onnx", "d.arrow"):
        (tmp_path / name).touch()
    for name in ("gpt", "gpt-large"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.yaml").write_text(f"name: {name}\n")
    (tmp_path / "runs" / "notes").mkdir()
    return tmp_path


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["data", "--help"], ["checkpoint", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    # Typer reads the parameters of a single command with pydantic where that is installed.
    heavy = {*HEAVY} if len(arguments) > 1 else {*HEAVY, "pydantic"}
    program = (
        "import sys; sys.argv = ['ortflow', *sys.argv[1:]]\n"
        "from ortflow.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        f"found = {heavy!r} & set(sys.modules); assert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage: ortflow" in done.stdout


def test_help_lists_the_verbs(folder: Path, call: Call) -> None:
    reported = call("--help", folder=folder).stdout
    verbs = "run validate inspect submit render status list logs cancel resume export schema data checkpoint"
    assert [verb for verb in verbs.split() if f"\n  {verb} " not in reported] == []
    assert "\n  rank " not in reported, "what ranks run is hidden"


def test_version(folder: Path, call: Call) -> None:
    assert call("--version", folder=folder).stdout.startswith("ortflow 0.")


def test_render_prints_the_command_and_nothing_else(folder: Path, call: Call) -> None:
    done = call("render", "--backend", "local", "run.yaml", "name=other", folder=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    assert done.stdout.endswith(f"-m ortflow.workflow.rank {folder}/runs/other)\n")
    assert not (folder / "runs" / "other").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "none.yaml"], "none.yaml"),
        (["run", "run.yaml", "train.stepz=1"], "train.stepz"),
        (["run", "run.yaml", "model.path=gone.onnx"], "there is no file"),
        (["run", "run.yaml", "run_dir=/proc/1/x"], "run_dir: /proc/1/x cannot be written"),
        (["run", "run.yaml", "resources.nodes=2"], "resources.nodes: … 2 … local … one machine"),
        (["run", "run.yaml", "resources.python=/nowhere/python"], "resources.python: … interpreter"),
        (["submit", "run.yaml", "--backend", "slurmm"], "unknown launcher 'slurmm'"),
        (["status", "gtp"], "no run gtp … gpt?"),
        (["logs", "gpt"], "no log of rank 0 … attempt 0 … no rank"),
        (["cancel", "elsewhere/gpt"], "there is no run elsewhere/gpt"),
        (["resume", "gpt"], "run.yaml"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_2(folder: Path, call: Call, arguments: list[str], words: str) -> None:
    before = sorted(folder.rglob("*"))
    done = call(*arguments, folder=folder)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert all(line.startswith("error: ") for line in done.stderr.splitlines())
    assert mentions(done.stderr, words)
    assert sorted(folder.rglob("*")) == before, "nothing is left behind"


def test_usage_errors_exit_2(folder: Path, call: Call) -> None:
    assert call("run", folder=folder).returncode == 2
    assert call("frobnicate", folder=folder).returncode == 2


def test_list_and_status_as_json(folder: Path, call: Call) -> None:
    listed = json.loads(call("list", "--json", folder=folder).stdout)
    assert [one["name"] for one in listed] == ["gpt", "gpt-large"]
    elsewhere = call("list", "--json", folder=folder.parent, ORTFLOW_RUNS=str(folder / "runs"))
    assert json.loads(elsewhere.stdout) == listed
    assert json.loads(call("status", "runs/gpt", "--json", folder=folder).stdout) == listed[0]
    assert call("list", "--json", "--runs-dir", "nowhere", folder=folder).stdout.strip() == "[]"


def test_a_run_is_named_by_name_or_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("ORTFLOW_RUNS", raising=False)
    runs = Path("runs")
    for text in ("gpt", "runs/gpt", str(folder / "runs" / "gpt")):
        assert find_run(text, runs).root == folder / "runs" / "gpt"
    assert reference(find_run("gpt", runs), runs) == "gpt"
    monkeypatch.chdir(folder / "runs")
    assert find_run("gpt", runs).root == folder / "runs" / "gpt"
    assert reference(find_run("./gpt", runs), runs) == "gpt"
    with pytest.raises(UserError):
        find_run("notes", runs)


def test_a_run_without_its_run_file_is_named(tmp_path: Path) -> None:
    lost = tmp_path / "runs" / "lost"
    lost.mkdir(parents=True)
    (lost / "attempts.jsonl").touch()
    with pytest.raises(UserError, match="has no run"):
        find_run("lost", tmp_path / "runs")


def test_names_complete(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTFLOW_RUNS", str(folder / "runs"))
    assert complete_run("gpt-") == ["gpt-large"]
    done = process(
        folder=folder, _ORTFLOW_COMPLETE="complete_bash", COMP_WORDS="ortflow status gpt-", COMP_CWORD="2",
        ORTFLOW_RUNS=str(folder / "runs"),
    )  # fmt: skip
    assert done.stdout.strip() == "gpt-large", done.stderr


def test_tables_are_aligned() -> None:
    assert table([("NAME", "STATE"), ("a", "finished"), ("longer", "")]) == [
        "NAME    STATE",
        "a       finished",
        "longer",
    ]


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("numpy", "numpy … not installed … `pip install"),
        ("onnx.helper", "'ortflow[train]'"),
        ("onnxruntime.capi", "onnxruntime … not installed"),
    ],
)
def test_what_the_plain_install_lacks(module: str, words: str) -> None:
    assert mentions(str(needs_extra(module)), words)


def test_other_missing_modules_are_bugs() -> None:
    assert needs_extra("ortflow.nonsense") is None


def test_a_missing_package_is_one_sentence(folder: Path) -> None:
    blocker = folder / "block" / "sitecustomize.py"
    blocker.parent.mkdir()
    blocker.write_text(
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'onnx': raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
    )
    done = process("inspect", "m.onnx", folder=folder, PYTHONPATH=str(blocker.parent))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert mentions(line, "error: ", "onnx", "`pip install 'ortflow[train]'`")


def test_a_row_is_cut_only_where_a_terminal_is_too_narrow() -> None:
    row = f"{'n' * 52}  pending  0  -  waits for {'node1,' * 40}"
    assert cut(row, None) == cut(row, 400) == row
    assert cut(row, 90) == row[:89] + "…"


def test_a_table_fits_the_terminal_and_keeps_what_matters() -> None:
    rows = [
        ("NAME", "STATE", "STEP", "WAITS"),
        (
            "a-run-with-a-name-of-more-than-forty-letters",
            "running",
            "12/100",
            "out of disk on /data/runs, 3.4 MB needed",
        ),
        ("short", "finished", "100/100", ""),
    ]
    whole = fitted(rows, None, ("WAITS", "NAME"))
    assert whole == rows
    for width in (60, 80, 100, 120):
        lines = table(fitted(rows, width, ("WAITS", "NAME")))
        assert all(len(line) <= width for line in lines)
        assert len(lines[1]) >= min(width, len(table(rows)[1])) - 2, "the available width is used"
        assert "running" in lines[1]
        assert "12/100" in lines[1]
    assert table(fitted(rows, 200, ("WAITS", "NAME"))) == table(rows)


@pytest.mark.parametrize("width", [60, 90, 200])
def test_list_is_as_wide_as_its_terminal(folder: Path, width: int) -> None:
    name = "x" * 50
    (folder / "runs" / name).mkdir()
    (folder / "runs" / name / "run.yaml").write_text(f"name: {name}\n")
    command = ["env", "COLUMNS=60", sys.executable, "-m", "ortflow", "list"]
    terminal = Terminal(command, folder, {**os.environ, "PYTHONWARNINGS": "default"}, width=width)
    terminal.wait()
    lines = [line for line in str(terminal.screen).splitlines() if line.startswith("xxx")]
    assert len(lines) == 1
    assert "lost" in lines[0]
    assert (name in lines[0]) == (width > 60)


def test_commands_are_grouped_in_help(folder: Path, call: Call) -> None:
    reported = call("--help", folder=folder).stdout
    titles = [line.rstrip(":") for line in reported.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles[-len(GROUPS) :] == [*GROUPS]
    listed = [line.split()[0] for line in reported.split("Check a run:")[1].splitlines() if line.startswith("  ")]
    assert listed == [name for name, verb in VERBS.items() if not verb.hidden]
    assert max(map(len, reported.splitlines())) <= 80


def test_options_of_a_login_node_are_apart(folder: Path, call: Call) -> None:
    own, there = call("status", "--help", folder=folder).stdout.split("On a login node, by ssh:")
    assert "--json" in own
    assert "--host" not in own
    assert all(option in there for option in ("--host ", "--host-dir", "--host-python"))
    assert "On a login node" not in call("validate", "--help", folder=folder).stdout
