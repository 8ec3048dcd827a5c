"""Where the time of a step on an NVIDIA GPU goes: its kernels by name, and the gaps between them.

    python benchmarks/cuda_kernels.py [--batch 8 16 32] [--profile 8] [--table kernels.md]
    python benchmarks/cuda_kernels.py --case resnet50 [--by-name]

GPT-2 124M in bf16, as `cuda.py speed --half` trains it. First the median time of a step at each micro-batch, not
profiled. Then three steps at the micro-batches of `--profile` under CUPTI, through torch.profiler, which sees the
kernels of the whole process, those inside CUDA graphs too. Kernels of one name are distinguished by their grid, because
every fused group has the same name; `--by-name` adds them up. A profiled step is a little slower; its gaps are those of
the profiled run. `--case` profiles a model of `cuda_models.py` instead, with batches prefetched.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEPS, WARM = 3, 6
WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace's events that keep the GPU busy."""
LONGEST_NAME = 70


@dataclass(frozen=True)
class Work:
    """A kernel, copy or memset: its name, and when it ran, in microseconds."""

    name: str
    start: float
    end: float


def work_in(trace: dict[str, Any], *, by_name: bool = False) -> list[Work]:
    """What the GPU did, in order of time, from a trace in Chrome's format. `by_name`: whatever the grid."""
    found = []
    for event in trace["traceEvents"]:
        if event.get("cat") in WORK:
            grid = None if by_name else event.get("args", {}).get("grid")
            name = event["name"] if not grid else f"{event['name'][:LONGEST_NAME]} {tuple(grid)}"
            found.append(Work(name, event["ts"], event["ts"] + event["dur"]))
    return sorted(found, key=lambda work: work.start)


def gaps(work: Iterable[Work]) -> list[tuple[str, float]]:
    """Idle times in microseconds, and what ran after each; pieces of work may overlap."""
    found, busy_until = list[tuple[str, float]](), None
    for each in work:
        if busy_until is not None and each.start > busy_until:
            found.append((each.name, each.start - busy_until))
        busy_until = each.end if busy_until is None else max(busy_until, each.end)
    return found


def table(work: Sequence[Work], steps: int) -> list[str]:
    """Lines of a Markdown table: the sums of a step by name, longest first, and the gaps."""
    times: dict[str, list[float]] = defaultdict(list)
    for each in work:
        times[each.name].append(each.end - each.start)
    lines = ["| kernel (grid) | a step | us each | us a step |", "|---|---|---|---|"]
    for name, all_ in sorted(times.items(), key=lambda item: -sum(item[1])):
        mean = statistics.fmean(all_)
        lines.append(f"| {name} | {len(all_) / steps:.1f} | {mean:.1f} | {sum(all_) / steps:,.0f} |")
    busy, waits = sum(map(sum, times.values())), defaultdict[str, float](float)
    for name, gap in gaps(work):
        waits[name] += gap
    idle = [gap for _, gap in gaps(work)]
    short = [gap for gap in idle if gap < 20]
    longest = sorted(waits.items(), key=lambda item: -item[1])[:12]
    lines += [
        "",
        f"{len(work) / steps:.0f} pieces of work a step, {busy / steps:,.0f} us; gaps {sum(idle) / steps:,.0f} us, of "
        f"which {sum(short) / steps:,.0f} us in {len(short) / steps:.0f} gaps under 20 us",
        "",
        "Longest waits, us a step:",
        "",
        *(f"- {each / steps:.0f} before {name}" for name, each in longest),
    ]
    return lines


def profiled(steps: Iterable[object], *, by_name: bool) -> list[Work]:
    """What the GPU does in some steps, each of which runs when it is asked for."""
    import torch

    torch.cuda.init()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in steps:
            pass
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return work_in(json.loads(path.read_text()), by_name=by_name)


def report(lines: Sequence[str], path: Path | None) -> None:
    """Append lines to a file, or print them."""
    if path is None:
        print("\n".join(lines), flush=True)
    else:
        with path.open("a") as file:
            file.write("\n".join(lines) + "\n")


def profile_case(name: str, *, by_name: bool) -> list[str]:
    """The table of a model of `cuda_models.py`."""
    import numpy as np
    from cuda_models import CASES, ortflow_losses, prepare

    random = np.random.default_rng(0)
    feeds = itertools.cycle([CASES[name].feeds(random) for _ in range(4)])
    with tempfile.TemporaryDirectory() as folder:
        prepare(name, Path(folder))
        losses = ortflow_losses(name, Path(folder))(feeds)
        for _ in range(2 * WARM):
            next(losses)
        work = profiled(itertools.islice(losses, STEPS), by_name=by_name)
    return [f"{name}, batch {CASES[name].batch}:", "", *table(work, STEPS), ""]


def main() -> None:
    """Measure and profile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 12), ("width", 768), ("heads", 12), ("context", 1024), ("vocabulary", 50304)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--batch", type=int, nargs="+", default=[8])
    parser.add_argument("--profile", type=int, nargs="*", default=[8], help="micro-batches to profile")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp16", "tf32", "fp32"])
    parser.add_argument("--table", type=Path, help="append the tables to this file; otherwise they are printed")
    parser.add_argument("--case", help="profile this model of cuda_models.py instead")
    parser.add_argument("--by-name", action="store_true", help="add up kernels of one name")
    options = parser.parse_args()
    if options.case:
        report(profile_case(options.case, by_name=options.by_name), options.table)
        return

    from step import Config, OrtflowStep, batches, make_graphs

    from ortflow.workflow.device.choice import cuda_runtime
    from ortflow.workflow.device.cuda import CudaDevice

    names = ("layers", "width", "heads", "context", "vocabulary")
    config, found = Config(**{name: getattr(options, name) for name in names}), cuda_runtime()
    print(f"{found.describe(0).name}, {options.precision}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        # The graphs depend on no batch; the run file's says what a step has.
        graphs, spec = make_graphs(config, options.batch[0], Path(folder), on_gpus=True, precision=options.precision)
        for batch in options.batch:
            data = spec.data.model_copy(update={"micro_batch": batch})
            device = CudaDevice(found, found.describe(0), precision=options.precision)
            step = OrtflowStep(graphs, spec.model_copy(update={"data": data}), 4, None, device)
            stream = batches(config, batch)
            losses = [step(*next(stream)) for _ in range(WARM)]
            seconds = []
            for _ in range(options.rounds):
                arrays = next(stream)
                start = time.perf_counter()
                step(*arrays)
                seconds.append(time.perf_counter() - start)
            median, title = statistics.median(seconds), f"micro-batch {batch}"
            print(
                f"{title}: {1e3 * median:.3f} ms a step, {batch * config.context / median:,.0f} tokens a second; "
                f"losses {', '.join(f'{loss:.6f}' for loss in losses)}",
                flush=True,
            )
            if batch in options.profile:
                arrays = [next(stream) for _ in range(STEPS)]
                work = profiled(itertools.starmap(step, arrays), by_name=options.by_name)
                report([f"{title}:", "", *table(work, STEPS), ""], options.table)
            del step


if __name__ == "__main__":
    main()
