"""The remote tier: a real S3 server, a mounted folder, and servers that fail, stall and lie."""

from __future__ import annotations

import http.server
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from answers import Answer, fail, give, stall
from programs import run_program
from snaprt_cache import CacheError
from snaprt_cache import remote as object_store
from snaprt_cache.remote import (
    DROPPED,
    ERROR,
    MISS,
    PUT,
    SKIPPED,
    RemoteTier,
    object_name,
    open_tier,
)
from threads import in_threads

NAME = "ab" * 32
OTHER = "cd" * 32
# What a call may take beyond its time-out on a busy machine, in seconds.
SLACK = 3.0


class Events(list[str]):
    """The names of the events of a tier, in their order."""

    def __call__(self, name: str, value: float) -> None:
        self.extend([name] * int(value))


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def opened(events: Events) -> Iterator[Callable[..., RemoteTier]]:
    tiers: list[RemoteTier] = []

    def open_one(url: str, timeout: float = 10.0) -> RemoteTier:
        tiers.append(open_tier(url, timeout, events))
        return tiers[-1]

    yield open_one
    for tier in tiers:
        tier.close(0)


@pytest.fixture
def opened_s3(
    serve: Callable[[Answer], str],
    opened: Callable[..., RemoteTier],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Answer], RemoteTier]:
    """Open a bucket of a server that answers every request in the way given."""

    def open_it(answer: Answer) -> RemoteTier:
        monkeypatch.setenv("AWS_ENDPOINT", serve(answer))
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        return opened("s3://team/prefix")

    return open_it


@pytest.fixture(params=["bucket", "folder"])
def url(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(request.param)


def _drip(request: http.server.BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.send_header("Content-Length", "100000")
    request.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
    request.end_headers()
    for _ in range(300):
        request.wfile.write(b"x")
        request.wfile.flush()
        time.sleep(0.1)


def _wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# A remote that works.


def test_what_one_sends_another_fetches(
    url: str, opened: Callable[..., RemoteTier], events: Events
) -> None:
    content = os.urandom(6_000_000)  # more than S3 clients send in one part by themselves
    one = opened(url)
    assert one.fetch(NAME) is None
    one.send(NAME, content)
    one.close(20)
    assert opened(url).fetch(NAME) == content
    assert events == [MISS, PUT]


def test_objects_are_named_by_format_and_key(
    folder: str, opened: Callable[..., RemoteTier]
) -> None:
    tier = opened(folder)
    tier.send(NAME, b"content")
    tier.close(20)
    root = Path(folder.removeprefix("file://"))
    assert [p.relative_to(root).as_posix() for p in root.rglob("*.blob")] == [f"v1/ab/{NAME}.blob"]
    assert object_name(NAME) == f"v1/ab/{NAME}.blob"


def test_what_is_there_already_stays(
    url: str, opened: Callable[..., RemoteTier], events: Events
) -> None:
    for content in (b"first", b"second"):
        tier = opened(url)
        tier.send(NAME, content)
        tier.close(20)
    assert opened(url).fetch(NAME) == b"first"
    assert events == [PUT]


def test_a_blob_that_was_fetched_and_is_sent_again_is_replaced(
    url: str, opened: Callable[..., RemoteTier]
) -> None:
    damaged = opened(url)
    damaged.send(NAME, b"damaged")
    damaged.close(20)
    finder = opened(url)
    assert finder.fetch(NAME) == b"damaged"
    finder.send(NAME, b"healed")
    finder.close(20)
    assert opened(url).fetch(NAME) == b"healed"


def test_many_threads_fetch_at_once(bucket: str, opened: Callable[..., RemoteTier]) -> None:
    tier = opened(bucket)
    tier.send(NAME, b"content")
    tier.close(20)
    reader = opened(bucket, 30.0)
    assert in_threads(24, lambda _: reader.fetch(NAME)) == [b"content"] * 24


def test_a_web_server_is_read_and_never_written(
    serve: Callable[[Answer], str], opened: Callable[..., RemoteTier], events: Events
) -> None:
    methods: list[str] = []

    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        methods.append(f"{request.command} {request.path}")
        give(b"content")(request)

    tier = opened(serve(answer))
    assert tier.fetch(NAME) == b"content"
    tier.send(OTHER, b"more")
    tier.close(20)
    assert methods == [f"GET /cache/v1/ab/{NAME}.blob"]
    assert events == []


# A remote that does not.


@pytest.mark.parametrize("answer", [stall, _drip])
def test_a_slow_remote_takes_its_time_out_and_no_more(
    serve: Callable[[Answer], str],
    opened: Callable[..., RemoteTier],
    events: Events,
    answer: Answer,
) -> None:
    tier = opened(serve(answer), 0.5)
    start = time.monotonic()
    assert tier.fetch(NAME) is None
    assert time.monotonic() - start < 0.5 + SLACK
    assert events == [ERROR]


def test_a_remote_that_failed_is_left_alone_for_a_while(
    serve: Callable[[Answer], str],
    opened: Callable[..., RemoteTier],
    events: Events,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(object_store, "_FIRST_PAUSE_SECONDS", 1.0)
    asked: list[str] = []

    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        asked.append(request.path)
        (fail(404) if len(asked) > 1 else fail(400))(request)

    tier = opened(serve(answer))
    assert [tier.fetch(NAME), tier.fetch(NAME)] == [None, None]
    assert events == [ERROR, SKIPPED]
    assert len(asked) == 1
    time.sleep(1.1)
    assert [tier.fetch(NAME), tier.fetch(NAME)] == [None, None]
    assert events[2:] == [MISS, MISS]


def test_pauses_grow_with_failures_in_a_row_and_end_with_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(object_store.time, "monotonic", lambda: now[0])
    pause = object_store._Pause()
    lengths = []
    for _ in range(9):
        pause.lengthen()
        pause.lengthen()  # a request that was under way at the same time
        lengths.append(pause.remaining())
        now[0] += pause.remaining()
    assert lengths == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    pause.end()
    pause.lengthen()
    assert pause.remaining() == 5


def test_a_passing_failure_is_tried_again_within_the_time_out(
    serve: Callable[[Answer], str], opened: Callable[..., RemoteTier], events: Events
) -> None:
    asked: list[str] = []

    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        asked.append(request.path)
        (give(b"content") if len(asked) > 2 else fail(503))(request)

    assert opened(serve(answer)).fetch(NAME) == b"content"
    assert events == []


@pytest.mark.parametrize("status", [500, 503])
def test_a_failing_remote_fails_nobody_and_is_reported_once(
    serve: Callable[[Answer], str],
    opened: Callable[..., RemoteTier],
    events: Events,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
) -> None:
    monkeypatch.setattr(object_store, "_FIRST_PAUSE_SECONDS", 0.0)
    tier = opened(serve(fail(status)).replace("http://", "http://me:secret@"), 1.0)
    with caplog.at_level(logging.WARNING, "snaprt.cache"):
        assert [tier.fetch(NAME) for _ in range(3)] == [None] * 3
    assert events == [ERROR] * 3
    [warning] = caplog.messages
    assert "http://127.0.0.1" in warning
    assert "SNAPRT_CACHE_REMOTE" in warning
    assert "secret" not in warning


def test_a_port_where_nobody_listens_is_an_error_and_no_more(
    opened: Callable[..., RemoteTier], events: Events
) -> None:
    assert opened("http://127.0.0.1:1/cache", 1.0).fetch(NAME) is None
    assert events == [ERROR]


def test_a_folder_that_is_not_mounted_is_an_error_and_is_not_made(
    tmp_path: Path, opened: Callable[..., RemoteTier], events: Events
) -> None:
    tier = opened((tmp_path / "absent").as_uri())
    assert tier.fetch(NAME) is None
    tier.send(NAME, b"content")
    tier.close(5)
    assert not (tmp_path / "absent").exists()
    assert events == [ERROR, ERROR, DROPPED]


def test_credentials_that_may_only_read_stop_the_uploads_and_not_the_reads(
    opened_s3: Callable[[Answer], RemoteTier],
    events: Events,
) -> None:
    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        (give(b"content") if request.command == "GET" else fail(403))(request)

    tier = opened_s3(answer)
    tier.send(OTHER, b"more")
    _wait_for(lambda: DROPPED in events)
    tier.send(OTHER, b"more")
    assert tier.fetch(NAME) == b"content"
    assert events == [ERROR, DROPPED]


def test_a_remote_that_announces_more_than_any_blob_is_not_read(
    serve: Callable[[Answer], str], opened: Callable[..., RemoteTier], events: Events
) -> None:
    tier = opened(serve(give(b"x" * 1000, length=object_store.MAX_BLOB_BYTES + 1)))
    start = time.monotonic()
    assert tier.fetch(NAME) is None
    assert time.monotonic() - start < SLACK
    assert events == [ERROR]


def test_a_remote_that_sends_less_than_it_announced_is_an_error_or_a_shorter_blob(
    serve: Callable[[Answer], str], opened: Callable[..., RemoteTier], events: Events
) -> None:
    assert opened(serve(give(b"x" * 1000, length=2000)), 2.0).fetch(NAME) is None
    assert events == [ERROR]


# Uploads.


def test_sending_returns_at_once_and_drops_what_finds_no_room(
    opened_s3: Callable[[Answer], RemoteTier],
    events: Events,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("snaprt_cache.remote.MAX_WAITING_BYTES", 10_000)
    tier = opened_s3(stall)
    start = time.monotonic()
    for number in range(100):
        tier.send(f"{number:064x}", bytes(1000))
    assert time.monotonic() - start < SLACK
    assert 88 <= events.count(DROPPED) <= 90  # ten wait, and one may be under way
    start = time.monotonic()
    tier.close(0.2)
    assert time.monotonic() - start < SLACK
    assert events.count(DROPPED) == 100


def test_an_upload_that_fails_after_the_end_was_counted_and_says_nothing(
    opened_s3: Callable[[Answer], RemoteTier],
    events: Events,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reached, ended = threading.Event(), threading.Event()

    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        reached.set()
        ended.wait(30)
        fail(403)(request)

    tier = opened_s3(answer)
    others = threading.enumerate()
    tier.send(NAME, b"content")
    (uploads,) = [
        thread
        for thread in threading.enumerate()
        if thread.name == "snaprt-cache-uploads" and thread not in others
    ]
    assert reached.wait(30)
    tier.close(0)
    ended.set()
    uploads.join(30)
    assert not uploads.is_alive()
    assert events == [DROPPED]
    assert caplog.messages == []


def test_a_system_that_gives_no_thread_costs_the_remote_and_no_more(
    folder: str,
    opened: Callable[..., RemoteTier],
    events: Events,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    tier = opened(folder)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert tier.fetch(NAME) is None
        tier.send(NAME, b"content")
    assert events == [ERROR, DROPPED]
    tier.send(NAME, b"content")
    tier.close(20)
    assert opened(folder).fetch(NAME) == b"content"


EXITING = """
import sys, threading, time
from snaprt_cache import remote as object_store
from snaprt_cache.remote import open_tier
object_store.EXIT_SECONDS = 1.0
tier = open_tier(sys.argv[1], 60.0)
tier.send("ab" * 32, b"content")
threading.Thread(target=tier.fetch, args=("cd" * 32,), daemon=True).start()
time.sleep(0.5)
print("leaving")
"""


def test_a_process_ends_in_time_and_well_while_the_remote_hangs(
    serve: Callable[[Answer], str],
) -> None:
    start = time.monotonic()
    environment = {"AWS_ALLOW_HTTP": "true", "AWS_SKIP_SIGNATURE": "true"}
    done = run_program(EXITING, "s3://team/prefix", AWS_ENDPOINT=serve(stall), **environment)
    assert done.stdout == "leaving\n"
    assert time.monotonic() - start < 20


def test_what_is_waiting_is_stored_as_the_process_ends(
    bucket: str, opened: Callable[..., RemoteTier]
) -> None:
    program = (
        "import sys; from snaprt_cache.remote import open_tier\n"
        "tier = open_tier(sys.argv[1], 5.0)\n"
        "for n in range(5): tier.send(f'{n:064x}', bytes(1000))"
    )
    run_program(program, bucket)
    tier = opened(bucket)
    assert [tier.fetch(f"{number:064x}") for number in range(5)] == [bytes(1000)] * 5


FORKING = """
import os, sys
from snaprt_cache.remote import open_tier
events = []
tier = open_tier(sys.argv[1], 5.0, lambda name, value: events.append(name))
tier.fetch("ab" * 32)
child = os.fork()
if not child:
    tier.send("ab" * 32, b"content")
    os._exit(0 if tier.fetch("ab" * 32) is None and "PersistentCacheRemoteSkipped" in events else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_of_a_fork_leaves_the_remote_alone(bucket: str) -> None:
    run_program(FORKING, bucket)


# Opening.


@pytest.mark.parametrize("url", ["bucket", "ftp://host/path", "/mounted/folder"])
def test_a_url_of_no_known_kind_is_refused_with_those_that_are(url: str) -> None:
    with pytest.raises(CacheError) as refused:
        open_tier(url, 1.0)
    assert "s3://bucket/prefix" in refused.value.hint


def test_without_obstore_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(CacheError) as refused:
        open_tier("s3://team/prefix", 1.0)
    assert "pip install 'snaprt[remote]'" in refused.value.hint


def test_a_url_that_obstore_does_not_understand_is_an_error_and_no_more(
    opened: Callable[..., RemoteTier], events: Events
) -> None:
    assert opened("s3:///").fetch(NAME) is None
    assert events == [ERROR]
