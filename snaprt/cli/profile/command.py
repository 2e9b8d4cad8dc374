"""``snaprt profile``: prints the top of a profile, without TensorBoard."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import click
from rich.text import Text

from snaprt import shown
from snaprt.cli import output, progress
from snaprt.cli.fitted_table import Column, Columns, FittedTable
from snaprt.errors import UsageError
from snaprt.units import format_duration

if TYPE_CHECKING:
    from snaprt.cli.profile.summary import Gap, OperationTime, ProgramTime, SpanTime, Summary

_MOST_TEXT: Final = 44  # of what a thread of the host did
_NOTHING: Final = "-"


@click.command("profile")
@click.argument("place", metavar="DIR|FILE", type=output.PATH)
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=10,
    metavar="N",
    show_default=True,
    help="Rows of each table.",
)
@click.option(
    "--host", metavar="NAME", help="Show this process of several.  [default: the first one]"
)
@output.json_option
def command(place: Path, top: int, host: str | None, as_json: bool) -> None:
    """Print the top of a profile: programs, operations, gaps on the devices, snaprt itself.

    DIR is the directory given to `snaprt run --profile` or `jax.profiler.trace`; its latest profile
    is read. TensorBoard and XProf are not needed; both open the same directory, and ui.perfetto.dev
    opens its .trace.json.gz files (docs/how-to/profile.md).

    A gap is a period between two operations in which no device was busy. For a job with several
    processes, one is shown; --json includes all.

    \b
    Example:
      snaprt run --profile profile --profile-steps 10-14 -- train.py
      snaprt profile profile
      snaprt profile profile --top 3 --json
    """
    from snaprt.cli.profile.read import find_files, read_profile
    from snaprt.cli.profile.summary import summarize

    files = find_files(place)
    if as_json:
        with progress.showing("reading"):
            summaries = [summarize(read_profile(file)) for file in files]
        output.emit_json(
            "snaprt.profile", {"hosts": [_cut_off(summary, top) for summary in summaries]}
        )
        return
    names = {file.name.partition(".xplane")[0]: file for file in files}
    if host is not None and host not in names:
        raise UsageError(
            f"no process {host} in the profile", hint=f"Name one of: {', '.join(names)}."
        )
    file = names[host] if host is not None else files[0]
    with progress.showing("reading"):
        summary = summarize(read_profile(file))
    _show(summary, top)
    others = [name for name, other in names.items() if other != file]
    if others:
        output.console.print()
        output.console.print(f"other processes, for --host: {', '.join(map(shown.lines, others))}")


def _cut_off(summary: Summary, top: int) -> Summary:
    return dataclasses.replace(
        summary,
        programs=summary.programs[:top],
        operations=summary.operations[:top],
        gaps=summary.gaps[:top],
    )


def _show(summary: Summary, top: int) -> None:
    output.console.print(Text(shown.lines(summary.file), style="bold"))
    output.console.print(_overview(summary))
    for step in summary.steps:
        output.console.print(
            f"{step.steps} steps {shown.lines(step.name)}: {format_duration(step.mean)} on "
            f"average, {format_duration(step.shortest)} to {format_duration(step.longest)}"
        )
    if not summary.operations:
        output.console.print("no operations ran while the profile was taken")
    _table("programs", summary.programs, _PROGRAMS, top)
    _table("operations", summary.operations, _OPERATIONS, top)
    _table("gaps", summary.gaps, _GAPS, top)
    _table("snaprt's spans", summary.snaprt, _SPANS, top)


def _overview(summary: Summary) -> str:
    devices = ", ".join(
        f"{device} {format_duration(seconds)}" for device, seconds in summary.devices.items()
    )
    return (
        f"{format_duration(summary.seconds)} profiled; operations ran for "
        f"{format_duration(summary.busy)}{f' ({devices})' if len(summary.devices) > 1 else ''}; "
        f"gaps of {format_duration(summary.idle)}"
    )


_Row = TypeVar("_Row")


def _table(title: str, rows: Sequence[_Row], columns: Columns[_Row], top: int) -> None:
    if not rows:
        return
    output.console.print()
    more = f" (the first {top} of {len(rows)})" if len(rows) > top else ""
    output.console.print(Text.assemble((title, "bold cyan"), more))
    output.console.print(FittedTable.of(rows[:top], columns))


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _source(operation: OperationTime) -> str:
    """Return the source line, with the file as seen from here if it lies below."""
    source = operation.source
    if source is None:
        return _NOTHING
    return shown.lines(source.removeprefix(f"{os.getcwd()}{os.sep}"))


def _shortened(text: str | None) -> str:
    if text is None:
        return "(no event: Python, or waiting)"
    return shown.cut(shown.lines(text), _MOST_TEXT)


_PROGRAMS: Final[Columns[ProgramTime]] = (
    (Column("time", right=True), lambda row: format_duration(row.seconds)),
    (Column("share", right=True), lambda row: _percent(row.share)),
    (Column("runs", right=True), lambda row: str(row.executions)),
    (
        Column("mean", right=True, rank=2),
        lambda row: format_duration(row.seconds / row.executions),
    ),
    (Column("graph", rank=1), lambda row: row.graph_id or _NOTHING),
    (Column("module"), lambda row: shown.lines(row.module)),
)
_OPERATIONS: Final[Columns[OperationTime]] = (
    (Column("time", right=True), lambda row: format_duration(row.seconds)),
    (Column("share", right=True), lambda row: _percent(row.share)),
    (Column("times", right=True, rank=1), lambda row: str(row.times)),
    (Column("operation"), lambda row: shown.lines(row.operation)),
    (Column("opcode", rank=4), lambda row: row.opcode or _NOTHING),
    (Column("graph", rank=3), lambda row: row.graph_id or _NOTHING),
    (Column("module", rank=5), lambda row: shown.lines(row.module)),
    (Column("source", rank=2), _source),
)
_GAPS: Final[Columns[Gap]] = (
    (Column("time", right=True), lambda row: format_duration(row.seconds)),
    (Column("at", right=True), lambda row: format_duration(row.start)),
    (Column("the host did"), lambda row: _shortened(row.host)),
    (Column("share", right=True), lambda row: _percent(row.share)),
)
_SPANS: Final[Columns[SpanTime]] = (
    (Column("time", right=True), lambda row: format_duration(row.seconds)),
    (Column("times", right=True), lambda row: str(row.times)),
    (Column("span"), lambda row: row.span),
)
