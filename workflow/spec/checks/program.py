"""Whether the section `program` is complete, and what has no effect beside it. Pure; called by `check`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.problem import Problem, listed
from ortflow.workflow.spec.program import KINDS
from ortflow.workflow.spec.run import OF_TRAINERS, ProgramRunSpec, RunSpec

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_VARIABLE = re.compile(r"[^=]+")
_NO_EFFECT: tuple[tuple[str, str], ...] = (
    ("export", "tolerance"),
    ("export", "optimize"),
    ("export", "quantize"),
    ("export", "quantize_tolerance"),
    ("export", "metric_tolerance"),
    ("checkpoint", "asynchronous"),
    ("checkpoint", "exact"),
    ("checkpoint", "best"),
    ("monitor", "runtime_log"),
    ("resources", "kernels"),
    ("resources", "cuda_graph"),
)
"""Keys that only a trainer of ortflow acts on."""
WHY = "is for models that ortflow trains itself, and this run is of a program"


def refused_section(key: str) -> Problem:
    """The problem of a section of trainers beside `program`."""
    return Problem((key,), WHY, "remove it, or remove program")


def check_program(spec: RunSpec) -> Iterator[Problem]:
    """Report every contradiction about the section `program`."""
    if not isinstance(spec, ProgramRunSpec):
        return
    program, path = spec.program, ("program",)
    kinds = [key for key in KINDS if getattr(program, key)]
    if not kinds:
        yield Problem(path, "names no program", f"give one of {listed(KINDS)}")
    for key in kinds[1:]:
        yield Problem((*path, key), f"cannot be combined with program.{kinds[0]}", "use one of them")
    if program.module is not None and not _MODULE.fullmatch(program.module):
        yield Problem((*path, "module"), f"is {program.module!r}, not the name of a module", "write pkg.mod")
    if program.function is not None and not _FUNCTION.fullmatch(program.function):
        message = f"is {program.function!r}, not a function of a module"
        yield Problem((*path, "function"), message, "write pkg.mod:main")
    for words in ("command", "args"):
        for place, word in enumerate(getattr(program, words)):
            try:
                program.filled(word)
            except UserError as error:
                yield Problem((*path, words, place), error.what, error.fix, others=((*path, "parameters"),))
    for name in program.unused:
        message, fix = "is named by no argument", f"write {{{name}}} in program.args, or remove it"
        yield Problem((*path, "parameters", name), message, fix, others=((*path, "args"), (*path, "command")))
    for name in program.env:
        if not _VARIABLE.fullmatch(name):
            yield Problem((*path, "env", name), "is not the name of an environment variable", "correct it")
    if program.start != "direct" and program.kind == "command":
        message = f"is {program.start}, which starts Python programs"
        yield Problem((*path, "start"), message, "use script, module or function", others=((*path, "command"),))
    if program.start != "direct" and program.kind == "function":
        message = f"is {program.start}, which starts scripts and modules"
        yield Problem((*path, "start"), message, "use script or module", others=((*path, "function"),))
    if program.start == "accelerate" and spec.world_size > 1 and not spec.on_gpus:
        message = "is accelerate, whose launcher starts several processes on GPUs only"
        yield Problem((*path, "start"), message, "use direct or torchrun", others=(("resources", "gpus_per_rank"),))
    if program.start == "horovod" and spec.resources.nodes > 1:
        message = "is horovod, whose launcher reaches other nodes by ssh"
        yield Problem(
            (*path, "start"), message, "use direct, with ranks started by MPI", others=(("resources", "nodes"),)
        )
    plain = ProgramRunSpec.model_construct(name=spec.name, program=program)
    for section in OF_TRAINERS:
        if getattr(spec, section) not in (None, getattr(plain, section)):
            yield refused_section(section)
    for section, inner in _NO_EFFECT:
        if getattr(getattr(spec, section), inner) != getattr(getattr(plain, section), inner):
            yield Problem((section, inner), WHY, "remove it")
