"""Names of documents, and amounts as Kubernetes writes them. Pure.

The chart has the same functions in `templates/_names.tpl`; a test compares them through Helm.
"""

from __future__ import annotations

import hashlib
import re

from ortflow.workflow.spec.units import parse_time

DIGEST = 6
"""Characters of a suffix."""
SUPERVISOR = "-supervisor"


def quantity(text: str) -> str:
    """An amount of memory, in the run file's syntax, as Kubernetes writes it: `16 gib` as `16Gi`, `512M` unchanged."""
    amount = text.strip().upper().replace(" ", "").removesuffix("B").replace("I", "i")
    # Kubernetes' m is milli and its M is mega, but its kilo is a small k.
    return amount if amount.endswith("i") else amount.replace("K", "k")


def seconds(limit: str | int) -> int:
    """A duration in the run file's syntax."""
    return parse_time(str(limit))


def digest(text: str) -> str:
    """A short hash of a text, in hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST]


def label(name: str) -> str:
    """A run's name as the start of an object's name, which must begin with a letter."""
    return f"run-{name}" if re.match("[0-9]", name) else name


def job_name(name: str, nodes: int, suffix: str) -> str:
    """NAME-SUFFIX, shortened so that NAME-SUFFIX-worker-N and NAME-SUFFIX-supervisor are valid host names."""
    longest = max(len(SUPERVISOR), len(f"-worker-{max(0, nodes - 1)}"))
    room = 63 - longest - 1 - len(suffix)
    return f"{label(name)[:room].rstrip('-')}-{suffix}"


def sibling(name: str, suffix: str) -> str:
    """NAME-WHAT for objects that outlive a submission. A name too long for a host name is shortened and gets its
    digest.
    """
    stem, room = label(name), 63 - 1 - len(suffix)
    if len(stem) > room:
        stem = f"{stem[: room - DIGEST - 1].rstrip('-')}-{digest(name)}"
    return f"{stem}-{suffix}"


def inside(folder: str, path: str) -> str:
    """A path relative to a folder."""
    return path if path.startswith("/") else f"{folder.rstrip('/')}/{path}"


def literal(text: str) -> str:
    """Escape a variable's value for the kubelet, which expands $(NAME) and $$."""
    return text.replace("$", "$$")
