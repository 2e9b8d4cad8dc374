"""What the processes of a job tell each other: values by key, events that all hear, questions.

Everything goes over the coordination service of ``jax.distributed``. A thread of each process asks
it for new events, so that a process answers while its main thread waits for a device.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from snaprt import jaxapi
from snaprt.host import stacks

_log = logging.getLogger("snaprt.fleet")

Handler = Callable[[int, dict[str, Any]], None]
"""``handler(rank, data)`` is called with what a process has published."""

_FOLDER: Final = "snaprt"
#: How often a process asks for new events, in seconds.
_POLL_SECONDS: Final = 0.25
#: In a large job, each process asks less often: the service answers so many processes a second.
_ANSWERS_A_SECOND: Final = 1000
_ANSWER: Final = "answer"
_MOST_LOST: Final = 3
_MOST_EARLY: Final = 64
_HEAR_SECONDS: Final = 1.0


class Channel:
    """The channel of one process; all methods may be called from any thread.

    While the service cannot be reached, nothing is sent and nothing received: no method raises.
    """

    def __init__(self, service: jaxapi.Coordination) -> None:
        self.rank = service.rank
        self.count = service.count
        self._service = service
        self._handlers: dict[str, list[Handler]] = {}
        self._early: deque[dict[str, Any]] = deque(maxlen=_MOST_EARLY)  # nobody listens to yet
        self._next = 0  # the number of the next event
        self._questions = 0
        self._process = os.getpid()
        self._ending = threading.Event()
        self._hearing = threading.RLock()
        self._thread = threading.Thread(target=self._work, name="snaprt-channel", daemon=True)
        self._lock = threading.RLock()  # a signal may come while the main thread has it

    def start(self) -> None:
        """Hear events from here on."""
        self._thread.start()
        # JAX's own handler, which closes the connection, was registered before and runs later.
        atexit.register(self._end)

    def put(self, key: str, value: bytes) -> bool:
        """Store a value for all; return whether the service has it now."""
        return self._try(lambda: self._service.put(f"{_FOLDER}/{key}", value)) is not _LOST

    def put_first(self, key: str, value: bytes) -> bytes | None:
        """Return the value of a key: this one, unless another process has stored one before.

        Returns:
            None where the service does not answer.
        """
        if self._try(lambda: self._service.put_new(f"{_FOLDER}/{key}", value)) is True:
            return value
        return self.get(key)

    def get(self, key: str, seconds: float = 0.0) -> bytes | None:
        """Return the value of a key, or None where it has none after so many seconds.

        The wait can be interrupted.
        """
        end = time.monotonic() + seconds
        while True:
            remaining = end - time.monotonic()
            if remaining <= 0:
                value = self._try(lambda: self._service.get(f"{_FOLDER}/{key}"))
                return None if value is _LOST else value
            part = min(remaining, 1.0)
            value = self._try(functools.partial(self._service.wait_for, f"{_FOLDER}/{key}", part))
            if value is _LOST:
                time.sleep(part)
            elif value is not None:
                return value

    def below(self, folder: str) -> dict[str, bytes]:
        """Return the values of all keys that begin with ``folder/``, by the rest of the key."""
        values = self._try(lambda: self._service.below(f"{_FOLDER}/{folder}"))
        return {} if values is _LOST else values

    def delete(self, folder: str) -> None:
        """Delete a key, and all that begin with ``folder/``."""
        self._try(lambda: self._service.delete(f"{_FOLDER}/{folder}"))

    def publish(self, kind: str, data: dict[str, Any]) -> bool:
        """Tell all processes of an event, this one too; return whether they will hear of it."""
        event = json.dumps({"kind": kind, "rank": self.rank, "data": data}).encode()

        def append() -> None:
            number = self._next
            while not self._service.put_new(f"{_FOLDER}/event/{number}", event):
                number += 1

        return self._try(append) is not _LOST

    def listen(self, kind: str, handler: Handler) -> None:
        """Call ``handler`` for each event of a kind, in a thread.

        Events of that kind which came before its first handler are told now, in this thread.
        """
        with self._lock:
            self._handlers.setdefault(kind, []).append(handler)
            early = [event for event in self._early if event["kind"] == kind]
            for event in early:
                self._early.remove(event)
        for event in early:
            self._handle(event, [handler])

    def places(self, ranks: Iterable[int], seconds: float) -> dict[int, str]:
        """Return the user's line at which the main thread of each process is.

        Those that do not answer within so many seconds are missing.
        """
        expected = set(ranks)
        with self._lock:
            self._questions += 1
            question = f"{self.rank}.{self._questions}"
        if not self.publish(_ANSWER, {"question": question, "ranks": sorted(expected)}):
            return {}
        end = time.monotonic() + seconds
        answers: dict[int, str] = {}
        while time.monotonic() < end and expected - set(answers):
            time.sleep(0.02)
            replies = self.below(f"{_ANSWER}/{question}")
            answers = {int(rank): value.decode() for rank, value in replies.items()}
        return answers

    def ended(self) -> frozenset[int]:
        """Return the processes whose programs have ended."""
        return frozenset(int(rank) for rank in self.below("ended"))

    def leave(self, seconds: float) -> None:
        """Say that this process is about to be ended; the first one waits for the others to say so.

        The coordinator is in the first process: without it, XLA aborts the others at once.
        """
        self.put(f"ended/{self.rank}", b"")
        end = time.monotonic() + seconds
        while not self.rank and len(self.ended()) < self.count and time.monotonic() < end:
            time.sleep(0.02)

    def _work(self) -> None:
        pause = max(_POLL_SECONDS, self.count / _ANSWERS_A_SECOND)
        failures = 0
        while not self._ending.wait(pause) and self._service.is_current():
            try:
                self._hear_all()
                failures = 0
            except RuntimeError as error:
                failures += 1
                if failures == _MOST_LOST and self._service.is_current():
                    _log.warning(
                        "rank %d cannot reach the coordinator of the job: %s", self.rank, error
                    )

    def hear(self) -> None:
        """Hear now, in this thread, what has been published so far."""
        self._try(self._hear_all)

    def _hear_all(self) -> None:
        # Not for ever: a signal may have stopped this thread where the other one waits for it.
        if not self._hearing.acquire(timeout=_HEAR_SECONDS):
            return
        try:
            while event := self._service.get(f"{_FOLDER}/event/{self._next}"):
                self._next += 1
                self._hear(event)
        finally:
            self._hearing.release()

    def _hear(self, event: bytes) -> None:
        message = json.loads(event)
        kind, data = message["kind"], message["data"]
        if kind == _ANSWER and self.rank in data["ranks"]:
            self.put(f"{_ANSWER}/{data['question']}/{self.rank}", _main_thread_place().encode())
        with self._lock:
            handlers = list(self._handlers.get(kind, ()))
            if not handlers and kind != _ANSWER:
                self._early.append(message)
        self._handle(message, handlers)

    def _handle(self, event: dict[str, Any], handlers: Iterable[Handler]) -> None:
        for handler in handlers:
            try:
                handler(event["rank"], event["data"])
            except Exception:
                _log.exception("an event of another rank could not be handled")

    def _end(self) -> None:
        """Say that the program has ended; end the thread before JAX closes the connection."""
        if os.getpid() != self._process:  # a forked child, which is not the rank
            return
        self._ending.set()
        self._thread.join()
        if self._service.is_current():
            self.put(f"ended/{self.rank}", b"")

    def _try(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            if not self._ending.is_set():
                _log.info("the coordinator of the job did not answer: %s", error)
            return _LOST


def _main_thread_place() -> str:
    """Return the user's line at which the main thread is."""
    at = stacks.user_frame(stacks.main_thread_frames())
    frame = None if at is None else jaxapi.Frame(at["filename"], at["line"], at["name"])
    return jaxapi.place_text(frame)


_LOST: Final = object()

_channel: Channel | None = None
_making = threading.Lock()


def channel() -> Channel | None:
    """Return the channel of this job, opened at its first use.

    Returns:
        None in a job of one process, or where ``jax.distributed`` has not been initialized yet.
    """
    global _channel
    opened = _channel
    if opened is not None and opened._service.is_current():
        return opened
    with _making:
        service = jaxapi.coordination()
        if service is None:
            return None
        if _channel is None or not _channel._service.is_current():
            _channel = Channel(service)
            _channel.start()
        return _channel
