"""ORTModule on a GPU against PyTorch: fp32, autocast with and without GradScaler, streams, memory that is shared."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from ortflow.workflow.device.cudart import Runtime

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("PyTorch sees no GPU", allow_module_level=True)

from ortmodule_models import Gpt, Images  # noqa: E402

from ortflow.torch import ORTModule  # noqa: E402

DEVICE = "cuda"
STEPS = 20


def tokens(*shape: int) -> Any:
    return torch.randint(0, 61, shape, device=DEVICE)


def pair(module: Any, **keywords: Any) -> tuple[Any, Any]:
    """A module in PyTorch, and its copy as an ORTModule."""
    eager = module.to(DEVICE)
    return eager, ORTModule(copy.deepcopy(eager), **keywords)


def curve(module: Any, batches: list[Any], kind: Any = None, *, scaled: bool = False) -> list[float]:
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=scaled, init_scale=1024.0)
    losses = []
    for batch in batches:
        with torch.autocast("cuda", kind, enabled=kind is not None):
            loss = module(*batch)[1]
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("kind", "scaled", "off"), [
    (None, False, 2e-4), (torch.bfloat16, False, 2e-2), (torch.float16, True, 1e-2),
])  # fmt: skip
def test_gpt_learns_as_in_pytorch(cuda: Runtime, kind: Any, scaled: bool, off: float) -> None:
    torch.manual_seed(1)
    eager, module = pair(Gpt(width=64, heads=4))
    batches = [(tokens(4, 16 + 8 * (step % 2)), tokens(4, 16 + 8 * (step % 2))) for step in range(STEPS)]
    expected = curve(eager, batches, kind, scaled=scaled)
    actual = curve(module, batches, kind, scaled=scaled)
    assert actual == pytest.approx(expected, abs=off)
    assert actual[-1] < actual[0]


def test_gradients_and_statistics_of_convolutions(cuda: Runtime) -> None:
    torch.manual_seed(2)
    eager, module = pair(Images())
    for size in (16, 16, 20):
        x = torch.randn(4, 3, size, size, device=DEVICE)
        results = []
        for each in (eager, module):
            each.zero_grad()
            result = each(x)
            result.square().mean().backward()
            results.append(result)
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
        for (name, mine), other in zip(module.named_parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-4, msg=name)
        for (name, mine), other in zip(module.named_buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5, msg=name)


def test_the_current_stream_is_used(cuda: Runtime) -> None:
    torch.manual_seed(3)
    eager, module = pair(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Tanh(), torch.nn.Linear(512, 512)))
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(5):
                x = torch.randn(4096, 512, device=DEVICE)
                x.mul_(2)  # queued immediately before
                torch.testing.assert_close(module(x), eager(x), rtol=1e-3, atol=1e-3)
        torch.cuda.current_stream().wait_stream(stream)


def test_dropout_is_a_function_of_the_generator(cuda: Runtime) -> None:
    torch.manual_seed(4)
    _, module = pair(Gpt(dropout=0.3))
    batch = tokens(2, 16)
    torch.manual_seed(5)
    first, second = (module(batch)[0].detach().clone() for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(module(batch)[0], first)
    assert not torch.equal(first, second)


def test_nothing_is_copied_and_all_is_freed(cuda: Runtime) -> None:
    torch.manual_seed(6)
    _, module = pair(Gpt(width=64))
    batch = tokens(4, 32)
    for _ in range(3):
        module(batch, batch)[1].backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        module(batch, batch)[1].backward()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


def test_without_gradients_and_in_evaluation(cuda: Runtime) -> None:
    torch.manual_seed(7)
    eager, module = pair(Images())
    x = torch.randn(4, 3, 16, 16, device=DEVICE)
    eager.eval(), module.eval()
    with torch.no_grad():
        torch.testing.assert_close(module(x), eager(x), rtol=1e-4, atol=1e-4)


def test_outputs_have_the_types_of_autocast(cuda: Runtime) -> None:
    torch.manual_seed(8)
    eager, module = pair(Gpt(width=64))
    batch = tokens(4, 32)
    with torch.autocast("cuda", torch.bfloat16):
        expected, actual = eager(batch, batch), module(batch, batch)
        assert [each.dtype for each in actual] == [each.dtype for each in expected] == [torch.bfloat16, torch.float32]
        torch.testing.assert_close(actual[0].float(), expected[0].float(), rtol=5e-2, atol=5e-2)
        losses = [torch.nn.functional.mse_loss(each[0], torch.ones_like(each[0])) for each in (expected, actual)]
    for loss in losses:
        loss.backward()
    mine, other = module.head.weight.grad, eager.head.weight.grad
    assert (mine - other).norm() <= 2e-2 * other.norm()


def test_convolutions_in_half_precision(cuda: Runtime) -> None:
    torch.manual_seed(9)
    eager, module = pair(Images())
    for samples, size in ((8, 16), (5, 16), (8, 20)):
        x = torch.randn(samples, 3, size, size, device=DEVICE)
        results = []
        for each in (eager, module):
            each.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                result = each(x)
            result.float().square().mean().backward()
            results.append(result.float())
        assert (results[1] - results[0]).norm() <= 3e-2 * results[0].norm()
        mine, other = module.head.weight.grad, eager.head.weight.grad
        assert (mine - other).norm() <= 5e-2 * other.norm()


def plans_of(module: Any) -> list[Any]:
    """The sessions of all structures of a module."""
    return [plan for each in module._engine._structures.values() for one in each for plan in one._known.values()]


def loss_of(module: Any, batch: Any) -> Any:
    with torch.autocast("cuda", torch.bfloat16):
        return module(batch, batch)[1]


def gradients(module: Any) -> list[Any]:
    return [parameter.grad.clone() for parameter in module.parameters()]


def plan_captured_by(module: Any, batches: list[Any]) -> Any:
    """The sessions of a module, whose graphs these steps capture."""
    for batch in batches:
        module.zero_grad()
        loss_of(module, batch).backward()
    (plan,) = plans_of(module)
    assert plan.forward.captured
    assert plan.backward.captured
    return plan


def test_captured_steps_are_those_of_queued_ones(cuda: Runtime) -> None:
    torch.manual_seed(9)
    module = Gpt(width=64, dropout=0.1).to(DEVICE)
    batches = [(tokens(4, 32), tokens(4, 32)) for _ in range(STEPS)]
    curves = []
    for captured in (True, False):
        ours = ORTModule(copy.deepcopy(module), cuda_graphs=captured)
        torch.manual_seed(10)
        curves.append(curve(ours, batches, torch.bfloat16))
        (plan,) = plans_of(ours)
        if captured:
            assert (plan.forward.obstacle, plan.backward.obstacle) == (None, None)
            assert plan.forward.captured
            assert plan.backward.captured
    assert curves[0] == pytest.approx(curves[1], abs=2e-3)


def test_what_captured_calls_return_is_not_overwritten(cuda: Runtime) -> None:
    """Outputs, gradients that are held, sums of gradients, two calls before a backward pass, other sizes."""
    torch.manual_seed(11)
    eager, module = pair(Gpt(width=64), cuda_graphs=True)
    batches = [tokens(4, 32) for _ in range(24)]
    outputs, held = [], []
    for batch in batches[:12]:
        module.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            logits, loss = module(batch, batch)
        loss.backward()
        outputs.append((logits, loss, logits.clone(), loss.clone()))
        held.append([(p.grad, p.grad.clone()) for p in module.parameters()])
    (plan,) = plans_of(module)
    assert plan.forward.captured
    assert plan.backward.captured
    for logits, loss, logits_then, loss_then in outputs:
        assert torch.equal(logits, logits_then)
        assert torch.equal(loss, loss_then)
    for step in held:
        for now, then in step:
            assert torch.equal(now, then)
    for add_up in ("two backward passes", "two calls before one", "another size between"):
        for each in (eager, module):
            each.zero_grad()
            if add_up == "two calls before one":
                first, second = loss_of(each, batches[12]), loss_of(each, batches[13])
                (first + second).backward()
                continue
            loss_of(each, batches[12]).backward()
            if add_up == "another size between":
                loss_of(each, batches[14][:2, :16].contiguous()).backward()
            loss_of(each, batches[13]).backward()
        for mine, other in zip(gradients(module), gradients(eager), strict=True):
            assert (mine - other).norm() <= 3e-2 * other.norm() + 1e-6, add_up
    again = loss_of(module, batches[15])
    again.backward(retain_graph=True)
    before = gradients(module)
    module.zero_grad()
    again.backward(retain_graph=True)
    loss_of(module, batches[16]).backward()
    with pytest.raises(RuntimeError, match="overwritten the values"):
        again.backward()
    assert before


def test_captured_graphs_leave_other_values_as_they_are(cuda: Runtime) -> None:
    """Results of calls without gradients, a call that waits for its backward pass, and inputs that are converted."""
    torch.manual_seed(13)
    eager, module = pair(Gpt(width=64), cuda_graphs=True)
    batches = [tokens(4, 32) for _ in range(16)]
    plan_captured_by(module, batches[:8])
    results = []
    for batch in batches[8:12]:
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            logits, _ = module(batch, batch)
            expected, _ = eager(batch, batch)
        # Its graph is opened behind the capture: its constants must not be where the captured graphs write.
        assert (logits - expected).norm() <= 3e-2 * expected.norm()
        results.append((logits, logits.clone()))
        loss_of(module, batch).backward()
    for now, then in results:
        assert torch.equal(now, then)
    for each in (eager, module):
        each.zero_grad()
        first, second = loss_of(each, batches[12]), loss_of(each, batches[13])
        first.backward()
        second.backward()
        loss_of(each, batches[14][:2, :16]).backward()
    for mine, other in zip(gradients(module), gradients(eager), strict=True):
        assert (mine - other).norm() <= 3e-2 * other.norm() + 1e-6


def test_gradients_that_are_held_later_are_not_overwritten(cuda: Runtime) -> None:
    """They lie where the graph writes them until somebody has one at the next call."""
    torch.manual_seed(14)
    eager, module = pair(Gpt(width=64), cuda_graphs=True)
    batches = [tokens(4, 32) for _ in range(24)]
    plan = plan_captured_by(module, batches[:8])
    address = next(module.parameters()).grad.data_ptr()
    module.zero_grad()
    loss_of(module, batches[8]).backward()
    assert next(module.parameters()).grad.data_ptr() == address, "gradients are copied"
    held = [(p.grad, p.grad.clone()) for p in module.parameters()]
    for start in range(9, 24, 3):
        for each in (eager, module):
            each.zero_grad()
            for batch in batches[start : start + 3]:
                loss_of(each, batch).backward()
        for mine, other in zip(gradients(module), gradients(eager), strict=True):
            assert (mine - other).norm() <= 3e-2 * other.norm() + 1e-6, start
    assert plan.backward.captured, "it is captured again"
    for now, then in held:
        assert torch.equal(now, then)


def test_a_module_that_is_captured_after_another(cuda: Runtime) -> None:
    """Its kept values lie where the first one's backward graph had values in between."""
    torch.manual_seed(15)
    first_eager, first = pair(Gpt(width=64), cuda_graphs=True)
    second_eager, second = pair(Gpt(width=64), cuda_graphs=True)
    batches = [tokens(4, 32) for _ in range(16)]
    loss_of(second, batches[0]).backward()  # opening its sessions would discard the graphs of the first
    plan_captured_by(first, batches[:8])
    first.zero_grad()
    plan_captured_by(second, batches[:8])
    second.zero_grad()
    assert all(plan.backward.captured for each in (first, second) for plan in plans_of(each))
    for one, two in ((first_eager, second_eager), (first, second)):
        kept = loss_of(two, batches[8])
        loss_of(one, batches[9]).backward()
        kept.backward()
    for module, eager in ((first, first_eager), (second, second_eager)):
        for mine, other in zip(gradients(module), gradients(eager), strict=True):
            assert (mine - other).norm() <= 3e-2 * other.norm() + 1e-6


@pytest.mark.parametrize("captured", [False, True])
def test_weights_that_change_between_a_call_and_its_backward_pass(cuda: Runtime, captured: bool) -> None:
    """As under autocast, a backward pass reads the half-precision weights of its own call."""
    torch.manual_seed(16)
    eager, module = pair(Gpt(width=64), cuda_graphs=captured)
    batches = [tokens(4, 32) for _ in range(10)]
    for batch in batches[:6]:
        loss_of(module, batch).backward()
        module.zero_grad()
    for each in (eager, module):
        each.zero_grad()
        first = loss_of(each, batches[6])
        with torch.no_grad():
            for parameter in each.parameters():
                if parameter.ndim == 2:  # PyTorch does not save the weights of normalisations but by reference
                    parameter.data = parameter.data * 1.5
        second = loss_of(each, batches[7])
        first.backward()
        second.backward()
    for mine, other in zip(gradients(module), gradients(eager), strict=True):
        assert (mine - other).norm() <= 3e-2 * other.norm() + 1e-6


def test_captured_statistics_of_convolutions(cuda: Runtime) -> None:
    torch.manual_seed(12)
    eager, module = pair(Images(), cuda_graphs=True)
    for _ in range(10):
        x = torch.randn(4, 3, 16, 16, device=DEVICE)
        for each in (eager, module):
            each.zero_grad()
            each(x).square().mean().backward()
        for (name, mine), other in zip(module.named_buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5, msg=name)
        for (name, mine), other in zip(module.named_parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-4, msg=name)
    assert all(plan.forward.captured for plan in plans_of(module))
