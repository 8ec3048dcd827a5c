"""Batches that are copied to a real GPU while it computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from graph_build_models import built
from queued import network, outcomes_of, state_of, steps_of
from test_cuda_step import trainer_on

from ortflow.workflow.data.batches import StepBatch
from ortflow.workflow.data.epoch_positions import Position
from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.device.prefetch import WORTHWHILE, Prefetch
from ortflow.workflow.steps.shard import prefetched

ROWS = 30_000


@pytest.mark.parametrize("accumulation", [1, 3])
def test_prefetched_batches_give_the_same_bits(
    device: CudaDevice, tmp_path: Path, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    network(tmp_path / "model.onnx")
    graphs = built(tmp_path / "model.onnx", resources__gpus_per_rank=1)
    steps = steps_of([[ROWS] * accumulation] * 30)
    assert all(array.nbytes > WORTHWHILE for array in steps[0][0].arrays.values())

    def as_steps() -> Iterator[StepBatch]:
        for batches in steps:
            yield StepBatch(batches, 0, ROWS * accumulation, Position(0, 0), epoch_end=False)

    plain, _ = trainer_on(device, graphs, train__gradient_accumulation=accumulation)
    expected = [outcome.loss for outcome in outcomes_of(plain, steps)]
    sent: list[int] = []
    send = Prefetch.send
    monkeypatch.setattr(Prefetch, "send", lambda self, array: sent.append(array.nbytes) or send(self, array))
    trainer, log = trainer_on(device, graphs, train__gradient_accumulation=accumulation)
    with prefetched(as_steps(), trainer.prefetch, worthwhile=0) as ahead:
        found = [outcomes_of(trainer, [step.micro_batches], number)[0].loss for number, step in enumerate(ahead)]
    assert found == expected
    for name, flat in state_of(trainer).items():
        np.testing.assert_array_equal(flat, state_of(plain)[name], err_msg=name)
    assert len(sent) == 2 * accumulation * len(steps)
    assert "a micro-batch is captured as a CUDA graph" in log
