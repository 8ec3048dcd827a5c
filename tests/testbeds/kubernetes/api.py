"""The API server of a testbed, for its small services (dns.py, storage.py): plain HTTP with the admin's certificate.

They run on any Python from 3.10 on and need no packages.
"""

from __future__ import annotations

import http.client
import json
import ssl
from typing import Any


class Failed(Exception):
    """The API server is away, or refuses the request."""


class Api:
    """JSON requests over one connection, one at a time."""

    def __init__(self, pki: str, server: str) -> None:
        context = ssl.create_default_context(cafile=f"{pki}/ca.crt")
        context.load_cert_chain(f"{pki}/admin.crt", f"{pki}/admin.key")
        self._connection = http.client.HTTPSConnection(server, context=context, timeout=5)

    def __call__(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        """The API server's answer. Raises Failed."""
        data = None if body is None else json.dumps(body)
        try:
            self._connection.request(method, path, data, {"Content-Type": kind})
            answer = self._connection.getresponse()
            text = answer.read()
            if answer.status >= 300:
                raise Failed(f"{method} {path}: {answer.status} {text.decode(errors='replace')}")
            return json.loads(text)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._connection.close()
            raise Failed(f"{method} {path}: {error}") from error

    def items(self, path: str) -> list[dict[str, Any]]:
        """The items of a list."""
        found: list[dict[str, Any]] = self("GET", path)["items"]
        return found
