"""``snaprt cache ls``, ``show``, ``du`` and ``path``: what is in the cache, and where."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
from snaprt_cache import Cache, EntryRow

from snaprt.cli import output
from snaprt.cli.cache.words import (
    NO_PROGRAMS,
    SHORT_KEY,
    DateOrAge,
    bar,
    cache_command,
    header_of,
    moment_in_words,
    one_entry,
    print_pairs,
    short_name,
)
from snaprt.cli.fitted_table import Column, Columns, FittedTable
from snaprt.units import format_duration, format_size

#: Metadata that no person reads as it stands: `snaprt cache why` does.
_NOT_SHOWN: Final = frozenset({"summary"})

_ORDERS: Final[dict[str, Callable[[EntryRow], Any]]] = {
    "newest": lambda row: -row.created,
    "used": lambda row: -(row.last_used or row.created),
    "hits": lambda row: -row.hits,
    "size": lambda row: -row.stored_bytes,
    "compile": lambda row: -row.compile_seconds,
    "saved": lambda row: -row.saved_seconds,
    "name": lambda row: (row.name, -row.created),
}
_LIST_COLUMNS: Final[Columns[EntryRow]] = (
    (Column("key"), lambda row: row.key[:SHORT_KEY]),
    (Column("name"), lambda row: short_name(row.name)),
    (Column("platform", rank=2), lambda row: row.platform),
    (Column("on disk", right=True), lambda row: format_size(row.stored_bytes)),
    (Column("compile", right=True, rank=1), lambda row: format_duration(row.compile_seconds)),
    (Column("hits", right=True), lambda row: f"{row.hits:,}"),
    (Column("saved", right=True), lambda row: format_duration(row.saved_seconds)),
    (Column("last used", rank=3), lambda row: moment_in_words(row.last_used or row.created)),
    (Column("pinned", rank=1), lambda row: "pinned" if row.pinned else ""),  # last: see `ls`
)


@cache_command("ls")
@click.option(
    "--sort",
    type=click.Choice(list(_ORDERS)),
    default="newest",
    show_default=True,
    help="Sort order.",
)
@click.option("--reverse", is_flag=True, help="Reverse the order.")
@click.option(
    "--name", metavar="TEXT", help="Only names that contain TEXT; * and ? match any characters."
)
@click.option("--platform", metavar="TEXT", help="Only this platform: cpu, gpu or tpu.")
@click.option("--kind", metavar="TEXT", help="Only this kind: compiled, module, jit, note or list.")
@click.option(
    "--since", type=DateOrAge(), help="Only entries created or used since: 2026-01-31, 3d."
)
@click.option("--limit", type=click.IntRange(min=1), help="Maximum number of entries.")
def ls(
    cache: Cache,
    sort: str,
    reverse: bool,
    name: str | None,
    platform: str | None,
    kind: str | None,
    since: float | None,
    limit: int | None,
    as_json: bool,
) -> None:
    """List the entries that hold programs.

    Other kinds hold facts about programs: `--kind note` holds where their graphs lead, `--kind
    list` what a script preloads when it starts.

    \b
    Example:
      snaprt cache ls --sort saved --limit 10
      snaprt cache ls --name 'train*' --since 3d
    """
    entries = cache.entries()
    matching = [
        row
        for row in entries
        if _matches(row.name, name)
        and (platform is None or row.platform == platform.lower())
        and (row.kind == kind if kind else row.kind not in NO_PROGRAMS)
        and (since is None or max(row.created, row.last_used) >= since)
    ]
    rows = sorted(matching, key=_ORDERS[sort], reverse=reverse)[:limit]
    if as_json:
        content = {"entries": rows, "matching": len(matching), "all": len(entries)}
        output.emit_json("snaprt.cache.ls", content)
        return
    is_pinned = any(row.pinned for row in rows)
    columns = _LIST_COLUMNS if is_pinned else _LIST_COLUMNS[:-1]
    output.console.print(FittedTable.of(rows, columns))
    hidden = sum(row.kind in NO_PROGRAMS for row in entries) if kind is None else 0
    beside = f"; {hidden:,} not shown (--kind note, --kind list)" if hidden else ""
    of_all = f" of {len(entries):,}" if len(rows) < len(entries) else ""
    output.log.print(f"{len(rows):,}{of_all} {'entry' if len(entries) == 1 else 'entries'}{beside}")
    if not cache.path.exists():
        output.log.print(f"The directory {cache.path} does not exist yet.")


def _matches(text: str, pattern: str | None) -> bool:
    if pattern is None:
        return True
    glob = pattern if set(pattern) & set("*?[") else f"*{pattern}*"
    return fnmatch.fnmatchcase(text.lower(), glob.lower())


@cache_command("show")
@click.argument("key")
def show(key: str, cache: Cache, as_json: bool) -> None:
    """Print the details of the entry KEY and the parts of its key.

    KEY is a key as `snaprt cache ls` prints it, or the start of one.

    \b
    Example:
      snaprt cache show 3f9a
    """
    row = one_entry(cache, key)
    header = header_of(cache, row.key)
    parts = [{"name": part.name, "value": part.value} for part in header.key.parts]
    metadata = {name: value for name, value in header.metadata.items() if name not in _NOT_SHOWN}
    path = cache.blob_path(row.key)
    if as_json:
        content = {"entry": row, "key_parts": parts, "metadata": metadata, "path": path}
        output.emit_json("snaprt.cache.show", content)
        return
    ratio = header.payload_bytes / max(header.stored_bytes, 1)
    packed = f", compressed {ratio:.1f} times" if ratio > 1.05 else ""
    print_pairs(
        [
            ("key", row.key),
            *(
                ("compile time", format_duration(row.compile_seconds))
                if name == "compile_seconds"
                else (name, str(value))
                for name, value in metadata.items()
            ),
            ("size", f"{format_size(row.payload_bytes)}{packed}"),
            ("created", moment_in_words(row.created)),
            ("last used", moment_in_words(row.last_used) if row.last_used else "never"),
            ("hits", f"{row.hits:,}, saved {format_duration(row.saved_seconds)}"),
            ("pinned", "yes, never evicted" if row.pinned else "no"),
            ("file", str(path)),
        ]
    )
    output.console.print("\nParts of the key:")
    print_pairs([(f"  {part['name']}", part["value"]) for part in parts])


@cache_command("du")
def du(cache: Cache, as_json: bool) -> None:
    """Print disk usage: entries by platform and kind, the index, the quarantine.

    \b
    Example:
      snaprt cache du
    """
    rows = cache.entries()
    groups: dict[tuple[str, str], list[EntryRow]] = {}
    for row in rows:
        groups.setdefault((row.platform, row.kind), []).append(row)
    places = [
        _Place(
            " ".join(filter(None, ("entries", *group))),
            len(members),
            sum(row.stored_bytes for row in members),
        )
        for group, members in groups.items()
    ]
    places += _beside_the_entries(cache)
    places.sort(key=lambda place: -place.bytes)
    total = sum(place.bytes for place in places)
    if as_json:
        content = {"path": cache.path, "bytes": total, "places": places}
        output.emit_json("snaprt.cache.du", content)
        return
    largest = max((place.bytes for place in places), default=0)
    columns: Columns[_Place] = (
        (Column("what"), lambda place: place.what),
        (Column("files", right=True, rank=2), lambda place: f"{place.files:,}"),
        (Column("bytes", right=True), lambda place: format_size(place.bytes)),
        (Column("share", rank=1), lambda place: bar(place.bytes, largest)),
    )
    output.console.print(FittedTable.of(places, columns))
    output.log.print(f"{format_size(total)} in {cache.path}")


@dataclass(frozen=True)
class _Place:
    """What takes space, how many files and how many bytes that are."""

    what: str
    files: int
    bytes: int


def _beside_the_entries(cache: Cache) -> list[_Place]:
    """Return what the files beside the blobs take, by the first folder or file of their path."""
    sizes_of: dict[str, list[int]] = {}
    for place, _, names in os.walk(cache.folder):
        inside = Path(place).relative_to(cache.folder).parts
        if inside[:1] == ("blobs",):
            continue
        for name in names:
            try:
                size = os.stat(os.path.join(place, name)).st_size
            except OSError:
                continue
            what = inside[0] if inside else "index" if name.startswith("index") else "other files"
            sizes_of.setdefault(what, []).append(size)
    return [_Place(what, len(sizes), sum(sizes)) for what, sizes in sizes_of.items()]


@cache_command("path")
def path(cache: Cache, as_json: bool) -> None:
    """Print the cache directory in use.

    \b
    Example:
      du -sh "$(snaprt cache path)"
    """
    if as_json:
        content = {"path": cache.path, "index": cache.index_path}
        output.emit_json("snaprt.cache.path", content)
    else:
        output.print_line(cache.path)
