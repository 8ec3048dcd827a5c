"""Serves the page on this machine only; it is made again at each load."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from ortflow.workflow.errors import OrtflowError, UserError

HOST = "127.0.0.1"
IDLE_LIMIT = 60.0
"""Seconds without a byte after which a connection is closed."""


class _Server(ThreadingHTTPServer):
    """With a thread for each connection: browsers open some before they need them."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Print a traceback, unless the client has left."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


def server(make: Callable[[], str], port: int) -> ThreadingHTTPServer:
    """A server of the page at `/`; `make` is called once at a time. Raises UserError if the port is taken."""
    turn = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        timeout = IDLE_LIMIT

        def do_GET(self) -> None:
            if self.path != "/":
                self.send_error(404)
                return
            # A page of another site may resolve its own name to this machine, and must not read this one.
            if (self.headers.get("Host") or "").partition(":")[0] not in (HOST, "localhost"):
                self.send_error(421)
                return
            try:
                with turn:
                    body, status = make().encode(), 200
            except (OSError, OrtflowError) as error:
                body, status = str(error).encode(), 503
            self.send_response(status)
            self.send_header(
                "Content-Type", "text/html; charset=utf-8" if status == 200 else "text/plain; charset=utf-8"
            )
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing: the terminal shows the address only."""

    try:
        return _Server((HOST, port), Handler)
    except OSError as error:
        raise UserError(f"port {port} cannot be used ({error.strerror})", fix="give another one with --port") from error


def serve(make: Callable[[], str], port: int, echo: Callable[[str], object]) -> None:
    """Serve until Ctrl-C. Raises UserError if the port is taken."""
    pages = server(make, port)
    echo(f"http://{HOST}:{pages.server_port}/ (Ctrl-C ends it; from another machine: ssh -L {pages.server_port}:"
         f"{HOST}:{pages.server_port} {socket.gethostname()})")  # fmt: skip
    try:
        pages.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        pages.server_close()
