"""Run files for Kubernetes: a plain one, some with everything, and any number of random valid ones."""

from __future__ import annotations

import random
import string
from typing import Any

from ortflow.manifests.kubernetes import Placement, documents
from ortflow.workflow.spec.checks.elastic import check_elastic
from ortflow.workflow.spec.checks.nodes import permitted
from ortflow.workflow.spec.file.document import Document
from ortflow.workflow.spec.file.shorthand import expand
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.spec.units import parse_memory

RunFile = dict[str, Any]


def run_file(kubernetes: RunFile | None = None, **sections: Any) -> RunFile:
    """A small run file as written, with keys of `backends.kubernetes` and other sections."""
    own: RunFile = {"image": "ortflow:1", "volume": {"claim": "shared"}, **(kubernetes or {})}
    return {
        "name": "small",
        "model": {"path": "model.onnx", "loss": "cross_entropy"},
        "data": {"train": "train.arrow", "micro_batch": 4},
        "train": {"steps": 100, "optimizer": {"name": "adamw", "lr": 0.001}},
        "resources": {"nodes": 2, "ranks_per_node": 2},
        "backends": {"kubernetes": own},
        **sections,
    }


def spec_of_file(written: RunFile) -> TrainerRunSpec:
    """The run of a run file, as the loader returns it."""
    import copy

    document = Document("run.yaml", copy.deepcopy(written))
    expand(document)
    return TrainerRunSpec.model_validate(document.values)


def rendered(written: RunFile, **placement: Any) -> list[RunFile]:
    """The documents of a run file."""
    return documents(written, spec_of_file(written), Placement(**{"namespace": "default", **placement}))


def one(found: list[RunFile], kind: str) -> RunFile:
    """The document of a kind."""
    (document,) = [document for document in found if document["kind"] == kind]
    return document


def pod_of(job: RunFile, which: str) -> RunFile:
    """The pod's specification of Launcher or Worker."""
    spec: RunFile = job["spec"]["mpiReplicaSpecs"][which]["template"]["spec"]
    return spec


EVERYTHING: RunFile = {
    "image": "registry.example:5000/lab/ortflow:1.0",
    "image_pull_policy": "IfNotPresent",
    "image_pull_secrets": ["pull"],
    "namespace": "lab",
    "python": "/opt/venv/bin/python",
    "mpi": "openmpi",
    "backoff_limit": 3,
    "grace_seconds": 120,
    "ssh_port": 2022,
    "folder": "/data/in",
    "volume": {"mount": "/data", "create": {"size": "100 gib", "storage_class": "fast"}, "sub_path": "team"},
    "volumes": [
        {"name": "sets", "mount": "/sets", "read_only": True, "source": {"nfs": {"server": "files", "path": "/"}}},
        {
            "name": "bucket",
            "mount": "/bucket",
            "sub_path": "a/b",
            "source": {"csi": {"driver": "s3.example", "nodePublishSecretRef": {"name": "keys"}}},
        },
    ],
    "shared_memory": "8g",
    "ephemeral_storage": "10GiB",
    "gpu": {"resource": "nvidia.com/gpu.shared", "runtime_class": "nvidia", "type_label": "example.org/gpu"},
    "extended_resources": {"rdma/hca": 1},
    "launcher_resources": {"cpu": "1", "cpu_limit": "2", "memory": "512m"},
    "worker_cpu": "1500m",
    "node_selector": {"pool": "gpu"},
    "worker_node_selector": {"disk": "fast"},
    "launcher_node_selector": {"lasting": "yes"},
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}]}]
            }
        }
    },
    "tolerations": [{"key": "spot", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}],
    "worker_tolerations": [{"key": "gpu", "operator": "Exists"}],
    "launcher_tolerations": [{"key": "quiet", "operator": "Equal", "value": "1"}],
    "spread": "require",
    "topology_spread": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
    "priority_class": "high",
    "env": {"NCCL_DEBUG": "INFO", "EMPTY": "", "ODD": "a: {{ b }} 'c' \"d\" \\ <&> $(HOME) \u2028 \u00fc \U0001f600"},
    "secret_env": {"HUB_TOKEN": "hub/to.ken"},
    "security": {"capabilities": ["IPC_LOCK"], "fs_group": 2000},
    "annotations": {"example.org/owner": "me"},
    "labels": {"team": "x"},
    "queue": "gpus",
    "suspend": True,
    "gang": {"scheduler": "volcano", "queue": "q", "timeout_seconds": 600},
    "time_to_live": 0,
    "deadline": "1-02:03:04",
    "supervisor": True,
    "tensorboard": True,
    "network_policy": True,
    "disruption_budget": True,
    "overlay": [
        {
            "kind": "MPIJob",
            "patch": {
                "metadata": {"annotations": {"example.org/owner": None, "more": "1"}},
                "spec": {
                    "mpiReplicaSpecs": {
                        "Worker": {
                            "template": {
                                "spec": {
                                    "dnsPolicy": "Default",
                                    "containers": [
                                        {
                                            "name": "worker",
                                            "env": [
                                                {"name": "NCCL_DEBUG", "value": "WARN"},
                                                {"name": "EMPTY", "$patch": "delete"},
                                                {"name": "MORE", "value": "x"},
                                            ],
                                            "securityContext": {"$patch": "replace", "privileged": True},
                                        },
                                        {"name": "side", "image": "side:1", "command": ["sleep", "1000"]},
                                    ],
                                    "tolerations": [{"operator": "Exists"}],
                                }
                            }
                        }
                    }
                },
            },
        },
        {"kind": "ServiceAccount", "name": "supervisor", "patch": {"metadata": {"annotations": {"role": "r"}}}},
        {"kind": "NetworkPolicy", "patch": {"spec": {"ingress": [], "podSelector": {"matchExpressions": None}}}},
    ],
}

_VOLUMES: tuple[RunFile, ...] = (
    {"claim": "shared.claim"},
    {"create": {"size": "1 Ti"}},
    {"create": {"size": "5g", "storage_class": "fast", "access_modes": ["ReadWriteOnce"]}, "empty_dir": False},
    {"host_path": "/srv/runs", "mount": "/srv/runs"},
    {"nfs": {"server": "10.0.0.1", "path": "/"}, "sub_path": "a/b"},
    {"s3": {"driver": "s3.example", "attributes": {"bucket": "<b&b>", "options": "--a 'b' \"c\""}, "secret": "keys"}},
    {"s3": {"driver": "s3.example"}},
)
_NUMBERS = (0, 1, -1, 1.0, 2.5, 1e-3, 1e-5, 1.234e-5, 1e-6, 1e-7, 1.5e-9, 1e20, 1e21, 1.5e300, -1e-5, 123456789.125,
            2**53 - 1, -(2**40))  # fmt: skip


def any_run_file(chance: random.Random, name: str) -> RunFile:
    """A valid run file."""

    def maybe(values: RunFile, likely: float = 0.4) -> RunFile:
        return {key: value for key, value in values.items() if chance.random() < likely}

    def one_of(*choices: Any) -> Any:
        return chance.choice(choices)

    def texts() -> str:
        letters = string.printable[:-3] + "\u00fc\u20ac\U0001f600\u2028\ufeff"
        return "".join(chance.choice(letters) for _ in range(chance.randint(0, 12)))

    own: RunFile = {"image": one_of("a", "h.io:1/a/b_c:v1", f"a@sha256:{'0' * 64}"), "volume": one_of(*_VOLUMES)}
    own |= maybe({key: value for key, value in EVERYTHING.items() if key not in ("image", "volume", "overlay", "env")})
    own |= maybe(
        {
            "env": {f"V{number}": texts() for number in range(chance.randint(0, 4))},
            "annotations": {f"a.b/N{number}": texts() for number in range(2)},
            "labels": one_of({}, {"a": "", "b.c/d": "1"}),
            "mpi": one_of("mpich", "openmpi"),
            "launcher_as_worker": True,
            "suspend": one_of(True, False),
            "spread": one_of("prefer", "require", "none"),
            "security": one_of({"run_as_user": 0}, {"run_as_user": 0, "capabilities": ["SYS_ADMIN"]}, {}),
            "ssh_folder": "/home/me/.ssh",
            "service_account": "me",
            "gang": one_of({"scheduler": "scheduler-plugins"}, {"scheduler": "volcano", "scheduler_name": "v"}),
            "time_to_live": one_of(0, 60),
            "deadline": one_of(90, "90", "08:09:00", "1-08:09:00", 1000000),
            "shared_memory": one_of("64Mi", "1.5 tib", "512K", "2 mb", "7P"),
            "supervisor": one_of(True, False),
            "context": "east",
            "files": ["make.py", "lib/more.py"],
            "gpu": one_of({}, {"runtime_class": "nvidia"}, {"type_label": "cloud.google.com/gke-accelerator"}),
            "namespace": one_of("lab", "a1"),
            "overlay": any_overlays(chance),
        },
        0.25,
    )
    resources = {
        "nodes": one_of(1, 2, 11, 1001),
        "ranks_per_node": one_of(1, 8),
        "cpus_per_rank": one_of(1, 16),
        "gpus_per_rank": one_of(0, 1, 2),
        "gpu_type": one_of("h100", "NVIDIA-H100-80GB-HBM3"),
        "memory": one_of("16G", "1.5 Ti", "900k", "7mb"),
        "time_limit": one_of(60, "12:00:00"),
    }
    sections = maybe(
        {
            "resources": maybe(resources, 0.6),
            "seed": one_of(0, 2**53 - 1),
            "run_dir": one_of("here", "/data/there", "a/b/"),
            "prepare": one_of("python 'make it.py'", ["python", "make.py"]),
            "monitor": maybe({"tensorboard_directory": one_of("tb", "/data/tb"), "every_steps": 3}),
        },
        0.5,
    )
    written = run_file(own, **{"name": name, "resources": {}, **sections})
    if chance.random() < 0.5:
        _make_elastic(chance, written)
    memory, shared = written["resources"].get("memory"), own.get("shared_memory")
    if memory and shared and parse_memory(shared) > parse_memory(memory):
        del written["backends"]["kubernetes"]["shared_memory"]  # it would count as the pod's memory
    written["data"]["pad_value"] = {f"p{number}": one_of(*_NUMBERS) for number in range(3)}
    return written


def _make_elastic(chance: random.Random, written: RunFile) -> None:
    """Add keys with which the number of nodes may change, on numbers of nodes of which some do not fit."""
    for _ in range(50):
        nodes = chance.randint(2, 12)
        changes: RunFile = {
            "resources": {"nodes": nodes, "min_nodes": chance.randint(1, nodes)},
            "data": {"micro_batch": chance.choice([1, 3, 4])},
            "train": chance.choice([{}, {"global_batch": 48 * nodes}, {"gradient_accumulation": chance.randint(1, 6)}]),
            "parallel": chance.choice([{}, {"pipeline": 2}, {"horizontal": 2}, {"pipeline": 2, "horizontal": 4}]),
        }
        ranks = {"ranks_per_node": chance.choice([1, 2, 8])} if "ranks_per_node" in written["resources"] else {}
        trial = {key: {**written.get(key, {}), **value} for key, value in changes.items()}
        trial["resources"] |= ranks
        spec = spec_of_file({**written, **trial})
        if not [*check_elastic(spec)] and nodes in permitted(spec):
            written |= trial
            return


def any_overlays(chance: random.Random) -> list[RunFile]:
    """Valid overlays."""
    pod = {
        "containers": [
            {
                "name": "launcher",
                "env": [{"name": "PYTHONUNBUFFERED", "$patch": "delete"}, {"name": "NEW", "value": "1"}],
                "resources": chance.choice([{"limits": {"memory": "3Ti"}}, {"$patch": "replace"}, None]),
                "ports": [{"containerPort": 80}, {"containerPort": 81, "name": "b"}],
                "volumeMounts": [{"mountPath": "/scratch", "name": "scratch"}],
                "readinessProbe": {"exec": {"command": ["true"]}},
            },
            {"name": "side", "image": "side"},
        ],
        "volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}}],
        "tolerations": chance.choice([[], [{"operator": "Exists"}]]),
        "nodeSelector": chance.choice([None, {"$patch": "delete"}, {"$patch": "replace", "x": "y"}, {"x": "y"}]),
        "topologySpreadConstraints": [{"$patch": "replace"}],
        "hostAliases": [{"ip": "1.2.3.4", "hostnames": ["a"]}],
    }
    return [
        {"kind": "MPIJob", "patch": {"spec": {"mpiReplicaSpecs": {"Launcher": {"template": {"spec": pod}}}}}},
        {"kind": "ConfigMap", "name": "run", "patch": {"metadata": {"annotations": {"x": "y", "gone": None}}}},
        {
            "kind": "MPIJob",
            "patch": {"metadata": {"labels": {"more": "1"}}, "spec": {"runPolicy": {"backoffLimit": 7}}},
        },
    ]


def contents_of(written: RunFile) -> dict[str, str]:
    """Contents for the files that a run file carries."""
    return {path: f"# {path}\nprint('{{{{ x }}}}')\n" for path in written["backends"]["kubernetes"].get("files", [])}
