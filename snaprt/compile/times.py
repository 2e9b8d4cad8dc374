"""Keeps where the time of each program went, from its key to its executions; not who asks for it.

While a program is compiled, a stopwatch of its thread splits the time into stages. What is known of
a program stays here when its executable goes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from snaprt import jaxapi

RECORD: Final = "record"
KEY: Final = "key"
CACHE: Final = "cache"
LOWER: Final = "lower"
COMPILE: Final = "compile"
LOAD: Final = "load"
EXECUTE: Final = "execute"

STAGES: Final = (RECORD, KEY, CACHE, LOWER, COMPILE, LOAD, EXECUTE)
"""In the order in which a program goes through them."""

LAZY: Final = "lazy"
JIT: Final = "jit"

MAX_PROGRAMS: Final = 4096
"""How many programs are remembered; the one that was first compiled longest ago goes first."""


@dataclass(slots=True, eq=False)
class ProgramTimes:
    """What has been spent on one program so far."""

    graph_id: str = ""
    name: str = ""
    kind: str = LAZY  # ``lazy`` or ``jit``
    operations: int | None = None  # how many operations were recorded; ``None`` where JAX traced it
    compiled: int = 0  # how often it was compiled
    loaded: int = 0  # how often its executable came from the persistent cache
    executions: int = 0  # how often it was started; of what JAX starts itself, nobody counts it
    # Stage to the time spent in it, but for ``execute``.
    nanoseconds: dict[str, float] = field(default_factory=dict)
    execute: int = 0  # nanoseconds until JAX handed back the results of its executions

    def executed(self, nanoseconds: int) -> None:
        """Count an execution."""
        with _lock:
            self.executions += 1
            self.execute += nanoseconds

    def recorded(self, nanoseconds: float) -> None:
        """Add what it took to record the program once."""
        with _lock:
            self.nanoseconds[RECORD] = self.nanoseconds.get(RECORD, 0) + nanoseconds


class Stopwatch:
    """Splits time into stages; a stage does not have the time of those inside it."""

    def __init__(self) -> None:
        self.nanoseconds: dict[str, float] = {}
        self._inside: list[str] = []
        self._since = 0

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count what is inside as this stage, and show it in a profile."""
        self.begin(name)
        try:
            with jaxapi.span(name):
                yield
        finally:
            self.end()

    def begin(self, name: str) -> None:
        """Count as this stage, inside of the one that is under way, until its end."""
        self._lap()
        self._inside.append(name)

    def end(self) -> None:
        """End the innermost stage, if there is one."""
        self._lap()
        if self._inside:
            self._inside.pop()

    def _lap(self) -> None:
        now = time.perf_counter_ns()
        if self._inside:
            stage = self._inside[-1]
            self.nanoseconds[stage] = self.nanoseconds.get(stage, 0) + now - self._since
        self._since = now


class _OfThread(threading.local):
    stopwatch: Stopwatch | None = None


_of_thread = _OfThread()
_lock = threading.Lock()
_programs: OrderedDict[tuple[str, str], ProgramTimes] = OrderedDict()
_forgotten = 0


@contextlib.contextmanager
def measured() -> Iterator[Stopwatch]:
    """Measure the stages of what this thread compiles inside."""
    outer = _of_thread.stopwatch
    stopwatch = _of_thread.stopwatch = Stopwatch()
    try:
        yield stopwatch
    finally:
        _of_thread.stopwatch = outer


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Count what is inside as this stage of what is being compiled; elsewhere, count nothing."""
    stopwatch = _of_thread.stopwatch
    if stopwatch is None:
        yield
    else:
        with stopwatch.stage(name):
            yield


def prepared(
    kind: str,
    name: str,
    graph_id: str,
    stopwatch: Stopwatch,
    *,
    operations: int | None = None,
    compiled: bool = False,
    loaded: bool = False,
) -> ProgramTimes:
    """Add what it took to make a program's executable, and return all that is known of it."""
    global _forgotten
    with _lock:
        record = _programs.get((kind, graph_id))
        if record is None:
            record = _programs[kind, graph_id] = ProgramTimes(graph_id, name, kind, operations)
            if len(_programs) > MAX_PROGRAMS:
                _programs.popitem(last=False)
                _forgotten += 1
        record.compiled += compiled
        record.loaded += loaded
        for stage_name, nanoseconds in stopwatch.nanoseconds.items():
            record.nanoseconds[stage_name] = record.nanoseconds.get(stage_name, 0) + nanoseconds
        return record


def programs() -> tuple[list[ProgramTimes], int]:
    """Return copies of what is known of each program, oldest first, and how many are forgotten."""
    with _lock:
        records = [
            replace(record, nanoseconds=dict(record.nanoseconds)) for record in _programs.values()
        ]
        return records, _forgotten
