"""The forms of a report: a terminal's, JSON, and those that options write into files.

A form in a file is a row in `FORMATS` and a function.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from rich.table import Table
from rich.text import Text
from snaprt_replay.compare.results import Comparison
from snaprt_replay.report import model, shown, text
from snaprt_replay.report.junit import junit_xml
from snaprt_replay.report.model import FAILED, Headline, Report, Status
from snaprt_replay.report.page import page

from snaprt.cli import output, tables
from snaprt.units import format_duration
from snaprt.whole_files import write_whole

_AnyFunction = TypeVar("_AnyFunction", bound=Callable[..., Any])


def _html(reports: Sequence[Report]) -> bytes:
    return page(reports).encode()


def _junit(reports: Sequence[Report]) -> bytes:
    return junit_xml(reports, datetime.datetime.now(datetime.UTC))


def _markdown(reports: Sequence[Report]) -> bytes:
    return text.markdown(reports).encode()


#: Option, without its dashes -> what makes the file's content, and what the file is.
FORMATS: Final[Mapping[str, tuple[Callable[[Sequence[Report]], bytes], str]]] = {
    "html": (_html, "Write a self-contained HTML page."),
    "junit": (_junit, "Write JUnit XML, for CI."),
    "markdown": (_markdown, "Write Markdown, for a comment or a CI summary."),
}

_ASKED_FOR: Final = "snaprt.cli.replay.formats"

_STATUSES: Final[dict[Status, int]] = {
    "ok": output.EXIT_OK,
    "caution": output.EXIT_OK,
    "bad": output.EXIT_MISMATCH,
    "failed": output.EXIT_FAILURE,
}
_STYLES: Final[dict[Status, str]] = {
    "ok": "green",
    "caution": "yellow",
    "bad": "bold red",
    "failed": "bold magenta",
}


def format_options(function: _AnyFunction) -> _AnyFunction:
    """Give a command an option for each of `FORMATS`; `write_files` writes what was asked for."""

    def remember(context: click.Context, parameter: click.Parameter, path: Path | None) -> None:
        if path is not None:
            context.meta.setdefault(_ASKED_FOR, {})[parameter.name] = path

    for name, (_, what) in reversed(list(FORMATS.items())):
        function = click.option(
            f"--{name}",
            type=click.Path(path_type=Path),
            metavar="OUT",
            callback=remember,
            expose_value=False,
            help=what,
        )(function)
    return function


def asked_for() -> Mapping[str, Path]:
    """Return the files that the options of the running command ask for, by format."""
    asked: Mapping[str, Path] = click.get_current_context().meta.get(_ASKED_FOR, {})
    return asked


def write_files(reports: Sequence[Report]) -> None:
    """Write reports into the files that the options of the running command ask for.

    Raises:
        UsageError: A file cannot be written.
    """
    for name, path in asked_for().items():
        write(path, FORMATS[name][0](reports))


def write(path: Path, content: bytes) -> None:
    """Write a file whole, and say so on stderr.

    Raises:
        UsageError: It cannot be written.
    """
    with output.writing(f"write {path}"):
        write_whole(path, content)
    output.log.print(f"wrote {tables.printable(str(path))}")


def _to_json(reports: Sequence[Report]) -> dict[str, Any]:
    return {
        "status": status_of(reports),
        "reports": [model.to_json(report) for report in reports],
    }


def print_json(reports: Sequence[Report]) -> None:
    """Print what ``--json`` asks for."""
    output.emit_json(model.SCHEMA, model.SCHEMA_VERSION, _to_json(reports))


def save(reports: Sequence[Report], path: Path) -> None:
    """Save reports for `snaprt report` to read again; raise UsageError if that fails."""
    envelope = {"schema": model.SCHEMA, "version": model.SCHEMA_VERSION, **_to_json(reports)}
    write(path, json.dumps(envelope, indent=1, allow_nan=False).encode())


def status_of(reports: Sequence[Report]) -> int:
    """Return the exit status that reports stand for."""
    return max((_STATUSES[report.headline.status] for report in reports), default=output.EXIT_OK)


def word(headline: Headline) -> Text:
    """Return the word of a verdict in its color."""
    return Text(headline.word, style=_STYLES[headline.status])


def verdict(headline: Headline) -> Text:
    """Return the last line of a report."""
    return Text.assemble(word(headline), f": {shown.sentence(headline.sentence)}")


def show(report: Report) -> None:
    """Print a report with its tables, the verdict in its color; or the error that it is."""
    if report.headline.word == FAILED:
        output.error(tables.printable(report.headline.sentence), tables.printable(report.hint))
        return
    console = output.console
    *blocks, _ = text.blocks(report)
    for block in blocks:
        if isinstance(block, Comparison):
            console.print(tables.comparison_table(block))
            for number, line in enumerate(tables.tolerance_lines(block)):
                console.print(f"{'' if number else chr(10)}tolerance: {line}")
        elif isinstance(block, tuple):
            console.print(tables.statistics_table(block))
        else:
            console.print(block)
    console.print(verdict(report.headline))


def show_sum(reports: Sequence[Report]) -> None:
    """Print one row for each report, and how many there are of each verdict."""
    table = Table(box=None, pad_edge=False)
    for head in ("verdict", "file", "worst output"):
        table.add_column(head, overflow="fold")
    table.add_column("time", justify="right")
    for report in reports:
        table.add_row(
            word(report.headline),
            Text(shown.name(report.path, 400)),
            Text(text.worst_words(report)),
            format_duration(sum(report.seconds)),
        )
    output.console.print(table)
    output.console.print()
    words = [report.headline.word for report in reports]
    counts = [f"{words.count(word)} {word}" for word in sorted(set(words))]
    output.console.print(f"{len(reports)} files: {', '.join(counts)}")
