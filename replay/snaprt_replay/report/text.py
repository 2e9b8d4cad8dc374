"""Write a report as lines of text with small charts; it must not know terminals or colors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from snaprt_replay.compare.results import IDENTICAL, OutputComparison
from snaprt_replay.localize.findings import Localization, error_text
from snaprt_replay.report import charts, shown
from snaprt_replay.report.grid import error_cells
from snaprt_replay.report.model import ErrorGrid, Report
from snaprt_replay.report.order import worst_first

_BARS: Final = " ▁▂▃▄▅▆▇█"
_SHADES: Final = "·░▒▓█"
_SPECIAL: Final = "·=∞?N"
_MOST_OUTPUTS: Final = 4
_PATH_WIDTH: Final = 24
_MAP_ROWS, _MAP_COLUMNS = 8, 48


def lines(report: Report) -> Iterator[str]:
    """Yield the report's lines, the verdict last, as on a terminal what is last is seen first."""
    what = f", module {shown.name(report.module)}" if report.module else ""
    yield f"{shown.name(report.path, 400)}: {report.format}{what}"
    if report.device:
        yield f"replayed on {shown.name(report.device)}"
    for warning in report.warnings:
        yield f"warning: {shown.sentence(warning)}"
    for note in report.notes:
        yield f"note: {shown.sentence(note)}"
    for side in report.sides:
        far = "" if side.score is None else f", {side.score:.3g} times as far as rounding explains"
        yield f"{side.letter} ({shown.name(side.name)}): {side.word}{far}{_after(side.reason)}"
    if report.comparison is not None:
        ordered = worst_first(report.comparison.outputs)
        told = [number for number in ordered if report.comparison.outputs[number].differing]
        for number in told[:_MOST_OUTPUTS]:
            grid = report.grids[number] if number < len(report.grids) else None
            yield ""
            yield from _output_lines(report.comparison.outputs[number], grid)
        if len(told) > _MOST_OUTPUTS:
            yield f"and {len(told) - _MOST_OUTPUTS} more outputs that differ"
    if report.localization is not None:
        yield ""
        yield from _path_lines(report.localization)
        yield f"starts: {shown.sentence(report.localization.sentence)}"
    yield ""
    yield f"{report.headline.word}: {shown.sentence(report.headline.sentence)}"


def worst_words(report: Report) -> str:
    """Return the worst output and how bad it is in a few words, or why there is none."""
    if report.comparison is None or not report.comparison.outputs:
        return shown.name(report.headline.sentence)
    worst = report.comparison.outputs[worst_first(report.comparison.outputs)[0]]
    if worst.verdict == IDENTICAL:
        told = report.comparison.nonfinite_in_words()
        return f"all identical; but {shown.sentence(told)}" if told else "all identical"
    far = "" if worst.max_ulp is None else f", {worst.max_ulp} ulp"
    return f"{shown.name(worst.name, 60)}: {worst.beyond} of {worst.elements} beyond{far}"


def _after(reason: str) -> str:
    return f": {shown.sentence(reason)}" if reason else ""


def _output_lines(output: OutputComparison, grid: ErrorGrid | None) -> Iterator[str]:
    kind = f"{output.dtype}[{','.join(map(str, output.shape))}]"
    yield f"{shown.name(output.name)} {kind}: {output.verdict}"
    yield f"  {shown.sentence(output.reason)}"
    if len(output.ulp_octaves) > 1:
        last = charts.octave_text(len(output.ulp_octaves) - 1)
        yield f"  ulp  0 |{bars(output.ulp_octaves)}| {last}"
    if grid is None or len(grid.errors) == 1:
        return
    yield f"  {charts.box_text(grid)}"
    small = _smaller(grid)
    low, high = charts.shade_range(small.errors)
    for row in range(small.rows):
        here = slice(row * small.columns, (row + 1) * small.columns)
        marks = zip(small.errors[here], small.specials[here], strict=True)
        yield "  " + "".join(_cell(error, special, low, high) for error, special in marks)
    yield f"  · none  {_SHADES[1]} {low:.2g} to {_SHADES[-1]} {high:.2g}" + _special_words(small)


def bars(counts: Sequence[int]) -> str:
    """Return a bar for each count, on a logarithmic scale; a count above 0 is always seen."""
    most = math.log(max(counts, default=0) + 1) or 1.0
    top = len(_BARS) - 1
    return "".join(
        _BARS[max(1, round(top * math.log(count + 1) / most)) if count else 0] for count in counts
    )


def _smaller(grid: ErrorGrid) -> ErrorGrid:
    return error_cells(grid, min(_MAP_ROWS, grid.rows), min(_MAP_COLUMNS, grid.columns))


def _cell(error: float, special: int, low: float, high: float) -> str:
    if special > 1:
        return _SPECIAL[special]
    if error <= 0:
        return _SPECIAL[special]
    steps = len(_SHADES) - 1
    share = (math.log(error) - math.log(low)) / (math.log(high) - math.log(low))
    return _SHADES[1 + max(0, min(steps - 1, int(share * steps)))]


def _special_words(grid: ErrorGrid) -> str:
    told = charts.special_words(grid)
    return "".join(f"  {_SPECIAL[mark]} {words}" for mark, words in told)


def _path_lines(found: Localization) -> Iterator[str]:
    if not found.path:
        return
    scale = charts.ErrorScale(found.path)
    yield "error made, in multiples of the tolerance, along the program"
    yield "(> looked into, ░ up to 1x and allowed, █ above):"
    for one in found.path:
        name = one.first.name if one.instructions == 1 else f"{one.first.name} .. {one.last.name}"
        mark = ">" if one.chosen else " "
        bar = ("█" if one.made > 1 else "░") * round(scale.share(one.made) * _PATH_WIDTH)
        indented = f"{'  ' * min(one.depth, 8)}{mark} {shown.name(name, 44)}"
        yield f"  {indented:<56} {error_text(one.made):>9} {bar}".rstrip()
