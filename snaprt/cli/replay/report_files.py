"""Print reports, and write them into the files that options ask for; it knows no command."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.table import Table
from rich.text import Text
from snaprt_replay.report import model, shown, text
from snaprt_replay.report.junit import junit_xml
from snaprt_replay.report.model import Report, Status
from snaprt_replay.report.page import page

from snaprt.cli import output, tables
from snaprt.whole_files import write_whole

STATUSES: Final[dict[Status, int]] = {
    "ok": output.EXIT_OK,
    "caution": output.EXIT_OK,
    "bad": output.EXIT_MISMATCH,
    "failed": output.EXIT_FAILURE,
}
STYLES: Final[dict[Status, str]] = {
    "ok": "green",
    "caution": "yellow",
    "bad": "bold red",
    "failed": "bold magenta",
}


def status_of(reports: Sequence[Report]) -> int:
    """Return the exit status that reports stand for."""
    return max((STATUSES[report.headline.status] for report in reports), default=output.EXIT_OK)


def to_json(reports: Sequence[Report]) -> dict[str, Any]:
    """Return what ``--json`` prints of reports, beside schema and version."""
    return {"status": status_of(reports), "reports": [model.to_json(one) for one in reports]}


def write_reports(reports: Sequence[Report], html: Path | None, junit: Path | None = None) -> None:
    """Write a page, and JUnit XML, where a path is given.

    Raises:
        UsageError: A file cannot be written.
    """
    if html is not None:
        _write(html, page(reports).encode())
    if junit is not None:
        _write(junit, junit_xml(reports, datetime.datetime.now(datetime.UTC)))


def save(reports: Sequence[Report], path: Path) -> None:
    """Save reports for `snaprt report` to read again.

    Raises:
        UsageError: The file cannot be written.
    """
    envelope = {"schema": model.SCHEMA, "version": model.SCHEMA_VERSION, **to_json(reports)}
    _write(path, json.dumps(envelope, indent=1, allow_nan=False).encode())


def show(report: Report) -> None:
    """Print a report, the verdict in its color."""
    *lines, _ = text.lines(report)
    for line in lines:
        output.console.print(line)
    output.console.print(
        Text.assemble(
            (report.headline.word, STYLES[report.headline.status]),
            f": {shown.sentence(report.headline.sentence)}",
        )
    )


def show_sum(reports: Sequence[Report]) -> None:
    """Print one row for each report, and how many there are of each verdict."""
    table = Table(box=None, pad_edge=False)
    for head in ("verdict", "file", "worst output"):
        table.add_column(head, overflow="fold")
    table.add_column("time", justify="right")
    for report in reports:
        worst = text.worst_words(report)
        table.add_row(
            Text(report.headline.word, style=STYLES[report.headline.status]),
            Text(shown.name(report.path, 400)),
            Text(worst),
            tables.seconds_text(sum(report.seconds)),
        )
    output.console.print(table)
    output.console.print()
    words = [report.headline.word for report in reports]
    counts = [f"{words.count(word)} {word}" for word in sorted(set(words))]
    output.console.print(f"{len(reports)} files: {', '.join(counts)}")


def _write(path: Path, content: bytes) -> None:
    with output.writing(f"write {path}"):
        write_whole(path, content)
    output.log.print(f"wrote {tables.printable(str(path))}")
