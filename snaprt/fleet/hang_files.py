"""What the watchdog's dumps of a hang hold, and how a folder of them is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import msgspec

from snaprt.processes import ProcessPlace
from snaprt.snapshot.recorder.states import read_files_of_ranks, schema_of

SCHEMA: Final = "snaprt.hang"
VERSION: Final = 1

RankActivity = Literal["waiting", "compiling", "python", "stuck", "died"]
"""``waiting``: an execution has not ended; ``compiling``; ``python``: neither, so the program is in
Python; ``stuck``: its Python does not run; ``died``: a fatal signal ended it."""


@dataclass(frozen=True)
class DumpedFrame:
    """A frame of a stack: of Python, or native with line 0."""

    name: str
    filename: str
    line: int


@dataclass(frozen=True)
class DumpedThread:
    """A thread and its frames, innermost first."""

    frames: tuple[DumpedFrame, ...]
    thread_name: str | None = ""
    os_thread_id: int | None = None
    active: bool | None = None
    owns_gil: bool | None = None


@dataclass(frozen=True)
class DumpedExecution:
    """One of the last executions of a process."""

    name: str
    graph_id: str
    execution: int  # how many of the program came before
    step: int  # how many steps its thread had marked before
    began: float  # seconds since 1970
    phase: Literal["called", "dispatched", "ended", "failed"]


@dataclass(frozen=True)
class Collective:
    """A collective operation, as the HLO of the program names it."""

    name: str
    operation: str


@dataclass(frozen=True)
class Dump(ProcessPlace):
    """What one process wrote of itself, or had written of it.

    Attributes:
        cause: Why this was written.
        limit: The watchdog's seconds.
        time: Seconds since 1970 when this was written.
        quiet: Seconds in which nothing had ended.
        state: What it does.
        compiling: The name of the program that is compiled; "" where none is.
        since: Seconds since 1970 when what it waits for, or compiles, began; else 0.
        steps: How many steps it had marked.
        where: The innermost line of the main thread in the user's code.
        executions: The last ones, oldest first.
        waits_for: The oldest execution that has not ended.
        collectives: Those of the program of that execution, the first twenty.
        threads: The stacks, with native frames where ``is_native``.
        note: What could not be seen, and why.
    """

    cause: str
    limit: float
    time: float
    quiet: float
    state: RankActivity
    compiling: str
    since: float
    steps: int
    where: DumpedFrame | None
    executions: tuple[DumpedExecution, ...]
    waits_for: DumpedExecution | None
    threads: tuple[DumpedThread, ...] = ()
    is_native: bool = False
    note: str = ""
    collectives: tuple[Collective, ...] = field(default=())


def is_hang(folder: Path) -> bool:
    """Return whether a folder holds dumps of a hang."""
    first = next(iter(sorted(folder.glob("rank-*.json"))), None)
    if first is None:
        return False
    try:
        return schema_of(first) == SCHEMA
    except (OSError, msgspec.MsgspecError):
        return False


def read_dumps(folder: Path) -> tuple[Dump, ...]:
    """Return the dumps of a hang, by rank.

    Raises:
        UsageError: A dump cannot be read.
    """
    return read_files_of_ranks(folder, Dump, "dump of a hang", "cannot be read", (SCHEMA,), VERSION)
