"""Why PyTorch cannot export a module: one sentence with the user's own line and the fix.

Called by `ortflow.exporter.trace` with what `torch.onnx.export` raised. PyTorch's own message is a page of text around
an inner exception, which has the cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from traceback import walk_tb
from types import CodeType, FrameType

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir.origin import is_pytorch, user_line

_DECIDE = "use torch.where, or let the branch depend only on shapes and Python numbers"
_HELP = (
    ("grouped_mm", 'set module.config._experts_implementation = "batched_mm"'),
    ("DynamicCache|EncoderDecoderCache|past_key_values", "set module.config.use_cache = False"),
    ("LSTM with proj_size", "let the LSTM start from zeros, or set proj_size=0"),
    ("PackedSequence", "pass the padded batch to the RNN, and mask the padding in the loss or with torch.where"),
    (
        "conflicts between user-specified|Constraints violated|marked .* as dynamic",
        "keep forward from fixing its size, or fix all sizes with dynamic_shapes={}",
    ),
    ("data-dependent|DataDependent|DynamicOutputShape", _DECIDE),
    ("No ONNX function found|No decompositions registered", "use other operators in forward"),
)
"""Pattern of PyTorch's message, or name of a local value -> the fix. The first match counts."""
_GENERAL = "change its forward, or fix the shapes with dynamic_shapes={} if it fails for a varying batch"

_FIXED = re.compile(r"inferred a static shape of (\d+) for dimension inputs\['?(\w+)'?\]\.shape\[(\d+)\]")
_MISSING = re.compile(r"No ONNX function found for <?(?:OpOverload\(op=')?([\w.]+)")


def refusal(module: str, error: BaseException, handled: BaseException | None = None) -> UserError:
    """The error to raise for what `torch.onnx.export` raised, for a module of the class `module`.

    `handled`: the exception that the caller was handling before. It is the context of `error`, and not its cause.
    """
    chain = list(_chain(error, handled))
    user_error = next((link for link in chain if isinstance(link, UserError)), None)
    if user_error is not None:
        return user_error
    cause = chain[-1]
    frames = [(frame, line) for link in chain for frame, line in walk_tb(link.__traceback__)]
    message = [f"{type(link).__name__} {link}" for link in chain[1:] or chain]
    at_hand = {type(value).__name__ for frame, _ in frames for value in list(frame.f_locals.values())}
    everything = "\n".join([*message, *sorted(at_hand & {"PackedSequence", "DynamicCache", "EncoderDecoderCache"})])
    fix = next((fix for pattern, fix in _HELP if re.search(pattern, everything)), _GENERAL)
    place = _own_place(frames)
    return UserError(f"PyTorch cannot export {module}: {_in_short(cause)}{f', at {place}' if place else ''}", fix=fix)


def _chain(error: BaseException, handled: BaseException | None) -> Iterator[BaseException]:
    """The error and what caused it, the first cause last."""
    link: BaseException | None = error
    visited: set[int] = set()
    while link is not None and link is not handled and id(link) not in visited:
        visited.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _in_short(cause: BaseException) -> str:
    """The message of an exception, rewritten if PyTorch's is written for its own developers."""
    text, kind = str(cause), type(cause).__name__
    fixed, missing = _FIXED.search(text), _MISSING.search(text)
    if fixed:
        return "axis {2} of input {1!r} varies, but forward works for size {0} only".format(*fixed.groups())
    if missing:
        return f"ONNX has no equivalent of {missing[1]}"
    if kind == "GuardOnDataDependentSymNode":
        return "a branch depends on the values of a tensor (data-dependent control flow)"
    if kind == "DynamicOutputShapeException":
        return f"the size of what {text} returns depends on values (data-dependent shape)"
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [kind]
    message = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    if (
        kind in ("KeyError", "AssertionError", "AttributeError", "IndexError", "NotImplementedError")
        and message != kind
    ):
        message = f"{kind}: {message}"
    if len(message) > 120:
        # The first sentence is enough: later ones are about PyTorch's own tools.
        message = re.split(r"(?<=\w{3})\. ", message)[0]
    return message if len(message) <= 300 else message[:297] + "..."


def _own_place(frames: list[tuple[FrameType, int]]) -> str:
    """The innermost line outside PyTorch and ortflow: of the traceback, or of the operation being translated."""
    for frame, line in reversed(frames):
        code: CodeType = frame.f_code
        if code.co_filename.startswith("<") or is_pytorch(code.co_filename) or _is_ours(frame):
            continue
        return f"{code.co_filename} line {line}, in {code.co_name}"
    for frame, _ in reversed(frames):
        noted = getattr(frame.f_locals.get("node"), "meta", None)
        source_line = user_line(str(noted.get("stack_trace", ""))) if isinstance(noted, dict) else None
        if source_line:
            return "{} line {}".format(*source_line)
    return ""


def _is_ours(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.split(".")[0] in ("ortflow", "onnxscript", "onnx_ir", "onnx", "contextlib", "importlib")
