"""The flight recorder: holds the last executions until somebody asks for them; knows no triggers.

What goes past the memory budget lies on disk, in a folder of this process below the snapshots, as
the files that it would become; where the process is killed, it stays there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from snaprt import metrics
from snaprt.snapshot.format.leftovers import remove_leftovers, ring_name
from snaprt.snapshot.recorder.pending import HeldExecution

Spill = Callable[[HeldExecution, Path], list[Path]]
"""``spill(execution, folder)`` writes it there, and returns the files once they are whole."""


class Ring:
    """The last executions, oldest first: in memory, or the oldest of them on disk.

    Args:
        spill: Writes an execution into a folder, now.
        mark: Returns what tells this process's folder from those of others.
    """

    def __init__(self, spill: Spill, mark: Callable[[], str]) -> None:
        self._spill = spill
        self._mark = mark
        self._lock = threading.RLock()
        self._held: OrderedDict[HeldExecution, list[Path] | None] = OrderedDict()
        self._folders: set[Path] = set()

    def __len__(self) -> int:
        return len(self._held)

    def add(self, held: HeldExecution) -> None:
        """Hold an execution that begins, and let go of the oldest past the plan's number."""
        with self._lock:
            self._held[held] = None
            while len(self._held) > held.plan.keep_last:
                self._forget(self._held.popitem(last=False)[1])

    def make_room(self, budget: int) -> None:
        """Write the oldest to disk until those in memory take at most ``budget`` bytes."""
        while True:
            with self._lock:
                in_memory = [held for held, files in self._held.items() if files is None]
                # The newest may not have ended yet.
                if len(in_memory) < 2 or sum(_sizes(in_memory).values()) <= budget:
                    return
                oldest = in_memory[0]
                folder = oldest.plan.folder / ring_name(self._mark())
                if folder not in self._folders:
                    remove_leftovers(folder.parent)
                self._folders.add(folder)
            files = self._spill(oldest, folder)
            with self._lock:
                if oldest in self._held:
                    # Its place in the ring stays; its arrays may go.
                    self._held[oldest] = files
                    oldest.let_go()
                    metrics.counter_add("SnapshotRingSpilled")
                else:
                    self._forget(files)

    def executions(self) -> list[HeldExecution]:
        """Return those that it holds, oldest first."""
        with self._lock:
            return list(self._held)

    def take(self) -> list[tuple[HeldExecution, list[Path] | None]]:
        """Empty the ring; return each execution with its files, or None where it is in memory."""
        with self._lock:
            taken = list(self._held.items())
            self._held.clear()
        return taken

    def close(self) -> None:
        """Let go of everything, on disk as well."""
        with self._lock:
            self._held.clear()
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
        array for held in executions for array in (*held.inputs, *(held.outputs or ()))
    ]
    return {id(array): int(array.nbytes) for array in arrays}
