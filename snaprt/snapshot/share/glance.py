"""Reads of a snapshot what a list shows, in one go; what it does not understand, others read.

Opening a file with all its checks takes a millisecond, which thousands of files cannot be given.
Here the manifest alone is read and compared with its digest; where anything is unusual, the file is
opened as everywhere else, and what is wrong with it is said there.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import blake3

from snaprt.snapshot.format import places, schema
from snaprt.snapshot.format.read import is_snapshot, open_snapshot

_TAIL: Final = 32 << 10  # bytes: the manifest of a small program, and the directory behind it
_END: Final = struct.Struct("<4s4H2LH")
_ENTRY: Final = struct.Struct("<4s6H3L5H2L")
_NAME: Final = schema.MANIFEST_MEMBER.encode()


@dataclass(frozen=True)
class Glance:
    """What a list shows of a snapshot; the fields are those of its manifest.

    Attributes:
        path: The file.
        file_bytes: Its size.
        role: ``inputs`` or ``outputs``.
        graph: The program's name.
        graph_id: 16 hex digits.
        step: Steps that came before; -1 where nobody counted them.
        execution: Executions of the same executable that came before.
        process: The process it ran in.
        device: Platform and number.
        device_index: Place of the device among the executable's own.
        reason: What made it be recorded.
        error: What it failed with.
        redacted: What was taken out.
        types: Dtype and shape of each array.
        stored: Name and size of each array that lies in the store.
    """

    path: Path
    file_bytes: int
    role: schema.Role
    graph: str
    graph_id: str
    step: int
    execution: int
    process: int
    device: str
    device_index: int
    reason: str
    error: str
    redacted: tuple[str, ...]
    types: tuple[tuple[str, tuple[int, ...]], ...]
    stored: tuple[tuple[str, int], ...]


def at(path: Path) -> Glance:
    """Return what a list shows of a snapshot.

    Raises:
        SnapshotError: As `open_snapshot`.
    """
    try:
        return _quick(path)
    except (OSError, ValueError, KeyError, TypeError, IndexError, struct.error):
        file = open_snapshot(path)
        execution = file.manifest.execution
        return Glance(
            path=path,
            file_bytes=places.size(path),
            role=file.role,
            graph=execution.name,
            graph_id=execution.graph_id,
            step=execution.step,
            execution=execution.execution_count,
            process=execution.process,
            device=f"{execution.device.platform} {execution.device.id}",
            device_index=execution.device_index,
            reason=execution.reason,
            error=execution.error,
            redacted=execution.redacted,
            types=tuple((one.dtype, one.shape) for one in file.manifest.arrays),
            stored=tuple(
                (one.member, one.stored_bytes) for one in file.manifest.arrays if one.in_store
            ),
        )


def _quick(path: Path) -> Glance:
    body, size = _manifest(path)
    execution, device = body["execution"], body["execution"]["device"]
    types = tuple((one["dtype"], tuple(one["shape"])) for one in body["arrays"])
    found = Glance(
        path=path,
        file_bytes=size,
        role=execution["role"],
        graph=execution["name"],
        graph_id=execution["graph_id"],
        step=execution["step"],
        execution=execution["execution_count"],
        process=execution["process"],
        device=f"{device['platform']} {device['id']}",
        device_index=execution["device_index"],
        reason=execution["reason"],
        error=execution["error"],
        redacted=tuple(execution["redacted"]),
        types=types,
        stored=tuple(
            (one["member"], one["stored_bytes"]) for one in body["arrays"] if one["in_store"]
        ),
    )
    if not (found.role in schema.ROLES and _is_sound(found)):
        raise ValueError("a value is of another kind")
    return found


def _is_sound(found: Glance) -> bool:
    numbers = [found.step, found.execution, found.process, found.device_index]
    words = [found.graph, found.graph_id, found.reason, found.error, *found.redacted]
    for dtype, shape in found.types:
        words.append(dtype)
        numbers += shape
    for member, size in found.stored:
        words.append(member)
        numbers.append(size)
    return all(type(one) is int for one in numbers) and all(type(one) is str for one in words)


def _manifest(path: Path) -> tuple[Any, int]:
    """Return the manifest of a file that ends as ours do, and the size of the file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        size = os.fstat(descriptor).st_size
        start = max(0, size - _TAIL)
        tail = os.pread(descriptor, _TAIL, start)
        head = tail if not start else os.pread(descriptor, 80, 0)
    finally:
        os.close(descriptor)
    at_end = tail.rindex(b"PK\x05\x06")
    *_, length, offset, comment_length = _END.unpack_from(tail, at_end)
    comment = tail[at_end + _END.size :]
    parsed = schema.parse_comment(comment)
    if (
        not is_snapshot(head)
        or len(comment) != comment_length
        or offset + length != start + at_end
        or parsed is None
        or parsed[0] > schema.FORMAT_MAJOR
    ):
        raise ValueError("not as usual")
    at_entry = tail.rindex(_NAME, offset - start, at_end) - _ENTRY.size
    fields = _ENTRY.unpack_from(tail, at_entry)
    content, header = fields[9], fields[16] - start
    name_length, extra_length = struct.unpack_from("<HH", tail, header + 26)
    if header < 0 or fields[10] != len(_NAME):
        raise ValueError("not as usual")
    begin = header + 30 + name_length + extra_length
    text = tail[begin : begin + content]
    if blake3.blake3(text).hexdigest() != parsed[1]:
        raise ValueError("the manifest's digest does not match")
    return json.loads(text), size
