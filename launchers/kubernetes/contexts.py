"""The selected cluster, found as kubectl does: KUBECONFIG, ~/.kube/config, else the cluster that we run in."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

import yaml

from ortflow.launchers.kubernetes.api import Cluster
from ortflow.workflow.errors import UserError

IN_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def connect(context: str | None = None, namespace: str | None = None) -> Cluster:
    """The cluster of a context, by default of the current one; sends no request. Raises UserError."""
    from kubernetes.client import Configuration
    from kubernetes.config import ConfigException

    configuration = Configuration()
    files = kubeconfigs()
    if not files:
        return _own_cluster(configuration, context, namespace)
    from kubernetes.config.kube_config import list_kube_config_contexts, load_kube_config

    joined = os.pathsep.join(files)
    try:
        kube_contexts, active = list_kube_config_contexts(joined)
        selected = _chosen(kube_contexts, active, context, joined)
        load_kube_config(joined, context=selected["name"], client_configuration=configuration)
    except ConfigException as error:
        if context is None and _in_pod():
            return _own_cluster(configuration, context, namespace)
        message = str(error).removeprefix("Invalid kube-config file. ")
        raise UserError(
            f"the kubeconfig {joined} names no cluster: {message}", fix="`kubectl config use-context NAME` chooses one"
        ) from error
    except (OSError, ValueError, TypeError, yaml.YAMLError, RecursionError) as error:
        message = " ".join(str(error).split())
        raise UserError(f"the kubeconfig {joined} cannot be read: {message}") from error
    inner = selected.get("context") or {}
    return Cluster(configuration, namespace or inner.get("namespace") or "default", str(selected["name"]))


def kubeconfigs() -> list[str]:
    """The files that exist."""
    paths = os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())
    return [path for part in paths.split(os.pathsep) if part and os.path.exists(path := os.path.expanduser(part))]


def _chosen(kube_contexts: list[Any], active: Any, context: str | None, files: str) -> Any:
    if context is None:
        return active
    names = {str(entry["name"]): entry for entry in kube_contexts}
    if context not in names:
        near = difflib.get_close_matches(context, names, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(sorted(names)) or 'none'}"
        raise UserError(f"unknown context {context} in {files}", where="backends.kubernetes.context", fix=hint)
    return names[context]


def _in_pod() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ and (IN_POD / "token").exists()


def _own_cluster(configuration: Any, context: str | None, namespace: str | None) -> Cluster:
    if context is not None or not _in_pod():
        paths = os.environ.get("KUBECONFIG")
        message = f"KUBECONFIG names {paths}, which does not exist" if paths else "there is no ~/.kube/config"
        raise UserError(f"no Kubernetes cluster is known here: {message}", fix="set KUBECONFIG to your kubeconfig")
    from kubernetes.config import load_incluster_config

    load_incluster_config(client_configuration=configuration)
    namespace_file = IN_POD / "namespace"
    pod_namespace = namespace_file.read_text().strip() if namespace_file.exists() else ""
    return Cluster(configuration, namespace or pod_namespace or "default", None)
