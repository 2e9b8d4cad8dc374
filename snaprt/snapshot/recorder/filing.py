"""Turns held executions into files, queued or at once; must not know when or why."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from snaprt import jaxapi
from snaprt.snapshot.format import encode, schema
from snaprt.snapshot.recorder.budgets import Budget
from snaprt.snapshot.recorder.conditions import Condition
from snaprt.snapshot.recorder.describe import Cause, contents, describe
from snaprt.snapshot.recorder.pending import HeldExecution
from snaprt.snapshot.recorder.writer import SnapshotWriter

KEEP_LAST = "keep-last"
"""The reason of what the flight recorder writes."""

_PATIENCE_SECONDS = 0.25
"""How long large arrays wait until the execution has ended: it needs the processor more."""

_run_marks: dict[int, str] = {}  # process id to mark: a forked child has one of its own


def run_mark() -> str:
    """Return 8 hex digits that tell this process from all others that write into a folder."""
    process = os.getpid()
    if process not in _run_marks:
        _run_marks[process] = os.urandom(4).hex()
    return _run_marks[process]


class Filing:
    """Writes what is recorded of executions, as far as the budgets allow.

    Args:
        writer: The queue and the thread that empties it.
    """

    def __init__(self, writer: SnapshotWriter) -> None:
        self.writer = writer
        self.budget = Budget()

    def admits(
        self, held: HeldExecution, conditions: Sequence[Condition], output_bytes: int
    ) -> bool:
        """Return whether the budgets have room for an execution, and take it."""
        roles = [_roles(index, words, conditions) for index, _, words in held.devices]
        nbytes = output_bytes + sum(array.nbytes for array in held.inputs)
        return self.budget.admits(sum(map(len, roles)), nbytes, held.plan.folder)

    def queue(
        self, held: HeldExecution, role: schema.Role, conditions: Sequence[Condition], cause: Cause
    ) -> int:
        """Queue the files of one role of an admitted execution; return the arrays' bytes."""
        places = held.inputs if role == "inputs" else held.outputs or []
        nbytes = sum(array.nbytes for array in places)
        for index, device in _devices(held, role, conditions):
            write = functools.partial(self._write, held, role, index, device, cause, nbytes)
            self.writer.call(write, nbytes)
        return nbytes

    def _write(
        self,
        held: HeldExecution,
        role: schema.Role,
        index: int,
        device: jaxapi.Device,
        cause: Cause,
        nbytes: int,
    ) -> None:
        try:
            if nbytes >= encode.LARGE:
                held.ends_within(_PATIENCE_SECONDS)
            # Here, in the writer's thread: the first one asks for the versions of all packages.
            execution = describe(held, role, index, device, cause, run_mark())
            file = held.plan.folder / schema.file_name(execution)
            self.writer.write(file, functools.partial(contents, execution, held, device))
        finally:
            self.budget.written(nbytes)

    def write_now(
        self, held: HeldExecution, folder: Path, cause: Cause | None = None
    ) -> list[Path]:
        """Write all of an execution into ``folder`` in this thread; no outputs without an end.

        Returns:
            The files that are there then.
        """
        files = []
        for role in schema.ROLES:
            if role == "outputs" and not held.has_outputs():
                continue
            for execution, device in _files(held, role, cause or Cause(KEEP_LAST)):
                file = folder / schema.file_name(execution)
                if self.writer.write(file, functools.partial(contents, execution, held, device)):
                    files.append(file)
        return files

    def queue_all(self, held: HeldExecution, files: Sequence[Path] | None, cause: Cause) -> None:
        """Queue all of an execution of the ring, or its files where it is on disk already."""
        folder = held.plan.folder
        if files is not None:
            self.writer.call(functools.partial(_move, files, folder))
            return
        nbytes = sum(array.nbytes for array in held.inputs)
        self.writer.call(functools.partial(self.write_now, held, folder, cause), nbytes)


def names_of(held: HeldExecution, cause: Cause) -> list[Path]:
    """Return the files that an execution becomes when all of it is written."""
    return [
        held.plan.folder / schema.file_name(execution)
        for role in schema.ROLES
        for execution, _ in _files(held, role, cause)
    ]


def _files(
    held: HeldExecution, role: schema.Role, cause: Cause
) -> Iterator[tuple[schema.Execution, jaxapi.Device]]:
    """Yield all that the callback allows to be recorded of each device."""
    for index, device in _devices(held, role, None):
        yield describe(held, role, index, device, cause, run_mark()), device


def _devices(
    held: HeldExecution, role: schema.Role, conditions: Sequence[Condition] | None
) -> Iterator[tuple[int, jaxapi.Device]]:
    """Yield the devices of which a role is recorded; without conditions, as the callback says."""
    if role == "outputs" and held.outputs is None:
        return
    for index, device, words in held.devices:
        if role in (words if conditions is None else _roles(index, words, conditions)):
            yield index, device


def _roles(index: int, words: frozenset[str], conditions: Sequence[Condition]) -> frozenset[str]:
    """Return what of a device is recorded: what both the callback and a condition ask for."""
    asked = [
        condition.roles
        for condition in conditions
        if condition.devices is None or index in condition.devices
    ]
    return words & frozenset().union(*asked)


def _move(files: Sequence[Path], folder: Path) -> None:
    for file in files:
        os.replace(file, folder / file.name)
