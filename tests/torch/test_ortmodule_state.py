"""An ORTModule notices what a user changes between two calls; the comparison of the first call would not."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
import torch
from torch import nn

from ortflow.torch import ORTModule
from ortflow.workflow.errors import UserError


class Stateful(nn.Module):
    """Reads attributes of many kinds."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.sizes, self.options, self.act, self.shift = [1.0, 2.0], {"scale": {"by": 2.0}}, torch.tanh, torch.ones(4)
        self.shifts = [torch.ones(4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.first(x)) * self.sizes[0] * self.options["scale"]["by"] + self.second(x) * self.factor
        return (y + self.shift * self.shifts[0]) * getattr(self, "late", 1.0)


def double(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


CHANGES: dict[str, Callable[[Any], object]] = {
    "untied": lambda m: setattr(m.second, "weight", nn.Parameter(torch.ones(4, 4))),
    "first of two tied": lambda m: setattr(m.first, "weight", nn.Parameter(torch.ones(4, 4))),
    "no bias": lambda m: setattr(m.first, "bias", None),
    "list": lambda m: m.sizes.__setitem__(0, 3.0),
    "dict in a dict": lambda m: m.options["scale"].update(by=5.0),
    "function": lambda m: setattr(m, "act", torch.sigmoid),
    "new attribute": lambda m: setattr(m, "late", 3.0),
    "forward of a part": lambda m: setattr(m.first, "forward", lambda x: x * 5),
    "tensor": lambda m: setattr(m, "shift", torch.zeros(4)),
    "storage of a tensor": lambda m: setattr(m.shift, "data", torch.zeros(4)),
    "tensor of a list": lambda m: m.shifts[0].mul_(2),
    "hook": lambda m: m.first.register_forward_hook(double),
}


def of(module: Any, x: torch.Tensor) -> list[Any]:
    module.zero_grad()
    y = module(x)
    y.square().sum().backward()
    return [y, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_a_change_between_calls(name: str) -> None:
    torch.manual_seed(0)
    eager, x = Stateful(), torch.randn(3, 4)
    module = ORTModule(copy.deepcopy(eager), verify=False)
    of(module, x)
    for each in (eager, module):
        CHANGES[name](each)
    torch.testing.assert_close(of(module, x), of(eager, x), rtol=1e-4, atol=1e-4)
    count = module._engine.count
    of(module, x)
    assert module._engine.count == count


def test_attributes_of_the_class_and_modes() -> None:
    eager, x = Stateful(), torch.randn(3, 4)
    eager.first.bias = None
    module = ORTModule(copy.deepcopy(eager), verify=False)
    with torch.no_grad():
        module(x)
        Stateful.factor = 3.0
        try:
            torch.testing.assert_close(module(x), eager(x))
        finally:
            Stateful.factor = 1.0
        for each in (eager, module):
            each.first.bias = nn.Parameter(torch.ones(4))
        torch.testing.assert_close(module(x), eager(x))
    module.training = False
    assert not module.module.training


class Drawing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * random.random()


class Aside(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.loss = y.mean()
        return y


def test_what_a_graph_would_leave_out_is_said() -> None:
    x = torch.randn(3, 4)
    with pytest.raises(UserError, match="Python's module random"):
        ORTModule(Drawing(4, 4))(x)
    for change in (lambda m: m.shift.requires_grad_(), lambda m: m.shifts.__setitem__(0, nn.Parameter(torch.ones(4)))):
        module = Stateful()
        change(module)
        with pytest.raises(UserError, match="neither a parameter of the module nor an argument"):
            ORTModule(module)(x)
    hooked = Stateful()
    hooked.register_full_backward_hook(lambda *_: None)
    with pytest.raises(UserError, match="backward hook"):
        ORTModule(hooked)(x)
    with pytest.warns(UserWarning, match="forward changes the attribute 'loss'"):
        ORTModule(Aside(4, 4))(x)


@pytest.mark.parametrize("options", [{"momentum": None}, {"track_running_stats": False}])
def test_other_running_statistics(options: dict[str, Any]) -> None:
    eager = nn.Sequential(nn.BatchNorm1d(4, **options), nn.Linear(4, 2))
    module = ORTModule(copy.deepcopy(eager), verify=False)
    for x in torch.randn(3, 5, 4):
        torch.testing.assert_close(of(module, x), of(eager, x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dict(module.named_buffers()), dict(eager.named_buffers()))
    eager.eval(), module.eval()
    torch.testing.assert_close(module(x), eager(x))


def test_a_batch_without_rows() -> None:
    eager = nn.Linear(4, 2)
    module = ORTModule(copy.deepcopy(eager))
    for rows in (3, 0, 1):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(of(module, x), of(eager, x))


class Masks(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.bernoulli(torch.full((200, 1), 0.3))


def test_random_numbers_of_constants_are_drawn_at_each_call() -> None:
    module, x = ORTModule(Masks(4, 4), verify=False), torch.randn(200, 4)
    first, second = (module(x) != 0 for _ in range(2))
    assert not torch.equal(first, second)
    assert 0.15 < float(first.float().mean()) < 0.45


def test_data_replaced_before_backward_and_spectral_norm() -> None:
    torch.manual_seed(0)
    eager = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 2))
    module, gradients = ORTModule(copy.deepcopy(eager), verify=False), []
    for each in (eager, module):
        x = torch.ones(3, 4, requires_grad=True)
        y = each(x)
        each.get_submodule("2").weight.data = torch.ones(2, 4)
        y.sum().backward()
        gradients.append([x.grad, *each.buffers()])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)


class Listed(nn.Module):
    """Reads its parameter through a list, as torch.nn.LSTM does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.listed = [self.layer.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS.append(x.shape)
        return x @ self.listed[0].T + self.layer.bias


CALLS: list[torch.Size] = []


def test_a_step_of_a_parameter_in_a_list_needs_no_other_graph() -> None:
    module = ORTModule(Listed(), verify=False)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    counts = []
    for x in torch.randn(3, 5, 4):
        expected = x @ module.layer.weight.T + module.layer.bias
        result = module(x)
        torch.testing.assert_close(result, expected)
        result.sum().backward()
        optimizer.step()
        counts.append(len(CALLS))
    assert counts[0] == counts[-1] > 0


class NextToken(nn.Module):
    """Seven tokens, of which five are classes. The last one of a row is not an index, the first one no label."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(7, 4), nn.Linear(4, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.layer(self.table(tokens[:, :-1])).gather(2, tokens[:, :-1, None].clamp(max=4).expand(-1, -1, 5))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].reshape(-1))


def test_labels_and_indices_out_of_range_are_refused_as_in_pytorch() -> None:
    eager = NextToken()
    module = ORTModule(copy.deepcopy(eager), verify=False)
    module(torch.tensor([[0, 1, 2], [3, 4, 0]]))
    for tokens in ([[6, 4, -100], [5, 0, 1]], [[0, 0, 4]]):
        torch.testing.assert_close(module(torch.tensor(tokens)), eager(torch.tensor(tokens)))
    for tokens, says in (
        ([[0, 1, 5]], r"a label at test_ortmodule_state.py line \d+ is 5, .* give 0 to 4, or -100"),
        ([[0, 1, -1]], "a label at .* is -1"),
        ([[7, 1, 2]], "an index of a table at .* is 7, which is out of range; give 0 to 6$"),
        ([[-1, 1, 2]], "an index of a table at .* is -1"),
    ):
        with pytest.raises((IndexError, RuntimeError)):
            eager(torch.tensor(tokens))
        with pytest.raises(UserError, match=says):
            module(torch.tensor(tokens))
