"""Sizes to try, large ones first; it must not know of what."""

from __future__ import annotations

from collections.abc import Sequence


def positions(computed: Sequence[int]) -> list[int]:
    """Return how many instructions to leave out of a program: a half, a quarter, ..., one."""
    left_out, found = len(computed) // 2, []
    while left_out:
        found.append(left_out)
        left_out //= 2
    return found
