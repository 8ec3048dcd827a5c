"""Exports LSTMs with a projection (`proj_size`) as LSTMs without one, because ONNX has no projection.

Called by `ortflow.exporter.trace` in place of `torch.nn.LSTM.forward`. With the projection P, the gates read
W_hh (P h) = (W_hh P) h: this is an LSTM with the recurrent weights W_hh P, whose output is projected afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def lstm_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement of `torch.nn.LSTM.forward`, with the same arguments and results."""

    def forward(self: Any, input: Any, hx: Any = None) -> Any:
        import torch

        if not self.proj_size or not isinstance(input, torch.Tensor):
            return original(self, input, hx)
        if hx is not None:
            raise NotImplementedError("an LSTM with proj_size that starts from a given state has no ONNX form")
        batch = 0 if self.batch_first else 1
        x = input if input.ndim == 3 else input.unsqueeze(batch)
        hidden: list[Any] = []
        cells: list[Any] = []
        for layer in range(self.num_layers):
            if layer and self.dropout:
                x = torch.nn.functional.dropout(x, self.dropout, self.training)
            x, last, cell = _layer(self, x, layer, x.shape[batch])
            hidden, cells = [*hidden, *last], [*cells, cell]
        states = (torch.stack(hidden), torch.cat(cells))
        if input.ndim == 3:
            return x, states
        return x.squeeze(batch), tuple(state.squeeze(1) for state in states)

    return forward


def _layer(lstm: Any, x: Any, layer: int, batch: int) -> tuple[Any, list[Any], Any]:
    """A layer's projected outputs, the last of each direction, and the last cells [directions, batch, hidden]."""
    import torch

    names = [f"l{layer}", f"l{layer}_reverse"][: 2 if lstm.bidirectional else 1]
    projections = [getattr(lstm, f"weight_hr_{name}") for name in names]
    weights = []
    for name, projection in zip(names, projections, strict=True):
        weights += [getattr(lstm, f"weight_ih_{name}"), getattr(lstm, f"weight_hh_{name}") @ projection]
        weights += [getattr(lstm, f"bias_{kind}_{name}") for kind in ("ih", "hh") if lstm.bias]
    zeros = x.new_zeros(len(names), batch, lstm.hidden_size)
    outputs, last, cells = torch.lstm(
        x, (zeros, zeros), weights, lstm.bias, 1, 0.0, lstm.training, lstm.bidirectional, lstm.batch_first
    )
    halves = zip(outputs.split(lstm.hidden_size, -1), projections, strict=True)
    projected = torch.cat([half @ projection.t() for half, projection in halves], -1)
    return projected, [state @ projection.t() for state, projection in zip(last, projections, strict=True)], cells
