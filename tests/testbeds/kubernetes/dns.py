"""The cluster's DNS: dns.py PKI API_SERVER ADDRESS. Names of Services and of their pods that have a host name.

Answers come from the EndpointSlices, so a Service's name leads straight to its pods (there is no kube-proxy). While the
API server is away, the last known names are still answered.
"""

from __future__ import annotations

import socket
import socketserver
import struct
import sys
import threading
import time

from api import Api, Failed

SLICES = "/apis/discovery.k8s.io/v1/endpointslices"
FRESH = 0.5
"""Seconds that a list of names is used for."""


class Names:
    """Addresses by name, read again on a query when they are old."""

    def __init__(self, api: Api) -> None:
        self._api, self._lock = api, threading.Lock()
        self._known: dict[str, list[str]] = {}
        self._read_at = 0.0

    def addresses(self, name: str) -> list[str]:
        """Addresses of a service or a pod; empty if the name is unknown."""
        with self._lock:
            if time.monotonic() - self._read_at > FRESH:
                try:
                    self._known = self._read()
                except Failed as error:
                    print(error, flush=True)
                self._read_at = time.monotonic()
            return self._known.get(name.lower(), [])

    def _read(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for piece in self._api.items(SLICES):
            meta = piece["metadata"]
            owner = meta.get("labels", {}).get("kubernetes.io/service-name")
            service = f"{owner}.{meta['namespace']}.svc.cluster.local"
            for endpoint in piece.get("endpoints") or []:
                # A pod that is not ready has a name only if the Service publishes it, and then it counts as ready here.
                if endpoint["conditions"].get("ready") is False:
                    continue
                found.setdefault(service, []).extend(endpoint["addresses"])
                if endpoint.get("hostname"):
                    found.setdefault(f"{endpoint['hostname']}.{service}", []).extend(endpoint["addresses"])
        return found


class Server(socketserver.ThreadingUDPServer):
    """Answers questions for A records; other kinds get an empty answer."""

    allow_reuse_address = True
    daemon_threads = True
    names: Names


class Question(socketserver.BaseRequestHandler):
    """The answer to one packet."""

    server: Server

    def handle(self) -> None:
        data, sock = self.request
        at, labels = 12, []
        while data[at]:
            labels.append(data[at + 1 : at + 1 + data[at]].decode())
            at += 1 + data[at]
        kind = struct.unpack(">H", data[at + 1 : at + 3])[0]
        found = self.server.names.addresses(".".join(labels))
        reported = found if kind == 1 else []
        records = b"".join(b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 1, 4) + socket.inet_aton(one) for one in reported)
        code = 0 if found else 3
        header = data[:2] + struct.pack(">HHHHH", 0x8400 | code, 1, len(reported), 0, 0)
        sock.sendto(header + data[12 : at + 5] + records, self.client_address)


def main() -> None:
    """Serve until killed."""
    pki, server, address = sys.argv[1:4]
    dns = Server((address, 53), Question)
    dns.names = Names(Api(pki, server))
    dns.serve_forever()


main()
