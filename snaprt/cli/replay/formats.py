"""The forms of a report: a terminal's, JSON, and those that options write into files.

A form in a file is a row in `FORMATS` and a function.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from rich.text import Text
from snaprt_replay.compare.results import Comparison, OutputComparison
from snaprt_replay.report import model, text
from snaprt_replay.report.model import FAILED, Headline, Report, Status
from snaprt_replay.report.page import page

from snaprt import shown
from snaprt.cli import output, tables
from snaprt.cli.fitted_table import Column, Columns, FittedTable
from snaprt.errors import SnaprtError
from snaprt.host.whole_files import named_path, write_whole, writing
from snaprt.units import format_duration

_AnyFunction = TypeVar("_AnyFunction", bound=Callable[..., Any])


#: Option, without its dashes -> what makes the file's content, and what the file is.
FORMATS: Final[Mapping[str, tuple[Callable[[Sequence[Report]], bytes], str]]] = {
    "html": (lambda reports: page(reports).encode(), "Write a self-contained HTML page."),
    "junit": (
        lambda reports: text.junit_xml(reports, datetime.datetime.now(datetime.UTC)),
        "Write JUnit XML, for CI.",
    ),
    "markdown": (
        lambda reports: text.markdown(reports).encode(),
        "Write Markdown, for a comment or a CI summary.",
    ),
}

_ASKED_FOR: Final = "snaprt.cli.replay.formats"
_IS_VERBOSE: Final = f"{_ASKED_FOR}.verbose"

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
    """Give a command an option for each of `FORMATS`; `written` writes what was asked for."""

    def remember(context: click.Context, parameter: click.Parameter, path: Path | None) -> None:
        if path is not None:
            context.meta.setdefault(_ASKED_FOR, {})[parameter.name] = path

    for name, (_, what) in reversed(list(FORMATS.items())):
        function = click.option(
            f"--{name}",
            type=output.PATH,
            metavar="OUT",
            callback=remember,
            expose_value=False,
            help=what,
        )(function)
    return function


def verbose_option(function: _AnyFunction) -> _AnyFunction:
    """Give a command the option whose answer `show_comparison` heeds."""

    def remember(context: click.Context, parameter: click.Parameter, is_verbose: bool) -> None:
        context.meta[_IS_VERBOSE] = is_verbose

    return click.option(
        "--verbose",
        is_flag=True,
        callback=remember,
        expose_value=False,
        help="Also list the outputs that are identical.",
    )(function)


def asked_for() -> Mapping[str, Path]:
    """Return the files that the options of the running command ask for, by format."""
    files: Mapping[str, Path] = click.get_current_context().meta.get(_ASKED_FOR, {})
    return files


def check_writable(saved_as: Path | None = None) -> None:
    """Refuse files that cannot be written, before the work whose reports they are for.

    Raises:
        UsageError: One of those that the options of the running command ask for is such a file.
    """
    files = {f"--{name}": path for name, path in asked_for().items()}
    if saved_as is not None:
        files["--save"] = saved_as
    for option, path in files.items():
        output.refuse_unwritable(named_path(path), "file", option)


@contextlib.contextmanager
def written(
    reports: Sequence[Report],
    saved_as: Path | None = None,
    write_more: Callable[[], object] | None = None,
) -> Iterator[None]:
    """Write reports into the files that the options of the running command ask for.

    Inside, they are printed: where a file cannot be written, that is told when they have been and
    the other files are there, for it may have taken hours to find them.

    Args:
        reports: What to write.
        saved_as: Where to save them for `snaprt report` to read again, if anywhere.
        write_more: Writes what else belongs to them, if anything.

    Raises:
        SnaprtError: A file cannot be written.
    """
    writers: list[Callable[[], object]] = [
        functools.partial(_write_format, name, path, reports) for name, path in asked_for().items()
    ]
    if saved_as is not None:
        writers.append(functools.partial(save, reports, saved_as))
    if write_more is not None:
        writers.append(write_more)
    refused: list[SnaprtError] = []
    for write_one in writers:
        try:
            write_one()
        except SnaprtError as error:
            refused.append(error)
    yield
    for earlier in refused[:-1]:
        output.error(earlier.message, earlier.hint)
    if refused:
        raise refused[-1]


def _write_format(name: str, path: Path, reports: Sequence[Report]) -> None:
    write(path, FORMATS[name][0](reports))


def write(path: Path, content: bytes) -> None:
    """Write a file whole, and say so on stderr.

    Raises:
        UsageError: It cannot be written.
    """
    with writing(f"write {path}"):
        write_whole(path, content)
    output.log.print(f"wrote {shown.lines(str(path))}")


def _to_json(reports: Sequence[Report]) -> dict[str, Any]:
    return {
        "status": status_of(reports),
        "reports": [model.to_json(report) for report in reports],
    }


def print_json(reports: Sequence[Report]) -> None:
    """Print what ``--json`` asks for; what failed is told on stderr, too."""
    for report in reports:
        if report.headline.status == "failed":
            _tell_failure(report)
    output.emit_json(model.SCHEMA, _to_json(reports), model.SCHEMA_VERSION)


def save(reports: Sequence[Report], path: Path) -> None:
    """Save reports for `snaprt report` to read again; raise UsageError if that fails."""
    envelope = {"schema": model.SCHEMA, "version": model.SCHEMA_VERSION, **_to_json(reports)}
    write(path, json.dumps(envelope, indent=1, allow_nan=False).encode())


def status_of(reports: Sequence[Report]) -> int:
    """Return the exit status that reports stand for."""
    return max((_STATUSES[report.headline.status] for report in reports), default=output.EXIT_OK)


def word(headline: Headline) -> Text:
    """Return the word of a verdict in its color."""
    return Text(shown.name(headline.word), style=_STYLES[headline.status])


def verdict(headline: Headline) -> Text:
    """Return the last line of a report."""
    return Text.assemble(word(headline), f": {shown.sentence(headline.sentence)}")


def show(report: Report) -> None:
    """Print a report with its tables, the verdict in its color; or the error that it is."""
    if report.headline.word == FAILED:
        _tell_failure(report)
        return
    console = output.console
    *blocks, _ = text.blocks(report)
    for block in blocks:
        if isinstance(block, Comparison):
            show_comparison(block)
        elif isinstance(block, tuple):
            console.print(tables.statistics_table(block))
        else:
            console.print(block)
    console.print(verdict(report.headline))
    if report.headline.status == "failed":
        _tell_failure(report)


def _tell_failure(report: Report) -> None:
    """Print to stderr why the exit status is 2."""
    hint = report.hint or "name variants that can run here: --a, --b and --reference"
    output.error(report.headline.sentence, hint)


def show_comparison(comparison: Comparison) -> None:
    """Print a row for each output; unless all are asked for, one line stands for identical ones."""
    lists_identical = click.get_current_context().meta.get(_IS_VERBOSE, False)
    rows: list[OutputComparison] = []
    identical: list[OutputComparison] = []
    for array in comparison.outputs:
        is_summed_up = tables.needs_no_row(array) and not lists_identical
        (identical if is_summed_up else rows).append(array)
    console = output.console
    if rows:
        console.print(tables.comparison_table(rows))
    if identical:
        console.print(tables.identical_line(identical))
    for number, line in enumerate(tables.tolerance_lines(rows)):
        console.print(f"{'' if number else chr(10)}tolerance: {line}")


_SUM: Final[Columns[Report]] = (
    (Column("verdict"), lambda report: word(report.headline)),
    (Column("file"), lambda report: shown.name(report.path, 400)),
    (Column("worst output"), text.worst_words),
    (Column("time", right=True), lambda report: format_duration(sum(report.seconds))),
)


_MOST_WARNINGS: Final = 10


def show_sum(reports: Sequence[Report], *, alone: bool = False) -> None:
    """Print one row for each report, and how many there are of each verdict.

    ``alone`` means that nothing else is printed of them: their warnings follow the rows.
    """
    output.console.print(FittedTable.of(reports, _SUM))
    output.console.print()
    warnings = Counter(warning for report in reports if alone for warning in report.warnings)
    for warning, count in warnings.most_common(_MOST_WARNINGS):
        output.console.print(f"warning: {count} of {len(reports)} files: {shown.sentence(warning)}")
    words = [report.headline.word for report in reports]
    counts = [f"{words.count(word)} {word}" for word in sorted(set(words))]
    output.console.print(f"{len(reports)} files: {', '.join(counts)}")
