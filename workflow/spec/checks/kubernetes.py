"""Checks of `backends.kubernetes` before it is sent to the API server. Pure.

The API server does not validate the pod template inside an MPIJob, and the operator reports errors at most in an event:
an invalid job is accepted and never runs. `check` calls `check_kubernetes`, the renderer `require`, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ortflow.workflow.errors import Faults, UserError
from ortflow.workflow.spec.checks import kubernetes_syntax as syntax
from ortflow.workflow.spec.checks.gpus import GPUS, RANKS, TYPE, is_slice
from ortflow.workflow.spec.checks.kubernetes_native import check_native
from ortflow.workflow.spec.checks.slurm_syntax import carries_control
from ortflow.workflow.spec.problem import KeyPath, Problem, dotted, shown
from ortflow.workflow.spec.run import RunSpec
from ortflow.workflow.spec.units import parse_memory, parse_time

HERE: KeyPath = ("backends", "kubernetes")
STORAGE = ("claim", "create", "host_path", "nfs", "s3", "empty_dir")
OWN_VARIABLES = frozenset({"PYTHONUNBUFFERED", "XDG_CACHE_HOME", "PYTHONDONTWRITEBYTECODE", "CUDA_CACHE_PATH"})
"""Environment variables of the pods that ortflow sets, besides ORTFLOW_*."""
# K_MPI_ is mpi-operator's (K_MPI_JOB_ROLE), KUBERNETES_ the kubelet's, which tells pods the API server's address so.
OWN_PREFIXES = ("ORTFLOW_", "K_MPI_", "KUBERNETES_")
OWN_LABELS = ("ortflow.dev/", "training.kubeflow.org/", "app.kubernetes.io/name", "app.kubernetes.io/managed-by")
# /etc/mpi is where mpi-operator mounts the hostfile.
OWN_FOLDERS = ("/etc/ortflow/run", "/etc/mpi", "/dev", "/proc", "/sys")
# The API server would cap a larger amount, not refuse it (apimachinery, pkg/api/resource/quantity.go).
LARGEST_QUANTITY = 2**63 - 1
WORKER_LIMIT = 9999


def require(spec: RunSpec) -> None:
    """Raise Faults if a run cannot be rendered for Kubernetes: errors of the section, or missing keys."""
    problems = [*_missing(spec), *check_kubernetes(spec)]
    if problems:
        raise Faults([UserError(problem.what, where=dotted(problem.path), fix=problem.fix) for problem in problems])


def check_kubernetes(spec: RunSpec) -> Iterator[Problem]:
    """Report every error of the section."""
    for find in (_names, _quantities, _volume, _paths, _mounts, _files, _maps, _variables, _security, _placing, _gpus):
        yield from find(spec)
    yield from check_native(spec)


def _problem(key: str | KeyPath, message: str, fix: str, *related_keys: KeyPath) -> Problem:
    return Problem((*HERE, *(key.split(".") if isinstance(key, str) else key)), message, fix, others=related_keys)


def _quoted(text: str) -> str:
    return shown(text).removeprefix("the text ")


def _missing(spec: RunSpec) -> Iterator[Problem]:
    if spec.backends.kubernetes.image is None:
        yield _problem("image", "is missing", "name the image that the pods run")
    if not _given(spec):
        yield _problem("volume", "selects no storage", f"give one of {', '.join(STORAGE)}")


def _given(spec: RunSpec) -> list[str]:
    return [kind for kind in STORAGE if getattr(spec.backends.kubernetes.volume, kind)]


_OBJECT = "use lower-case letters, digits, hyphens and dots, a letter or digit first and last"


def _names(spec: RunSpec) -> Iterator[Problem]:
    k8s = spec.backends.kubernetes
    s3, create, gang = k8s.volume.s3, k8s.volume.create, k8s.gang
    rules: tuple[tuple[str, str | None, Callable[[str], bool], str, str], ...] = (
        ("image", k8s.image, syntax.is_image, "image", "write [HOST/]NAME[:TAG], the name in lower case"),
        ("namespace", k8s.namespace, syntax.is_label, "name of a namespace", syntax.LABEL_RULE),
        ("queue", k8s.queue, syntax.is_label, "name of a queue", syntax.LABEL_RULE),
        ("volume.claim", k8s.volume.claim, syntax.is_name, "name of a claim", _OBJECT),
        ("volume.create.storage_class", create.storage_class if create else None, syntax.is_name,
         "name of a storage class", _OBJECT),
        ("volume.s3.driver", s3.driver if s3 else None, syntax.is_name, "name of a driver", _OBJECT),
        ("volume.s3.secret", s3.secret if s3 else None, syntax.is_name, "name of a secret", _OBJECT),
        ("priority_class", k8s.priority_class, syntax.is_name, "name of a priority class", _OBJECT),
        ("service_account", k8s.service_account, syntax.is_name, "name of a service account", _OBJECT),
        ("gpu.runtime_class", k8s.gpu.runtime_class, syntax.is_name, "name of a runtime class", _OBJECT),
        ("gpu.resource", k8s.gpu.resource, syntax.is_resource, "name of a resource", "write DOMAIN/NAME"),
        ("gang.scheduler_name", gang.scheduler_name if gang else None, syntax.is_name, "name of a scheduler", _OBJECT),
        ("gang.queue", gang.queue if gang else None, syntax.is_name, "name of a queue", _OBJECT),
    )  # fmt: skip
    for key, text, fits, kind, fix in rules:
        if text is not None and not fits(text):
            yield _problem(key, f"is not a valid {kind}: {_quoted(text)}", fix)
    for place, secret in enumerate(k8s.image_pull_secrets):
        if not syntax.is_name(secret):
            yield _problem(("image_pull_secrets", place), f"is not a name of a secret: {_quoted(secret)}", _OBJECT)
    for key, text in (("python", k8s.python), ("context", k8s.context)):
        if text is not None and carries_control(text):
            yield _problem(key, f"contains a line break or another control character: {_quoted(text)}", "remove it")


def _quantities(spec: RunSpec) -> Iterator[Problem]:
    k8s = spec.backends.kubernetes
    amounts: tuple[tuple[KeyPath, str | None], ...] = (
        ((*HERE, "volume", "create", "size"), k8s.volume.create.size if k8s.volume.create else None),
        ((*HERE, "launcher_resources", "memory"), k8s.launcher_resources.memory),
        ((*HERE, "shared_memory"), k8s.shared_memory),
        ((*HERE, "ephemeral_storage"), k8s.ephemeral_storage),
    )
    for path, text in amounts:
        if text is None:
            continue
        try:
            size = parse_memory(text)
        except UserError as error:
            yield Problem(path, error.what, error.fix)
        else:
            if size > LARGEST_QUANTITY:
                yield Problem(
                    path, f"is above the largest amount in Kubernetes: {_quoted(text)}", "write less than 8Ei"
                )
    request, limit = k8s.launcher_resources.cpu, k8s.launcher_resources.cpu_limit
    numbers = (
        ("launcher_resources.cpu", request),
        ("launcher_resources.cpu_limit", limit),
        ("worker_cpu", k8s.worker_cpu),
    )
    for key, cores in numbers:
        if cores is not None and (not syntax.CORES.fullmatch(cores) or not cores.strip("0.m")):
            fix = "write cores such as 2, or thousandths such as 250m"
            yield _problem(key, f"is not a number of cores: {_quoted(cores)}", fix)
    if limit is not None and all(map(syntax.CORES.fullmatch, (request, limit))) and _cores(limit) < _cores(request):
        message = f"is {limit}, less than the {request} that launcher_resources.cpu requests"
        yield _problem("launcher_resources.cpu_limit", message, "raise it", (*HERE, "launcher_resources", "cpu"))
    if k8s.deadline is not None:
        try:
            parse_time(k8s.deadline)
        except UserError as error:
            yield Problem((*HERE, "deadline"), error.what, error.fix)


def _volume(spec: RunSpec) -> Iterator[Problem]:
    volume, kinds = spec.backends.kubernetes.volume, _given(spec)
    related_keys = tuple((*HERE, "volume", kind) for kind in kinds)
    if len(kinds) > 1:
        yield _problem(("volume", kinds[1]), f"cannot be combined with {kinds[0]}", "use one of them", *related_keys)
    one_pod = spec.backends.kubernetes.launcher_as_worker and spec.resources.nodes == 1
    apart = ((*HERE, "launcher_as_worker"), ("resources", "nodes"))
    fix = "use storage that all pods can access, or one node with launcher_as_worker"
    if volume.empty_dir and not one_pod:
        yield _problem("volume.empty_dir", "is accessible to one pod only, and the run has more", fix, *apart)
    modes = volume.create.access_modes if volume.create else []
    for place, mode in enumerate(modes):
        if mode == "ReadWriteOncePod" and not one_pod:
            path = ("volume", "create", "access_modes", place)
            yield _problem(path, "allows only one pod to write, and the run has more", fix, *apart)
        elif mode in modes[:place]:
            yield _problem(("volume", "create", "access_modes", place), f"lists {mode} twice", "keep one")


def _paths(spec: RunSpec) -> Iterator[Problem]:
    k8s = spec.backends.kubernetes
    nfs = k8s.volume.nfs
    for key, path in (
        ("volume.mount", k8s.volume.mount),
        ("volume.host_path", k8s.volume.host_path),
        ("volume.nfs.path", nfs.path if nfs else None),
        ("folder", k8s.folder),
        ("ssh_folder", k8s.ssh_folder),
    ):
        root = key == "volume.nfs.path" and path == "/"
        if path is not None and not root and (not syntax.is_absolute(path) or carries_control(path)):
            yield _problem(key, f"is not a folder: {_quoted(path)}", "give an absolute path without .. and :")
    if k8s.volume.sub_path is not None and not syntax.is_relative(k8s.volume.sub_path):
        fix = "give a path inside the volume, without .."
        yield _problem("volume.sub_path", f"is not a folder of the volume: {_quoted(k8s.volume.sub_path)}", fix)
    if nfs is not None and (carries_control(nfs.server) or any(letter in nfs.server for letter in " /")):
        yield _problem("volume.nfs.server", f"is not a server: {_quoted(nfs.server)}", "give its name or address")


def _mounts(spec: RunSpec) -> Iterator[Problem]:
    k8s = spec.backends.kubernetes
    # /root/.ssh is mpi-operator's own default (sshAuthMountPath).
    ssh = k8s.ssh_folder or ("/root/.ssh" if k8s.security.run_as_user == 0 else "/home/ortflow/.ssh")
    keys_by_folder: dict[str, str] = {}
    places: list[tuple[KeyPath, str]] = [(("volume", "mount"), k8s.volume.mount)]
    places += [(("volumes", place, "mount"), volume.mount) for place, volume in enumerate(k8s.volumes)]
    for key, folder in places:
        bare = "/" + folder.strip("/")
        if bare == ssh.rstrip("/") or any(
            bare == pod_folder or bare.startswith(f"{pod_folder}/") for pod_folder in OWN_FOLDERS
        ):
            yield _problem(key, f"is {folder}, which the pods use", "mount it elsewhere")
        elif any(f"{pod_folder}/".startswith(f"{bare}/") for pod_folder in OWN_FOLDERS[:2]):
            yield _problem(key, f"is {folder}, which hides a folder that the pods need", "mount it elsewhere")
        elif bare in keys_by_folder:
            yield _problem(
                key, f"is {folder}, where {keys_by_folder[bare]} is mounted already", "use a different one for each"
            )
        keys_by_folder.setdefault(bare, dotted((*HERE, *key)))


def _files(spec: RunSpec) -> Iterator[Problem]:
    files = spec.backends.kubernetes.files
    for place, path in enumerate(files):
        if not syntax.is_relative(path) or "\\" in path:
            fix = "give a path relative to the run file, without .."
            yield _problem(("files", place), f"is not a file beside the run file: {_quoted(path)}", fix)
        elif path in files[:place]:
            yield _problem(("files", place), f"lists {_quoted(path)} twice", "keep one")


def _maps(spec: RunSpec) -> Iterator[Problem]:
    k8s = spec.backends.kubernetes
    fix = "write [DOMAIN/]NAME with letters, digits, - _ . and a letter or digit first and last"
    selectors = {
        "node_selector": k8s.node_selector,
        "worker_node_selector": k8s.worker_node_selector,
        "launcher_node_selector": k8s.launcher_node_selector,
    }
    for kind in ("worker_node_selector", "launcher_node_selector"):
        for name in selectors[kind].keys() & k8s.node_selector.keys():
            yield _problem(
                (kind, name), "is also given in node_selector", "use one of them", (*HERE, "node_selector", name)
            )
    for kind, entries in (("labels", k8s.labels), *selectors.items()):
        for name, value in entries.items():
            if not syntax.is_qualified(name):
                yield _problem((kind, name), "is not a name of a label", fix)
            elif not syntax.is_label_value(value):
                value_fix = "use at most 63 letters, digits, - _ . and a letter or digit first and last"
                yield _problem((kind, name), f"is not a value of a label: {_quoted(value)}", value_fix)
    for name in k8s.annotations:
        domain, slash, word = name.rpartition("/")
        # Unlike those of labels, domains of annotations may have capitals: the API server lowers the name before it
        # looks at it (apimachinery, ValidateAnnotations).
        if not syntax.is_qualified(f"{domain.lower()}{slash}{word}"):
            yield _problem(("annotations", name), "is not a name of an annotation", fix)
    for kind, names in (("labels", k8s.labels), ("annotations", k8s.annotations)):
        for name in names:
            if name.startswith(OWN_LABELS):
                yield _problem((kind, name), "is reserved for ortflow or the operator", "give another name")
    if k8s.queue is not None and "kueue.x-k8s.io/queue-name" in k8s.labels:
        message = "cannot be combined with backends.kubernetes.queue"
        yield _problem(("labels", "kueue.x-k8s.io/queue-name"), message, "use one of them", (*HERE, "queue"))
    for name in k8s.extended_resources:
        if not syntax.is_resource(name):
            yield _problem(("extended_resources", name), "is not a name of a resource", "write DOMAIN/NAME")
        elif name == k8s.gpu.resource:
            fix = "set their number in resources.gpus_per_rank"
            yield _problem(
                ("extended_resources", name), "is the resource name of a GPU", fix, (*HERE, "gpu", "resource")
            )


def _variables(spec: RunSpec) -> Iterator[Problem]:
    k8s = spec.backends.kubernetes
    names: Iterable[tuple[str, str]] = [
        *(("env", name) for name in k8s.env),
        *(("secret_env", name) for name in k8s.secret_env),
    ]
    for kind, name in names:
        if not syntax.VARIABLE.fullmatch(name):
            yield _problem((kind, name), "is not a name of a variable", "use letters, digits and _, no digit first")
        elif name in OWN_VARIABLES or name.startswith(OWN_PREFIXES):
            yield _problem((kind, name), "is set by ortflow or the operator", "leave it out")
    for name, place in k8s.secret_env.items():
        if name in k8s.env:
            related_keys = ((*HERE, "env", name),)
            yield _problem(("secret_env", name), "is also given in env", "use one of them", *related_keys)
        if not syntax.SECRET_KEY.fullmatch(place):
            yield _problem(("secret_env", name), f"is not a key of a secret: {_quoted(place)}", "write SECRET/KEY")


def _security(spec: RunSpec) -> Iterator[Problem]:
    k8s = spec.backends.kubernetes
    if k8s.ssh_port < 1024 and k8s.security.run_as_user != 0:
        user = (*HERE, "security", "run_as_user")
        yield _problem("ssh_port", f"is {k8s.ssh_port}, which only root may use", "give one above 1023", user)
    for place, name in enumerate(k8s.security.capabilities):
        if not syntax.CAPABILITY.fullmatch(name):
            fix = "write it in capitals, without CAP_, such as IPC_LOCK"
            yield _problem(("security", "capabilities", place), f"is not a capability: {_quoted(name)}", fix)


def _placing(spec: RunSpec) -> Iterator[Problem]:
    gang = spec.backends.kubernetes.gang
    if gang is not None and gang.queue is not None and gang.scheduler != "volcano":
        message = f"is Volcano's, and the scheduler is {gang.scheduler}"
        yield _problem("gang.queue", message, "remove it", (*HERE, "gang", "scheduler"))
    if spec.resources.nodes > WORKER_LIMIT and _given(spec):
        message = f"is {spec.resources.nodes}, more than an MPIJob can have"
        yield Problem(("resources", "nodes"), message, f"give at most {WORKER_LIMIT}")


def _gpus(spec: RunSpec) -> Iterator[Problem]:
    k8s, ranks = spec.backends.kubernetes, spec.resources.ranks_per_node
    if is_slice(k8s.gpu.resource) and spec.on_gpus and ranks > 1:
        message = f"is {k8s.gpu.resource}, a slice of a GPU: CUDA uses only the first of {ranks} in a pod"
        fix = "set resources.ranks_per_node to 1, and raise resources.nodes"
        yield Problem((*HERE, "gpu", "resource"), message, fix, others=(RANKS, GPUS))
    label = k8s.gpu.type_label
    if not syntax.is_qualified(label):
        fix = "write [DOMAIN/]NAME with letters, digits, - _ . and a letter or digit first and last"
        yield Problem((*HERE, "gpu", "type_label"), "is not a name of a label", fix)
    elif spec.resources.gpu_type is not None:
        for key in ("node_selector", "worker_node_selector"):
            if label in getattr(k8s, key):
                message = "cannot be combined with resources.gpu_type"
                yield Problem((*HERE, key, label), message, "use one of them", others=(TYPE,))
    memory, shared = _bytes(spec.resources.memory), _bytes(k8s.shared_memory)
    if memory is not None and shared is not None and shared > memory:
        message = f"is {k8s.shared_memory}, which counts towards the pod's memory of {spec.resources.memory}"
        fix = "lower it, or raise resources.memory"
        yield Problem((*HERE, "shared_memory"), message, fix, others=(("resources", "memory"),))


def _cores(text: str) -> float:
    return float(text.removesuffix("m")) / (1000 if text.endswith("m") else 1)


def _bytes(text: str | None) -> int | None:
    """The amount in bytes; None if it is absent, or another check reports it."""
    try:
        return parse_memory(text) if text is not None else None
    except UserError:
        return None
