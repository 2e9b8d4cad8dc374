"""A process beside each watched one: it can look and write where the other's Python cannot run.

Native code may hold Python's lock for ever, and XLA ends a process at once when the coordinator is
gone. The watched process tells it, once a second, how far it is, in lines of JSON:

- ``{"status": {...}}``: what a dump says of it, but for the stacks and the cause;
- ``{"look": FILE}``: write the stacks with native frames into the dump that is there;
- ``{"end": true}``: the program has ended;
- an empty line: nothing has changed.

Anything else is what Python's `faulthandler` writes before the process dies by a fatal signal.
Uses no library: it starts in 50 ms, and waits.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

from snaprt.errors import SnaprtError
from snaprt.host import stacks
from snaprt.host.whole_files import write_whole

_LOOK_SECONDS: Final = 1.0  # how often it looks whether the other is there
NUMBERED: Final = re.compile(r"hang-(\d+)")
_THREAD: Final = re.compile(
    r"(?:Current thread|Thread) (0x[0-9a-f]+)(.*) \(most recent call first\)"
)
_FRAME: Final = re.compile(r'\s+File "(.*)", line (\d+) in (.*)')
_FATAL: Final = "Fatal Python error: "
_UNSAID: Final = "SIGKILL, or a crash without a word"


def hang_number(folder: Path) -> int:
    """Return the number of the last hang that was written below a folder; 0 where there is none."""
    try:
        names = os.listdir(folder)
    except OSError:
        return 0
    return max((int(match[1]) for match in map(NUMBERED.fullmatch, names) if match), default=0)


def hang_folder(folder: Path, number: int) -> Path:
    """Return where the dumps of a hang are: the same for all who count them."""
    return folder / f"hang-{number:03d}"


def claim_hang(folder: Path, last: int, rank: int, run: str) -> int:
    """Return the number of the hang that is to be written, its folder made.

    All ranks count the folders that are there. Who comes first makes the next one, and the others
    join it; what a process of another job has written there under the same rank stays.

    Args:
        folder: The folder of the recording.
        last: The last hang that this process has written or knows to be over.
        rank: The rank of this process.
        run: The mark of this process.
    """
    number = last + 1
    while _is_of_another(dump_file(folder, number, rank), run):
        number += 1
    hang_folder(folder, number).mkdir(parents=True, exist_ok=True)
    return number


def _is_of_another(path: Path, run: str) -> bool:
    if not path.is_file():
        return False
    try:
        return bool(json.loads(path.read_bytes())["run"] != run)
    except (OSError, ValueError, LookupError, TypeError):
        return True


def dump_file(folder: Path, number: int, rank: int) -> Path:
    """Return where a rank writes its dump of a hang."""
    return hang_folder(folder, number) / f"rank-{rank:06d}.json"


def write_json(path: Path, content: Any) -> None:
    """Write a file of JSON that appears whole."""
    write_whole(path, json.dumps(content).encode())


class _Bystander:
    """What is known of the watched process.

    Args:
        pid: Its process id.
        limit: Seconds of silence after which its Python is taken to be stuck.
        folder: The folder of the recording.
    """

    def __init__(self, pid: int, limit: float, folder: Path) -> None:
        self._pid = pid
        self._limit = limit
        self._folder = folder
        self._status: dict[str, Any] = {}
        self._traceback: list[str] = []
        self._has_ended = False
        self._heard = time.monotonic()
        self._has_written = False
        self._begun = b""

    def watch(self) -> None:
        """Listen until the process has ended."""
        selector = selectors.DefaultSelector()
        selector.register(sys.stdin.buffer, selectors.EVENT_READ)
        while not self._has_ended:
            if selector.select(_LOOK_SECONDS):
                chunk = os.read(sys.stdin.fileno(), 1 << 16)
                if not chunk:
                    break
                self._hear(chunk)
            elif os.getppid() != self._pid:  # a child of it may hold the pipe
                break
            if time.monotonic() - self._heard > self._limit and not self._has_written:
                self._has_written = True
                self._write_stuck()
        if not self._has_ended:
            self._write_death()

    def _hear(self, chunk: bytes) -> None:
        self._heard, self._has_written = time.monotonic(), False
        *lines, self._begun = (self._begun + chunk).split(b"\n")
        for line in lines:
            message: Any = None
            with contextlib.suppress(ValueError):
                message = json.loads(line)
            if not isinstance(message, dict):
                if line.strip():
                    self._traceback.append(line.decode(errors="replace"))
            elif "look" in message:
                self._look(Path(message["look"]))
            else:
                status = message.get("status", {})
                if not status.get("where"):  # between its end and the process's it has no line
                    status.pop("where", None)
                self._status.update(status)
                self._has_ended = "end" in message

    def _look(self, path: Path) -> None:
        """Put the native stacks into a dump."""
        with contextlib.suppress(OSError, ValueError):
            dump = json.loads(path.read_bytes())
            dump.update(self._stacks_of_process())
            write_json(path, dump)

    def _stacks_of_process(self) -> dict[str, Any]:
        try:
            threads, is_native = stacks.dump(self._pid, native=True)
        except SnaprtError as error:
            return {"note": f"no native stacks: {error.message}"}
        self._heard = time.monotonic()
        names = [thread["thread_name"] for thread in threads]
        main = threads[names.index("MainThread")]["frames"] if "MainThread" in names else []
        return {
            "threads": threads,
            "is_native": is_native,
            "note": ""
            if is_native
            else "py-spy cannot read native frames here: these are Python's",
            "where": stacks.user_frame(main) or self._status.get("where"),
        }

    def _write_stuck(self) -> None:
        silence = f"{self._limit:g} s"
        content = {
            "cause": f"Python in this process has not run for {silence}: "
            "native code holds its lock, or the process is stopped",
            "state": "stuck",
            **self._stacks_of_process(),
        }
        self._write(content)

    def _write_death(self) -> None:
        """Write of a process that a fatal signal has ended; another has ended by itself."""
        self._hear(b"\n")
        text = [line for line in self._traceback if line.startswith(_FATAL)]
        self._mark_ended(f"a fatal error: {text[-1][len(_FATAL) :]}" if text else _UNSAID)
        if not text:
            return
        threads = _threads_of_traceback(self._traceback)
        main = threads[-1]["frames"] if threads else []
        content = {
            "cause": f"the process was ended by a fatal error: {text[-1][len(_FATAL) :]}",
            "state": "died",
            "threads": threads,
            "is_native": False,
            "note": "the stacks are those that Python wrote as the process died",
            "where": stacks.user_frame(main) or self._status.get("where"),
        }
        self._write(content)

    def _mark_ended(self, how: str) -> None:
        """Say in the state of the rank how it ended, if it has one and has not said so itself."""
        if not self._status:
            return
        path = self._folder / "ranks" / f"rank-{self._status['rank']:06d}.json"
        with contextlib.suppress(OSError, ValueError):
            state = json.loads(path.read_bytes())
            if state["run"] == self._status["run"] and not state["ended"]:
                write_json(path, {**state, "ended": how, "where": ""})

    def _write(self, content: dict[str, Any]) -> None:
        if not self._status:
            return  # it had not begun
        dump = {**self._status, "time": time.time(), **content}
        with contextlib.suppress(OSError):
            number = self._status["known"] = claim_hang(
                self._folder, dump.pop("known"), dump["rank"], dump["run"]
            )
            write_json(dump_file(self._folder, number, dump["rank"]), dump)


def _threads_of_traceback(lines: list[str]) -> list[stacks.Thread]:
    """Return the threads of a text of `faulthandler`; the main thread comes last, as there."""
    threads: list[stacks.Thread] = []
    for line in lines:
        if match := _THREAD.match(line):
            threads.append(
                {
                    "thread_name": "",
                    "os_thread_id": int(match[1], 16),
                    "active": None,
                    "owns_gil": None,
                    "frames": [],
                }
            )
        elif (match := _FRAME.match(line)) and threads:
            frame = {"name": match[3], "filename": match[1], "line": int(match[2])}
            threads[-1]["frames"].append(frame)
    if threads:
        threads[-1]["thread_name"] = "MainThread"
    return threads


def main() -> None:
    """Watch the process that has started this one."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it goes when the other does
    pid, limit, folder = sys.argv[1:]
    _Bystander(int(pid), float(limit), Path(folder)).watch()


if __name__ == "__main__":
    main()
