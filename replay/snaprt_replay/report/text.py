"""A report as lines of text with small charts: for a terminal, in JUnit XML, as Markdown."""

from __future__ import annotations

import datetime
import itertools
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Final

from snaprt import shown
from snaprt.units import aligned, first_names, format_duration, format_size
from snaprt_replay.compare.array_statistics import ArrayStatistics
from snaprt_replay.compare.results import IDENTICAL, Comparison, OutputComparison
from snaprt_replay.localize.findings import Localization, RegionError, error_text, place_text
from snaprt_replay.report import charts
from snaprt_replay.report.grid import error_cells
from snaprt_replay.report.model import (
    DEVICE_COLUMNS,
    Compiled,
    DeviceRow,
    ErrorGrid,
    Report,
    RunRecord,
    TrialSide,
    worst_first,
)

_BARS: Final = " ▁▂▃▄▅▆▇█"
_SHADES: Final = "·░▒▓█"
_SPECIAL: Final = "·=∞?N"
_MOST_OUTPUTS: Final = 4
_MOST_RUNS: Final = 3
_MAP_ROWS, _MAP_COLUMNS = 8, 48

# XLA's name -> words; what is nonzero on only one platform is only in the JSON.
_MEMORY: Final = {
    "argument_size": "arguments",
    "output_size": "outputs",
    "temp_size": "temporary",
    "generated_code_size": "code",
    "peak_memory": "peak",
}
_COST: Final = {
    "flops": "{:.3g} flops",
    "transcendentals": "{:.3g} transcendentals",
    "bytes accessed": "{:.3g} bytes accessed",
    "optimal_seconds": "{:.3g} s at best",
}

Statistics = tuple[ArrayStatistics, ...]
Block = str | Comparison | Statistics
"""A line, or data that a terminal shows as a table."""


def lines(report: Report) -> Iterator[str]:
    """Yield the report's lines, without tables."""
    before = ""
    for block in blocks(report):
        if isinstance(block, str):
            if block or before:
                yield block
            before = block


def blocks(report: Report) -> Iterator[Block]:
    """Yield a report's lines and tables; the verdict is last, where a terminal user looks first."""
    module = f", module {shown.name(report.module)}" if report.module else ""
    yield f"{shown.name(report.path, 400)}: {shown.name(report.format)}{module}".removesuffix(": ")
    if "replay" in report.runs:
        yield f"replayed on {shown.name(report.device)}{_how_it_ran(report.runs['replay'])}"
    if report.compiled is not None:
        yield from compiled_lines(report.compiled)
    for side in report.sides:
        yield _side_line(side, report.runs.get(side.letter.lower(), RunRecord()))
    if report.judgement is not None and report.judgement["reference"]:
        moved = report.judgement["amplification"]
        rounding = "" if moved is None else f"; rounding moves its outputs by about {moved:.3g} ulp"
        yield f"reference: {shown.name(report.judgement['reference'])}{rounding}"
    for note in report.notes:
        yield f"note: {shown.sentence(note)}"
    for warning in report.warnings:
        yield f"warning: {shown.sentence(warning)}"
    if report.statistics:
        yield ""
        yield report.statistics
    if report.comparison is not None:
        yield ""
        yield report.comparison
        yield from _device_lines(report.by_device)
        yield from _worst_outputs(report, report.comparison)
    if report.localization is not None:
        yield ""
        yield from localization_lines(report.localization)
        yield f"starts: {shown.sentence(report.localization.sentence)}"
    if report.repeats is not None and report.repeats.verdict == IDENTICAL:
        yield f"{len(report.runs['replay'].execute_seconds)} runs gave identical bits"
    if report.all_devices:
        yield ""
        yield from device_table(report.all_devices)
    yield ""
    yield f"{shown.name(report.headline.word)}: {shown.sentence(report.headline.sentence)}"


def _how_it_ran(run: RunRecord) -> str:
    alone = " in a separate process" if run.isolated else ""
    if not run.execute_seconds:
        return alone
    source = "loaded from the cache" if run.from_cache else "compiled"
    times = first_names(map(format_duration, run.execute_seconds), _MOST_RUNS)
    return f"{alone}: {source} in {format_duration(run.compile_seconds)}, ran in {times}"


def _side_line(side: TrialSide, run: RunRecord) -> str:
    where = f" on {shown.name(side.device)}{_how_it_ran(run)}" if side.device else ""
    agrees = {None: "", True: "; all runs gave identical bits", False: "; its runs differ"}
    far = "" if side.score is None else f", {side.score:.3g} times what rounding explains"
    reason = f": {shown.sentence(side.reason)}" if side.reason else ""
    ran = f"{where}{agrees[run.agrees_with_itself]}"
    letter, name, word = map(shown.name, (side.letter, side.name, side.word))
    return f"{letter} ({name}){ran}: {word}{far}{reason}"


def compiled_lines(compiled: Compiled) -> Iterator[str]:
    """Yield the compiler's figures for a program's memory and cost, and where its HLO is."""
    memory = [
        f"{words} {format_size(int(compiled.memory[name]))}"
        for name, words in _MEMORY.items()
        if name in compiled.memory
    ]
    yield f"memory: {', '.join(memory)}"
    for array in compiled.largest:
        source = f" at {shown.name(str(array['source']), 400)}" if array["source"] else ""
        times = f"{array['count']} x " if array["count"] != 1 else ""
        size, shape = format_size(int(array["bytes"])), shown.name(str(array["shape"]))
        yield f"  {times}{size} {shape}, {shown.name(str(array['opcode']))}{source}"
    figures = compiled.cost
    # XLA reports -1 if it does not know, for example for custom calls.
    cost = [
        form.format(figures[name]) for name, form in _COST.items() if figures.get(name, -1) >= 0
    ]
    yield f"cost: {', '.join(cost) or 'the compiler provides no analysis'}"
    yield f"optimized HLO: {shown.name(compiled.hlo, 400)}"


def device_table(rows: Sequence[DeviceRow]) -> Iterator[str]:
    """Yield the lines of a table with a row for each device."""
    table = [DEVICE_COLUMNS, *(tuple(map(shown.name, row.cells)) for row in rows)]
    columns = [column for column in zip(*table, strict=True) if any(column[1:])]
    yield from aligned(list(zip(*columns, strict=True)), len(columns))


def _device_lines(by_device: Sequence[Comparison]) -> Iterator[str]:
    """Yield ``devices 0-3, each: ...``, once for each row of devices with the same findings."""
    summaries = enumerate(comparison.summary for comparison in by_device)
    for summary, row in itertools.groupby(summaries, key=lambda pair: pair[1]):
        numbers = [number for number, _ in row]
        is_one = len(numbers) == 1
        label = f"device {numbers[0]}" if is_one else f"devices {numbers[0]}-{numbers[-1]}, each"
        yield f"{label}: {shown.sentence(summary)}"


def _worst_outputs(report: Report, comparison: Comparison) -> Iterator[str]:
    ordered = worst_first(comparison.outputs)
    differing = [number for number in ordered if comparison.outputs[number].differing]
    for number in differing[:_MOST_OUTPUTS]:
        grid = report.grids[number] if number < len(report.grids) else None
        yield ""
        yield from _output_lines(comparison.outputs[number], grid)
    if len(differing) > _MOST_OUTPUTS:
        yield f"and {len(differing) - _MOST_OUTPUTS} more outputs that differ"


def worst_words(report: Report) -> str:
    """Return in a few words the worst output and how bad it is, or why there is none."""
    if report.comparison is None or not report.comparison.outputs:
        return shown.name(report.headline.sentence)
    worst = report.comparison.outputs[worst_first(report.comparison.outputs)[0]]
    if worst.verdict == IDENTICAL:
        nonfinite = report.comparison.nonfinite_in_words()
        return f"all identical; but {shown.sentence(nonfinite)}" if nonfinite else "all identical"
    far = "" if worst.max_ulp is None else f", {worst.max_ulp} ulp"
    return f"{shown.name(worst.name, 60)}: {worst.beyond} of {worst.elements} beyond{far}"


def _output_lines(output: OutputComparison, grid: ErrorGrid | None) -> Iterator[str]:
    kind = shown.array_type(output.dtype, output.shape)
    yield f"{shown.name(output.name)} {kind}: {output.verdict}"
    yield f"  {shown.sentence(output.reason)}"
    if len(output.ulp_octaves) > 1:
        last = charts.octave_text(len(output.ulp_octaves) - 1)
        yield f"  ulp  0 |{bars(output.ulp_octaves)}| {last}"
    if grid is None or len(grid.errors) == 1:
        return
    yield f"  {charts.box_text(grid)}"
    small = _smaller(grid)
    low, high = limits = charts.shade_range(small.errors)
    for row in range(small.rows):
        here = slice(row * small.columns, (row + 1) * small.columns)
        marks = zip(small.errors[here], small.specials[here], strict=True)
        yield "  " + "".join(_cell(error, special, limits) for error, special in marks)
    yield f"  · none  {_SHADES[1]} {low:.2g} to {_SHADES[-1]} {high:.2g}" + _special_words(small)


def bars(counts: Sequence[int]) -> str:
    """Return a bar for each count, on a logarithmic scale; a count above 0 is always visible."""
    most = math.log(max(counts, default=0) + 1) or 1.0
    top = len(_BARS) - 1
    return "".join(
        _BARS[max(1, round(top * math.log(count + 1) / most)) if count else 0] for count in counts
    )


def _smaller(grid: ErrorGrid) -> ErrorGrid:
    return error_cells(grid, min(_MAP_ROWS, grid.rows), min(_MAP_COLUMNS, grid.columns))


def _cell(error: float, special: int, limits: tuple[float, float]) -> str:
    if special > 1 or error <= 0:
        return _SPECIAL[special]
    steps = len(_SHADES) - 1
    share = charts.share_of_range(error, limits)
    return _SHADES[1 + max(0, min(steps - 1, int(share * steps)))]


def _special_words(grid: ErrorGrid) -> str:
    legend = charts.special_words(grid)
    return "".join(f"  {_SPECIAL[mark]} {words}" for mark, words in legend)


def localization_lines(localization: Localization) -> Iterator[str]:
    """Yield the result of localizing: the errors of the examined regions, and the instructions."""
    for note in localization.notes:
        yield f"note: {shown.sentence(note)}"
    if localization.share_matched < 1.0:
        yield (
            f"{localization.matched} of {localization.instruction_count} instructions "
            f"({localization.share_matched:.0%}) match the reference"
        )
    if localization.path:
        yield from _path_table(localization.path)
        yield "errors are in multiples of the default tolerance; see docs/explanation/comparison.md"
    if localization.observer_effect is not None:
        untapped, tapped = map(error_text, localization.observer_effect)
        yield f"error of the outputs: {untapped} without taps, {tapped} with the first taps"
    if localization.substituted is not None:
        before, after = map(error_text, localization.substituted)
        yield (
            f"error of the outputs: {before}, {after} with these instructions as in the reference"
        )
    for effect in localization.passes:
        outcome = effect.failed or error_text(effect.error)
        yield f"{shown.name(effect.variant)}: {shown.name(outcome)}"
    yield ""
    for place in localization.instructions:
        yield shown.name(place_text(place), 400)
        if place.op_name:
            yield f"  {shown.name(place.op_name, 240)}"
        for operand in place.operands:
            yield f"  reads {shown.name(operand)}"
    for difference in localization.difference:
        if difference.reason:
            yield f"  {shown.name(difference.name)}: {shown.sentence(difference.reason)}"
    yield (
        f"{localization.compiles} modules compiled or loaded, {localization.executions} runs, "
        f"{format_duration(localization.seconds)}"
    )


def _path_table(path: Sequence[RegionError]) -> Iterator[str]:
    rows = [["region", "instructions", "made", "carried in", "carried out"]]
    for region in path:
        is_one = region.instructions == 1
        name = region.first.name if is_one else f"{region.first.name} .. {region.last.name}"
        indented = (
            f"{'  ' * min(region.depth, 8)}{'> ' if region.chosen else '  '}{shown.name(name)}"
        )
        errors = map(error_text, (region.made, region.carried_in, region.carried_out))
        rows.append([indented, str(region.instructions), *errors])
    yield from aligned(rows)


def markdown(reports: Sequence[Report]) -> str:
    """Return a table of all files, and the text of those that are not ok."""
    rows = [
        f"| {_cell_text(report.headline.word)} | {_cell_text(report.path)} "
        f"| {_cell_text(report.headline.sentence)} |\n"
        for report in reports
    ]
    details = []
    for report in reports:
        if report.headline.status == "ok":
            continue
        text = "\n".join(lines(report))
        fence = "`" * max(3, 1 + _longest_run(text))
        heading = _cell_text(report.module or report.path)
        details.append(f"\n### {heading}\n\n{fence}text\n{text}\n{fence}\n")
    return "".join(["| verdict | file | in words |\n| --- | --- | --- |\n", *rows, *details])


def _cell_text(text: str) -> str:
    """Return text from a file as Markdown, with all markup escaped."""
    return re.sub(r"([\\`*_{}\[\]<>()#+.!|~@&-])", r"\\\1", shown.sentence(text))


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


_SUITE: Final = "snaprt replay"
_KINDS: Final = ("failure", "error", "skipped")


def junit_xml(reports: Sequence[Report], when: datetime.datetime) -> bytes:
    """Return one test case for each file.

    A file with a finding is a failure, a file that could not be replayed is an error, and a file
    with nothing to compare with is skipped. Jenkins, GitLab and GitHub Actions read this format.
    Source: the Jenkins xUnit plugin's ``junit-10.xsd``.

    Args:
        reports: In any order.
        when: When they were created.
    """
    outcomes = [_outcome(report) for report in reports]
    totals = {
        "tests": str(len(reports)),
        "failures": str(outcomes.count("failure")),
        "errors": str(outcomes.count("error")),
        "skipped": str(outcomes.count("skipped")),
        "time": f"{sum(sum(report.seconds) for report in reports):.6f}",
    }
    root = ElementTree.Element("testsuites", {"name": _SUITE, **totals})
    stamp = when.replace(tzinfo=None).isoformat(timespec="seconds")
    suite = ElementTree.SubElement(
        root, "testsuite", {"name": _SUITE, "timestamp": stamp, **totals}
    )
    for report, outcome in zip(reports, outcomes, strict=True):
        _add_case(suite, report, outcome)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)


def _outcome(report: Report) -> str:
    if report.headline.status == "bad":
        return "failure"
    if report.headline.status == "failed":
        return "error"
    nothing = report.headline.status == "caution" and report.comparison is None
    return "skipped" if nothing else ""


def _add_case(suite: ElementTree.Element, report: Report, outcome: str) -> None:
    path = PurePath(report.path)
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=shown.name(str(path.parent), 400),
        name=shown.name(path.name, 400),
        time=f"{sum(report.seconds):.6f}",
    )
    text = "\n".join(lines(report))
    if outcome in _KINDS:
        message = shown.sentence(report.headline.sentence)
        result = ElementTree.SubElement(case, outcome, message=message)
        if outcome != "skipped":
            result.set("type", report.headline.word)
            result.text = text
            return
    ElementTree.SubElement(case, "system-out").text = text
