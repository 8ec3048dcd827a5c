"""Programs of other frameworks on two ranks: killed by SIGKILL, stopped by SIGTERM, resumed, and near one process.

Each case is two runs: a calm one, started by the framework's own launcher where it has one, and one with accidents.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from documentation import example
from messages import mentions
from program_runs import Programs

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process groups and adoption of orphans are Linux's")

PROGRAMS = Path(__file__).parent / "programs"
RANKS = ("--ranks", "2", "checkpoint.every_seconds=null", "checkpoint.every_steps=3")
STEPS, STOPPED = 12, 7
"""Steps of each program, and the step in which one asks to be stopped."""


def needs(package: str) -> None:
    """Skip where a framework is not installed: CI on Linux installs each (.ci/install_torch)."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def lines(log: str, kind: str) -> list[list[str]]:
    """The words of a program's own lines. The launcher of Horovod puts the rank before each."""
    words = [line.partition(":")[2].split() if "<stdout>" in line else line.split() for line in log.splitlines()]
    return [rest for first, *rest in filter(None, words) if first == kind]


def check(
    folder: Path, program: str, *arguments: str, saved: int = 3, start: str = "direct", with_accidents: str = "direct"
) -> None:
    """Compare a calm run, one with accidents, and a process without the framework.

    A program prints `step N NAME LOSS` for each step, `stopped N`, `final NAME DIGEST`, and on rank 0 `plain N LOSS`.
    Killed after step 5, it resumes from step `saved`. The runs' processes are started by ortflow or by a launcher.
    """
    programs = Programs(folder)
    programs.write((PROGRAMS / program).read_text())
    heading = {"deepspeed": "DeepSpeed", "horovod": "Horovod", "jax": "JAX"}[program.partition("_")[0]]
    programs.write(example(heading).replace("% 100", "% 3"), "recipe.py")
    code, output = programs.run("train.py", *RANKS, "--name", "calm", "--start", start, "--", *arguments, seconds=560)
    assert code == 0, output
    calm = [programs.log(rank, "calm") for rank in logged(start)]
    code, output = programs.run(
        "train.py", *RANKS, "--start", with_accidents, "--", *arguments, "accidents", seconds=560
    )
    assert code == 0, output
    assert ("was killed by SIGKILL" if with_accidents == "direct" else "ended with exit code 1") in output
    logs = [[programs.log(rank, attempt=attempt) for attempt in range(3)] for rank in logged(with_accidents)]

    finals = sorted(final for log in calm for final in lines(log, "final"))
    assert len(finals) in (2, 6)  # on each rank, of each engine
    assert sorted(final for log in logs for final in lines(log[2], "final")) == finals
    stops = [int(words[0]) for log in logs for words in lines(log[1], "stopped")]
    assert len(stops) == 2
    assert len(set(stops)) == 1  # both ranks after the same step
    assert STOPPED < stops[0] < STEPS
    assert f"resumed at step {stops[0]}" in output
    for log in logs:
        assert [int(lines(text, "step")[0][0]) for text in log] == [0, saved, stops[0]]

    plain = {words[0]: float(words[1]) for words in lines(calm[0], "plain")}
    assert len(plain) == STEPS
    for number, _, loss in (words for log in (calm, *logs) for text in log for words in lines(text, "step")):
        assert float(loss) == pytest.approx(plain[number], rel=1e-5)
    assert programs.left() == []


def logged(start: str) -> tuple[int, ...]:
    """The ranks whose programs have a log of their own; that of rank 0 has the output of a launcher."""
    return (0, 1) if start == "direct" else (0,)


@pytest.mark.rotates("DeepSpeed, JAX and Horovod")
def test_deepspeed_zero_is_killed_and_resumes(tmp_path: Path) -> None:
    needs("deepspeed")
    check(tmp_path, "deepspeed_engines.py", "zero", start="deepspeed")


@pytest.mark.rotates("DeepSpeed, JAX and Horovod")
def test_engines_that_accumulate_are_saved_after_an_update(tmp_path: Path) -> None:
    """Level 2. A checkpoint is due after step 3, in the middle of an update."""
    needs("deepspeed")
    check(tmp_path, "deepspeed_engines.py", "accumulating", saved=4)
    code, output = Programs(tmp_path).run("train.py", "--ranks", "1", "--", "accumulating", "alone", seconds=560)
    assert code == 2, output
    assert mentions(output, "is of 2 ranks, and this run has 1, but each rank had its own stage-1, stage-2, stage-3")


@pytest.mark.rotates("DeepSpeed, JAX and Horovod")
def test_a_deepspeed_pipeline_is_killed_and_resumes(tmp_path: Path) -> None:
    needs("deepspeed")
    check(tmp_path, "deepspeed_engines.py", "pipeline")


@pytest.mark.rotates("DeepSpeed, JAX and Horovod")
@pytest.mark.parametrize("level", [1, 2])
def test_jax_is_killed_and_resumes(tmp_path: Path, level: int) -> None:
    needs("jax")
    check(tmp_path, "jax_processes.py", f"level-{level}")


@pytest.mark.rotates("DeepSpeed, JAX and Horovod")
@pytest.mark.parametrize("level", [2, 1])
def test_horovod_is_killed_and_resumes(tmp_path: Path, level: int) -> None:
    """Without MPI, horovodrun alone brings the ranks together."""
    needs("horovod")
    check(tmp_path, "horovod_ranks.py", f"level-{level}", start="horovod", with_accidents="horovod")
    world = lines(Programs(tmp_path).log(0, "calm"), "world")
    assert sorted(world) == [["0", "2", "0", "0", "1"], ["1", "2", "1", "0", "1"]]


ACCELERATED = """
import torch
from accelerate import Accelerator
import ortflow.program
accelerator = Accelerator(cpu=True)
run = ortflow.program.context()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
if run.latest() is not None:
    accelerator.load_state(str(run.latest()))
accelerator.backward(model(torch.ones(1, 2)).sum())
optimizer.step()
with run.commit(run.attempt + 1) as folder:
    accelerator.save_state(str(folder))
print("weights", *accelerator.unwrap_model(model).weight.tolist()[0], run.rank, accelerator.num_processes, flush=True)
if run.attempt == 0:
    raise SystemExit(1)
"""


@pytest.mark.rotates("one process")
def test_the_launcher_of_accelerate_starts_a_process(tmp_path: Path) -> None:
    needs("accelerate")
    programs = Programs(tmp_path)
    programs.write(ACCELERATED)
    code, output = programs.run("train.py", "--start", "accelerate", seconds=560)
    assert code == 0, output
    (before,), (after,) = (lines(programs.log(attempt=attempt), "weights") for attempt in (0, 1))
    assert before[2:] == after[2:] == ["0", "1"]
    for one, other in zip(before[:2], after[:2], strict=True):
        assert float(other) == pytest.approx(float(one) - 0.1, abs=1e-6)


REFUSED = """
import os, tempfile
os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK="0", RANK="0", WORLD_SIZE="1")
import deepspeed, torch
from deepspeed.pipe import PipelineModule
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel
import ortflow.program
deepspeed.ops.__compatible_ops__ = {}
distributed.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
deepspeed.init_distributed("gloo", verbose=False)

def engine(model, stage):
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage},
              "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

def refused(**objects):
    try:
        ortflow.program.start(**objects)
        print("taken:", list(objects), flush=True)
    except ortflow.program.ProgramError as error:
        print(error, flush=True)

layer = nn.Linear(2, 2)
first, third = engine(nn.Linear(2, 2), 1), engine(layer, 3)
refused(model=nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))))
refused(model=layer)
refused(optimizer=third.optimizer)
refused(engine=first, optimizer=first.basic_optimizer)
refused(pipe=engine(PipelineModule([nn.Linear(2, 2)], num_stages=1, loss_fn=nn.MSELoss()), 0))
"""


@pytest.mark.rotates("one process")
def test_what_level_2_cannot_save_is_refused(tmp_path: Path) -> None:
    needs("deepspeed")
    done = subprocess.run([sys.executable, "-c", REFUSED], cwd=tmp_path, text=True, capture_output=True, check=False)
    said = [line for line in done.stdout.splitlines() if line.startswith(("start(", "taken"))]
    assert len(said) == 5, done.stdout + done.stderr
    level_1 = "save it with run.commit and its own function instead (level 1 in docs/programs.md)"
    part = (
        "is a part of a DeepSpeed engine, which saves it: register the engine alone, which deepspeed.initialize returns"
    )
    assert said[0].startswith("start(model=…): the state of FullyShardedDataParallel (FSDP1) is not one that start()")
    assert said[0].endswith(f"wrap the model with fully_shard (FSDP2), or {level_1}")
    assert said[1] == f"start(model=…): Linear {part}"
    assert said[2] == f"start(optimizer=…): DeepSpeedZeroOptimizer_Stage3 {part}"
    assert said[3].startswith("start(optimizer=…): ")
    assert said[3].endswith(part)
    assert said[4].startswith("start(pipe=…): a pipeline of DeepSpeed takes micro-batches by itself, not by run.steps")
    assert said[4].endswith(level_1)
