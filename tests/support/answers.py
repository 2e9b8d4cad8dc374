"""What a web server in a test does with a request: answer it, refuse it, or let it wait."""

from __future__ import annotations

import http.server
import time
from collections.abc import Callable

Answer = Callable[[http.server.BaseHTTPRequestHandler], None]


def give(content: bytes, length: int | None = None) -> Answer:
    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(len(content) if length is None else length))
        request.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        request.end_headers()
        request.wfile.write(content)

    return answer


def fail(status: int) -> Answer:
    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        request.rfile.read(int(request.headers.get("Content-Length", 0)))
        request.send_response(status)
        request.send_header("Content-Length", "0")
        request.end_headers()

    return answer


def stall(request: http.server.BaseHTTPRequestHandler) -> None:
    time.sleep(30)
