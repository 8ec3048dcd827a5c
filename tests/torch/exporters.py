"""The ways from a module to an ONNX file: ortflow's, TorchScript's, and the dynamo exporter's, right and wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from case import Case
from torch import nn

import ortflow

Exporter = Callable[[Case, nn.Module, Path], None]


class Positional(nn.Module):
    """A module for TorchScript, which takes other keyword arguments with a default for inputs."""

    def __init__(self, module: nn.Module, inputs: list[str], outputs: list[str]) -> None:
        super().__init__()
        self.module, self.inputs, self.outputs = module, inputs, outputs

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output = self.module(**dict(zip(self.inputs, tensors, strict=True)))
        return tuple(getattr(output, name, output) for name in self.outputs)


def for_training(case: Case, module: nn.Module, path: Path) -> None:
    """ortflow's own function."""
    ortflow.export_for_training(module, case.example(), path)


def torchscript(opset: int = 17) -> Exporter:
    """The TorchScript exporter with the options that training needs."""
    return _torchscript(opset, training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False)


def torchscript_default(opset: int = 17) -> Exporter:
    """The TorchScript exporter as it is usually called: in evaluation mode, constants folded."""
    return _torchscript(opset)


def _torchscript(opset: int, **options: Any) -> Exporter:
    def export(case: Case, module: nn.Module, path: Path) -> None:
        example, outputs = case.example(), ["loss", "logits"] if case.labels else [case.loss.output or "output"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                Positional(module, list(example), outputs),
                tuple(example.values()),
                str(path),
                dynamo=False,
                opset_version=opset,
                input_names=list(example),
                output_names=outputs,
                dynamic_axes={name: {0: "batch"} for name in example},
                **options,
            )

    return export


def dynamo(opset: int = 18) -> Exporter:
    """The dynamo exporter with parameters and buffers protected from its optimizer."""

    def export(case: Case, module: nn.Module, path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = _program(case, module, opset, optimize=False)
            _optimize(program, module)
            program.save(path)

    return export


def dynamo_default(opset: int = 18) -> Exporter:
    """The dynamo exporter with its defaults, which are wrong for training."""

    def export(case: Case, module: nn.Module, path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _program(case, module, opset, optimize=True).save(path)

    return export


def dynamo_unoptimized(opset: int = 18) -> Exporter:
    """The dynamo exporter without its optimizer."""

    def export(case: Case, module: nn.Module, path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _program(case, module, opset, optimize=False).save(path)

    return export


def _program(case: Case, module: nn.Module, opset: int, *, optimize: bool) -> Any:
    example = case.example()
    return torch.onnx.export(
        module,
        kwargs=example,
        dynamo=True,
        opset_version=opset,
        optimize=optimize,
        verbose=False,
        dynamic_shapes={name: {0: "batch"} for name in example},
        output_names=[case.loss.output or "output"],
    )


def _optimize(program: Any, module: nn.Module) -> None:
    graph = program.model.graph
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    kept = {}
    for name in set(tensors) & set(graph.initializers):
        kept[name] = graph.initializers.pop(name)
        graph.inputs.append(kept[name])
    constants = {name: value.const_value for name, value in kept.items()}
    for value in kept.values():
        value.const_value = None
    program.optimize()
    graph = program.model.graph
    for value in [value for value in graph.inputs if value.name in kept]:
        graph.inputs.remove(value)
        value.const_value = constants[value.name]
        graph.initializers[value.name] = value
