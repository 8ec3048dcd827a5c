"""`ortflow doctor` for the GPUs of this machine: findings from a process of the ranks' interpreter."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ortflow.launchers.findings import Finding, fault, ok, warning
from ortflow.launchers.view.lines import size
from ortflow.workflow.device.floors import floor, link_floor

ABOUT = "GPU"
SUM = "sum over GPUs"
WITHIN = 300.0
"""Seconds: the first use of a GPU after a boot is slow, and a machine may have eight."""
CLAIMED = 0.1
"""Share of a GPU's memory in use before the test, above which another process uses it."""
BEHIND = 0.8
"""Share of the machine's median speed below which a GPU is slow."""
THROTTLED = {8: "power or heat", 32: "heat", 64: "heat", 128: "its power supply", 4: "its power limit"}
"""Bits of NVML's clock event reasons; those that a healthy GPU at full load may also have come last."""
_SLOW = "`nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE` shows what throttles it"


def examine_gpu(python: str, ranks: int) -> Iterator[Finding]:
    """Whether `ranks` ranks of a machine can train on its GPUs, and their speed."""
    try:
        answer = subprocess.run(
            [python, "-m", "ortflow.workflow.runtime_check.gpu_report", str(ranks)],
            capture_output=True, text=True, timeout=WITHIN, cwd="/", stdin=subprocess.DEVNULL, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        yield fault(ABOUT, f"no answer within {WITHIN:.0f} s", "check the output of nvidia-smi")
        return
    except OSError as error:
        yield fault(ABOUT, f"cannot be checked: {error}")
        return
    try:
        report = json.loads(answer.stdout.splitlines()[-1])
    except (ValueError, IndexError, RecursionError):
        lines = [line for line in answer.stderr.splitlines() if line.strip()] or [f"exit code {answer.returncode}"]
        yield fault(ABOUT, f"cannot be checked: {lines[-1].strip()}")
        return
    yield from from_report(report, ranks)


def from_report(report: Mapping[str, Any], ranks: int) -> Iterator[Finding]:
    """What `ortflow.workflow.runtime_check.gpu_report` reported. Pure."""
    if "error" in report:
        yield fault(ABOUT, report["error"], report.get("fix") or "")
        return
    gpus: Sequence[Mapping[str, Any]] = report["gpus"]
    yield _all(report, gpus, ranks)
    for index, gpu in enumerate(gpus):
        yield from _one(f"number {index}, {gpu['name']},", gpu, gpus)
    if "sum" in report:
        yield _sum(report["sum"], gpus)


def _all(report: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]], ranks: int) -> Finding:
    speeds = "; ".join(
        f"a product of matrices in {kind}: {_range([gpu[kind] / 1e12 for gpu in gpus if kind in gpu])} TFLOP/s"
        for kind in ("fp32", "fp16")
        if any(kind in gpu for gpu in gpus)
    )
    first, free_size = gpus[0], size(min(gpu["free"] for gpu in gpus))
    message = (
        f"{report['count']} x {first['name']}, {free_size} of {size(first['total'])} free; "
        f"driver for CUDA {_version(report['driver'])}, {report['package']} for {_version(report['runtime'])}"
        + (f"; {speeds}" if speeds else "")
    )
    flops = [gpu.get("fp32") for gpu in gpus]
    if ranks > report["count"]:
        return warning(ABOUT, f"{message}; {ranks} ranks share them", "lower resources.ranks_per_node", flops=flops)
    return ok(ABOUT, message, flops=flops)


def _one(name: str, gpu: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    if "error" in gpu:
        yield fault(ABOUT, f"{name} fails: {gpu['error']}")
    if errors := gpu.get("uncorrected"):
        yield fault(ABOUT, f"{name} had {errors} uncorrected memory errors since it was started",
                    "have it reset, and replaced if they recur (`nvidia-smi -q -d ECC`)")  # fmt: skip
    if gpu.get("broken_rows"):
        yield warning(ABOUT, f"{name} has rows of memory that wait to be replaced, or cannot be",
                      "have it reset, or replaced (`nvidia-smi -q -d ROW_REMAPPER`)")  # fmt: skip
    used, count = gpu["total"] - gpu["free"], gpu.get("processes") or 0
    if count or used > CLAIMED * gpu["total"]:
        owners = f"{count} other process{'' if count == 1 else 'es'}" if count else "another process"
        yield warning(ABOUT, f"{name} is in use: {owners}, {size(used)} of its memory taken",
                      "`nvidia-smi` lists them; give each rank a GPU of its own")  # fmt: skip
    for kind in ("fp32", "fp16"):
        if kind in gpu and (slow := _slow(gpu, kind, gpus)) is not None:
            yield warning(ABOUT, f"{name} {slow}{_throttled(gpu)}", _SLOW)


def _slow(gpu: Mapping[str, Any], kind: str, gpus: Sequence[Mapping[str, Any]]) -> str | None:
    """Fault in a GPU's speed: below the minimum of its model, or below the other GPUs."""
    speed, least = gpu[kind] / 1e12, floor(gpu["name"], kind)
    text = f"computes {speed:.1f} TFLOP/s in {kind}"
    if least is not None and speed < least:
        return f"{text}; {least:.0f} or more are expected"
    alike = [other[kind] / 1e12 for other in gpus if kind in other and other["name"] == gpu["name"]]
    if speed < BEHIND * statistics.median(alike):
        return f"{text}, and its neighbours {statistics.median(alike):.1f}"
    return None


def _throttled(gpu: Mapping[str, Any]) -> str:
    reasons = [reason for bit, reason in THROTTLED.items() if int(gpu.get("slowed") or 0) & bit]
    return f": throttled by {reasons[0]}" if reasons else ""


def _sum(result: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]]) -> Finding:
    if result.get("missing"):
        return warning(
            SUM, "NCCL is not installed: sums over ranks go through host memory", "pip install 'ortflow[cuda]'"
        )
    if "error" in result:
        message, _, fix = str(result["error"]).partition("; ")
        return fault(SUM, message, fix)
    least, speed = min(link_floor(gpu["name"]) for gpu in gpus), result["gbps"]
    version = result["nccl"]
    number = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    message = f"{len(gpus)} GPUs add up 256 MiB at {speed:.0f} GB/s over each (NCCL {number})"
    if speed < least:
        fix = "`nvidia-smi topo -m` shows how they are joined; NCCL_DEBUG=INFO shows the path that NCCL takes"
        return warning(SUM, f"{message}; expected are {least:.0f} or more", fix, gbps=speed)
    return ok(SUM, message, gbps=speed)


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return low if low == high else f"{low} to {high}"


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
