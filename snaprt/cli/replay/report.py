"""``snaprt report``: show what was found, from a saved result, by finding it now, or of a hang."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from snaprt_replay.localize import findings
from snaprt_replay.report import saved
from snaprt_replay.report.model import Report

from snaprt import shown
from snaprt.cli import output, progress
from snaprt.cli.fitted_table import Column, FittedTable
from snaprt.cli.replay import formats
from snaprt.errors import SnaprtError, UsageError
from snaprt.fleet.hang import Conclusion, conclude, is_hang, read_dumps
from snaprt.host.interruptions import interrupted_at_once
from snaprt.host.regular_files import open_file, read_file
from snaprt.host.whole_files import writing
from snaprt.snapshot.recorder.ranks.states import read_states
from snaprt.units import format_duration

if TYPE_CHECKING:
    from snaprt_replay.load.case import Case
    from snaprt_replay.localize.findings import Localization

_MOST_BYTES: Final = 1 << 28
_NEEDS_PROGRAM: Final = frozenset({"explorer", "localizes", "budget", "device", "sources"})
_NEEDS_REPORT: Final = frozenset({"save", "localized", "verbose", *formats.FORMATS})
_PASS: Final = "pass the output of a command with --json"


@click.command("report")
@click.argument("file", metavar="RESULT.json|FILE|HANG", type=output.PATH)
@formats.format_options
@formats.verbose_option
@click.option(
    "--save",
    type=output.PATH,
    metavar="OUT.json",
    help="Save the report; `snaprt report OUT.json` shows it again.",
)
@click.option(
    "--model-explorer",
    "explorer",
    type=output.PATH,
    metavar="DIR",
    help="Write the program and its errors for Google's Model Explorer.",
)
@click.option(
    "--localized",
    type=output.PATH,
    metavar="FOUND.json",
    help="Output of `snaprt localize --json` for FILE.",
)
@click.option(
    "--localize/--no-localize",
    "localizes",
    default=None,
    help="Find the operation where it starts.  [default: if outputs differ or contain NaN]",
)
@click.option(
    "--budget",
    type=output.LIMIT,
    default=120.0,
    metavar="SECONDS",
    help="Time limit for --localize.",
    show_default=True,
)
@click.option(
    "--device", metavar="cpu|gpu|tpu[:N]", help="Device to run on.  [default: JAX's choice]"
)
@click.option(
    "--sources",
    type=output.PATH,
    default=Path("."),
    metavar="DIR",
    help="Show source lines only from Python files in DIR.  [default: current directory]",
)
@output.json_option
@click.pass_context
def command(
    context: click.Context,
    file: Path,
    save: Path | None,
    explorer: Path | None,
    localized: Path | None,
    localizes: bool | None,
    budget: float,
    device: str | None,
    sources: Path,
    as_json: bool,
) -> None:
    """Show the results of a replay in the terminal, as a page, as JSON or in Model Explorer.

    RESULT.json is the output of `snaprt replay`, `snaprt localize` or `snaprt report` with --json;
    nothing is run again. FILE is any file that `snaprt replay` accepts: it is replayed, and if its
    outputs differ or contain NaN, the operation where that starts is localized. HANG is a folder
    written by --watchdog; the report shows which ranks wait for which.

    The exit status is 0 if nothing was found, 1 if something was found, 2 if a file failed.

    \b
    Example:
      snaprt report step.inputs.snap --html report.html
      snaprt replay dump --json > result.json; snaprt report result.json --html report.html
      snaprt report step.inputs.snap --model-explorer explorer
      snaprt report dump/hang-001
    """
    if is_hang(file):
        why, hint = "cannot be combined with HANG", "the report of a hang is text, or --json"
        output.refuse_options(context, _NEEDS_PROGRAM | _NEEDS_REPORT, why, hint)
        _report_hang(file, as_json=as_json)
        context.exit(output.EXIT_MISMATCH)
    formats.check_writable(save)
    localization = None if localized is None else findings.from_json(_read_json(localized))
    write_more: Callable[[], object] | None = None
    if _is_json(file):
        why = "needs a program, but a saved result contains none"
        hint = "pass the original FILE, with --localized FOUND.json"
        output.refuse_options(context, _NEEDS_PROGRAM, why, hint)
        reports = saved.read(_read_json(file), str(file))
        if localization is not None:
            if len(reports) != 1:
                raise UsageError(
                    f"{file} has results for {len(reports)} files, but --localized is for one"
                )
            reports = (dataclasses.replace(reports[0], localization=localization),)
    else:
        with progress.showing("replaying"):
            report, case = _find(file, device, localizes, budget, sources, localization)
        reports = (report,)
        if explorer is not None and case is not None:
            write_more = functools.partial(_write_explorer, case, report.localization, explorer)
    with formats.written(reports, save, write_more):
        if as_json:
            formats.print_json(reports)
        else:
            _show(reports)
    context.exit(formats.status_of(reports))


def _find(
    path: Path,
    device: str | None,
    localizes: bool | None,
    budget: float,
    sources: Path,
    localization: Localization | None,
) -> tuple[Report, Case | None]:
    """Replay a file, look for where it starts unless ``localization`` has it, and report both.

    Returns:
        The report, and what was replayed; no such thing if that failed.
    """
    # Here, because a saved result is shown without JAX.
    with interrupted_at_once():
        from snaprt_replay import gather
        from snaprt_replay.run.rerun import replay

        from snaprt.snapshot.recorder import flags

    flags.take_over()
    try:
        raised = gather.of_trace_error(path)
        if raised is not None:
            return raised, None
        replayed = replay(path, device=device)
    except SnaprtError as error:
        return gather.of_failure(path, error), None
    words = [] if device is None else ["--device", device]
    report = gather.of_replay(replayed, words)
    case, comparison = replayed.case, replayed.comparison
    if localizes is None:
        has_nan = comparison and any(array.specials.nan_both for array in comparison.outputs)
        localizes = replayed.mismatch or bool(has_nan)
    if localization is None and localizes and case.inputs is not None:
        localization = _localize(case, device, budget)
    if localization is not None:
        report = gather.with_localization(report, case, localization, sources, words)
    return report, case


def _localize(case: Case, device: str | None, budget: float) -> Localization | None:
    from snaprt_replay.localize.pipeline import LocalizeRequest, localize
    from snaprt_replay.run.variants.variants import parse_variant

    request = LocalizeRequest(
        suspect=None if device is None else parse_variant(device), budget=budget
    )
    try:
        return localize(case, request, tell=lambda line: output.log.print(shown.lines(line)))
    except SnaprtError as error:  # what was found before is worth a report
        output.error(error.message, error.hint)
        return None


def _write_explorer(case: Case, localization: Localization | None, folder: Path) -> None:
    from snaprt_replay.localize.pipeline import read_program
    from snaprt_replay.report import model_explorer

    with writing(f"write into {folder}", elsewhere="name another folder"):
        paths = model_explorer.write(read_program(case), localization, folder)
    for path in paths:
        output.log.print(f"wrote {shown.lines(str(path))}")


def _show(reports: Sequence[Report]) -> None:
    for number, report in enumerate(reports):
        if number:
            output.console.print()
        formats.show(report)
    if len(reports) > 1:
        output.console.print()
        formats.show_sum(reports)


def _is_json(path: Path) -> bool:
    """Return whether a file is a saved result: neither snapshots nor modules begin with a brace."""
    try:
        with open_file(path) as file:
            start = file.read(64)
    except OSError:
        return False
    return path.suffix == ".json" or start.lstrip()[:1] == b"{"


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        plain = json.loads(read_file(path, _MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror or error if isinstance(error, OSError) else error
        raise UsageError(f"{path} cannot be read: {reason}", hint=_PASS) from error
    if not isinstance(plain, dict):
        raise UsageError(f"{path} does not contain a snaprt result", hint=_PASS)
    return plain


_HANG_COLUMNS: Final = (
    Column("rank", right=True),
    Column("state"),
    Column("step", right=True, rank=3),
    Column("program", rank=1),
    Column("execution", right=True, rank=2),
    Column("for", right=True),
    Column("where"),
    Column("host", rank=4),
)


def _report_hang(folder: Path, *, as_json: bool) -> None:
    """Print who waits for whom, of a folder in which the watchdog wrote.

    Raises:
        UsageError: A file in the folder cannot be read.
    """
    dumps = read_dumps(folder)
    conclusion = conclude(dumps, read_states(folder.parent))
    if as_json:
        output.emit_json("snaprt.hang-report", {"folder": folder, **vars(conclusion)})
        return
    _show_conclusion(conclusion, folder)
    for cause in sorted({dump.cause for dump in dumps if dump.state in ("stuck", "died")}):
        output.console.print(shown.lines(cause))


def _show_conclusion(conclusion: Conclusion, folder: Path) -> None:
    _print_plain(conclusion.headline)
    if conclusion.advice:
        _print_plain(conclusion.advice)
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
    output.console.print(FittedTable(_HANG_COLUMNS, rows))
    output.console.print()
    for missing in conclusion.missing:
        last_seen = missing.last_seen or "it left no state either"
        _print_plain(f"rank {missing.rank} wrote nothing: {last_seen}")
    for note in sorted({row.note for row in conclusion.rows if row.note}):
        _print_plain(note)
    _print_plain(f"the stacks of all threads are in {folder}/rank-*.json")


def _print_plain(text: str) -> None:
    """Print text from a file on one line, without markup."""
    output.console.print(shown.lines(text), markup=False, highlight=False, soft_wrap=True)
