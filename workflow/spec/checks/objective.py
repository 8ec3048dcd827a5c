"""Whether losses, metrics and what is watched fit each other. Pure; called by `check`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ortflow.workflow.spec.checkpoint import Best
from ortflow.workflow.spec.losses import ClassLoss, Divergence, OutputLoss
from ortflow.workflow.spec.metric_targets import misuse
from ortflow.workflow.spec.metrics import METRICS, MetricSection
from ortflow.workflow.spec.model import single_losses
from ortflow.workflow.spec.problem import KeyPath, Problem, parse_dotted
from ortflow.workflow.spec.run import TrainerRunSpec

METRIC_KEYS: KeyPath = ("model", "metrics")


def check_objective(spec: TrainerRunSpec) -> Iterator[Problem]:
    """Every contradiction about `model.loss`, `model.metrics` and the metric of `train.early_stop`."""
    metrics: Sequence[MetricSection] = ()
    if spec.model is not None:
        metrics = spec.model.metrics
        yield from _losses(spec)
        yield from _metrics(spec, metrics)
    if spec.train.early_stop is not None:
        yield from watched(spec, spec.train.early_stop.metric, ("train", "early_stop", "metric"))
    if spec.checkpoint.best is not None:
        yield from _best(spec, spec.checkpoint.best)


def _best(spec: TrainerRunSpec, best: Best) -> Iterator[Problem]:
    path: KeyPath = ("checkpoint", "best")
    if spec.data.eval is None:
        yield Problem(path, "needs an evaluation set", "give data.eval", others=(("data", "eval"),))
    elif spec.train.evaluation.every_steps is None:
        period: KeyPath = ("train", "evaluation", "every_steps")
        yield Problem(path, "needs periodic evaluation", "give train.evaluation.every_steps", others=(period,))
    yield from watched(spec, best.metric, (*path, "metric"))


def watched(spec: TrainerRunSpec, name: str, path: KeyPath) -> Iterator[Problem]:
    """Problems of a key that names a result of the evaluation."""
    metrics = spec.model.metrics if spec.model is not None else []
    numbers = {metric.key for metric in metrics if METRICS[metric.name].is_number}
    of_set, slash, result = name.rpartition("/")
    if (result == "loss" or result in numbers) and (not slash or of_set in spec.data.eval_sets):
        return
    if slash and of_set not in spec.data.eval_sets:
        set_list = f", which has {', '.join(spec.data.eval_sets)}" if spec.data.eval_sets else ""
        fix = f"add {of_set} to data.eval_sets{set_list}, or name a result of data.eval"
        yield Problem(
            path, f"is {name}, and there is no evaluation set {of_set!r}", fix, others=(("data", "eval_sets"),)
        )
        return
    message = f"is {name}, which evaluation does not compute"
    if result in {metric.key for metric in metrics}:
        message = f"is {name}, which is not a number"
    fix = "set it to loss" if spec.model is None else f"add {result} to model.metrics"
    if result in {metric.key for metric in metrics}:
        fix = "name another result"
    if numbers:
        fix = f"{fix}, or name one of {', '.join(['loss', *sorted(numbers)])}"
    yield Problem(path, message, fix, others=(METRIC_KEYS,))


def _losses(spec: TrainerRunSpec) -> Iterator[Problem]:
    assert spec.model is not None
    losses = single_losses(spec.model.loss).values()
    if any(isinstance(loss, OutputLoss) for loss in losses) and spec.data.last_batch == "pad":
        message = "cannot be pad if the loss is an output of the graph: the padding samples would count"
        yield Problem(("data", "last_batch"), message, "use drop or keep", others=(("model", "loss", "kind"),))
    for loss_key, loss in single_losses(spec.model.loss).items():
        if isinstance(loss, Divergence):
            yield from _teacher(loss, parse_dotted(loss_key))
    ignored = list(dict.fromkeys(loss.ignore_index for loss in losses if isinstance(loss, ClassLoss)))
    if len(ignored) > 1:
        indices = " and ".join("null" if index is None else str(index) for index in ignored)
        message = f"has losses with the ignore_index {indices}"
        yield Problem(("model", "loss", "terms"), message, "give all of them the same")
    if len(losses) > 1 and any(isinstance(getattr(loss, "class_weights", None), str) for loss in losses):
        message = "has class_weights in a file, which is possible only for a loss alone"
        yield Problem(("model", "loss", "terms"), message, "write them as a list")


def _teacher(loss: Divergence, path: KeyPath) -> Iterator[Problem]:
    if loss.teacher is None and loss.teacher_output is not None:
        yield Problem((*path, "teacher_output"), "needs a teacher", "give teacher, or remove it")


def _metrics(spec: TrainerRunSpec, metrics: Sequence[MetricSection]) -> Iterator[Problem]:
    assert spec.model is not None
    keys = [metric.key for metric in metrics]
    for place, metric in enumerate(metrics):
        path: KeyPath = (*METRIC_KEYS, place)
        if metric.key in keys[:place] or metric.key == "loss":
            yield Problem(path, f"lists {metric.key} twice", "keep one")
        elif (wrong := misuse(metric, spec.model.loss)) is not None:
            message = f"is {metric.name}, which {wrong}"
            yield Problem(path, message, "correct or remove it", others=(("model", "loss", "kind"),))
        elif metric.name in ("auroc", "average_precision") and spec.parallel.pipeline > 1:
            message = f"is {metric.name}, which is not computed in a pipeline: its scores are not gathered there"
            yield Problem(path, message, "remove it", others=(("parallel", "pipeline"),))
