"""Tables of comparisons and of arrays, as people read them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from snaprt_replay.compare.array_statistics import ArrayStatistics
from snaprt_replay.compare.results import (
    IDENTICAL,
    MISMATCH,
    WITHIN_TOLERANCE,
    OutputComparison,
    Place,
    Verdict,
)
from snaprt_replay.compare.tolerance import EXACT

from snaprt import shown
from snaprt.cli.fitted_table import Column, FittedTable
from snaprt.units import format_size

_STYLES: dict[Verdict, str] = {IDENTICAL: "green", WITHIN_TOLERANCE: "yellow", MISMATCH: "bold red"}
_NOTHING = "-"


def number_text(value: float | int | None) -> str:
    """Return a number in few characters; "-" for None."""
    if value is None:
        return _NOTHING
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def place_text(place: Place | None) -> str:
    """Return an index as in ``[3,2]``; "" where there is none, or it is a scalar's."""
    return f"[{','.join(map(str, place.index))}]" if place and place.index else ""


def verdict_text(verdict: Verdict) -> Text:
    """Return a verdict in its words and its color."""
    return Text(verdict, style=_STYLES[verdict])


_COMPARISON_COLUMNS = (
    Column("output"),
    Column("type"),
    Column("verdict"),
    Column("differing", right=True),
    Column("max ulp", right=True, rank=1),
    Column("p99 ulp", right=True, rank=5),
    Column("max abs error", right=True, rank=2),
    Column("at", rank=7),
    Column("max rel error", right=True, rank=3),
    Column("nan/inf", right=True, rank=4),
    Column("cosine", right=True, rank=6),
)


def comparison_table(outputs: Sequence[OutputComparison]) -> FittedTable:
    """Return a table with one row for each output."""
    return FittedTable(_COMPARISON_COLUMNS, [_comparison_row(output) for output in outputs])


def needs_no_row(output: OutputComparison) -> bool:
    """Return whether an output is identical and finite: there is nothing to read in its row."""
    return output.verdict == IDENTICAL and not output.specials.not_finite


def identical_line(outputs: Sequence[OutputComparison]) -> Text:
    """Return what stands for the rows of outputs that need none."""
    names = _few([shown.lines(output.name) for output in outputs])
    plural = "s" if len(outputs) > 1 else ""
    return Text.assemble(f"{len(outputs)} output{plural} ", verdict_text(IDENTICAL), f": {names}")


def _comparison_row(output: OutputComparison) -> list[str | Text]:
    is_exact = output.max_ulp is None
    return [
        shown.lines(output.name),
        shown.array_type(output.dtype, output.shape),
        verdict_text(output.verdict),
        _share_text(output),
        _NOTHING if is_exact else number_text(output.max_ulp),
        _NOTHING if is_exact else number_text(output.p99_ulp),
        number_text(output.max_abs_error),
        place_text(output.worst_abs),
        number_text(output.max_rel_error),
        _not_finite_text(output),
        _NOTHING if output.cosine is None else f"{output.cosine:.9g}",
    ]


def _not_finite_text(output: OutputComparison) -> str | Text:
    count = output.specials.not_finite
    return Text(str(count), style="bold yellow") if count else "0"


def _share_text(output: OutputComparison) -> str:
    if not output.differing:
        return "0"
    return f"{output.differing} ({output.share_differing:.2%})"


def tolerance_lines(outputs: Sequence[OutputComparison]) -> list[str]:
    """Return one line for each kind of tolerance, with the outputs it was applied to."""
    kinds: dict[tuple[str, float, int], list[OutputComparison]] = {}
    for output in outputs:
        if output.tolerance is not None:
            kind = (output.tolerance.origin, output.tolerance.rtol, output.tolerance.max_ulp)
            kinds.setdefault(kind, []).append(output)
    return [_tolerance_line(outputs) for outputs in kinds.values()]


def _tolerance_line(outputs: Sequence[OutputComparison]) -> str:
    names = _few([shown.lines(output.name) for output in outputs])
    tolerances = [output.tolerance for output in outputs if output.tolerance is not None]
    first = tolerances[0]
    if first == EXACT:
        return f"none, exact types: {names}"
    atols = sorted({f"{tolerance.atol:.2g}" for tolerance in tolerances}, key=float)
    atol = atols[0] if len(atols) == 1 else f"{atols[0]} to {atols[-1]}"
    return f"rtol {first.rtol:.2g}, atol {atol}, {first.max_ulp} ulp ({first.origin}): {names}"


def _few(names: Sequence[str], most: int = 4) -> str:
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"


_ARRAY_COLUMNS = (
    Column("name"),
    Column("type"),
    Column("size", right=True, rank=5),
    Column("min", right=True, rank=2),
    Column("max", right=True, rank=2),
    Column("mean", right=True, rank=3),
    Column("nan", right=True, rank=1),
    Column("inf", right=True, rank=1),
    Column("zero", right=True, rank=4),
)


def statistics_table(statistics: Sequence[ArrayStatistics]) -> FittedTable:
    """Return a table with one row for each array."""
    return FittedTable(_ARRAY_COLUMNS, [_statistics_row(array) for array in statistics])


def _statistics_row(array: ArrayStatistics) -> list[str]:
    return [
        shown.lines(array.name),
        shown.array_type(array.dtype, array.shape),
        format_size(array.nbytes),
        number_text(array.minimum),
        number_text(array.maximum),
        number_text(array.mean),
        str(array.nan_count),
        str(array.inf_count),
        str(array.zero_count),
    ]
