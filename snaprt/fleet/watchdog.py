"""Writes where this process is when nothing has ended for long: no execution, no step.

A thread looks on once a second. It asks nobody: each rank of a job decides by its own clock, and
they meet in a folder, whose name they count up. What the thread cannot see, for native code holds
Python's lock or XLA ends the process, the process beside it writes (`snaprt.fleet.bystander`).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from snaprt import jaxapi, settings
from snaprt.fleet.bystander import claim_hang, dump_file, hang_folder, hang_number, write_json
from snaprt.fleet.hang import SCHEMA, VERSION
from snaprt.graph.program import Program
from snaprt.host import stacks
from snaprt.host.whole_files import from_root, remedy_sentence
from snaprt.processes import ProcessPlace, place_in_job
from snaprt.runtime.events import Compilation, Cut, Subscriber, subscribe
from snaprt.runtime.jit import follow_process
from snaprt.snapshot.format.write import RECORD_ELSEWHERE
from snaprt.snapshot.recorder.plan import DEFAULT_FOLDER, recording_folder
from snaprt.snapshot.recorder.progress import Progress, Running, watch_progress
from snaprt.snapshot.recorder.ranks.states import claim_rank, keep_state
from snaprt.snapshot.recorder.writer import afresh_in_children
from snaprt.units import format_duration

_TICK_SECONDS: Final = 1.0
_END_SECONDS: Final = 5.0
_MOST_COLLECTIVES: Final = 20
_PR_SET_PTRACER: Final = 0x59616D61

_log = logging.getLogger("snaprt.watchdog")


def watch() -> None:
    """Watch this process as SNAPRT_WATCHDOG says; once a process, and in no child of a rank.

    Raises:
        UsageError: A variable has a value that is not allowed.
    """
    global _watchdog
    limit: float | None = settings.get("SNAPRT_WATCHDOG")
    folder = recording_folder() or from_root(Path(DEFAULT_FOLDER))
    with _starting:
        if limit is None or _watchdog is not None or not claim_rank():
            return
        _watchdog = Watchdog(limit, folder, watch_progress(closely=True))
        _watchdog.start()
    keep_state(folder)
    follow_process()


_watchdog: Watchdog | None = None
_starting = threading.Lock()


class Watchdog:
    """Looks on in a thread, and writes a dump once for each hang.

    Args:
        limit: Seconds without an end of anything, after which it is one.
        folder: The folder of the recording; the dumps are below.
        progress: What happens in this process.
    """

    def __init__(self, limit: float, folder: Path, progress: Progress) -> None:
        self._limit = limit
        self._folder = folder
        self._progress = progress
        self._last_hang = hang_number(folder)  # the last hang that is over or written
        self._written_at = -1.0  # `progress.progressed` when the last dump was written
        self._last_status: tuple[int, Any] = (-1, None)  # the changes and the line told last
        self._helper: subprocess.Popen[bytes] | None = None
        self._is_fatal_told = False
        self.start_afresh()
        afresh_in_children(self)

    def start_afresh(self) -> None:
        """Have no thread, and no process beside."""
        self._helper = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Watch from here on, until the program ends."""
        subscribe(_LazyEvents(self._progress))
        self._start_helper()
        self._thread = threading.Thread(target=self._look_on, name="snaprt-watchdog", daemon=True)
        self._thread.start()
        atexit.register(self._finish)

    # The process beside.

    def _start_helper(self) -> None:
        environment = {
            name: text for name, text in os.environ.items() if not name.startswith("SNAPRT_")
        }
        words = [sys.executable, "-P", "-m", "snaprt.fleet.bystander", str(os.getpid())]
        try:
            self._helper = subprocess.Popen(
                [*words, str(max(self._limit, 2 * _TICK_SECONDS)), str(self._folder)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            _log.warning(
                "the watchdog's helper process cannot start, so nothing is written of a process "
                "that is stuck or dies: %s",
                error,
            )
            return
        pipe = self._helper.stdin
        assert pipe is not None
        flags = fcntl.fcntl(pipe, fcntl.F_GETFL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, flags | os.O_NONBLOCK)
        _let_look(self._helper.pid)
        if not faulthandler.is_enabled():
            faulthandler.enable(pipe, all_threads=True)
            self._is_fatal_told = True

    def _tell(self, **line: Any) -> None:
        """Tell the process beside; it may be gone."""
        if self._helper is not None and self._helper.stdin is not None:
            text = json.dumps(line) if line else ""
            with contextlib.suppress(OSError):
                os.write(self._helper.stdin.fileno(), text.encode() + b"\n")

    # The thread.

    def _look_on(self) -> None:
        tick = min(_TICK_SECONDS, self._limit / 5)
        while not self._stop.wait(tick):
            try:
                self._look()
            except Exception as error:
                _log.error("the watchdog failed, and looks on: %s", error, exc_info=error)

    def _look(self) -> None:
        progress = self._progress
        progress.look()
        place = place_in_job()
        keep_state(self._folder)  # `jax.distributed` may have told meanwhile that there are others
        self._tell_status(place)
        is_written = self._written_at == progress.progressed
        quiet = time.monotonic() - progress.progressed
        if place.processes > 1 and hang_folder(self._folder, self._last_hang + 1).is_dir():
            if not is_written or quiet < self._limit:
                self._dump(place, "another rank has seen no progress")
        elif quiet >= self._limit and not is_written:
            frames = stacks.main_thread_frames()
            if not progress.is_busy() and stacks.waits_for_input(frames):
                return
            self._dump(place, f"no execution or step has ended for {format_duration(self._limit)}")

    def _tell_status(self, place: ProcessPlace) -> None:
        where = stacks.user_frame(stacks.main_thread_frames())
        now = self._progress.changes, where
        if now == self._last_status:
            self._tell()
        else:
            self._last_status = now
            self._tell(status=self._status(place))

    def _finish(self) -> None:
        if self._thread is None:
            return  # a forked child
        self._stop.set()
        self._thread.join(_END_SECONDS)
        if self._is_fatal_told:
            faulthandler.disable()
        self._tell(end=True)
        if self._helper is not None and self._helper.stdin is not None:
            with contextlib.suppress(OSError):
                self._helper.stdin.close()

    # The dump.

    def _status(self, place: ProcessPlace) -> dict[str, Any]:
        """Return what a dump says of this process, but for its cause and its stacks."""
        progress = self._progress
        oldest = progress.oldest()
        compiling = list(progress.compiling.values())
        state = "python"
        if compiling or (oldest is not None and _compiles(oldest)):
            state = "compiling"
        elif oldest is not None:
            state = "waiting"
        name, since = compiling[0] if compiling else ("", 0.0)
        return {
            "schema": SCHEMA,
            "version": VERSION,
            **asdict(place),
            "known": self._last_hang,
            "limit": self._limit,
            "time": time.time(),
            "quiet": time.monotonic() - progress.progressed,
            "state": state,
            "compiling": name or (oldest.executable.name if oldest and state != "waiting" else ""),
            "since": since or (oldest.began if oldest else 0.0),
            "steps": progress.step,
            "where": stacks.user_frame(stacks.main_thread_frames()),
            "executions": [_described(running) for running in list(progress.last)],
            "waits_for": None if oldest is None else _described(oldest),
        }

    def _dump(self, place: ProcessPlace, cause: str) -> None:
        self._written_at = self._progress.progressed
        dump = {
            **self._status(place),
            "cause": cause,
            "threads": stacks.own_threads(),
            "is_native": False,
            "note": "",
            "collectives": [],
        }
        del dump["known"]
        try:
            self._write(place, dump)
        except OSError as error:
            _log.warning(
                "%s: %s; its stacks cannot be written below %s: %s. %s `snaprt stacks %d` prints "
                "them while the program runs.",
                cause,
                sentence(dump),
                self._folder,
                error.strerror or error,
                remedy_sentence(error, RECORD_ELSEWHERE),
                os.getpid(),
            )

    def _write(self, place: ProcessPlace, dump: dict[str, Any]) -> None:
        self._last_hang = claim_hang(self._folder, self._last_hang, place.rank, place.run)
        self._last_status = (-1, None)
        self._tell_status(place)
        path = dump_file(self._folder, self._last_hang, place.rank)
        write_json(path, dump)
        _log.warning(
            "%s: %s; stacks are in %s. `snaprt report %s` shows which ranks wait for which.",
            dump["cause"],
            sentence(dump),
            path,
            path.parent,
        )
        oldest = self._progress.oldest()
        if oldest is not None and dump["state"] == "waiting":
            dump["collectives"] = list(_collectives(oldest))
            write_json(path, dump)
        self._tell(look=str(path))


def sentence(dump: dict[str, Any]) -> str:
    """Return what a process does, by its dump."""
    where = dump["where"]
    at = f"at {os.path.basename(where['filename'])}:{where['line']}" if where else "in native code"
    seconds = format_duration(max(0.0, dump["time"] - dump["since"]))
    if dump["state"] == "compiling":
        return f"compiling {dump['compiling']} for {seconds}, {at}"
    if dump["state"] == "waiting":
        waits = dump["waits_for"]
        return (
            f"execution {waits['execution']} of {waits['name']} has not ended for {seconds}, {at}"
        )
    return f"no execution is under way, and the program is {at}"


class _LazyEvents(Subscriber):
    """Tells of steps, and of lazy programs that are compiled; those of jit say it themselves."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def compiling(self, cut: Cut, program: Program, promoted: frozenset[int]) -> None:
        self._progress.compile_began("a lazy graph")

    def compiled(self, compilation: Compilation) -> None:
        self._progress.compile_ended()

    def step_ended(self, step: int) -> None:
        self._progress.step_ended(step)


def _let_look(pid: int) -> None:
    """Let a process and its children read this one's memory, where Yama asks for that."""
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def _described(running: Running) -> dict[str, Any]:
    return {
        "name": running.executable.name,
        "graph_id": running.executable.graph_id,
        "execution": running.execution,
        "step": running.step,
        "began": running.began,
        "phase": running.phase,
    }


def _compiles(running: Running) -> bool:
    """Return whether a call has not come to its execution, for its program is being compiled."""
    is_compiled = getattr(running.executable, "is_compiled", True)
    return running.phase == "called" and not is_compiled


_OPERATION: Final = re.compile(
    r"^\s*(?:ROOT )?%?([\w.-]+) = .*?\b((?:all-reduce|all-gather|all-to-all|ragged-all-to-all"
    r"|reduce-scatter|collective-permute|collective-broadcast|send|recv)(?:-start)?)\(",
    re.MULTILINE,
)


def _collectives(running: Running) -> Iterator[dict[str, str]]:
    """Yield the collectives of the program of an execution, as its HLO names them."""
    try:
        executable: Any = running.executable
        # What is lowered holds its executable; a lazy program calls it.
        compiled = (
            executable.lowered.compile() if hasattr(executable, "is_compiled") else executable.call
        )
        modules = jaxapi.loaded_executable(compiled).hlo_modules()
        text = "\n".join(module.to_string() for module in modules)
    except Exception as error:
        _log.info("the collectives of %s cannot be read: %s", running.executable.name, error)
        return
    for count, match in enumerate(_OPERATION.finditer(text)):
        if count == _MOST_COLLECTIVES:
            return
        yield {"name": match[1], "operation": match[2]}
