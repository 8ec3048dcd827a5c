"""`backends.slurm`: what is refused before sbatch sees it, and with which message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from messages import alike, says
from run_files import SMALL, reported, spec_of

from ortflow.workflow.spec.checks.check import check
from ortflow.workflow.spec.checks.slurm_flags import OWN_DIRECTIVES, owner
from ortflow.workflow.spec.checks.slurm_syntax import gpus_in
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.file.paths import resolve_paths
from ortflow.workflow.spec.file.schema import run_file_schema
from ortflow.workflow.spec.problem import dotted
from ortflow.workflow.spec.slurm import DirectiveName

NAME = ". _ - + @ / : = ,"
NODES = "node[1-4,7],big3"
FLAG = "--flag or --flag=value"
DEPENDENCY = "after, afterany, afterok, afternotok, aftercorr … singleton"
LOGS = "remove it … logs"
HERE = "backends.slurm."
TWO_RANKS = {"ranks_per_node": 2, "gpus_per_rank": 2}


def found(slurm: dict[str, Any], **sections: Any) -> list[str]:
    problems = check(spec_of(backends={"slurm": slurm}, **sections))
    sentences = [f"{dotted(problem.path)}: {problem.what}; {problem.fix}" for problem in problems]
    return [line.removeprefix(HERE) for line in sentences if line.startswith(HERE)]


GOOD: dict[str, list[str]] = {
    "partition": ["gpu", "gpu,big", "8xA100", "lab/gpu"],
    "account": ["lab-1", "a@b"],
    "reservation": ["maint_1"],
    "job_name": ["my.job-1"],
    "constraint": ["a100&ib", "(a|b)&c", "[rack1*2&rack2*2]", "a|b"],
    "nodelist": ["node1", "node[1-4,7],big3", "r[1-2]n[01-16]"],
    "exclude": ["node[1-4]"],
    "dependency": [
        "afterok:1", "afterok:1:2,afterany:3", "after:12+30", "singleton", "aftercorr:12_3", "afterok:1?afterok:2",
    ],
    "begin": [
        "now+1hour", "now+60", "22:00", "16:00:30", "4:00 PM", "noon", "tomorrow", "2030-01-31T08:00", "1231",
        "12/31/30-8:00", "Noon", "Now+1Hour", "0:30 AM", "23:59", "12.31.30", "1231-noon", "2030-01-31T8:00",
    ],
    "gres": ["nvme:1", "lustre:1,nvme:big:2", "gres/nvme:1"],
}  # fmt: skip


@pytest.mark.parametrize(("key", "text"), [(key, text) for key, texts in GOOD.items() for text in texts])
def test_what_slurm_accepts(key: str, text: str) -> None:
    assert found({key: text}) == []


@pytest.mark.parametrize(
    ("slurm", "sentence"),
    [
        ({"partition": "a b"}, f"partition: … partition … 'a b' … {NAME}"),
        (
            {"partition": "a\n#SBATCH --uid=0"},
            f"partition: … partition … 'a\\n#SBATCH --uid=0' … {NAME}",
        ),
        ({"account": "lab'"}, f'account: … account … "lab\'" … {NAME}'),
        ({"qos": '"high"'}, f"qos: … quality of service … '\"high\"' … {NAME}"),
        ({"reservation": "-x"}, f"reservation: … reservation … '-x' … {NAME}"),
        ({"job_name": "a`b`"}, f"job_name: … job … 'a`b`' … {NAME}"),
        (
            {"constraint": "a100 & ib"},
            "constraint: … & (all), | (one of)",
        ),
        ({"nodelist": "node[1-4"}, f"nodelist: … nodes … 'node[1-4' … {NODES}"),
        ({"nodelist": "./nodes.txt"}, f"nodelist: … nodes … './nodes.txt' … {NODES}"),
        ({"exclude": "node1 node2"}, f"exclude: … nodes … 'node1 node2' … {NODES}"),
        ({"dependency": "afterok:abc"}, f"dependency: … dependency … 'afterok:abc' … {DEPENDENCY}"),
        ({"dependency": "123"}, f"dependency: … dependency … '123' … {DEPENDENCY}"),
        *(
            ({"begin": text}, f"begin: … {text!r} … now+1hour, 22:00, tomorrow or 2030-01-31T08:00")
            for text in (
                "soon",
                "elevenses",
                "22:60",
                "24:00",
                "99:99",
                "16:00:60",
                "13:00 PM",
                "1332",
                "0132",
                "1301",
                "13/31",
                "31/12",
                "31.12.30",
                "0/1/30",
                "12/0/30",
                "2030-13-31",
                "2030-01-32",
                "2030-00-01",
                "2030-01-31T24:00",
                "2030-01-31T08:00:61",
                "1231-25:00",
            )
        ),
        (
            {"gres": "gpu:"},
            "gres: … NAME[:TYPE][:COUNT]",
        ),
        (
            {"python": "/opt/py\nthon"},
            "python: … give its path, without line breaks",
        ),
        (
            {"mail": {"user": "a b", "types": ["END"]}},
            "mail.user: … user … address",
        ),
        (
            {"mail": {"user": "me"}},
            "mail.user: … backends.slurm.mail.types … [END, FAIL]",
        ),
        ({"directives": ["-p gpu"]}, f"directives[0]: … directive … '-p gpu' … {FLAG}"),
        ({"directives": ["--a=1", "--b\n--c"]}, f"directives[1]: … directive … '--b\\n--c' … {FLAG}"),
        (
            {"directives": ['--licenses="a"']},
            "directives[0]: … remove it … quotes",
        ),
        (
            {"additional_parameters": {"output": "x"}},
            f"additional_parameters.output: … {LOGS}",
        ),
        (
            {"additional_parameters": {"cpus_per_task": 2}},
            "additional_parameters.cpus_per_task: … use resources.cpus_per_rank",
        ),
        (
            {"additional_parameters": {"licenses": 'a"'}},
            "additional_parameters.licenses: … remove it … quotes",
        ),
        (
            {"additional_parameters": {"licenses=a\n#SBATCH --x": "b"}},
            "additional_parameters.licenses=a\\n#SBATCH --x: … name of a directive … licenses",
        ),
        (
            {"additional_parameters": {"core_spec": 1, "core-spec": 2}},
            "additional_parameters.core-spec: … twice … remove one",
        ),
        (
            {"additional_parameters": {"hint": "x"}, "directives": ["--hint=y"]},
            "additional_parameters.hint: … remove one",
        ),
        ({"directives": ["--nodes=2"]}, "directives[0]: … --nodes … use resources.nodes"),
        ({"directives": ["--node=2"]}, "directives[0]: … --node … use resources.nodes"),
        ({"directives": ["--exclusive"]}, "directives[0]: … --exclusive … use backends.slurm.exclusive"),
        ({"directives": ["--output=x"]}, f"directives[0]: … --output … {LOGS}"),
        (
            {"directives": ["--comment=x"]},
            "directives[0]: … remove it … sets it",
        ),
        ({"directives": ["--wrap=x"]}, "directives[0]: … remove it … script"),
        (
            {"directives": ["--array=0-3"]},
            "directives[0]: … remove it … `ortflow submit --set KEY=V1,V2`",
        ),
        (
            {"directives": ["--wait"]},
            "directives[0]: … remove it … follow",
        ),
        (
            {"srun_arguments": ["--cpu-bind", "cores"]},
            f"srun_arguments[1]: … srun … 'cores' … {FLAG}",
        ),
        ({"srun_arguments": ["--mpi=pmix"]}, "srun_arguments[0]: … --mpi … use backends.slurm.mpi"),
        (
            {"srun_arguments": ["--x"], "mpi": "mpirun"},
            "srun_arguments: … remove … backends.slurm.mpi to pmi2 or pmix",
        ),
        (
            {"prologue": ["a\nb"]},
            "prologue[0]: … separate item",
        ),
        (
            {"epilogue": ["fine", "#SBATCH --nodes=9"]},
            "epilogue[1]: … backends.slurm.directives … --flag=value",
        ),
        (
            {"container": {"kind": "pyxis", "image": "i"}, "mpi": "mpirun"},
            "container.kind: … backends.slurm.mpi to pmix or pmi2",
        ),
        ({"container": {"image": "-i"}}, "container.image: … file … name"),
        (
            {"container": {"image": "i", "mounts": ["/a", "data"]}},
            "container.mounts[1]: … /path, /path:/inside or /path:/inside:ro",
        ),
        (
            {"container": {"image": "i", "arguments": ["-B", "/x"]}},
            f"container.arguments[0]: … apptainer … '-B' … {FLAG}",
        ),
    ],
)
def test_what_is_refused(slurm: dict[str, Any], sentence: str) -> None:
    assert alike(found(slurm)[:1], [sentence])


def test_gpus_are_requested_once() -> None:
    asked = {"gres": "gpu:a100:4"}
    assert found({**asked, "gpus_as": "gres"}, resources=TWO_RANKS) == []
    assert alike(found(asked, resources=TWO_RANKS), ["gres: … backends.slurm.gpus_as to gres"])
    assert alike(found({**asked, "gpus_as": "gres"}, resources={"gpus_per_rank": 1}), ["gres: … change one"])
    assert alike(found(asked), ["gres: … change one"])
    assert [gpus_in(text) for text in (None, "nvme:3", "gpu", "gpu:a100", "gres/gpu:2,gpu:x:1")] == [
        None,
        None,
        1,
        1,
        3,
    ]


def test_one_rank_needs_no_mpi() -> None:
    assert found({"mpi": "none"}) == []
    assert alike(
        found({"mpi": "none"}, resources={"nodes": 2}),
        ["mpi: … auto, pmi2 (MPICH), pmix (Open MPI) or mpirun"],
    )


def test_what_has_no_key_of_its_own_may_be_a_directive() -> None:
    assert found({"directives": ["--licenses=a:1", "--hold", "--time-min=10", "--mem-per-gpu=4G"]}) == []
    assert found({"directives": ["--exclusive=user", "--mem=0"], "srun_arguments": ["--container=/x"]}) == []
    assert alike(
        found({"directives": ["--mem=0"]}, resources={"memory": "1G"}),
        ["directives[0]: … resources.memory and backends.slurm.memory_per"],
    )


def test_a_container_of_kind_none_is_not_checked() -> None:
    assert found({"container": {"kind": "none", "image": "-", "mounts": ["x"]}, "mpi": "mpirun"}) == []


def test_every_directive_that_may_be_omitted_is_one_of_ours() -> None:
    assert {*get_args(DirectiveName)} <= OWN_DIRECTIVES.keys()
    assert not {"nodes", "ntasks-per-node", "comment", "output"} & {*get_args(DirectiveName)}


SLURM = f"{SMALL}backends:\n  slurm:\n"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("partitoin: gpu", "run.yaml:15 backends.slurm.partitoin: … partition?"),
        (
            "time_limit: 9",
            "run.yaml:15 backends.slurm.time_limit: … resources.time_limit?",
        ),
        ("array: 0-3", "run.yaml:15 backends.slurm.array: … partition, account,"),
        ("mpi: pmi3", "run.yaml:15 backends.slurm.mpi: … auto, pmi2, pmix, none or mpirun … 'pmi3'"),
        ("omit: [times]", "run.yaml:15 backends.slurm.omit[0]: … account, begin, constraint,"),
        ("omit: [output]", "run.yaml:15 backends.slurm.omit[0]: … account, begin, constraint,"),
        ("mail: {types: [end]}", "run.yaml:15 backends.slurm.mail.types[0]: … NONE, BEGIN, END, FAIL,"),
        ("nice: low", "run.yaml:15 backends.slurm.nice: … whole number … 'low'"),
        ("signal_seconds: 0", "run.yaml:15 backends.slurm.signal_seconds: … at least 1 … 0"),
        ("container: {kind: docker, image: x}", "run.yaml:15 backends.slurm.container.kind: … none, apptainer,"),
        ("container: {kind: pyxis}", "run.yaml:15 backends.slurm.container.image: … add … image file"),
        (
            "partition: a b",
            "run.yaml:15 backends.slurm.partition: … letters",
        ),
        ("exclude: [node1]", "run.yaml:15 backends.slurm.exclude: … text … list"),
    ],
)
def test_a_fault_has_its_line(tmp_path: Path, line: str, sentence: str) -> None:
    (fault,) = reported(tmp_path, f"{SLURM}    {line}\n")
    assert says(fault, sentence)


def test_short_forms(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        SLURM
        + "    container: a.sif\n    prologue: |\n      module load gcc\n\n      if x; then\n        y\n      fi\n"
        "    epilogue: date\n    directives: --licenses=a --hold\n    srun_arguments: '--cpu-bind=cores'\n"
    )
    slurm = load_run_file(file).backends.slurm
    assert slurm.container is not None
    assert (slurm.container.kind, slurm.container.image) == ("apptainer", "a.sif")
    assert slurm.prologue == ["module load gcc", "if x; then", "  y", "fi"]
    assert slurm.epilogue == ["date"]
    assert slurm.directives == ["--licenses=a", "--hold"]
    assert slurm.srun_arguments == ["--cpu-bind=cores"]
    other = load_run_file(file, ["backends.slurm.container.kind=singularity", "backends.slurm.prologue=echo hi"])
    assert other.backends.slurm.container is not None
    assert (other.backends.slurm.container.kind, other.backends.slurm.prologue) == ("singularity", ["echo hi"])


def test_the_schema_has_the_short_forms() -> None:
    schema = run_file_schema()
    keys = json.loads(json.dumps(schema))["$defs"]["SlurmBackend"]["properties"]
    for key in ("container", "prologue", "epilogue", "directives", "srun_arguments"):
        assert keys[key]["anyOf"][0]["type"] == "string", key


@pytest.mark.parametrize(
    ("image", "resolved"),
    [
        ("a.sif", "/home/me/a.sif"),
        ("./images/a", "/home/me/images/a"),
        ("/images/a.sqsh", "/images/a.sqsh"),
        ("docker://x/y.sif", "docker://x/y.sif"),
        ("nvcr.io#nvidia/pytorch:24.01-py3", "nvcr.io#nvidia/pytorch:24.01-py3"),
        ("pytorch", "pytorch"),
    ],
)
def test_an_image_file_lies_beside_the_run_file(image: str, resolved: str) -> None:
    spec = spec_of(backends={"slurm": {"container": {"image": image}}})
    once = resolve_paths(spec, Path("/home/me/run.yaml"), Path("/"))
    assert once.backends.slurm.container is not None
    assert once.backends.slurm.container.image == resolved
    assert resolve_paths(once, Path("/other/run.yaml"), Path("/")) == once


@pytest.mark.parametrize(
    ("text", "reserved"),
    [("--partition=a", True), ("--pa=a", True), ("--p=a", False), ("--licenses=a", False), ("--exclusive=user", False)],
)
def test_slurm_completes_the_names_of_directives(text: str, reserved: bool) -> None:
    """`--pa` is --partition for sbatch; one letter is ambiguous, and sbatch itself refuses it."""
    assert (owner(text, OWN_DIRECTIVES) is not None) == reserved
