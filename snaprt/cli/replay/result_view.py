"""What became of each file that `snaprt replay` ran again: its status, and how it is shown."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text
from snaprt_replay.compare.array_statistics import describe
from snaprt_replay.compare.results import MISMATCH, Comparison, worst_verdict
from snaprt_replay.compare.results import to_json as comparison_json
from snaprt_replay.run.rerun import Replay
from snaprt_replay.run.trace_errors import TraceErrorReplay

from snaprt.cli import output, tables
from snaprt.errors import SnaprtError
from snaprt.units import format_duration


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """What became of one file: a replay, or the error that prevented it."""

    path: Path
    replay: Replay | None
    error: SnaprtError | None = None
    trace_error: TraceErrorReplay | None = None

    @property
    def status(self) -> int:
        """The exit status that it stands for."""
        if self.trace_error is not None:
            return output.EXIT_OK if self.trace_error.reproduces else output.EXIT_MISMATCH
        if self.replay is None:
            return output.EXIT_FAILURE
        return output.EXIT_MISMATCH if self.replay.mismatch else output.EXIT_OK

    @property
    def verdict(self) -> str:
        """What became of it, in few words."""
        if self.trace_error is not None:
            does = "reproduces" if self.trace_error.reproduces else "does not reproduce"
            return f"{does} the error"
        if self.replay is None:
            return "failed"
        if self.replay.played.agrees_with_itself is False:
            return "does not agree with itself"
        comparison = self.replay.comparison
        if comparison is None:
            return "nothing to compare with"
        return worst_verdict(one.verdict for one in (comparison, *self.replay.by_device))


def show(outcome: Outcome, *, is_first: bool) -> None:
    """Print what became of a file."""
    result = outcome.replay
    if not is_first and outcome.error is None:
        output.console.print()
    if outcome.trace_error is not None:
        _show_trace_error(outcome.trace_error)
    if result is None:
        return
    case, played, comparison = result.case, result.played, result.comparison
    output.console.print(f"{outcome.path}: {case.format}, module {tables.printable(case.name)}")
    source = "loaded from the cache" if played.from_cache else "compiled"
    times = ", ".join(map(format_duration, played.execute_seconds[:3]))
    more = ", ..." if len(played.execute_seconds) > 3 else ""
    alone = " in a process of its own" if played.isolated else ""
    output.console.print(
        f"replayed on {played.device} ({played.environment['device_kind']}){alone}: "
        f"{source} in {format_duration(played.compile_seconds)}, ran in {times}{more}"
    )
    for note in case.notes:
        output.console.print(f"note: {tables.printable(note)}")
    for warning in result.warnings:
        told = tables.printable(warning)
        output.console.print(Text.assemble(("warning:", "yellow"), f" {told}"))
    output.console.print()
    if comparison is None:
        output.console.print(tables.statistics_table([describe(one) for one in played.outputs]))
    else:
        output.console.print(tables.comparison_table(comparison))
        output.console.print()
        for line in tables.tolerance_lines(comparison):
            output.console.print(f"tolerance: {line}")
    for numbers, told in _rows_of_devices(result.by_device):
        output.console.print(f"{numbers}: {tables.printable(told)}")
    output.console.print()
    _show_verdict(outcome)


def _show_trace_error(found: TraceErrorReplay) -> None:
    recorded = found.recorded
    lines = [
        f"{found.path}: an error while the graph was recorded, module {found.name}",
        f"recorded: {recorded.kind}: {recorded.message}",
        f"operation: {found.operation or 'none; Python code raised the error'}",
        *(f"  at {frame}" for frame in recorded.stack),
        f"graph so far: {recorded.pending} operations",
    ]
    if recorded.left_out:
        lines.append(f"note: {recorded.left_out} of them, on other devices, are not in the file")
    lines += [f"note: not in the file: {one}" for one in recorded.unencodable]
    for line in lines:
        output.console.print(tables.printable(line))
    for warning in found.warnings:
        output.console.print(Text.assemble(("warning:", "yellow"), f" {tables.printable(warning)}"))
    output.console.print()
    word, style = (
        ("REPRODUCES", "green") if found.reproduces else ("DOES NOT REPRODUCE", "bold red")
    )
    output.console.print(Text.assemble((word, style), f": {tables.printable(found.summary)}"))


def _rows_of_devices(by_device: Sequence[Comparison]) -> Iterator[tuple[str, str]]:
    """Yield ``devices 0-3`` and what was found there, once for each row with the same findings."""
    found = enumerate(one.summary for one in by_device)
    for told, row in itertools.groupby(found, key=lambda one: one[1]):
        numbers = [number for number, _ in row]
        if len(numbers) == 1:
            yield f"device {numbers[0]}", told
        else:
            yield f"devices {numbers[0]}-{numbers[-1]}, each", told


def _show_verdict(outcome: Outcome) -> None:
    assert outcome.replay is not None
    played, comparison = outcome.replay.played, outcome.replay.comparison
    if played.repeats is not None:
        runs = len(played.execute_seconds)
        if played.agrees_with_itself:
            output.console.print(f"{runs} runs gave the same bits")
        else:
            told = tables.printable(played.repeats.summary)
            line = Text.assemble(
                ("NON-DETERMINISTIC", "bold red"),
                f": {played.repeats.actual_name} and run 1: {told}",
            )
            output.console.print(line)
    if comparison is None:
        output.console.print("nothing to compare with: no outputs were recorded for these inputs")
        return
    word, style = ("MISMATCH", "bold red") if outcome.verdict == MISMATCH else ("MATCH", "green")
    told = tables.printable(outcome.replay.summary)
    output.console.print(Text.assemble((word, style), f": {told}"))


def show_summary(outcomes: Sequence[Outcome]) -> None:
    """Print a line for each file, and how many there are of them."""
    output.console.print()
    for outcome in outcomes:
        output.console.print(f"{outcome.verdict:<24} {outcome.path}{_but(outcome)}")
    bad = sum(outcome.status != output.EXIT_OK for outcome in outcomes)
    output.console.print(
        f"{len(outcomes)} files replayed, {bad} of them with a mismatch or failure"
    )


def _but(outcome: Outcome) -> str:
    comparison = outcome.replay.comparison if outcome.replay is not None else None
    told = comparison.nonfinite_in_words() if comparison is not None else ""
    return f" ({tables.printable(told)})" if told else ""


def to_json(outcome: Outcome) -> dict[str, Any]:
    """Return what ``--json`` prints of a file."""
    data: dict[str, Any] = {
        "path": outcome.path,
        "verdict": outcome.verdict,
        "status": outcome.status,
    }
    if outcome.trace_error is not None:
        found = outcome.trace_error
        return {
            **data,
            "trace_error": dataclasses.asdict(found.recorded),
            "operation": found.operation,
            "raised": dataclasses.asdict(found.raised),
            "summary": found.summary,
            "warnings": found.warnings,
        }
    if outcome.replay is None:
        assert outcome.error is not None
        return {**data, "error": outcome.error.message, "hint": outcome.error.hint}
    case, played, comparison = (
        outcome.replay.case,
        outcome.replay.played,
        outcome.replay.comparison,
    )
    return {
        **data,
        "format": case.format,
        "name": case.name,
        "device": played.device,
        "isolated": played.isolated,
        "compile_seconds": played.compile_seconds,
        "from_cache": played.from_cache,
        "execute_seconds": played.execute_seconds,
        "recorded_environment": case.environment,
        "environment": played.environment,
        "compiler_options": case.compiler_options,
        "notes": case.notes,
        "warnings": outcome.replay.warnings,
        "comparison": None if comparison is None else comparison_json(comparison),
        "files": case.files or (case.path,),
        "by_device": [comparison_json(one) for one in outcome.replay.by_device],
        "repeats": None if played.repeats is None else comparison_json(played.repeats),
        "outputs": [describe(array) for array in played.outputs],
    }
