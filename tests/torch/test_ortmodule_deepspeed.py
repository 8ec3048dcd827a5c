"""ORTModule and FusedAdam in DeepSpeed, ORTPipelineModule, and ORTModule in Horovod, on two ranks, against PyTorch."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from messages import mentions

pytest.importorskip("torch")

PROGRAMS = Path(__file__).parent / "programs"
TOLERANCE = 2e-5


def printed(package: str, *command: str) -> list[list[str]]:
    """The words of a program's lines that begin with `difference` or `refused`; skips without the package."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: .ci/install_torch installs it")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, timeout=300, env={**os.environ, "PATH": path}
    )
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [line.partition("<stdout>:")[2] or line for line in result.stdout.splitlines()]
    return [line.split() for line in lines if line.startswith(("difference ", "refused "))]


def check(words: list[str]) -> None:
    """Losses and parameters are the same, and the parameters have moved."""
    of_losses, of_parameters, distance = map(float, words[2:])
    assert max(of_losses, of_parameters) < TOLERANCE, words
    assert distance > 100 * TOLERANCE, words


def test_deepspeed() -> None:
    """Stage 3 divides parameters among the ranks, and is refused."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    launcher = ("torch.distributed.run", "--nproc-per-node", "2", "--master-port", port)
    program = str(PROGRAMS / "ortmodule_deepspeed.py")
    names = ["stage-1", "stage-2", "stage-3", "pipeline"]
    found = printed("deepspeed", *launcher, program, *names)
    assert [words[1] for words in found] == names
    refusal = found.pop(2)
    assert mentions(" ".join(refusal), "'0.weight'", "ZeRO stage 3", "stage 1 or 2", "fully_shard")
    for words in found:
        check(words)


def test_horovod() -> None:
    launcher = ("horovod.runner.launch", "-np", "2", sys.executable)
    (found,) = printed("horovod", *launcher, str(PROGRAMS / "ortmodule_horovod.py"))
    check(found)
