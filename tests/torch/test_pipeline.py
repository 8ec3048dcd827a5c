"""Exports of transformers cut into pipeline stages: loss and gradients of the undivided graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
from kernels import LIBRARY
from stage_models import assert_same, chain, opened

from ortflow.workflow.assembly.stages import Division

if TYPE_CHECKING:
    from pathlib import Path

    from workshop import Workshop


NAMES = ["gpt2", "bert", "llama", "t5"]
# PyTorch's newer exporter cannot export T5.
FURTHER = [("gpt2", "dynamo"), ("bert", "torchscript"), ("llama", "dynamo"), ("t5", "torchscript")]


@pytest.mark.parametrize(("name", "exporter"), [*((name, "for_training") for name in NAMES), *FURTHER])
def test_stages_of_an_export(name: str, exporter: str, workshop: Workshop, tmp_path: Path) -> None:
    from case import BATCH
    from workshop import CASES

    case = CASES[name]
    path = workshop.model(name, exporter, 17 if exporter == "torchscript" else 18)
    model = opened(path, case.loss.model_dump(), model__labels=list(case.labels))
    feeds = {**model.source.tensors, **next(case.batches(1))}
    whole = model.undivided(feeds)
    for count in (2, 3, 4):
        made = model.divided(Division(count, rows=BATCH, length=12), tmp_path)
        assert len(made.stages.stages) == count
        assert all(stage.sends for stage in made.stages.stages[:-1])
        assert_same(chain(made, feeds), whole)
        if count == 3 and LIBRARY.path is not None:
            assert_same(chain(made, feeds, kernels=True), whole)
