"""The command line and the start variables of a rank's program."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ortflow.cli.init import run_file_of
from ortflow.cli.program import Typed, is_program, name_of
from ortflow.manifests.slurm.directives import directives, gpus_per_task
from ortflow.manifests.slurm.placement import Placement
from ortflow.workflow.errors import UserError
from ortflow.workflow.program.command import command_of, node_command
from ortflow.workflow.program.deadline import stop_limit
from ortflow.workflow.program.report import fields_of
from ortflow.workflow.program.source import check_source
from ortflow.workflow.program.steps import check_start
from ortflow.workflow.program.variables import World, environment_of, for_launcher, start_variables
from ortflow.workflow.ranks import Place
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.file.paths import resolve_paths
from ortflow.workflow.spec.program import ProgramSection
from ortflow.workflow.spec.run import ProgramRunSpec

WORLD = World(
    ("a", "a", "b", "b"), ("10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2"), (1, 2, 3, 4), 29500, 29501, (4,) * 4
)
PLACE = Place(3, 4, 1, 2, "Slurm", "b")


@pytest.mark.parametrize(
    ("section", "command"),
    [
        ({"script": "/x/train.py", "args": ["--a"]}, ["py", "/x/train.py", "--a"]),
        ({"module": "pkg.mod", "args": ["1"]}, ["py", "-m", "pkg.mod", "1"]),
        ({"command": ["./a.out", "-x"], "args": ["{n}"], "parameters": {"n": 3}}, ["./a.out", "-x", "3"]),
    ],
)
def test_the_command_of_a_process(section: dict[str, object], command: list[str]) -> None:
    assert command_of(ProgramSection.model_validate(section), "py") == command


def test_a_function_is_called_with_its_result_as_exit_code(tmp_path: Path) -> None:

    (tmp_path / "mod.py").write_text("import sys\nclass A:\n    @staticmethod\n    def main(): return len(sys.argv)\n")
    command = command_of(ProgramSection(function="mod:A.main", args=["x", "y"]), sys.executable)
    assert subprocess.run(command, cwd=tmp_path).returncode == 3


def test_the_variables_of_a_rank() -> None:
    found = start_variables(PLACE, WORLD, 2, 3, "run")
    assert {name: found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")} == {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1",
    }  # fmt: skip
    assert (found["GROUP_RANK"], found["MASTER_ADDR"], found["MASTER_PORT"]) == ("1", "10.0.0.1", "29500")
    assert (found["TORCHELASTIC_RUN_ID"], found["TORCHELASTIC_RESTART_COUNT"]) == ("run", "2")
    assert (found["HOROVOD_CROSS_RANK"], found["HOROVOD_CROSS_SIZE"], found["HOROVOD_HOSTNAME"]) == ("1", "2", "b")
    assert (found["JAX_COORDINATOR_ADDRESS"], found["JAX_PROCESS_ID"]) == ("10.0.0.1:29501", "3")
    tf = json.loads(found["TF_CONFIG"])
    assert tf["cluster"]["worker"] == ["10.0.0.1:1", "10.0.0.1:2", "10.0.0.2:3", "10.0.0.2:4"]
    assert tf["task"] == {"type": "worker", "index": 3}


def test_what_is_set_by_whom() -> None:
    outer = {"RANK": "9", "OMP_NUM_THREADS": "7", "ORTFLOW_OWNER": "secret", "PATH": "/bin"}
    found = environment_of(outer, 4, {"RANK": "3"}, {"ORTFLOW_ATTEMPT": "0"}, {"RANK": "5", "A": ""})
    assert (found["RANK"], found["OMP_NUM_THREADS"], found["PATH"], found["A"]) == ("5", "7", "/bin", "")
    assert "ORTFLOW_OWNER" not in found
    assert environment_of({}, 4, {}, {}, {})["OMP_NUM_THREADS"] == "4"


def test_the_launchers_of_frameworks() -> None:
    def of(start: str, *, gpus: bool = True, **section: object) -> list[str]:
        program = ProgramSection.model_validate({"script": "/x/t.py", "args": ["-a"], "start": start, **section})
        return node_command(program, "py", PLACE, WORLD, on_gpus=gpus)

    assert of("torchrun") == [
        "py", "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "2",
        "--master-addr", "10.0.0.1", "--master-port", "29500", "--max-restarts", "0", "/x/t.py", "-a",
    ]  # fmt: skip
    assert of("torchrun", script=None, module="m")[-3:] == ["--module", "m", "-a"]
    deepspeed = of("deepspeed")
    info = next(word for word in deepspeed if word.startswith("--world_info="))
    assert json.loads(base64.urlsafe_b64decode(info.partition("=")[2])) == {"a": [0, 1], "b": [0, 1]}
    assert deepspeed[-5:] == ["--node_rank=1", "--master_addr=10.0.0.1", "--master_port=29500", "/x/t.py", "-a"]
    accelerate = of("accelerate")
    assert accelerate[:4] == ["py", "-m", "accelerate.commands.launch", "--multi_gpu"]
    assert accelerate[accelerate.index("--machine_rank") + 1] == "1"
    assert of("horovod")[3:] == ["-np", "2", "--gloo", "py", "/x/t.py", "-a"]


def test_horovodrun_is_not_given_the_place_of_one_process() -> None:
    """It writes its own environment behind the place of each process, so that all would take rank 0."""
    variables = {**start_variables(PLACE, WORLD, 0, 3, "train"), "ORTFLOW_ATTEMPT": "0"}
    given = for_launcher("horovod", variables)
    assert {name for name in variables if name not in given} == {
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE", "HOROVOD_HOSTNAME",
    }  # fmt: skip
    for start in ("direct", "torchrun", "deepspeed", "accelerate"):
        assert for_launcher(start, variables) == variables


def test_a_launcher_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod", None)  # as if it were not installed
    check_start(ProgramSection(script="t.py"))
    with pytest.raises(UserError, match=r"program.start: is horovod, and .* lacks horovod; .*pip install horovod"):
        check_start(ProgramSection(script="t.py", start="horovod"))


def test_a_script_is_compiled_and_not_run(tmp_path: Path) -> None:

    path = tmp_path / "t.py"
    path.write_text("raise SystemExit(1)\n")
    check_source(ProgramSection(script=str(path)))
    path.write_bytes(b"x = 1\n\nif x\n")
    for python in (sys.executable, f"{Path(sys.executable).parent}/./{Path(sys.executable).name}"):
        with pytest.raises(UserError, match=r"t\.py:3: syntax error"):
            check_source(ProgramSection(script=str(path)), python)
    path.write_bytes(b"x = '\xff'\n")
    with pytest.raises(UserError, match=r"t\.py:1: syntax error: .*encoding"):
        check_source(ProgramSection(script=str(path)))


def test_what_is_a_program(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("name: a")
    (tmp_path / "run.yaml").chmod(0o755)
    (tmp_path / "a.out").write_text("#!/bin/sh\n")
    assert is_program(tmp_path / "missing.py")
    assert not is_program(tmp_path / "run.yaml")
    assert not is_program(tmp_path / "a.out")
    (tmp_path / "a.out").chmod(0o755)
    assert is_program(tmp_path / "a.out")
    assert not is_program(tmp_path)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("train.py", "train"),
        ("Train GPT_2.py", "train-gpt-2"),
        ("__.py", "program"),
        (f"{'a' * 60}.py", "a" * 52),
        (f"{'a' * 51}_bc.py", "a" * 51),
    ],
)
def test_the_name_of_a_run(file: str, name: str) -> None:
    assert name_of(Path(file)) == name


def test_ranks_divide_among_nodes(tmp_path: Path) -> None:
    (tmp_path / "t.py").touch()
    values = Typed(ranks=8, nodes=2, gpus=1, arguments=("-a",)).values(tmp_path / "t.py")
    assert values["resources"] == {"nodes": 2, "ranks_per_node": 4, "gpus_per_rank": 1}
    assert values["program"]["args"] == ["-a"]
    with pytest.raises(UserError, match="3 ranks do not divide among 2 nodes"):
        Typed(ranks=3, nodes=2).values(tmp_path / "t.py")


def test_options_of_programs_are_refused_for_a_run_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("name: a\nprogram: t.py\n")
    with pytest.raises(UserError, match=r"--ranks is for a program.*resources.ranks_per_node=2"):
        Typed(ranks=2).reading(tmp_path / "run.yaml", ())


def test_logged_values_keep_the_meaning_of_the_fields_of_a_step() -> None:
    logged = {"loss": 1, "lr": float("nan"), "epoch": 0.5, "tokens": 7, "acc": 0.9, "bad": float("inf"), "note": "x"}
    assert fields_of(logged) == {
        "loss": 1.0, "lr": None, "tokens": 7, "values": {"epoch": 0.5, "acc": 0.9, "bad": None, "note": "x"},
    }  # fmt: skip


@pytest.mark.parametrize("arguments", [(), ("--lr", "1e-3", "a, b: [c]", "", "yes", "{{x}}")])
def test_the_run_file_of_init_is_the_run_of_the_program(arguments: tuple[str, ...], tmp_path: Path) -> None:
    program = tmp_path / "sub dir" / "train.py"
    program.parent.mkdir()
    program.touch()
    typed = Typed(ranks=4, nodes=2, gpus=1, name="me", arguments=arguments)
    (tmp_path / "run.yaml").write_text(run_file_of(program, tmp_path / "run.yaml", typed))
    spec = resolve_paths(load_run_file(tmp_path / "run.yaml", files=True), tmp_path / "run.yaml")
    assert spec.program is not None
    assert (spec.name, spec.program.script, tuple(spec.program.args)) == ("me", str(program), arguments)
    assert (spec.resources.nodes, spec.resources.ranks_per_node, spec.resources.gpus_per_rank) == (2, 2, 1)


def test_under_slurm_each_rank_of_a_program_sees_all_gpus_of_its_node() -> None:
    values = {"name": "a", "resources": {"ranks_per_node": 4, "gpus_per_rank": 1}}
    program = ProgramRunSpec.model_validate({**values, "program": {"script": "t.py"}})
    assert not gpus_per_task(program, "pmi2")
    placement = Placement(Path("/r"), "/p", "/p", "pmi2", "id")
    assert [line for line in directives(program, placement) if "gpus" in line] == ["#SBATCH --gpus-per-node=4"]


def test_in_pods_a_program_stops_within_their_grace() -> None:
    values = {"name": "a", "program": {"script": "t.py"}, "backends": {"kubernetes": {"grace_seconds": 60}}}
    spec = ProgramRunSpec.model_validate(values)
    assert (stop_limit(spec, "local"), stop_limit(spec, "kubernetes")) == (120.0, 45.0)
