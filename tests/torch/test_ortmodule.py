"""ORTModule behaves as the PyTorch module that it wraps: autograd, modes, names, structures of arguments, errors."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
import numpy as np
import torch
from ortmodule_models import Gpt, Images
from torch import nn

from ortflow.torch import DebugOptions, LogLevel, ORTModule, comparison, verify
from ortflow.torch.settings import settings
from ortflow.torch.structure import flat
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.autodiff.rules import RULES


def gradients_of(module: nn.Module) -> list[Any]:
    return [parameter.grad for parameter in module.parameters()]


def close(actual: Any, expected: Any, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


class Small(nn.Module):
    """Tied and frozen parameters, one that is not used, a container as argument, several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(3, 3)
        self.second.bias = self.first.bias
        self.first.weight.requires_grad_(False)

    def forward(self, given: dict[str, torch.Tensor], *, double: bool = False) -> dict[str, Any]:
        y = self.second(self.first(given["x"]).tanh())
        return {"y": y * 2 if double else y, "positive": (given["x"] > 0).sum(), "three": 3, "same": given["x"],
                "fixed": y.detach()}  # fmt: skip


@pytest.fixture(scope="module")
def both() -> tuple[Small, ORTModule]:
    torch.manual_seed(2)
    module = Small()
    return copy.deepcopy(module), ORTModule(module)


def test_several_outputs_and_gradients_of_parameters_and_inputs(both: tuple[Small, ORTModule]) -> None:
    eager, module = both
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        results = []
        for each in both:
            each.zero_grad()
            given = x.clone().requires_grad_()
            result = each({"x": given})
            assert result["same"] is given
            assert result["three"] == 3
            assert not result["positive"].requires_grad
            assert not result["fixed"].requires_grad
            result["y"].square().sum().backward()
            results.append([result["y"], result["positive"], given.grad, *gradients_of(each)])
        for actual, expected in zip(results[1], results[0], strict=True):
            assert actual is expected is None or (close(actual, expected) is None)
    assert module._engine.count == 1, "one graph for all sizes"
    assert eager.unused.weight.grad is None


def test_the_graph_is_used_as_autograd_uses_a_node(both: tuple[Small, ORTModule]) -> None:
    _, module = both
    x = torch.randn(3, 4, requires_grad=True)
    y = module({"x": x})["y"].sum()
    y.backward(retain_graph=True)
    once = x.grad.clone()  # type: ignore[union-attr]
    y.backward()
    close(x.grad, 2 * once)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()
    y = module({"x": x})["y"].sum()
    with torch.no_grad():
        module.second.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    with torch.no_grad():
        module.second.weight.sub_(1.0)
    (gradient,) = torch.autograd.grad(module({"x": x})["y"].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        gradient.square().sum().backward()


def test_gradients_accumulate_and_hooks_run(both: tuple[Small, ORTModule]) -> None:
    _eager, _module = both
    x, found = torch.randn(3, 4), []
    for each in both:
        each.zero_grad()
        hook = each.second.weight.register_hook(lambda gradient: gradient * 3)
        for part in (x[:1].repeat(2, 1), x[1:]):
            each({"x": part})["y"].square().sum().backward()
        hook.remove()
        found.append(each.second.weight.grad)
    close(found[1], found[0])


def test_a_structure_for_each_mode_and_argument(both: tuple[Small, ORTModule]) -> None:
    eager, module = both
    before, x = module._engine.count, torch.randn(3, 4)
    with torch.no_grad():
        assert not module({"x": x})["y"].requires_grad
    with torch.inference_mode():
        close(module({"x": x})["y"], eager({"x": x})["y"])
    close(module({"x": x}, double=True)["y"], eager({"x": x}, double=True)["y"])
    assert module._engine.count == before + 2
    module({"x": x}, double=True)
    assert module._engine.count == before + 2


def test_names_state_modes_copies_and_pickles(both: tuple[Small, ORTModule]) -> None:
    eager, module = both
    assert list(module.state_dict()) == list(eager.state_dict())
    for duplicates in (False, True):
        names = [name for name, _ in module.named_parameters(remove_duplicate=not duplicates)]
        assert names == [name for name, _ in eager.named_parameters(remove_duplicate=not duplicates)]
    module.eval()
    assert not module.module.training
    assert not module.first.training
    module.train()
    x = torch.randn(3, 4)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other._parameters is other.module._parameters
        assert other.first.weight is not module.first.weight
        with torch.no_grad():
            close(other({"x": x})["y"], module({"x": x})["y"])


def test_parameters_are_read_where_they_are(both: tuple[Small, ORTModule]) -> None:
    eager, module = copy.deepcopy(both[0]), both[1]
    x = torch.randn(3, 4)
    before = module.second.weight.data
    try:
        module.second.weight.data = before * 2
        eager.second.weight.data.mul_(2)
        with torch.no_grad():
            close(module({"x": x})["y"], eager({"x": x})["y"])
    finally:
        module.second.weight.data = before


def test_batchnorm_moves_its_statistics_and_its_evaluation_uses_them() -> None:
    eager = Images()
    module = ORTModule(copy.deepcopy(eager))
    for step in range(3):
        x = torch.randn(4, 3, 12 + step, 12 + step)
        for each in (eager, module):
            each.zero_grad()
            each(x).square().mean().backward()
        close(dict(module.named_buffers()), dict(eager.named_buffers()))
        close(module.first.weight.grad, eager.first.weight.grad, 1e-3)
    eager.eval(), module.eval()
    with torch.no_grad():
        close(module(x), eager(x))


def test_dropout_draws_from_the_generator_of_pytorch() -> None:
    module = ORTModule(nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5)))
    x = torch.randn(32, 8)
    torch.manual_seed(9)
    state = torch.get_rng_state()
    first, second = module(x).detach().clone(), module(x).detach().clone()
    torch.set_rng_state(state)
    assert torch.equal(module(x), first)
    assert not torch.equal(first, second)
    assert 0.4 < float((first == 0).float().mean()) < 0.6
    module.eval()
    with torch.no_grad():
        assert not bool((module(x) == 0).any())


def test_gradients_of_other_outputs_than_expected() -> None:
    eager = Gpt(layers=1)
    module = ORTModule(copy.deepcopy(eager), memory_level=1)
    tokens = torch.randint(0, 61, (2, 7))
    for use in (lambda r: r[1], lambda r: r[0].square().mean() + r[1], lambda r: r[0].square().mean()):
        for each in (eager, module):
            each.zero_grad()
            use(each(tokens, tokens)).backward()
        close(gradients_of(module), gradients_of(eager))


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    factor: float


class ByDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(2, 2), 1.0

    def forward(self, batch: Batch, sizes: Any = None) -> Any:
        x = batch.x * batch.factor * self.scale
        if x.shape[0] % 2 == 0:
            x = x + 1
        return Batch(self.linear(x), 2.0)


def test_dataclasses_sizes_that_decide_and_attributes_that_change() -> None:
    eager = ByDataclass()
    module = ORTModule(copy.deepcopy(eager))
    for rows in (4, 6, 3, 5, 1):
        given = Batch(torch.randn(rows, 2), 2.0)
        result = module(given)
        assert isinstance(result, Batch)
        close(result.x, eager(given).x)
    assert module._engine.count == 3, "even, odd and one"
    eager.scale = module.module.scale = 3.0
    close(module(given).x, eager(given).x)


class Coupling(nn.Module):
    """Halves of an argument whose width no layer fixes: the split's sizes are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, 1)
        scale, shift = self.net(a).chunk(2, 1)
        return torch.cat([a, b * torch.exp(torch.tanh(scale)) + shift], 1)


def test_where_not_every_size_can_vary_samples_do() -> None:
    module, plain = ORTModule(Coupling()), Coupling()
    plain.load_state_dict(module.state_dict())
    for size in (3, 5):
        x = torch.randn(size, 4)
        for each in (module, plain):
            each.zero_grad()
            each(x).square().sum().backward()
        close(gradients_of(module), gradients_of(plain))
    assert module._engine.count == 1


@pytest.fixture
def wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    right = RULES["", "Tanh"]

    def wrong(backward: Any) -> Any:
        for source, gradient in right(backward):
            yield source, backward("Add", gradient, gradient)

    monkeypatch.setitem(RULES, ("", "Tanh"), wrong)


def test_a_wrong_gradient_is_refused_by_name(wrong_rule: None) -> None:
    module = ORTModule(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    with pytest.raises(UserError, match=r"the gradient of '0\.weight' is 100\.0% off.*Gemm"):
        module(torch.randn(3, 4))


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 7


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4)])
        self.rest[0].register_forward_hook(lambda part, given, result: result * 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.rest[0](Twice.apply(self.first(x)))


class Alone(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return Twice.apply(x)


class Nested(Custom):
    """Calls a function in a submodule without parameters, and in one with some."""

    def __init__(self) -> None:
        super().__init__()
        self.custom, self.scale = Custom(), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.rest[0](Alone()(self.custom(self.first(x))) * self.scale)


@pytest.mark.parametrize(("kind", "graphs"), [(Custom, "first, rest.0"), (Nested, "first, rest.0, custom")])
def test_a_function_with_a_backward_of_its_own_runs_between_graphs(kind: Callable[[], nn.Module], graphs: str) -> None:
    eager, x = kind(), torch.randn(3, 4)
    module = ORTModule(copy.deepcopy(eager))
    with pytest.warns(UserWarning, match=r"(Custom|Nested) runs in PyTorch.*as graphs run first, rest\.0") as caught:
        module(x).sum().backward()
    said = str(caught[0].message)
    assert said.startswith(kind.__name__)
    assert said.endswith(f"as graphs run {graphs}")
    eager(x).sum().backward()
    close(gradients_of(module), gradients_of(eager))
    module(x)  # says it once


def test_a_function_without_a_graph_beside_it_is_refused() -> None:
    with pytest.raises(UserError, match=r"Twice, a torch\.autograd\.Function"):
        ORTModule(Alone())(torch.ones(3, requires_grad=True))


class Decides(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return -x


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(2, 2), 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.linear(x)


def test_what_no_graph_can_do_is_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(3, 4)
    linear = nn.Linear(4, 4)
    with pytest.raises(
        UserError, match=r'a branch depends on the values.*test_ortmodule\.py line.*fallback="submodule"'
    ):
        ORTModule(Decides())(x)
    with pytest.raises(UserError, match=r"must have same reduction dim.*check the sizes of the arguments"):
        ORTModule(linear)(torch.randn(3, 5))
    for module, given, words in (
        (linear, (x.double(),), "contains a tensor of float64"),
        (linear, (x.numpy(),), "contains a numpy.ndarray"),
        (linear, (x.to("meta"),), "on one device"),
        (copy.deepcopy(linear).half(), (x,), "is float16"),
        (nn.Embedding(4, 4, sparse=True), (torch.zeros(2, dtype=torch.int64),), "sparse=True"),
    ):
        with pytest.raises(UserError, match=words):
            ORTModule(module)(*given)
    with torch.autocast("cpu"), pytest.raises(UserError, match="no half-precision kernels for CPUs"):
        ORTModule(linear)(x)
    for value in (ORTModule(linear), 3, torch.nn.DataParallel(linear)):
        with pytest.raises(UserError, match="ORTModule"):
            ORTModule(value)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="forward changes the attribute 'calls'"):
        ORTModule(Counts())(torch.randn(2, 2))
    assert capfd.readouterr() == ("", ""), "PyTorch's logs of what it could not export are not shown"


class Picks(nn.Module):
    """Has a branch of its own, and a part that cannot be exported for another reason."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Lists()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x) if x.sum() > 0 else x


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[x[:, 0].numpy().argsort()]


def test_each_part_is_left_to_pytorch_for_its_own_reason() -> None:
    with pytest.warns(UserWarning, match="runs in PyTorch") as caught:
        ORTModule(Picks(), fallback="submodule")(torch.ones(3, 4))
    said = [str(each.message) for each in caught if "runs in PyTorch" in str(each.message)]
    assert [each.split(":")[1].strip() for each in said] == [
        "PyTorch cannot export Picks",
        "PyTorch cannot export Lists",
    ]


def test_settings_by_keyword_and_variable(tmp_path: Path) -> None:
    found = settings(variables={
        "ORTMODULE_FALLBACK_POLICY": "FALLBACK_UNSUPPORTED_TORCH_MODEL", "ORTMODULE_MEMORY_OPT_LEVEL": "2",
        "ORTMODULE_CACHE_DIR": str(tmp_path), "ORTMODULE_LOG_LEVEL": "ERROR",
        "ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT": "1",
    })  # fmt: skip
    assert (found.fallback, found.memory_level, found.cache) == ("submodule", 2, tmp_path)
    assert found.debug.log_level == LogLevel.ERROR
    assert settings(fallback="error", variables={"ORTMODULE_FALLBACK_POLICY": "FALLBACK_DISABLE"}).fallback is None
    for variable in (
        "ORTMODULE_FALLBACK_POLICY", "ORTMODULE_MEMORY_OPT_LEVEL", "ORTMODULE_LOG_LEVEL",
        "ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT",
    ):  # fmt: skip
        with pytest.raises(UserError, match=variable):
            settings(variables={variable: "9"})
    for keywords in ({"fallback": "eager"}, {"memory_level": 3}, {"verify": 2}):
        with pytest.raises(UserError, match="ORTModule"):
            settings(**keywords, variables={})  # type: ignore[arg-type]
    with pytest.raises(UserError, match="onnx_prefix"):
        DebugOptions(save_onnx=True)


def test_graphs_are_cached_by_their_hash_and_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", str(tmp_path))
    cache, x = tmp_path / "cache", torch.randn(3, 4)
    for factor in (2.0, 3.0, 3.0):
        eager = nn.Sequential(nn.Linear(4, 4))
        eager.register_forward_hook(lambda part, given, result, factor=factor: result * factor)
        module = ORTModule(copy.deepcopy(eager), DebugOptions(LogLevel.ERROR, True, "model"), cache=cache)
        result = module(x)
        result.sum().backward()
        close(result, eager(x))
    assert len(list(cache.glob("*.forward.onnx"))) == 2, "two factors, although the modules print alike"
    assert len(list(tmp_path.glob("model_training_*_backward.onnx"))) == 3
    for file in cache.iterdir():
        file.write_bytes(b"damaged")
    close(ORTModule(copy.deepcopy(eager), cache=cache)(x), eager(x))


def test_single_precision_counts_as_exact_at_the_first_look_only() -> None:
    """A module of more than 50 million parameters has no double precision to compare with."""
    rounding, own = np.full(4, 1e-8, np.float32), np.zeros(4, np.float32)
    actual, single = (verify.Step([value], {}, {}, [], [True]) for value in (rounding, own))

    def faults(allowed: verify.Tolerance, double: verify.Step) -> dict[str, str]:
        return verify.differences(actual, single, double, names=["the output"], allowed=allowed)

    assert "the output" in faults(verify.Tolerance(takes_single_for_exact=True), single)
    assert faults(verify.Tolerance(), single) == {}
    assert "the output" in faults(verify.Tolerance(), dataclasses.replace(single, outputs=[own.copy()]))


class NearlyEqual(nn.Module):
    """Normalises nearly equal rows: rounding is multiplied by 1e4, at every point."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 32), nn.BatchNorm1d(32, eps=1e-14), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([x, x + 1e-4 * x.roll(1, 1), x + 1e-4 * x.roll(2, 1)])
        return self.last(self.norm(self.first(rows)).tanh())


def test_rounding_that_a_module_multiplies_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of densenet121 are 0.8% off PyTorch's, which are as far from double precision."""
    eager, x = NearlyEqual(), torch.randn(1, 64)
    point = verify.Point([x], dict(eager.state_dict(keep_vars=True)))
    wanted = ["first.weight"]
    call = flat(((x,), {}), "a call").without_tensors()
    single = verify.eager(eager, call, point, wanted, None, None)
    exact = verify.eager(eager, call, point, wanted, single.weights, None, double=True)
    assert exact.outputs[0].dtype == exact.gradients["first.weight"].dtype == np.float64
    own = np.linalg.norm(single.gradients["first.weight"] - exact.gradients["first.weight"])
    assert own > 2 * verify.RELATIVE * np.linalg.norm(exact.gradients["first.weight"])
    monkeypatch.setattr(comparison, "is_proven", lambda key: False)
    ORTModule(eager)(x).sum().backward()


def test_a_wrong_gradient_is_refused_where_rounding_is_multiplied(wrong_rule: None) -> None:
    with pytest.raises(UserError, match=r"the gradient of '[a-z.]*' is [0-9.]*% off"):
        ORTModule(NearlyEqual())(torch.randn(1, 64))


@pytest.mark.parametrize(("own", "off", "is_right"), [(0.04, 0.12, True), (0.04, 1.0, False), (0.003, 0.05, True)])
def test_rounding_does_not_allow_a_gradient_of_zero(own: float, off: float, is_right: bool) -> None:
    actual, single, exact = (verify.Step([], {"w": np.full(4, value)}, {}, [], []) for value in (1 - off, 1 + own, 1.0))
    assert is_right == (not verify.differences(actual, single, exact, names=[], allowed=verify.Tolerance()))
