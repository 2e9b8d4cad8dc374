"""``snaprt cache stats``: hits, misses and why, seconds saved, bytes, by program and by day."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import click
from snaprt_cache import Cache, CacheStats, EntryRow

from snaprt.cli import output
from snaprt.cli.cache.why import Neighbors
from snaprt.cli.cache.words import (
    NO_PROGRAMS,
    bar,
    cache_command,
    print_pairs,
    short_name,
)
from snaprt.cli.fitted_table import Column, Columns, FittedTable
from snaprt.units import counted, format_duration, format_size

_VERSION: Final = 2  # with reasons, programs and days
_MOST_PROGRAMS: Final = 10
_BAR_WIDTH: Final = 16
_Figures = Mapping[str, Any]
_Item = TypeVar("_Item")


@cache_command("stats")
@click.option(
    "--days",
    type=click.IntRange(min=1, max=36_500),
    default=7,
    show_default=True,
    help="Number of days to show.",
)
def stats(cache: Cache, days: int, as_json: bool) -> None:
    """Print cache statistics: hits, misses and their reasons, time saved, by program and by day.

    Reasons cover the last few hundred misses. Days are in UTC.

    \b
    Example:
      snaprt cache stats --days 30
      snaprt cache stats --json
    """
    numbers = cache.stats()
    neighbors = Neighbors(cache)
    reasons = Counter(neighbors.explain_miss(miss).reason for miss in neighbors.misses)
    missed = Counter(miss.name for miss in neighbors.misses)
    programs = _programs(neighbors.rows.values(), missed)
    history = _days(cache.events_by_day(), days)
    if as_json:
        content = {
            **dataclasses.asdict(numbers),
            "reasons": dict(reasons.most_common()),
            "programs": programs,
            "days": history,
        }
        output.emit_json("snaprt.cache.stats", content, _VERSION)
        return
    _print_numbers(numbers, sum(program["entries"] for program in programs))
    _print_reasons(reasons)
    _print_programs(programs)
    _print_days(history)


def _programs(rows: Iterable[EntryRow], missed: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the sums by the name of a program, the most seconds saved first."""
    groups: dict[str, list[EntryRow]] = {name: [] for name in missed}
    for row in rows:
        if row.kind not in NO_PROGRAMS:
            groups.setdefault(row.name, []).append(row)
    sums = [
        {
            "name": name,
            "entries": len(members),
            "stored_bytes": sum(row.stored_bytes for row in members),
            "hits": sum(row.hits for row in members),
            "recent_misses": missed.get(name, 0),
            "compile_seconds": sum(row.compile_seconds for row in members),
            "saved_seconds": sum(row.saved_seconds for row in members),
        }
        for name, members in groups.items()
    ]
    return sorted(sums, key=lambda p: (-p["saved_seconds"], -p["stored_bytes"], p["name"]))


def _days(events: Mapping[str, Mapping[str, float]], count: int) -> list[dict[str, Any]]:
    """Return what happened on each of the last days on which something did, the oldest first."""
    first = time.strftime("%Y-%m-%d", time.gmtime(time.time() - (count - 1) * 86400))
    return [
        {
            "day": day,
            "hits": int(happened.get("PersistentCacheHit", 0)),
            "misses": int(happened.get("PersistentCacheMiss", 0)),
            "puts": int(happened.get("PersistentCachePut", 0)),
            "saved_seconds": happened.get("PersistentCacheSavedSeconds", 0.0),
        }
        for day, happened in events.items()
        if day >= first
    ]


def _print_numbers(numbers: CacheStats, programs: int) -> None:
    requests = numbers.hits + numbers.misses
    share = f" ({numbers.hits / requests:.0%})" if requests else ""
    remote = f", {numbers.remote_hits:,} from the remote cache" if numbers.remote_hits else ""
    ratio = numbers.payload_bytes / max(numbers.stored_bytes, 1)
    packed = f" (compressed {ratio:.1f} times)" if ratio > 1.05 else ""
    limit = "" if numbers.max_bytes is None else f" of {format_size(numbers.max_bytes)}"
    pairs = [
        ("directory", str(numbers.path)),
        (
            "entries",
            f"{numbers.entries:,} ({counted(programs, 'program')}), {numbers.pinned:,} pinned",
        ),
        (
            "size on disk",
            f"{format_size(numbers.stored_bytes)}{limit}{packed}",
        ),
        ("hits", f"{numbers.hits:,}{share}{remote}"),
        ("misses", f"{numbers.misses:,}"),
        # Notes and lists are evicted as well, and not counted where they are stored.
        (
            "stored",
            f"{counted(numbers.puts, 'program')}, "
            f"{counted(numbers.evicted, 'entry', 'entries')} evicted",
        ),
        ("time saved", format_duration(numbers.saved_seconds)),
        ("damaged", f"{numbers.corrupt:,}, {numbers.set_aside:,} kept in quarantine"),
        ("file errors", f"{numbers.errors:,}"),
        ("index journal", numbers.journal_mode),
    ]
    if numbers.refused:
        pairs.append(("not signed", f"{numbers.refused:,}"))
    print_pairs(pairs)


def _print_reasons(reasons: Counter[str]) -> None:
    most = max(reasons.values(), default=0)
    columns: Columns[tuple[str, int]] = (
        (Column("reasons"), lambda reason: reason[0]),
        (Column("misses", right=True), lambda reason: f"{reason[1]:,}"),
        (Column("share", rank=1), lambda reason: bar(reason[1], most, _BAR_WIDTH)),
    )
    _print_table(f"The last {reasons.total():,} compilations", columns, reasons.most_common())


def _print_programs(programs: Sequence[_Figures]) -> None:
    most = max((program["saved_seconds"] for program in programs), default=0)
    columns: Columns[_Figures] = (
        (Column("program"), lambda program: short_name(program["name"])),
        (Column("entries", right=True, rank=2), lambda program: f"{program['entries']:,}"),
        (Column("on disk", right=True, rank=3), lambda p: format_size(p["stored_bytes"])),
        (Column("hits", right=True), lambda program: f"{program['hits']:,}"),
        (Column("recent misses", right=True, rank=4), lambda p: f"{p['recent_misses']:,}"),
        (Column("saved", right=True), lambda program: format_duration(program["saved_seconds"])),
        (Column("share", rank=1), lambda p: bar(p["saved_seconds"], most, _BAR_WIDTH)),
    )
    hidden = len(programs) - _MOST_PROGRAMS
    title = "By program" + (f" (and {hidden:,} more, in --json)" if hidden > 0 else "")
    _print_table(title, columns, programs[:_MOST_PROGRAMS])


def _print_days(days: Sequence[_Figures]) -> None:
    most = max((day["hits"] + day["misses"] for day in days), default=0)
    columns: Columns[_Figures] = (
        (Column("day"), lambda day: day["day"]),
        (Column("hits", right=True), lambda day: f"{day['hits']:,}"),
        (Column("misses", right=True), lambda day: f"{day['misses']:,}"),
        (Column("saved", right=True, rank=2), lambda day: format_duration(day["saved_seconds"])),
        (
            Column("hits, then misses as dots", rank=1),
            lambda day: (
                bar(day["hits"], most, 2 * _BAR_WIDTH)
                + "." * len(bar(day["misses"], most, 2 * _BAR_WIDTH))
            ),
        ),
    )
    _print_table("By day", columns, days)


def _print_table(title: str, columns: Columns[_Item], items: Sequence[_Item]) -> None:
    if items:
        output.console.print()
        output.console.print(title)
        output.console.print(FittedTable.of(items, columns))
