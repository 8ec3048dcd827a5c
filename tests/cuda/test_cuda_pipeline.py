"""Pipelines and divided layers on two real GPUs: the curve of one GPU, and other layouts behind them."""

from __future__ import annotations

from typing import Any

import pytest
from project import Project, curve, evaluations, logs, of_kind
from test_cuda_ranks import ON_CPUS, TWO
from test_cuda_runs import CONSTANT, GPU, killed, near, state

from ortflow.workflow.device.cudart import Runtime
from ortflow.workflow.run.rundir import RunDir

MICRO = {"train__gradient_accumulation": 4}
DIVIDED: dict[str, dict[str, Any]] = {
    "1f1b": {"parallel__pipeline": 2},
    "gpipe": {"parallel__pipeline": 2, "parallel__schedule": "gpipe"},
    "interleaved": {"parallel__pipeline": 2, "parallel__schedule": "interleaved", "parallel__chunks": 2},
    "horizontal": {"parallel__horizontal": 2},
    "sequence": {"parallel__horizontal": 2, "parallel__sequence_parallel": True},
}


@pytest.fixture(scope="module")
def project(cuda: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Project:
    if cuda.count() < 2:
        pytest.skip("needs two GPUs")
    return Project.make(tmp_path_factory.mktemp("cuda-pipeline"), dropout=0.0)


@pytest.mark.parametrize("layout", DIVIDED)
def test_the_curve_is_that_of_one_gpu_and_of_the_cpu(project: Project, layout: str) -> None:
    divided = project.run(layout, **MICRO, **TWO, **DIVIDED[layout])
    assert "sums over the ranks' GPUs: NCCL" in logs(divided)
    passes = "a micro-batch" if layout in ("horizontal", "sequence") else "the backward pass of a stage"
    assert f"{passes} is captured as a CUDA graph" in logs(divided)
    assert "is not captured" not in logs(divided)
    for other, settings in ((f"{layout}-one", GPU), (f"{layout}-cpu", {"resources__ranks_per_node": 1})):
        alone = project.run(other, **MICRO, **settings)
        near(divided, alone, 1e-5)
        losses = [[loss for _, loss, _ in evaluations(each)] for each in (divided, alone)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    (memory,), (whole,) = (of_kind(each, "memory") for each in (divided, alone))
    assert memory["moments"] < 0.8 * whole["moments"]


@pytest.mark.parametrize("layout", DIVIDED)
def test_captured_passes_have_the_bits_of_queued_ones(project: Project, layout: str) -> None:
    settings = {**MICRO, **TWO, **DIVIDED[layout], "train__precision": "bf16"}
    captured = project.run(f"{layout}-captured", **settings)
    queued = project.run(f"{layout}-queued", resources__cuda_graph=False, **settings)
    assert "is captured as a CUDA graph" not in logs(queued)
    assert curve(captured) == curve(queued)
    assert state(captured) == state(queued)


@pytest.mark.parametrize("layout", DIVIDED)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_and_its_loss_scale(project: Project, layout: str, precision: str) -> None:
    settings = {**MICRO, "train__precision": precision}
    divided = project.run(f"{layout}-{precision}", **settings, **TWO, **DIVIDED[layout])
    whole = project.run(f"{layout}-{precision}-one", **settings, **GPU)
    near(divided, whole, 3e-3)
    skipped = [[record["step"] for record in of_kind(each, "skipped_step")] for each in (divided, whole)]
    assert skipped[0] == skipped[1]
    assert "differs from the one in fp32" not in logs(divided)


@pytest.mark.parametrize("layout", ["1f1b", "interleaved", "horizontal", "sequence"])
def test_ranks_that_are_killed_resume_bit_for_bit(project: Project, layout: str) -> None:
    settings: dict[str, Any] = {"train__steps": 200, **MICRO, **TWO, **DIVIDED[layout]}
    whole = project.run(f"{layout}-whole", **settings)
    run_dir = killed(project, f"{layout}-killed", (60,), **settings)
    ended = next(record["time"] for record in RunDir(run_dir).read_attempts() if record["event"] == "end")
    last = max(record["time"] for record in of_kind(run_dir, "step") if record["attempt"] == 0)
    assert ended - last < 10
    assert curve(run_dir) == curve(whole)
    assert state(run_dir) == state(whole)


def test_a_run_continues_on_one_gpu_and_on_the_cpu(project: Project) -> None:
    common: dict[str, Any] = {**CONSTANT, "train__global_batch": 16}
    undivided = {"parallel__pipeline": 1, "parallel__horizontal": 1, "parallel__sequence_parallel": False}
    turns = (
        {**TWO, **DIVIDED["1f1b"]},
        {**GPU, **undivided},
        {**ON_CPUS, "resources__gpus_per_rank": 0, "parallel__pipeline": 2},
        {**TWO, **undivided, **DIVIDED["horizontal"]},
        {**TWO, **undivided, **DIVIDED["interleaved"]},
        {**TWO, **undivided, **DIVIDED["sequence"]},
    )
    for steps, layout in zip((15, 30, 45, 60, 75, 90), turns, strict=True):
        run_dir = project.run("turns", train__steps=steps, **common, **layout)
    assert [record["step"] for record in of_kind(run_dir, "resume")] == [15, 30, 45, 60, 75]
    near(run_dir, project.run("turns-cpu", train__steps=90, **common, resources__ranks_per_node=1), 1e-4)


def test_numbers_of_tokens_that_do_not_divide(project: Project) -> None:
    columns = {"tokens": "tokens[:-2]", "labels": "tokens[1:-1]"}
    odd = {f"data__{part}__columns": dict(columns) for part in ("train", "eval")}
    divided = project.run("odd", **MICRO, **TWO, **DIVIDED["sequence"], **odd)
    near(divided, project.run("odd-one", **MICRO, **GPU, **odd), 1e-5)


@pytest.mark.parametrize("layout", ["horizontal", "sequence"])
def test_masks_of_dropout_are_those_of_one_gpu(
    cuda: Runtime, layout: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if cuda.count() < 2:
        pytest.skip("needs two GPUs")
    project = Project.make(tmp_path_factory.mktemp("cuda-dropout"), dropout=0.1)
    divided = project.run(layout, **MICRO, **TWO, **DIVIDED[layout])
    near(divided, project.run("one", **MICRO, **GPU), 1e-5)
