"""Whether a program's Python file can be read and compiled, by the interpreter of the ranks. Runs nothing of it."""

from __future__ import annotations

import subprocess
import sys
import tokenize
from pathlib import Path

from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.program import ProgramSection

WHERE = "program.script"
_CHECK = """
import sys, tokenize
try:
    with tokenize.open(sys.argv[1]) as file: text = file.read()
    compile(text, sys.argv[1], "exec", dont_inherit=True)
except SyntaxError as error:
    print(error.lineno or 1, error.msg)
except (ValueError, OSError) as error:
    print(1, error)
"""


def check_source(program: ProgramSection, python: str = sys.executable) -> None:
    """Raise UserError with file and line if the script is missing or has a syntax error. Paths are resolved."""
    if program.script is None:
        return
    path = Path(program.script)
    if not path.is_file():
        raise UserError(f"there is no file {path}", where=WHERE, fix="correct the path")
    fault = _here(path) if python == sys.executable else _there(path, python)
    if fault is not None:
        line, reason = fault
        raise UserError(f"{path}:{line}: {reason}", where=WHERE, fix="correct the program")


def _here(path: Path) -> tuple[int, str] | None:
    try:
        with tokenize.open(path) as file:
            text = file.read()
        # Without dont_inherit the program would be compiled with this module's `from __future__ import annotations`.
        compile(text, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        return error.lineno or 1, f"syntax error: {error.msg}"
    except (ValueError, OSError) as error:
        return 1, str(error)
    return None


def _there(path: Path, python: str) -> tuple[int, str] | None:
    # `-c` puts the working folder on sys.path, where a program may have a tokenize.py of its own.
    done = subprocess.run([python, "-c", _CHECK, str(path)], capture_output=True, text=True, timeout=60, cwd="/")
    line, _, message = done.stdout.strip().partition(" ")
    return (int(line), f"syntax error: {message}") if line.isdigit() else None
