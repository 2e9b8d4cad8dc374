"""``snaprt stacks PID``: where every thread of a running process is, in Python and in native code.

py-spy reads the other process's memory; the process needs nothing for it and goes on unharmed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click
from rich.text import Text

from snaprt.cli import output
from snaprt.errors import SnaprtError, UsageError

SCHEMA: Final = "snaprt.stacks"
VERSION: Final = 1

_SECONDS: Final = 60

# What the system or py-spy says, in lower case, to what it means and what to do.
_REASONS: Final[Mapping[str, tuple[str, str]]] = {
    "permission denied": (
        "this user may not look into that process",
        "Run it as the same user or as root; in a container add the capability SYS_PTRACE; "
        "elsewhere `sysctl kernel.yama.ptrace_scope=0` may be needed.",
    ),
    "operation not permitted": (
        "this user may not look into that process",
        "Run it as the same user or as root; in a container add the capability SYS_PTRACE; "
        "elsewhere `sysctl kernel.yama.ptrace_scope=0` may be needed.",
    ),
    "no such process": ("there is no such process", "`pgrep -af python` lists those there are."),
    "no such file": ("there is no such process", "`pgrep -af python` lists those there are."),
}
_NOT_PYTHON: Final = (
    "no Python was found in that process",
    "Give the number of the Python process itself, not of the shell that started it.",
)


@click.command("stacks")
@click.argument("pid", type=click.IntRange(min=1))
@click.option(
    "--native/--python-only",
    default=True,
    help="With the frames of native code, or of Python alone, which takes less time.",
)
@output.json_option
def command(pid: int, native: bool, as_json: bool) -> None:
    """Print the stacks of all threads of a running process.

    For a program that hangs or takes long: it shows what Python and XLA are doing right now. The
    process is held for a moment and goes on.

    \b
    Example:
      snaprt stacks 4711
      snaprt stacks --python-only --json 4711
    """
    threads, with_native = _dump(pid, native)
    if native and not with_native:
        output.log.print("native frames cannot be read here; these are Python's")
    if as_json:
        data = {"pid": pid, "native": with_native, "threads": threads}
        output.emit_json(SCHEMA, VERSION, data)
    else:
        _print(pid, threads)


def _dump(pid: int, native: bool) -> tuple[list[dict[str, Any]], bool]:
    """Return the threads, and whether native frames are among theirs."""
    spy = _py_spy()
    words = [spy, "dump", "--json", "--full-filenames", "--pid", str(pid)]
    if native:
        done = _call([*words, "--native"])
        if done.returncode == 0:
            return json.loads(done.stdout), True
    done = _call(words)
    if done.returncode == 0:
        return json.loads(done.stdout), False
    complaint = done.stderr.lower()
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


def _py_spy() -> str:
    beside = str(Path(sys.executable).parent)
    path = shutil.which("py-spy", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    if path is None:
        raise UsageError(
            "py-spy is not installed, which reads the stacks",
            hint="Install it: pip install 'snaprt[stacks]'",
        )
    return path


def _print(pid: int, threads: list[dict[str, Any]]) -> None:
    count = len(threads)
    output.console.print(f"process {pid}, {count} thread{'' if count == 1 else 's'}")
    for thread in threads:
        state = "active" if thread["active"] else "idle"
        holds = ", holds the GIL" if thread["owns_gil"] else ""
        name = thread["thread_name"] or f"thread {thread['os_thread_id']}"
        output.console.print()
        output.console.print(Text.assemble((name, "bold"), f" ({state}{holds})"))
        for frame in thread["frames"]:
            line = f":{frame['line']}" if frame["line"] else ""
            output.console.print(Text(f"  {frame['name']}  {frame['filename']}{line}"))
