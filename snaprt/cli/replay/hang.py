"""``snaprt report`` of a folder in which the watchdog wrote: who waits for whom."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from snaprt import shown
from snaprt.cli import output
from snaprt.cli.fitted_table import Column, FittedTable
from snaprt.fleet.hang import Conclusion, conclude
from snaprt.fleet.hang_files import read_dumps
from snaprt.snapshot.recorder.states import read_states
from snaprt.units import format_duration

SCHEMA: Final = "snaprt.hang-report"
VERSION: Final = 1

_COLUMNS: Final = (
    Column("rank", right=True),
    Column("state"),
    Column("step", right=True, rank=3),
    Column("program", rank=1),
    Column("execution", right=True, rank=2),
    Column("for", right=True),
    Column("where"),
    Column("host", rank=4),
)


def report(folder: Path, *, as_json: bool) -> None:
    """Print who waits for whom.

    Raises:
        UsageError: A file in the folder cannot be read.
    """
    dumps = read_dumps(folder)
    conclusion = conclude(dumps, read_states(folder.parent))
    if as_json:
        output.emit_json(SCHEMA, VERSION, {"folder": folder, **vars(conclusion)})
        return
    _show(conclusion, folder)
    for cause in sorted({dump.cause for dump in dumps if dump.state in ("stuck", "died")}):
        output.console.print(shown.lines(cause))


def _show(conclusion: Conclusion, folder: Path) -> None:
    print_plain(conclusion.headline)
    if conclusion.advice:
        print_plain(conclusion.advice)
    output.console.print()
    counts_steps = any(row.step >= 0 for row in conclusion.rows)
    rows = [
        [
            str(row.rank),
            row.state,
            str(row.step) if counts_steps else "-",
            shown.lines(row.program) or "-",
            str(row.execution) if row.program else "-",
            format_duration(max(0.0, row.seconds)),
            shown.lines(row.where) or "-",
            shown.lines(row.host),
        ]
        for row in conclusion.rows
    ]
    output.console.print(FittedTable(_COLUMNS, rows))
    output.console.print()
    for missing in conclusion.missing:
        seen = missing.last_seen or "it left no state either"
        print_plain(f"rank {missing.rank} wrote nothing: {seen}")
    for note in sorted({row.note for row in conclusion.rows if row.note}):
        print_plain(note)
    print_plain(f"the stacks of all threads are in {folder}/rank-*.json")


def print_plain(text: str) -> None:
    """Print text from a file on one line, without markup."""
    output.console.print(shown.lines(text), markup=False, highlight=False, soft_wrap=True)
