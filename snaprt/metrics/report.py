"""How metrics look, as PyTorch/XLA's report and as JSON; must not know how they are counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from snaprt.errors import UsageError

SCHEMA: Final = "snaprt.metrics"
VERSION: Final = 1
PERCENTILES: Final = (1, 5, 10, 20, 50, 80, 90, 95, 99)

# What the samples of a metric are. time: nanoseconds, seconds: seconds (both shown as a
# duration), bytes: bytes, plain: anything else.
PLAIN: Final = "plain"
TIME: Final = "time"
SECONDS: Final = "seconds"
BYTES: Final = "bytes"

# What the short report shows by default, with the reads and the operations at once that cut graphs:
# they take the place that ATen fallbacks ("aten::") have in PyTorch/XLA's short report.
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
HOST_PREFIXES: Final = ("host::", "eager::")


@dataclass(frozen=True)
class Metric:
    """One metric as it stood at one moment.

    Attributes:
        kind: What the samples are: ``plain``, ``time`` (ns), ``seconds`` or ``bytes``.
        total_samples: How many samples were added since the start or the last clearing.
        accumulator: Their sum, in the kind's unit.
        samples: The latest of them, oldest first: (Unix time in ns, value).

    Examples:
        >>> snaprt.metrics.metric_add("Height", 3)
        >>> metric = snaprt.metrics.current().metrics["Height"]
        >>> metric.kind, metric.total_samples, metric.accumulator
        ('plain', 1, 3.0)
    """

    kind: str
    total_samples: int
    accumulator: float
    samples: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Metrics:
    """All metrics and counters of one process at one moment, by name.

    Examples:
        >>> snaprt.metrics.Metrics({}, {"MarkStep": 2}).counters["MarkStep"]
        2
    """

    metrics: Mapping[str, Metric]
    counters: Mapping[str, int]


def to_text(metrics: Metrics) -> str:
    """Return the report of ``metrics``, in PyTorch/XLA's format."""
    return "".join(_report_lines(metrics))


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


def short(
    metrics: Metrics,
    counter_names: Iterable[str] | None = None,
    metric_names: Iterable[str] | None = None,
) -> Metrics:
    """Return what ``short_metrics_report`` shows of ``metrics``.

    Examples:
        >>> metrics = snaprt.metrics.Metrics({}, {"MarkStep": 2, "Mine": 1})
        >>> dict(snaprt.metrics.short(metrics).counters)
        {'MarkStep': 2}
    """
    counters = set(counter_names or SHORT_COUNTERS)
    names = set(metric_names or SHORT_METRICS)
    return Metrics(
        {name: metric for name, metric in metrics.metrics.items() if name in names},
        {
            name: value
            for name, value in metrics.counters.items()
            if name in counters or name.startswith(HOST_PREFIXES)
        },
    )


def to_json(metrics: Metrics) -> dict[str, Any]:
    """Return ``metrics`` as the JSON object that ``from_json`` reads (``snaprt.metrics``)."""
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
            for name, metric in metrics.metrics.items()
        },
        "counters": dict(metrics.counters),
    }


def from_json(content: object) -> Metrics:
    """Return the metrics that ``to_json`` made ``content`` from.

    Raises:
        UsageError: ``content`` is something else, or was written by a newer snaprt.

    Examples:
        >>> content = snaprt.metrics.to_json()
        >>> snaprt.metrics.from_json(content) == snaprt.metrics.current()
        True
    """
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise UsageError(
            "not a snaprt metrics file",
            hint="With SNAPRT_METRICS_FILE=FILE, a program writes one at exit. If FILE ends in "
            ".txt, it is already a report.",
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
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise UsageError(f"these metrics are damaged: {error!r}") from error
    return Metrics(metrics, counters)


def _metric_from(row: Mapping[str, Any]) -> Metric:
    kind = row["kind"]
    if kind not in _SHOW:
        raise ValueError(f"unknown kind {kind!r}")
    samples = tuple((int(when), float(value)) for when, value in row["samples"])
    return Metric(kind, int(row["total_samples"]), float(row["accumulator"]), samples)
