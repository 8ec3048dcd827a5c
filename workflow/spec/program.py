"""The run file's section `program`: which training program a run starts, and with what. Nothing is opened here."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.base import LARGEST, PositiveFloat, Section, Text, no_items, no_keys

Argument = Annotated[str, Field(pattern=r"^[^\x00]*$")]
"""An argument or a variable's value: may be empty."""
Scalar = (
    bool
    | Annotated[int, Field(ge=-LARGEST - 1, le=LARGEST)]
    | Annotated[float, Field(allow_inf_nan=False)]
    | Annotated[str, Field(pattern=r"^[^\x00]*$")]
)
Start = Literal["direct", "torchrun", "deepspeed", "accelerate", "horovod"]

KINDS = ("script", "module", "function", "command")
"""Keys that name the program; a run file has exactly one of them."""

_REFERENCE = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\}")


class ProgramSection(Section):
    """A training program. Exactly one of `script`, `module`, `function` and `command` names it."""

    script: Text | None = None
    """Python file, relative to the run file."""
    module: Text | None = None
    """Python module, started as `python -m MODULE`."""
    function: Text | None = None
    """Function without arguments in a module, such as `pkg.mod:main`."""
    command: list[Text] = Field(default_factory=no_items)
    """Any executable and its arguments."""
    args: list[Argument] = Field(default_factory=no_items)
    """Arguments. `{NAME}` is replaced by the parameter of that name; `{{NAME}}` is the text `{NAME}`."""
    parameters: dict[Text, Scalar] = Field(default_factory=no_keys)
    """Values for `{NAME}` in `args` and `command`; a sweep sets them: `--set program.parameters.lr=1e-3,1e-4`."""
    cwd: Text | None = None
    """Folder that the program starts in, relative to the run file; by default the run file's folder."""
    env: dict[Text, Argument] = Field(default_factory=no_keys)
    """Environment variables."""
    start: Start = "direct"
    """How the processes of a node are started: each by ortflow, or all by the launcher of a framework."""
    stop_seconds: PositiveFloat = 120.0
    """Seconds between the request to stop and SIGKILL."""

    @property
    def kind(self) -> str | None:
        """Which of `KINDS` names the program; None only in a section that `check` refuses."""
        return next((key for key in KINDS if getattr(self, key)), None)

    @property
    def words(self) -> list[str]:
        """The command without the interpreter: what names the program, and the arguments, with parameters' values.

        Raises UserError for an unknown parameter.
        """
        return [self.filled(word) for word in (*self.command, *self.args)]

    def filled(self, text: str) -> str:
        """A word with the values of the parameters. Raises UserError for an unknown one."""

        def value(match: re.Match[str]) -> str:
            if match[1] is not None:
                return f"{{{match[1]}}}"
            if match[2] not in self.parameters:
                names = ", ".join(self.parameters) or "none"
                raise UserError(
                    f"{text!r} names the parameter {match[2]}, and program.parameters has {names}",
                    fix=f"add program.parameters.{match[2]}, or write {{{{{match[2]}}}}} for the text itself",
                )
            return as_argument(self.parameters[match[2]])

        return _REFERENCE.sub(value, text)

    @property
    def unused(self) -> list[str]:
        """Parameters that no argument names."""
        referenced = {match[2] for word in (*self.command, *self.args) for match in _REFERENCE.finditer(word)}
        return [name for name in self.parameters if name not in referenced]


def as_argument(value: bool | int | float | str) -> str:
    """A parameter as the text of an argument; booleans as in YAML."""
    return str(value).lower() if isinstance(value, bool) else str(value)
