"""``snaprt stacks PID``: where every thread of a running process is, in Python and in native code.

py-spy reads the other process's memory; the process needs nothing for it and goes on unharmed.
"""

from __future__ import annotations

from typing import Any, Final

import click
from rich.text import Text

from snaprt import stacks
from snaprt.cli import output

SCHEMA: Final = "snaprt.stacks"
VERSION: Final = 1


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
    threads, with_native = stacks.dump(pid, native=native)
    if native and not with_native:
        output.log.print("native frames cannot be read here; these are Python's")
    if as_json:
        data = {"pid": pid, "native": with_native, "threads": threads}
        output.emit_json(SCHEMA, VERSION, data)
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
