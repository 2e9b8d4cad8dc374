"""Counts and timings of what snaprt does, in PyTorch/XLA's report format; knows nothing of JAX.

A *counter* is a number that only grows. A *metric* keeps the count and the sum of all its samples,
and the latest samples with their times, from which the report takes rates and percentiles.
``SNAPRT_METRICS_FILE`` names a file that receives everything when the process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from snaprt import settings
from snaprt.errors import SnaprtError, UsageError

SCHEMA: Final = "snaprt.metrics"
VERSION: Final = 1
# As PyTorch/XLA keeps by default.
KEPT_SAMPLES: Final = 1024
PERCENTILES: Final = (1, 5, 10, 20, 50, 80, 90, 95, 99)

PLAIN: Final = "plain"
TIME: Final = "time"
SECONDS: Final = "seconds"
BYTES: Final = "bytes"

# What the samples of a metric are; a metric without a row is plain.
# time: nanoseconds, seconds: seconds (both shown as a duration), bytes: bytes.
KINDS: Final[Mapping[str, str]] = {
    "CompileTime": TIME,
    "ExecuteTime": TIME,
    "LazyTracing": TIME,
    "LowerTime": TIME,
    "LoadTime": TIME,
    "SnapshotWriteTime": TIME,
    "TransferToDeviceTime": TIME,
    "TransferFromDeviceTime": TIME,
    "PersistentCacheSavedSeconds": SECONDS,
    "InboundData": BYTES,
    "OutboundData": BYTES,
    "SnapshotBytes": BYTES,
}

# What the short report shows by default, and the host reads that cut graphs: they take the
# place that ATen fallbacks ("aten::") have in PyTorch/XLA's short report.
SHORT_COUNTERS: Final = (
    "CachedCompile",
    "UncachedCompile",
    "MarkStep",
    "PersistentCacheHit",
    "PersistentCacheMiss",
    "PersistentCacheCorrupt",
)
SHORT_METRICS: Final = (
    "CompileTime",
    "ExecuteTime",
    "TransferToDeviceTime",
    "TransferFromDeviceTime",
)
HOST_READ_PREFIX: Final = "host::"


@dataclass(frozen=True)
class Metric:
    """One metric as it stood at one moment.

    Attributes:
        kind: What the samples are: ``plain``, ``time`` (ns), ``seconds`` or ``bytes``.
        total_samples: How many samples were added since the start or the last clearing.
        accumulator: Their sum, in the kind's unit.
        samples: The latest ``KEPT_SAMPLES`` of them, oldest first: (Unix time in ns, value).
    """

    kind: str
    total_samples: int
    accumulator: float
    samples: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Metrics:
    """All metrics and counters of one process at one moment, by name."""

    metrics: Mapping[str, Metric]
    counters: Mapping[str, int]


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
    """Add ``value`` to the counter ``name``, which starts at 0."""
    counts = _here.counts
    try:
        counts[name] += value
    except KeyError:
        counts[name] = value


def metric_add(name: str, value: float) -> None:
    """Add one sample to the metric ``name``, in the unit that ``KINDS`` gives it."""
    sample = (time.time_ns(), value)
    with _lock:
        samples = _samples.get(name)
        if samples is None:
            samples = _samples[name] = _Samples()
        samples.total += 1
        samples.accumulator += value
        samples.latest.append(sample)


class timed:  # noqa: N801 (used as a function, as contextlib's are)
    """Add the nanoseconds that a ``with`` block takes to the metric ``name``, raise or not."""

    __slots__ = ("_name", "_start")

    def __init__(self, name: str) -> None:
        self._name = name
        self._start = 0

    def __enter__(self) -> None:
        self._start = time.perf_counter_ns()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        metric_add(self._name, time.perf_counter_ns() - self._start)


def counter_names() -> list[str]:
    """Return the names of all counters that were added to, sorted."""
    return sorted(_counters())


def counter_value(name: str) -> int | None:
    """Return the counter's value over all threads; None where nothing was added to it."""
    return _counters().get(name)


def metric_names() -> list[str]:
    """Return the names of all metrics that have a sample, sorted."""
    with _lock:
        return sorted(_samples)


def metric_data(name: str) -> tuple[int, float, list[tuple[float, float]]] | None:
    """Return (number of samples, their sum, [(Unix time in seconds, value), ...]).

    The list holds the latest ``KEPT_SAMPLES`` samples, oldest first. None for an unknown name.
    """
    with _lock:
        samples = _samples.get(name)
        if samples is None:
            return None
        latest = [(nanoseconds / 1e9, value) for nanoseconds, value in samples.latest]
        return samples.total, samples.accumulator, latest


def clear_all() -> None:
    """Forget every counter and every metric."""
    with _lock:
        _samples.clear()
        _ended_threads_counts.clear()
        for _, counts in _thread_counts:
            counts.clear()


def current() -> Metrics:
    """Return all metrics and counters as they stand now."""
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
    return totals


def metrics_report(metrics: Metrics | None = None) -> str:
    """Return the report of every metric and counter, in PyTorch/XLA's format.

    Args:
        metrics: What to report; by default this process as it stands now.
    """
    shown = current() if metrics is None else metrics
    return "".join(_report_lines(shown))


def short_metrics_report(
    counter_names: Iterable[str] | None = None, metric_names: Iterable[str] | None = None
) -> str:
    """Return the report of the named counters and metrics, and of every host read.

    Args:
        counter_names: By default ``SHORT_COUNTERS``.
        metric_names: By default ``SHORT_METRICS``.
    """
    return metrics_report(short(current(), counter_names, metric_names))


def short(
    metrics: Metrics,
    counter_names: Iterable[str] | None = None,
    metric_names: Iterable[str] | None = None,
) -> Metrics:
    """Return what ``short_metrics_report`` shows of ``metrics``."""
    counters = set(counter_names or SHORT_COUNTERS)
    names = set(metric_names or SHORT_METRICS)
    return Metrics(
        {name: metric for name, metric in metrics.metrics.items() if name in names},
        {
            name: value
            for name, value in metrics.counters.items()
            if name in counters or name.startswith(HOST_READ_PREFIX)
        },
    )


def _report_lines(metrics: Metrics) -> Iterator[str]:
    for name, metric in metrics.metrics.items():
        show = _SHOW[metric.kind]
        yield f"Metric: {name}\n"
        yield f"  TotalSamples: {metric.total_samples}\n"
        yield f"  Accumulator: {show(metric.accumulator)}\n"
        if not metric.samples:
            continue
        values = sorted(value for _, value in metric.samples)
        seconds = (metric.samples[-1][0] - metric.samples[0][0]) / 1e9
        if seconds > 0:
            yield f"  ValueRate: {show(sum(values) / seconds)} / second\n"
            yield f"  Rate: {len(values) / seconds:g} / second\n"
        shares = (f"{p}%={show(values[p * len(values) // 100])}" for p in PERCENTILES)
        yield f"  Percentiles: {'; '.join(shares)}\n"
    for name, value in metrics.counters.items():
        yield f"Counter: {name}\n"
        yield f"  Value: {value}\n"


def _show_plain(value: float) -> str:
    return f"{value:.2f}"


def _show_bytes(value: float) -> str:
    suffixes = ("B", "KB", "MB", "GB", "TB", "PB")
    power = 0
    while abs(value) >= 1024 and power + 1 < len(suffixes):
        value /= 1024
        power += 1
    return f"{value:.2f}{suffixes[power]}"


_TIME_PARTS: Final = (
    ("d", 86_400_000_000_000, 2),
    ("h", 3_600_000_000_000, 2),
    ("m", 60_000_000_000, 2),
    ("s", 1_000_000_000, 2),
    ("ms", 1_000_000, 3),
)


def _show_time(nanoseconds: float) -> str:
    """Show a duration such as ``02s112ms204.518us``: from its largest part down.

    PyTorch/XLA rounds each part before it goes on with the rest, so that it shows 346.824 ms as
    ``347ms824.000us``; here the parts add up.
    """
    if not math.isfinite(nanoseconds):
        return f"{nanoseconds}us"
    sign = "-" if nanoseconds < 0 else ""
    rest = round(abs(nanoseconds))
    text = ""
    for suffix, size, width in _TIME_PARTS:
        part, rest = divmod(rest, size)
        if part or text:
            text += f"{part:0{width}d}{suffix}"
    return f"{sign}{text}{rest // 1000:03d}.{rest % 1000:03d}us"


def _show_seconds(seconds: float) -> str:
    return _show_time(seconds * 1e9)


_SHOW: Final[Mapping[str, Callable[[float], str]]] = {
    PLAIN: _show_plain,
    TIME: _show_time,
    SECONDS: _show_seconds,
    BYTES: _show_bytes,
}


def to_json(metrics: Metrics | None = None) -> dict[str, Any]:
    """Return metrics as the JSON object that ``from_json`` reads (schema ``snaprt.metrics``).

    Args:
        metrics: What to convert; by default this process as it stands now.
    """
    shown = current() if metrics is None else metrics
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "metrics": {
            name: {
                "kind": metric.kind,
                "total_samples": metric.total_samples,
                "accumulator": metric.accumulator,
                "samples": [list(sample) for sample in metric.samples],
            }
            for name, metric in shown.metrics.items()
        },
        "counters": dict(shown.counters),
    }


def from_json(content: object) -> Metrics:
    """Return the metrics that ``to_json`` made ``content`` from.

    Raises:
        UsageError: ``content`` is something else, or was written by a newer snaprt.
    """
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise UsageError(
            "this is not a file of snaprt's metrics",
            hint="SNAPRT_METRICS_FILE=FILE makes a program write one when it ends.",
        )
    if content.get("version") != VERSION:
        raise UsageError(
            f"these metrics have format version {content.get('version')!r}; "
            f"this snaprt reads version {VERSION}",
            hint="Read them with the snaprt that wrote them, or a newer one.",
        )
    try:
        metrics = {str(name): _metric_from(row) for name, row in content["metrics"].items()}
        counters = {str(name): int(value) for name, value in content["counters"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"these metrics are damaged: {error!r}") from error
    return Metrics(metrics, counters)


def _metric_from(row: Mapping[str, Any]) -> Metric:
    kind = row["kind"]
    if kind not in _SHOW:
        raise ValueError(f"unknown kind {kind!r}")
    samples = tuple((int(when), float(value)) for when, value in row["samples"])
    return Metric(kind, int(row["total_samples"]), float(row["accumulator"]), samples)


def save(path: str | Path) -> None:
    """Write this process's metrics to ``path``: the report where it ends in .txt, else JSON.

    The file appears whole or not at all.

    Raises:
        SnaprtError: The file cannot be written.
    """
    target = Path(path)
    text = metrics_report() if target.suffix == ".txt" else json.dumps(to_json()) + "\n"
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise SnaprtError(
            f"cannot write the metrics to {target}: {error.strerror or error}",
            hint="Point SNAPRT_METRICS_FILE at a file in a directory that exists and is writable.",
        ) from error


def load(path: str | Path) -> Metrics:
    """Read the metrics that ``save`` wrote as JSON.

    Raises:
        UsageError: The file cannot be read, or is no file of metrics.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror or error}",
            hint="Name the file that SNAPRT_METRICS_FILE or `snaprt run --metrics` named.",
        ) from error
    except ValueError:
        # Neither JSON nor, perhaps, text: from_json says what it should have been.
        content = None
    try:
        return from_json(content)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", hint=error.hint) from error


def _save_at_exit() -> None:
    try:
        path = settings.get("SNAPRT_METRICS_FILE")
        if path is not None:
            save(path)
    except SnaprtError as error:
        # The program's own work is done and its exit status stays.
        print(f"snaprt: {error}", file=sys.stderr)


atexit.register(_save_at_exit)
if hasattr(os, "register_at_fork"):
    # A child forked while another thread holds the lock must not wait for it for ever.
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
    )
