"""Quoting in a batch script: in a directive as sbatch parses it, in a command as bash does.

sbatch splits a directive into words itself: blanks outside quotation marks end a word, `#` outside them ends the line,
a backslash escapes the next character, and nothing else has a meaning. So neither `$` nor a backtick is expanded.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from ortflow.manifests.slurm.placement import TASK
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.checks.slurm_syntax import carries_control, is_directive
from ortflow.workflow.spec.problem import printable

WIDTH = 100
_BARE = re.compile(r"[A-Za-z0-9_.,:@%+/=\[\]^~-]+")


def directive(name: str, value: str | None = None) -> str:
    """One #SBATCH line; raises UserError if no line can hold the value."""
    if value is None:
        return f"#SBATCH --{name}"
    return f"#SBATCH --{name}={value if _BARE.fullmatch(value) else _in_quotes(one_line(value, f'--{name}'))}"


def one_line(text: str, subject: str) -> str:
    """The text itself, if it fits on one line of a script. Raises UserError otherwise."""
    if carries_control(text):
        raise UserError(
            f"{subject} contains a line break or another control character: {printable(text)}",
            fix="a batch script cannot express it: remove it",
        )
    return text


def shell_line(line: str) -> str:
    """A line of the user's, unchanged. Raises UserError if it contains line breaks or is a directive."""
    if is_directive(one_line(line.replace("\t", " "), "a line of the prologue or epilogue")):
        raise UserError(f"{line} is a directive, not a line for the shell", fix="set it in backends.slurm.directives")
    return line


def shell(*parts: Sequence[str]) -> list[str]:
    """One bash command: each part of its words begins a line, and a long part is broken over several."""
    lines = [line for place, part in enumerate(parts) for line in _wrapped(part, "  " * place)]
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def _wrapped(words: Sequence[str], indent: str) -> Iterator[str]:
    line = ""
    for word in map(_quoted, words):
        if line and len(line) + len(word) + 3 > WIDTH:
            yield line
            line = f"{indent}  {word}"
        else:
            line = f"{line} {word}" if line else indent + word
    yield line


def _quoted(word: str) -> str:
    """The word, quoted if necessary, with TASK replaced by bash's variable."""
    if TASK not in word:
        return shlex.quote(word)
    return '"$SLURM_ARRAY_TASK_ID"'.join(shlex.quote(part) if part else "" for part in word.split(TASK))


def _in_quotes(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
