"""Tells which snapshots are of one execution, inputs and outputs on all devices; reads no array."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from snaprt.errors import SnapshotError
from snaprt.snapshot.format import places, schema
from snaprt.snapshot.format.read import SnapshotFile, open_snapshot

_OF_ONE_DEVICE = re.compile(
    r"-process\d{6}(?:-run\w{8})?-executable\d{6}-device\d{6}(?=-execution\d{6})"
)


def whole_executions(files: Sequence[Path]) -> tuple[Path, ...]:
    """Return the files, and all others of the same executions that lie beside them.

    Args:
        files: Snapshots, and folders and packed files, which stand for all that is in them.

    Raises:
        SnapshotError: A file is missing or damaged, or there is nothing in a folder.
        OSError: A folder cannot be read.
    """
    found: dict[Path, None] = {}
    for path in files:
        if path.is_dir() or places.is_pack_file(path):
            inside = places.snapshots_in(path)
            if not inside:
                raise SnapshotError(
                    f"{path} holds no snapshot that can be read",
                    hint="`snaprt ls DIR` lists what was recorded into a directory",
                )
            found |= dict.fromkeys(inside)
            continue
        stem = _stem(path)
        beside = places.snapshots_in(places.pack_of(path) or path.parent)
        candidates = [open_snapshot(other) for other in beside if _stem(other) == stem]
        this = open_snapshot(path)
        found |= {one.path: None for one in candidates if _are_one(this, one)}
        found[path] = None
    return tuple(found)


def executions_in(place: Path) -> list[Path]:
    """Return one snapshot of each execution in a folder or packed file, with inputs if there are.

    Raises:
        SnapshotError: A file in it is damaged.
        OSError: The folder cannot be read.
    """
    groups: list[list[SnapshotFile]] = []
    for path in places.snapshots_in(place):
        file = open_snapshot(path)
        group = next((one for one in groups if _are_one(one[0], file)), None)
        if group is None:
            groups.append([file])
        else:
            group.append(file)
    return [_first(group) for group in groups]


def _first(files: Iterable[SnapshotFile]) -> Path:
    return min(files, key=lambda file: (schema.ROLES.index(file.role), file.path)).path


def _stem(path: Path) -> str:
    stem = path.name
    for suffix in schema.SUFFIXES.values():
        stem = stem.removesuffix(suffix)
    return _OF_ONE_DEVICE.sub("", stem)


def _are_one(this: SnapshotFile, other: SnapshotFile) -> bool:
    """Return whether two files are of one execution; each process numbers its own executables."""
    one, two = this.manifest.execution, other.manifest.execution
    same = (one.graph_id, one.execution_count, one.step, one.devices)
    if same != (two.graph_id, two.execution_count, two.step, two.devices):
        return False
    return one.process != two.process or (one.run, one.executable) == (two.run, two.executable)
