"""Remotes for the cache's tests, all on this machine: a real S3 server, and web servers."""

from __future__ import annotations

import http.server
import logging
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from answers import Answer


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """A server that speaks S3, with the bucket ``team``; its address."""
    moto_server = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    address = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    make_bucket = urllib.request.Request(f"{address}/team", method="PUT")
    # The first request makes the server import what answers it: long on a slow disk.
    with urllib.request.urlopen(make_bucket, timeout=120):
        pass
    yield address
    server.stop()


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The URL of an empty prefix in a bucket, with the environment that opens it."""
    variables = {
        "AWS_ENDPOINT": s3_server,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return f"s3://team/{tmp_path.name}"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    return mounted.as_uri()


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], str]]:
    """Start web servers that answer every request in the way given; gives their addresses."""
    servers: list[http.server.ThreadingHTTPServer] = []

    def start(answer: Answer) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                answer(self)

            do_GET = do_PUT = do_HEAD = handle_any  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        server.block_on_close = False
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/cache"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
