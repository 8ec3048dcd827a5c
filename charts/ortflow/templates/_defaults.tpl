{{- /* Written by python -m ortflow.manifests.kubernetes.chart; changes are lost. */ -}}
{{- define "ortflow.defaults" -}}
{
  "backends": {
    "kubernetes": {
      "affinity": {},
      "annotations": {},
      "backoff_limit": 10,
      "disruption_budget": false,
      "env": {},
      "extended_resources": {},
      "files": [],
      "gpu": {
        "resource": "nvidia.com/gpu",
        "type_label": "nvidia.com/gpu.product"
      },
      "grace_seconds": 60,
      "image_pull_secrets": [],
      "labels": {},
      "launcher_as_worker": false,
      "launcher_node_selector": {},
      "launcher_resources": {
        "cpu": "250m",
        "memory": "1Gi"
      },
      "launcher_tolerations": [],
      "mpi": "mpich",
      "network_policy": false,
      "node_selector": {},
      "overlay": [],
      "python": "python",
      "secret_env": {},
      "security": {
        "capabilities": [],
        "fs_group": 1000,
        "run_as_group": 1000,
        "run_as_user": 1000,
        "seccomp": "RuntimeDefault"
      },
      "spread": "prefer",
      "ssh_port": 2222,
      "supervisor": false,
      "suspend": false,
      "tensorboard": false,
      "tolerations": [],
      "topology_spread": [],
      "volume": {
        "empty_dir": false,
        "mount": "/ortflow"
      },
      "volumes": [],
      "worker_node_selector": {},
      "worker_tolerations": []
    }
  },
  "monitor": {
    "tensorboard_directory": "tensorboard"
  },
  "resources": {
    "gpus_per_rank": 0,
    "nodes": 1,
    "ranks_per_node": 1
  }
}
{{- end -}}
