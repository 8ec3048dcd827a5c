"""ZeRO on two real GPUs: the curve of stage 0 and of the CPU, a rank's share of memory, other layouts behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from project import Project, command, curve, logs, of_kind
from test_cuda_ranks import ON_CPUS, TWO
from test_cuda_runs import CONSTANT, killed, near, state

from ortflow.workflow.device.cudart import Runtime

ONE = {"resources__ranks_per_node": 1, "resources__gpus_per_rank": 1}
LAMB = {"name": "lamb", "lr": 5e-3, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def project(cuda: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Project:
    if cuda.count() < 2:
        pytest.skip("needs two GPUs")
    return Project.make(tmp_path_factory.mktemp("cuda-zero"), dropout=0.0)


@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        (1, {}),
        (1, {"train__optimizer": LAMB}),
        (2, {"train__gradient_accumulation": 3}),
        (2, {"train__gradient_accumulation": 3, "resources__cuda_graph": False, "resources__kernels": "onnxruntime"}),
        (3, {}),
        (3, {"train__optimizer": LAMB, "train__gradient_accumulation": 3}),
        (3, {"model__recompute": "layers", "resources__cuda_graph": False}),
    ],
    ids=["adamw", "lamb", "accumulated", "plain", "parameters", "parameters-lamb", "parameters-recomputed"],
)
def test_the_curve_is_that_of_stage_0_and_of_the_cpu(
    project: Project, stage: int, settings: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id
    sharded = project.run(f"zero-{name}", parallel__zero=stage, **TWO, **settings)
    text = logs(sharded)
    assert "sums over the ranks' GPUs: NCCL" in text
    assert f"ZeRO stage {stage}: " in text
    if settings.get("resources__cuda_graph", True):
        for part in ("a micro-batch", "the norm of the gradient", "the update"):
            assert f"{part} is captured as a CUDA graph" in text, text
    near(sharded, project.run(f"zero-{name}-0", **TWO, **settings), 1e-5)
    on_cpus = {key: value for key, value in settings.items() if not key.startswith("resources")}
    near(sharded, project.run(f"zero-{name}-cpus", **ON_CPUS, **on_cpus), 1e-5)
    (memory,), (plain,) = (of_kind(each, "memory") for each in (sharded, project.run_dir(f"zero-{name}-0")))
    assert memory["moments"] == pytest.approx(plain["moments"] / 2, abs=1024)
    formula = sum(memory.get(part, 0) for part in ("parameters", "gradients", "moments", "messages"))
    assert formula <= memory["gpu_buffers"] < 1.1 * formula + 100_000
    if stage == 3:
        assert memory["parameters"] == pytest.approx(plain["parameters"] / 2, abs=1024)
    assert memory["gpu_peak"] > memory["gpu_buffers"]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("precision", [{"precision": "bf16"}, {"precision": "fp16"}], ids=str)
def test_half_precision_and_its_loss_scale(project: Project, precision: dict[str, Any], stage: int) -> None:
    settings = {f"train__{key}": value for key, value in precision.items()}
    name = f"{precision['precision']}-{stage}"
    sharded = project.run(f"zero-{name}", parallel__zero=stage, **settings, **TWO)
    whole = project.run(f"zero-{name}-0", **settings, **TWO)
    near(sharded, whole, 3e-3)
    skipped = [[record["step"] for record in of_kind(each, "skipped_step")] for each in (sharded, whole)]
    assert skipped[0] == skipped[1]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_gradient_is_checked_with_shares(project: Project, precision: str, tmp_path: Path) -> None:
    """In an empty cache, so that no earlier check is remembered."""
    name = f"checked-{precision}"
    file = project.write(name, train__precision=precision, train__steps=5, parallel__zero=3, **TWO)
    done = command("run", file.name, folder=project.folder, XDG_CACHE_HOME=str(tmp_path))
    run_dir = project.run_dir(name)
    assert done.returncode == 0, logs(run_dir)
    (checked,) = of_kind(run_dir, "gradient_check")
    assert "ONNX Runtime's operators and differences of the loss" in checked["compared"]
    assert "differs from the one in fp32" not in logs(run_dir)
    near(run_dir, project.run(f"un{name}", train__precision=precision, train__steps=5, parallel__zero=3, **TWO), 1e-6)


@pytest.mark.parametrize(("stage", "offload"), [(2, "none"), (2, "optimizer"), (3, "none")])
def test_ranks_that_are_killed_resume_bit_for_bit(project: Project, stage: int, offload: str) -> None:
    settings: dict[str, Any] = {
        "train__steps": 200, "train__gradient_accumulation": 2, "parallel__zero": stage, "train__offload": offload,
        **TWO,
    }  # fmt: skip
    name = f"{stage}-{offload}"
    whole = project.run(f"zero-whole-{name}", **settings)
    run_dir = killed(project, f"zero-killed-{name}", (60,), **settings)
    assert curve(run_dir) == curve(whole)
    assert state(run_dir) == state(whole)


def test_a_run_continues_on_one_gpu_and_on_the_cpu(project: Project) -> None:
    common: dict[str, Any] = {**CONSTANT, "train__global_batch": 8}
    on_cpu = {**ON_CPUS, "resources__gpus_per_rank": 0}
    turns = (
        {**TWO, "parallel__zero": 2}, {**ONE, "parallel__zero": 0}, {**on_cpu, "parallel__zero": 1},
        {**TWO, "parallel__zero": 3}, {**on_cpu, "parallel__zero": 3}, {**TWO, "parallel__zero": 1},
    )  # fmt: skip
    for steps, layout in zip((10, 20, 30, 40, 50, 60), turns, strict=True):
        run_dir = project.run("zero-turns", train__steps=steps, **common, **layout)
    assert [record["step"] for record in of_kind(run_dir, "resume")] == [10, 20, 30, 40, 50]
    # Without a warm-up the loss of step 60 changes by up to 3e-4 if the first weights change by 1e-5.
    near(run_dir, project.run("zero-turns-cpus", train__steps=60, **common, **ON_CPUS), 3e-4)


@pytest.mark.parametrize("captured", [True, False])
def test_a_rank_without_samples_exchanges_what_the_others_need(project: Project, *, captured: bool) -> None:
    settings = {"train__steps": None, "train__epochs": 2, "data__micro_batch": 7, "data__last_batch": "keep"}
    name = "zero-last-captured" if captured else "zero-last-queued"
    run_dir = project.run(name, parallel__zero=3, resources__cuda_graph=captured, **settings, **TWO)
    near(run_dir, project.run(f"{name}-cpus", parallel__zero=3, **settings, **ON_CPUS), 1e-5)


@pytest.mark.parametrize(("stage", "ranks"), [(0, ONE), (1, TWO), (3, TWO)], ids=["alone", "sharded", "parameters"])
@pytest.mark.parametrize("rule", ["adamw", "lamb"])
def test_state_on_the_host_gives_the_bits_of_state_on_the_gpu(
    project: Project, stage: int, ranks: dict[str, Any], rule: str
) -> None:
    settings = {"parallel__zero": stage, "train__optimizer": {**LAMB, "name": rule}, **ranks}
    name = f"{rule}-{stage}"
    there = project.run(f"on-host-{name}", train__offload="optimizer", **settings)
    here = project.run(f"on-gpu-{name}", **settings)
    if (stage, rule) == (0, "lamb"):
        # LAMB's trust ratios come from another graph, whose sums may have another order.
        near(there, here, 1e-6)
    else:
        assert curve(there) == curve(here)
        assert state(there) == state(here)
    (offload,), (memory,) = of_kind(there, "offload"), of_kind(there, "memory")
    assert offload["bytes"] == memory["offloaded"] == of_kind(here, "memory")[0]["moments"]
    assert "lies in pinned host memory" in logs(there)
