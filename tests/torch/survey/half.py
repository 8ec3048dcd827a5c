"""Trains third-party models in half precision on an NVIDIA GPU, against PyTorch, and prints a table.

    python tests/torch/survey/half.py [--precision fp16 --only 'transformers/*' --jobs 4 --table FILE]
    python tests/torch/survey/half.py --all --part 2/7       # every model of the survey; a seventh of them

A model is `right` if its loss curve is as near to PyTorch's in double precision as PyTorch's own curve with autocast
to bf16 on the same GPU is, within a factor and an allowance. PyTorch leaves out the updates that our loss scale has
left out. If a curve is not as near, PyTorch runs again from parameters moved by about as much as rounding moves them,
and its curve furthest from double precision counts. Exits with 1 if a result is wrong, or a run failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import children

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

SECONDS = 300
STEPS = 15
FACTOR, ALLOWANCE = 3.0, 0.01
"""Of PyTorch's own distance; and what is right beside it, of losses above 1 relatively."""
MOVES = (1e-3, 1.4e-3, 2e-3)
"""How far parameters are moved, of their root mean square: rounding to bf16 moves one by 1.1e-3 of itself. A spatial
transformer on noise then ends up to 2.7e-2 from where it ends in double precision, in fp32 too."""
MODELS = (
    *(f"torchvision/{name}" for name in ("resnet18", "convnext", "mobilenet_v3_small", "swin", "vit", "densenet121")),
    *(f"timm/{name}" for name in ("beit", "deit", "convnext", "efficientnet", "eva", "pvt_v2", "mlp_mixer", "nfnet")),
    *(
        f"transformers/causal/{name}"
        for name in (
            "bart", "bert", "bloom", "camembert", "electra", "falcon", "gemma2", "gpt2", "gpt_bigcode", "gpt_neox",
            "gptj", "granite", "llama", "mistral", "opt", "phi", "phi3", "qwen2", "qwen3", "whisper",
        )
    ),
    "transformers/masked/roberta",
    "transformers/seq2seq/t5",
    *(
        f"handwritten/{name}"
        for name in ("capsules", "conv-tasnet", "spatial-transformer", "hard-gates", "neighbours")
    ),
)  # fmt: skip


def survey(name: str, precision: str, folder: Path) -> dict[str, Any]:
    """The row of a model."""
    import torch
    from catalogue import case_of
    from worker import Reference, distance, export, in_double_precision, run

    from ortflow.workflow.errors import UserError

    torch.set_num_threads(1)
    case = case_of(name)
    batches = list(case.batches(STEPS))
    try:
        export(case, folder / "model.onnx")
        losses, run_dir = run(case, folder / "model.onnx", batches, f"train.precision={precision}", *GPU)
    except UserError as error:
        return {"case": name, "result": "refused", "why": str(error)[-300:]}
    skipped = skipped_steps(run_dir)
    exact = in_double_precision(case, batches, skipped=skipped).losses

    def autocast(share: float) -> float:
        # Its cache keeps the weights' halves until the context ends: later steps would use the first's.
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            reference = Reference(case, batches, torch.float32, share=share, device="cuda", skipped=skipped)
        return distance(reference.losses, exact)

    complete = len(losses) == STEPS and len(skipped) <= STEPS // 2
    loss, own = distance(losses, exact) if complete else float("inf"), autocast(0.0)
    if verdict(loss, own) == "wrong":
        own = max(own, *map(autocast, MOVES))
    log = "".join(path.read_text() for path in run_dir.glob("logs/*/rank-*.log"))
    obstacle = re.search(r"a micro-batch is not captured as a CUDA graph: (.+)", log)
    why = " ".join(obstacle[1].split())[:300] if obstacle else ""
    captured = "a micro-batch is captured" in log
    return {
        "case": name, "own": own, "loss": loss, "skipped": len(skipped), "captured": captured,
        "result": verdict(loss, own), "why": why,
    }  # fmt: skip


def skipped_steps(run_dir: Path) -> set[int]:
    """Numbers of the steps whose update a run has left out, because its loss scale was too large for fp16."""
    events = map(json.loads, (run_dir / "events/rank-0000.jsonl").read_text().splitlines())
    return {e["step"] for e in events if e["event"] == "skipped_step" and e["reason"].startswith("overflow")}


GPU = ("resources.gpus_per_rank=1", "export.enabled=false")


def verdict(loss: float, own: float) -> str:
    """Whether a distance from double precision is right, compared with PyTorch's own."""
    return "right" if loss <= FACTOR * own + ALLOWANCE else "wrong"


def row_of(name: str, precision: str) -> dict[str, Any]:
    """The row of one model, from a separate process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory(prefix="ortflow-half-") as folder:
        command = [sys.executable, str(HERE / "half.py"), "--one", name, "--folder", folder, "--precision", precision]
        return children.row_of(name, command, environment, SECONDS)


def line_of(row: dict[str, Any]) -> str:
    """A row of the Markdown table."""
    numbers = [f"{row[name]:.1e}" if name in row else "" for name in ("loss", "own")]
    captured = {True: "yes", False: "no"}.get(row.get("captured"), "")
    last = row.get("skipped", ""), captured, row.get("why", "")
    return f"| {row['case']} | {row['result']} | {' | '.join(numbers)} | {' | '.join(map(str, last))} |"


def main() -> None:
    """Run the survey."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp16"])
    parser.add_argument("--only", default="*", help="a pattern of names")
    parser.add_argument("--all", action="store_true", help="every model of the survey")
    parser.add_argument("--part", default="0/1", help="K/N: every Nth, from the Kth on")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(survey(options.one, options.precision, options.folder)))
        return
    from catalogue import names

    chosen = [name for name in (names() if options.all else MODELS) if fnmatch(name, options.only)]
    first, _, every = options.part.partition("/")
    chosen = chosen[int(first) :: int(every)]
    rows = []
    with ThreadPoolExecutor(options.jobs) as pool:
        # In the order of their ends: a run of this program that is killed has printed all that it knew.
        for done in as_completed([pool.submit(row_of, name, options.precision) for name in chosen]):
            rows.append(done.result())
            print(line_of(rows[-1]), flush=True)
    rows.sort(key=lambda row: chosen.index(row["case"]))
    results = [row["result"] for row in rows]
    print(", ".join(f"{results.count(kind)} {kind}" for kind in ("right", "refused", "wrong", "crashed")))
    if options.table:
        head = "| model | result | loss off | PyTorch's own | steps skipped | captured | why |\n|" + "---|" * 7
        options.table.write_text("\n".join([head, *map(line_of, rows)]) + "\n")
    if not rows or results.count("wrong") + results.count("crashed"):
        sys.exit(1)


if __name__ == "__main__":
    main()
