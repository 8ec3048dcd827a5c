"""Messages for what the API server refuses: one sentence each, with a fix. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from ortflow.launchers.kubernetes.api import Refused
from ortflow.workflow.errors import OrtflowError, UserError

NAMESPACE = "backends.kubernetes.namespace"
_FORBIDDEN = re.compile(
    r'is forbidden: User "(?P<user>[^"]*)" cannot (?P<verb>\w+) resource "(?P<what>[^"]*)"'
    r'(?: in API group "[^"]*")?(?: in the namespace "(?P<where>[^"]*)")?'
)
_GRANTS = re.compile(r'user "(?P<user>[^"]*)" .*is attempting to grant RBAC permissions not currently held', re.DOTALL)
_QUOTA = re.compile(r"exceeded quota: (?P<message>.*)", re.DOTALL)
_NEEDS = re.compile(r"failed quota: (?P<quota>[^:]*): must specify (?P<what>.*)", re.DOTALL)
_HOOK = re.compile(r'admission webhook "(?P<hook>[^"]*)" denied the request:? ?(?P<message>.*)', re.DOTALL)
_POLICY = re.compile(r"ValidatingAdmissionPolicy '(?P<hook>[^']*)' .*?denied request: (?P<message>.*)", re.DOTALL)
_BROKEN_HOOK = re.compile(r'failed calling webhook "(?P<hook>[^"]*)": (?P<message>.*)', re.DOTALL)
_SECURITY = re.compile(r'violates PodSecurity "(?P<level>[^"]*)": (?P<message>.*)', re.DOTALL)
_UNKNOWN = re.compile(r'unknown field "(?P<field>[^"]*)"')
_LIMIT = re.compile(
    r"is forbidden: \[?(?P<message>(?:maximum|minimum|\S+ max limit to request ratio) .*?per (?:Pod|Container).*)",
    re.DOTALL,
)
_MISSING: tuple[tuple[re.Pattern[str], str, str], ...] = (
    (re.compile(r'serviceaccount "(?P<name>[^"]*)" not found'), "service account", "service_account"),
    (re.compile(r"no PriorityClass with name (?P<name>\S+) was found"), "priority class", "priority_class"),
    (re.compile(r'RuntimeClass "(?P<name>[^"]*)" not found'), "runtime class", "gpu.runtime_class"),
)
"""Objects that a pod names and the cluster lacks: the term, and the key of the run file."""


@contextmanager
def in_a_sentence() -> Iterator[None]:
    """Turn a Refused inside into its message."""
    try:
        yield
    except Refused as error:
        raise refusal(error) from error


def refusal(error: Refused) -> OrtflowError:
    """The error for a refusal: a UserError if the user must change something, else an OrtflowError that may pass."""
    message = " ".join(error.message.split())
    where = f"namespace {error.namespace}"
    thing = f"{error.kind} {error.name}".strip()
    if error.code == 401:
        return UserError(
            "the API server does not accept the credentials: they are wrong or have expired",
            fix="log in again, then try `kubectl auth whoami`",
        )
    if error.code == 404 and (
        error.details.get("kind") == "namespaces" or re.search(r"namespaces? \S+ not found", message)
    ):
        return UserError(
            f"there is no {where}",
            where=NAMESPACE,
            fix=f"`kubectl create namespace {error.namespace}`, or name another",
        )
    if error.code == 404:
        return UserError(f"there is no {thing} in {where}")
    if found := _HOOK.search(message) or _POLICY.search(message):
        return UserError(f"the cluster's policy {found['hook']} refuses {thing}: {found['message'].strip()}")
    if found := _QUOTA.search(message):
        return UserError(
            f"the quota of {where} has no room for {thing}: {found['message']}",
            fix="wait until it has, ask for less in resources, or use another backends.kubernetes.namespace",
        )
    if found := _NEEDS.search(message):
        return UserError(
            f"the quota {found['quota']} of {where} requires every pod to state its {found['what']}",
            where="resources", fix="give resources.cpus_per_rank and resources.memory",
        )  # fmt: skip
    if found := _SECURITY.search(message):
        return UserError(
            f"{where} takes only pods of the security level {found['level']}: {found['message']}",
            where="backends.kubernetes.security", fix="change what it names, or use another namespace",
        )  # fmt: skip
    for pattern, called, key in _MISSING:
        if found := pattern.search(message):
            whose = f" in {where}" if called == "service account" else ""
            return UserError(
                f"there is no {called} {found['name']}{whose}",
                where=f"backends.kubernetes.{key}", fix="correct the name, or ask an administrator to create it",
            )  # fmt: skip
    if found := _LIMIT.search(message):
        return UserError(f"a limit of {where} refuses {thing}: {found['message'].rstrip(']')}", where="resources")
    if "because it is being terminated" in message:
        return UserError(f"{where} is being deleted", where=NAMESPACE, fix="wait, or name another")
    if found := _GRANTS.search(message):
        return UserError(
            f"{found['user']} may not give {thing} rights that it lacks itself",
            where="backends.kubernetes.supervisor",
            fix="leave it out, or ask an administrator to create the role, and give its service account",
        )
    if found := _FORBIDDEN.search(message):
        spot = f"in namespace {found['where']}" if found["where"] else "in the cluster"
        return UserError(
            f"{found['user']} may not {found['verb']} {found['what']} {spot}",
            fix="ask an administrator for a role that allows it; `ortflow doctor -b kubernetes` lists what is needed",
        )
    if error.code == 403:
        return UserError(f"the API server does not allow to {error.verb} {thing} in {where}: {message}")
    if error.code == 409 and error.reason == "AlreadyExists":
        return UserError(f"the name is taken: there is a {thing} in {where} already", fix="delete it, or submit again")
    if error.code == 413 or "[]: Too long" in message:
        return UserError(
            f"{thing} is too large for the API server",
            where="backends.kubernetes.files",
            fix="list fewer or smaller files",
        )
    if error.code in (400, 422):
        return _invalid(error, message, thing)
    if found := _BROKEN_HOOK.search(message):
        return OrtflowError(f"a policy of the cluster, {found['hook']}, does not answer: {found['message']}")
    if error.code == 429:
        return OrtflowError("the API server is overloaded; try again")
    return OrtflowError(f"the API server fails to {error.verb} {thing} ({error.code}): {message}")


def _invalid(error: Refused, message: str, thing: str) -> UserError:
    causes = [cause for cause in error.details.get("causes") or [] if cause.get("field")]
    if fields := _UNKNOWN.findall(message):
        reported = f"there is no field {', '.join(dict.fromkeys(fields))} in {error.kind}"
        return UserError(
            reported, where="backends.kubernetes", fix="correct it; an overlay uses Kubernetes' field names"
        )
    if causes:
        reported = "; ".join(f"{cause['field']}: {cause.get('message', '')}".rstrip(": ") for cause in causes[:3])
        more = f" and {len(causes) - 3} more" if len(causes) > 3 else ""
        return UserError(f"the API server rejects {thing}: {reported}{more}")
    return UserError(f"the API server rejects {thing}: {message}")
