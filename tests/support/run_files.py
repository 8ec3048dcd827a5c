"""Run files for tests: a small valid one, and the faults reported for a changed one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ortflow.workflow.spec.file.load import read_run_file
from ortflow.workflow.spec.problem import Fault
from ortflow.workflow.spec.run import TrainerRunSpec

SMALL = """\
name: small
model:
  path: model.onnx
  loss: cross_entropy
data:
  train: train.arrow
  micro_batch: 4
train:
  steps: 100
  optimizer:
    name: adamw
    lr: 1e-3
"""

FULL = """\
name: full-1
run_dir: elsewhere
seed: 7
prepare: [python, make.py]
model:
  path: model.onnx
  loss: {kind: cross_entropy, output: logits, label: targets, ignore_index: 0, label_smoothing: 0.1, class_axis: 1}
  graphs: {train: t.onnx, eval: e.onnx, optimizer: o.onnx}
  parameters: {train: [a], freeze: ["*.bias"], constant: [c]}
  labels: [targets]
  metrics: [accuracy, perplexity]
data:
  train: {path: train.arrow, columns: {x: "tokens[:-1]"}}
  eval: eval.arrow
  micro_batch: 4
  shuffle: false
  by_length: {column: tokens, bucket: 3}
  pad_value: {x: 1, y: 0.5}
  last_batch: pad
  eval_mode: replicated
  eval_micro_batch: 2
  eval_samples: 10
train:
  epochs: 3
  optimizer: {name: sgd, lr: 1, momentum: 0.9, nesterov: true, weight_decay: 0.1, no_decay: []}
  schedule: {name: polynomial, warmup_steps: 5, final_fraction: 0.1, power: 3}
  global_batch: 48
  gradient_accumulation: 2
  clip_norm: 1
  evaluation: {every_steps: 10}
  early_stop: {metric: perplexity, patience: 2, min_delta: 0.01}
  max_skipped_steps: 4
parallel: {data: 6}
checkpoint:
  {directory: /big/disk, every_steps: 5, every_seconds: 60, keep: {newest: 3, every: 100}, asynchronous: false}
monitor: {every_steps: 1, tensorboard: false, tensorboard_directory: tb, runtime_log: info, profile: {from: 2, to: 3}}
export: {path: out.onnx, tolerance: 0, enabled: false}
resources:
  {nodes: 2, ranks_per_node: 3, cpus_per_rank: 4, memory: 16Gi, time_limit: 1-02:00:00, python: /usr/bin/python3}
restart: {failures: 0, preemptions: 9, backoff: {first: 0, limit: 5}}
backends:
  local: {mpi: openmpi, arguments: [--bind-to, none]}
  slurm:
    {partition: "gpu,big", account: lab, qos: high, constraint: a100&ib, reservation: maint, exclusive: true,
     nodelist: "node[1-2]", exclude: node3, dependency: "afterok:12", begin: now+1hour, nice: 5, job_name: mine,
     mail: {types: [END, TIME_LIMIT_90], user: me@example.org}, gpus_as: gres, gres: "nvme:1", memory_per: cpu,
     requeue: false, signal_seconds: 60, mpi: pmix, srun_arguments: [--cpu-bind=cores], directives: ["--switches=1"],
     omit: [time], prologue: ["module load gcc", "export A=1"], epilogue: [date],
     container: {kind: pyxis, image: a.sqsh, mounts: ["/data:/d:ro"], arguments: [--container-remap-root]},
     python: /opt/python}
  kubernetes:
    {image: "img:1", image_pull_policy: Always, image_pull_secrets: [pull], namespace: lab, context: east,
     python: /opt/python, mpi: openmpi, launcher_as_worker: true, backoff_limit: 3, grace_seconds: 120, ssh_port: 2022,
     ssh_folder: /home/me/.ssh, folder: /ortflow/in, files: [make.py], volume: {mount: /data, claim: big, sub_path: x},
     volumes: [{name: more, mount: /more, read_only: true, source: {hostPath: {path: /srv}}}], shared_memory: 8Gi,
     ephemeral_storage: 10Gi, gpu: {resource: nvidia.com/mig-1g.10gb, runtime_class: nvidia, type_label: e.org/gpu},
     extended_resources: {rdma/hca: 1}, launcher_resources: {cpu: "1", memory: 2Gi}, node_selector: {zone: a},
     affinity: {nodeAffinity: {}}, tolerations: [{key: gpu, operator: Exists}], spread: require,
     topology_spread: [{maxSkew: 1, topologyKey: zone, whenUnsatisfiable: DoNotSchedule, labelSelector: {}}],
     priority_class: high, env: {A: "1", B: ""}, secret_env: {TOKEN: hub/token},
     security: {run_as_user: 0, run_as_group: 0, fs_group: 0, capabilities: [IPC_LOCK], seccomp: Unconfined},
     service_account: me, annotations: {a/b: c}, labels: {team: x}, queue: gpu, suspend: true,
     gang: {scheduler: volcano, scheduler_name: v, queue: q, timeout_seconds: 5}, time_to_live: 60, deadline: 120,
     supervisor: true, tensorboard: true, network_policy: true, disruption_budget: true,
     overlay: [{kind: MPIJob, patch: {metadata: {annotations: {x: null}}}}]}
"""


def reported(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    """Each fault of a run file, as the user sees it; the file is called run.yaml."""
    file = tmp_path / "run.yaml"
    file.write_text(text)
    found = check_run_file(file, overrides, files=False)
    return [str(fault).replace(str(file), "run.yaml") for fault in found]


def spec_of(**sections: Any) -> TrainerRunSpec:
    """The small run with whole sections replaced."""
    values: dict[str, Any] = {
        "name": "small",
        "model": {"path": "model.onnx", "loss": {"kind": "cross_entropy"}},
        "data": {"train": {"path": "train.arrow"}, "micro_batch": 4},
        "train": {"steps": 100, "optimizer": {"name": "adamw", "lr": 0.001}},
    }
    return TrainerRunSpec.model_validate({**values, **sections})


def check_run_file(path: Path, overrides: Sequence[str] = (), *, files: bool = True) -> list[Fault]:
    """All faults of a run file, by line; empty if it is valid."""
    return read_run_file(path, overrides, files=files).faults
