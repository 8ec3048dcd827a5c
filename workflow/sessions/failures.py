"""What ONNX Runtime raises, and what its messages mean."""

from __future__ import annotations

import re

from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.onnx_runtime import native

SESSION_ERRORS = (RuntimeError, *(
    getattr(native, name)
    for name in (
        "Fail", "InvalidArgument", "NoSuchFile", "NoModel", "EngineError", "RuntimeException", "InvalidProtobuf",
        "ModelLoaded", "NotImplemented", "InvalidGraph", "EPFail",
    )
))  # fmt: skip


class RejectedBatch(UserError):
    """A node of a graph cannot be run on a batch's values or lengths."""


def ran_out(message: str) -> bool:
    """Whether ONNX Runtime failed for lack of memory."""
    return any(word in message.lower() for word in ("alloc", "out of memory"))


def run_failure(message: str) -> OrtflowError:
    """ONNX Runtime's message about a failed run, shortened to what the user can act on."""
    library = re.search(r"(\w+) failure (\d+): (.*?) ; GPU=.*?; expr=(.*?);", message, re.DOTALL)
    if library is not None:
        name, code, reason, call = library.groups()
        return OrtflowError(f"ONNX Runtime failed in a step: {call}: {reason} ({name} error {code})")
    node = re.search(r"while running (\S+) node\. Name:'([^']*)' Status Message: (.*)", message, re.DOTALL)
    if node is None:
        return OrtflowError(f"ONNX Runtime failed in a step: {message}")
    operator, name, reason = node.groups()
    reason = re.sub(r"^/\S+ .*?\) ", "", " ".join(reason.split()))
    return RejectedBatch(
        f"node {name!r} ({operator}) of the graph rejects the batch: {reason}",
        fix="use data with the lengths and values that the model was exported for",
    )
