"""The GPT of examples/gpt in PyTorch, with the same weights, trained as its users would: the peer of step.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


@dataclass(frozen=True)
class Sizes:
    """What of the example's Config a module needs."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int


def dropped(x: Tensor, share: float) -> Tensor:
    """Dropout, if there is any."""
    return F.dropout(x, share) if share else x


class Block(nn.Module):
    """Attention and feed-forward, each on a normalised copy and added back."""

    def __init__(self, sizes: Sizes, dropout: float) -> None:
        super().__init__()
        width = sizes.width
        self.heads, self.dropout = sizes.heads, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        merged = self.attn["c_attn"](self.ln_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = merged.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        mixed = self.attn["c_proj"](mixed.transpose(1, 2).reshape(batch, length, width))
        x = x + dropped(mixed, self.dropout)
        return x + dropped(self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)))), self.dropout)


class Gpt(nn.Module):
    """Tokens and labels to the mean cross-entropy, in training: with dropout, if any."""

    def __init__(self, sizes: Sizes, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.wte, self.wpe = nn.Embedding(sizes.vocabulary, sizes.width), nn.Embedding(sizes.context, sizes.width)
        self.h = nn.ModuleList(Block(sizes, dropout) for _ in range(sizes.layers))
        self.ln_f = nn.LayerNorm(sizes.width)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = dropped(self.wte(tokens) + self.wpe.weight[: tokens.shape[1]], self.dropout)
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def load(model: Gpt, weights: Mapping[str, npt.NDArray[np.float32]]) -> None:
    """Fill the module with the graph's tensors by name; the graph keeps a linear layer's weight as [in, out]."""
    for name, parameter in model.named_parameters():
        values = torch.tensor(weights[name])
        linear = values.ndim == 2 and not name.startswith(("wte", "wpe"))
        parameter.data.copy_(values.T if linear else values)


class TorchStep:
    """One training step: forward, backward, clip, fused AdamW; `precision` fp32, or bf16 by autocast.

    `distributed`: the gradients are averaged over the ranks of torch.distributed's default group.
    """

    def __init__(
        self,
        sizes: Sizes,
        weights: Mapping[str, npt.NDArray[np.float32]],
        *,
        rate: float,
        weight_decay: float,
        clip: float,
        compiled: bool,
        device: str = "cpu",
        precision: str = "fp32",
        mode: str | None = None,
        distributed: bool = False,
        dropout: float = 0.0,
    ) -> None:
        self._model, self._clip, self._device = Gpt(sizes, dropout), clip, device
        load(self._model, weights)
        self._model.to(device)
        parameters = list(self._model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=rate, fused=True)
        self._autocast = {
            "device_type": torch.device(device).type,
            "dtype": torch.bfloat16,
            "enabled": precision == "bf16",
        }
        whole: nn.Module = self._model
        if distributed:
            whole = nn.parallel.DistributedDataParallel(
                whole, device_ids=[torch.device(device).index], gradient_as_bucket_view=True
            )
        model = torch.compile(whole, mode=mode) if compiled else whole
        self._forward: Callable[[Tensor, Tensor], Tensor] = model

    def __call__(
        self,
        tokens: npt.NDArray[np.int64] | torch.Tensor,
        labels: npt.NDArray[np.int64] | torch.Tensor,
        *,
        rate: float | None = None,
    ) -> float:
        """The loss before the update, at a learning rate of its own if `rate` is given."""
        for group in self._optimizer.param_groups if rate is not None else ():
            group["lr"] = rate
        with torch.autocast(**self._autocast):
            loss = self._forward(*(torch.as_tensor(array).to(self._device) for array in (tokens, labels)))
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.detach())
