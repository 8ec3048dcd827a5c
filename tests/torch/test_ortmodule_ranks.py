"""ORTModule in DDP, FSDP and activation checkpointing on two ranks, against PyTorch over 20 steps; its resumption."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from test_program_resume import check_resumed

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "ortmodule_ranks.py"
TOLERANCE = 2e-5


def differences(*names: str) -> dict[str, list[float]]:
    """Composition -> the differences of losses and of parameters."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    result = subprocess.run([*command, str(PROGRAM), *names], capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr[-3000:]
    return {line.split()[0]: [float(number) for number in line.split()[1:]] for line in result.stdout.splitlines()}


@pytest.mark.rotates
@pytest.mark.parametrize(
    "names",
    [("ddp", "fsdp2-blocks"), ("static", "checkpointed"), ("unused", "views"), ("no_sync", "fsdp2")],
    ids=" and ".join,
)
def test_twenty_steps_on_two_ranks(names: tuple[str, ...]) -> None:
    found = differences(*names)
    assert sorted(found) == sorted(names)
    assert {name: values for name, values in found.items() if max(values) > TOLERANCE} == {}


@pytest.mark.rotates
@pytest.mark.parametrize("model", ["ddp", "fsdp"])
def test_two_killed_ranks_continue_bit_identically(tmp_path: Path, model: str) -> None:
    arguments = ("loader=distributed", "dropout=0" if model == "fsdp" else "dropout=1", "scaler=0", "ort=1")
    check_resumed(tmp_path, f"model={model}", *arguments, ranks=2)
