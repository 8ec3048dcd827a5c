"""Serves the page on this machine only; it is made again at each load."""

from __future__ import annotations

import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer

from ortflow.workflow.errors import OrtflowError, UserError

HOST = "127.0.0.1"


def server(make: Callable[[], str], port: int) -> HTTPServer:
    """A server of the page at `/`. Raises UserError if the port is taken."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/":
                self.send_error(404)
                return
            # A page of another site may resolve its own name to this machine, and must not read this one.
            if (self.headers.get("Host") or "").rpartition(":")[0] not in (HOST, "localhost"):
                self.send_error(421)
                return
            try:
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
        return HTTPServer((HOST, port), Handler)
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
