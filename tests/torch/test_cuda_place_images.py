"""torchvision's models with our operators for images on GPUs, channels last: the same loss and gradients."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchvision", reason="torchvision is not installed")
import numpy as np
import torch
import torchvision
from cuda_composed import composed
from differentiated_models import differentiated
from graph_build_models import run_graph, tensors_of

import ortflow
from ortflow.workflow.cuda.place import place
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir.edit import attributes_of, described, dims_of

CLASSES = 10
VIT = {"image_size": 64, "patch_size": 16, "num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
MODELS: dict[str, tuple[int, tuple[int, int, int], dict[str, int]]] = {
    # size of images; channels and sizes of the first kernel as it convolves; operators and how often they are there
    "resnet18": (64, (16, 4, 4), {"BatchGradientsOfSum": 7, "MaxPool": 1}),
    "bottlenecks": (64, (16, 4, 4), {"BatchGradientsOfSum": 4}),
    "squeezenet1_1": (64, (16, 2, 2), {"MaxPool": 0}),
    "vit": (64, (768, 1, 1), {}),
}
TOLERANCE = 0.05
"""Of a tensor's norm: where a Relu reads nearly 0, the last bit of an image changes some gradients by a few percent."""
FEW = 6
"""Samples, whose sums are rounded little."""


def module_of(name: str) -> Any:
    torch.manual_seed(0)
    if name == "vit":
        module = torchvision.models.VisionTransformer(**VIT, num_classes=CLASSES)
        torch.nn.init.normal_(module.heads.head.weight, std=0.1)
    elif name == "bottlenecks":
        module = torchvision.models.ResNet(torchvision.models.resnet.Bottleneck, [2, 1, 1, 1], num_classes=CLASSES)
    else:
        module = torchvision.models.get_model(name, num_classes=CLASSES)
    for each in module.modules():
        if isinstance(each, torch.nn.Dropout | torchvision.ops.StochasticDepth):
            each.p = 0.0
    return module


@pytest.mark.rotates
@pytest.mark.parametrize("name", MODELS)
def test_models_compute_the_same(name: str, tmp_path: Path) -> None:
    size, first, wanted = MODELS[name]
    example, path = torch.randn(2, 3, size, size), tmp_path / "m.onnx"
    ortflow.export_for_training(module_of(name), example, path, input_names=["x"])
    graphs, model = differentiated(path)
    placed = place(model, halves=True)
    kinds = described(placed.graph)
    convolutions = [node for node in placed.graph.node if node.op_type == "Convolution"]
    _, height, width, channels = dims_of(kinds[convolutions[0].input[1]]) or ()
    assert (channels, height, width) == first
    if first[0] > 8:
        assert attributes_of(convolutions[0])["strides"] == [1, 1]
    count = Counter(node.op_type for node in placed.graph.node if node.domain == CUDA_DOMAIN)
    assert {key: count[key] for key in wanted} == wanted, count
    random = np.random.default_rng(0)
    feeds = {
        **tensors_of(graphs),
        "x": random.normal(size=(FEW, 3, size, size)).astype("float32"),
        "labels": random.integers(0, CLASSES, FEW),
        "ortflow.loss_grad": np.array(1, np.float32),
    }
    expected, found = run_graph(compose(model), feeds), run_graph(compose(composed(placed)), feeds)
    assert found.keys() == expected.keys()
    largest = max(float(np.linalg.norm(array)) for array in expected.values())
    for key, array in expected.items():
        # Some gradients are 0 up to rounding, for example those of biases in front of a normalisation.
        least = max(float(np.linalg.norm(array)), 1e-3 * largest)
        error = float(np.linalg.norm(found[key] - array)) / least
        assert error < TOLERANCE, (key, error)
