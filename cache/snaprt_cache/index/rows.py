"""What the index holds, as values: rows of entries, what a blob gives for one, usage figures.

Knows no SQL and no files.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from snaprt_cache.frame import BlobHeader


@dataclass(frozen=True)
class EntryRow:
    """One row of the table ``entries``, and whether the entry is pinned.

    Attributes:
        key: The key's digest, 64 hexadecimal digits.
        name: The program, as its maker called it.
        kind: What the payload is, such as ``compiled``.
        platform: Such as ``cpu``.
        device_kind: Such as ``TPU v5e``.
        jax_version: Of the process that made it.
        jaxlib_version: Of the process that made it.
        compile_seconds: What making it cost.
        payload_bytes: Its size before compression.
        stored_bytes: The size of its blob file.
        created: Unix time in seconds.
        last_used: Unix time in seconds; 0 if it was never hit.
        hits: How often it was hit.
        saved_seconds: What its hits saved together.
        worth: What keeping it is worth; the one with the least is evicted first.
        pinned: Whether it is never evicted, which no column says but a file.
    """

    key: str
    name: str = ""
    kind: str = ""
    platform: str = ""
    device_kind: str = ""
    jax_version: str = ""
    jaxlib_version: str = ""
    compile_seconds: float = 0.0
    payload_bytes: int = 0
    stored_bytes: int = 0
    created: float = 0.0
    last_used: float = 0.0
    hits: int = 0
    saved_seconds: float = 0.0
    worth: float = 0.0
    pinned: bool = False


@dataclass(frozen=True)
class IndexedEntry:
    """An entry's row and the named parts of its key."""

    row: EntryRow
    parts: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Usage:
    """How often an entry was hit since this was last written, when last, and what that saved."""

    hits: int
    last_used: float
    saved_seconds: float


# A key names a file, so one that came out of a damaged or foreign index is never taken as it is.
KEY_NAME: Final = re.compile(r"[0-9a-f]{64}")
USAGE_COLUMNS: Final = frozenset(field.name for field in dataclasses.fields(Usage))
_COLUMN_TYPES: Final[Mapping[str, Callable[[Any], Any]]] = {
    field.name: str if field.name == "key" else type(field.default)
    for field in dataclasses.fields(EntryRow)
    if field.name != "pinned"
}


def is_key(text: object) -> bool:
    """Return whether this is the digest of a key, 64 hexadecimal digits."""
    return isinstance(text, str) and KEY_NAME.fullmatch(text) is not None


def indexed_entry(header: BlobHeader) -> IndexedEntry:
    """Return what the index holds about a blob."""

    def text(name: str) -> str:
        return _text(header.metadata.get(name, ""))

    row = EntryRow(
        key=header.key.digest,
        name=text("name"),
        kind=text("kind"),
        platform=text("platform"),
        device_kind=text("device_kind"),
        jax_version=text("jax_version"),
        jaxlib_version=text("jaxlib_version"),
        compile_seconds=compile_seconds(header),
        payload_bytes=header.payload_bytes,
        stored_bytes=header.header_bytes + header.stored_bytes,
        created=_number(header.created),
    )
    parts = tuple((_text(part.name), _text(part.value)) for part in header.key.parts)
    return IndexedEntry(row, parts)


def compile_seconds(header: BlobHeader) -> float:
    """Return what making a blob's payload cost, as its maker said; 0 if that is no number."""
    return _number(header.metadata.get("compile_seconds", 0.0))


def entry_row(columns: Mapping[str, Any]) -> EntryRow:
    """Return a row from its columns.

    Raises:
        ValueError: A column holds what it should not: SQLite checks no types, and a damaged page
            can hold anything.
    """
    try:
        values: dict[str, Any] = {
            name: convert(columns[name]) for name, convert in _COLUMN_TYPES.items()
        }
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"a row cannot be read: {error!r}") from error
    if not is_key(values["key"]):
        raise ValueError("a row has no key")
    return EntryRow(**values)


def _number(value: str | float) -> float:
    """Return a number that a column can hold; what is none counts as 0."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _text(value: object) -> str:
    """Return text that a column can hold: halves of surrogate pairs cannot be stored."""
    return str(value).encode("utf-8", "replace").decode("utf-8")
