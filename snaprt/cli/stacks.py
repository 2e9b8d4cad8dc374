"""``snaprt stacks PID``: where every thread of a running process is, in Python and in native code.

py-spy reads the other process's memory; the process needs nothing for it and goes on unharmed.
"""

from __future__ import annotations

from typing import Any

import click
from rich.text import Text

from snaprt.cli import output
from snaprt.host import stacks


@click.command("stacks")
@click.argument("pid", type=click.IntRange(min=1, max=(1 << 31) - 1))
@click.option(
    "--native/--python-only",
    default=True,
    help="Include native frames, or show only Python frames, which is faster.",
)
@output.json_option
def command(pid: int, native: bool, as_json: bool) -> None:
    """Print the stacks of all threads of a running process.

    Shows what Python and XLA are doing in a program that hangs or is slow. The process is paused
    briefly and then continues.

    \b
    Example:
      snaprt stacks 4711
      snaprt stacks --python-only --json 4711
    """
    threads, with_native = stacks.dump(pid, native=native)
    if native and not with_native:
        output.log.print("cannot read native frames here; showing only Python frames")
    if as_json:
        data = {"pid": pid, "native": with_native, "threads": threads}
        output.emit_json("snaprt.stacks", data)
    else:
        _print(pid, threads)


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
