"""The doctor's queries to a cluster beyond those of a run: read only, one command each."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from ortflow.launchers.slurm.commands import SETTINGS, NoAnswer, Refused, Slurm
from ortflow.launchers.slurm.fit import Asked
from ortflow.launchers.slurm.limits import ACCOUNT_COLUMNS, ASSOC_FORMAT, QOS_COLUMNS, Limits, read_limits
from ortflow.launchers.slurm.runner import Runner, Settings, run_here
from ortflow.launchers.slurm.site import (
    Association,
    Node,
    Partition,
    read_associations,
    read_config,
    read_nodes,
    read_partitions,
    read_plugins,
)
from ortflow.workflow.errors import OrtflowError, UserError

NEEDED = ("sbatch", "squeue", "scontrol", "scancel", "srun")
"""Commands without which nothing works; srun is needed only inside a job, but belongs to the same package."""
FINE_TO_HAVE = ("sacct", "sacctmgr")


class Survey(Slurm):
    """The cluster under examination; raises as `Slurm` does, and OrtflowError with Slurm's message."""

    def __init__(self, runner: Runner = run_here) -> None:
        super().__init__(runner)

    def has(self, command: str) -> bool:
        """Whether there is a command of this name; raises UserError if it finds no cluster."""
        try:
            self._read(command, "--version")
        except UserError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return False
            raise
        return True

    def accounts(self) -> bool:
        """Whether ended jobs are stored and can be queried here."""
        return self.has("sacct") and super().accounts()

    def ping(self) -> float:
        """Seconds until the controller has answered; raises NoAnswer."""
        begun = time.monotonic()
        answer = self._read("scontrol", "ping")
        if not re.search(r"is UP\b", answer.out):
            raise NoAnswer(answer.message.partition(";")[0])
        return time.monotonic() - begun

    def config(self) -> dict[str, str]:
        """Its settings."""
        return read_config(self._reported("scontrol", "show", "config"))

    def partitions(self) -> list[Partition]:
        """The partitions that this user may see."""
        return read_partitions(self._reported("scontrol", "show", "partition", "--oneliner"))

    def nodes(self) -> list[Node]:
        """Its compute nodes."""
        return read_nodes(self._reported("scontrol", "show", "node", "--oneliner"))

    def associations(self, user: str) -> list[Association]:
        """What the accounting allows a user."""
        query = ["assoc", f"user={user}", "format=account,partition,qos"]
        return read_associations(self._reported("sacctmgr", "-n", "-P", "show", *query))

    def limits(self, user: str, request: Asked, places: Sequence[Partition]) -> list[tuple[str, Limits]]:
        """Limits of a job's QOS, of its partitions' QOS and of its account, each with its name."""
        account = request.account or self._accounting("user", user, "format=DefaultAccount").strip()
        whose = ("assoc", f"user={user}", f"account={account}")
        names = [
            request.qos or _usual(self._accounting(*whose, "format=DefaultQOS,QOS")),
            *(partition.qos for partition in places),
        ]
        account_limits = read_limits(self._accounting(*whose, f"format={','.join(ASSOC_FORMAT)}"), ACCOUNT_COLUMNS)
        limits = [(f"account {row.name}", row) for row in account_limits]
        for name in dict.fromkeys(filter(None, names)):
            rows = self._accounting("qos", name, f"format={','.join(QOS_COLUMNS)}")
            limits += [(f"QOS {row.name}", row) for row in read_limits(rows, QOS_COLUMNS)]
        return limits

    def _accounting(self, *arguments: str) -> str:
        return self._reported("sacctmgr", "-n", "-P", "show", *arguments)

    def plugins(self) -> list[str]:
        """Plug-ins that `srun --mpi=list` names, whether they load or not."""
        answer = self._read("srun", "--mpi=list")
        return read_plugins(f"{answer.out}\n{answer.err}")

    def hostnames(self, nodes: str) -> list[str]:
        """Expand node[1-2] to single names."""
        return self._reported("scontrol", "show", "hostnames", nodes).split()

    def would_take(self, script: str, settings: Settings) -> str:
        """sbatch's check of a script without submission; raises Refused."""
        answer = self._run(["sbatch", "--test-only", script], {"LC_ALL": "C", **settings})
        if answer.code:
            raise Refused(answer.message)
        return re.sub(r"^(?:sbatch: )?Job \d+ ", "", answer.message)

    def _reported(self, *command: str) -> str:
        answer = self._run(command, SETTINGS)
        if answer.code:
            raise OrtflowError(f"{command[0]} reports: {answer.message}")
        return answer.out


def _usual(text: str) -> str | None:
    """The QOS of a job that names none, from DefaultQOS|QOS. Pure."""
    default, _, every = text.partition("\n")[0].partition("|")
    return default or ("normal" if "normal" in every.split(",") else None)
