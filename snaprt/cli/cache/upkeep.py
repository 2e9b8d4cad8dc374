"""``snaprt cache verify``, ``gc``, ``pin``, ``unpin`` and ``clear``: keep the cache in order."""

from __future__ import annotations

from typing import Final

import click
from snaprt_cache import Cache, EntryRow, Finding

from snaprt.cli import output, progress
from snaprt.cli.cache.words import (
    SHORT_KEY,
    Size,
    cache_command,
    one_entry,
    short_name,
)
from snaprt.cli.fitted_table import Column, Columns, FittedTable
from snaprt.errors import UsageError
from snaprt.units import counted, format_duration, format_size


@cache_command("verify")
@click.option(
    "--heal",
    is_flag=True,
    help="Quarantine damaged entries, so that they are recompiled, and repair the index.",
)
@click.pass_context
def verify(context: click.Context, cache: Cache, heal: bool, as_json: bool) -> None:
    """Check every entry against its digests, and the index against the entries.

    The exit status is 1 if there was a problem, repaired or not.

    \b
    Example:
      snaprt cache verify --heal
    """
    findings = []
    with progress.showing("checking entries") as line:
        for finding in cache.verify(heal=heal):
            findings.append(finding)
            line.done(len(findings))
    wrong = [finding for finding in findings if finding.problem]
    if as_json:
        content = {"path": cache.path, "checked": len(findings), "problems": wrong}
        output.emit_json("snaprt.cache.verify", content)
    else:
        if wrong:
            output.console.print(FittedTable.of(wrong, _FINDING_COLUMNS))
        entries = sum(finding.subject == "entry" for finding in findings)
        problems = counted(len(wrong), "problem") if wrong else "no problems"
        output.log.print(f"{counted(entries, 'entry', 'entries')} checked, {problems}.")
        if not heal and any(not finding.healed for finding in wrong):
            output.log.print("`snaprt cache verify --heal` quarantines damaged entries.")
    if wrong:
        context.exit(output.EXIT_MISMATCH)


_FINDING_COLUMNS: Final[Columns[Finding]] = (
    (Column("which"), lambda finding: finding.key[:SHORT_KEY] or finding.path.name),
    (Column("what", rank=2), lambda finding: finding.subject),
    (Column("state", rank=1), lambda finding: "healed" if finding.healed else "not repaired"),
    (Column("problem"), lambda finding: finding.problem),
)


@cache_command("gc")
@click.option(
    "--max-size",
    type=Size(),
    help="Size to shrink the cache to, such as 2GiB.  [default: SNAPRT_CACHE_MAX_SIZE]",
)
@click.pass_context
def gc(context: click.Context, cache: Cache, max_size: int | None, as_json: bool) -> None:
    """Remove the least valuable entries until the cache fits a size; keep pinned entries.

    The value of an entry is the time it saved per byte, and decays while it is not used.

    \b
    Example:
      snaprt cache gc --max-size 2GiB
    """
    if max_size is None and cache.max_bytes is None:
        raise click.UsageError("SNAPRT_CACHE_MAX_SIZE sets no limit: give --max-size", context)
    with progress.showing("removing entries"):
        entries = cache.gc(max_size)
    freed = sum(row.stored_bytes for row in entries)
    if as_json:
        content = {"path": cache.path, "removed": entries, "freed_bytes": freed}
        output.emit_json("snaprt.cache.gc", content)
        return
    if entries:
        output.console.print(FittedTable.of(entries, _GONE_COLUMNS))
    removed = counted(len(entries), "entry", "entries")
    output.log.print(f"Removed {removed} and freed {format_size(freed)}.")


_GONE_COLUMNS: Final[Columns[EntryRow]] = (
    (Column("removed"), lambda row: row.key[:SHORT_KEY]),
    (Column("name"), lambda row: short_name(row.name)),
    (Column("on disk", right=True), lambda row: format_size(row.stored_bytes)),
    (Column("hits", right=True, rank=2), lambda row: f"{row.hits:,}"),
    (Column("saved", right=True, rank=1), lambda row: format_duration(row.saved_seconds)),
)


@cache_command("pin")
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
def pin(keys: tuple[str, ...], cache: Cache, as_json: bool) -> None:
    """Never evict these entries. KEY is a key or the start of one.

    \b
    Example:
      snaprt cache pin 3f9a 71c0
    """
    _set_pinned(cache, keys, True, as_json)


@cache_command("unpin")
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
def unpin(keys: tuple[str, ...], cache: Cache, as_json: bool) -> None:
    """Allow these entries to be evicted again. KEY is a key or the start of one.

    \b
    Example:
      snaprt cache unpin 3f9a
    """
    _set_pinned(cache, keys, False, as_json)


def _set_pinned(cache: Cache, keys: tuple[str, ...], pinned: bool, as_json: bool) -> None:
    rows = [one_entry(cache, key) for key in keys]  # all, before any is changed
    for row in rows:
        cache.pin(row.key, pinned=pinned)
    if as_json:
        content = {"path": cache.path, "pinned": pinned, "keys": [row.key for row in rows]}
        output.emit_json(f"snaprt.cache.{'pin' if pinned else 'unpin'}", content)
        return
    for row in rows:
        state = "is never evicted" if pinned else "may be evicted again"
        output.log.print(f"{row.key[:SHORT_KEY]} {row.name} {state}.")


@cache_command("clear")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def clear(cache: Cache, yes: bool, as_json: bool) -> None:
    """Remove every entry and all statistics; keep other files in the directory.

    \b
    Example:
      snaprt cache clear --yes
    """
    count = len(cache.entries())
    if not yes and count:
        question = f"Remove {counted(count, 'entry', 'entries')} from {cache.path}?"
        if not click.confirm(question, err=True):
            raise UsageError("nothing was removed", hint="Answer y, or pass --yes.")
    with progress.showing("removing entries"):
        removed = cache.clear()
    if as_json:
        content = {"path": cache.path, "removed": removed}
        output.emit_json("snaprt.cache.clear", content)
    else:
        output.log.print(f"Removed {removed} entries from {cache.path}.")
