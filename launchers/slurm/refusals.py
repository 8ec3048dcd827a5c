"""Messages for what sbatch refuses: its own message, and what to change in the run file. Pure."""

from __future__ import annotations

import re

from ortflow.workflow.errors import UserError

_ANY = (
    "lower what resources asks for, give another backends.slurm.partition, or leave more nodes in "
    "backends.slurm.nodelist, exclude and constraint"
)
TABLE: tuple[tuple[str, str | None, str], ...] = (
    # message, key, fix
    (r"invalid partition|partition name", "backends.slurm.partition", "`sinfo` lists those there are"),
    (r"Invalid qos", "backends.slurm.qos", "`sacctmgr show assoc user=$USER format=account,qos` lists yours"),
    (r"Invalid account", "backends.slurm.account", "`sacctmgr show assoc user=$USER format=account,qos` lists yours"),
    (r"not allowed|not permitted to use this partition|access/permission|User's group", "backends.slurm.partition",
     "choose one that your account may use"),
    (r"policy|AssocMaxSubmit|QOSMaxSubmit|submit limit", None,
     "wait until some of your jobs have finished, or submit under another backends.slurm.account or qos"),
    (r"--time|time limit|Requested time", "resources.time_limit", "give one that the partition allows"),
    (r"Memory specification|--mem", "resources.memory", "ask for no more than a node has"),
    (r"CPU count", "resources.cpus_per_rank", "ask for no more cores of a node than it has"),
    (r"gres|gpu|GRES", "resources.ranks_per_node",
     "ask for no more GPUs of a node than it has, and for a resources.gpu_type that it has"),
    (r"invalid number of nodes", "backends.slurm.nodelist",
     "name as many nodes as resources.nodes has, or fewer, or raise resources.nodes"),
    (r"More processors requested|Node count|node count|Node configuration|node configuration", "resources", _ANY),
    (r"feature", "backends.slurm.constraint", "`sinfo -o '%N %f'` lists the features there are"),
    (r"reservation", "backends.slurm.reservation", "`scontrol show reservation` lists those there are"),
    (r"node name", "backends.slurm.nodelist", "correct it, or backends.slurm.exclude; `sinfo -N` lists the nodes"),
    (r"array", None,
     "give fewer values to --set; `scontrol show config` has the limit, MaxArraySize or max_array_tasks"),
    (r"dependency", "backends.slurm.dependency", "name existing jobs"),
    (r"licen[sc]e", "backends.slurm.directives", "`scontrol show licenses` lists those there are"),
    (r"--begin", "backends.slurm.begin", "give a time as sbatch takes it"),
    (r"--signal", "backends.slurm.signal_seconds", "give seconds as sbatch takes them"),
    (r"--mail", "backends.slurm.mail.types", "give events that sbatch knows, such as END,FAIL"),
    (r"unrecognized option|invalid option|Invalid --|ambiguous", "backends.slurm.directives",
     "this Slurm does not know it: correct it, or leave it out"),
    (r"Pathname of a file|too long", "backends.slurm", "the script is too long: move its prologue into a file"),
    (r"not look like a batch script|DOS line breaks|is empty", "backends.slurm.prologue", "give lines of a shell"),
    (r"Requested operation|disabled", None, "ask the administrators of the cluster"),
)  # fmt: skip


def refusal(message: str) -> UserError:
    """The error for sbatch's message."""
    text = f"Slurm rejects the job: {message.replace('Batch job submission failed: ', '')}"
    for pattern, key, fix in TABLE:
        if re.search(pattern, message):
            return UserError(text, where=key, fix=fix)
    return UserError(text, fix="`ortflow render --backend slurm` shows the submitted script")
