"""Runs PyTorch's exporter on a module, with temporary replacements for what it cannot export.

Called by `ortflow.export`. The module stays unchanged.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ortflow.exporter import derivatives_at_ties as limits
from ortflow.exporter import varying_sizes as sizes
from ortflow.exporter.bags import embedding_bag
from ortflow.exporter.ctc import ctc_loss
from ortflow.exporter.einsum import contraction_order
from ortflow.exporter.finite_branches import finite_values
from ortflow.exporter.normalisations import batch_norm, batch_norm_forward, instance_norm
from ortflow.exporter.projected_lstm import lstm_forward
from ortflow.exporter.refusal_reasons import refusal
from ortflow.exporter.running_products import log_determinant, running_product
from ortflow.exporter.stops import keeps_stops, replaced, shadowed, stopped, stops_noted
from ortflow.exporter.translations import translations

if TYPE_CHECKING:
    import torch

OPSET = 18
"""Newer ones have operators whose gradient ONNX Runtime computes slightly wrong (Gelu, from 20 on)."""


def trace(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
    dynamic_shapes: Any,
) -> Any:
    """The exporter's program of `module`, not optimized. Raises UserError if PyTorch cannot export it."""
    import torch

    handled = sys.exc_info()[1]
    try:
        with warnings.catch_warnings(), _silent(), same_attributes(module), exportable(module), stops_noted(module):
            warnings.simplefilter("ignore")  # about PyTorch's internals and training mode
            return torch.onnx.export(
                module,
                args,
                kwargs=kwargs,
                dynamo=True,
                opset_version=OPSET,
                optimize=False,
                verbose=False,
                input_names=input_names,
                output_names=output_names,
                dynamic_shapes=dynamic_shapes,
                custom_translation_table=translations(),
            )
    except Exception as error:  # noqa: BLE001 - whatever it is, it names a line of the user's
        raise refusal(type(module).__name__, error, handled) from None


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without what PyTorch 2.15 writes of an exception before it raises it: pages with its own stack and its graph."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # torch.export prints the graph there
            yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


_LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")

CONTAINERS = (dict, OrderedDict, defaultdict, list, set)
"""What attributes of modules hold; PyTorch keeps hooks in OrderedDicts."""


@contextlib.contextmanager
def same_attributes(module: torch.nn.Module) -> Iterator[None]:
    """Restore the attributes of every part, and what lists, dicts and sets hold, after the block."""
    attributes = [(part, dict(vars(part))) for part in module.modules()]
    attribute_values = [value for _, before in attributes for value in before.values() if type(value) in CONTAINERS]
    containers = [(value, value.copy()) for value in {id(value): value for value in attribute_values}.values()]
    try:
        yield
    finally:
        for part, before in attributes:
            vars(part).clear()
            vars(part).update(before)
        for container, contents in containers:
            container.clear()
            if isinstance(container, list):
                container.extend(contents)
            else:
                container.update(contents)


@contextlib.contextmanager
def exportable(module: torch.nn.Module) -> Iterator[None]:
    """Replace operations by exportable ones with the same results, inside the block."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with contextlib.ExitStack() as stack:
        # Fused attention leaves strides that make `contiguous` a no-op, and so vanish, where ONNX needs it.
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        # Checks a mask's values for being causal, which only saves time.
        stack.enter_context(
            replaced(torch.nn.modules.transformer, "_detect_is_causal_mask", lambda _, hint=None, size=None: bool(hint))
        )
        stack.enter_context(
            replaced(torch._C._nn, "cross_entropy_loss", _cross_entropy(torch._C._nn.cross_entropy_loss))
        )
        stack.enter_context(replaced(torch, "embedding", _embedding(torch.embedding)))
        stack.enter_context(replaced(torch, "embedding_bag", embedding_bag))
        stack.enter_context(replaced(torch, "ctc_loss", ctc_loss))
        stack.enter_context(finite_values())
        stack.enter_context(contraction_order())
        for owner, name, replacement in _compositions():
            stack.enter_context((shadowed if isinstance(owner, type) else replaced)(owner, name, replacement))
        stack.enter_context(replaced(torch, "instance_norm", instance_norm(torch.instance_norm)))
        stack.enter_context(replaced(torch, "batch_norm", batch_norm(torch.batch_norm, module)))
        norm = torch.nn.modules.batchnorm._BatchNorm
        stack.enter_context(replaced(norm, "forward", batch_norm_forward(norm.forward)))
        if not module.training:
            stack.enter_context(shadowed(torch._VF, "dropout", _active_dropout))
        stack.enter_context(replaced(torch.nn.LSTM, "forward", lstm_forward(torch.nn.LSTM.forward)))
        for config in configurations(module):
            # transformers: grouped matrix products have no ONNX form, and training needs no cache.
            if getattr(config, "_experts_implementation", None) is not None:
                stack.enter_context(replaced(config, "_experts_implementation", "batched_mm"))
        stack.enter_context(without_caches(module))
        yield


def _compositions() -> Iterator[tuple[Any, str, Any]]:
    """Owner and name of each function of `derivatives_at_ties`, and its replacement."""
    import torch

    functional, native, tensor = torch.nn.functional, torch._C._nn, torch.Tensor
    yield torch, "std", limits.deviation(torch.var)
    yield tensor, "std", limits.deviation(tensor.var)
    yield torch, "std_mean", limits.deviation_and_mean(torch.var_mean)
    yield torch, "cdist", limits.distances(torch.cdist)
    yield torch, "adaptive_max_pool1d", limits.adaptive_max_pool(1)(torch.adaptive_max_pool1d)
    yield native, "adaptive_max_pool2d", limits.adaptive_max_pool(2)(native.adaptive_max_pool2d)
    yield native, "adaptive_max_pool3d", limits.adaptive_max_pool(3)(native.adaptive_max_pool3d)
    yield functional, "gaussian_nll_loss", limits.gaussian_nll_loss(functional.gaussian_nll_loss)
    yield torch.linalg, "slogdet", log_determinant
    yield tensor, "__mod__", sizes.by_size(tensor.__mod__)
    yield tensor, "__pow__", sizes.by_size(tensor.__pow__)
    for owner in (torch, tensor):
        for name in ("remainder", "pow"):
            yield owner, name, sizes.by_size(getattr(owner, name))
        yield owner, "roll", sizes.roll(owner.roll)
        for name in ("clamp", "clip"):
            yield owner, name, limits.clamp(getattr(owner, name))
            yield owner, f"{name}_", limits.clamp_in_place(getattr(owner, f"{name}_"))
        yield owner, "cumprod", running_product
        yield owner, "slogdet", log_determinant
        yield owner, "angle", limits.angle(owner.angle)
        yield owner, "scatter_reduce", limits.scatter_reduce(owner.scatter_reduce)


@contextlib.contextmanager
def without_caches(module: torch.nn.Module) -> Iterator[None]:
    """Let transformers' modules return no cache, inside the block."""
    with contextlib.ExitStack() as stack:
        for config in configurations(module):
            if getattr(config, "use_cache", None) is True:
                stack.enter_context(replaced(config, "use_cache", False))
        yield


def _cross_entropy(original: Any) -> Any:
    """Cross-entropy of each sample with an axis of one added and removed: without, its shape is traced as a scalar."""

    def cross_entropy(logits: Any, target: Any, weight: Any = None, reduction: int = 1, *rest: Any) -> Any:
        if reduction == 0 and logits.ndim == 2 and target.ndim == 1:
            return original(logits.unsqueeze(2), target.unsqueeze(1), weight, reduction, *rest).squeeze(1)
        return original(logits, target, weight, reduction, *rest)

    return cross_entropy


def _embedding(original: Any) -> Any:
    """A look-up whose row `padding_idx` has no gradient; with `scale_grad_by_freq` it is the mean over its readers."""

    def embedding(
        weight: Any,
        indices: Any,
        padding_idx: int = -1,
        scale_grad_by_freq: bool = False,
        *rest: Any,
        **options: Any,
    ) -> Any:
        import torch

        # ONNX's Gather has no padding_idx: the file would train that row (2% of the gradient's norm of a BERT).
        if not weight.requires_grad or not keeps_stops():
            return original(weight, indices, padding_idx, scale_grad_by_freq, *rest, **options)
        rows = original(weight, indices, -1, False, *rest, **options)
        if scale_grad_by_freq:
            flat, fixed = indices.reshape(-1).long(), stopped(rows)
            counts = torch.zeros(weight.shape[0], device=flat.device)
            counts = counts.scatter_add(0, flat, torch.ones_like(flat, dtype=torch.float32))
            rows = fixed + (rows - fixed) / counts[flat].reshape(indices.shape).unsqueeze(-1)
        if padding_idx < 0:
            return rows
        return torch.where((indices == padding_idx).unsqueeze(-1), stopped(rows), rows)

    return embedding


def _active_dropout(x: Any, p: float, train: bool) -> Any:
    """Dropout that is on in evaluation mode, too, as `F.dropout(x)` is: a run switches Dropout nodes off there."""
    import torch

    if not train or p == 0:
        return x
    if p == 1:
        # The formula below would divide by 0.
        return x * 0.0
    return x * torch.bernoulli(torch.full_like(x, 1 - p)) / (1 - p)


def configurations(module: torch.nn.Module) -> list[Any]:
    """Configurations of transformers' modules, each once."""
    configs = (getattr(part, "config", None) for part in module.modules())
    return list({id(config): config for config in configs if hasattr(config, "to_diff_dict")}.values())
