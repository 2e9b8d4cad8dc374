"""Writes small snapshots that differ from an earlier one in their numbers and values alone.

A program that runs thousands of times writes the same module, names and surroundings each time.
What the first file was made of is kept, and the manifest's text is taken apart where the next ones
have something else, so that they are put together of bytes.
"""

from __future__ import annotations

import functools
import io
import secrets
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import blake3
import numpy as np

from snaprt.host.identities import identity
from snaprt.snapshot.format import arrays, schema
from snaprt.snapshot.format.small_zip import SmallZip, checksum, shown_time

_MOST_USES: Final = 64
"""Of a form with arrays that are large enough to compress: then it is seen anew if that pays."""

_NUMBERS: Final = ("execution_count", "step", "time")
"""What differs of an execution, in the order in which the manifest has it."""


_ENCODED_BYTES: Final = 16 << 20
"""When as much is kept of arrays, what was not asked for since half of it is let go."""
_ENTRY_BYTES: Final = 4 << 10
"""What an array counts for beside its content: it slows the garbage collector."""


class Encoded(NamedTuple):
    """An array as a member of a zip."""

    content: bytes | None  # None where the array's own bytes are taken
    checksum: int  # of the content, the header of the ``.npy`` included
    digest: str  # BLAKE3 of the elements, in hex
    # Whether an execution returned it. Of other arrays, the program may share the memory with
    # NumPy or by DLPack, and write to it, although JAX forbids that.
    is_result: bool

    def stands_for(self, values: memoryview, header_sum: int) -> bool:
        """Return whether it is still what these bytes become, where it has not its own."""
        return self.is_result or checksum(values, header_sum) == self.checksum


class EncodedArrays:
    """What the arrays that were written lately became, for those that are written again.

    Weights go into one execution after the other, and what a training step returns goes into the
    next. Large ones that are not compressed are not kept: their bytes are the array's own, which
    may be donated.
    """

    def __init__(self) -> None:
        # By identity; each with what refers to it, and the compression.
        self._recent: dict[int, tuple[weakref.ref[object], str, Encoded]] = {}
        self._older: dict[int, tuple[weakref.ref[object], str, Encoded]] = {}
        self._bytes = 0  # of the recent ones

    def get(self, source: object, compression: str) -> Encoded | None:
        """Return what an array became; None where it was not written lately.

        Args:
            source: An object that never changes and stands for the array's values.
            compression: One of ``schema.PLAIN_COMPRESSIONS``.
        """
        number = identity(source)
        known = self._recent.get(number)
        if known is None:
            known = self._older.get(number)
            if known is None:
                return None
        reference, compressed_as, encoded = known
        if reference() is not source or compressed_as != compression:
            return None
        if number not in self._recent:
            self.add(source, compression, encoded)
        return encoded

    def add(self, source: object, compression: str, encoded: Encoded) -> None:
        """Keep what an array became."""
        self._recent[identity(source)] = weakref.ref(source), compression, encoded
        self._bytes += len(encoded.content or b"") + _ENTRY_BYTES
        if self._bytes > _ENCODED_BYTES // 2:
            self._older, self._recent, self._bytes = self._recent, {}, 0


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

    def parts(
        self,
        execution: int,
        step: int,
        when: float,
        sources: Sequence[object],
        fetch: Callable[[int], np.ndarray],
        lately: EncodedArrays,
    ) -> Sequence[Any]:
        """Return a file in parts.

        Args:
            execution: Its number.
            step: How many steps came before.
            when: Seconds since 1970 when it began.
            sources: Of the arrays, which have the shapes and dtypes of the first file's: objects
                that never change.
            fetch: Returns the values of one, by its number.
            lately: What other arrays became, and these from now on.
        """
        archive = self._beginning(when)
        differing = [str(execution), str(step), repr(when)]
        is_result = self._manifest.execution.role == "outputs"
        for number, (array, source, (header, header_sum)) in enumerate(
            zip(self._manifest.arrays, sources, self._fixed.headers, strict=True)
        ):
            values: Any = None
            encoded = lately.get(source, array.compression)
            if encoded is None or encoded.content is None:
                stored = arrays.to_storage(fetch(number))
                values = arrays.bytes_of(stored)
                if encoded is None or not encoded.stands_for(values, header_sum):
                    encoded = _encode(stored, array.compression, header, header_sum, is_result)
                    lately.add(source, array.compression, encoded)
            pieces = (header, values) if encoded.content is None else (encoded.content,)
            archive.add(array.member, *pieces, known_checksum=encoded.checksum)
            if array.compression != "none":
                differing.append(str(len(pieces[0])))
            differing.append(encoded.digest)
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


def _encode(
    stored: np.ndarray, compression: str, header: bytes, header_sum: int, is_result: bool
) -> Encoded:
    if compression != "none":
        sink = io.BytesIO()
        digest = arrays.put(sink, stored, compression)
        content = sink.getvalue()
        return Encoded(content, checksum(content), digest, is_result)
    values = arrays.bytes_of(stored)
    joined = header + values.tobytes() if stored.nbytes < arrays.SMALL else None
    digest = blake3.blake3(values).hexdigest()
    return Encoded(joined, checksum(values, header_sum), digest, is_result)


def _unheard_of() -> int:
    return secrets.randbits(60) | 1 << 60
