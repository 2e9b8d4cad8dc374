"""Removes stored arrays that no snapshot refers to.

No lock is taken: who stores or reuses an array makes its file new, and only files that have been
old for a while are looked at. One that becomes new while it is being removed is put back.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from snaprt.errors import SnapshotError
from snaprt.host.whole_files import remedy, remove_leftovers, temporary_name, writing
from snaprt.snapshot.format import places, schema, store
from snaprt.snapshot.format.read import open_snapshot

AGE: Final = 3600.0
"""Seconds: an array is stored before the snapshot that refers to it; in less time than this."""


@dataclass(frozen=True)
class Orphan:
    """A stored array that no snapshot refers to: its file, and the size of that."""

    path: Path
    bytes: int


def stored_arrays(folder: Path) -> list[Path]:
    """Return the files in the store of a folder, but no links that lead nowhere, and no pipes."""
    return sorted(
        path
        for path in (folder / store.FOLDER).glob("*/*")
        if store.MEMBER.fullmatch(path.relative_to(folder).as_posix()) and path.is_file()
    )


def named_as_snapshots(folder: Path) -> list[Path]:
    """Return the snapshots in a folder; then links to nowhere and pipes that are named so."""
    snapshots = places.snapshots_in(folder)
    readable = {path.name for path in snapshots}
    endings = tuple(schema.SUFFIXES.values())
    return snapshots + [
        folder / name
        for name in sorted(os.listdir(folder))
        if name.endswith(endings) and name not in readable and not name.startswith(".")
    ]


def orphans(folder: Path, age: float = AGE) -> list[Orphan]:
    """Return the stored arrays of a folder that no snapshot in it refers to.

    Args:
        folder: Of the snapshots.
        age: Seconds since an array was last stored or reused; younger ones are left out.

    Raises:
        SnapshotError: A snapshot is damaged, so that nobody knows what it refers to.
    """
    oldest = time.time() - age
    candidates = [path for path in stored_arrays(folder) if path.stat().st_mtime <= oldest]
    # Only now: a snapshot that is written from here on makes its arrays new.
    referenced = {
        record.member
        for path in named_as_snapshots(folder)
        for record in _manifest_arrays(path)
        if record.in_store
    }
    return [
        Orphan(path, path.stat().st_size)
        for path in candidates
        if path.relative_to(folder).as_posix() not in referenced
    ]


def _manifest_arrays(path: Path) -> tuple[schema.ArrayRecord, ...]:
    try:
        return open_snapshot(path).manifest.arrays
    except SnapshotError as error:
        raise SnapshotError(
            f"nothing was removed because it is unknown which arrays {path} refers to: "
            f"{error.message}",
            hint="repair or remove that file",
        ) from error


def prune(folder: Path, age: float = AGE) -> list[Orphan]:
    """Remove the orphans of a folder, and what killed processes left; return what was removed.

    Raises:
        SnapshotError: As ``orphans``, or the folder cannot be written.
    """
    remove_leftovers(folder / store.FOLDER)
    oldest = time.time() - age
    removed = []
    with writing(
        f"remove from {folder}", "make the folder writable", kind=SnapshotError, hint=remedy
    ):
        for orphan in orphans(folder, age):
            aside = folder / store.FOLDER / temporary_name(orphan.path.name)
            with contextlib.suppress(FileNotFoundError):
                os.replace(orphan.path, aside)
                if aside.stat().st_mtime > oldest:  # reused since
                    store.move_unless_there(aside, orphan.path)
                else:
                    removed.append(orphan)
                aside.unlink(missing_ok=True)
    return removed
