"""Counts and times what snaprt does, and saves it at exit; does not depend on JAX.

A *counter* is a number that only grows. A *metric* keeps the count and the sum of all its samples,
and the latest samples with their times, for the rates and percentiles in the report.
``SNAPRT_METRICS_FILE`` names a file that receives everything at exit; a process that counted
nothing leaves an existing file unchanged. `snaprt.metrics.report` formats the report.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from snaprt import settings
from snaprt.errors import SnaprtError, UsageError
from snaprt.host.regular_files import read_file
from snaprt.host.whole_files import write_whole, writing
from snaprt.metrics import report as _report
from snaprt.metrics.report import (
    BYTES,
    PLAIN,
    SECONDS,
    SHORT_COUNTERS,
    SHORT_METRICS,
    TIME,
    Metric,
    Metrics,
    from_json,
    short,
)

__all__ = [
    "EARLIER_NAMES",
    "KEPT_SAMPLES",
    "KINDS",
    "SHORT_COUNTERS",
    "SHORT_METRICS",
    "FinalizerCounter",
    "Metric",
    "Metrics",
    "add",
    "clear_all",
    "counter_add",
    "counter_names",
    "counter_value",
    "counters_add",
    "current",
    "from_json",
    "load",
    "metric_add",
    "metric_data",
    "metric_names",
    "metrics_report",
    "save",
    "short",
    "short_metrics_report",
    "timed",
    "to_json",
]

# As PyTorch/XLA keeps by default.
KEPT_SAMPLES: Final = 1024

# What the samples of a metric are; a metric without a row is plain.
KINDS: Final[Mapping[str, str]] = {
    "CompileTime": TIME,
    "EagerOpCompileTime": TIME,
    "EagerOpExecuteTime": TIME,
    "ExecuteTime": TIME,
    "LazyTracing": TIME,
    "LowerTime": TIME,
    "LoadTime": TIME,
    "PrefetchWait": TIME,
    "RecheckTime": TIME,
    "SnapshotQueueWait": TIME,
    "SnapshotWatchWait": TIME,
    "SnapshotWriteTime": TIME,
    "TransferToDeviceTime": TIME,
    "TransferFromDeviceTime": TIME,
    "PersistentCacheSavedSeconds": SECONDS,
    "PersistentCacheWaitSeconds": SECONDS,
    "PersistentCacheReadBytes": BYTES,
    "PersistentCacheWrittenBytes": BYTES,
    "InboundData": BYTES,
    "OutboundData": BYTES,
    "SnapshotBytes": BYTES,
}


# What guides and scripts for older versions of PyTorch/XLA call them.
EARLIER_NAMES: Final[Mapping[str, str]] = {
    "CachedSyncTensors": "CachedCompile",
    "UncachedSyncTensors": "UncachedCompile",
    "TransferToServerTime": "TransferToDeviceTime",
    "TransferFromServerTime": "TransferFromDeviceTime",
}


@dataclass(slots=True)
class _Samples:
    total: int = 0
    accumulator: float = 0.0
    latest: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=KEPT_SAMPLES))


# Reentrant: a finaliser that counts may run while the same thread holds the lock.
_lock = threading.RLock()
_samples: dict[str, _Samples] = {}
_thread_counts: list[tuple[threading.Thread, dict[str, int]]] = []
_ended_threads_counts: dict[str, int] = {}


class _ThreadCounters(threading.local):
    """The counters of one thread: no lock is needed to add, a read sums over the threads."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        with _lock:
            _fold_ended_threads()
            _thread_counts.append((threading.current_thread(), self.counts))


def _fold_ended_threads() -> None:
    alive = []
    for thread, counts in _thread_counts:
        if thread.is_alive():
            alive.append((thread, counts))
            continue
        for name, value in counts.items():
            _ended_threads_counts[name] = _ended_threads_counts.get(name, 0) + value
    _thread_counts[:] = alive


_here = _ThreadCounters()


def counter_add(name: str, value: int = 1) -> None:
    """Add ``value`` to the counter ``name``, which starts at 0.

    Examples:
        >>> snaprt.metrics.counter_add("Batches", 2)
        >>> snaprt.metrics.counter_value("Batches")
        2
    """
    counts = _here.counts
    try:
        counts[name] += value
    except KeyError:
        counts[name] = value


class FinalizerCounter:
    """A counter for what is done so often, as when objects go, that a call of Python is too much.

    Attributes:
        add: Adds one; takes no argument, and can be the ``__del__`` of a class.

    Examples:
        >>> class Handle:
        ...     __del__ = snaprt.metrics.FinalizerCounter("Released").add
        >>> del Handle.__del__
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._next = itertools.count().__next__
        self._not_counted = 0
        self.add: Callable[[], int] = self._next
        _finalizer_counters.append(self)

    def add_to(self, totals: dict[str, int]) -> None:
        """Add the number to ``totals``, unless it is 0; the caller holds the lock."""
        number = self._next() - self._not_counted
        self._not_counted += 1
        if number:
            totals[self._name] = totals.get(self._name, 0) + number

    def clear(self) -> None:
        """Begin at 0 again; the caller holds the lock."""
        self._not_counted = self._next() + 1


_finalizer_counters: list[FinalizerCounter] = []


def counters_add(counts: Iterable[tuple[str, int]]) -> None:
    """Add to each counter that is named its number.

    Examples:
        >>> snaprt.metrics.counters_add([("Rows", 5), ("Columns", 3)])
        >>> snaprt.metrics.counter_value("Columns")
        3
    """
    totals = _here.counts
    for name, value in counts:
        totals[name] = totals.get(name, 0) + value


def metric_add(name: str, value: float) -> None:
    """Add one sample to the metric ``name``, in the unit that ``KINDS`` gives it.

    Examples:
        >>> snaprt.metrics.metric_add("BatchSize", 128)
        >>> snaprt.metrics.metric_data("BatchSize")[:2]
        (1, 128.0)
    """
    sample = (time.time_ns(), value)
    with _lock:
        samples = _samples.get(name)
        if samples is None:
            samples = _samples[name] = _Samples()
        samples.total += 1
        samples.accumulator += value
        samples.latest.append(sample)


def add(metrics: Metrics) -> None:
    """Add what another process has counted for this one, with the times of its samples.

    Examples:
        >>> others = snaprt.metrics.Metrics({}, {"FromElsewhere": 2})
        >>> snaprt.metrics.add(others)
        >>> snaprt.metrics.counter_value("FromElsewhere")
        2
    """
    counters_add(metrics.counters.items())
    with _lock:
        for name, metric in metrics.metrics.items():
            samples = _samples.setdefault(name, _Samples())
            samples.total += metric.total_samples
            samples.accumulator += metric.accumulator
            samples.latest.extend(metric.samples)


class timed:  # noqa: N801 (used as a function, as contextlib's are)
    """Add the nanoseconds that a ``with`` block takes to the metric ``name``, raise or not.

    Examples:
        >>> with snaprt.metrics.timed("LoadData"):
        ...     batch = np.ones(8)
        >>> snaprt.metrics.metric_data("LoadData")[0]
        1
    """

    __slots__ = ("_name", "_start")

    def __init__(self, name: str) -> None:
        self._name = name
        self._start = 0

    def __enter__(self) -> None:
        self._start = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        metric_add(self._name, time.perf_counter_ns() - self._start)


def counter_names() -> list[str]:
    """Return the names of all counters that were added to, sorted.

    Examples:
        >>> snaprt.metrics.counter_add("Named")
        >>> "Named" in snaprt.metrics.counter_names()
        True
    """
    return sorted(_counters())


def counter_value(name: str) -> int | None:
    """Return the counter's value over all threads; None where nothing was added to it.

    Earlier names of PyTorch/XLA's, such as ``CachedSyncTensors``, name the same counters.

    Examples:
        >>> snaprt.metrics.counter_value("NeverCounted") is None
        True
    """
    return _counters().get(EARLIER_NAMES.get(name, name))


def metric_names() -> list[str]:
    """Return the names of all metrics that have a sample, sorted.

    Examples:
        >>> snaprt.metrics.metric_add("Width", 2)
        >>> "Width" in snaprt.metrics.metric_names()
        True
    """
    with _lock:
        return sorted(_samples)


def metric_data(name: str) -> tuple[int, float, list[tuple[float, float]]] | None:
    """Return (number of samples, their sum, [(Unix time in seconds, value), ...]).

    The list holds the latest ``KEPT_SAMPLES`` samples, oldest first. None for an unknown name.
    Earlier names of PyTorch/XLA's, such as ``TransferToServerTime``, name the same metrics.

    Examples:
        >>> snaprt.metrics.metric_add("Depth", 2)
        >>> snaprt.metrics.metric_add("Depth", 4)
        >>> count, total, samples = snaprt.metrics.metric_data("Depth")
        >>> count, total, [value for _, value in samples]
        (2, 6.0, [2, 4])
    """
    with _lock:
        samples = _samples.get(EARLIER_NAMES.get(name, name))
        if samples is None:
            return None
        latest = [(nanoseconds / 1e9, value) for nanoseconds, value in samples.latest]
        return samples.total, samples.accumulator, latest


def clear_all() -> None:
    """Remove all counters and metrics.

    Examples:
        >>> snaprt.metrics.counter_add("Old")
        >>> snaprt.metrics.clear_all()
        >>> snaprt.metrics.counter_value("Old") is None
        True
    """
    with _lock:
        _samples.clear()
        _ended_threads_counts.clear()
        for _, counts in _thread_counts:
            counts.clear()
        for counter in _finalizer_counters:
            counter.clear()


def current() -> Metrics:
    """Return the current values of all metrics and counters.

    Examples:
        >>> snaprt.metrics.counter_add("Now")
        >>> snaprt.metrics.current().counters["Now"]
        1
    """
    with _lock:
        metrics = {
            name: Metric(
                kind=KINDS.get(name, PLAIN),
                total_samples=samples.total,
                accumulator=samples.accumulator,
                samples=tuple(samples.latest),
            )
            for name, samples in sorted(_samples.items())
        }
    return Metrics(metrics, dict(sorted(_counters().items())))


def _counters() -> dict[str, int]:
    with _lock:
        totals = dict(_ended_threads_counts)
        for _, counts in _thread_counts:
            # The copy is one step of the interpreter: its thread may be adding names meanwhile.
            for name, value in counts.copy().items():
                totals[name] = totals.get(name, 0) + value
        for counter in _finalizer_counters:
            counter.add_to(totals)
    return totals


def metrics_report(metrics: Metrics | None = None) -> str:
    """Return the report of all metrics and counters, in PyTorch/XLA's format.

    Args:
        metrics: The metrics to report; by default the current ones of this process.

    Examples:
        >>> snaprt.metrics.counter_add("MyCache")
        >>> "Counter: MyCache" in snaprt.metrics.metrics_report()
        True
    """
    return _report.to_text(current() if metrics is None else metrics)


def short_metrics_report(
    counter_names: Iterable[str] | None = None, metric_names: Iterable[str] | None = None
) -> str:
    """Return a report of the named counters and metrics, and of graph breaks on the host.

    Args:
        counter_names: By default ``SHORT_COUNTERS``.
        metric_names: By default ``SHORT_METRICS``.

    Examples:
        >>> snaprt.metrics.counter_add("MyCounter", 3)
        >>> print(snaprt.metrics.short_metrics_report(["MyCounter"], []), end="")
        Counter: MyCounter
          Value: 3
    """
    return _report.to_text(short(current(), counter_names, metric_names))


def to_json(metrics: Metrics | None = None) -> dict[str, Any]:
    """Return metrics as the JSON object that ``from_json`` reads (schema ``snaprt.metrics``).

    Args:
        metrics: The metrics to convert; by default the current ones of this process.

    Examples:
        >>> snaprt.metrics.to_json()["schema"]
        'snaprt.metrics'
    """
    return _report.to_json(current() if metrics is None else metrics)


def save(path: str | Path) -> None:
    """Write this process's metrics to ``path``: the report if it ends in .txt, else JSON.

    The file is either complete or unchanged; pipes and devices are written to directly.

    Raises:
        SnaprtError: The file cannot be written.

    Examples:
        >>> snaprt.metrics.counter_add("Saved")
        >>> snaprt.metrics.save("run.json")
        >>> snaprt.metrics.load("run.json").counters["Saved"]
        1
    """
    _save(Path(path), as_text=Path(path).suffix == ".txt")


def _save(target: Path, *, as_text: bool) -> None:
    text = metrics_report() if as_text else json.dumps(to_json()) + "\n"
    elsewhere = "set SNAPRT_METRICS_FILE to a file in an existing, writable directory"
    with writing(f"write the metrics to {target}", elsewhere, kind=SnaprtError):
        write_whole(target, text.encode())


#: A file of metrics has some kilobytes; a larger one is something else.
_LARGEST_BYTES: Final = 64 << 20


def load(path: str | Path) -> Metrics:
    """Read the metrics that ``save`` wrote as JSON.

    Raises:
        UsageError: The file cannot be read, or is not a metrics file.

    Examples:
        >>> snaprt.metrics.save("earlier.json")
        >>> earlier = snaprt.metrics.load("earlier.json")
        >>> earlier == snaprt.metrics.current()
        True
    """
    try:
        content = json.loads(read_file(path, _LARGEST_BYTES))
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror or error}",
            hint="Name the file that was given to SNAPRT_METRICS_FILE or `snaprt run --metrics`.",
        ) from error
    except (ValueError, RecursionError):
        # Neither JSON nor, perhaps, text: from_json says what it should have been.
        content = None
    try:
        return from_json(content)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", hint=error.hint) from error


def _save_at_exit() -> None:
    try:
        path = settings.get("SNAPRT_METRICS_FILE")
        if path is None:
            return
        target = settings.for_rank(path)
        # A process that only looks on, as `snaprt metrics` does, must not empty the file.
        if _samples or _counters() or not os.path.exists(target):
            _save(target, as_text=path.suffix == ".txt")
    except SnaprtError as error:
        # The program's own work is done and its exit status stays.
        print(f"snaprt: {error}", file=sys.stderr)


atexit.register(_save_at_exit)
if hasattr(os, "register_at_fork"):
    # A child forked while another thread holds the lock must not wait for it for ever.
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
    )
