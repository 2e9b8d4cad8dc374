"""``snaprt cache``: looks at the compile cache, or clears it; knows snaprt_cache and no graphs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
from rich.filesize import decimal
from rich.table import Table
from snaprt_cache import Cache, CacheError, EntryRow

from snaprt.cli import output
from snaprt.cli.fitted_table import Column, FittedTable

SCHEMA_VERSION: Final = 1
#: So many digits of a key are unique in any cache that fits a disk, and fit a terminal.
SHORT_KEY: Final = 12

_dir_option = click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The cache directory; by default SNAPRT_CACHE_DIR, else the user's.",
)


@click.group("cache")
def command() -> None:
    """Look at the compile cache, or clear it.

    \b
    Example:
      snaprt cache stats
      snaprt cache show 3f9a
    """


@command.command("stats")
@_dir_option
@output.json_option
def stats(folder: Path | None, as_json: bool) -> None:
    """Print the cache in numbers: entries, bytes, hits, misses, seconds saved.

    \b
    Example:
      snaprt cache stats --json
    """
    numbers = Cache.open(folder).stats()
    if as_json:
        output.emit_json("snaprt.cache.stats", SCHEMA_VERSION, dataclasses.asdict(numbers))
        return
    asked = numbers.hits + numbers.misses
    share = f" ({numbers.hits / asked:.0%})" if asked else ""
    ratio = numbers.payload_bytes / numbers.stored_bytes if numbers.stored_bytes else 1.0
    _print_pairs(
        [
            ("directory", str(numbers.path)),
            ("entries", f"{numbers.entries:,}"),
            ("size on disk", f"{decimal(numbers.stored_bytes)} (compressed {ratio:.1f} times)"),
            ("hits", f"{numbers.hits:,}{share}"),
            ("misses", f"{numbers.misses:,}"),
            ("stored", f"{numbers.puts:,}"),
            ("time saved", _seconds(numbers.saved_seconds)),
            ("damaged", f"{numbers.corrupt:,}, {numbers.set_aside} kept in quarantine"),
            ("file errors", f"{numbers.errors:,}"),
            ("index journal", numbers.journal_mode),
        ]
    )


@command.command("ls")
@_dir_option
@click.option(
    "--sort",
    type=click.Choice(["newest", "used", "hits", "size", "saved", "name"]),
    default="newest",
    show_default=True,
    help="The order of the entries.",
)
@output.json_option
def ls(folder: Path | None, sort: str, as_json: bool) -> None:
    """List the entries.

    \b
    Example:
      snaprt cache ls --sort saved
    """
    rows = sorted(Cache.open(folder).entries(), key=_ORDERS[sort])
    if as_json:
        output.emit_json("snaprt.cache.ls", SCHEMA_VERSION, {"entries": rows})
        return
    cells = [
        (
            row.key[:SHORT_KEY],
            row.name,
            row.platform,
            decimal(row.stored_bytes),
            _seconds(row.compile_seconds),
            f"{row.hits:,}",
            _seconds(row.saved_seconds),
            _moment(row.last_used or row.created),
        )
        for row in rows
    ]
    output.console.print(FittedTable(_LIST_COLUMNS, cells))
    output.log.print(f"{len(rows)} {'entry' if len(rows) == 1 else 'entries'}")


_LIST_COLUMNS: Final = (
    Column("key"),
    Column("name"),
    Column("platform", rank=2),
    Column("on disk", right=True),
    Column("compile", right=True, rank=1),
    Column("hits", right=True),
    Column("saved", right=True),
    Column("last used", rank=3),
)
_ORDERS: Final[dict[str, Callable[[EntryRow], Any]]] = {
    "newest": lambda row: -row.created,
    "used": lambda row: -(row.last_used or row.created),
    "hits": lambda row: -row.hits,
    "size": lambda row: -row.stored_bytes,
    "saved": lambda row: -row.saved_seconds,
    "name": lambda row: (row.name, -row.created),
}


@command.command("show")
@click.argument("key")
@_dir_option
@output.json_option
def show(key: str, folder: Path | None, as_json: bool) -> None:
    """Print what is known about the entry KEY, and the parts of its key.

    KEY is the key as `snaprt cache ls` prints it, or the start of it.

    \b
    Example:
      snaprt cache show 3f9a
    """
    cache = Cache.open(folder)
    row = _one_entry(cache, key)
    header = cache.header(row.key)
    if header is None:
        raise CacheError(
            f"the entry {row.key[:SHORT_KEY]} is damaged, or was removed just now",
            hint="It is compiled and stored again when a program next needs it.",
        )
    parts = [{"name": part.name, "value": part.value} for part in header.key.parts]
    path = cache.blob_path(row.key)
    if as_json:
        content = {
            "entry": row,
            "key_parts": parts,
            "metadata": dict(header.metadata),
            "path": path,
        }
        output.emit_json("snaprt.cache.show", SCHEMA_VERSION, content)
        return
    ratio = header.payload_bytes / max(header.stored_bytes, 1)
    _print_pairs(
        [
            ("key", row.key),
            *((name, str(value)) for name, value in header.metadata.items()),
            ("size", f"{decimal(row.payload_bytes)}, compressed {ratio:.1f} times"),
            ("created", _moment(row.created)),
            ("last used", _moment(row.last_used) if row.last_used else "never"),
            ("hits", f"{row.hits:,}, which saved {_seconds(row.saved_seconds)}"),
            ("file", str(path)),
        ]
    )
    output.console.print("\nThe key is made of:")
    _print_pairs([(f"  {part['name']}", part["value"]) for part in parts])


@command.command("clear")
@_dir_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@output.json_option
def clear(folder: Path | None, yes: bool, as_json: bool) -> None:
    """Remove every entry and the usage figures; other files in the directory stay.

    \b
    Example:
      snaprt cache clear --yes
    """
    cache = Cache.open(folder)
    count = len(cache.entries())
    if not yes and count:
        click.confirm(f"Remove {count} entries from {cache.path}?", abort=True, err=True)
    removed = cache.clear()
    if as_json:
        content = {"path": cache.path, "removed": removed}
        output.emit_json("snaprt.cache.clear", SCHEMA_VERSION, content)
    else:
        output.log.print(f"Removed {removed} entries from {cache.path}.")


@command.command("path")
@_dir_option
@output.json_option
def path(folder: Path | None, as_json: bool) -> None:
    """Print the cache directory in use.

    \b
    Example:
      du -sh "$(snaprt cache path)"
    """
    cache = Cache.open(folder)
    if as_json:
        content = {"path": cache.path, "index": cache.index_path}
        output.emit_json("snaprt.cache.path", SCHEMA_VERSION, content)
    else:
        click.echo(cache.path)


def _one_entry(cache: Cache, prefix: str) -> EntryRow:
    found = cache.find(prefix)
    if not found:
        raise CacheError(
            f"no entry in {cache.path} has a key that starts with {prefix!r}",
            hint="`snaprt cache ls` lists the entries.",
        )
    if len(found) > 1:
        listed = ", ".join(row.key[:SHORT_KEY] for row in found[:4])
        raise CacheError(
            f"{len(found)} entries have a key that starts with {prefix!r}: {listed}"
            f"{', ...' if len(found) > 4 else ''}",
            hint="Give more digits of the key.",
        )
    return found[0]


def _print_pairs(pairs: list[tuple[str, str]]) -> None:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(name, value)
    output.console.print(table)


def _seconds(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 60:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.2f} s"


def _moment(unix_seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_seconds))
