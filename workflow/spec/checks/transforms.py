"""Rules of the sets' transforms. Pure; called by `check`."""

from __future__ import annotations

from collections.abc import Iterator

from ortflow.workflow.spec.data import DataSet
from ortflow.workflow.spec.problem import KeyPath, Problem, listed
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.spec.transforms import OPTIONS, Transform

KINDS = tuple(name for name in Transform.model_fields if name not in OPTIONS)


def check_transforms(spec: TrainerRunSpec) -> Iterator[Problem]:
    """Report items of `transforms` that are not of one kind, and masks whose tokens nothing states."""
    data = spec.data
    sets: list[tuple[KeyPath, DataSet | None]] = [(("data", "train"), data.train), (("data", "eval"), data.eval)]
    sets += [(("data", "eval_sets", name), section) for name, section in data.eval_sets.items()]
    for set_path, section in sets:
        for number, transform in enumerate(section.transforms if section is not None else ()):
            path = (*set_path, "transforms", number)
            kinds = transform.kinds
            if len(kinds) > 1:
                yield Problem(path, f"has {listed(kinds).replace(' or ', ' and ')}", "give each its own item")
            elif not kinds:
                yield Problem(path, "has no kind", f"give {listed(KINDS)}")
            elif kinds == ["onnx"] and transform.column is not None:
                yield Problem((*path, "column"), "is not for onnx", "name its inputs and outputs in columns")
            elif kinds != ["onnx"] and (transform.columns or transform.random):
                key = "columns" if transform.columns else "random"
                yield Problem((*path, key), f"is not for {kinds[0]}", "remove it")
            elif transform.mask_tokens is not None and section is not None and section.text is None:
                for key in ("mask_id", "vocabulary"):
                    if getattr(transform.mask_tokens, key) is None:
                        message = "is missing, and the set has no text.tokenizer to take it from"
                        yield Problem((*path, "mask_tokens", key), message, "add it")
