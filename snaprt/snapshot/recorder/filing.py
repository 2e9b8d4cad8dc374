"""What becomes of held executions: files at once or queued, as far as budgets allow, or a ring.

The ring is the flight recorder: it holds the last executions until somebody asks for them. What
goes past its memory budget lies on disk, in a folder of this process below the snapshots, as the
files that it would become; where the process is killed, it stays there.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from snaprt import jaxapi, metrics, settings, units
from snaprt.host.whole_files import remove_leftovers, ring_name
from snaprt.processes import run_mark
from snaprt.snapshot.format import arrays, schema
from snaprt.snapshot.format.repeated import EncodedArrays, Form
from snaprt.snapshot.format.store import store_for
from snaprt.snapshot.recorder.conditions import Condition
from snaprt.snapshot.recorder.describe import Cause, contents, describe, likeness, sources
from snaprt.snapshot.recorder.pending import HeldExecution, bytes_held, bytes_on_a_device
from snaprt.snapshot.recorder.writer import SnapshotWriter

KEEP_LAST: Final = "keep-last"
"""The reason of what the flight recorder writes."""

RATE_SECONDS: Final = 10.0
"""How long a burst may be for which SNAPRT_RECORD_MAX_RATE bytes a second have been saved up."""

_PATIENCE_SECONDS: Final = 0.25
"""How long large arrays wait until the execution has ended: it needs the processor more."""

MAX_FORMS: Final = 64
"""Of how many programs, roles and devices it is kept what their small files have in common."""

_log = logging.getLogger("snaprt.snapshot")


class Budget:
    """What this process may still record: files, bytes, bytes a second, disk to leave free.

    What is queued but not written yet counts as written.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files = 0
        self._bytes = 0
        self._waiting = 0  # bytes queued that are not on disk yet
        self._saved: float | None = None  # bytes that the rate still allows at once
        self._saved_at = 0.0
        self._exceeded: set[str] = set()

    def admits(self, files: int, nbytes: int, folder: Path) -> bool:
        """Return whether so many files and bytes may go there; past a budget, count and say it."""
        with self._lock:
            over = self._over(files, nbytes, folder)
            if over is None:
                self._files += files
                self._bytes += nbytes
                if self._saved is not None:
                    self._saved -= nbytes
                return True
            is_new = over not in self._exceeded
            self._exceeded.add(over)
        metrics.counter_add("SnapshotOverBudget")
        if is_new:
            _log.warning(
                "recording exceeds %s; executions that are not recorded are counted "
                "(SnapshotOverBudget)",
                over,
            )
        return False

    def queued(self, nbytes: int) -> None:
        """Learn that so many more bytes wait to be written; fewer, where it is negative."""
        with self._lock:
            self._waiting += nbytes

    def _over(self, files: int, nbytes: int, folder: Path) -> str | None:
        if not any(_limits.now()):  # at each execution: by default there is none
            return None
        max_files: int = settings.get("SNAPRT_RECORD_MAX_FILES")
        if max_files and self._files + files > max_files:
            return f"SNAPRT_RECORD_MAX_FILES={max_files}"
        max_bytes: int | None = settings.get("SNAPRT_RECORD_MAX_BYTES")
        if max_bytes is not None and self._bytes + nbytes > max_bytes:
            return f"SNAPRT_RECORD_MAX_BYTES={max_bytes}"
        rate: int | None = settings.get("SNAPRT_RECORD_MAX_RATE")
        if rate is not None and not self._within(rate, nbytes):
            return f"SNAPRT_RECORD_MAX_RATE={rate}"
        least: int = settings.get("SNAPRT_RECORD_MIN_FREE")
        if least and _free(folder) - self._waiting - nbytes < least:
            return f"SNAPRT_RECORD_MIN_FREE={least}"
        return None

    def _within(self, rate: int, nbytes: int) -> bool:
        """Return whether ``nbytes`` fit into what the rate has saved, or more than it ever can."""
        now = time.monotonic()
        most = rate * RATE_SECONDS
        if self._saved is None:
            self._saved = most
        else:
            self._saved = min(most, self._saved + rate * (now - self._saved_at))
        self._saved_at = now
        return self._saved >= min(nbytes, most)


_limits = settings.Texts(
    *("SNAPRT_RECORD_MAX_FILES", "SNAPRT_RECORD_MAX_BYTES"),
    *("SNAPRT_RECORD_MAX_RATE", "SNAPRT_RECORD_MIN_FREE"),
)


def _free(folder: Path) -> int:
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


class Filing:
    """Writes what is recorded of executions, as far as the budgets allow."""

    def __init__(self, writer: SnapshotWriter) -> None:
        self.writer = writer
        self.budget = Budget()
        self._nbytes: dict[tuple[int, schema.Role], int] = {}  # by the executable's number
        # By the executable's number, the role and the device's: what files must have in common.
        self._forms: dict[tuple[int, schema.Role, int], tuple[Any, Form]] = {}
        self._encoded = EncodedArrays()
        self._without_device: set[tuple[str, int]] = set()  # conditions, of so many devices

    def nbytes(self, execution: HeldExecution, role: schema.Role) -> int:
        """Return how many bytes of one role lie on each device: those of each execution of it.

        0 while none has had outputs.
        """
        key = execution.executable.number, role
        if key not in self._nbytes:
            places = execution.inputs if role == "inputs" else execution.outputs
            if places is None:
                return 0
            self._nbytes[key] = bytes_on_a_device(places)
        return self._nbytes[key]

    def admits(
        self, execution: HeldExecution, conditions: Sequence[Condition], runs: int = 1
    ) -> bool:
        """Return whether the budgets have room for an execution, and take it.

        Args:
            execution: What is to be recorded.
            conditions: For which.
            runs: Of how many runs there are outputs; 0 where it failed.
        """
        outputs = runs * self.nbytes(execution, "outputs")
        sizes = {"inputs": self.nbytes(execution, "inputs"), "outputs": outputs}
        files = [
            sizes[role]
            for index, _, words in execution.devices
            for role in _roles(index, words, conditions)
        ]
        if not files:
            self._say_if_no_device(execution, conditions)
        return self.budget.admits(len(files), sum(files), execution.plan.folder)

    def _say_if_no_device(self, execution: HeldExecution, conditions: Sequence[Condition]) -> None:
        """Say once of conditions that they name no device on which such an execution runs."""
        texts = "; ".join(condition.text for condition in conditions)
        name, count = execution.executable.name, len(execution.devices)
        is_elsewhere = not any(
            condition.devices is None or index in condition.devices
            for condition in conditions
            for index, _, _ in execution.devices
        )
        if is_elsewhere and (texts, count) not in self._without_device:
            self._without_device.add((texts, count))
            _log.warning(
                "nothing of %s is recorded for %r: it runs on %s of this process, numbered from 0"
                "\nThis is said once.",
                name,
                texts,
                units.counted(count, "device"),
            )

    def queue(
        self,
        execution: HeldExecution,
        role: schema.Role,
        conditions: Sequence[Condition],
        cause: Cause,
    ) -> None:
        """Queue the files of one role of an admitted execution."""
        nbytes = self.nbytes(execution, role)
        for index, device in _devices(execution, role, conditions):
            self.budget.queued(nbytes)
            write = functools.partial(self._write, execution, role, index, device, cause, nbytes)
            self.writer.call(write, nbytes, device)

    def _write(
        self,
        execution: HeldExecution,
        role: schema.Role,
        index: int,
        device: jaxapi.Device,
        cause: Cause,
        nbytes: int,
    ) -> None:
        try:
            if nbytes >= arrays.LARGE:
                execution.ends_within(_PATIENCE_SECONDS)
            self._write_file(execution, role, index, device, cause, execution.plan.folder)
        finally:
            self.budget.queued(-nbytes)

    def _write_file(
        self,
        execution: HeldExecution,
        role: schema.Role,
        index: int,
        device: jaxapi.Device,
        cause: Cause,
        folder: Path,
    ) -> str | None:
        """Write a file in this thread, the writer's; return its name, None where it failed.

        The first one of a program asks for all that is to be said of it, such as the versions of
        packages; what the next ones have in common with it is written as it was then.
        """
        key = execution.executable.number, role, index
        alike = likeness(execution, role, device, cause)
        known, form = self._forms.get(key, (None, None))
        if form is not None and known == alike and form.is_for_another(store_for(folder)):
            moment = execution.moment
            name = form.file_name(moment.execution)
            is_written = self.writer.write_parts(
                folder,
                name,
                lambda: form.parts(
                    moment.execution,
                    moment.step,
                    execution.time,
                    *sources(execution, role),
                    self._encoded,
                ),
            )
            return name if is_written else None
        record = describe(execution, role, index, device, cause)
        name = schema.file_name(record)
        written = self.writer.write(
            folder / name, functools.partial(contents, record, execution, device)
        )
        if written is None:
            return None
        if alike is not None and written.form is not None:
            if len(self._forms) >= MAX_FORMS:
                self._forms.clear()
            self._forms[key] = alike, written.form
        return name

    def write_now(
        self, execution: HeldExecution, folder: Path, cause: Cause | None = None
    ) -> list[Path]:
        """Write all of an execution into ``folder`` in this thread; return the files.

        Of one that has not ended there are no outputs.
        """
        names = []
        for role in schema.ROLES:
            if role == "outputs" and not execution.has_outputs():
                continue
            for index, device in _devices(execution, role, None):
                why = cause or Cause(KEEP_LAST)
                names.append(self._write_file(execution, role, index, device, why, folder))
        return [folder / name for name in names if name is not None]

    def queue_all(
        self, execution: HeldExecution, files: Sequence[Path] | None, cause: Cause
    ) -> None:
        """Queue all of an execution of the ring, or its files where it is on disk already."""
        folder = execution.plan.folder
        if files is not None:
            self.writer.call(functools.partial(_move, files, folder))
            return
        write = functools.partial(self.write_now, execution, folder, cause)
        self.writer.call(write, bytes_held(execution.inputs))


def names_of(execution: HeldExecution, cause: Cause) -> list[Path]:
    """Return the files that an execution becomes when all of it is written."""
    return [
        execution.plan.folder / schema.file_name(describe(execution, role, index, device, cause))
        for role in schema.ROLES
        for index, device in _devices(execution, role, None)
    ]


def _devices(
    execution: HeldExecution, role: schema.Role, conditions: Sequence[Condition] | None
) -> Iterator[tuple[int, jaxapi.Device]]:
    """Yield the devices of which a role is recorded; without conditions, as the callback says."""
    if role == "outputs" and execution.outputs is None:
        return
    for index, device, words in execution.devices:
        if role in (words if conditions is None else _roles(index, words, conditions)):
            yield index, device


def _roles(index: int, words: frozenset[str], conditions: Sequence[Condition]) -> frozenset[str]:
    """Return what of a device is recorded: what both the callback and a condition ask for."""
    if len(conditions) == 1 and conditions[0].devices is None:
        return words & conditions[0].roles
    roles = [
        condition.roles
        for condition in conditions
        if condition.devices is None or index in condition.devices
    ]
    return words & frozenset().union(*roles)


def _move(files: Sequence[Path], folder: Path) -> None:
    for file in files:
        os.replace(file, folder / file.name)


class Ring:
    """The last executions, oldest first: in memory, or the oldest of them on disk.

    Args:
        spill: Writes an execution into a folder, and returns the files once they are whole.
        take_up: Adds those that are held elsewhere.
    """

    def __init__(
        self, spill: Callable[[HeldExecution, Path], list[Path]], take_up: Callable[[], None]
    ) -> None:
        self._spill = spill
        self._take_up = take_up
        self._lock = threading.RLock()
        self._executions: OrderedDict[HeldExecution, list[Path] | None] = OrderedDict()
        self._folders: set[Path] = set()

    def __len__(self) -> int:
        return len(self._executions)

    def add(self, execution: HeldExecution) -> None:
        """Hold an execution that begins, and let go of the oldest past the plan's number."""
        with self._lock:
            self._executions[execution] = None
            while len(self._executions) > execution.plan.keep_last:
                self._forget(self._executions.popitem(last=False)[1])

    def make_room(self, budget: int) -> None:
        """Write the oldest to disk until those in memory take at most ``budget`` bytes."""
        while True:
            with self._lock:
                in_memory = [
                    execution for execution, files in self._executions.items() if files is None
                ]
                # The newest may not have ended yet.
                if len(in_memory) < 2 or sum(_sizes(in_memory).values()) <= budget:
                    return
                oldest = in_memory[0]
                folder = oldest.plan.folder / ring_name(run_mark())
                if folder not in self._folders:
                    remove_leftovers(folder.parent)
                self._folders.add(folder)
            files = self._spill(oldest, folder)
            with self._lock:
                if oldest in self._executions:
                    # Its place in the ring stays; its arrays may go.
                    self._executions[oldest] = files
                    oldest.let_go()
                    metrics.counter_add("SnapshotRingSpilled")
                else:
                    self._forget(files)

    def executions(self) -> list[HeldExecution]:
        """Return those that it holds, oldest first."""
        self._take_up()
        with self._lock:
            return list(self._executions)

    def take(self) -> list[tuple[HeldExecution, list[Path] | None]]:
        """Empty the ring; return each execution with its files, or None where it is in memory."""
        self._take_up()
        with self._lock:
            entries = list(self._executions.items())
            self._executions.clear()
        return entries

    def close(self) -> None:
        """Let go of everything, on disk as well."""
        with self._lock:
            self._executions.clear()
            for folder in self._folders:
                shutil.rmtree(folder, ignore_errors=True)
            self._folders.clear()

    def _forget(self, files: list[Path] | None) -> None:
        for file in files or ():
            with contextlib.suppress(OSError):
                os.unlink(file)


def _sizes(executions: Iterable[HeldExecution]) -> dict[int, int]:
    """Return id to bytes of each array that they hold: one that several hold counts once."""
    arrays: list[Any] = [
        array
        for execution in executions
        for array in (*execution.inputs, *(execution.outputs or ()))
    ]
    return {id(array): bytes_held([array]) for array in arrays}
