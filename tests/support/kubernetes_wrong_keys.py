"""Invalid values of a run file for Kubernetes, by key: the table for `kubernetes_wrong`."""

from __future__ import annotations

from typing import Any

RunFile = dict[str, Any]

KEYS: dict[str, list[Any]] = {
    "image": ["", "a/UPPER:1", "two words", "a:tag:tag", "-a", "a@sha256:12", 5, ["a"], {}],
    "image_pull_policy": ["Sometimes", "always", True],
    "image_pull_secrets": ["pull", [1], ["Pull_Secret"], [""], {"name": "a"}],
    "namespace": ["Lab", "a.b", "-a", "a-", "x" * 64, "", 7],
    "context": [5, "a\nb"],
    "python": ["", "a\nb", 3],
    "mpi": ["intel", "OpenMPI", 1],
    "launcher_as_worker": ["yes", 1],
    "backoff_limit": [-1, 2**31, 1.5, "3", True],
    "grace_seconds": [0, -60, "60s", 2**31],
    "ssh_port": [0, 22, 1023, 65536, "2222", 22.5],
    "ssh_folder": ["relative", "/a/../b", "/a:b", "/", ""],
    "folder": ["relative", "/a/..", "", 5],
    "files": ["one.py", ["/etc/passwd"], ["../up.py"], ["a.py", "a.py"], [""], [5], ["a\\b"], ["."]],
    "volume": [
        "claim",
        {"claim": "c", "host_path": "/x"},
        {"claim": "c", "empty_dir": True},
        {"create": {}},
        {"claim": "Bad_Name"},
        {"claim": ""},
        {"create": {"size": "lots"}},
        {"create": {"size": "0Gi"}},
        {"create": {"size": "10"}},
        {"create": {"size": "1Gi", "access_modes": []}},
        {"create": {"size": "9300P"}},
        {"create": {"size": "1Gi", "access_modes": ["ReadOnlyMany"]}},
        {"create": {"size": "1Gi", "access_modes": ["ReadWriteOncePod"]}},
        {"create": {"size": "1Gi", "access_modes": ["ReadWriteMany", "ReadWriteMany"]}},
        {"create": {"size": "1Gi", "storage_class": "Fast!"}},
        {"create": {"size": 5}},
        {"host_path": "relative"},
        {"host_path": "/a/../b"},
        {"host_path": "/a:b"},
        {"nfs": {"server": "a"}},
        {"nfs": {"server": "", "path": "/"}},
        {"nfs": {"server": "a b", "path": "/"}},
        {"nfs": {"server": "a", "path": "x"}},
        {"s3": {}},
        {"s3": {"driver": "No Driver"}},
        {"s3": {"driver": "a", "attributes": {"x": 5}}},
        {"s3": {"driver": "a", "secret": "S_S"}},
        {"empty_dir": True},
        {"claim": "c", "mount": "data"},
        {"claim": "c", "mount": "/"},
        {"claim": "c", "mount": "/etc/mpi"},
        {"claim": "c", "mount": "/etc"},
        {"claim": "c", "mount": "/dev/shm"},
        {"claim": "c", "mount": "/home/ortflow/.ssh"},
        {"claim": "c", "mount": "/a:b"},
        {"claim": "c", "sub_path": "../up"},
        {"claim": "c", "sub_path": "/abs"},
        {"calim": "c"},
    ],
    "volumes": [
        {"name": "a"},
        [{"name": "a", "mount": "/a"}],
        [{"name": "a", "mount": "/a", "source": {}}],
        [{"name": "A", "mount": "/a", "source": {"emptyDir": {}}}],
        [{"name": "data", "mount": "/a", "source": {"emptyDir": {}}}],
        [{"name": "ssh-auth", "mount": "/a", "source": {"emptyDir": {}}}],
        [{"name": "a", "mount": "a", "source": {"emptyDir": {}}}],
        [{"name": "a", "mount": "/ortflow", "source": {"emptyDir": {}}}],
        [{"name": "a", "mount": "/etc/mpi/x", "source": {"emptyDir": {}}}],
        [{"name": "a", "mount": "/a", "source": {"emptyDir": {}, "hostPath": {"path": "/a"}}}],
        [{"name": "a", "mount": "/a", "source": {"hostPath": {}}}],
        [{"name": "a", "mount": "/a", "source": {"hostPath": {"path": "/a", "type": "Folder"}}}],
        [{"name": "a", "mount": "/a", "source": {"hostpath": {"path": "/a"}}}],
        [{"name": "a", "mount": "/a", "source": {"nfs": {"server": "a"}}}],
        [{"name": "a", "mount": "/a", "source": {"emptyDir": {"sizeLimit": "much"}}}],
        [{"name": "a", "mount": "/a", "source": {"secret": {"name": "a"}}}],
        [{"name": "a", "mount": "/a", "source": {"csi": {}}}],
        [{"name": "a", "mount": "/a", "sub_path": "../b", "source": {"emptyDir": {}}}],
        [{"name": "a", "mount": "/a", "read_only": "yes", "source": {"emptyDir": {}}}],
        [{"name": "a", "mount": "/a", "readOnly": True, "source": {"emptyDir": {}}}],
        [{"name": "a", "mount": "/a", "source": {"emptyDir": {}}}] * 2,
        [
            {"name": "a", "mount": "/a", "source": {"emptyDir": {}}},
            {"name": "b", "mount": "/a/", "source": {"emptyDir": {}}},
        ],
    ],
    "shared_memory": ["big", "8", "0G", 8, "-1G", "1Zi"],
    "ephemeral_storage": ["big", "0G", "9e9G"],
    "gpu": [
        {"resource": "gpu"},
        {"resource": "nvidia.com/"},
        {"resource": "nvidia.com/a b"},
        {"resource": "kubernetes.io/gpu"},
        {"runtime_class": "Nvidia"},
        {"type_label": "a b"},
        {"count": 2},
        "nvidia",
    ],
    "extended_resources": [
        {"hca": 1},
        {"rdma/hca": 0},
        {"rdma/hca": "1"},
        {"rdma/hca": 1.5},
        {"nvidia.com/gpu": 1},
        {"cpu": 2},
        {"node.kubernetes.io/x": 1},
    ],
    "launcher_resources": [{"cpu": "lots"}, {"cpu": "0"}, {"cpu": 1}, {"memory": "1"}, {"memory": "0Gi"}, {"gpu": "1"}],
    "worker_cpu": ["lots", "0", 1, "1.5Gi", "-1"],
    "worker_node_selector": [{"a b": "x"}, {"x": "a b"}, ["a"]],
    "launcher_node_selector": [{"a b": "x"}, {"x": True}],
    "worker_tolerations": [[{"operator": "Exists", "value": "b"}], {"key": "a"}],
    "launcher_tolerations": [[{"operator": "Equal"}]],
    "node_selector": [{"a b": "x"}, {"x": "a b"}, {"x": "y" * 64}, {"x": True}, ["a"], {"/x": "y"}],
    "affinity": [
        {"node": {}},
        {"nodeAffinity": []},
        {"nodeAffinity": {"required": {}}},
        {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}},
        {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "in", "values": ["b"]}]}]
                }
            }
        },
        {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "In"}]}]
                }
            }
        },
        {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "Exists", "values": ["b"]}]}]
                }
            }
        },
        {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "Gt", "values": ["1", "2"]}]}]
                }
            }
        },
        {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 0, "preference": {}}]}},
        {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 5}]}},
        {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"labelSelector": {}}]}},
        {
            "podAntiAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {"weight": 101, "podAffinityTerm": {"topologyKey": "a"}}
                ]
            }
        },
        {
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {"topologyKey": "a", "labelSelector": {"matchExpressions": [{"key": "a", "operator": "NotIn"}]}}
                ]
            }
        },
    ],
    "tolerations": [
        {"key": "a"},
        ["a"],
        [{"key": "a", "operator": "exists"}],
        [{"key": "a", "operator": "Exists", "value": "b"}],
        [{"operator": "Equal"}],
        [{}],
        [{"key": "a", "effect": "NoRun"}],
        [{"key": "a", "tolerationSeconds": 5}],
        [{"key": "a", "tolerationSeconds": "5", "effect": "NoExecute"}],
        [{"key": "a b", "operator": "Exists"}],
        [{"key": "a", "operator": "Exists", "seconds": 5}],
        [{"key": "a", "value": True}],
    ],
    "spread": ["maybe", True, "Prefer"],
    "topology_spread": [
        {"maxSkew": 1},
        [{"maxSkew": 1, "topologyKey": "a"}],
        [{"maxSkew": 0, "topologyKey": "a", "whenUnsatisfiable": "DoNotSchedule"}],
        [{"maxSkew": 1, "topologyKey": "a", "whenUnsatisfiable": "Never"}],
        [{"maxSkew": 1, "topologyKey": "a", "whenUnsatisfiable": "ScheduleAnyway", "minDomains": 2}],
        [{"maxSkew": 1, "topologyKey": "a", "whenUnsatisfiable": "ScheduleAnyway"}] * 2,
        [{"maxSkew": 1, "topologyKey": "", "whenUnsatisfiable": "ScheduleAnyway"}],
    ],
    "priority_class": ["High", "", 5],
    "env": [
        {"1A": "x"},
        {"A-B": "x"},
        {"A": 1},
        {"A": True},
        {"": "x"},
        {"ORTFLOW_JOB": "x"},
        {"K_MPI_JOB_ROLE": "x"},
        {"PYTHONDONTWRITEBYTECODE": "0"},
        ["A=1"],
        {"A": "nul\0"},
    ],
    "secret_env": [
        {"A": "secret"},
        {"A": "Secret/key"},
        {"A": "secret/"},
        {"A": "/key"},
        {"A": "s/k/k"},
        {"A": "s/a b"},
        {"1A": "s/k"},
        {"ORTFLOW_X": "s/k"},
    ],
    "security": [
        {"run_as_user": -1},
        {"run_as_user": "me"},
        {"run_as_user": 2**31},
        {"capabilities": ["CAP_SYS_PTRACE"]},
        {"capabilities": ["ipc_lock"]},
        {"seccomp": "Localhost"},
        {"privileged": True},
        {"fs_group": 1.5},
    ],
    "service_account": ["Me", "a b", ""],
    "annotations": [{"a b": "x"}, {"a": 1}, {"ortflow.dev/version": "2"}, {"a/b/c": "x"}],
    "labels": [
        {"a b": "x"},
        {"a": "x y"},
        {"a": "x" * 64},
        {"a": 1},
        {"ortflow.dev/run": "x"},
        {"app.kubernetes.io/name": "x"},
        {"training.kubeflow.org/job-name": "x"},
    ],
    "queue": ["Gpus", "a.b", "", "x" * 64],
    "suspend": ["true", 0],
    "gang": [
        {},
        {"scheduler": "kueue"},
        {"scheduler": "volcano", "timeout_seconds": -1},
        {"scheduler": "scheduler-plugins", "queue": "q"},
        {"scheduler": "volcano", "queue": "Q!"},
        {"scheduler": "volcano", "scheduler_name": "V v"},
        "volcano",
    ],
    "time_to_live": [-1, 2**31, "60"],
    "deadline": ["soon", "0", 0, -5, "1:2"],
    "supervisor": ["on"],
    "tensorboard": [1],
    "network_policy": [{}],
    "disruption_budget": [0],
    "overlay": [
        {},
        ["x"],
        [{}],
        [{"kind": "MPIJob"}],
        [{"patch": {}}],
        [{"kind": "Pod", "patch": {}}],
        [{"kind": "mpijob", "patch": {}}],
        [{"kind": "MPIJob", "patch": []}],
        [{"kind": "MPIJob", "patch": {}, "path": "x"}],
        [{"kind": "MPIJob", "name": 5, "patch": {}}],
        [{"kind": "Deployment", "patch": {}}],
        [{"kind": "MPIJob", "name": "nobody", "patch": {}}],
        [{"kind": "MPIJob", "patch": {"spec": {"$patch": "merge"}}}],
        [{"kind": "MPIJob", "patch": {"spec": {"$retainKeys": ["a"]}}}],
    ],
    "imgae": ["a"],
    "restart_policy": ["Never"],
}
"""Wrong values of `backends.kubernetes`, by key."""

SECTIONS: list[tuple[str, RunFile]] = [
    ("name", {"name": "Upper"}),
    ("name", {"name": "under_score"}),
    ("name", {"name": "x" * 53}),
    ("name", {"name": "a."}),
    ("resources.nodes", {"resources": {"nodes": 10**4}}),
    ("resources.nodes", {"resources": {"nodes": 0}}),
    ("resources.ranks_per_node", {"resources": {"ranks_per_node": 0}}),
    ("resources.ranks_per_node", {"resources": {"ranks_per_node": -1}}),
    ("resources.memory", {"resources": {"memory": "lots"}}),
    ("resources.time_limit", {"resources": {"time_limit": "soon"}}),
]

KEYS_TO_SERVER: dict[str, set[int]] = {
    "volumes": {11, 14},
    "affinity": {3, 4, 5, 6, 7, 8, 11, 12},
    "tolerations": {2, 3, 4, 5, 6, 7, 9},
    "worker_tolerations": {0},
    "launcher_tolerations": {0},
    "topology_spread": {2, 3, 4, 5, 6},
}
"""Which of them only the API server refuses, by their place."""
