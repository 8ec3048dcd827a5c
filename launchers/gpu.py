"""`ortflow doctor` for the GPUs of this machine: one finding, from a process of the ranks' interpreter."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from typing import Any

from ortflow.launchers.findings import Finding, fault, ok, warning
from ortflow.launchers.lines import size

ABOUT = "GPU"
WITHIN = 120.0
"""Seconds: the first use of a GPU after a start of the machine is slow."""


def examine_gpu(python: str, ranks: int) -> Finding:
    """Whether `ranks` ranks of a machine can train on its GPUs."""
    try:
        told = subprocess.run(
            [python, "-m", "ortflow.workflow.gpu_report"],
            capture_output=True, text=True, timeout=WITHIN, cwd="/", stdin=subprocess.DEVNULL, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return fault(ABOUT, f"does not answer within {WITHIN:.0f} s", "look at nvidia-smi")
    except OSError as error:
        return fault(ABOUT, f"cannot be looked at: {error}")
    try:
        return from_report(json.loads(told.stdout.splitlines()[-1]), ranks)
    except (ValueError, IndexError):
        lines = [line for line in told.stderr.splitlines() if line.strip()] or [f"exit code {told.returncode}"]
        return fault(ABOUT, f"cannot be looked at: {lines[-1].strip()}")


def from_report(report: Mapping[str, Any], ranks: int) -> Finding:
    """What `ortflow.workflow.gpu_report` told. Pure."""
    if "error" in report:
        return fault(ABOUT, report["error"], report.get("fix") or "")
    speed = report["flops"] / 1e12
    what = (
        f"{report['count']} x {report['name']}, {size(report['free'])} of {size(report['total'])} free; "
        f"driver for CUDA {_version(report['driver'])}, {report['package']} for {_version(report['runtime'])}; "
        f"a product of matrices in fp32: {speed:.1f} TFLOP/s"
    )
    if ranks > report["count"]:
        return warning(
            ABOUT, f"{what}; {ranks} ranks share them", "lower resources.ranks_per_node", flops=report["flops"]
        )
    return ok(ABOUT, what, flops=report["flops"])


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
