"""A bucket, web server or mounted folder that a team shares, as the tier behind the cache.

What it fetches is verified by who asked for it. However the remote fares, no call takes longer than
the time-out and none raises.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Literal, Protocol, cast
from urllib.parse import urlsplit

from snaprt_cache.errors import LOGGER, CacheError
from snaprt_cache.reports import OnEvent

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore

#: The remote was asked and has no such blob.
MISS: Final = "PersistentCacheRemoteMiss"
#: The remote failed, or did not answer in time.
ERROR: Final = "PersistentCacheRemoteError"
#: A blob was stored there.
PUT: Final = "PersistentCacheRemotePut"
#: The remote was not asked, for it has just failed.
SKIPPED: Final = "PersistentCacheRemoteSkipped"
#: A blob was not stored there: too many were waiting, or the process ended.
DROPPED: Final = "PersistentCacheRemoteDropped"

#: How long the end of a process waits for uploads, in seconds.
EXIT_SECONDS: Final = 5.0
#: What is larger is not fetched, whatever the remote says it is.
MAX_BLOB_BYTES: Final = 1 << 30

_SCHEMES: Final = frozenset(
    ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "http", "https", "file")
)
_FORMAT_FOLDER: Final = "v1"
_ENVIRONMENT_PREFIXES: Final = ("AWS_", "GOOGLE_", "AZURE_")
_CLIENT_OPTIONS: Final = (
    *("allow_http", "allow_invalid_certificates", "root_certificate", "user_agent"),
    *("proxy_url", "proxy_ca_certificate", "proxy_excludes"),
)
_CHUNK_BYTES: Final = 1 << 20
_RETRIES: Final = 2
_REASON_CHARACTERS: Final = 300
# In a URL: the user and password before the host, and the query, which may be a signature.
_SECRETS: Final = re.compile(r"(?<=://)[^/@\s]*@|\?\S+")
_UPLOAD_TRIES: Final = 3
_UPLOAD_SECONDS: Final = 60.0
_FIRST_PAUSE_SECONDS: Final = 5.0
_LONGEST_PAUSE_SECONDS: Final = 300.0
# A mounted folder that hangs holds its thread for good: so many, and no more.
_READS_AT_ONCE: Final = 16
# Names of blobs handed out; see RemoteTier.send.
_REMEMBERED_NAMES: Final = 4096

# What may wait in memory: a program compiles faster than a slow link takes its blobs.
MAX_WAITING_BLOBS: Final = 1_000
MAX_WAITING_BYTES: Final = 256 << 20


class Tier(Protocol):
    """A place behind the cache directory, such as a bucket that a team shares.

    No method raises, and none takes longer than the time-out the tier was made with.
    """

    def fetch(self, name: str) -> bytes | None:
        """Return the content of a blob file, unverified; None where there is none to be had.

        Args:
            name: The digest of the entry's key, 64 hexadecimal digits.
        """

    def send(self, name: str, content: bytes) -> None:
        """Have a blob file stored in the background, and return at once.

        Args:
            name: The digest of the entry's key, 64 hexadecimal digits.
            content: The whole file; what is there already under the name stays.
        """

    def close(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds for what is still to be stored, and stop."""


def open_tier(url: str, timeout: float, on_event: OnEvent | None = None) -> RemoteTier:
    """Open the remote tier at a URL; it is first asked when the first blob is.

    Args:
        url: ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``,
            ``file:///mounted/folder``, or ``https://host/path``, which is only read. Credentials
            and the endpoint come from the environment, as obstore reads it.
        timeout: How long a fetch may take, in seconds, all retries included.
        on_event: Called with the name and the value of each event, from any thread.

    Raises:
        CacheError: obstore is not installed, or there is no such kind of remote.
    """
    scheme = urlsplit(url).scheme
    if scheme not in _SCHEMES:
        raise CacheError(
            f"the URL of the remote compile cache, {_SECRETS.sub('', url)!r}, is not supported",
            hint="Set SNAPRT_CACHE_REMOTE to s3://bucket/prefix, gs://bucket/prefix, "
            "az://container/prefix, https://host/path or file:///mounted/folder.",
        )
    try:
        import obstore.store  # noqa: F401 (an extra: those without a remote need not have it)
    except ImportError as error:
        raise CacheError(
            f"the remote compile cache {_SECRETS.sub('', url)} needs the package obstore, which "
            f"cannot be imported: {error}",
            hint="Run: pip install 'snaprt[remote]'",
        ) from error
    return RemoteTier(url, timeout, on_event)


def object_name(name: str) -> str:
    """Return where the blob of a key is below the prefix."""
    return f"{_FORMAT_FOLDER}/{name[:2]}/{name}.blob"


class RemoteTier:
    """A ``Tier`` over obstore; safe for threads. ``open_tier`` makes one.

    A child of a fork leaves the remote alone if its parent had used it: the threads that carry
    obstore's requests are not there.
    """

    def __init__(self, url: str, timeout: float, on_event: OnEvent | None) -> None:
        self._url = url
        self._timeout = timeout
        self._on_event = on_event
        self._shown = _SECRETS.sub("", url)
        self._process = 0
        self._stores: dict[float, ObjectStore] = {}
        self._reads = threading.BoundedSemaphore(_READS_AT_ONCE)
        self._read_pause = _Pause()
        self._write_pause = _Pause()
        self._handed_out: set[str] = set()
        self._read_only = False
        self._uploads = Uploads(self._upload, lambda count: self._event(DROPPED, count))
        self._warned: set[str] = set()
        atexit.register(self.close, EXIT_SECONDS)

    def fetch(self, name: str) -> bytes | None:
        """Return the content of a blob file, unverified; None where there is none to be had."""
        if not self._is_ours() or self._read_pause.remaining():
            self._event(SKIPPED)
            return None
        try:
            content = self._read_in_time(name)
        except Exception as error:
            if _is_absence(error):
                self._read_pause.end()
                self._event(MISS)
            else:
                self._read_pause.lengthen()
                self._failed("cannot be read", error)
            return None
        self._read_pause.end()
        if len(self._handed_out) < _REMEMBERED_NAMES:
            self._handed_out.add(name)
        return content

    def send(self, name: str, content: bytes) -> None:
        """Have a blob file stored in the background, and return at once.

        What is there already under the name stays, with one exception: a blob that this process
        has fetched and now sends was of no use to it, damaged for one, and is replaced.
        """
        if self._is_ours() and not self._read_only:
            self._uploads.add(name, content)

    def close(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds for what is still to be stored, and stop."""
        atexit.unregister(self.close)
        if self._is_ours():
            self._uploads.close(timeout)

    # Reading.

    def _read_in_time(self, name: str) -> bytes:
        """Read in another thread: some waits, as for a hung mount, end with no time-out."""
        deadline = time.monotonic() + self._timeout
        answer: concurrent.futures.Future[bytes] = concurrent.futures.Future()

        def read() -> None:
            try:
                answer.set_result(self._read(name, deadline))
            except Exception as error:
                answer.set_exception(error)
            except BaseException as error:  # a panic in obstore; no reason to end the program
                answer.set_exception(RuntimeError(str(error)))
            finally:
                self._reads.release()

        if not self._reads.acquire(timeout=self._timeout):
            raise TimeoutError(f"{_READS_AT_ONCE} earlier reads are still waiting for an answer")
        # A daemon: Python would wait without end for any other before it leaves.
        thread = threading.Thread(target=read, name="snaprt-cache-fetch", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system gives no more threads, or Python is leaving
            self._reads.release()
            raise
        try:
            return answer.result(max(0.0, deadline - time.monotonic()))
        except concurrent.futures.TimeoutError:
            raise TimeoutError(f"no answer within {self._timeout:g} s") from None

    def _read(self, name: str, deadline: float) -> bytes:
        blob = self._store(self._timeout).get(object_name(name))
        size = blob.meta["size"]
        if size > MAX_BLOB_BYTES:
            raise ValueError(f"{object_name(name)} has {size} bytes, more than any blob")
        pieces: list[memoryview] = []
        missing = size
        for piece in blob.stream(min_chunk_size=_CHUNK_BYTES):
            pieces.append(memoryview(piece))
            missing -= len(piece)
            if missing < 0:
                raise ValueError(f"{object_name(name)} has more bytes than announced")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the download did not finish within {self._timeout:g} s")
        return b"".join(pieces)

    # Writing, in the thread of the uploads.

    def _upload(self, name: str, content: bytes) -> None:
        replacing = name in self._handed_out
        self._handed_out.discard(name)
        for _ in range(_UPLOAD_TRIES):
            if self._read_only:
                break
            self._uploads.closing.wait(self._write_pause.remaining())
            if self._write_pause.remaining():
                break  # still: the process ends, and the remote has just failed
            try:
                stored = self._write(name, content, "overwrite" if replacing else "create")
            except BaseException as error:  # also a panic in obstore, which is no Exception
                if self._uploads.abandoned:
                    return  # close() has counted the blob, and nobody waits for the reason
                self._write_pause.lengthen()
                self._read_only = _is_refusal(error)
                self._failed("cannot be written", error)
            else:
                self._write_pause.end()
                if stored:
                    self._event(PUT)
                return
        self._event(DROPPED)

    def _write(self, name: str, content: bytes, mode: Literal["create", "overwrite"]) -> bool:
        from obstore.exceptions import AlreadyExistsError
        from obstore.store import HTTPStore

        store = self._store(_UPLOAD_SECONDS)
        if isinstance(store, HTTPStore):
            self._read_only = True  # a web server takes no blobs, and that is no failure
            return False
        try:
            store.put(object_name(name), content, mode=mode, use_multipart=False)
        except AlreadyExistsError:
            return False
        return True

    # Both.

    def _store(self, timeout: float) -> ObjectStore:
        """Return the store whose requests end within ``timeout`` seconds, made at first use."""
        store = self._stores.get(timeout)
        if store is None:
            store = self._stores[timeout] = _open_store(self._url, timeout)
        return store

    def _is_ours(self) -> bool:
        process = os.getpid()
        self._process = self._process or process
        return self._process == process

    def _event(self, name: str, value: float = 1) -> None:
        if self._on_event is not None:
            self._on_event(name, value)

    def _failed(self, what: str, error: BaseException) -> None:
        self._event(ERROR)
        reason = (str(error) or type(error).__name__).splitlines()[0]
        reason = _SECRETS.sub("", reason)[:_REASON_CHARACTERS]
        LOGGER.info("the remote compile cache %s %s: %s", self._shown, what, reason)
        if what in self._warned:
            return
        self._warned.add(what)
        LOGGER.warning(
            "The remote compile cache %s %s: %s. Continuing without it. Check "
            "SNAPRT_CACHE_REMOTE, the credentials and the network, or raise "
            "SNAPRT_CACHE_REMOTE_TIMEOUT. See docs/how-to/team-cache.md.",
            *(self._shown, what, reason),
        )


class Uploads:
    """Stores blobs one after the other, in the order they came, in a thread of its own.

    Args:
        store: Stores one blob, however long that takes; it must not raise.
        dropped: Told how many blobs will not be stored: no room was left, or no time.
    """

    def __init__(self, store: Callable[[str, bytes], None], dropped: Callable[[int], None]) -> None:
        self._store = store
        self._dropped = dropped
        self._changed = threading.Condition()
        self._waiting: dict[str, bytes] = {}
        self._waiting_bytes = 0
        self._busy = False
        self._thread: threading.Thread | None = None
        #: Set when there is no more time: whoever sleeps between two tries wakes up.
        self.closing: Final = threading.Event()
        #: Whether the upload in progress, if any, has been counted as dropped.
        self.abandoned = False

    def add(self, name: str, content: bytes) -> None:
        """Have a blob stored; one that finds no room is dropped."""
        with self._changed:
            self._waiting_bytes -= len(self._waiting.pop(name, b""))
            fits = (
                len(self._waiting) < MAX_WAITING_BLOBS
                and self._waiting_bytes + len(content) <= MAX_WAITING_BYTES
            )
            if fits and not self.closing.is_set() and self._is_started():
                self._waiting[name] = content
                self._waiting_bytes += len(content)
                self._changed.notify_all()
                return
        self._dropped(1)

    def close(self, timeout: float) -> None:
        """Let at most ``timeout`` seconds pass for what is waiting; drop the rest, and stop."""
        self.closing.set()
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout)
            remaining = len(self._waiting) + self._busy
            self._waiting.clear()
            self._waiting_bytes = 0
            self.abandoned = True
        if remaining:
            self._dropped(remaining)

    def _is_started(self) -> bool:
        if self._thread is None:
            # A daemon: Python would wait without end for any other before it leaves.
            thread = threading.Thread(target=self._run, name="snaprt-cache-uploads", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system gives no more threads, or Python is leaving
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self.closing.is_set())
                if not self._waiting:
                    return
                name = next(iter(self._waiting))
                content = self._waiting.pop(name)
                self._waiting_bytes -= len(content)
                self._busy = True
            self._store(name, content)


class _Pause:
    """How long to leave a remote alone: longer after each failure in a row."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = _FIRST_PAUSE_SECONDS
        self._ends = 0.0

    def remaining(self) -> float:
        """Return how many seconds are left; 0 where the remote may be asked."""
        return max(0.0, self._ends - time.monotonic())

    def lengthen(self) -> None:
        """Start a pause; failures of requests under way at the same time count as one."""
        with self._lock:
            if not self.remaining():
                self._ends = time.monotonic() + self._next
                self._next = min(2 * self._next, _LONGEST_PAUSE_SECONDS)

    def end(self) -> None:
        """Forget the failures: the remote has answered."""
        with self._lock:
            self._next = _FIRST_PAUSE_SECONDS
            self._ends = 0.0


def _open_store(url: str, timeout: float) -> ObjectStore:
    from obstore.store import from_url

    parts = urlsplit(url)
    if parts.scheme == "file":
        return from_url(url)
    limit = timedelta(seconds=timeout)
    options = _client_options(os.environ)
    options["timeout"] = options["connect_timeout"] = limit
    if parts.scheme == "http":
        options["allow_http"] = True
    return from_url(
        url,
        client_options=options,
        retry_config={
            "max_retries": _RETRIES,
            "retry_timeout": limit,
            "backoff": {
                "init_backoff": timedelta(milliseconds=50),
                "max_backoff": timedelta(seconds=2),
                "base": 2,
            },
        },
    )


def _client_options(environment: Mapping[str, str]) -> ClientConfig:
    """Return the options of the HTTP client that the environment names.

    obstore reads them itself, as ``AWS_ALLOW_HTTP``, only where it is handed no options at all.
    """
    options = {
        name: environment[prefix + name.upper()]
        for prefix in _ENVIRONMENT_PREFIXES
        for name in _CLIENT_OPTIONS
        if environment.get(prefix + name.upper())
    }
    return cast("ClientConfig", options)


def _is_absence(error: Exception) -> bool:
    from obstore.exceptions import NotFoundError

    # What obstore raises for a local file is also Python's own error.
    return isinstance(error, NotFoundError | FileNotFoundError)


def _is_refusal(error: BaseException) -> bool:
    """Return whether trying again is of no use: the credentials do not allow it."""
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    return isinstance(error, PermissionDeniedError | UnauthenticatedError)
