"""The GPT of `torch_gpt` divided over two ranks by PyTorch: its pipelining, and its tensor parallelism.

The peers of cuda_layouts.py. bf16 by autocast, AdamW, clipping; torch.distributed is initialised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch_gpt import Block, Gpt, Sizes, load

Weights = Mapping[str, Any]
Batches = Sequence[tuple[Any, Any]]


class Half(nn.Module):
    """The first layers with the embeddings, or the others with the scores."""

    def __init__(self, model: Gpt, rank: int, first: int) -> None:
        super().__init__()
        self._rank = rank
        self.wte = model.wte
        self.h = model.h[first:] if rank else model.h[:first]
        if rank:
            self.ln_f = model.ln_f
        else:
            self.wpe = model.wpe

    def forward(self, x: Tensor) -> Tensor:
        if not self._rank:
            x = self.wte(x) + self.wpe.weight[: x.shape[1]]
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight) if self._rank else x


class Pipelining:
    """A step of torch.distributed.pipelining on two ranks, with `first` layers on the first; how: `1f1b` or `gpipe`."""

    def __init__(
        self, sizes: Sizes, weights: Weights, device: torch.device, how: str, first: int, *, compiled: bool,
        rate: float, weight_decay: float, clip: float,
    ) -> None:  # fmt: skip
        self._rank, self._device, self._how, self._clip = dist.get_rank(), device, how, clip
        model = Gpt(sizes)
        load(model, weights)
        self._module = Half(model, self._rank, first).to(device)
        self._optimizer = optimizer_of(self._module, rate, weight_decay)
        self._run: Any = torch.compile(self._module) if compiled else self._module
        self._schedules: dict[int, Any] = {}

    def _schedule(self, micro: int) -> Any:
        if micro not in self._schedules:
            from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

            def loss(scores: Tensor, labels: Tensor) -> Tensor:
                return F.cross_entropy(scores.flatten(0, 1), labels.flatten())

            stage = PipelineStage(self._run, self._rank, 2, self._device)
            kind = Schedule1F1B if self._how == "1f1b" else ScheduleGPipe
            self._schedules[micro] = kind(stage, micro, loss_fn=loss)
        return self._schedules[micro]

    def __call__(self, given: Batches) -> float:
        """The loss before the update."""
        tokens, labels = (
            torch.cat([torch.from_numpy(each[place]) for each in given]).to(self._device) for place in (0, 1)
        )
        losses: list[Tensor] = []
        with torch.autocast(self._device.type, torch.bfloat16):
            if self._rank:
                self._schedule(len(given)).step(target=labels, losses=losses)
            else:
                self._schedule(len(given)).step(tokens)
        # The schedule has divided the gradients by the number of micro-batches.
        dist.all_reduce(self._module.wte.weight.grad)
        gradients = [parameter.grad for parameter in self._module.parameters()]
        mine = [
            parameter.grad
            for name, parameter in self._module.named_parameters()
            if not (self._rank and name == "wte.weight")
        ]
        # As clip_grad_norm_ does, over both ranks.
        squares = torch.stack(torch._foreach_norm(mine)).square().sum()
        dist.all_reduce(squares)
        torch._foreach_mul_(gradients, torch.clamp(self._clip / (squares.sqrt() + 1e-6), max=1.0))
        self._optimizer.step()
        self._optimizer.zero_grad()
        mean = torch.stack(losses).mean().detach() if self._rank else torch.zeros((), device=self._device)
        dist.all_reduce(mean)
        return float(mean)


class DividedBlock(nn.Module):
    """A block whose heads and hidden units are divided: c_attn has the queries, keys and values of a head together."""

    def __init__(self, block: Block, ranks: int) -> None:
        super().__init__()
        self.heads = block.heads // ranks
        self.ln_1, self.ln_2, self.attn, self.mlp = block.ln_1, block.ln_2, block.attn, block.mlp
        packed = self.attn["c_attn"]
        for parameter in (packed.weight, packed.bias):
            parts = parameter.data.reshape(3, block.heads, -1, *parameter.shape[1:])
            parameter.data = parts.transpose(0, 1).reshape(parameter.shape).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.attn["c_attn"](self.ln_1(x)).view(batch, length, self.heads, 3, -1).permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["c_proj"](mixed.transpose(1, 2).reshape(batch, length, -1))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class TensorParallel:
    """A step of parallelize_module on all ranks: columns then rows, the vocabulary, and the loss over its shares."""

    def __init__(
        self, sizes: Sizes, weights: Weights, device: torch.device, *, compiled: bool,
        rate: float, weight_decay: float, clip: float,
    ) -> None:  # fmt: skip
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        self._device, self._clip, ranks = device, clip, dist.get_world_size()
        model = Gpt(sizes)
        load(model, weights)
        model.h = nn.ModuleList(DividedBlock(block, ranks) for block in model.h)  # type: ignore[arg-type]
        self._mesh = init_device_mesh(device.type, (ranks,))
        plan = {
            "wte": RowwiseParallel(input_layouts=Replicate()),
            "h.*.attn.c_attn": ColwiseParallel(), "h.*.attn.c_proj": RowwiseParallel(),
            "h.*.mlp.c_fc": ColwiseParallel(), "h.*.mlp.c_proj": RowwiseParallel(),
        }  # fmt: skip
        self._module = parallelize_module(model.to(device), self._mesh, plan)
        self._optimizer = optimizer_of(self._module, rate, weight_decay)
        self._hidden = torch.compile(self._states) if compiled else self._states

    def _states(self, tokens: Tensor) -> Tensor:
        x = self._module.wte(tokens) + self._module.wpe.weight[: tokens.shape[1]]
        for block in self._module.h:
            x = block(x)
        hidden: Tensor = self._module.ln_f(x)
        return hidden

    def __call__(self, given: Batches) -> float:
        """The loss before the update."""
        from torch.distributed.tensor import DTensor, Replicate
        from torch.distributed.tensor.parallel import loss_parallel

        total = torch.zeros((), device=self._device)
        for arrays in given:
            tokens, labels = (torch.from_numpy(array).to(self._device) for array in arrays)
            with torch.autocast(self._device.type, torch.bfloat16), loss_parallel():
                hidden = DTensor.from_local(self._hidden(tokens), self._mesh, [Replicate()])
                scores = F.linear(hidden, self._module.wte.weight)
                loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten()) / len(given)
                loss.backward()
            total += loss.detach().to_local() if isinstance(loss, DTensor) else loss.detach()
        self._clip_gradients()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(total)

    def _clip_gradients(self) -> None:
        """As clip_grad_norm_ does, which takes no mixture of divided and whole gradients."""
        from torch.distributed.tensor import DTensor

        gradients = [parameter.grad for parameter in self._module.parameters()]
        divided = [each.to_local() for each in gradients if isinstance(each, DTensor) and not _is_whole(each)]
        whole = [each.to_local() if isinstance(each, DTensor) else each for each in gradients if _is_whole(each)]
        squares = torch.stack(torch._foreach_norm(divided)).square().sum()
        dist.all_reduce(squares)
        squares += torch.stack(torch._foreach_norm(whole)).square().sum()
        torch._foreach_mul_(divided + whole, torch.clamp(self._clip / (squares.sqrt() + 1e-6), max=1.0))


def _is_whole(gradient: Any) -> bool:
    """Whether every rank has all of it."""
    return not any(place.is_shard() for place in getattr(gradient, "placements", ()))


def optimizer_of(module: nn.Module, rate: float, weight_decay: float) -> torch.optim.AdamW:
    """Without weight decay for vectors. Divided and whole parameters are in different groups."""
    groups: dict[tuple[bool, type], list[nn.Parameter]] = {}
    for each in module.parameters():
        groups.setdefault((each.ndim > 1, type(each.data)), []).append(each)
    return torch.optim.AdamW(
        [
            {"params": members, "weight_decay": weight_decay if matrices else 0.0}
            for (matrices, _), members in groups.items()
        ],
        lr=rate,
        fused=True,
    )
