"""``snaprt replay DIR``: replay many files, some at a time or on a cluster, and sum up.

It knows how progress and sums are shown; the work is `snaprt_replay.batch.many`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import click
from click.core import ParameterSource
from rich.text import Text
from snaprt_replay.batch import cluster, many
from snaprt_replay.batch.many import ReplayRequest
from snaprt_replay.report import model, shown
from snaprt_replay.report.model import Report

from snaprt.cli import output, progress
from snaprt.cli.replay import report_files
from snaprt.errors import UsageError
from snaprt.snapshot.share.executions import one_for_each_execution


@dataclasses.dataclass(frozen=True)
class Batch:
    """How the user wants many files to be replayed.

    Args:
        processes: How many at a time; None if not said.
        address: Of a cluster's scheduler.
        html: Where to write a page.
        junit: Where to write JUnit XML.
    """

    processes: int | None
    address: str | None
    html: Path | None
    junit: Path | None

    def check(self, *, saves: bool, judges: bool, compiles_only: bool) -> None:
        """Raise UsageError where an option goes with none of what else was asked for."""
        told = {
            "-j": self.processes,
            "--cluster": self.address,
            "--html": self.html,
            "--junit": self.junit,
        }
        given = [name for name, value in told.items() if value is not None]
        alone = [name for name in given if name in ("-j", "--cluster")]
        for other, is_given, clash in (
            ("--save", saves, given),
            ("--compile-only", compiles_only, given),
            ("--a, --b or --reference", judges, alone),
        ):
            if is_given and clash:
                raise UsageError(
                    f"{clash[0]} does not go with {other}", hint="`snaprt replay --help` has both"
                )
        if self.processes is not None and self.address is not None:
            raise UsageError(
                "-j does not go with --cluster", hint="a cluster has as many processes as workers"
            )

    def is_asked_for(self, files: Sequence[Path]) -> bool:
        """Return whether files are replayed this way."""
        options = (self.processes, self.address, self.html, self.junit)
        return any(one is not None for one in options) or any(path.is_dir() for path in files)


_NOT_ABOUT_THE_REPLAY: Final = frozenset(
    {"files", "processes", "address", "html", "junit", "as_json", "save"}
)


def words(context: click.Context) -> tuple[str, ...]:
    """Return the options of a replay as the user gave them, to be repeated in a report."""
    told: list[str] = []
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source != ParameterSource.COMMANDLINE or parameter.name in _NOT_ABOUT_THE_REPLAY:
            continue
        value = context.params[parameter.name or ""]
        if isinstance(value, bool):
            told.append(parameter.opts[0] if value else parameter.secondary_opts[0])
            continue
        values = (
            [f"{name}={one}" for name, one in value.items()] if isinstance(value, dict) else value
        )
        for one in values if isinstance(values, list | tuple) else [values]:
            told += [parameter.opts[0], str(one)]
    return tuple(told)


def expand(files: Sequence[Path]) -> list[Path]:
    """Return files with folders replaced by the recorded executions in them.

    Raises:
        UsageError: A folder has none.
    """
    found: list[Path] = []
    for path in files:
        found += many.recorded_files(path) if path.is_dir() else [path]
    return list(dict.fromkeys(found))


def replay_many(
    files: Sequence[Path], request: ReplayRequest, batch: Batch, *, as_json: bool
) -> int:
    """Replay files, show what was found, and return the command's status."""
    reports = _in_order(one_for_each_execution(files), request, batch)
    report_files.write_reports(reports, batch.html, batch.junit)
    if as_json:
        output.emit_json(model.SCHEMA, model.SCHEMA_VERSION, report_files.to_json(reports))
    elif len(reports) == 1:
        report_files.show(reports[0])
    else:
        report_files.show_sum(reports)
    return report_files.status_of(reports)


def _in_order(files: Sequence[Path], request: ReplayRequest, batch: Batch) -> list[Report]:
    done: dict[int, Report] = {}
    with progress.showing("replaying") as line:
        for number, report in _replayed(files, request, batch):
            done[number] = report
            line.done(len(done), len(files))
            if len(files) > 1:
                headline = report.headline
                name = shown.name(report.path, 400)
                output.log.print(
                    Text.assemble(
                        f"[{len(done)}/{len(files)}] ",
                        (headline.word, report_files.STYLES[headline.status]),
                        f" {name}",
                    )
                )
    return [done[number] for number in range(len(files))]


def _replayed(
    files: Sequence[Path], request: ReplayRequest, batch: Batch
) -> Iterator[tuple[int, Report]]:
    if batch.address is not None:
        return cluster.replay_files(files, request, batch.address)
    return many.replay_files(files, request, batch.processes or 1)
