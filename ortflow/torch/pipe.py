"""`ORTPipelineModule`: DeepSpeed's pipeline with each layer an ORTModule. Needs DeepSpeed.

In place of `onnxruntime.training.ortmodule.experimental.pipe`; see docs/ortmodule.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ortflow.torch.module import ORTModule
from ortflow.torch.settings import DebugOptions
from ortflow.workflow.errors import UserError

try:
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint
except ImportError as error:
    fix = "pip install deepspeed"
    raise UserError(f"DeepSpeed cannot be imported ({error})", where="ortflow.torch.pipe", fix=fix) from error


class ORTPipelineModule(PipelineModule):  # type: ignore[misc]
    """DeepSpeed's PipelineModule whose layers run as graphs. ZeRO stages 2 and 3 do not support pipelines.

    A layer is a torch.nn.Module, a LayerSpec, or a function; functions run as PyTorch code, and so do layers of a
    TiedLayerSpec, whose parameters DeepSpeed reduces itself.

    Parameters
    ----------
    layers, num_stages, topology, loss_fn, seed_layers, seed_fn, base_seed, partition_method
        As in PipelineModule.
    activation_checkpoint_interval, activation_checkpoint_func, checkpointable_layers
        As in PipelineModule.
    debug_options
        For the ORTModule of each layer; the number of the layer is put before its prefix.
    """

    def __init__(
        self,
        layers: Any,
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], None] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpoint,
        checkpointable_layers: list[str] | None = None,
        debug_options: DebugOptions | None = None,
    ) -> None:
        numbered = [_numbered(layer, place, debug_options) for place, layer in enumerate(layers)]
        super().__init__(
            numbered,
            num_stages=num_stages,
            topology=topology,
            loss_fn=loss_fn,
            seed_layers=seed_layers,
            seed_fn=seed_fn,
            base_seed=base_seed,
            partition_method=partition_method,
            activation_checkpoint_interval=activation_checkpoint_interval,
            activation_checkpoint_func=activation_checkpoint_func,
            checkpointable_layers=checkpointable_layers,
        )


def _numbered(layer: Any, place: int, options: DebugOptions | None) -> Any:
    """The layer, or what makes it, as an ORTModule."""
    if options is not None and options.save_onnx:
        options = DebugOptions(options.log_level, options.save_onnx, f"{place}_{options.onnx_prefix}")
    if isinstance(layer, torch.nn.Module):
        return layer if isinstance(layer, ORTModule) else ORTModule(layer, options)
    if isinstance(layer, LayerSpec) and not isinstance(layer, TiedLayerSpec):
        return _Spec(layer, options)
    return layer


class _Spec(LayerSpec):  # type: ignore[misc]
    """A LayerSpec whose module is an ORTModule; the stage that has the layer builds it."""

    def __init__(self, spec: LayerSpec, options: DebugOptions | None) -> None:
        super().__init__(spec.typename, *spec.module_args, **spec.module_kwargs)
        self._options = options

    def build(self, log: bool = False) -> ORTModule:
        """Build the layer."""
        return ORTModule(super().build(log), self._options)
