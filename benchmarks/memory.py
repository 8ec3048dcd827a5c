"""Peak resident memory of a rank on the CPU: ortflow, from its first step to the export, against PyTorch eager.

    python benchmarks/memory.py                                   # GPT-2 124M, micro-batch 4, 1,024 tokens: 8 GB
    python benchmarks/memory.py --model vit --batch 8             # ViT-B/16 of torchvision
    python benchmarks/memory.py --model resnet18 --batch 8

Each side trains the same model with AdamW in a process of its own, one after the other. ortflow's is the rank of a real
run: it builds the graphs, trains, saves a checkpoint while it trains, and exports; the check of the gradient, which is
made once for a model, is left out. PyTorch's trains only. Prints the peak of each of the rank's phases, and its whole
peak over PyTorch's: the ratio that counts.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

FOLDER = Path(__file__).resolve().parent
GPT2 = {"layers": 12, "width": 768, "heads": 12, "vocabulary": 50257}
CLASSES, IMAGE = 1000, (3, 224, 224)
IMAGE_MODELS = {"vit": "vit_b_16", "resnet18": "resnet18"}
"""--model -> its name in torchvision."""
STEPS = 2
PERIOD = 0.01
"""Seconds between two looks at a process."""
MIB = 1 << 20


def make(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Model and data in the folder; the run file's sections that name them."""
    from ortflow.workflow.data.write import record_batch, write_set

    random = np.random.default_rng(0)
    count = options.batch * STEPS
    if options.model == "gpt":
        sizes = {**GPT2, "layers": options.layers, "context": options.context}
        words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
        program = FOLDER.parent / "examples" / "gpt" / "model.py"
        subprocess.run([sys.executable, str(program), "--output", str(folder / "model.onnx"), *words], check=True)
        columns = {"tokens": random.integers(0, GPT2["vocabulary"], (count, options.context + 1))}
        used = {"tokens": "tokens[:-1]", "labels": "tokens[1:]"}
    else:
        subprocess.run(
            [sys.executable, __file__, "--side", "export", "--model", options.model, str(folder / "model.onnx")],
            check=True,
        )
        columns = {
            "input": random.standard_normal((count, *IMAGE), np.float32),
            "labels": random.integers(0, CLASSES, count),
        }
        used = {"input": "input", "labels": "labels"}
    write_set(folder / "train.arrow", [record_batch(columns)])
    return {
        "model": {"path": "model.onnx", "loss": "cross_entropy"},
        "data": {"train": {"path": "train.arrow", "columns": used}, "micro_batch": options.batch},
    }


def export_image_model(name: str, path: Path) -> None:
    """Write a model of torchvision as a model to train."""
    import torch
    from torchvision.models import get_model

    import ortflow

    ortflow.export_for_training(get_model(IMAGE_MODELS[name]), torch.randn(2, *IMAGE), path, input_names=["input"])


def train_torch(options: argparse.Namespace) -> None:
    """The same model in PyTorch as its users train it; prints this process' peak in MiB."""
    import torch
    from torch_gpt import Gpt, Sizes

    torch.set_num_threads(options.threads)
    if options.model == "gpt":
        sizes = Sizes(**{**GPT2, "layers": options.layers, "context": options.context})
        model: torch.nn.Module = Gpt(sizes)
    else:
        from torchvision.models import get_model

        model = get_model(IMAGE_MODELS[options.model])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(STEPS):
        if options.model == "gpt":
            tokens = torch.randint(GPT2["vocabulary"], (options.batch, options.context + 1))
            loss = model(tokens[:, :-1], tokens[:, 1:])
        else:
            labels = torch.randint(CLASSES, (options.batch,))
            loss = torch.nn.functional.cross_entropy(model(torch.randn(options.batch, *IMAGE)), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def watch(launcher: subprocess.Popen[bytes], record: Path) -> dict[str, float]:
    """MiB that the rank and the processes it starts hold at most, for each of its phases; `peak` over all."""
    peaks: dict[str, float] = {}
    root = psutil.Process(launcher.pid)
    while launcher.poll() is None:
        try:
            tree = [p for p in [root, *root.children(recursive=True)] if "ortflow.workflow." in " ".join(p.cmdline())]
            held = sum(process.memory_info().rss for process in tree) / MIB
        except psutil.NoSuchProcess:
            continue
        peaks["peak"] = max(peaks.get("peak", 0.0), held)
        name = phase(record)
        peaks[name] = max(peaks.get(name, 0.0), held)
        time.sleep(PERIOD)
    return peaks


def account(record: Path) -> dict[str, float]:
    """MiB of each of the parts that the rank itself tells at the end of training."""
    events = (json.loads(line) for line in record.read_text().splitlines())
    (reported,) = (event for event in events if event["event"] == "memory")
    return {part: reported[part] / MIB for part in ("parameters", "gradients", "moments", "checkpoint", "values")}


def phase(record: Path) -> str:
    """The last phase that began."""
    found = "start"
    try:
        lines = record.read_text().splitlines()
    except FileNotFoundError:
        return found
    for line in lines:
        event = json.loads(line) if line.endswith("}") else {}
        if event.get("event") == "phase_start":
            found = str(event["phase"])
    return found


def train_ortflow(options: argparse.Namespace, folder: Path) -> tuple[dict[str, float], dict[str, float]]:
    """A whole run with one rank: the peak of each of its phases, and its own account."""
    run = {
        "name": "memory",
        **make(options, folder),
        "train": {
            "steps": STEPS,
            "optimizer": {"name": "adamw", "lr": 1e-3},
            "clip_norm": 1.0,
            "check_gradient": False,
        },
        "checkpoint": {"every_steps": 1},
        "resources": {"ranks_per_node": 1, "cpus_per_rank": options.threads},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    with (folder / "log").open("wb") as log:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "ortflow", "run", "run.yaml"], cwd=folder, stdout=log, stderr=log
        )
        record = folder / "runs" / "memory" / "events" / "rank-0000.jsonl"
        peaks = watch(launcher, record)
    if launcher.returncode:
        raise SystemExit((folder / "log").read_text())
    return peaks, account(record)


def main() -> None:
    """Run both, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("gpt", *IMAGE_MODELS), default="gpt")
    parser.add_argument("--side", choices=("torch", "export"), help=argparse.SUPPRESS)
    parser.add_argument("path", nargs="?", type=Path, help=argparse.SUPPRESS)
    for name, value in (("layers", 12), ("context", 1024), ("batch", 4), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    if options.side == "torch":
        train_torch(options)
        return
    if options.side == "export":
        export_image_model(options.model, options.path)
        return
    with tempfile.TemporaryDirectory() as folder:
        peaks, parts = train_ortflow(options, Path(folder))
    peer = float(subprocess.run(
        [sys.executable, __file__, "--side", "torch", *sys.argv[1:]], check=True, stdout=subprocess.PIPE, text=True
    ).stdout)  # fmt: skip
    peak = peaks.pop("peak")
    for name, value in peaks.items():
        print(f"{name:12} {value:8.0f} MiB")
    print("of which     " + ", ".join(f"{name} {value:.0f}" for name, value in parts.items()))
    print(f"torch eager  {peer:8.0f} MiB\nortflow      {peak:8.0f} MiB")
    print(f"ortflow / torch eager = {peak / peer:.2f}")


if __name__ == "__main__":
    main()
