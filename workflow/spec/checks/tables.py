"""Rules between the keys of a run file's sets of samples. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ortflow.workflow.spec.problem import Problem
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.spec.tables import Field


def check_tables(spec: TrainerRunSpec) -> Iterator[Problem]:
    """Report columns that are stated twice in different ways, and shares of no set."""
    for number, rule in enumerate(spec.data.train.fields):
        yield from _field(rule, ("data", "train", "fields", number))
    evaluation = spec.data.eval
    if evaluation is None:
        return
    path, share = ("data", "eval"), ("data", "eval", "fraction")
    if evaluation.fields:
        message = "belongs to data.train: the evaluation set is read in the same way"
        yield Problem((*path, "fields"), message, "move it there", others=(("data", "train", "fields"),))
    split_keys = [key for key in ("group", "time", "stratify") if getattr(evaluation, key) is not None]
    if evaluation.fraction is None:
        for key in split_keys:
            yield Problem(
                (*path, key), "is for a share of the training set", "give data.eval.fraction", others=(share,)
            )
        return
    if evaluation.fraction == 0:
        yield Problem(share, "is 0", "give the share to hold out, such as 0.1, or leave it out")
    if evaluation.path != spec.data.train.path:
        message = "is another set than data.train.path, and data.eval.fraction is a share of that"
        yield Problem((*path, "path"), message, "remove one of them", others=(share, ("data", "train", "path")))
    for key in split_keys[1:]:
        message = f"cannot be combined with data.eval.{split_keys[0]}"
        yield Problem((*path, key), message, "use one of them", others=((*path, split_keys[0]),))


def _field(rule: Field, path: tuple[str | int, ...]) -> Iterator[Problem]:
    classes = [key for key in ("classes", "one_hot") if getattr(rule, key)]
    scale = [key for key in ("standardize", "mean", "std", "unit") if getattr(rule, key) not in (None, False)]
    if classes and scale:
        message = f"cannot be combined with {classes[0]}"
        yield Problem((*path, scale[0]), message, "use one of them", others=((*path, classes[0]),))
    if rule.standardize and (rule.mean is not None or rule.std is not None):
        key = "mean" if rule.mean is not None else "std"
        yield Problem((*path, key), "cannot be combined with standardize", "use one of them")
    if rule.unit is not None and len(scale) > 1:
        yield Problem((*path, "unit"), f"cannot be combined with {scale[0]}", "use one of them")
