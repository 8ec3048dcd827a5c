"""An admission webhook that puts a container first in each pod of a namespace, as Istio's does:
kubernetes_webhook.py CERTIFICATE KEY serves it."""

from __future__ import annotations

import base64
import http.server
import json
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kubernetes_testbed import SCRIPTS, Space, wait_until

PORT = 18443
NAME = "proxy"


class Injector(http.server.BaseHTTPRequestHandler):
    """Answers an AdmissionReview with a JSON patch."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["request"]
        image = request["object"]["spec"]["containers"][0]["image"]
        container = {"name": NAME, "image": image, "command": ["sleep", "100000"]}
        patch = [{"op": "add", "path": "/spec/containers/0", "value": container}]
        answer = {
            "uid": request["uid"], "allowed": True, "patchType": "JSONPatch",
            "patch": base64.b64encode(json.dumps(patch).encode()).decode(),
        }  # fmt: skip
        body = json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": answer}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def injecting(space: Space, folder: Path) -> Iterator[None]:
    """Every pod that is created in the namespace meanwhile has another container in first place."""
    certificate, key = folder / "webhook.crt", folder / "webhook.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=webhook",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    enter = [str(SCRIPTS / "enter"), "--testbed", str(space.testbed.folder)]
    log = folder / "webhook.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [*enter, sys.executable, __file__, str(certificate), str(key)], stdin=subprocess.PIPE, stdout=output,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
    wait_until(lambda: "serving" in log.read_text(), 120, log.read_text)
    configuration = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": space.name},
        "webhooks": [{
            "name": "injector.example.org", "admissionReviewVersions": ["v1"], "sideEffects": "None",
            "failurePolicy": "Fail",
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": space.name}},
            "clientConfig": {
                "url": f"https://127.0.0.1:{PORT}/", "caBundle": base64.b64encode(certificate.read_bytes()).decode(),
            },
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
        }],
    }  # fmt: skip
    space.testbed.kubectl("create", "-f", "-", given=json.dumps(configuration))
    try:
        yield
    finally:
        space.testbed.kubectl("delete", "mutatingwebhookconfiguration", space.name)
        assert server.stdin is not None
        server.stdin.close()
        server.wait(120)


def main(certificate: str, key: str) -> None:
    """Serve until standard input ends: a signal does not reach the testbed's namespace."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", PORT), Injector)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print("serving", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
