"""Gradients through Dropout, which draws a new mask in every run."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from gradients import model_of

from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.onnx_runtime import onnxruntime

DATA = np.random.default_rng(0).uniform(0.5, 1, (20, 30)).astype(np.float32)


def run(inputs: dict[str, np.ndarray | None], feeds: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The node's output and the gradient of its input, in one run."""
    model, _ = differentiate(model_of("Dropout", inputs, ["x"]), ["x"], "loss")
    model.graph.output.append(onnx.ValueInfoProto(name="y0"))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    y, gradient = session.run(["y0", "x_grad"], {"x": DATA, **feeds})
    return y, gradient


@pytest.mark.parametrize("training", ["training", "xtraining"])
@pytest.mark.parametrize("ratio", ["ratio", "xratio", None])
def test_what_is_kept_has_a_gradient(ratio: str | None, training: str) -> None:
    inputs = {"x": DATA, ratio or "none": np.float32(0.2) if ratio else None, training: np.array(True)}
    feeds = {name: np.asarray(inputs[name]) for name in (ratio, training) if name and name.startswith("x")}
    y, gradient = run(inputs, feeds)
    dropped = 0.2 if ratio else 0.5
    kept = y != 0
    assert abs(kept.mean() - (1 - dropped)) < 0.1
    # The loss is the sum of (y^2 + y) / 2.
    np.testing.assert_allclose(gradient, np.where(kept, (y + 0.5) / (1 - dropped), 0), rtol=1e-5)


def test_outside_training_all_is_kept() -> None:
    for inputs, feeds in (
        ({"x": DATA}, {}),
        ({"x": DATA, "ratio": np.float32(0.3)}, {}),
        ({"x": DATA, "ratio": np.float32(0.3), "training": np.array(False)}, {}),
        ({"x": DATA, "ratio": np.float32(0.3), "xtraining": np.array(False)}, {"xtraining": np.array(False)}),
        ({"x": DATA, "ratio": np.float32(0), "training": np.array(True)}, {}),
    ):
        y, gradient = run(inputs, feeds)
        np.testing.assert_array_equal(y, DATA)
        np.testing.assert_allclose(gradient, DATA + 0.5, rtol=1e-6)


def test_one_seed_draws_one_mask() -> None:
    inputs = {"x": DATA, "ratio": np.float32(0.5), "training": np.array(True)}
    found = []
    for seed in (1, 1, 2):
        onnxruntime.set_seed(seed)
        found.append(run(inputs, {})[1])
    np.testing.assert_array_equal(found[0], found[1])
    assert (found[0] != found[2]).any()
