"""Kubernetes' syntax for the values of `backends.kubernetes`. Pure; used by the checks before and after rendering."""

from __future__ import annotations

import re

_PART = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_WORD = r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?"
# Between words, the grammar of image names has one dot, one or two underscores, or hyphens (distribution/reference).
_PATH = r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*"

LABEL = re.compile(_PART)
"""A DNS label; at most 63 letters."""
LABEL_RULE = "use at most 63 lower-case letters, digits and hyphens, a letter or digit first and last"
NAME = re.compile(rf"{_PART}(?:\.{_PART})*")
"""Syntax of most objects' names; at most 253 characters."""
WORD = re.compile(_WORD)
"""A label's value, and the last part of a qualified name; at most 63 characters."""
IMAGE = re.compile(
    rf"(?:[A-Za-z0-9.-]+(?::[0-9]+)?/)?{_PATH}(?:/{_PATH})*(?::\w[\w.-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?"
)
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECRET_KEY = re.compile(rf"({_PART}(?:\.{_PART})*)/([\w.-]{{1,253}})")
CORES = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,3})?|[0-9]{1,9}m")
# A container names capabilities without the kernel's prefix CAP_.
CAPABILITY = re.compile(r"(?!CAP_)[A-Z][A-Z_]*")


def is_image(text: str) -> bool:
    """Whether the text is a valid image name."""
    return IMAGE.fullmatch(text) is not None


def is_label(text: str) -> bool:
    """Whether the text is a valid name of a namespace or container."""
    return len(text) <= 63 and LABEL.fullmatch(text) is not None


def is_name(text: str) -> bool:
    """Whether the text is a valid name of an object."""
    return len(text) <= 253 and NAME.fullmatch(text) is not None


def is_label_value(text: str) -> bool:
    """Whether the text is a valid value of a label."""
    return text == "" or (len(text) <= 63 and WORD.fullmatch(text) is not None)


def is_qualified(text: str) -> bool:
    """Whether the text is a valid name of a label, annotation or resource: [DOMAIN/]NAME."""
    domain, slash, word = text.rpartition("/")
    return (not slash or is_name(domain)) and len(word) <= 63 and WORD.fullmatch(word) is not None


def is_resource(text: str) -> bool:
    """Whether the text is a valid name of an extended resource."""
    domain = text.partition("/")[0]
    # Names without a domain, and those in kubernetes.io, are the system's own resources.
    return "/" in text and is_qualified(text) and not f".{domain}".endswith(".kubernetes.io")


def is_absolute(path: str) -> bool:
    """Whether the path can be mounted, or mounted at: absolute, without `..` and colon."""
    # By the API's reference, mountPath must not contain a colon.
    return path.startswith("/") and path.strip("/") != "" and ".." not in path.split("/") and ":" not in path


def is_relative(path: str) -> bool:
    """Whether the path is relative and stays inside its folder."""
    return not path.startswith("/") and ".." not in path.split("/") and path.strip("./") != "" and path.isprintable()
