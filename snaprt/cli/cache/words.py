"""What the commands of ``snaprt cache`` share: --dir, --json, an entry by its key, words, bars."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import click
from rich.table import Table
from snaprt_cache import Cache, CacheError, EntryRow
from snaprt_cache.frame import BlobHeader

from snaprt import shown, units
from snaprt.cli import output
from snaprt.compile.cached.store import open_cache
from snaprt.errors import UsageError

#: So many digits of a key are unique in any cache that fits a disk, and fit a terminal.
SHORT_KEY: Final = 12

#: Kinds of entries that hold no program, but what is known about some.
NO_PROGRAMS: Final = frozenset({"note", "list"})

dir_option = click.option(
    "--dir",
    "folder",
    type=output.PATH,
    metavar="DIR",
    help="Cache directory.  [default: SNAPRT_CACHE_DIR, else the user's]",
)


_NEEDS_CACHE: Final = ("verify", "gc", "clear", "export")  # the others find it empty


def cache_command(name: str) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command with --dir and --json of a function, which gets the cache and ``as_json``."""

    def decorate(function: Callable[..., None]) -> click.Command:
        @functools.wraps(function)
        def run(folder: Path | None, **options: Any) -> None:
            if folder is not None and name in _NEEDS_CACHE and not folder.exists():
                hint = "check the spelling; a program makes the directory when it first compiles"
                raise UsageError(f"there is no cache directory {folder}", hint=hint)
            function(cache=open_cache(folder), **options)

        return click.command(name)(dir_option(output.json_option(run)))

    return decorate


_LONGEST_NAME: Final = 29
_DATES: Final = ("%Y-%m-%d", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M:%S")


class DateOrAge(click.ParamType):
    """A date, or how long ago: ``2026-01-31``, ``3d``, ``12h``. Converts to Unix time."""

    name = "when"

    def convert(
        self, value: str | float, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return Unix time in seconds."""
        if not isinstance(value, str):
            return float(value)
        with contextlib.suppress(ValueError):
            return time.time() - units.parse_duration(value)
        for form in _DATES:
            try:
                return time.mktime(time.strptime(value.strip(), form))
            except ValueError:
                continue
        return self.fail(
            f"{value!r} is neither a date (2026-01-31) nor an age (30min, 12h, 3d, 2w)"
        )


class Size(click.ParamType):
    """A number of bytes: ``500MB``, ``2GiB``, ``1000``."""

    name = "size"

    def convert(
        self, value: str | int, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Return the number of bytes."""
        if not isinstance(value, str):
            return int(value)
        try:
            return units.parse_size(value)
        except ValueError:
            self.fail(f"{value!r} is not a size, such as 500MB, 2GiB or 1000")


def one_entry(cache: Cache, prefix: str) -> EntryRow:
    """Return the entry whose key starts with ``prefix``.

    Raises:
        CacheError: There is none, or there are several.
    """
    rows = cache.find(prefix)
    if not rows:
        raise CacheError(
            f"no entry in {cache.path} has a key that starts with {prefix!r}",
            hint="`snaprt cache ls` lists the entries.",
        )
    if len(rows) > 1:
        listed = units.first_names((row.key[:SHORT_KEY] for row in rows), 4)
        raise CacheError(
            f"{len(rows)} entries have a key that starts with {prefix!r}: {listed}",
            hint="Give more digits of the key.",
        )
    return rows[0]


def header_of(cache: Cache, digest: str) -> BlobHeader:
    """Return what is known of an entry.

    Raises:
        CacheError: It cannot be read.
    """
    header = cache.header(digest)
    if header is None:
        raise CacheError(
            f"the entry {digest[:SHORT_KEY]} is damaged, or was just removed",
            hint="The next program that needs it compiles and stores it again.",
        )
    return header


def print_pairs(pairs: Sequence[tuple[str, str]]) -> None:
    """Print names with what belongs to them, in two columns that fit the terminal."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(name, value)
    output.console.print(table)


def bar(value: float, largest: float, width: int = 20) -> str:
    """Return a bar of at most ``width`` signs that shows ``value`` against the largest one."""
    if value <= 0 or largest <= 0:
        return ""
    sign = "█" if output.console.encoding.lower().startswith("utf") else "#"
    return sign * max(1, round(width * value / largest))


def short_name(name: str) -> str:
    """Return a program's name for a table: a long one without its middle."""
    return shown.name(name, _LONGEST_NAME) or "(no name)"


def moment_in_words(unix_seconds: float) -> str:
    """Return a time for people, in their time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_seconds))
