"""Names of documents, and amounts as Kubernetes writes them. Pure.

The chart has the same functions in `templates/_names.tpl`; a test compares them through Helm.
"""

from __future__ import annotations

import hashlib
import re

from ortflow.workflow.spec.units import parse_time

DIGEST = 6
"""Letters of a suffix."""
SUPERVISOR = "-supervisor"


def quantity(text: str) -> str:
    """An amount of memory in our syntax as Kubernetes writes it: `16 gib` as `16Gi`, `512M` as it is."""
    written = text.strip().upper().replace(" ", "").removesuffix("B").replace("I", "i")
    # Kubernetes' m is milli and its M is mega, but its kilo is a small k.
    return written if written.endswith("i") else written.replace("K", "k")


def seconds(limit: str | int) -> int:
    """A length of time in our syntax."""
    return parse_time(str(limit))


def digest(text: str) -> str:
    """A few letters that stand for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST]


def label(name: str) -> str:
    """A run's name as the beginning of an object's: those begin with a letter."""
    return f"run-{name}" if re.match("[0-9]", name) else name


def job_name(name: str, nodes: int, suffix: str) -> str:
    """NAME-SUFFIX, the name cut so that NAME-SUFFIX-worker-N and NAME-SUFFIX-supervisor are names of hosts."""
    longest = max(len(SUPERVISOR), len(f"-worker-{max(0, nodes - 1)}"))
    room = 63 - longest - 1 - len(suffix)
    return f"{label(name)[:room].rstrip('-')}-{suffix}"


def sibling(name: str, what: str) -> str:
    """NAME-WHAT for what outlives a submission; a name too long for a host name is cut and gets its digest."""
    whole, room = label(name), 63 - 1 - len(what)
    if len(whole) > room:
        whole = f"{whole[: room - DIGEST - 1].rstrip('-')}-{digest(name)}"
    return f"{whole}-{what}"


def inside(folder: str, path: str) -> str:
    """A path seen from a folder."""
    return path if path.startswith("/") else f"{folder.rstrip('/')}/{path}"


def literal(text: str) -> str:
    """A variable's value so that the kubelet, which reads $(NAME) and $$, passes it on as it is."""
    return text.replace("$", "$$")
