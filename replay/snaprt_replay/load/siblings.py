"""Find the files that the other devices of one execution left; must not know what is in arrays."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from snaprt.errors import SnapshotError
from snaprt.snapshot.format import places, schema
from snaprt.snapshot.format.read import SnapshotFile, open_snapshot

_MOST_SECONDS_APART = 600
"""Processes begin an execution together, but for their clocks and the time they compile."""


def files_of_devices(file: SnapshotFile, role: schema.Role) -> tuple[SnapshotFile, ...]:
    """Return the file of each device of an execution, in the order of the program's devices.

    They lie in one folder, whichever processes wrote them.

    Args:
        file: Any file of the execution.
        role: Which files are wanted: those with its inputs, or those with its outputs.

    Raises:
        SnapshotError: A file is missing, damaged, or of another execution; the message names it.
    """
    return tuple(
        _file_of_device(file, role, number)
        for number in range(len(file.manifest.execution.devices))
    )


def one_for_each_execution(paths: Sequence[Path]) -> list[Path]:
    """Leave out the files of other devices of an execution that an earlier file stands for.

    A file that cannot be read, or of which others are missing, stays: whoever replays it says so.
    """
    joined: set[Path] = set()
    kept = []
    for path in paths:
        if path.absolute() in joined:
            continue
        kept.append(path)
        if not path.name.endswith(tuple(schema.SUFFIXES.values())):
            continue
        with contextlib.suppress(SnapshotError):
            file = open_snapshot(path)
            if len(file.manifest.execution.devices) > 1:
                others = files_of_devices(file, file.role)
                joined.update(one.path.absolute() for one in others)
    return kept


def has_any(file: SnapshotFile, role: schema.Role) -> bool:
    """Return whether there is a file of that role of any device of the execution."""
    devices = range(len(file.manifest.execution.devices))
    return any(_candidates(file, role, number) for number in devices)


def _file_of_device(file: SnapshotFile, role: schema.Role, number: int) -> SnapshotFile:
    execution = file.manifest.execution
    found = [open_snapshot(path) for path in _candidates(file, role, number)]
    fitting = [one for one in found if not _contradiction(execution, one, role, number)]
    if fitting:  # of several runs in one folder, take what ran at the same time
        return min(fitting, key=lambda one: abs(one.manifest.execution.time - execution.time))
    device = execution.devices[number]
    whose = f"device {number} ({device.platform} {device.id} of process {device.process})"
    if found:
        why = _contradiction(execution, found[0], role, number)
        raise SnapshotError(
            f"{found[0].path} should hold the {role} of {whose} of the execution in "
            f"{file.path.name}, but {why}",
            hint="it was renamed or overwritten; keep the files of each run in a folder of its own",
        )
    raise SnapshotError(
        f"{file.path} is of a program on {len(execution.devices)} devices, and the file with the "
        f"{role} of {whose} is missing: {_expected_name(execution, role, number)}",
        hint="put the files of all devices into one folder; record all devices of an execution",
    )


def _candidates(file: SnapshotFile, role: schema.Role, number: int) -> list[Path]:
    """Return the files whose names say that they hold this device's part of the execution."""
    expected = _expected_name(file.manifest.execution, role, number)
    execution = file.manifest.execution
    process = execution.devices[number].process
    start = f"{expected.partition('-process')[0]}-process{process:06d}-"
    _, mark, rest = expected.rpartition("-device")
    try:
        names = [path.name for path in places.snapshots_in(file.path.parent)]
    except OSError as error:
        raise SnapshotError(f"cannot list {file.path.parent}: {error.strerror or error}") from error
    return sorted(
        file.path.parent / name
        for name in names
        if name == expected
        # Another process has a name for its run, and numbers its executables, by itself.
        or (
            process != execution.process
            and name.startswith(start)
            and name.endswith(f"{mark}{rest}")
        )
    )


def _expected_name(execution: schema.Execution, role: schema.Role, number: int) -> str:
    device = execution.devices[number]
    before = [one for one in execution.devices[:number] if one.process == device.process]
    return schema.file_name(
        dataclasses.replace(execution, role=role, process=device.process, device_index=len(before))
    )


def _contradiction(
    execution: schema.Execution, other: SnapshotFile, role: schema.Role, number: int
) -> str:
    """Say in words what contradicts that ``other`` is that part of the execution; else nothing."""
    found = other.manifest.execution
    pairs = (
        ("graph", execution.graph_id, found.graph_id),
        ("execution", execution.execution_count, found.execution_count),
        ("step", execution.step, found.step),
        ("role", role, found.role),
        ("device", execution.devices[number], found.device),
        ("the list of devices", execution.devices, found.devices),
    )
    for what, expected, actual in pairs:
        if expected != actual:
            return f"its manifest says {what} {actual}, not {expected}"
    apart = abs(execution.time - found.time)
    return f"it ran {apart:.0f} s apart" if apart > _MOST_SECONDS_APART else ""
