"""The entry point ``snaprt``: finds the command, and turns every error into words and a status."""

from __future__ import annotations

import copy
import errno
import functools
import logging
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click
from snaprt_cache.errors import CacheError

import snaprt
from snaprt.cli import output
from snaprt.cli.lazy_group import LazyGroup
from snaprt.errors import SnaprtError


@dataclass(frozen=True)
class _Entry:
    """One command.

    Attributes:
        where: Where it lives, "module:attribute", as seen from this package.
        summary: Its line in ``snaprt --help``.
        uses_xla: Whether XLA_FLAGS are settled before it runs; XLA would end the process over a
            flag that it does not know. ``run`` leaves them to the program, ``doctor`` to a check.
    """

    where: str
    summary: str
    uses_xla: bool = False


COMMANDS: Final[Mapping[str, _Entry]] = {
    "demo": _Entry(
        ".demo.command:command", "Show everything on a small real training run.", uses_xla=True
    ),
    "run": _Entry(".run.command:command", "Run a Python program under snaprt."),
    "launch": _Entry(".run.launch:command", "Run a Python program as the processes of one job."),
    "replay": _Entry(
        ".replay.command:command", "Run recorded executions again and compare.", uses_xla=True
    ),
    "localize": _Entry(
        ".replay.localize:command", "Find the operation where two sides differ.", uses_xla=True
    ),
    "minify": _Entry(
        ".replay.minify:command", "Find the smallest program that still fails.", uses_xla=True
    ),
    "report": _Entry(".replay.report:command", "Show what a replay found, as a page too."),
    "inspect": _Entry(
        ".snapshot.inspect:command", "Print what is in a file without running it.", uses_xla=True
    ),
    "ls": _Entry(".snapshot.ls:command", "List what was recorded in a folder."),
    "diff": _Entry(
        ".snapshot.diff:command", "Say in what two recorded executions differ.", uses_xla=True
    ),
    "export": _Entry(
        ".snapshot.export:command", "Write a recorded execution for other programs.", uses_xla=True
    ),
    "pack": _Entry(".snapshot.pack:pack_command", "Make one file of recorded executions."),
    "unpack": _Entry(".snapshot.pack:unpack_command", "Write a packed file into a folder."),
    "prune": _Entry(".snapshot.pack:prune_command", "Remove stored arrays that nobody needs."),
    "cache": _Entry(".cache.group:command", "Look at the compile cache, or clear it."),
    "metrics": _Entry(".metrics:command", "Print saved metrics."),
    "bundle": _Entry(
        ".bundle.command:command", "Run a program; pack its logs, graphs and metrics."
    ),
    "stacks": _Entry(".stacks:command", "Print the stacks of a running process."),
    "doctor": _Entry(".doctor:command", "Check that everything works here."),
    "help": _Entry(".environment:command", "Print help on a command or a topic."),
}


class _ReaderGoneError(Exception):
    """Who read our output has closed it, as ``snaprt ... | head`` does."""


class _Commands(LazyGroup):
    """The commands in ``COMMANDS``."""

    def invoke(self, ctx: click.Context) -> Any:
        # Here, because click and rich answer a closed pipe with status 1: a mismatch, for us.
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except SystemExit as leaving:
            if isinstance(leaving.__context__, BrokenPipeError):
                raise _ReaderGoneError from leaving
            raise
        except BrokenPipeError as error:
            raise _ReaderGoneError from error
        return result

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        return _with_flags_settled(command) if command and COMMANDS[cmd_name].uses_xla else command


def _with_flags_settled(command: click.Command) -> click.Command:
    """Return ``command``, except that before it runs XLA_FLAGS are checked and taken over."""
    run = command.callback
    assert run is not None

    @functools.wraps(run)
    def settle_and_run(*words: Any, **options: Any) -> Any:
        from snaprt.snapshot.recorder import flags

        flags.take_over()
        return run(*words, **options)

    settled = copy.copy(command)
    settled.callback = settle_and_run
    return settled


def _print_version(context: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        click.echo(f"snaprt {snaprt.__version__}")
        context.exit()


@click.group(
    cls=_Commands,
    table={name: (entry.where, entry.summary) for name, entry in COMMANDS.items()},
    aliases={"localise": "localize"},
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version and leave.",
)
def group() -> None:
    """Run JAX programs lazily, cache what XLA compiles, record executions and replay them.

    \b
    Example:
      snaprt demo
      snaprt run --lazy -- train.py --epochs 3
      snaprt replay dump/*.inputs.snap
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Args:
        arguments: The words after ``snaprt``; by default those of this process.
    """
    try:
        status = group.main(arguments, prog_name="snaprt", standalone_mode=False)
        return status if isinstance(status, int) else output.EXIT_OK
    except _ReaderGoneError:
        # What is still buffered must not raise again when Python flushes it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return output.EXIT_BROKEN_PIPE
    except click.Abort as aborted:
        return _after_abort(aborted)
    except KeyboardInterrupt:
        return output.EXIT_INTERRUPTED
    except Exception as error:
        _explain(error)
        return output.EXIT_FAILURE


def _after_abort(aborted: click.Abort) -> int:
    if isinstance(aborted.__cause__, KeyboardInterrupt):
        return output.EXIT_INTERRUPTED
    output.error("aborted")
    return output.EXIT_FAILURE


def _explain(error: Exception) -> None:
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx is not None else "snaprt"
        output.error(_sentence(error.format_message()), f"`{path} --help` shows how it is used.")
    elif isinstance(error, click.ClickException):
        output.error(_sentence(error.format_message()))
    elif isinstance(error, SnaprtError | CacheError):
        output.error(error.message, error.hint or _NO_HINT)
    elif isinstance(error, OSError | MemoryError):
        # The system refused. Where our code should have seen it coming, the log has the traceback.
        logging.getLogger("snaprt.cli").debug("the command failed", exc_info=error)
        output.error(*_refusal(error))
    else:
        traceback.print_exception(error)
        output.error(
            f"internal error ({type(error).__name__})",
            "This is a bug in snaprt, not in what you did: please report it with the lines above.",
        )


_NO_HINT: Final = "`snaprt help COMMAND` says what a command takes, and what it does with it."
_SPACE: Final = "Free space there, or name another directory."
_ACCESS: Final = "Make it readable and writable for you, or name another file."
_HINTS: Final[Mapping[int, str]] = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EFBIG: "Raise the limit on the size of files (ulimit -f), or name another directory.",
    errno.EACCES: _ACCESS,
    errno.EPERM: _ACCESS,
    errno.EROFS: _ACCESS,
    errno.EMFILE: "Raise the limit on open files (ulimit -n).",
    errno.ENAMETOOLONG: "Name a file with a shorter name.",
    errno.ENOTDIR: "Name a path whose directories are directories.",
    errno.EISDIR: "Name a file, not a directory.",
    errno.ELOOP: "Name a path without links that lead to themselves.",
    errno.ENOENT: "Is the name spelled right, and its directory there?",
}


def _refusal(error: OSError | MemoryError) -> tuple[str, str]:
    """Return what to say, and what to do, where the system refused what was asked of it."""
    if isinstance(error, MemoryError):
        return "out of memory", "Close other programs, or take a smaller file or fewer at a time."
    where = f": {error.filename}" if error.filename is not None else ""
    reason = error.strerror or str(error) or type(error).__name__
    return f"{reason}{where}", _HINTS.get(error.errno or 0, _NO_HINT)


def _sentence(message: str) -> str:
    return message.rstrip(".")
