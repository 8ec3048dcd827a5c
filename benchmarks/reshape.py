"""`ortflow checkpoint reshape` and `merge`: the memory that they need, against the size of the state.

    python benchmarks/reshape.py [--sizes 50 100 200 --tensor 8 --most 1.0]

Writes checkpoints of 3 ranks with parameters of SIZE MB and two moments, in tensors of --tensor MB, with the
project's own writers. Then rewrites each for 2 ranks, and merges it with its moments into one file, each in a process
of its own, whose highest resident memory is set back before it begins. Prints the growth over what the process held
before, beside the largest tensor and the whole state. If torch is installed, its offline consolidation,
`dcp_to_torch_save`, rewrites a checkpoint of the same tensors beside them. Exit code 1 if one of ortflow's grows by
more than --most of a tensor plus 16 MB, whatever the state. Linux only: reads /proc.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

MB = 1_000_000
FIXED = 16 * MB
"""Pieces of files that are read in parallel, whatever the tensors."""
MOMENTS = ("moment1", "moment2")


def held(field: str) -> int:
    """Bytes of a field of this process's status: VmRSS, or VmHWM, the highest since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"this system does not report {field}")


def forget_peak() -> None:
    """Set VmHWM back to what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def write_checkpoint(folder: Path, megabytes: int, tensor: int, ranks: int = 3) -> None:
    """A checkpoint as `ranks` ranks write it."""
    from ortflow.workflow.checkpoint.commit import commit
    from ortflow.workflow.checkpoint.store import DirectoryStore
    from ortflow.workflow.checkpoint.writer import Writer, specs
    from ortflow.workflow.device.cpu import HostBuffer
    from ortflow.workflow.layout import FlatIndex, Tensor

    index = FlatIndex.place(Tensor(f"t{n}", (tensor * MB // 4,), "decay") for n in range(max(1, megabytes // tensor)))
    buffers = {name: HostBuffer(np.ones(index.size, np.float32)) for name in ("parameters", *MOMENTS)}
    store, records = DirectoryStore(folder), []
    for rank in range(ranks):
        writer = Writer(store, buffers, rank=rank, world_size=ranks, attempt=0)
        writer.start(1, urgent=True)
        record = writer.wait().record
        if record is None:
            raise SystemExit(writer.poll().reason)
        records.append(record)
    progress = {"step": 1, "updates": 1, "epoch": 0, "sample": 0}
    commit(store, 1, 0, records, buffers=specs(buffers), index=index, progress=progress, environment={})


def write_peer(folder: Path, megabytes: int, tensor: int) -> None:
    """The same tensors as a checkpoint of torch.distributed."""
    import torch
    import torch.distributed.checkpoint as dcp

    count = max(1, megabytes // tensor)
    state = {
        f"{name}/t{n}": torch.ones(tensor * MB // 4) for name in ("parameters", *MOMENTS) for n in range(count)
    }  # fmt: skip
    dcp.save(state, checkpoint_id=folder)


def rewrite(kind: str, source: Path, target: Path) -> tuple[int, int]:
    """Rewrite a checkpoint in this process; returns the growth of its memory, and the bytes that it wrote."""
    if kind == "torch":
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        forget_peak()
        before = held("VmRSS")
        dcp_to_torch_save(source, target)
        return held("VmHWM") - before, target.stat().st_size
    from ortflow.workflow.checkpoint.reshape import merge, reshape
    from ortflow.workflow.checkpoint.store import DirectoryStore

    store = DirectoryStore(source)
    forget_peak()
    before = held("VmRSS")
    if kind == "merge":
        size = merge(store, 1, target, moments=True)
    else:
        reshape(store, 1, 2, DirectoryStore(target))
        size = sum(file.stat().st_size for file in target.rglob("*.safetensors"))
    return held("VmHWM") - before, size


def alone(*words: str) -> tuple[int, int]:
    """Run this program in a process of its own; the two numbers that it prints."""
    done = subprocess.run([sys.executable, __file__, *words], check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return int(found[0]), int(found[1])


def main() -> int:
    """Write, rewrite, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[50, 100, 200], help="MB of parameters")
    parser.add_argument("--tensor", type=int, default=8, help="MB of each tensor")
    parser.add_argument("--most", type=float, default=1.0, help="tensors that a rewrite may hold")
    parser.add_argument("--child", nargs=3, metavar=("KIND", "SOURCE", "TARGET"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        kind, source, target = options.child
        print(json.dumps(rewrite(kind, Path(source), Path(target))))
        return 0
    kinds = ["reshape", "merge", *(["torch"] if importlib.util.find_spec("torch") else [])]
    growths: dict[str, list[int]] = {kind: [] for kind in kinds}
    print(f"{'':20} {'state':>8} {'tensor':>8} {'growth':>8}  {'/ tensor':>8} {'/ state':>8}")
    for size in options.sizes:
        for kind in kinds:
            with tempfile.TemporaryDirectory() as name:
                source, target = Path(name) / "checkpoints", Path(name) / "rewritten"
                (write_peer if kind == "torch" else write_checkpoint)(source, size, options.tensor)
                growth, written = alone("--child", kind, str(source), str(target))
            growths[kind].append(growth)
            label = "dcp_to_torch_save" if kind == "torch" else f"checkpoint {kind}"
            print(
                f"{label:20} {written / MB:5.0f} MB {options.tensor:5.0f} MB {growth / MB:5.1f} MB  "
                f"{growth / (options.tensor * MB):8.2f} {growth / written:8.3f}", flush=True,
            )  # fmt: skip
    allowed = options.most * options.tensor * MB + FIXED
    wrong = [kind for kind in kinds if kind != "torch" and max(growths[kind]) > allowed]
    for kind in wrong:
        print(f"{kind} held {max(growths[kind]) / MB:.1f} MB more, {allowed / MB:.1f} MB are allowed")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
