"""On one and on two NVIDIA GPUs: programs of PyTorch under `ortflow run`, killed by SIGKILL and resumed, bit by bit.

    python benchmarks/cuda_programs.py [--gpus 1 2] [--only plain ddp fsdp2] [--steps 14] [--keep FOLDER]
    python benchmarks/cuda_programs.py --cpu         # two or fewer processes on CPUs, to try this program itself

Each case is two runs: an undisturbed one, and one whose last rank kills itself once. They must print the same steps
and the same digest of parameters, optimizer, schedule, scaler and random states. The program draws noise and dropout
from CUDA's generators. Prints a row of a table for each case. Exit code 1 if one differs. A case of more GPUs than
there are is left out.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

CASES = {"plain": (1,), "ddp": (1, 2), "fsdp2": (1, 2)}
"""Program -> numbers of ranks."""
EVERY = 3
"""Steps from one checkpoint to the next."""


class Outcome(NamedTuple):
    """What a run printed."""

    code: int
    output: str
    logs: list[list[str]]
    """Of each rank, the texts of its attempts."""
    seconds: float


def train(kind: str, steps: int, kill: int | None, *, on_cpu: bool) -> None:
    """The program: three lines for ortflow, and whatever a kill could lose."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # products with the same bits each time
    import signal

    import torch
    from torch import distributed, nn

    import ortflow.program

    torch.use_deterministic_algorithms(True, warn_only=True)
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu") if on_cpu else torch.device("cuda", local % torch.cuda.device_count())
    if not on_cpu:
        torch.cuda.set_device(device)
    if kind != "plain":
        distributed.init_process_group("gloo" if on_cpu else "nccl", device_id=None if on_cpu else device)
    torch.manual_seed(1)
    width = 32 if on_cpu else 512
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.2)) for _ in range(4)]
    model: nn.Module = nn.Sequential(*blocks, nn.BatchNorm1d(width), nn.Linear(width, 1)).to(device)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    # FSDP2's gradients are sharded: their scaler would have to agree about infinities.
    scaler = torch.amp.GradScaler(device.type, init_scale=256.0, growth_interval=3, enabled=kind != "fsdp2")
    torch.manual_seed(100 + int(os.environ["RANK"]))  # each rank drops other activations
    data = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 64 * width).reshape(64, width))
    sampler = ortflow.program.Sampler(data, batch=16, seed=3)
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
    run = ortflow.program.start(model=model, optimizer=optimizer, schedule=schedule, scaler=scaler)
    for (batch,) in run.steps(loader, total=steps):
        noise = torch.randn(len(batch), width, device=device)  # CUDA's generator
        inputs = batch.to(device) + 0.1 * noise
        with torch.autocast(device.type, torch.bfloat16):
            loss = (model(inputs) - inputs.mean(1, keepdim=True)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
        run.log(loss=loss)
        print("step", run.position, loss.item().hex(), noise.sum().item().hex(), flush=True)
        if run.position + 1 == kill and run.attempt == 0 and run.rank == run.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    print("final", digest(model, optimizer, schedule, scaler, device), flush=True)
    if run.rank == 0:
        print("versions", *versions(device), sep=" | ", flush=True)
    if distributed.is_initialized():
        distributed.destroy_process_group()


def digest(model: Any, optimizer: Any, schedule: Any, scaler: Any, device: Any) -> str:
    """A digest of all state, of random generators too."""
    import hashlib

    import torch

    total = hashlib.sha256()
    entries = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    for tensor in (*model.state_dict().values(), *entries):
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        total.update(whole.detach().cpu().numpy().tobytes())
    total.update(repr((schedule.state_dict(), scaler.state_dict())).encode())
    random = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
    total.update(random.numpy().tobytes())
    return total.hexdigest()


def versions(device: Any) -> list[str]:
    """Of Python, torch, CUDA and NCCL; and the device."""
    import platform

    import torch

    named = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    if device.type == "cpu":
        return [*named, "CPU"]
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return [*named, f"CUDA {torch.version.cuda}", f"NCCL {nccl}", torch.cuda.get_device_name(device)]


def run(folder: Path, name: str, kind: str, ranks: int, kill: int | None, options: argparse.Namespace) -> Outcome:
    """`ortflow run` of this file; SystemExit if it does not end."""
    words = ["--train", kind, "--steps", str(options.steps)]
    words += ["--kill", str(kill)] if kill is not None else []
    words += ["--cpu"] if options.cpu else []
    command = [
        sys.executable, "-m", "ortflow", "run", str(Path(__file__).resolve()), "--name", name, "--ranks", str(ranks),
        *([] if options.cpu else ["--gpus", "1"]), f"run_dir={folder / name}", f"checkpoint.every_steps={EVERY}",
        "checkpoint.every_seconds=null", "--", *words,
    ]  # fmt: skip
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=options.seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise SystemExit(f"{name} has not ended after {options.seconds} s:\n{error.output}") from None
    seconds = time.monotonic() - began
    logs = [sorted((folder / name / "logs").glob(f"attempt-*/rank-{rank:04d}.log")) for rank in range(ranks)]
    return Outcome(done.returncode, done.stdout, [[path.read_text() for path in own] for own in logs], seconds)


def of_kind(text: str, kind: str) -> list[str]:
    """The program's own lines of a kind."""
    return [line for line in text.splitlines() if line.startswith(f"{kind} ")]


def judged(undisturbed: Outcome, killed: Outcome, kill: int) -> str:
    """What differs; empty if nothing does."""
    for outcome in (undisturbed, killed):
        if outcome.code != 0:
            return f"exit code {outcome.code}"
    for rank, (whole, parts) in enumerate(zip(undisturbed.logs, killed.logs, strict=True)):
        if len(whole) != 1 or len(parts) != 2:
            return f"rank {rank}: {len(whole)} and {len(parts)} attempts, not 1 and 2"
        (steps,), (before, after) = [of_kind(text, "step") for text in whole], [of_kind(text, "step") for text in parts]
        resumed = len(steps) - len(after)
        if not 0 < resumed <= kill:
            return f"rank {rank}: not resumed, {len(after)} of {len(steps)} steps"
        if before != steps[: len(before)] or after != steps[resumed:]:
            return f"rank {rank}: other steps"
        if len(of_kind(whole[0], "final")) != 1 or of_kind(parts[1], "final") != of_kind(whole[0], "final"):
            return f"rank {rank}: another final state"
    return ""


def main() -> None:
    """Run the cases, and print their rows; exit code 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2], help="numbers of ranks, each with a GPU")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=240.0, help="of one run at most")
    parser.add_argument("--keep", type=Path, help="folder of the runs, which is kept; it must not exist")
    parser.add_argument("--cpu", action="store_true", help="processes on CPUs in place of GPUs")
    parser.add_argument("--train", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--kill", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train, options.steps, options.kill, on_cpu=options.cpu)
        return
    if options.keep is not None:
        options.keep.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        raise SystemExit(cases((options.keep or Path(temporary)).resolve(), options))


def cases(folder: Path, options: argparse.Namespace) -> int:
    """Run the cases; returns the number of those that differ."""
    present = len(options.gpus) if options.cpu else gpus()
    if not present:
        print("no NVIDIA GPU was found; --cpu runs this program on CPUs", file=sys.stderr)
        return 1
    kill, wrong = options.steps * 2 // 3, 0
    places = "processes" if options.cpu else "GPUs"
    print(f"| {places} | program | killed after step | resumed at | the same bits | seconds | versions |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for kind in options.only:
        for ranks in CASES[kind]:
            if ranks not in options.gpus or (not options.cpu and ranks > present):
                continue
            name = f"{kind}-{ranks}"
            undisturbed = run(folder, f"{name}-undisturbed", kind, ranks, None, options)
            killed = run(folder, f"{name}-killed", kind, ranks, kill, options)
            trouble = judged(undisturbed, killed, kill)
            wrong += bool(trouble)
            text = killed.logs[0][-1] if killed.logs and killed.logs[0] else ""
            used = "; ".join(line.partition(" | ")[2].replace(" | ", ", ") for line in of_kind(text, "versions"))
            first = of_kind(text, "step")
            resumed = int(first[0].split()[1]) if first else "-"
            seconds = f"{undisturbed.seconds:.0f} and {killed.seconds:.0f}"
            row = (ranks, kind, kill, resumed, f"NO: {trouble}" if trouble else "yes", seconds, used)
            print("| " + " | ".join(map(str, row)) + " |", flush=True)
            if trouble:
                print(
                    f"{name}: the undisturbed run\n{undisturbed.output}\nthe killed run\n{killed.output}",
                    file=sys.stderr,
                )
    return min(wrong, 1)


def gpus() -> int:
    """Number of GPUs, as another process sees them: this one must not take memory of one."""
    text = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else 0


if __name__ == "__main__":
    main()
