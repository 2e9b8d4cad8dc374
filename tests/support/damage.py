"""Damage to files, as a failing disk does."""

from __future__ import annotations

from pathlib import Path


def flip_bit(path: Path, place: int, bit: int = 0) -> None:
    """Change one bit of the byte at a place in a file; a negative place counts from its end."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)
