"""Checks of `backends.slurm` before it is sent to sbatch. Pure; called by `check`.

sbatch reports some of these errors late or only when the job starts, and accepts some with another meaning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from ortflow.workflow.spec.checks.gpus import GPUS, RANKS, TYPE, is_slice
from ortflow.workflow.spec.checks.slurm_flags import OWN_DIRECTIVES, OWN_SRUN, flag_name, owner
from ortflow.workflow.spec.checks.slurm_syntax import FLAG, MOUNT, SYNTAX, carries_control, gpus_in, is_directive
from ortflow.workflow.spec.problem import KeyPath, Problem, shown
from ortflow.workflow.spec.run import RunSpec

HERE = ("backends", "slurm")


def check_slurm(spec: RunSpec) -> Iterator[Problem]:
    """Report every error of the section."""
    for find in (_syntax, _mail, _gpus, _gpu_kinds, _mpi, _directives, _parameters, _srun, _lines, _container):
        yield from find(spec)


def _problem(key: str | KeyPath, message: str, fix: str, *related_keys: KeyPath) -> Problem:
    return Problem((*HERE, *((key,) if isinstance(key, str) else key)), message, fix, others=related_keys)


def _syntax(spec: RunSpec) -> Iterator[Problem]:
    for key, (kind, syntax, fix) in SYNTAX.items():
        text = getattr(spec.backends.slurm, key)
        if text is not None and not re.fullmatch(syntax, text):
            yield _problem(key, f"is not a valid {kind}: {_quoted(text)}", fix)
    python = spec.backends.slurm.python
    if python is not None and carries_control(python):
        yield _problem("python", f"is not an interpreter: {_quoted(python)}", "give its path, without line breaks")


def _mail(spec: RunSpec) -> Iterator[Problem]:
    mail, key = spec.backends.slurm.mail, ("mail", "user")
    if mail.user is not None and not re.fullmatch(r"[\w.+@-]+(?:,[\w.+@-]+)*", mail.user):
        yield _problem(
            key, f"is not an address: {_quoted(mail.user)}", "write a user or an address, such as me@example.org"
        )
    elif mail.user is not None and not mail.types:
        fix = "give backends.slurm.mail.types, such as [END, FAIL]"
        yield _problem(key, "gets no mail: no event is selected", fix, (*HERE, "mail", "types"))


def _gpus(spec: RunSpec) -> Iterator[Problem]:
    slurm, resources = spec.backends.slurm, spec.resources
    gres_gpus, rank_gpus = gpus_in(slurm.gres), resources.ranks_per_node * resources.gpus_per_rank
    related_keys = (("resources", "ranks_per_node"), ("resources", "gpus_per_rank"))
    if gres_gpus is None:
        return
    if rank_gpus and slurm.gpus_as != "gres":
        message = f"asks for GPUs ({slurm.gres}), and so does --{slurm.gpus_as}"
        yield _problem("gres", message, "set backends.slurm.gpus_as to gres", (*HERE, "gpus_as"), *related_keys)
    elif gres_gpus != rank_gpus:
        ranks = f"{resources.ranks_per_node} ranks x {resources.gpus_per_rank} = {rank_gpus}"
        yield _problem(
            "gres", f"asks a node for {gres_gpus} GPUs, and resources has {ranks}", "change one of them", *related_keys
        )


def _gpu_kinds(spec: RunSpec) -> Iterator[Problem]:
    slurm, kind = spec.backends.slurm, spec.resources.gpu_type
    ranks = spec.resources.ranks_per_node
    if slurm.gpu_bind is not None and not spec.on_gpus:
        message = "binds GPUs, and resources.gpus_per_rank is 0"
        yield Problem((*HERE, "gpu_bind"), message, "remove it", others=(GPUS,))
    if slurm.gpu_bind is not None and slurm.mpi == "mpirun":
        message = "is srun's, and backends.slurm.mpi is mpirun"
        yield Problem((*HERE, "gpu_bind"), message, "remove one of them", others=((*HERE, "mpi"),))
    if kind is not None and gpus_in(slurm.gres) is not None:
        message = f"is {kind}, and backends.slurm.gres also names the GPUs ({slurm.gres})"
        yield Problem(TYPE, message, "use one of them", others=((*HERE, "gres"),))
    if kind is not None and is_slice(kind) and ranks > 1 and spec.on_gpus and slurm.gpus_as != "gpus-per-task":
        message = (
            f"is {slurm.gpus_as}, which shows all slices ({kind}) to each of {ranks} ranks, and CUDA uses the first"
        )
        yield Problem((*HERE, "gpus_as"), message, "set it to gpus-per-task", others=(TYPE, RANKS))


def _mpi(spec: RunSpec) -> Iterator[Problem]:
    slurm = spec.backends.slurm
    if slurm.mpi == "none" and spec.world_size > 1:
        message = f"is none, which starts {spec.world_size} runs of one rank each"
        related_keys = (("resources", "nodes"), ("resources", "ranks_per_node"))
        yield _problem("mpi", message, "set it to auto, pmi2 (MPICH), pmix (Open MPI) or mpirun", *related_keys)
    if slurm.mpi == "mpirun" and slurm.srun_arguments:
        fix = "remove them, or set backends.slurm.mpi to pmi2 or pmix"
        yield _problem("srun_arguments", "have no effect if mpirun starts the ranks", fix, (*HERE, "mpi"))


def _directives(spec: RunSpec) -> Iterator[Problem]:
    slurm = spec.backends.slurm
    yield from _flags(("directives",), slurm.directives, "directive", _own_directives(spec))
    for place, text in enumerate(slurm.directives):
        # sbatch itself reads quotes and backslashes in #SBATCH lines, and ends at a quote without its partner
        # (src/sbatch/opt.c, _get_argument).
        if set(text) & {"'", '"', "\\"}:
            message = f"contains a quotation mark or a backslash: {text}"
            yield _problem(("directives", place), message, "remove it: ortflow quotes the value")


def _parameters(spec: RunSpec) -> Iterator[Problem]:
    """Check submitit's additional parameters by the same rules, with hyphens and underscores equivalent."""
    parameters = spec.backends.slurm.additional_parameters
    twice = {flag_name(text) for text in spec.backends.slurm.directives}
    for name, value in parameters.items():
        path = ("additional_parameters", name)
        flag = name.replace("_", "-")
        text = f"--{flag}" if value is True else f"--{flag}={value}"
        if not FLAG.fullmatch(f"--{flag}"):
            yield _problem(path, "is not a name of a directive", "write one of sbatch, such as licenses")
        elif carries_control(text) or set(text) & {"'", '"', "\\"}:
            message = "contains a quotation mark, a backslash or a control character"
            yield _problem(path, message, "remove it: ortflow quotes the value")
        elif fix := owner(text, _own_directives(spec)):
            yield _problem(path, "is not allowed here", fix)
        elif flag in twice:
            yield _problem(path, "is given twice", "remove one of them", (*HERE, "directives"))
        twice.add(flag)


def _own_directives(spec: RunSpec) -> dict[str, str]:
    if spec.resources.memory is not None:
        return OWN_DIRECTIVES
    # --mem=0, which requests a whole node's memory, has no key of its own.
    return {name: fix for name, fix in OWN_DIRECTIVES.items() if not name.startswith("mem")}


def _srun(spec: RunSpec) -> Iterator[Problem]:
    yield from _flags(("srun_arguments",), spec.backends.slurm.srun_arguments, "argument for srun", OWN_SRUN)


def _lines(spec: RunSpec) -> Iterator[Problem]:
    slurm = spec.backends.slurm
    for key, lines in (("prologue", slurm.prologue), ("epilogue", slurm.epilogue)):
        for place, line in enumerate(lines):
            if carries_control(line.replace("\t", " ")):
                message = "contains a line break or another control character"
                yield _problem((key, place), message, "make each line a separate item")
            elif is_directive(line):
                yield _problem((key, place), "is a directive", "set it in backends.slurm.directives, as --flag=value")


def _container(spec: RunSpec) -> Iterator[Problem]:
    container, mpi = spec.backends.slurm.container, spec.backends.slurm.mpi
    if container is None or container.kind == "none":
        return
    if container.kind == "pyxis" and mpi == "mpirun":
        message = "is pyxis, which srun starts, and backends.slurm.mpi is mpirun"
        yield _problem(("container", "kind"), message, "set backends.slurm.mpi to pmix or pmi2", (*HERE, "mpi"))
    if container.image.startswith("-") or carries_control(container.image):
        yield _problem(("container", "image"), f"is not an image: {_quoted(container.image)}", "give a file or a name")
    for place, mount in enumerate(container.mounts):
        if not MOUNT.fullmatch(mount) or carries_control(mount):
            message = f"is not a folder to mount: {_quoted(mount)}"
            fix = "write /path, /path:/inside or /path:/inside:ro, without blanks and commas"
            yield _problem(("container", "mounts", place), message, fix)
    yield from _flags(("container", "arguments"), container.arguments, f"argument for {container.kind}", {})


def _flags(key: KeyPath, texts: Sequence[str], kind: str, reserved: Mapping[str, str]) -> Iterator[Problem]:
    """Report texts that are not flags (a bare word would be taken for the program or image), or reserved flags."""
    for place, text in enumerate(texts):
        if not FLAG.fullmatch(text) or carries_control(text):
            fix = "write --flag or --flag=value, in its long form"
            yield _problem((*key, place), f"is not a valid {kind}: {_quoted(text)}", fix)
        elif fix_own := owner(text, reserved):
            yield _problem((*key, place), f"must not contain --{flag_name(text)}", fix_own)


def _quoted(text: str) -> str:
    return shown(text).removeprefix("the text ")
