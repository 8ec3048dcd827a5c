"""How Kubernetes writes what `backends.kubernetes` holds. Pure; used by the checks before and after rendering."""

from __future__ import annotations

import re

_PART = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_WORD = r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?"
_PATH = r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*"

LABEL = re.compile(_PART)
"""A DNS label; at most 63 letters."""
LABEL_RULE = "use at most 63 lower-case letters, digits and hyphens, a letter or digit first and last"
NAME = re.compile(rf"{_PART}(?:\.{_PART})*")
"""What most objects may be called; at most 253 letters."""
WORD = re.compile(_WORD)
"""A label's value, and the last part of a qualified name; at most 63 letters."""
IMAGE = re.compile(
    rf"(?:[A-Za-z0-9.-]+(?::[0-9]+)?/)?{_PATH}(?:/{_PATH})*(?::\w[\w.-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?"
)
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECRET_KEY = re.compile(rf"({_PART}(?:\.{_PART})*)/([\w.-]{{1,253}})")
CORES = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,3})?|[0-9]{1,9}m")
CAPABILITY = re.compile(r"(?!CAP_)[A-Z][A-Z_]*")


def is_image(text: str) -> bool:
    """Whether a node could fetch an image of that name."""
    return IMAGE.fullmatch(text) is not None


def is_label(text: str) -> bool:
    """Whether a namespace or a container may be called so."""
    return len(text) <= 63 and LABEL.fullmatch(text) is not None


def is_name(text: str) -> bool:
    """Whether an object may be called so."""
    return len(text) <= 253 and NAME.fullmatch(text) is not None


def is_label_value(text: str) -> bool:
    """Whether a label may say so."""
    return text == "" or (len(text) <= 63 and WORD.fullmatch(text) is not None)


def is_qualified(text: str) -> bool:
    """Whether a label, an annotation or a resource may be called so: [DOMAIN/]WORD."""
    domain, slash, word = text.rpartition("/")
    return (not slash or is_name(domain)) and len(word) <= 63 and WORD.fullmatch(word) is not None


def is_resource(text: str) -> bool:
    """Whether a resource of a node that is none of Kubernetes' own may be called so."""
    domain = text.partition("/")[0]
    return "/" in text and is_qualified(text) and not f".{domain}".endswith(".kubernetes.io")


def is_absolute(path: str) -> bool:
    """Whether something can be mounted at a path, or mounted from it: no `..`, no colon."""
    return path.startswith("/") and path.strip("/") != "" and ".." not in path.split("/") and ":" not in path


def is_relative(path: str) -> bool:
    """Whether a path stays in its folder."""
    return not path.startswith("/") and ".." not in path.split("/") and path.strip("./") != "" and path.isprintable()
