"""The run file's `backends.kubernetes` section: what an MPIJob needs beside `resources`.

Rules between keys, and the syntax of the texts, are checked in `checks.kubernetes`. Values in Kubernetes' syntax are
passed on unchanged.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ortflow.workflow.spec.base import Positive, Section, Text, no_items, no_keys
from ortflow.workflow.spec.launcher_options import Forms, LauncherOptions

AccessMode = Literal["ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"]
Native = dict[Text, Any]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""The API server's own limit."""
UserId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class CreatedClaim(Section):
    """A claim for a volume, made with the first submission and kept when the run is deleted."""

    size: Text
    """Size: a number and a unit, such as 100Gi."""
    storage_class: Text | None = None
    """Storage class; the cluster's default if not given."""
    access_modes: list[AccessMode] = Field(default=["ReadWriteMany"], min_length=1)
    """Access mode: ReadWriteOnce is sufficient if all pods are on one node."""


class Nfs(Section):
    """A folder of an NFS server."""

    server: Text
    """Name or address."""
    path: Text
    """Folder, absolute."""


class S3(Section):
    """A bucket, through a CSI driver that can mount it inline."""

    driver: Text
    """The CSI driver's name."""
    attributes: dict[Text, Text] = Field(default_factory=no_keys)
    """Attributes of the volume: bucket, mounter, options."""
    secret: Text | None = None
    """Secret with the driver's credentials."""


class RunVolume(Section):
    """Where run directory and inputs are: one of `claim`, `create`, `host_path`, `nfs`, `s3`, `empty_dir`."""

    mount: Text = "/ortflow"
    """Mount path in the pods."""
    claim: Text | None = None
    """An existing claim."""
    create: CreatedClaim | None = None
    """A claim for a volume, made with the first submission and kept when the run is deleted."""
    host_path: Text | None = None
    """A folder of every node, such as a parallel file system's."""
    nfs: Nfs | None = None
    """A folder of an NFS server."""
    s3: S3 | None = None
    """A bucket, through a CSI driver that can mount it inline."""
    empty_dir: bool = False
    """A folder that is deleted with the pod: for trials of one node with `launcher_as_worker`."""
    sub_path: Text | None = None
    """Subfolder of the volume to mount."""


class Gpu(Section):
    """The cluster's names for GPUs."""

    resource: Text = "nvidia.com/gpu"
    """Name of the resource, such as nvidia.com/mig-1g.10gb."""
    runtime_class: Text | None = None
    """Runtime class of pods with GPUs."""
    type_label: Text = "nvidia.com/gpu.product"
    """Label of nodes whose value `resources.gpu_type` is, such as cloud.google.com/gke-accelerator."""


class LauncherResources(Section):
    """Resources of the launcher's pod if it is not a worker."""

    cpu: Text = "250m"
    """Requested cores, in Kubernetes' syntax."""
    cpu_limit: Text | None = None
    """Limit of the cores of the launcher and of what runs beside it, which some quotas require; no limit by default."""
    memory: Text = "1Gi"
    """Memory, which `prepare` also uses: a number and a unit."""


class Security(Section):
    """User, group and permissions of the processes."""

    run_as_user: UserId = 1000
    """User of all processes; 0 is root, for images whose ssh daemon needs it."""
    run_as_group: UserId = 1000
    """Group of all processes."""
    fs_group: UserId = 1000
    """Group that owns mounted files, if the volume's driver supports it."""
    capabilities: list[Text] = Field(default_factory=no_items)
    """Linux capabilities to add, such as IPC_LOCK."""
    seccomp: Literal["RuntimeDefault", "Unconfined"] = "RuntimeDefault"
    """Seccomp profile."""


class Gang(Section):
    """Place all workers together or none: needs an operator that was started with gang scheduling."""

    scheduler: Literal["volcano", "scheduler-plugins"]
    """The scheduler."""
    scheduler_name: Text | None = None
    """Its name, if not volcano or scheduler-plugins-scheduler."""
    queue: Text | None = None
    """Its queue."""
    timeout_seconds: Seconds | None = None
    """Seconds that it waits for all pods."""


class Volume(Section):
    """One more volume of launcher and workers."""

    name: Text
    """Name, different for each."""
    mount: Text
    """Mount path in the pods."""
    read_only: bool = False
    """Mount it for reading only."""
    sub_path: Text | None = None
    """Subfolder of the volume to mount."""
    source: Native
    """Volume source in Kubernetes' syntax, such as `nfs: {server: files, path: /sets}`."""


class Overlay(Section):
    """A strategic merge patch of the run's documents of a kind."""

    kind: Literal[
        "ConfigMap",
        "Deployment",
        "Job",
        "MPIJob",
        "NetworkPolicy",
        "PersistentVolumeClaim",
        "PodDisruptionBudget",
        "Role",
        "RoleBinding",
        "Service",
        "ServiceAccount",
    ]
    """Kind of the documents."""
    name: Text | None = None
    """Suffix of their names, after a hyphen; by default all documents of the kind."""
    patch: Native
    """Fields to merge into them."""


class KubernetesBackend(LauncherOptions):
    """Options of Kubernetes; nodes, cores, GPUs, memory and time are in `resources`."""

    FORMS = Forms(
        minutes=(("deadline",),),
        stand_ins={
            ("volume", "create", "size"): "1Gi",
            ("volume", "nfs", "server"): "-",
            ("volume", "nfs", "path"): "/",
            ("volume", "s3", "driver"): "a",
            ("gang", "scheduler"): "volcano",
        },
        reserved=("kubernetes", "kubernetes.json"),
    )

    image: Text | None = None
    """Image of all pods; required."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When nodes pull the image."""
    image_pull_secrets: list[Text] = Field(default_factory=no_items)
    """Secrets for pulling the image."""
    namespace: Text | None = None
    """Namespace; the context's if not given."""
    context: Text | None = None
    """Context of the kubeconfig that `ortflow` uses; the current one if not given."""
    python: Text = "python"
    """Interpreter in the image."""
    # MPICH 5.0.2's mpirun ends with 255 when a host is lost. Open MPI 5.0.11's often ends with 0, and ignores the
    # variable by which mpi-operator 0.8.2 names the hostfile (kubeflow/mpi-operator#842).
    mpi: Literal["mpich", "openmpi"] = "mpich"
    """The image's MPI."""
    launcher_as_worker: bool = False
    """Also run ranks in the launcher's pod."""
    # A drain or eviction of a worker fails the launcher, too, and retries go on while the worker's successor waits for
    # a node: each costs one (mpi-operator 0.8.2).
    backoff_limit: Seconds = 10
    """Launcher pods that may be lost before the operator gives up; failures of ranks do not count."""
    # 0 would be no shorter grace but none: the kubelet then sends SIGKILL at once.
    grace_seconds: Annotated[int, Field(ge=1, le=2**31 - 1)] = 60
    """Seconds that ranks have to save when their pod is deleted or evicted."""
    ssh_port: Port = 2222
    """Port of the ssh daemon in each pod."""
    ssh_folder: Text | None = None
    """Where the operator's ssh keys are mounted; /home/ortflow/.ssh if not given, /root/.ssh for root."""
    folder: Text | None = None
    """Folder on the volume that paths of inputs are relative to; MOUNT/files/NAME if not given."""
    files: list[Text] = Field(default_factory=no_items)
    """Small text files beside the run file to put into the ConfigMap, such as the script of `prepare`."""
    volume: RunVolume = RunVolume.model_construct()
    """Where run directory and inputs are: one of `claim`, `create`, `host_path`, `nfs`, `s3`, `empty_dir`."""
    volumes: list[Volume] = Field(default_factory=no_items)
    """More volumes of launcher and workers."""
    worker_cpu: Text | None = None
    """Cores of a worker, in Kubernetes' syntax, such as 1500m; `cpus_per_rank` for each rank if not given."""
    # A container's own /dev/shm has 64 MiB, which is too little for NCCL.
    shared_memory: Text | None = None
    """Limit of /dev/shm: a number and a unit; a worker's memory if not given."""
    ephemeral_storage: Text | None = None
    """Scratch space of a worker on its node: a number and a unit."""
    gpu: Gpu = Gpu.model_construct()
    """The cluster's names for GPUs."""
    extended_resources: dict[Text, Positive] = Field(default_factory=no_keys)
    """More resources of a worker and their number, such as rdma/hca: 1."""
    launcher_resources: LauncherResources = LauncherResources.model_construct()
    """Resources of the launcher's pod if it is not a worker."""
    node_selector: dict[Text, Text] = Field(default_factory=no_keys)
    """Labels that nodes must have."""
    worker_node_selector: dict[Text, Text] = Field(default_factory=no_keys)
    """More labels that workers' nodes must have."""
    launcher_node_selector: dict[Text, Text] = Field(default_factory=no_keys)
    """More labels that the nodes of the launcher and of what runs beside it must have."""
    affinity: Native = Field(default_factory=no_keys)
    """Affinity of the pods, in Kubernetes' syntax."""
    tolerations: list[Native] = Field(default_factory=no_items)
    """Tolerations of the pods, in Kubernetes' syntax."""
    worker_tolerations: list[Native] = Field(default_factory=no_items)
    """More tolerations of the workers."""
    launcher_tolerations: list[Native] = Field(default_factory=no_items)
    """More tolerations of the launcher and of what runs beside it."""
    spread: Literal["prefer", "require", "none"] = "prefer"
    """Whether each worker gets a separate node."""
    topology_spread: list[Native] = Field(default_factory=no_items)
    """More topology spread constraints of the workers, in Kubernetes' syntax."""
    priority_class: Text | None = None
    """Priority class of the pods."""
    # The kubelet would expand $(NAME), and make one $ of two: rendering escapes them.
    env: dict[Text, Annotated[str, Field(pattern=r"^[^\x00]*$")]] = Field(default_factory=no_keys)
    """Environment variables of the ranks, unchanged; in those of an overlay, Kubernetes replaces $(NAME)."""
    secret_env: dict[Text, Text] = Field(default_factory=no_keys)
    """Environment variables from secrets: VARIABLE: SECRET/KEY."""
    security: Security = Security.model_construct()
    """User, group and permissions of the processes."""
    service_account: Text | None = None
    """Existing service account; one for the run, without rights, if not given."""
    annotations: dict[Text, str] = Field(default_factory=no_keys)
    """Annotations of job and pods, of the supervisor and TensorBoard too."""
    labels: dict[Text, str] = Field(default_factory=no_keys)
    """Labels of job and pods, of the supervisor and TensorBoard too."""
    queue: Text | None = None
    """Kueue's queue."""
    suspend: bool = False
    """Create the job without starting pods until it is resumed."""
    gang: Gang | None = None
    """Place all workers together or none: needs an operator that was started with gang scheduling."""
    # ttlSecondsAfterFinished of mpi-operator 0.8.2 deletes the launcher's Job, and its logs with it, and nothing else.
    time_to_live: Seconds | None = None
    """Seconds after the end at which the launcher's pod is deleted."""
    deadline: Text | None = None
    """Time after which the operator ends the run permanently; at `resources.time_limit` it saves and stops."""
    supervisor: bool = False
    """Run `ortflow supervise` in the cluster: it handles failures that the operator does not."""
    tensorboard: bool = False
    """Run TensorBoard for the run."""
    network_policy: bool = False
    """Allow only the run's pods to connect to them."""
    disruption_budget: bool = False
    """Refuse evictions: a drain of a node then waits for the run."""
    overlay: list[Overlay] = Field(default_factory=no_items)
    """Strategic merge patches of the documents, in order."""
