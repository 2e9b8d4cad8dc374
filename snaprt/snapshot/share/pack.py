"""Makes one file of an execution's snapshots and their stored arrays, and folders of it again.

A packed file is a zip whose members are the files as they were, bit for bit, so that unpacking is
copying; ``places.py`` reads them where they are.
"""

from __future__ import annotations

import contextlib
import filecmp
import os
import re
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from snaprt.errors import SnapshotError, UsageError
from snaprt.host.whole_files import (
    refuse_device,
    remedy,
    remove_leftovers,
    temporary_folder,
    temporary_name,
    whole_file,
    writing,
)
from snaprt.snapshot.format import places, schema, store
from snaprt.snapshot.format.arrays import PIECE
from snaprt.snapshot.format.read import SnapshotFile, open_snapshot
from snaprt.snapshot.format.write import write_snapshot
from snaprt.snapshot.share.executions import whole_executions
from snaprt.snapshot.share.redact import Redaction, RedactionKind, redact

COMMENT: Final = b"snaprt-pack 1.0"
_COMMENT: Final = re.compile(rb"snaprt-pack (\d{1,6})\.\d+")
_MAJOR: Final = 1


@dataclass(frozen=True)
class Packed:
    """What went into a packed file, or came out of it."""

    path: Path  # the packed file
    snapshots: tuple[str, ...]  # their names
    arrays: int  # how many stored arrays
    bytes: int  # of all of these together
    notes: tuple[str, ...] = ()  # what who shares it should know


def pack(
    files: Sequence[Path], out: Path, kinds: Sequence[RedactionKind] = (), replace: bool = False
) -> Packed:
    """Make one self-contained file of snapshots and the stored arrays that they refer to.

    Args:
        files: Snapshots; the other files of the same executions are taken too.
        out: The packed file; it appears whole or not at all.
        kinds: What to take out: see ``redact.py``.
        replace: Whether ``out`` may be there already.

    Raises:
        SnapshotError: A file is damaged or missing, or cannot be written.
        UsageError: Two files have one name, or ``out`` is there, or is no file.
    """
    refuse_device(out)
    if out.exists() and not replace:
        raise UsageError(f"{out} already exists", hint="name another file, or pass --replace")
    paths = whole_executions(files)
    with writing_shared(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(out) as file:
            packed = _write(file, paths, out, kinds)
            file.flush()
            os.fsync(file.fileno())
    return packed


def _write(
    file: BinaryIO, paths: Sequence[Path], out: Path, kinds: Sequence[RedactionKind]
) -> Packed:
    snapshots: dict[str, None] = {}
    arrays: dict[str, None] = {}
    notes: dict[str, None] = {}
    redaction = Redaction(frozenset(kinds)) if kinds else None
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.comment = COMMENT
        archive.writestr(zipfile.ZipInfo(schema.MARK_MEMBER), places.PACK_MARK)
        for path in paths:
            snapshot = open_snapshot(path)
            with _shareable(snapshot, redaction, out.parent) as (shared, remarks):
                notes |= dict.fromkeys(remarks)
                name = shared.path.name
                if name in snapshots:
                    raise UsageError(
                        f"two of the files are named {name}", hint="pack them one by one"
                    )
                snapshots[name] = None
                shared.check()
                _add(archive, name, shared.path)
                referenced = {array.member for array in shared.manifest.arrays if array.in_store}
                for member, stored in snapshot.stored_files().items():
                    if member in referenced and member not in arrays:
                        snapshot.check_stored(member)
                        arrays[member] = None
                        _add(archive, member, stored)
    return Packed(out, tuple(snapshots), len(arrays), file.tell(), tuple(notes))


@contextlib.contextmanager
def _shareable(
    snapshot: SnapshotFile, redaction: Redaction | None, beside: Path
) -> Iterator[tuple[SnapshotFile, tuple[str, ...]]]:
    if redaction is None:
        yield snapshot, ()
        return
    contents, notes = redact(snapshot, redaction)
    with temporary_folder(beside, "pack") as folder:
        path = folder / schema.file_name(contents.execution)
        write_snapshot(path, contents)
        yield open_snapshot(path), notes


def _add(archive: zipfile.ZipFile, name: str, path: Path) -> None:
    info = zipfile.ZipInfo(name)
    info.external_attr = 0o644 << 16
    with places.open_bytes(path) as source, archive.open(info, "w", force_zip64=True) as sink:
        shutil.copyfileobj(source, sink, PIECE)


def unpack(pack: Path, folder: Path) -> Packed:
    """Write the files in a packed file into a folder, as they were.

    Raises:
        SnapshotError: It is none, or damaged, or the folder cannot be written.
        UsageError: A snapshot is there already with another content.
    """
    snapshots, arrays, size = [], 0, 0
    for place in (folder, folder / store.FOLDER):
        remove_leftovers(place)
    for name in _checked_members(pack):
        target = folder / name
        temporary = folder / temporary_name(target.name)
        with writing_shared(target, "unpack into another folder"):
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                _extract(pack, name, temporary)
                size += temporary.stat().st_size
                if not target.exists():
                    os.replace(temporary, target)
                elif not filecmp.cmp(temporary, target, shallow=False):
                    raise UsageError(
                        f"{target} already exists with different content",
                        hint="unpack into another folder",
                    )
            finally:
                temporary.unlink(missing_ok=True)
        is_array = store.MEMBER.fullmatch(name) is not None
        arrays += is_array
        snapshots += [] if is_array else [name]
    return Packed(pack, tuple(snapshots), arrays, size)


def _checked_members(pack: Path) -> Sequence[str]:
    """Return the names of a packed file's members, none of which leads out of a folder."""
    if not places.is_pack_file(pack):
        missing = (
            f"there is no file {pack}" if not pack.exists() else f"{pack} is not a packed file"
        )
        raise SnapshotError(missing, hint="`snaprt pack` writes packed files")
    try:
        with pack.open("rb") as file:
            comment, members = places.directory(file)
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        raise _damaged(pack, error) from error
    version = _COMMENT.match(comment)
    if version and int(version[1]) > _MAJOR:
        raise SnapshotError(
            f"{pack} was packed by a newer snaprt, format {int(version[1])}",
            hint="pip install --upgrade snaprt",
        )
    names = [name for name in members if name != schema.MARK_MEMBER]
    for name in names:
        is_snapshot = name.endswith(places.SNAPSHOT_SUFFIX) and not re.search(r"[/\\:]|^\.", name)
        if not is_snapshot and not store.MEMBER.fullmatch(name):
            raise SnapshotError(f"{pack} is damaged: it holds a member {name!r:.200}")
    return names


def _extract(pack: Path, name: str, target: Path) -> None:
    try:
        # The zip's own checksum is verified on the way.
        with (
            zipfile.ZipFile(pack) as archive,
            archive.open(name) as source,
            target.open("xb") as sink,
        ):
            shutil.copyfileobj(source, sink, PIECE)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise _damaged(pack, error) from error


def writing_shared(
    path: Path, elsewhere: str = "name a file in an existing directory"
) -> AbstractContextManager[None]:
    """Return the scope that raises `SnapshotError` if a file to be shared cannot be written."""
    return writing(f"write {path}", elsewhere, kind=SnapshotError, hint=remedy)


def _damaged(pack: Path, error: Exception) -> SnapshotError:
    return SnapshotError(f"{pack} is damaged: {error}", hint="get the file again from its source")
