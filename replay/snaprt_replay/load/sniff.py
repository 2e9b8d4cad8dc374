"""Detect the format of a file from its content.

File names do not matter: a renamed dump is still recognized.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from snaprt.errors import SnapshotError
from snaprt.hlo.wire import delimited, fields
from snaprt.host.regular_files import open_file
from snaprt.shown import shell_word
from snaprt.snapshot.format import places
from snaprt.snapshot.format.places import is_snapshot

SNAPSHOT: Final = "snaprt snapshot"
PACK: Final = "snaprt packed file"
MLIR_TEXT: Final = "StableHLO text"
MLIR_BYTECODE: Final = "StableHLO bytecode"
HLO_TEXT: Final = "HLO text"
HLO_SNAPSHOT: Final = "XLA HloSnapshot"
HLO_UNOPTIMIZED_SNAPSHOT: Final = "XLA HloUnoptimizedSnapshot"
HLO_MODULE: Final = "XLA HLO module proto"

_HEAD_BYTES = 1 << 16
_FIRST_FIELD = 0x0A  # the tag of the field 1 of a message, if bytes are in it


def sniff(path: Path) -> str:
    """Return the name of the format of the file at ``path``, one of this module's constants.

    Raises:
        SnapshotError: It cannot be read, or has no format that can be replayed.
    """
    if places.pack_of(path) is not None:
        return SNAPSHOT  # a packed file contains nothing else that can be replayed
    try:
        with open_file(path) as file:
            empty = not os.fstat(file.fileno()).st_size
            # Not closed explicitly: views of it may outlive this call.
            content = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise SnapshotError(
            f"there is no file {path}", hint="check the path and that the disk is mounted"
        ) from error
    except IsADirectoryError as error:
        raise SnapshotError(
            f"{path} is a directory, not a file to replay", hint=f"name files in it: {path}/*.snap"
        ) from error
    except OSError as error:
        raise SnapshotError(
            f"cannot read {path}: {error.strerror or error}",
            hint="name a file that you have permission to read",
        ) from error
    if empty:
        raise SnapshotError(f"{path} is empty", hint=_why_empty(path))
    view = memoryview(content)
    head = bytes(view[:_HEAD_BYTES])
    for name, matches in _FORMATS:
        if matches(head):
            return name
    for name, matches_all in _PROTO_FORMATS:
        if matches_all(view):
            return name
    raise SnapshotError(
        f"{path} is not a file that snaprt can replay{_what_it_is(head)}",
        hint=_what_to_do(path, head),
    )


def _why_empty(path: Path) -> str:
    if path.suffix == ".pb":
        return (
            "XLA writes an empty file for snapshots over 2 GB; record the program with snaprt, "
            "which has no such limit"
        )
    return "the program that wrote it may have been killed, or its disk may have been full"


def _is_bytecode(head: bytes) -> bool:
    return head.startswith(b"ML\xefR")


_COMMENTS = re.compile(r"(\s+|//[^\n]*(\n|$)|/\*.*?\*/)*", re.DOTALL)


def _text(head: bytes) -> str:
    """Return the head of a text file after whitespace and comments; "" if it is not text."""
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4:  # not just a character that the end of the head splits
            return ""
        text = head[: error.start].decode("utf-8")
    match = _COMMENTS.match(text)
    return text[match.end() if match else 0 :]


def _is_hlo_text(head: bytes) -> bool:
    return _text(head).startswith("HloModule")


_MLIR_START = re.compile(r'(builtin\.|")?(builtin\.)?module\b|"?func\.func\b|#\w+ *=|![\w.]+ *=')


def _is_mlir_text(head: bytes) -> bool:
    return _MLIR_START.match(_text(head)) is not None


def _first(message: memoryview | None, number: int) -> memoryview | None:
    """Return the first length-delimited field with that number; None if there is none."""
    if message is None:
        return None
    try:
        for at, value in fields(message):
            if at == number and not isinstance(value, int):
                return value
    except ValueError:
        pass
    return None


def _is_module(message: memoryview | None) -> bool:
    """Return whether it has an HloModuleProto's name (1), entry name (2) and computations (3)."""
    names = _first(message, 1), _first(message, 2)
    return all(map(_is_name, names)) and _is_name(_first(_first(message, 3), 1))


def _is_name(content: memoryview | None) -> bool:
    text = bytes(content[:_HEAD_BYTES]) if content else b""
    return bool(text) and text.isascii() and text.decode().isprintable()


def _is_hlo_snapshot(message: memoryview) -> bool:
    return _is_module(_first(_first(message, 1), 1))


def _is_unoptimized_snapshot(content: memoryview) -> bool:
    message, _ = unoptimized_snapshot(content)
    has_length = len(message) < len(content)
    return _is_module(_first(message, 1)) and (has_length or _first(message, 2) is not None)


def unoptimized_snapshot(content: memoryview) -> tuple[memoryview, memoryview]:
    """Return the HloUnoptimizedSnapshot that a file holds, and the arguments that follow it.

    With ``--xla_dump_hlo_as_proto``, its length precedes it, and the arguments follow it, which a
    protobuf message of any size could not hold. Without, it is all of the file.
    """
    # It begins with its module, and as a length this byte would mean that it has 10 bytes.
    if not content or content[0] == _FIRST_FIELD:
        return content, content[:0]
    try:
        return delimited(content)
    except ValueError:
        return content, content[:0]


def _is_hlo_module(message: memoryview) -> bool:
    return _is_module(message) or _is_module(_first(message, 1))  # or an HloProto around it


_FORMATS: Final[tuple[tuple[str, Callable[[bytes], bool]], ...]] = (
    (SNAPSHOT, is_snapshot),
    (PACK, places.is_pack),
    (MLIR_BYTECODE, _is_bytecode),
    (HLO_TEXT, _is_hlo_text),
    (MLIR_TEXT, _is_mlir_text),
)
# The first that matches, in this order.
_PROTO_FORMATS: Final[tuple[tuple[str, Callable[[memoryview], bool]], ...]] = (
    (HLO_SNAPSHOT, _is_hlo_snapshot),
    (HLO_UNOPTIMIZED_SNAPSHOT, _is_unoptimized_snapshot),
    (HLO_MODULE, _is_hlo_module),
)
FORMATS: Final = tuple(name for name, _ in (*_FORMATS, *_PROTO_FORMATS))

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_DECOMPRESSING: Final = ((_GZIP, "gunzip --keep"), (_ZSTD, "unzstd"))
_FOREIGN: Final = (
    (b"PK\x03\x04", "a zip archive or .npz file"),
    (b"\x93NUMPY", "a .npy array"),
    (_GZIP, "a file compressed with gzip"),
    (_ZSTD, "a file compressed with zstd"),
    (b"\x7fELF", "a program or library"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x80\x04\x95", "a Python pickle"),
    (b"%PDF", "a PDF"),
    (b"\x89PNG", "an image"),
    (b"#!", "a script"),
)


_DUMP_AS_PROTO: Final = "dump it with --xla_dump_hlo_as_proto and without --xla_dump_hlo_as_text"
_PROTO_TEXT_START = re.compile(r"hlo(_module)? *\{")


def _is_proto_text(head: bytes) -> bool:
    """Return whether it is one of XLA's messages as text, from which nothing reads it back."""
    return _PROTO_TEXT_START.match(_text(head)) is not None


def _what_to_do(path: Path, head: bytes) -> str:
    for magic, command in _DECOMPRESSING:
        if head.startswith(magic):
            return f"decompress it: {command} {shell_word(str(path))}"
    return _DUMP_AS_PROTO if _is_proto_text(head) else f"supported files: {', '.join(FORMATS)}"


def _what_it_is(head: bytes) -> str:
    for magic, words in _FOREIGN:
        if head.startswith(magic):
            return f": it looks like {words}"
    if _is_proto_text(head):
        return ": it is a snapshot or module that XLA wrote as text"
    return ": it is text, but not a module" if _text(head) else ""
