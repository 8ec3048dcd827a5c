"""The command line of a program. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ortflow.workflow.spec.program import ProgramSection

_CALL = (
    "import sys; from importlib import import_module; from operator import attrgetter; "
    "sys.path.insert(0, '') if '' not in sys.path else None; "
    "sys.exit(attrgetter({name!r})(import_module({module!r}))())"
)


def command_of(program: ProgramSection, python: str) -> list[str]:
    """Executable and arguments of one process, without a framework's launcher.

    A script is started as a person would start it: its folder is on `sys.path`, and `__main__` is the script.
    """
    return [*_interpreter(program, python), *program.words] if program.kind != "command" else program.words


def _interpreter(program: ProgramSection, python: str) -> Sequence[str]:
    if program.script is not None:
        return [python, program.script]
    if program.module is not None:
        return [python, "-m", program.module]
    assert program.function is not None
    module, _, name = program.function.partition(":")
    return [python, "-c", _CALL.format(module=module, name=name)]
