"""The command line of a program. Pure."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence

from ortflow.workflow.program.variables import World
from ortflow.workflow.ranks import Place
from ortflow.workflow.spec.program import ProgramSection

_CALL = (
    "import sys; from importlib import import_module; from operator import attrgetter; "
    "sys.path.insert(0, '') if '' not in sys.path else None; "
    "sys.exit(attrgetter({name!r})(import_module({module!r}))())"
)


def command_of(program: ProgramSection, python: str) -> list[str]:
    """Executable and arguments of one process, without a framework's launcher.

    A script is started as a person would start it: its folder is on `sys.path`, and `__main__` is the script.
    """
    return [*_interpreter(program, python), *program.words] if program.kind != "command" else program.words


def node_command(
    program: ProgramSection, python: str, place: Place, world: World, *, on_gpus: bool = False
) -> list[str]:
    """The command that starts all processes of a node, by the launcher of a framework.

    Its processes get their rank from that launcher, which counts as ortflow does: node by node.
    """
    nodes, node = len(world.nodes), world.nodes.index(world.hosts[place.rank])
    address, port, arguments = world.address, str(world.main_port), program.words
    target = ["--module", str(program.module)] if program.module is not None else [str(program.script)]
    if program.start == "torchrun":
        return [
            python, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--node-rank", str(node),
            "--nproc-per-node", str(place.local_size), "--master-addr", address, "--master-port", port,
            "--max-restarts", "0", *target, *arguments,
        ]  # fmt: skip
    if program.start == "deepspeed":
        info = {host: list(range(world.hosts.count(host))) for host in world.nodes}
        return [
            python, "-m", "deepspeed.launcher.launch",
            f"--world_info={base64.urlsafe_b64encode(json.dumps(info).encode()).decode()}", f"--node_rank={node}",
            f"--master_addr={address}", f"--master_port={port}", *target, *arguments,
        ]  # fmt: skip
    if program.start == "accelerate":
        kind = ["--multi_gpu"] if on_gpus and world.size > 1 else [] if on_gpus else ["--cpu"]
        return [
            python, "-m", "accelerate.commands.launch", *kind, "--num_processes", str(world.size),
            "--num_machines", str(nodes), "--machine_rank", str(node), "--main_process_ip", address,
            "--main_process_port", port, *target, *arguments,
        ]  # fmt: skip
    assert program.start == "horovod"
    call = "from horovod.runner.launch import run_commandline; run_commandline()"
    started = [python, "-m", str(program.module)] if program.module is not None else [python, str(program.script)]
    return [python, "-c", call, "-np", str(place.local_size), "--gloo", *started, *arguments]


PACKAGES = {"torchrun": "torch", "deepspeed": "deepspeed", "accelerate": "accelerate", "horovod": "horovod"}
"""Way to start -> the package that has the launcher."""


def _interpreter(program: ProgramSection, python: str) -> Sequence[str]:
    if program.script is not None:
        return [python, program.script]
    if program.module is not None:
        return [python, "-m", program.module]
    assert program.function is not None
    module, _, name = program.function.partition(":")
    return [python, "-c", _CALL.format(module=module, name=name)]
