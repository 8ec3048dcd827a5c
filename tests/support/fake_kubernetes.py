"""A small fake API server over real HTTP, for the real `kubernetes` client: objects in a dict, a real one's answers.

The bodies of refusals in unit/kubernetes_output were taken from a Kubernetes 1.34.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import yaml

Object = dict[str, Any]
ANSWERS_FILE = Path(__file__).parents[1] / "unit" / "kubernetes_output" / "refusals.json"
ANSWERS: dict[str, Object] = json.loads(ANSWERS_FILE.read_text())
_PATH = re.compile(
    r"/(?:api/v1|apis/(?P<group>[^/]+)/(?P<version>[^/]+))(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[^/]+)"
    r"(?:/(?P<name>[^/]+))?(?P<log>/log)?"
)
CLUSTER_WIDE = ("namespaces", "nodes", "storageclasses", "priorityclasses", "runtimeclasses")
Refuse = Callable[[str, str, Object], str | None]


class FakeCluster:
    """`with FakeCluster(tmp_path) as fake`: KUBECONFIG is fake.kubeconfig."""

    def __init__(self, folder: Path) -> None:
        self.kubeconfig = folder / "kubeconfig"
        self.objects: dict[tuple[str, str, str], Object] = {}
        """By plural, namespace and name."""
        self.logs: dict[str, list[tuple[float, str]]] = {}
        """Of pods, by name: when each line was printed."""
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.versions = {"v2beta1": ["mpijobs"]}
        """Of kubeflow.org, each with its kinds."""
        self.refuse: Refuse = lambda method, plural, body: None
        """The key of an answer, for a request that is to be refused."""
        self.away = False
        self.ahead = 0.0
        """Seconds that its clock is ahead of ours."""
        self.tear = 0
        """So many bytes of the next logs are all that is sent."""
        self.cut: set[str] = set()
        """Nodes that do not answer: requests for logs of their pods stay without an answer."""
        self.forbidden: set[str] = set()
        """Of SelfSubjectAccessReviews: verb and resource."""
        self.deleted: Callable[[str, str], None] = lambda plural, name: None
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._server: ThreadingHTTPServer | None = None
        self.put(
            "namespaces", "", {"kind": "Namespace", "metadata": {"name": "default"}, "status": {"phase": "Active"}}
        )

    def __enter__(self) -> FakeCluster:
        handler = type("Handler", (_Handler,), {"fake": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        server = f"http://127.0.0.1:{self._server.server_address[1]}"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "fake", "cluster": {"server": server}}],
            "users": [{"name": "somebody", "user": {"token": "secret"}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "somebody"}}],
            "current-context": "fake",
        }
        self.kubeconfig.write_text(yaml.safe_dump(config))
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._server is not None
        self.cut.clear()
        self._server.shutdown()
        self._server.server_close()

    def add(self, *things: Object) -> None:
        """Store objects unchanged."""
        with self._changed:
            for thing in things:
                self.put(plural_of(thing["kind"]), thing["metadata"].get("namespace", ""), thing)
            self._changed.notify_all()

    def put(self, plural: str, namespace: str, thing: Object) -> Object:
        metadata = thing["metadata"]
        metadata.setdefault("uid", f"uid-{next(self._numbers)}")
        metadata.setdefault("creationTimestamp", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
        self.objects[plural, namespace, metadata["name"]] = thing
        return thing

    def of(self, plural: str, namespace: str = "default") -> list[Object]:
        """Objects of a kind."""
        return [one for (kind, where, _), one in list(self.objects.items()) if kind == plural and where == namespace]

    def remove(self, plural: str, name: str, namespace: str = "default") -> None:
        """Delete an object and its dependents, as the garbage collector does."""
        with self._changed:
            gone = self.objects.pop((plural, namespace, name), None)
            self._changed.notify_all()
        if gone is None:
            return
        for (kind, where, inner), one in list(self.objects.items()):
            owners = [owner["uid"] for owner in one["metadata"].get("ownerReferences") or []]
            if gone["metadata"]["uid"] in owners:
                self.remove(kind, inner, where)

    def say(self, pod: str, *lines: str, at: float | None = None) -> None:
        """Have a pod print lines."""
        with self._changed:
            for line in lines:
                self.logs.setdefault(pod, []).append((time.time() if at is None else at, line))
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait for a change, for a short time at most."""
        with self._changed:
            self._changed.wait(0.1)


class _Handler(BaseHTTPRequestHandler):
    fake: FakeCluster
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16

    def log_message(self, *arguments: Any) -> None:
        """Write no log."""

    def date_time_string(self, timestamp: float | None = None) -> str:
        """The date by the server's clock."""
        return super().date_time_string((time.time() if timestamp is None else timestamp) + self.fake.ahead)

    def _handle(self) -> None:
        fake = self.fake
        address = urlsplit(self.path)
        query = dict(parse_qsl(address.query))
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"{}") if length else {}
        if fake.away:
            self.close_connection = True
            return None
        path = unquote(address.path)
        fake.asked.append((self.command, path, query))
        if path == "/version":
            return self._answer(200, {"gitVersion": "v1.34.4"})
        if path.startswith("/apis/kubeflow.org") and path.count("/") <= 3 and self.command == "GET":
            return self._group(path)
        if path.endswith("/selfsubjectaccessreviews"):
            asked = body["spec"]["resourceAttributes"]
            what = f"{asked['verb']} {asked['resource']}" + (
                f"/{asked['subresource']}" if "subresource" in asked else ""
            )
            return self._answer(201, {"status": {"allowed": what not in fake.forbidden}})
        found = _PATH.fullmatch(path)
        if found is None:
            return self._refuse("no_group")
        plural, namespace, name = found["plural"], found["namespace"] or "", found["name"]
        if plural == "namespaces" or (found["namespace"] and not found["plural"]):
            namespace = ""
        if key := fake.refuse(self.command, plural, body):
            return self._refuse(key)
        if found["log"]:
            return self._log(str(name), query)
        if self.command == "GET" and name is None:
            return self._list(plural, namespace if found["namespace"] else None, query)
        if self.command == "POST":
            return self._create(plural, namespace, body, query)
        thing = fake.objects.get((plural, namespace, str(name)))
        if thing is None:
            return self._refuse("not_found")
        if self.command == "GET":
            return self._answer(200, thing)
        if self.command == "PATCH":
            _merge(thing, body)
            return self._answer(200, thing)
        if (wanted := (body.get("preconditions") or {}).get("uid")) and wanted != thing["metadata"]["uid"]:
            return self._refuse("uid")
        fake.remove(plural, str(name), namespace)
        fake.deleted(plural, str(name))
        return self._answer(200, {"kind": "Status", "status": "Success"})

    do_GET = do_POST = do_PATCH = do_DELETE = _handle  # noqa: N815

    def _group(self, path: str) -> None:
        versions = self.fake.versions
        version = path.removeprefix("/apis/kubeflow.org").strip("/")
        if not versions or (version and version not in versions):
            return self._refuse("no_group")
        if version:
            return self._answer(200, {"resources": [{"name": name} for name in versions[version]]})
        return self._answer(200, {"versions": [{"version": one} for one in versions]})

    def _create(self, plural: str, namespace: str, body: Object, query: dict[str, str]) -> None:
        fake = self.fake
        assert query.get("fieldValidation") == "Strict", "a client that lets unknown fields pass"
        if ("namespaces", "", namespace) not in fake.objects:
            return self._refuse("no_namespace")
        if (plural, namespace, body["metadata"]["name"]) in fake.objects:
            return self._refuse("taken")
        if query.get("dryRun") != "All":
            body["metadata"]["namespace"] = namespace
            fake.put(plural, namespace, body)
        return self._answer(201, body)

    def _list(self, plural: str, namespace: str | None, query: dict[str, str]) -> None:
        if plural == "mpijobs" and plural not in self.fake.versions.get("v2beta1", []):
            return self._refuse("no_kind")
        items = [
            one
            for (kind, where, _), one in sorted(self.fake.objects.items())
            if kind == plural and namespace in (None, where) and _selected(one, query)
        ]
        if query.get("watch"):
            return self._watch(plural, namespace, query)
        start, limit = int(query.get("continue") or 0), int(query.get("limit") or 500)
        more = {"continue": str(start + limit)} if start + limit < len(items) else {}
        return self._answer(200, {"items": items[start : start + limit], "metadata": more})

    def _watch(self, plural: str, namespace: str | None, query: dict[str, str]) -> None:
        """Send one event at the next change of the selected objects; end without one after the given seconds."""
        fake = self.fake

        def state() -> str:
            return json.dumps([one for one in fake.of(plural, namespace or "") if _selected(one, query)])

        before, end = state(), time.monotonic() + float(query["timeoutSeconds"])
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        while state() == before and time.monotonic() < end and not fake.away:
            fake.wait()
        if state() != before:
            self._chunk(b'{"type": "MODIFIED"}\n')
        self.wfile.write(b"0\r\n\r\n")

    def _log(self, name: str, query: dict[str, str]) -> None:
        fake = self.fake
        there = [one for one in fake.of("pods") if one["metadata"]["name"] == name]
        if not there:
            self._refuse("no_log")
            return
        while there[0]["spec"].get("nodeName") in fake.cut:
            fake.wait()
        since = query.get("sinceTime") or ""
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for line in self._lines(name, since, follow=query.get("follow") == "true"):
            if 0 < fake.tear < len(line):
                line, fake.tear = line[: fake.tear], 0
                self._chunk(line)
                break
            self._chunk(line)
        self.wfile.write(b"0\r\n\r\n")

    def _lines(self, name: str, since: str, *, follow: bool) -> Iterator[bytes]:
        sent = 0
        while True:
            # Before its lines are read: the last ones come before its end.
            running = any(
                one["metadata"]["name"] == name and one["status"]["phase"] not in ("Succeeded", "Failed")
                for one in self.fake.of("pods")
            )
            lines = self.fake.logs.get(name, [])
            new = lines[sent:]
            for moment, text in new:
                stamp = _stamp(moment)
                # The API server hands whole seconds to the kubelet.
                if stamp >= since[:19]:
                    yield f"{stamp} {text}\n".encode()
            sent += len(new)
            if not follow or not running:
                return
            self.fake.wait()

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _refuse(self, key: str) -> None:
        answer = ANSWERS[key]
        if "text" in answer:
            return self._send(answer["code"], "text/plain", answer["text"].encode())
        return self._answer(answer["code"], answer["body"])

    def _answer(self, code: int, body: Object) -> None:
        self._send(code, "application/json", json.dumps(body).encode())

    def _send(self, code: int, kind: str, data: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _stamp(moment: float) -> str:
    whole = int(moment)
    fraction = f"{round((moment - whole) * 1e9):09d}".rstrip("0")
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + (f".{fraction}Z" if fraction else "Z")


def _merge(thing: Object, change: Object) -> None:
    for key, value in change.items():
        if isinstance(value, dict) and isinstance(thing.get(key), dict):
            _merge(thing[key], value)
        else:
            thing[key] = value


def _selected(thing: Object, query: dict[str, str]) -> bool:
    labels = thing["metadata"].get("labels") or {}
    wanted = [part.partition("=") for part in query.get("labelSelector", "").split(",") if part]
    if any(labels.get(key) != value for key, _, value in wanted):
        return False
    for part in filter(None, query.get("fieldSelector", "").split(",")):
        key, _, value = part.partition("=")
        inner: Any = thing
        for word in key.split("."):
            inner = (inner or {}).get(word)
        if inner != value:
            return False
    return True


def plural_of(kind: str) -> str:
    """A kind's name in paths."""
    word = kind.lower()
    return f"{word[:-1]}ies" if word.endswith("y") else f"{word}es" if word.endswith("ss") else f"{word}s"
