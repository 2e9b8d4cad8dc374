"""Writes small snapshots that differ from an earlier one in their numbers and values alone.

A program that runs thousands of times writes the same module, names and surroundings each time.
What the first file was made of is kept, and the manifest's text is taken apart where the next ones
have something else, so that they are put together of bytes.
"""

from __future__ import annotations

import functools
import io
import secrets
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import blake3

from snaprt.snapshot.format import arrays, schema
from snaprt.snapshot.format.small_zip import SmallZip, checksum, shown_time

_MOST_USES: Final = 64
"""Of a form with arrays that are large enough to compress: then it is seen anew if that pays."""

_NUMBERS: Final = ("execution_count", "step", "time")
"""What differs of an execution, in the order in which the manifest has it."""


class _Fixed(NamedTuple):
    name: tuple[str, str]  # of the file, around the number of the execution
    texts: tuple[bytes, ...]  # of the manifest, each second one to be filled
    headers: tuple[tuple[bytes, int], ...]  # of the arrays, with their checksums


class Form:
    """What small snapshots have in common that differ in their numbers and values alone.

    Args:
        manifest: Of one of them; its arrays lie in it.
        members: The members before the arrays: their names, contents and checksums.
    """

    def __init__(
        self, manifest: schema.Manifest, members: Sequence[tuple[str, bytes, int]]
    ) -> None:
        self._manifest = manifest
        self._members = members
        self._begun: dict[tuple[int, int], SmallZip] = {}  # by the time that it shows
        self._has_large = any(array.raw_bytes >= arrays.SMALL for array in manifest.arrays)
        self._uses = 0

    @classmethod
    def of(
        cls, manifest: schema.Manifest, members: Sequence[tuple[str, bytes, int]]
    ) -> Form | None:
        """Return the form of a small snapshot; None where the next one may have other members."""
        is_plain = all(
            array.compression in schema.PLAIN_COMPRESSIONS and not (array.in_store or array.seeded)
            for array in manifest.arrays
        )
        return cls(manifest, members) if is_plain and manifest.trace_error is None else None

    def is_for_another(self, store: Any) -> bool:
        """Return whether another file may have it, where the store is to keep large arrays."""
        self._uses += 1
        return not self._has_large or (self._uses <= _MOST_USES and store is None)

    def file_name(self, execution: int) -> str:
        """Return the name of the file of an execution, by its number."""
        before, after = self._fixed.name
        return f"{before}{execution:06d}{after}"

    def parts(self, execution: int, step: int, when: float, values: Sequence[Any]) -> Sequence[Any]:
        """Return a file in parts.

        Args:
            execution: Its number.
            step: How many steps came before.
            when: Seconds since 1970 when it began.
            values: Of the arrays, which have the shapes and dtypes of the first file's.
        """
        archive = self._beginning(when)
        differing = [str(execution), str(step), repr(when)]
        for array, (header, header_sum), value in zip(
            self._manifest.arrays, self._fixed.headers, values, strict=True
        ):
            stored = arrays.to_storage(value)
            if array.compression == "none":
                content = arrays.bytes_of(stored)
                digest = blake3.blake3(content).hexdigest()
                sum_ = checksum(content, after=header_sum)
                archive.add(array.member, header, content, known_checksum=sum_)
            else:
                sink = io.BytesIO()
                digest = arrays.put(sink, stored, array.compression)
                archive.add(array.member, sink.getvalue())
                differing.append(str(sink.tell()))
            differing.append(digest)
        texts = list(self._fixed.texts)
        texts[1::2] = "\n".join(differing).encode().split()
        text = b"".join(texts)
        archive.add(schema.MANIFEST_MEMBER, text)
        digest = blake3.blake3(text).hexdigest()
        return archive.closed(schema.comment(self._manifest, digest))

    def _beginning(self, when: float) -> SmallZip:
        """Return a zip with the members before the arrays, made once for all that show one time."""
        clock_time = shown_time(int(when))
        begun = self._begun.get(clock_time)
        if begun is None:
            archive = SmallZip(clock_time)
            for member, content, sum_ in self._members:
                archive.add(member, content, known_checksum=sum_)
            self._begun = {clock_time: (begun := archive.joined())}
        return SmallZip(clock_time, begun)

    @functools.cached_property  # many programs run once
    def _fixed(self) -> _Fixed:
        """What stays, around what differs, found by what nobody has written in its place."""
        manifest = self._manifest
        numbers: list[Any] = [_unheard_of() for _ in _NUMBERS]
        execution = schema.changed(manifest.execution, **dict(zip(_NUMBERS, numbers, strict=True)))
        differing = numbers.copy()
        records = []
        for array in manifest.arrays:
            other: dict[str, Any] = {"digest": secrets.token_hex(32)}
            if array.compression != "none":
                other = {"stored_bytes": _unheard_of(), **other}
            differing += other.values()
            records.append(schema.changed(array, **other))
        rest = schema.to_json(schema.changed(manifest, execution=execution, arrays=tuple(records)))
        texts: list[bytes] = []
        for different in differing:
            same, separator, rest = rest.partition(str(different).encode())
            assert separator, "the manifest has what differs in another order"
            texts += (same, b"")
        before, _, after = schema.file_name(execution).partition(str(numbers[0]))
        headers = [arrays.npy_header(array.stored_dtype, array.stored_shape) for array in records]
        return _Fixed(
            (before, after),
            (*texts, rest),
            tuple([(header, checksum(header)) for header in headers]),
        )


def _unheard_of() -> int:
    return secrets.randbits(60) | 1 << 60
