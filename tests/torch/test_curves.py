"""Training an export through ortflow's graphs follows PyTorch's own run: loss curve, parameters, running statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
import numpy as np
from case import Case
from flat import FlatRun
from reference import OPTIMIZER, STEPS, torch_gradients
from workshop import CASES, Workshop

LOSS_TOLERANCE = 3e-6
"""Relative to losses above 1, absolute below."""
NORM_TOLERANCE = 2e-5
"""Relative to norms above 1, absolute below."""

Follow = Callable[[str, str, int], None]


def canonical(case: Case) -> dict[str, str]:
    """Every name that an exporter may give a parameter or buffer -> its first name in the module."""
    module = case.module()
    names = {}
    for tensors in (module.named_parameters, module.named_buffers):
        first = {id(tensor): name for name, tensor in tensors()}
        names |= {name: first[id(tensor)] for name, tensor in tensors(remove_duplicate=False)}
    return names | {f"module.{alias}": name for alias, name in names.items()}


def difference(value: Any, expected: Any) -> float:
    """Largest difference: relative where `expected` is above 1, absolute below."""
    value, expected = np.asarray(value, np.float64), np.asarray(expected, np.float64)
    return float(np.max(np.abs(value - expected) / np.maximum(1, np.abs(expected)), initial=0))


@pytest.fixture
def follow(workshop: Workshop, record_property: Callable[[str, object], None]) -> Follow:
    """Export, train, compare."""

    def check(name: str, exporter: str, opset: int) -> None:
        graphs, case, expected = workshop.graphs(name, exporter, opset), CASES[name], workshop.curve(name)
        run, names, module = FlatRun(graphs, OPTIMIZER), canonical(case), case.module()
        states = {e.name: names[e.name] for e in graphs.index if e.tensor.group == "state"}
        for own, buffer in states.items():
            # TorchScript's export runs the model once and so changes the statistics: start where PyTorch does.
            run.view("parameters", own)[...] = module.get_buffer(buffer).numpy()

        losses = [run.step(batch) for batch in case.batches(STEPS)]

        norms = run.norms()
        trained = [e.name for e in graphs.index if e.tensor.group in ("decay", "no_decay")]
        known = {names[own]: norms[own] for own in trained if own in names}
        missing = {n for n, p in module.named_parameters() if p.requires_grad} - known.keys()
        # A weight that TorchScript has folded is transposed and has a made-up name: only its norm identifies it.
        nameless = sorted(norms[own] for own in trained if own not in names)
        assert len(nameless) == len(missing) if exporter == "torchscript-default" else not nameless and not missing
        assert set(states.values()) == set(expected.statistics)
        worst = {
            "loss": difference(losses, expected.losses),
            "norm": max(
                difference(nameless, sorted(expected.norms[parameter] for parameter in missing)),
                *(difference(norm, expected.norms[n]) for n, norm in known.items() if not case.is_free(n)),
            ),
            "statistics": max(
                (
                    difference(run.view("parameters", own), expected.statistics[buffer])
                    for own, buffer in states.items()
                    if not case.is_free(buffer)
                ),
                default=0.0,
            ),
        }
        record_property("differences", {"model": f"{name}, {exporter} {opset}", **worst})
        assert worst["loss"] <= LOSS_TOLERANCE
        assert worst["norm"] <= NORM_TOLERANCE
        assert worst["statistics"] <= NORM_TOLERANCE

    return check


@pytest.mark.parametrize("name", CASES)
def test_export_for_training(name: str, follow: Follow) -> None:
    follow(name, "for_training", 18)


@pytest.mark.parametrize("name", [name for name in CASES if name != "batchnorm"])  # which TorchScript cannot export
def test_torchscript(name: str, follow: Follow) -> None:
    follow(name, "torchscript", 17)


@pytest.mark.parametrize(
    ("name", "opset"),
    [("mobilenet", 13), ("lstm", 13), ("gpt2", 14), ("bert", 15), ("vit", 16), ("t5", 18), ("gpt2", 19), ("bert", 20)],
)
def test_opsets_of_torchscript(name: str, opset: int, follow: Follow) -> None:
    follow(name, "torchscript", opset)


@pytest.mark.parametrize("name", ["gpt2", "vit", "convnext"])
def test_torchscript_with_its_defaults(name: str, follow: Follow) -> None:
    """In evaluation mode it merges equal weights through Identity nodes, which ortflow separates, and folds others."""
    follow(name, "torchscript-default", 17)


@pytest.mark.parametrize(
    ("name", "opset"),
    [("groupnorm", 17), ("gpt2", 18), ("groupnorm", 19), ("gpt2", 20), ("gpt2", 21), ("groupnorm", 21), ("llama", 23)],
)
def test_opsets_of_dynamo(name: str, opset: int, follow: Follow) -> None:
    follow(name, "dynamo", opset)


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, workshop: Workshop) -> None:
    run = FlatRun(workshop.graphs(name, "for_training", 18), OPTIMIZER)
    _, weight = run.gradients(next(CASES[name].batches(1)))
    for parameter, expected in torch_gradients(CASES[name]).items():
        gradient = run.view("gradients", parameter) / weight
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-6, err_msg=parameter)
        if CASES[name].is_free(parameter):
            assert expected.abs().max() < 1e-6
