"""Messages for what the API server refuses: one sentence each, with a fix. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ortflow.launchers.kubernetes.api import Refused
from ortflow.workflow.errors import OrtflowError, UserError

NAMESPACE = "backends.kubernetes.namespace"
_FORBIDDEN = (
    r'is forbidden: User "(?P<user>[^"]*)" cannot (?P<verb>\w+) resource "(?P<what>[^"]*)"(?: in API group "[^"]*")?'
)
_RIGHTS = "ask an administrator for a role that allows it; `ortflow doctor -b kubernetes` lists what is needed"
_MISSING = "correct the name, or ask an administrator to create it"
_RULES: tuple[tuple[str, str, str | None, str | None], ...] = (
    (
        r'admission webhook "(?P<hook>[^"]*)" denied the request:? ?(?P<message>.*)',
        "the cluster's policy {hook} refuses {thing}: {message}", None, None,
    ),
    (
        r"ValidatingAdmissionPolicy '(?P<hook>[^']*)' .*?denied request: (?P<message>.*)",
        "the cluster's policy {hook} refuses {thing}: {message}", None, None,
    ),
    (
        r"exceeded quota: (?P<message>.*)",
        "the quota of {where} has no room for {thing}: {message}", None,
        "wait until it has, ask for less in resources, or use another backends.kubernetes.namespace",
    ),
    (
        r"failed quota: (?P<quota>[^:]*): must specify (?P<what>.*)",
        "the quota {quota} of {where} requires every pod to state its {what}", "resources",
        None,  # `keys_that_state`
    ),
    (
        r'violates PodSecurity "(?P<level>[^"]*)": (?P<message>.*)',
        "{where} takes only pods of the security level {level}: {message}", "backends.kubernetes.security",
        "change what it names, or use another namespace",
    ),
    (
        r'serviceaccount "(?P<name>[^"]*)" not found',
        "there is no service account {name} in {where}", "backends.kubernetes.service_account",
        _MISSING,
    ),
    (
        r"no PriorityClass with name (?P<name>\S+) was found",
        "there is no priority class {name}", "backends.kubernetes.priority_class", _MISSING,
    ),
    (
        r'RuntimeClass "(?P<name>[^"]*)" not found',
        "there is no runtime class {name}", "backends.kubernetes.gpu.runtime_class",
        _MISSING,
    ),
    (
        r"is forbidden: \[?(?P<message>(?:maximum|minimum|\S+ max limit to request ratio) "
        r".*?per (?:Pod|Container).*?)\]*$",
        "a limit of {where} refuses {thing}: {message}", "resources", None,
    ),
    ("because it is being terminated", "{where} is being deleted", NAMESPACE, "wait, or name another"),
    (
        r'user "(?P<user>[^"]*)" .*is attempting to grant RBAC permissions not currently held',
        "{user} may not give {thing} rights that it lacks itself", "backends.kubernetes.supervisor",
        "leave it out, or ask an administrator to create the role, and give its service account",
    ),
    (
        _FORBIDDEN + r' in the namespace "(?P<there>[^"]+)"',
        "{user} may not {verb} {what} in namespace {there}", None, _RIGHTS,
    ),
    (_FORBIDDEN, "{user} may not {verb} {what} in the cluster", None, _RIGHTS),
)  # fmt: skip
"""What the API server's message contains, and the error that says the same: sentence, key path, fix."""
_BROKEN_HOOK = re.compile(r'failed calling webhook "(?P<hook>[^"]*)": (?P<message>.*)')
_UNKNOWN = re.compile(r'unknown field "(?P<field>[^"]*)"')


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
    place = f"namespace {error.namespace}"
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
            f"there is no {place}",
            where=NAMESPACE,
            fix=f"`kubectl create namespace {error.namespace}`, or name another",
        )
    if error.code == 404:
        return UserError(f"there is no {thing} in {place}")
    for pattern, sentence, key, fix in _RULES:
        if match := re.search(pattern, message):
            if "quota" in match.groupdict():
                return _unstated(sentence, place, match["quota"], match["what"])
            return UserError(sentence.format(where=place, thing=thing, **match.groupdict()), where=key, fix=fix)
    if error.code == 403:
        return UserError(f"the API server does not allow to {error.verb} {thing} in {place}: {message}")
    if error.code == 409 and error.reason == "AlreadyExists":
        return UserError(f"the name is taken: there is a {thing} in {place} already", fix="delete it, or submit again")
    # An object above the limit of a request is refused with 413, a ConfigMap above 1 MiB with 422 and this text.
    if error.code == 413 or "[]: Too long" in message:
        return UserError(
            f"{thing} is too large for the API server",
            where="backends.kubernetes.files",
            fix="list fewer or smaller files",
        )
    if error.code in (400, 422):
        return _invalid(error, message, thing)
    if match := _BROKEN_HOOK.search(message):
        return OrtflowError(f"a policy of the cluster, {match['hook']}, does not answer: {match['message']}")
    if error.code == 429:
        return OrtflowError("the API server is overloaded; try again")
    return OrtflowError(f"the API server fails to {error.verb} {thing} ({error.code}): {message}")


def _unstated(sentence: str, place: str, quota: str, lacking: str) -> UserError:
    """`lacking` is the API server's list: `limits.cpu for: launcher,side; requests.cpu for: worker`."""
    stated = [(resource, name) for part in lacking.split(";") for resource, name in _containers(part)]
    keys = keys_that_state(stated)
    amounts = "; ".join(part.strip() for part in lacking.split(";"))
    key = "backends.kubernetes.overlay" if " " in keys[0] else keys[0]
    return UserError(
        sentence.format(where=place, quota=quota, what=amounts), where=key, fix=f"give {' and '.join(keys)}"
    )


def _containers(part: str) -> Iterator[tuple[str, str]]:
    resources, _, names = part.partition(" for: ")
    for resource in resources.split(","):
        for name in names.split(",") if names else ["worker"]:
            yield resource.strip(), name.strip()


def keys_that_state(lacking: Iterable[tuple[str, str]]) -> list[str]:
    """The run file's keys that state resources of containers, given as pairs of resource and container."""
    return list(dict.fromkeys(_key_that_states(resource, name) for resource, name in lacking))


def _key_that_states(resource: str, container: str) -> str:
    has_own_key = container in ("launcher", "supervisor", "tensorboard")
    if container != "worker" and not has_own_key:
        return f"{resource} of {container} in an overlay"
    if has_own_key and resource == "limits.cpu":
        return "backends.kubernetes.launcher_resources.cpu_limit"
    # Only a launcher in which ranks run lacks anything else.
    return "resources.cpus_per_rank" if resource.endswith("cpu") else "resources.memory"


def _invalid(error: Refused, message: str, thing: str) -> UserError:
    causes = [cause for cause in error.details.get("causes") or [] if cause.get("field")]
    if fields := _UNKNOWN.findall(message):
        field_text = f"there is no field {', '.join(dict.fromkeys(fields))} in {error.kind}"
        return UserError(
            field_text, where="backends.kubernetes", fix="correct it; an overlay uses Kubernetes' field names"
        )
    if causes:
        field_text = "; ".join(f"{cause['field']}: {cause.get('message', '')}".rstrip(": ") for cause in causes[:3])
        rest = f" and {len(causes) - 3} more" if len(causes) > 3 else ""
        return UserError(f"the API server rejects {thing}: {field_text}{rest}")
    return UserError(f"the API server rejects {thing}: {message}")
