"""Tells which files are of one execution: its inputs and outputs, on all devices, of all processes.

Files are named so that a name tells most of it (`schema.file_name`), and their manifests decide.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from snaprt.errors import SnapshotError
from snaprt.snapshot.format import places, schema
from snaprt.snapshot.format.read import SnapshotFile, open_snapshot

_MOST_SECONDS_APART = 600
"""Processes begin an execution together, but for their clocks and the time they compile."""

_OF_ONE_DEVICE = re.compile(
    r"-process\d{6}(?:-run\w{8})?-executable\d{6}-device\d{6}(?=-execution\d{6})"
)


_OF_ANOTHER_PROCESS = re.compile(r"-run\w{8}-executable\d{6}(?=-device\d{6})")


def contradiction(record: schema.ExecutionRecord, other: schema.ExecutionRecord) -> str:
    """Say in words why two files are not of one execution; nothing where they are.

    Each process numbers its own executables, and has a name for its run.
    """
    fields = ["graph_id", "execution_count", "step", "devices"]
    if record.process == other.process:
        fields += ["run", "executable"]
    for field in fields:
        expected, actual = getattr(record, field), getattr(other, field)
        if expected != actual:
            words = field.removesuffix("_id").removesuffix("_count")
            return f"its manifest has {words} {_not(actual, expected)}"
    apart = abs(record.time - other.time)
    return f"it ran {apart:.0f} s apart" if apart > _MOST_SECONDS_APART else ""


def _not(actual: object, expected: object) -> str:
    """Say in words that one value is not another; of devices, the first in which they differ."""
    if isinstance(actual, tuple) and isinstance(expected, tuple):
        pairs = zip(actual, expected, strict=False)
        numbers = f"numbering {len(actual)}", len(expected)
        actual, expected = next((pair for pair in pairs if pair[0] != pair[1]), numbers)
    return f"{_in_words(actual)}, not {_in_words(expected)}"


def _in_words(value: object) -> str:
    if not isinstance(value, schema.DeviceRecord):
        return str(value)
    return f"{value.platform} {value.id} ({value.kind}) of process {value.process}"


def whole_executions(files: Sequence[Path]) -> tuple[Path, ...]:
    """Return the files, and all others of the same executions that lie beside them.

    Args:
        files: Snapshots, and folders and packed files, which stand for all that is in them.

    Raises:
        SnapshotError: A file is missing or damaged, or there is nothing in a folder.
        OSError: A folder cannot be read.
    """
    whole: dict[Path, None] = {}
    for path in files:
        if path.is_dir() or places.is_pack_file(path):
            inside = places.snapshots_in(path)
            if not inside:
                raise SnapshotError(
                    f"{path} holds no readable snapshot",
                    hint="`snaprt ls DIR` lists the recorded executions",
                )
            whole |= dict.fromkeys(inside)
            continue
        stem = _stem(path)
        beside = places.snapshots_in(places.pack_of(path) or path.parent)
        candidates = [open_snapshot(other) for other in beside if _stem(other) == stem]
        this = open_snapshot(path)
        whole |= {other.path: None for other in candidates if _are_one(this, other)}
        whole[path] = None
    return tuple(whole)


def executions_in(place: Path) -> list[Path]:
    """Return one snapshot of each execution in a folder or packed file, with inputs if there are.

    Raises:
        SnapshotError: A file in it is damaged.
        OSError: The folder cannot be read.
    """
    groups: list[list[SnapshotFile]] = []
    for path in places.snapshots_in(place):
        file = open_snapshot(path)
        group = next((group for group in groups if _are_one(group[0], file)), None)
        if group is None:
            groups.append([file])
        else:
            group.append(file)
    return [min(group, key=_place_in_execution).path for group in groups]


def _place_in_execution(file: SnapshotFile) -> tuple[int, int, Path]:
    return schema.ROLES.index(file.role), file.manifest.execution.run_number, file.path


def only_execution(pack: Path) -> Path:
    """Return the snapshot in a packed file that holds those of one execution.

    Raises:
        SnapshotError: It is damaged, or holds several executions, or none.
    """
    executions = executions_in(pack)
    if not executions:
        raise SnapshotError(
            f"{pack} holds no readable snapshot",
            hint="it is damaged; get it again from its source",
        )
    if len(executions) > 1:
        raise SnapshotError(
            f"{pack} holds {len(executions)} executions",
            hint=f"name one, such as {executions[0]}",
        )
    return executions[0]


def one_for_each_execution(paths: Sequence[Path]) -> list[Path]:
    """Leave out the files of other devices of an execution that an earlier file stands for.

    A file that cannot be read stays, and so does one of an execution of which others are missing:
    whoever replays it says so.
    """
    joined: set[Path] = set()
    remaining = []
    for path in paths:
        if path.absolute() in joined:
            continue
        remaining.append(path)
        if not path.name.endswith(tuple(schema.SUFFIXES.values())):
            continue
        with contextlib.suppress(SnapshotError):
            file = open_snapshot(path)
            execution = file.manifest.execution
            again = dataclasses.replace(execution, role="outputs", run_number=2)
            joined.add(file.path.with_name(schema.file_name(again)).absolute())
            if len(execution.devices) > 1:
                try:
                    joined |= {other.path.absolute() for other in files_of_devices(file, file.role)}
                    if has_any(file, "outputs", 2):
                        seconds = files_of_devices(file, "outputs", 2)
                        joined |= {other.path.absolute() for other in seconds}
                except SnapshotError:
                    joined |= {other.absolute() for other in paths if _is_beside(file, other)}
    return remaining


def _is_beside(file: SnapshotFile, other: Path) -> bool:
    """Return whether a file is of the same execution, and whole."""
    if other.parent != file.path.parent or _stem(other) != _stem(file.path):
        return False
    try:
        return _are_one(file, open_snapshot(other))
    except SnapshotError:
        return False


def files_of_devices(
    file: SnapshotFile, role: schema.Role, run: int = 1
) -> tuple[SnapshotFile, ...]:
    """Return the file of each device of an execution, in the order of the program's devices.

    They lie in one folder, whichever processes wrote them.

    Args:
        file: Any file of the execution.
        role: Which files are wanted: those with its inputs, or those with its outputs.
        run: Of which run of the execution the outputs are wanted.

    Raises:
        SnapshotError: A file is missing, damaged, or of another execution; the message names it.
    """
    devices = range(len(file.manifest.execution.devices))
    return tuple(_file_of_device(file, role, number, run) for number in devices)


def has_any(file: SnapshotFile, role: schema.Role, run: int = 1) -> bool:
    """Return whether there is a file of that role of any device of the execution."""
    devices = range(len(file.manifest.execution.devices))
    return any(_candidates(file, role, number, run) for number in devices)


def _stem(path: Path) -> str:
    stem = path.name
    for suffix in schema.SUFFIXES.values():
        stem = stem.removesuffix(suffix)
    return _OF_ONE_DEVICE.sub("", schema.without_run(stem))


def _are_one(this: SnapshotFile, other: SnapshotFile) -> bool:
    return not contradiction(this.manifest.execution, other.manifest.execution)


def _file_of_device(file: SnapshotFile, role: schema.Role, number: int, run: int) -> SnapshotFile:
    execution = file.manifest.execution
    candidates = [open_snapshot(path) for path in _candidates(file, role, number, run)]
    reasons = [_why_not(execution, other, role, number) for other in candidates]
    fitting = [other for other, why in zip(candidates, reasons, strict=True) if not why]
    if fitting:  # of several runs in one folder, take what ran at the same time
        return min(fitting, key=lambda other: abs(other.manifest.execution.time - execution.time))
    device = execution.devices[number]
    whose = f"device {number} ({device.platform} {device.id} of process {device.process})"
    if candidates:
        raise SnapshotError(
            f"{candidates[0].path} should hold the {role} of {whose} of the execution in "
            f"{file.path.name}, but {reasons[0]}",
            hint="it was renamed or overwritten; keep the files of each run in a separate folder",
        )
    name = _expected_name(execution, role, number, run)
    hint = "put the files of all devices into one folder; record all devices of an execution"
    if device.process != execution.process:  # which alone knows its run and its executables
        name = _OF_ANOTHER_PROCESS.sub("-*", name)
        hint = (
            f"put the files of all processes into one folder; `snaprt ls {file.path.parent} "
            "--ranks` shows what each of them recorded"
        )
    raise SnapshotError(
        f"{file.path} is part of a program on {len(execution.devices)} devices, and the file "
        f"with the {role} of {whose} is missing: {name}",
        hint=hint,
    )


def _why_not(
    execution: schema.ExecutionRecord, other: SnapshotFile, role: schema.Role, number: int
) -> str:
    theirs, device = other.manifest.execution, execution.devices[number]
    if theirs.role != role:
        return f"its manifest has role {theirs.role}, not {role}"
    if theirs.device != device:
        return f"its manifest has device {_not(theirs.device, device)}"
    return contradiction(execution, theirs)


def _candidates(file: SnapshotFile, role: schema.Role, number: int, run: int) -> list[Path]:
    """Return the files whose names say that they hold this device's part of the execution."""
    expected = _expected_name(file.manifest.execution, role, number, run)
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


def _expected_name(
    execution: schema.ExecutionRecord, role: schema.Role, number: int, run: int
) -> str:
    device = execution.devices[number]
    before = [
        earlier for earlier in execution.devices[:number] if earlier.process == device.process
    ]
    return schema.file_name(
        dataclasses.replace(
            execution,
            role=role,
            process=device.process,
            device_index=len(before),
            run_number=run,
        )
    )
