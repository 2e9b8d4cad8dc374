"""Where the threads of a process are: this process, by Python itself; another one, by py-spy.

py-spy reads the other process's memory; the process needs nothing for it and goes on unharmed.
"""

from __future__ import annotations

import functools
import json
import linecache
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from snaprt.errors import SnaprtError, UsageError

Thread = dict[str, Any]
"""A thread as py-spy writes it: ``thread_name``, ``os_thread_id``, ``active``, ``owns_gil`` and
``frames``, innermost first, each with ``name``, ``filename`` and ``line``."""

_SECONDS: Final = 60

_FORBIDDEN: Final = (
    "this user may not look into that process",
    "Run it as the same user or as root; in a container add the capability SYS_PTRACE; "
    "elsewhere `sysctl kernel.yama.ptrace_scope=0` may be needed.",
)
_NO_PROCESS: Final = (
    "there is no such process",
    "`pgrep -af python` lists those there are.",
)

# What the system or py-spy says, in lower case, to what it means and what to do.
_REASONS: Final[Mapping[str, tuple[str, str]]] = {
    "permission denied": _FORBIDDEN,
    "operation not permitted": _FORBIDDEN,
    "no such process": _NO_PROCESS,
    "no such file": _NO_PROCESS,
}
_NOT_PYTHON: Final = (
    "no Python was found in that process",
    "Give the number of the Python process itself, not of the shell that started it.",
)


def dump(pid: int, *, native: bool) -> tuple[list[Thread], bool]:
    """Return the threads of a process, and whether native frames are among theirs.

    Args:
        pid: The process; it is held for a moment and goes on.
        native: Whether native frames are wanted. Without the right to read them, or where they
            cannot be read, Python's frames are returned.

    Raises:
        SnaprtError: py-spy is not installed, failed, or may not look into the process.
    """
    words = [py_spy(), "dump", "--json", "--full-filenames", "--pid", str(pid)]
    if native:
        process = _call([*words, "--native"])
        if process.returncode == 0:
            return json.loads(process.stdout), True
    process = _call(words)
    if process.returncode == 0:
        return json.loads(process.stdout), False
    complaint = process.stderr.lower()
    reason, hint = next(
        (row for words_of, row in _REASONS.items() if words_of in complaint), _NOT_PYTHON
    )
    raise UsageError(f"cannot read the stacks of process {pid}: {reason}", hint=hint)


def _call(words: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words, capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SnaprtError(
            f"py-spy could not be run: {error}", hint="Try --python-only, or run it again."
        ) from error


def py_spy() -> str:
    """Return the path of py-spy.

    Raises:
        UsageError: It is not installed.
    """
    beside = str(Path(sys.executable).parent)
    path = shutil.which("py-spy", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    if path is None:
        raise UsageError(
            "py-spy is not installed, which reads the stacks",
            hint="Install it: pip install 'snaprt[stacks]'",
        )
    return path


def own_threads() -> list[Thread]:
    """Return the Python stacks of this process's threads, the main thread first."""
    frames = sys._current_frames()
    by_ident = {thread.ident: thread for thread in threading.enumerate()}
    main = threading.main_thread().ident
    threads: list[Thread] = []
    for ident in sorted(frames, key=lambda ident: ident != main):
        thread = by_ident.get(ident)
        threads.append(
            {
                "thread_name": thread.name if thread else "",
                "os_thread_id": thread.native_id if thread else None,
                "active": None,  # Python does not know
                "owns_gil": None,
                "frames": _frames_of(frames[ident]),
            }
        )
    return threads


def main_thread_frames() -> list[dict[str, Any]]:
    """Return the Python frames of the main thread, innermost first; none once it has ended."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return [] if frame is None else _frames_of(frame)


def _frames_of(frame: Any) -> list[dict[str, Any]]:
    frames = []
    while frame is not None:
        code = frame.f_code
        place = {"filename": code.co_filename, "line": frame.f_lineno or 0}
        frames.append({"name": code.co_qualname, **place})
        frame = frame.f_back
    return frames


_STARTS_PROGRAMS: Final = str(Path(__file__).parents[1] / "cli" / "run" / "command.py")
_OUR_FOLDER: Final = str(Path(__file__).parents[1])
_PYTHON: Final = frozenset(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
_FRAMEWORKS: Final = frozenset({"click", "flax", "jax", "jaxlib", "numpy", "optax", "torch"})


def user_frame(frames: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the innermost frame of the program's own code; of a library where it has none.

    snaprt's own code is never it: what runs once the program has ended says nothing of where the
    program was. Neither is a framework's, unless a module of it is what runs.

    Args:
        frames: Python or native frames of one thread, innermost first.
    """
    of_program: list[Mapping[str, Any]] = []
    for frame in frames:
        if frame["filename"] == _STARTS_PROGRAMS:
            break  # what lies below is the command line
        of_program.append(frame)
    python = [frame for frame in of_program if _is_python(frame)]
    runs_module = any(frame["name"] == "<module>" for frame in python)
    for kind in (_OF_USER, _OF_LIBRARY, *([_OF_FRAMEWORK] if runs_module else [])):
        for frame in python:
            if _kind_of_file(str(frame["filename"])) <= kind:
                return {name: frame[name] for name in ("name", "filename", "line")}
    return None


def is_users_file(path: str) -> bool:
    """Return whether a source file is the user's own: of no installed library, nor of Python."""
    return _kind_of_file(path) == _OF_USER


def _is_python(frame: Mapping[str, Any]) -> bool:
    is_native = not frame["line"] or frame.get("module")
    return not is_native and not str(frame["filename"]).startswith("<")


_OF_USER, _OF_LIBRARY, _OF_FRAMEWORK, _OURS = range(4)


@functools.lru_cache(maxsize=1024)
def _kind_of_file(path: str) -> int:
    if path.startswith(_OUR_FOLDER + os.sep):
        return _OURS
    parts = Path(path).parts
    if "site-packages" in parts or "dist-packages" in parts:
        return _OF_FRAMEWORK if _FRAMEWORKS & set(parts) else _OF_LIBRARY
    is_python = path.startswith(tuple(folder + os.sep for folder in _PYTHON))
    return _OF_FRAMEWORK if is_python else _OF_USER


_WAITING_FOR_INPUT: Final = frozenset(
    {
        ("asyncio", "_run_once"),
        ("socketserver", "serve_forever"),
        ("code", "raw_input"),
        ("cmd", "cmdloop"),
        ("bdb", "dispatch_line"),
    }
)


def waits_for_input(frames: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a thread waits for a person or a request: a prompt, a debugger, a server."""
    if not frames:
        return False
    for frame in frames[:8]:
        path = Path(str(frame["filename"]))
        function = str(frame["name"]).rpartition(".")[2]
        if {(path.stem, function), (path.parent.name, function)} & _WAITING_FOR_INPUT:
            return True
    return "input(" in _line(frames[0])


def _line(frame: Mapping[str, Any]) -> str:
    return linecache.getline(str(frame["filename"]), int(frame["line"]))
