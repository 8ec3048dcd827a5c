"""Trains with ORTModule in DeepSpeed and without ORTModule, on two ranks; prints the differences.

Arguments: stage-1, stage-2 and stage-3 (the sample of ONNX Runtime's guide with that ZeRO stage), and
pipeline, after which DeepSpeed 0.19.8 makes no other engine in the process. Prints
`difference name of-losses of-parameters distance` on rank 0, as fractions of the largest value: the last is how far the
parameters have moved. Prints `refused name message` where ORTModule raises a UserError.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import distributed, nn

from ortflow.torch import ORTModule
from ortflow.torch.optim import FP16_Optimizer, FusedAdam
from ortflow.torch.pipe import ORTPipelineModule
from ortflow.workflow.errors import UserError

STEPS, BATCH, PARTS = 10, 8, 2
# Otherwise DeepSpeed 0.19.8 looks for compilers, and compiles its sums over shared memory, for minutes.
deepspeed.ops.__compatible_ops__ = {}
torch.set_num_threads(1)
deepspeed.init_distributed("gloo", verbose=False)
rank = distributed.get_rank()


def layers() -> list[nn.Module]:
    """The same network each time."""
    torch.manual_seed(1)
    return [nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)]


def samples(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step."""
    inputs = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(step))
    return inputs, inputs.square().sum(1, keepdim=True)


criterion = nn.MSELoss()


class Result(NamedTuple):
    """Of a training: losses of all steps, parameters of this rank before and after them."""

    losses: list[float]
    first: torch.Tensor
    last: torch.Tensor


def zero(stage: int, *, graphs: bool) -> Result:
    """The guide's sample."""
    model: nn.Module = nn.Sequential(*layers())
    if graphs:
        model = ORTModule(model)
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    config = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": 1,
        # Stage 3 would otherwise replace torch.nn.functional.linear for the rest of the process.
        "zero_optimization": {"stage": stage, "memory_efficient_linear": False},
        "zero_allow_untested_optimizer": True,
    }
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    optimizer = FP16_Optimizer(optimizer)
    first, losses = state(engine), []
    for step in range(STEPS):
        inputs, labels = (each.chunk(2)[rank] for each in samples(step))
        outputs = engine(inputs)
        loss = criterion(outputs, labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return Result(losses, first, state(engine))


def pipeline(*, graphs: bool) -> Result:
    """Two stages."""
    kind = ORTPipelineModule if graphs else PipelineModule
    model = kind(layers(), num_stages=2, partition_method="parameters", base_seed=1234, loss_fn=criterion)
    config = {
        "train_micro_batch_size_per_gpu": BATCH // PARTS,
        "gradient_accumulation_steps": PARTS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "gradient_clipping": 0.0,
    }
    engine = deepspeed.initialize(model=model, model_parameters=[*model.parameters()], config=config)[0]
    first, losses = state(engine), []
    for step in range(STEPS):
        inputs, labels = samples(step)
        batches = zip(inputs.chunk(PARTS), labels.chunk(PARTS), strict=True)
        losses.append(float(engine.train_batch(iter(batches))))
    return Result(losses, first, state(engine))


def state(engine: Any) -> torch.Tensor:
    """All parameters of this rank, in one tensor."""
    return torch.cat([parameter.detach().flatten().clone() for parameter in engine.module.parameters()])


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, of the largest value."""
    assert a.shape == b.shape
    assert b.numel()
    return float((a - b).abs().max() / b.abs().max())


def trained(name: str, *, graphs: bool) -> Result:
    """One of the cases."""
    return pipeline(graphs=graphs) if name == "pipeline" else zero(int(name[-1]), graphs=graphs)


def main() -> None:
    """Compare."""
    for name in sys.argv[1:]:
        try:
            found = trained(name, graphs=True)
        except UserError as error:
            say("refused", name, error)
            continue
        expected = trained(name, graphs=False)
        mine = [
            difference(torch.tensor(found.losses), torch.tensor(expected.losses)),
            difference(found.last, expected.last),
            difference(expected.last, expected.first),
        ]
        everyone: list[list[float]] = [[]] * distributed.get_world_size()
        distributed.all_gather_object(everyone, mine)
        say("difference", name, *(f"{max(values):.1e}" for values in zip(*everyone, strict=True)))
    distributed.barrier()
    sys.stdout.flush()
    # Gloo's threads abort some processes at the interpreter's end.
    os._exit(0)


def say(*words: object) -> None:
    """Print a line on rank 0."""
    if rank == 0:
        print(*words, flush=True)


if __name__ == "__main__":
    main()
