"""The batch script: byte for byte, as sbatch reads it, and as bash runs it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from messages import says
from run_files import spec_of
from slurm_scripts import CASES, FOUR, GOLDEN, PLAIN
from waits import PATIENCE

from ortflow.manifests.slurm import Placement, launch, script
from ortflow.manifests.slurm import settings as variables
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.checks.slurm import check_slurm
from ortflow.workflow.spec.checks.slurm_flags import OWN_DIRECTIVES
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.spec.slurm import DirectiveName

cases = pytest.mark.parametrize("name", [*CASES])


def slurm_spec(slurm: dict[str, Any] | None = None, **sections: Any) -> TrainerRunSpec:
    return spec_of(backends={"slurm": slurm or {}}, **sections)


def words(line: str) -> list[str]:
    """The words of a directive, split as sbatch does it (`_get_argument` in src/sbatch/opt.c)."""
    found: list[str] = []
    word, quote, escaped, begun = "", "", False, False
    for letter in line.removeprefix("#SBATCH"):
        if escaped:
            word, escaped = word + letter, False
        elif letter == "\\":
            escaped = begun = True
        elif quote:
            word, quote = (word, "") if letter == quote else (word + letter, quote)
        elif letter in "\"'":
            quote, begun = letter, True
        elif letter == "#":
            break
        elif letter in " \t\r\v\f":
            found, word, begun = ([*found, word], "", False) if begun else (found, word, begun)
        else:
            word, begun = word + letter, True
    assert not quote, line
    return [*found, word] if begun else found


def read(text: str) -> list[tuple[str, str | None]]:
    """Every directive of a script as (name, value), as sbatch reads it: up to the first command."""
    found: list[tuple[str, str | None]] = []
    for line in text.split("\n"):
        if line.strip() and not line.lstrip().startswith("#"):
            break
        if line.startswith("#SBATCH"):
            for word in words(line):
                name, equals, value = word.removeprefix("--").partition("=")
                found.append((name, value if equals else None))
    return found


def value(text: str, name: str) -> str | None:
    return dict(read(text)).get(name, "absent")


def test_the_reader_reads_as_sbatch_does() -> None:
    """Measured with sbatch 22.05."""
    assert words('#SBATCH --job-name="a\\"b\'c\\\\d#e"') == ["--job-name=a\"b'c\\d#e"]
    assert words("#SBATCH --signal=USR2@90 --hold # comment") == ["--signal=USR2@90", "--hold"]
    assert words("#SBATCH --job-name=a b") == ["--job-name=a", "b"]
    assert words('#SBATCH "--comment=q r"') == ["--comment=q r"]


@cases
def test_golden(name: str) -> None:
    renew = "if the change is meant: python tests/support/slurm_scripts.py"
    assert script(*CASES[name]) == (GOLDEN / f"{name}.sh").read_text(), renew


def test_every_golden_file_has_its_case() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == CASES.keys()


@cases
def test_the_run_files_of_the_golden_scripts_are_right(name: str) -> None:
    assert [*check_slurm(CASES[name][0])] == []


@cases
def test_bash_can_read_it(name: str) -> None:
    done = subprocess.run(["bash", "-n", GOLDEN / f"{name}.sh"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_always_there() -> None:
    found = dict(read(script(slurm_spec(), PLAIN)))
    assert found == {
        "job-name": "small",
        "comment": "ortflow 6f1d0c52",
        "nodes": "1",
        "ntasks-per-node": "1",
        "kill-on-invalid-dep": "yes",
        "requeue": None,
        "signal": "B:USR2@90",
        "open-mode": "append",
        "output": "/scratch/runs/gpt/logs/slurm-%j.log",
    }


@pytest.mark.parametrize("name", get_args(DirectiveName))
def test_what_is_omitted_is_not_there(name: str) -> None:
    spec, placement = CASES["everything"]
    before = {*read(script(spec, placement)), *read(script(*CASES["gpus-per-task"])), ("mem", "2G")}
    assert name in dict(before) or name == "kill-on-invalid-dep"
    values = spec.model_dump()
    values["backends"]["slurm"]["omit"] = [name]
    after = dict(read(script(TrainerRunSpec.model_validate(values), placement)))
    assert name not in after
    assert {"nodes", "comment", "output", "licenses"} <= after.keys()
    values["backends"]["slurm"]["requeue"] = False
    assert ("no-requeue" in dict(read(script(TrainerRunSpec.model_validate(values), placement)))) == (name != "requeue")


def test_every_directive_of_ours_is_refused_as_a_raw_one() -> None:
    for spec, placement in CASES.values():
        own = TrainerRunSpec.model_validate({**spec.model_dump(), "backends": {"slurm": {}}})
        for text in (script(spec, placement), script(own, placement)):
            raw = {line.partition("=")[0].removeprefix("--") for line in spec.backends.slurm.directives}
            assert {name for name, _ in read(text)} - raw <= OWN_DIRECTIVES.keys()


@pytest.mark.parametrize(
    ("memory", "per", "cores", "asked"),
    [
        ("2Gi", "node", 4, ("mem", "2G")),
        ("16G", "node", 4, ("mem", "15259M")),
        ("1K", "node", 4, ("mem", "1M")),
        ("2Gi", "cpu", 4, ("mem-per-cpu", "256M")),
        ("1000Mi", "cpu", None, ("mem-per-cpu", "500M")),
        ("1001Mi", "cpu", None, ("mem-per-cpu", "501M")),
    ],
)
def test_memory_is_never_less_than_was_asked_for(memory: str, per: str, cores: int | None, asked: Any) -> None:
    resources = {"ranks_per_node": 2, "cpus_per_rank": cores, "memory": memory}
    assert asked in read(script(slurm_spec({"memory_per": per}, resources=resources), PLAIN))


@pytest.mark.parametrize(
    ("limit", "time", "ahead"),
    [
        ("90", "01:30:00", "B:USR2@90"),
        ("2-03:04:05", "2-03:04:05", "B:USR2@90"),
        ("100:00:00", "4-04:00:00", "B:USR2@90"),
        ("1", "00:01:00", "B:USR2@30"),
        ("0:00:01", "00:00:01", "B:USR2@1"),
    ],
)
def test_time(limit: str, time: str, ahead: str) -> None:
    text = script(slurm_spec(resources={"time_limit": limit}), PLAIN)
    assert (value(text, "time"), value(text, "signal")) == (time, ahead)


@pytest.mark.parametrize(
    ("slurm", "asked"),
    [
        ({}, {"gpus-per-task": "2"}),
        ({"gres": "nvme:1"}, {"gpus-per-task": "2", "gres": "nvme:1"}),
        ({"gpus_as": "gpus-per-node"}, {"gpus-per-node": "4"}),
        ({"gpus_as": "gres"}, {"gres": "gpu:4"}),
        ({"gpus_as": "gres", "gres": "nvme:1"}, {"gres": "gpu:4,nvme:1"}),
        ({"gpus_as": "gres", "gres": "nvme:1,gpu:a100:4"}, {"gres": "nvme:1,gpu:a100:4"}),
    ],
)
def test_gpus(slurm: dict[str, Any], asked: dict[str, str]) -> None:
    spec = slurm_spec(slurm, resources={"ranks_per_node": 2, "gpus_per_rank": 2})
    found = dict(read(script(spec, PLAIN)))
    assert {name: found[name] for name in found if name.startswith("g")} == asked
    assert ("--gpus-per-task=2" in launch(spec, PLAIN)) == ("gpus-per-task" in asked)
    none = slurm_spec({**slurm, "gres": None}, resources={"ranks_per_node": 2})
    assert not any(name.startswith("g") for name, _ in read(script(none, PLAIN)))


@pytest.mark.parametrize(
    ("slurm", "directive"),
    [
        ({}, ("gpus-per-task", "h100:1")),
        ({"gpus_as": "gpus-per-node"}, ("gpus-per-node", "h100:2")),
        ({"gpus_as": "gres"}, ("gres", "gpu:h100:2")),
    ],
)
def test_gpus_of_a_kind_and_their_binding(slurm: dict[str, Any], directive: tuple[str, str]) -> None:
    resources = {"ranks_per_node": 2, "gpus_per_rank": 1, "gpu_type": "h100"}
    spec = slurm_spec({**slurm, "gpu_bind": "closest"}, resources=resources)
    assert directive in read(script(spec, PLAIN))
    words = launch(spec, PLAIN)
    assert "--gpu-bind=closest" in words
    assert ("--gpu-bind=single:1" in launch(slurm_spec(slurm, resources=resources), PLAIN)) == (slurm == {})
    assert ("--gpus-per-task=h100:1" in words) == (slurm == {})


def test_the_daemons_of_mpirun_get_the_gpus_of_their_node() -> None:
    """There is one task per node: with GPUs per task, all ranks of a node would share one GPU."""
    spec = slurm_spec(resources={"ranks_per_node": 2, "gpus_per_rank": 1})
    found = dict(read(script(spec, replace(PLAIN, start="mpirun", mpirun="/usr/bin/mpirun", kind="openmpi"))))
    assert found["gpus-per-node"] == "2"
    assert "gpus-per-task" not in found


def test_a_dependency_of_the_launcher_wins() -> None:
    spec = slurm_spec({"dependency": "afterok:1"})
    assert value(script(spec, PLAIN), "dependency") == "afterok:1"
    assert value(script(spec, replace(PLAIN, dependency="afterany:2")), "dependency") == "afterany:2"


# What no value can do.

anything = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=30) | (
    st.lists(
        st.sampled_from(
            ["\n", "\r", "\t", '"', "'", "\\", "#", "$(id)", "`id`", "${HOME}", " ", "a", "--uid=0", "\n#SBATCH --hold",
             "%j", "%%", ":", ",", ";", "&", "|", "!", "é", "\u2028", "\x85"]
        ),
        min_size=1,
        max_size=6,
    ).map("".join)
)  # fmt: skip
often = settings(max_examples=150, deadline=None, suppress_health_check=[*HealthCheck])
VALUES = (
    "partition",
    "account",
    "qos",
    "reservation",
    "job_name",
    "constraint",
    "nodelist",
    "exclude",
    "begin",
    "gres",
)


@often
@given(data=st.fixed_dictionaries({}, optional=dict.fromkeys(VALUES, anything)), more=anything, folder=anything)
def test_no_value_leaves_its_directive(data: dict[str, str], more: str, folder: str) -> None:
    spec = slurm_spec({**data, "directives": [f"--licenses={more}"], "mail": {"user": more, "types": ["END"]}})
    placement = replace(PLAIN, run_dir=Path(f"/r/{folder}"), submission=more, dependency=more)
    try:
        text = script(spec, placement)
    except UserError:
        reported = [*data.values(), more, folder]
        assert any(re.search("[\x00-\x1f\x7f-\x9f]", part) for part in reported) or "\\" in folder
        return
    expected: list[tuple[str, str | None]] = [
        ("job-name", data.get("job_name", "small")),
        ("comment", f"ortflow {more}"),
    ]
    expected += [(name, data[name]) for name in ("partition", "account", "qos", "reservation") if name in data]
    expected += [("nodes", "1"), ("ntasks-per-node", "1")]
    expected += [(name, data[name]) for name in ("gres", "constraint", "nodelist", "exclude", "begin") if name in data]
    expected += [("dependency", more), ("kill-on-invalid-dep", "yes"), ("requeue", None), ("signal", "B:USR2@90")]
    output = str(placement.run_dir).replace("%", "%%") + "/logs/slurm-%j.log"
    expected += [("open-mode", "append"), ("output", output), ("mail-type", "END"), ("mail-user", more)]
    assert read(text) == [*expected, ("licenses", more)]


@pytest.mark.parametrize("letter", "\"'\\#$`!&|;<>()*? ~%^{}é")
def test_no_letter_leaves_its_directive(letter: str) -> None:
    text = f"a{letter}b"
    assert ("qos", text) in read(script(slurm_spec({"qos": text}), PLAIN))


DUMP = '#!/bin/sh\nfor word; do printf \'%s\\0\' "$word"; done > "$DUMP_TO"\necho "$$"\nexit "${CODE:-0}"\n'


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A supervisor process that records its arguments."""
    path = tmp_path_factory.mktemp("run_supervisor") / "the supervisor process"
    path.write_text(DUMP)
    path.chmod(0o755)
    return path


def ran(text: str, dump: Path, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run a script as Slurm would; its output, and the supervisor process's arguments."""
    to = dump.parent / "words"
    to.unlink(missing_ok=True)
    file = dump.parent / "job.sh"
    file.write_bytes(text.encode())
    outer = {"PATH": os.environ["PATH"], "DUMP_TO": str(to), **environment}
    done = subprocess.run(["bash", file], capture_output=True, text=True, env=outer, cwd=dump.parent, timeout=PATIENCE)
    return done, to.read_bytes().decode().split("\0")[:-1] if to.exists() else []


@settings(max_examples=40, deadline=None, suppress_health_check=[*HealthCheck])
@given(folder=anything, python=anything, argument=anything, image=anything, start=st.sampled_from(["pmi2", "mpirun"]))
@example(folder="a", python="\x1a", argument="b\x1a", image="\x1ac", start="pmi2")
def test_no_value_leaves_its_word(dump: Path, folder: str, python: str, argument: str, image: str, start: Any) -> None:
    container = {"image": image, "arguments": [argument]}
    spec = slurm_spec(
        {"srun_arguments": [argument], "container": container, "epilogue": ["echo end"]}, resources={"python": python}
    )
    placement = replace(
        PLAIN, run_supervisor_python=str(dump), run_dir=Path(f"/r/{folder}"), start=start, mpirun=python
    )
    try:
        text = script(spec, placement)
    except UserError:
        return
    done, found = ran(text, dump)
    assert (done.returncode, done.stderr, done.stdout.splitlines()[1:]) == (0, "", ["end"])
    run = str(placement.run_dir)
    assert found == ["-m", "ortflow.launchers.slurm.run_supervisor", run, "--", *launch(spec, placement)]
    assert found[-4:] == [python, "-m", "ortflow.workflow.rank", run]


@pytest.mark.parametrize(
    ("slurm", "placement", "sentence"),
    [
        (
            {},
            replace(PLAIN, run_dir=Path("/a\nb")),
            "run_dir: /a\\nb/logs … line break … another run_dir",
        ),
        (
            {},
            replace(PLAIN, run_dir=Path("/a\\b")),
            "run_dir: /a\\b/logs … backslash … another run_dir",
        ),
        (
            {"qos": "a\n#SBATCH --hold"},
            PLAIN,
            "--qos … line break … a\\n#SBATCH --hold … remove it",
        ),
        (
            {"prologue": ["a\nb"]},
            PLAIN,
            "… prologue or epilogue … line break … a\\nb … remove it",
        ),
        (
            {"prologue": ["#SBATCH --hold"]},
            PLAIN,
            "#SBATCH --hold … directive … backends.slurm.directives",
        ),
        (
            {"container": {"image": "i"}},
            replace(PLAIN, run_dir=Path("/a:b")),
            "backends.slurm.container: /a:b … colon … rename",
        ),
        (
            {"container": {"kind": "pyxis", "image": "i"}},
            replace(PLAIN, start="mpirun", mpirun="/mpirun"),
            "backends.slurm.container.kind: … pyxis … mpirun … backends.slurm.mpi … pmix (Open MPI) or pmi2 (MPICH)",
        ),
    ],
)
def test_what_no_script_can_hold(slurm: dict[str, Any], placement: Placement, sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        script(slurm_spec(slurm), placement)
    assert says(str(raised.value), sentence)


def test_a_world_needs_what_joins_it() -> None:
    two = slurm_spec(resources={"nodes": 2})
    with pytest.raises(ValueError, match="2 ranks need an MPI"):
        launch(two, replace(PLAIN, start="none"))
    with pytest.raises(ValueError, match="its path and its kind"):
        launch(two, replace(PLAIN, start="mpirun"))


# As bash runs it.


def test_without_an_epilogue_the_run_supervisor_takes_the_place_of_the_shell(dump: Path) -> None:
    text = script(slurm_spec({"prologue": ["echo before $$"]}), replace(PLAIN, run_supervisor_python=str(dump)))
    done, _ = ran(text, dump, CODE="75")
    before, pid = done.stdout.splitlines()
    assert (done.returncode, before) == (75, f"before {pid}")


def test_prologue_and_epilogue_frame_the_run_supervisor(dump: Path) -> None:
    lines = {"prologue": ["if true; then", "\tA='x  y'", "fi"], "epilogue": ['echo "$A $ortflow_code"', "false"]}
    done, found = ran(script(slurm_spec(lines), replace(PLAIN, run_supervisor_python=str(dump))), dump, CODE="7")
    assert (done.returncode, done.stderr, done.stdout.splitlines()[1:]) == (7, "", ["x  y 7"])
    assert found


def test_the_epilogue_outlives_slurms_signal(tmp_path: Path) -> None:
    run_supervisor = tmp_path / "run_supervisor"
    run_supervisor.write_text(f"#!/bin/sh\npwd\nread go < '{tmp_path}/fifo'\nexit 3\n")
    run_supervisor.chmod(0o755)
    os.mkfifo(tmp_path / "fifo")
    text = script(slurm_spec({"epilogue": ["pwd"]}), replace(PLAIN, run_supervisor_python=str(run_supervisor)))
    (tmp_path / "job.sh").write_text(text)
    with subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == "/\n", "python -m imports from the current folder"
        shell.send_signal(signal.SIGTERM)
        (tmp_path / "fifo").write_text("go\n")
        assert shell.stdout.read() == f"{tmp_path}\n", "the epilogue's folder is the user's"
        assert shell.wait(PATIENCE) == 3


@pytest.mark.parametrize("epilogue", [[], ["echo over"]])
def test_slurms_early_signal_kills_no_process_and_reaches_the_run_supervisor(
    tmp_path: Path, epilogue: list[str]
) -> None:
    """If the time limit is shorter than the lead, it comes before the supervisor process handles signals."""
    run_supervisor = tmp_path / "run_supervisor"
    run_supervisor.write_text(
        f"#!{sys.executable}\nimport signal, time\nprint('here', flush=True)\ntime.sleep(1)\n"
        # Blocked meanwhile: an earlier signal may come only now, on a busy machine.
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])\n"
        "signal.signal(signal.SIGUSR2, lambda *_: exit(5))\nprint('listens', flush=True)\n"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])\ntime.sleep(300)\n"
    )
    run_supervisor.chmod(0o755)
    slurm = {"prologue": ["echo begins; sleep 0.5"], "epilogue": epilogue}
    (tmp_path / "job.sh").write_text(
        script(slurm_spec(slurm), replace(PLAIN, run_supervisor_python=str(run_supervisor)))
    )
    with subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        for word in ("begins", "here", "listens"):
            assert shell.stdout.readline() == f"{word}\n"
            shell.send_signal(signal.SIGUSR2)
        assert shell.stdout.read() == ("over\n" if epilogue else "")
        assert shell.wait(PATIENCE) == 5


# How the ranks are started.


def test_srun_repeats_what_a_step_does_not_take_over() -> None:
    spec = slurm_spec({"srun_arguments": ["--cpu-bind=cores"]}, resources={**FOUR, "gpus_per_rank": 1})
    assert launch(spec, PLAIN) == [
        "srun", "--mpi=pmi2", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--cpus-per-task=2",
        "--gpus-per-task=1", "--kill-on-bad-exit=1", "--wait=0", "--unbuffered", "--export=ALL", "--cpu-bind=cores",
        "/home/me/venv/bin/python", "-m", "ortflow.workflow.rank", "/scratch/runs/gpt",
    ]  # fmt: skip


def test_the_variables_of_the_ranks() -> None:
    one, four = slurm_spec(), slurm_spec(resources=FOUR)
    base = {"ORTFLOW_RUN_DIR": "/scratch/runs/gpt", "ORTFLOW_LAUNCHER": "slurm", "PYTHONUNBUFFERED": "1"}
    assert variables(one, replace(PLAIN, start="none", kind="openmpi")) == base
    assert variables(four, PLAIN) == base
    mpirun = replace(PLAIN, start="mpirun", mpirun="/mpirun")
    assert variables(four, mpirun) == {**base, "SLURM_EXPORT_ENV": "ALL"}
    for placement in (replace(PLAIN, start="pmix", kind=None), replace(mpirun, kind="openmpi")):
        found = variables(four, placement)
        assert (found["OMPI_MCA_mpi_yield_when_idle"], found["PRTE_ALLOW_RUN_AS_ROOT_CONFIRM"]) == ("1", "1")
        assert not {"OMPI_MCA_btl_tcp_if_include", "FI_TCP_IFACE", "OMPI_MCA_pml"} & found.keys(), "the network is real"
    pyxis = {"container": {"kind": "pyxis", "image": "i"}}
    assert variables(slurm_spec(pyxis, resources={"gpus_per_rank": 1}), PLAIN)["NVIDIA_VISIBLE_DEVICES"] == "all"


def test_a_container_sees_what_the_run_reads_and_each_folder_once() -> None:
    spec = spec_of(
        model={"path": "/data/gpt/model.onnx", "loss": {"kind": "mse"}, "graphs": {"train": "/graphs/train.onnx"}},
        data={"train": {"path": "/data/gpt/train"}, "eval": {"path": "/refs/eval.arrow"}, "micro_batch": 1},
        backends={"slurm": {"container": {"image": "i.sif", "mounts": ["/refs", "/cache:/c:ro", "/x:ro"]}}},
    )
    found = [word.removeprefix("--bind=") for word in launch(spec, PLAIN) if word.startswith("--bind=")]
    assert found == [
        "/scratch/runs/gpt:/scratch/runs/gpt", "/data/gpt:/data/gpt", "/graphs:/graphs",
        "/refs:/refs", "/cache:/c:ro", "/x:/x:ro",
    ]  # fmt: skip
    assert launch(spec, PLAIN)[-5:] == ["i.sif", "python", "-m", "ortflow.workflow.rank", "/scratch/runs/gpt"]
    pattern = spec_of(
        data={"train": {"path": "/data/tables/20*/part-?.csv"}, "micro_batch": 1},
        backends={"slurm": {"container": {"image": "i.sif"}}},
    )
    assert "--bind=/data/tables:/data/tables" in launch(pattern, PLAIN)


def test_a_container_of_kind_none_is_left_out() -> None:
    spec = slurm_spec({"container": {"kind": "none", "image": "i.sif"}})
    assert launch(spec, PLAIN) == launch(slurm_spec(), PLAIN)


def test_enroot_hands_on_the_variables_that_there_are(tmp_path: Path) -> None:
    enroot = tmp_path / "enroot"
    enroot.write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    enroot.chmod(0o755)
    command = launch(slurm_spec({"container": {"kind": "enroot", "image": "i", "arguments": ["--rw"]}}), PLAIN)
    inside = command[command.index("bash") :]
    outer = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ORTFLOW_ATTEMPT": "3 x", "PMI_RANK": "0", "HOME": "/h"}
    done = subprocess.run(inside, capture_output=True, text=True, env=outer, check=True)
    assert sorted(done.stdout.splitlines()[1:3]) == ["--env=ORTFLOW_ATTEMPT", "--env=PMI_RANK"]
    assert done.stdout.splitlines()[3:] == [
        "--mount=/scratch/runs/gpt:/scratch/runs/gpt:none:x-create=auto,rbind", "--rw", "i",
        "python", "-m", "ortflow.workflow.rank", "/scratch/runs/gpt",
    ]  # fmt: skip
