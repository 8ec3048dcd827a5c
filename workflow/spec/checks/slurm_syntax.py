"""Slurm's syntax for the values of `backends.slurm`. Pure; used by `slurm` and by the renderer."""

from __future__ import annotations

import re
import unicodedata

_HOSTS = r"(?:[A-Za-z0-9_.-]|\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\])+"
# Ranges and words of Slurm's parse_time (src/common/parse_time.c); fika is 15:00 and teatime 16:00.
_MINUTE, _MONTH, _DAY = "[0-5][0-9]", "(?:0?[1-9]|1[0-2])", "(?:0?[1-9]|[12][0-9]|3[01])"
_CLOCK = (
    rf"(?:(?:[01]?[0-9]|2[0-3]):{_MINUTE}(?::{_MINUTE})?|(?:0?[0-9]|1[0-2]):{_MINUTE}(?::{_MINUTE})? ?[AaPp][Mm]"
    r"|midnight|(?i:noon)|fika|teatime)"
)
_DATE = (
    r"(?:(?:0[1-9]|1[0-2])(?:0[1-9]|[12][0-9]|3[01])(?:[0-9]{2})?"
    rf"|{_MONTH}/{_DAY}(?:/[0-9]{{2}})?|{_MONTH}\.{_DAY}(?:\.[0-9]{{2}})?)"
)
_UNIT = r"(?:seconds?|minutes?|hours?|days?|weeks?)"
_JOB = r"[0-9]+(?:_(?:[0-9]+|\*))?"
_WAIT = rf"(?:after:{_JOB}(?:\+[0-9]+)?(?::{_JOB}(?:\+[0-9]+)?)*|after(?:any|burstbuffer|corr|notok|ok)(?::{_JOB})+)"

_NAME = (r"\w[\w.,:+@/=-]*", "use letters, digits and . _ - + @ / : = , only, a letter or digit first")
_NODES = (rf"{_HOSTS}(?:,{_HOSTS})*", "write names with commas and ranges in brackets, such as node[1-4,7],big3")
SYNTAX: dict[str, tuple[str, str, str]] = {
    # key: description, syntax, fix
    "partition": ("name of a partition", *_NAME),
    "account": ("name of an account", *_NAME),
    "qos": ("name of a quality of service", *_NAME),
    "reservation": ("name of a reservation", *_NAME),
    "job_name": ("name for a job", *_NAME),
    "constraint": (
        "list of features",
        r"[\w!(\[][\w.,:+=@&|*!()\[\]-]*",
        "use names with & (all), | (one of), parentheses and counts, such as a100&ib or [rack1*2&rack2*2]",
    ),
    "nodelist": ("list of nodes", *_NODES),
    "exclude": ("list of nodes", *_NODES),
    "dependency": (
        "dependency",
        rf"(?:{_WAIT}|singleton)(?:,(?:{_WAIT}|singleton))*|(?:{_WAIT}|singleton)(?:\?(?:{_WAIT}|singleton))*",
        "write after, afterany, afterok, afternotok, aftercorr with job ids, or singleton, such as afterok:123:124",
    ),
    "begin": (
        "time to begin",
        rf"(?i:now(?:\+[0-9]+{_UNIT}?)?)|today|tomorrow|{_CLOCK}|{_DATE}(?:-{_CLOCK})?"
        r"|[2-9][0-9]{3}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])"
        rf"(?:T(?:[01]?[0-9]|2[0-3]):{_MINUTE}(?::{_MINUTE})?)?",
        "write now+1hour, 22:00, tomorrow or 2030-01-31T08:00",
    ),
    "gres": (
        "list of generic resources",
        r"[\w.-]+(?:[:=/][\w.-]+){0,3}(?:,[\w.-]+(?:[:=/][\w.-]+){0,3})*",
        "write NAME[:TYPE][:COUNT] with commas, such as gpu:a100:4,nvme:1",
    ),
    "gpu_bind": (
        "way to bind GPUs",
        r"(?:v(?:erbose)?,)?(?:closest|none|(?:single|per_task):[1-9][0-9]*"
        r"|map_gpu:[0-9]+(?:\*[0-9]+)?(?:,[0-9]+(?:\*[0-9]+)?)*|mask_gpu:0x[0-9A-Fa-f]+(?:,0x[0-9A-Fa-f]+)*)",
        "write closest, none, single:1, per_task:1, map_gpu:0,1 or mask_gpu:0x1,0x2",
    ),
}
"""Values of directives, as sbatch accepts them and without characters that could end the directive."""

MOUNT = re.compile(r"(/[^\s,:]*)(?::(/[^\s,:]*))?(?::(ro|rw))?")
"""PATH[:INSIDE][:ro|rw] of a container."""

FLAG = re.compile(r"--[a-z][a-z0-9-]*(?:=.*)?")


def carries_control(text: str) -> bool:
    """Whether a text contains characters that a script's line must not have: control characters, surrogates."""
    return any(unicodedata.category(letter) in ("Cc", "Cs") for letter in text)


def is_directive(line: str) -> bool:
    """Whether sbatch would read a comment of the prologue as a directive."""
    # #SLURM is an old name of #SBATCH. #PBS and #BSUB are translated, also behind the first commands
    # (src/sbatch/xlate.c).
    return line.startswith(("#SBATCH", "#SLURM", "#PBS", "#BSUB"))


def gpus_in(gres: str | None) -> int | None:
    """Number of GPUs per node that a list of generic resources requests; None if it contains none."""
    counts = []
    for part in (gres or "").split(","):
        words = re.split(r"[:=/]", part.removeprefix("gres:").removeprefix("gres/"))
        if words[0] == "gpu":
            counts.append(int(words[-1]) if words[-1].isdecimal() else 1)
    return sum(counts) if counts else None
