"""Sizes, durations and sets of numbers as people write and read them, the same everywhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?B)?|B)?", re.IGNORECASE | re.ASCII)
_POWERS: Final = {"K": 1, "M": 2, "G": 3, "T": 4}

#: 23 days: the system's calls that wait take little more.
MOST_SECONDS: Final = 2_000_000

_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII)
_SECONDS: Final = {
    "us": 1e-6,
    "ms": 1e-3,
    "": 1.0,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "w": 7 * 86400.0,
}


def parse_size(text: str) -> int:
    """Return a number of bytes.

    Args:
        text: ``1000``, ``500MB`` (powers of 1,000), ``500M`` or ``500MiB`` (powers of 1,024), as
            the commands of GNU take them; K, M, G and T, small or large.

    Raises:
        ValueError: It is no size.
    """
    size = _SIZE.fullmatch(text.strip())
    if size is None:
        raise ValueError(text)
    number, unit, suffix = size.groups()
    base = 1000 if (suffix or "").upper() == "B" else 1024
    try:
        return int(float(number) * base ** (_POWERS[unit.upper()] if unit else 0))
    except OverflowError:  # hundreds of digits
        raise ValueError(text) from None


def parse_duration(text: str) -> float:
    """Return seconds.

    Args:
        text: ``250us``, ``1.5 ms``, ``30`` or ``30s``, ``5m`` or ``5min``, ``12h``, ``3d``, ``2w``.

    Raises:
        ValueError: It is no duration.
    """
    duration = _DURATION.fullmatch(text.strip())
    if duration is None or duration[2] not in _SECONDS:
        raise ValueError(text)
    return float(duration[1]) * _SECONDS[duration[2]]


def counted(count: int, singular: str, plural: str = "") -> str:
    """Return a number with its noun: ``1 entry``, ``1,200 entries``."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def first_names(names: Iterable[str], most: int) -> str:
    """Return the first names of many: ``add, mul, ...``."""
    listed = list(names)
    return ", ".join(listed[:most]) + (", ..." if len(listed) > most else "")


def format_size(count: float) -> str:
    """Return a number of bytes in the decimal unit that suits it: ``512 B``, ``1.5 MB``."""
    if count < 1000:
        return f"{count:.0f} B"
    units = ["kB", "MB", "GB", "TB"]
    size = count / 1000
    while size >= 999.95 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.1f} {units[0]}"


def format_duration(seconds: float) -> str:
    """Return a duration in the unit that suits it: ``12 us``, ``1.5 ms``, ``0.25 s``, ``2.0 h``."""
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 60:
        return f"{seconds / 60:.1f} min"
    if seconds >= 0.1 or not seconds:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def aligned(rows: Sequence[Sequence[str]], text_columns: int = 1) -> list[str]:
    """Return rows of cells as lines, the first columns aligned to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place < text_columns else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def format_spans(numbers: Iterable[int]) -> str:
    """Return different numbers in order, with runs of them as spans: ``0-2, 5``."""
    spans: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1] = spans[-1][0], number
        else:
            spans.append((number, number))
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in spans)
