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
    program, here = spec.program, ("program",)
    named = [key for key in KINDS if getattr(program, key)]
    if not named:
        yield Problem(here, "names no program", f"give one of {listed(KINDS)}")
    for key in named[1:]:
        yield Problem((*here, key), f"cannot be combined with program.{named[0]}", "use one of them")
    if program.module is not None and not _MODULE.fullmatch(program.module):
        yield Problem((*here, "module"), f"is {program.module!r}, not the name of a module", "write pkg.mod")
    if program.function is not None and not _FUNCTION.fullmatch(program.function):
        what = f"is {program.function!r}, not a function of a module"
        yield Problem((*here, "function"), what, "write pkg.mod:main")
    for words in ("command", "args"):
        for place, word in enumerate(getattr(program, words)):
            try:
                program.filled(word)
            except UserError as error:
                yield Problem((*here, words, place), error.what, error.fix, others=((*here, "parameters"),))
    for name in program.unused:
        what, fix = "is named by no argument", f"write {{{name}}} in program.args, or remove it"
        yield Problem((*here, "parameters", name), what, fix, others=((*here, "args"), (*here, "command")))
    for name in program.env:
        if not _VARIABLE.fullmatch(name):
            yield Problem((*here, "env", name), "is not the name of an environment variable", "correct it")
    if program.start != "direct" and program.kind == "command":
        what = f"is {program.start}, which starts Python programs"
        yield Problem((*here, "start"), what, "use script, module or function", others=((*here, "command"),))
    if program.start != "direct" and program.kind == "function":
        what = f"is {program.start}, which starts scripts and modules"
        yield Problem((*here, "start"), what, "use script or module", others=((*here, "function"),))
    if program.start == "accelerate" and spec.world_size > 1 and not spec.on_gpus:
        what = "is accelerate, whose launcher starts several processes on GPUs only"
        yield Problem((*here, "start"), what, "use direct or torchrun", others=(("resources", "gpus_per_rank"),))
    if program.start == "horovod" and spec.resources.nodes > 1:
        what = "is horovod, whose launcher reaches other nodes by ssh"
        yield Problem((*here, "start"), what, "use direct, with ranks started by MPI", others=(("resources", "nodes"),))
    plain = ProgramRunSpec.model_construct(name=spec.name, program=program)
    for section in OF_TRAINERS:
        if getattr(spec, section) not in (None, getattr(plain, section)):
            yield refused_section(section)
    for section, inner in _NO_EFFECT:
        if getattr(getattr(spec, section), inner) != getattr(getattr(plain, section), inner):
            yield Problem((section, inner), WHY, "remove it")
