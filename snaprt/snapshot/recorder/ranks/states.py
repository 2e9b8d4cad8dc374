"""How far each rank of a job is: a small file for each, in one folder; read by whoever asks.

A thread writes the file every few seconds where something has happened, and the end of the process
once more. No file is written by a process that is alone.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from snaprt.errors import UsageError
from snaprt.host import stacks
from snaprt.host.regular_files import read_file
from snaprt.host.whole_files import remedy_sentence, write_whole
from snaprt.processes import ProcessPlace, place_in_job

if TYPE_CHECKING:  # who reads states does not need JAX
    from snaprt.snapshot.recorder.progress import Progress, Running

SECONDS: Final = 5.0
"""How often a state that has changed is written at most."""

SCHEMA: Final = "snaprt.rank"
VERSION: Final = 1

FOLDER: Final = "ranks"
"""Below the folder of the recording: where the states are."""

_END_SECONDS: Final = 5.0
_MOST_BYTES: Final = 1 << 26
_MOST_PROCESSES: Final = 1 << 20
_REMOVE: Final = "Remove it if it is damaged."
_log = logging.getLogger("snaprt.states")


@dataclass(frozen=True)
class RankState(ProcessPlace):
    """How far one process of a job is.

    Attributes:
        step: How many steps it has marked.
        program: The name of the program that it ran last; "" where it has run none.
        graph_id: 16 hexadecimal digits that are the same for the same program.
        execution: Number of that execution of the program, from 0.
        time: Seconds since 1970 when this was written.
        where: The innermost line of the user's code in its main thread: ``FILE:LINE (FUNCTION)``.
        ended: "" while it runs; ``finished``, or the error that ended it.
    """

    step: int
    program: str
    graph_id: str
    execution: int
    time: float
    where: str = ""
    ended: str = ""


@dataclass(frozen=True)
class _Envelope:
    schema: str = ""
    version: int = 0


_OfRank = TypeVar("_OfRank", bound=ProcessPlace)


def schema_of(path: Path) -> str:
    """Return the schema that a file of a rank says it has, "" if none.

    Raises:
        OSError: It cannot be read, or is too large to be such a file.
        ValueError: It holds something else.
    """
    return _envelope(read_file(path, _MOST_BYTES)).schema


def _envelope(content: bytes) -> _Envelope:
    return msgspec.json.decode(content, type=_Envelope)


def read_files_of_ranks(
    folder: Path,
    kind: type[_OfRank],
    what: str,
    unreadable: str,
    schemas: Collection[str],
    version: int,
) -> tuple[_OfRank, ...]:
    """Return what the files of the ranks in a folder hold, by rank; nothing where there are none.

    Raises:
        UsageError: One of them cannot be read, or holds no ``what`` up to this version.
    """
    contents = []
    for path in sorted(folder.glob("rank-*.json")):
        try:
            content = read_file(path, _MOST_BYTES)
            envelope = _envelope(content)
            if envelope.schema not in schemas or envelope.version > version:
                raise UsageError(
                    f"{path} is no {what} that this version reads",
                    hint="Update snaprt, or remove the file.",
                )
            entry = msgspec.json.decode(content, type=kind)
        except (OSError, ValueError, RecursionError) as error:  # of msgspec, or no UTF-8
            reason = error.strerror or error if isinstance(error, OSError) else error
            raise UsageError(f"{path} {unreadable}: {reason}", hint=_REMOVE) from error
        if path.name != file_name(entry.rank) or entry.processes > _MOST_PROCESSES:
            raise UsageError(
                f"{path} {unreadable}: it is of rank {entry.rank} of {entry.processes}",
                hint=_REMOVE,
            )
        contents.append(entry)
    return tuple(sorted(contents, key=lambda entry: entry.rank))


def read_states(folder: Path) -> tuple[RankState, ...]:
    """Return the states of the ranks of a job, by rank; none where no state was written.

    Args:
        folder: The folder of the recording, which has ``ranks`` below it, or that folder itself.

    Raises:
        UsageError: A state cannot be read.
    """
    inner = folder / FOLDER
    folder = inner if inner.is_dir() else folder
    what = "state of a rank"
    schemas = ("", SCHEMA)  # a state may leave it out
    return read_files_of_ranks(folder, RankState, what, f"is no {what}", schemas, VERSION)


def file_name(rank: int) -> str:
    """Return the name of a file of a rank."""
    return f"rank-{rank:06d}.json"


def state_file(folder: Path, rank: int) -> Path:
    """Return where a rank writes its state below the folder of a recording."""
    return folder / FOLDER / file_name(rank)


def missing_file(folder: Path, rank: int) -> Path:
    """Return where a rank writes which executions it could not record for others."""
    return folder / FOLDER / f"missing-{rank:06d}.jsonl"


def state_now(progress: Progress, place: ProcessPlace) -> RankState:
    """Return how far this process is."""
    last: Sequence[Running] = tuple(progress.last)
    running = last[-1] if last else None
    return RankState(
        **asdict(place),
        step=max(progress.step, running.step if running else 0),
        program=running.executable.name if running else "",
        graph_id=running.executable.graph_id if running else "",
        execution=running.execution if running else 0,
        time=time.time(),
        where=place_text(stacks.user_frame(stacks.main_thread_frames())),
    )


def place_text(frame: Mapping[str, Any] | None) -> str:
    """Return a frame as ``FILE:LINE (FUNCTION)``."""
    return "" if frame is None else f"{frame['filename']}:{frame['line']} ({frame['name']})"


# Names a rank and its process to its children.
_RANK_VARIABLE: Final = "SNAPRT_LAUNCH_PROCESS_OF_RANK"


def claim_rank() -> bool:
    """Return whether this process is the one of its rank, and no helper that it has started."""
    rank = os.environ.get("RANK", "")
    claimed_rank, _, pid = os.environ.get(_RANK_VARIABLE, "").partition(":")
    if pid and claimed_rank == rank and pid != str(os.getpid()):
        return False
    os.environ[_RANK_VARIABLE] = f"{rank}:{os.getpid()}"
    return True


class StateKeeper:
    """Keeps the state file of this process.

    Args:
        folder: The folder of the recording.
        progress: What happens in this process.
    """

    def __init__(self, folder: Path, progress: Progress) -> None:
        from snaprt.snapshot.recorder.writer import afresh_in_children

        self._folder = folder
        self._progress = progress
        self._ended = ""
        self._has_complained = False
        self.start_afresh()
        afresh_in_children(self)

    def start_afresh(self) -> None:
        """Have no thread."""
        self._stop = threading.Event()
        self._writing = threading.RLock()  # a signal may come while the main thread has it
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Keep the file from here on, until the process ends."""
        from snaprt.snapshot.recorder.failures import listen_for_uncaught_errors

        listen_for_uncaught_errors(self)
        self._thread = threading.Thread(target=self._keep, name="snaprt-rank-state", daemon=True)
        self._thread.start()
        atexit.register(self._finish)

    def program_failed(self, error: BaseException) -> None:
        """Learn of an exception that ends the program or a thread."""
        self._ended = f"{type(error).__name__}: {error}"[:500]

    def _keep(self) -> None:
        written = -1
        while True:
            changes = self._progress.changes
            if changes != written and self._write(""):
                written = changes
            if self._stop.wait(SECONDS):
                return

    def _finish(self) -> None:
        if self._thread is None:
            return  # a forked child
        self._stop.set()
        self._thread.join(_END_SECONDS)
        if not self._thread.is_alive():
            self._write(self._ended or "finished")

    def write_end(self, how: str) -> None:
        """Write how the process ends, unless an error has said so."""
        self._stop.set()
        self._write(self._ended or how)

    def _write(self, ended: str) -> bool:
        """Write the state; return whether this process keeps one. The last word is how it ended."""
        try:
            place = place_in_job()
            if place.processes < 2:
                return False
            with self._writing:
                if ended or not self._stop.is_set():
                    state = replace(state_now(self._progress, place), ended=ended)
                    if ended:
                        state = replace(state, where="")
                    path = state_file(self._folder, place.rank)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write_whole(
                        path,
                        msgspec.json.encode(asdict(_Envelope(SCHEMA, VERSION)) | asdict(state)),
                    )
        except Exception as error:
            if not self._has_complained:
                self._has_complained = True
                advice = ""
                if isinstance(error, OSError):
                    from snaprt.snapshot.format.write import RECORD_ELSEWHERE

                    advice = f". {remedy_sentence(error, RECORD_ELSEWHERE)}"
                _log.warning("the state of this rank cannot be written: %s%s", error, advice)
        return True


_keeper: StateKeeper | None = None
_starting = threading.Lock()


def keep_state(folder: Path) -> None:
    """Keep the state of this process below a folder, if it is one of several; once a process."""
    from snaprt.snapshot.recorder.progress import watch_progress

    global _keeper
    if _keeper is not None:
        return
    with _starting:
        if _keeper is None and place_in_job().processes > 1 and claim_rank():
            _keeper = StateKeeper(folder, watch_progress(closely=False))
            _keeper.start()


def end_state(how: str) -> None:
    """Write that this process is about to end, where it may not come to its end by itself."""
    if _keeper is not None:
        _keeper.write_end(how)
