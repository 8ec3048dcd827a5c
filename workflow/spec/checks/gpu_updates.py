"""Where updates on GPUs do not have everything that updates on CPUs have. Pure; called by the checks of `train`."""

from __future__ import annotations

from collections.abc import Iterator

from ortflow.workflow.spec.problem import KeyPath, Problem
from ortflow.workflow.spec.run import TrainerRunSpec


def only_whole_on_gpus(spec: TrainerRunSpec, path: KeyPath, what: str = "is") -> Iterator[Problem]:
    """Report a setting that GPUs support only where each rank holds the whole model and its optimizer's state, and not
    in fp16.

    `what`: the beginning of the message, behind the path.
    """
    gpus: KeyPath = ("resources", "gpus_per_rank")
    if spec.on_gpus and spec.holds_whole and spec.train.precision == "fp16":
        # Until tests/cuda/test_cuda_training_options.py has passed in fp16 on a GPU.
        precision = ("train", "precision")
        yield Problem(
            path, f"{what} not supported in fp16 on GPUs", "set train.precision to bf16", others=(gpus, precision)
        )
    if not spec.on_gpus or spec.holds_whole:
        return
    if spec.divides:
        fix = "set parallel.pipeline and parallel.horizontal to 1"
        yield Problem(path, f"{what} not supported in divided models on GPUs", fix, others=(gpus, ("parallel",)))
    elif spec.parallel.zero:
        fix, zero = "set parallel.zero to 0", ("parallel", "zero")
        yield Problem(path, f"{what} not supported under ZeRO on GPUs", fix, others=(gpus, zero))
    else:
        offload = ("train", "offload")
        yield Problem(path, f"{what} not supported with train.offload", "set it to none", others=(gpus, offload))
