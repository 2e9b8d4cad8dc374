"""Tables of comparisons and of arrays, as people read them; it must not know commands or files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text
from snaprt_replay.array_statistics import ArrayStatistics
from snaprt_replay.results import (
    IDENTICAL,
    MISMATCH,
    WITHIN_TOLERANCE,
    Comparison,
    OutputComparison,
    Place,
    Verdict,
)
from snaprt_replay.tolerance import EXACT

_STYLES: dict[Verdict, str] = {IDENTICAL: "green", WITHIN_TOLERANCE: "yellow", MISMATCH: "bold red"}
_NOTHING = "-"


def printable(text: str) -> str:
    """Return text from a file without what a terminal would obey."""
    return "".join(
        one if one.isprintable() or one in "\n\t" else f"\\x{ord(one):02x}" for one in text
    )


def type_text(dtype: str, shape: Sequence[int]) -> str:
    """Return a type as in ``float32[3,2]``."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def number_text(value: float | int | None) -> str:
    """Return a number in few characters; "-" for None."""
    if value is None:
        return _NOTHING
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def bytes_text(count: int) -> str:
    """Return a number of bytes in the unit that suits it."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def seconds_text(seconds: float) -> str:
    """Return a time in the unit that suits it."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def place_text(place: Place | None) -> str:
    """Return an index as in ``[3,2]``; "" where there is none, or it is a scalar's."""
    return f"[{','.join(map(str, place.index))}]" if place and place.index else ""


def verdict_text(verdict: Verdict) -> Text:
    """Return a verdict in its words and its colour."""
    return Text(verdict, style=_STYLES[verdict])


def _new_table(columns: Iterable[str], right: frozenset[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return table


_COMPARISON_COLUMNS = (
    *("output", "type", "verdict", "differing", "max ulp", "p99 ulp", "max abs error", "at"),
    *("max rel error", "nan/inf", "cosine"),
)
_LEFT_ALIGNED = frozenset({"output", "type", "verdict", "at", "dtype"})


def comparison_table(comparison: Comparison) -> Table:
    """Return a table with one row for each output."""
    right = frozenset(_COMPARISON_COLUMNS) - _LEFT_ALIGNED
    table = _new_table(_COMPARISON_COLUMNS, right)
    for output in comparison.outputs:
        table.add_row(*_comparison_row(output))
    return table


def _comparison_row(output: OutputComparison) -> list[str | Text]:
    is_exact = output.max_ulp is None
    return [
        printable(output.name),
        type_text(output.dtype, output.shape),
        verdict_text(output.verdict),
        _share_text(output),
        _NOTHING if is_exact else number_text(output.max_ulp),
        _NOTHING if is_exact else number_text(output.p99_ulp),
        number_text(output.max_abs_error),
        place_text(output.worst_abs),
        number_text(output.max_rel_error),
        str(output.specials.confused),
        _NOTHING if output.cosine is None else f"{output.cosine:.9g}",
    ]


def _share_text(output: OutputComparison) -> str:
    if not output.differing:
        return "0"
    return f"{output.differing} ({output.share_differing:.2%})"


def tolerance_lines(comparison: Comparison) -> list[str]:
    """Return one line for each kind of tolerance, with the outputs it was applied to."""
    kinds: dict[tuple[str, float, int], list[OutputComparison]] = {}
    for output in comparison.outputs:
        if output.tolerance is not None:
            one = output.tolerance
            kinds.setdefault((one.origin, one.rtol, one.max_ulp), []).append(output)
    return [_tolerance_line(outputs) for outputs in kinds.values()]


def _tolerance_line(outputs: Sequence[OutputComparison]) -> str:
    names = _few([printable(output.name) for output in outputs])
    tolerances = [output.tolerance for output in outputs if output.tolerance is not None]
    one = tolerances[0]
    if one == EXACT:
        return f"none, exact types: {names}"
    atols = sorted({f"{tolerance.atol:.2g}" for tolerance in tolerances}, key=float)
    atol = atols[0] if len(atols) == 1 else f"{atols[0]} to {atols[-1]}"
    return f"rtol {one.rtol:.2g}, atol {atol}, {one.max_ulp} ulp ({one.origin}): {names}"


def _few(names: Sequence[str], most: int = 4) -> str:
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"


_ARRAY_COLUMNS = ("name", "type", "size", "min", "max", "mean", "nan", "inf", "zero")


def statistics_table(statistics: Sequence[ArrayStatistics]) -> Table:
    """Return a table with one row for each array."""
    table = _new_table(_ARRAY_COLUMNS, frozenset(_ARRAY_COLUMNS) - {"name", "type"})
    for array in statistics:
        table.add_row(
            printable(array.name),
            type_text(array.dtype, array.shape),
            bytes_text(array.nbytes),
            number_text(array.minimum),
            number_text(array.maximum),
            number_text(array.mean),
            str(array.nan_count),
            str(array.inf_count),
            str(array.zero_count),
        )
    return table
