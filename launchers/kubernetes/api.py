"""Access to the API server through the `kubernetes` client: plain objects in, plain objects out.

The rest of the launcher uses a `Cluster`. A refused request raises `Refused`, an unreachable server
`Unreachable`; `refusals` turns the first into messages. Credentials and transport are left to the client.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from ortflow.launchers.kubernetes.resources import GROUP, VERSIONS, path_of
from ortflow.workflow.errors import OrtflowError, UserError

if TYPE_CHECKING:
    from kubernetes.client import Configuration

Object = dict[str, Any]
"""An object as the API server returns it."""

CONNECT, READ = 4.0, 20.0
"""Seconds."""
LOG = 6.0
"""Seconds in which a node returns a log; the API server answers every other request itself."""
QUIET = 30.0
"""Seconds without a line after which a followed log is requested again."""
PAGE = 500

KUEUE, OF_KUEUE = "kueue.x-k8s.io", ("Workload", "LocalQueue")
"""Its version changes: the one that is served is used."""
OF_NODE = "/containerLogs/"
"""Part of the address at which the API server requests a log from a node, and so of its error message."""


class Unreachable(OrtflowError):
    """No answer: the request may or may not have been carried out."""


class Unread(OrtflowError):
    """The API server answers, but the node that has the pod's log does not."""


class Refused(OrtflowError):
    """A request that the API server refused."""

    def __init__(self, code: int, body: str, verb: str, kind: str, name: str, namespace: str | None) -> None:
        answer = _json(body)
        self.code, self.verb, self.kind, self.name, self.namespace = code, verb, kind, name, namespace
        self.reason = str(answer.get("reason") or "")
        self.message = str(answer.get("message") or body.strip())
        self.details: Object = answer.get("details") or {}
        super().__init__(f"the API server refuses to {verb} {kind} {name}: {self.message}")


class Cluster:
    """An API server, the selected namespace, and the context (None inside a cluster)."""

    def __init__(self, configuration: Configuration, namespace: str, context: str | None) -> None:
        from kubernetes.client import ApiClient
        from kubernetes.dynamic import DynamicClient

        # One try: only the caller knows whether the request may be repeated.
        configuration.retries = False
        self.server, self.namespace, self.context = str(configuration.host), namespace, context
        self._kueue = ""
        self._behind = 0.0
        # No discovery: the paths that ortflow uses are fixed.
        self._client = DynamicClient(ApiClient(configuration), discoverer=lambda client, cache: None)

    def now(self) -> float:
        """Unix time by the API server's clock, which sets the times of objects, from its last answer."""
        return time.monotonic() + self._behind if self._behind else time.time()

    def get(self, kind: str, name: str, namespace: str | None = None) -> Object:
        """An object of our namespace, or another. Raises Refused, with 404 if there is none."""
        return self._call("get", kind, name, namespace)

    def find(self, kind: str, name: str, namespace: str | None = None) -> Object | None:
        """The object, or None if there is none."""
        try:
            return self.get(kind, name, namespace)
        except Refused as error:
            if error.code == 404:
                return None
            raise

    def find_all(
        self, kind: str, *, labels: str = "", fields: str = "", namespace: str | None = None, everywhere: bool = False
    ) -> list[Object]:
        """Objects of a kind, in our namespace, another, or `everywhere`."""
        items: list[Object] = []
        query = {"labelSelector": labels, "fieldSelector": fields, "limit": str(PAGE), "continue": ""}
        while True:
            answer = self._call("list", kind, "", namespace, query=query, everywhere=everywhere)
            items += answer.get("items") or []
            query["continue"] = (answer.get("metadata") or {}).get("continue") or ""
            if not query["continue"]:
                return items

    def wait_for_change(
        self, kind: str, labels: str, last_items: Sequence[Object], seconds: float, namespace: str | None = None
    ) -> bool:
        """Wait until the objects of a kind differ from the `last_items`, at most so many seconds; whether they do.

        Two requests, however long it takes. Raises Refused without the right to watch.
        """
        from urllib3.exceptions import HTTPError

        answer = self._call("list", kind, "", namespace, query={"labelSelector": labels})
        if _by_uid(answer.get("items") or []) != _by_uid(last_items):
            return True
        version = str((answer.get("metadata") or {}).get("resourceVersion") or "")
        query = {
            "labelSelector": labels, "watch": "true", "resourceVersion": version, "timeoutSeconds": f"{seconds:.0f}",
        }  # fmt: skip
        request = ("watch", kind, "", namespace or self.namespace)
        # A version that has expired meanwhile comes as an event of type ERROR (410 Gone), and needs another list, too.
        events = self._send("get", self._path(kind, "", namespace), query, request, patience=seconds + READ)
        try:
            return any(events.stream(1 << 16))
        except (HTTPError, OSError):
            return True  # a cut connection: only another list tells what has changed
        finally:
            events.close()

    def create(self, document: Object, *, dry_run: bool = False) -> Object:
        """Create an object; unknown fields are refused. `dry_run`: all checks, but nothing is created."""
        kind, metadata = str(document["kind"]), document["metadata"]
        # By default the API server drops unknown fields with a warning only.
        query = {"fieldValidation": "Strict", "fieldManager": "ortflow", "dryRun": "All" if dry_run else ""}
        return self._call(
            "create", kind, str(metadata["name"]), metadata.get("namespace"), query=query, body=document,
            version=str(document["apiVersion"]),
        )  # fmt: skip

    def patch(self, kind: str, name: str, change: Object, namespace: str | None = None, *, part: str = "") -> Object:
        """Merge a change into an object, or into a subresource (`part`) such as status."""
        query = {"fieldManager": "ortflow"}
        return self._call("patch", kind, name, namespace, body=change, query=query, part=part)

    def delete(
        self, kind: str, name: str, namespace: str | None = None, *, grace: int | None = None, uid: str | None = None
    ) -> bool:
        """Delete an object, and in the background what it owns; False if there is none with this `uid`."""
        # Without a policy, the pods of a batch Job stay: its default is to orphan them, for compatibility.
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        try:
            self._call("delete", kind, name, namespace, body=options)
        except Refused as error:
            if error.code == 404 or (error.code == 409 and uid is not None):
                return False
            raise
        return True

    def log(
        self, pod: str, container: str, namespace: str | None = None, *, since: str | None = None, follow: bool = False
    ) -> Iterator[bytes]:
        """The log of a container in chunks, with a time before each line. Raises Unread if it cannot be read."""
        from urllib3.exceptions import ReadTimeoutError

        query = {"container": container, "timestamps": "true", "sinceTime": since or "", "follow": "true" * follow}
        path = f"{self._path('Pod', pod, namespace)}/log"
        request = ("read", "Pod", f"{pod}/log", namespace or self.namespace)
        try:
            answer = self._send("get", path, query, request, patience=QUIET if follow else LOG)
        except Refused as error:
            if error.code < 500 or OF_NODE not in error.message:
                raise
            raise Unread(error.message) from error
        except Unreachable as error:
            if not isinstance(error.__cause__, ReadTimeoutError):
                raise
            raise Unread(f"the log of {pod} does not come") from error
        try:
            yield from self._pieces(answer)
        finally:
            answer.close()

    def served(self, group: str) -> list[str]:
        """The served versions of an API group; empty if there is no such group."""
        try:
            answer = self.ask(f"/apis/{group}")
        except Refused as error:
            if error.code == 404:
                return []
            raise
        return [str(group_version["version"]) for group_version in answer.get("versions") or []]

    def serves_mpijobs(self, version: str) -> bool:
        """Whether MPIJobs of a version are served."""
        if version not in self.served(GROUP):
            return False
        resources = self.ask(f"/apis/{GROUP}/{version}").get("resources") or []
        return "mpijobs" in [resource.get("name") for resource in resources]

    def ask(self, path: str) -> Object:
        """The answer at a path of the API, such as /version."""
        return _json(self._send("get", path, {}, ("get", "path", path, None)).data)

    def may(self, verb: str, group: str, resource: str, subresource: str = "", namespace: str | None = None) -> bool:
        """Whether these credentials may do something (`kubectl auth can-i`)."""
        attributes = {"namespace": namespace or self.namespace, "verb": verb, "group": group, "resource": resource}
        if subresource:
            attributes["subresource"] = subresource
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        answer = self._send("post", path, {}, ("create", "SelfSubjectAccessReview", "", None), body=body)
        return bool(_json(answer.data).get("status", {}).get("allowed"))

    def _call(
        self, verb: str, kind: str, name: str, namespace: str | None, *, query: Mapping[str, str] | None = None,
        body: Object | None = None, version: str | None = None, everywhere: bool = False, part: str = "",
    ) -> Object:  # fmt: skip
        method = {"create": "post", "list": "get"}.get(verb, verb)
        path = self._path(kind, "" if verb == "create" else name, namespace, version, everywhere)
        path += f"/{part}" if part else ""
        request = (verb, kind, name, None if everywhere else namespace or self.namespace)
        return _json(self._send(method, path, query or {}, request, body=body).data)

    def _version(self, kind: str) -> str:
        if kind not in OF_KUEUE:
            return VERSIONS.get(kind, "v1")
        if not self._kueue:
            self._kueue = f"{KUEUE}/{(self.served(KUEUE) or ['v1beta1'])[0]}"
        return self._kueue

    def _path(
        self, kind: str, name: str, namespace: str | None, version: str | None = None, everywhere: bool = False
    ) -> str:
        scope = None if everywhere else namespace or self.namespace
        return path_of(kind, name, version or self._version(kind), scope)

    def _send(
        self, method: str, path: str, query: Mapping[str, str], request: tuple[str, str, str, str | None], *,
        body: Object | None = None, patience: float = READ,
    ) -> Any:  # fmt: skip
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        # Custom resources have no strategic merge patch. This one replaces lists as a whole.
        accepted = "application/merge-patch+json" if method == "patch" else None
        try:
            answer = self._client.request(
                method, path, body=body, query_params=[(key, value) for key, value in query.items() if value],
                header_params={"Accept": "application/json, */*"}, content_type=accepted, serialize=False,
                _request_timeout=(CONNECT, patience),
            )  # fmt: skip
            self._read_clock(answer.headers)
            return answer
        except ApiException as error:
            if not error.status:  # an error of the client itself
                raise self._silence(error.reason or error) from None
            self._read_clock(error.headers or {})
            body_text = error.body.decode(errors="replace") if isinstance(error.body, bytes) else str(error.body or "")
            raise Refused(int(error.status), body_text or str(error.reason), *request) from None
        except (HTTPError, OSError) as error:
            raise self._silence(error) from error

    def _read_clock(self, headers: Mapping[str, str]) -> None:
        try:
            self._behind = parsedate_to_datetime(headers["Date"]).timestamp() - time.monotonic()
        except (KeyError, ValueError):
            return

    def _pieces(self, answer: Any) -> Iterator[bytes]:
        from urllib3.exceptions import HTTPError, ReadTimeoutError

        try:
            yield from answer.stream(1 << 16)
        except ReadTimeoutError:
            return  # no line for a while
        except (HTTPError, OSError) as error:
            raise self._silence(error) from error

    def _silence(self, error: object) -> OrtflowError:
        text = " ".join(str(error).split())
        if "CERTIFICATE_VERIFY_FAILED" in text:
            message = text.partition("certificate verify failed: ")[2].partition(" (_ssl")[0] or text
            return UserError(
                f"the API server {self.server} is not trusted: {message}",
                fix="correct certificate-authority-data of the cluster in the kubeconfig",
            )
        reason = "in time" if "timed out" in text else f"({_shortest(text)})"
        return Unreachable(f"the API server {self.server} does not answer {reason}")


def _by_uid(items: Sequence[Object]) -> dict[str, Any]:
    return {str(item["metadata"].get("uid")): item["metadata"].get("resourceVersion") or item for item in items}


def _json(data: bytes | str) -> Object:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _shortest(message: str) -> str:
    """The operating system's message, at the end of a nested error."""
    if matches := re.findall(r"Error\((?:-?\d+, )?'([^']+)'\)", message):
        return str(matches[-1])
    if "SSL" in message:
        return "the connection was closed"
    return message.rpartition("] ")[2].rpartition(": ")[2].strip(" )'\"") or message
