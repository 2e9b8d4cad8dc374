"""The entry point ``snaprt``: finds the command, and turns every error into words and a status."""

from __future__ import annotations

import copy
import difflib
import errno
import functools
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

import click
from snaprt_cache.errors import CacheError

import snaprt
from snaprt.cli import output
from snaprt.errors import SnaprtError
from snaprt.host.interruptions import interrupted_at_once
from snaprt.host.whole_files import REMEDIES, from_root, remedy_sentence


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return `` Did you mean 'replay'?`` for a mistyped word; empty if nothing is like it."""
    near = difflib.get_close_matches(word, words, n=1)
    return f" Did you mean '{near[0]}'?" if near else ""


class LazyGroup(click.Group):
    """A group that knows where its commands live. Without a command it prints its help.

    Args:
        table: Where each command lives, "module:attribute", as seen from this package, and its line
            in the help, by name.
        aliases: Other names, which no help shows, and the command that each stands for.
        options: As for ``click.Group``.
    """

    def __init__(
        self,
        *,
        table: Mapping[str, tuple[str, str]],
        aliases: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._table = table
        self._aliases = aliases or {}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Print the help to stdout and leave with status 0 where there are no words at all."""
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or say which one is spelled like it."""
        args = [self._aliases.get(args[0], args[0]), *args[1:]]
        if not ctx.resilient_parsing and args[0] not in self._table and args[0][:1] != "-":
            ctx.fail(f"No such command {args[0]!r}.{did_you_mean(args[0], self._table)}")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in self._table:
            return None
        module, attribute = self._table[cmd_name][0].split(":")
        with interrupted_at_once():
            command = getattr(importlib.import_module(module, __package__), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands with their lines, and import none of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self._table.items()])


@dataclass(frozen=True)
class _Entry:
    """One command."""

    where: str  # where it lives, "module:attribute", as seen from this package
    summary: str  # its line in ``snaprt --help``
    # Whether XLA_FLAGS are settled before it runs; XLA would end the process over a flag that it
    # does not know. ``run`` leaves them to the program, ``doctor`` to a check.
    uses_xla: bool = False


COMMANDS: Final[Mapping[str, _Entry]] = {
    "demo": _Entry(
        ".demo.command:command", "Run a small training job as a demo of everything.", uses_xla=True
    ),
    "run": _Entry(".run.command:command", "Run a Python program under snaprt."),
    "launch": _Entry(".run.launch:command", "Run a Python program as the processes of one job."),
    "replay": _Entry(
        ".replay.command:command",
        "Replay recorded executions and compare the outputs.",
        uses_xla=True,
    ),
    "localize": _Entry(
        ".replay.localize:command", "Find the operation where two sides differ.", uses_xla=True
    ),
    "minify": _Entry(
        ".replay.minify:command", "Find the smallest program that still fails.", uses_xla=True
    ),
    "report": _Entry(".replay.report:command", "Show the results of a replay, also as a page."),
    "inspect": _Entry(
        ".snapshot.inspect:command", "Print what is in a file without running it.", uses_xla=True
    ),
    "ls": _Entry(".snapshot.ls:command", "List recorded executions."),
    "diff": _Entry(
        ".snapshot.diff:command", "Show how two recorded executions differ.", uses_xla=True
    ),
    "export": _Entry(
        ".snapshot.export:command",
        "Convert a recorded execution for other programs.",
        uses_xla=True,
    ),
    "pack": _Entry(".snapshot.pack:pack_command", "Pack recorded executions into one file."),
    "unpack": _Entry(".snapshot.pack:unpack_command", "Unpack a packed file into a folder."),
    "prune": _Entry(".snapshot.pack:prune_command", "Remove stored arrays that no snapshot uses."),
    "cache": _Entry(".main:cache_group", "Inspect, clean and fill the compile cache."),
    "metrics": _Entry(".metrics:command", "Print saved metrics."),
    "profile": _Entry(
        ".profile.command:command", "Print the top of a profile: programs, operations, gaps."
    ),
    "bundle": _Entry(
        ".bundle.command:command", "Run a program and pack its logs, graphs and metrics."
    ),
    "stacks": _Entry(".stacks:command", "Print the stacks of a running process."),
    "doctor": _Entry(".doctor:command", "Check that everything works on this machine."),
    "triage": _Entry(
        ".triage:command", "Run a program in each mode, and report which one fails first."
    ),
    "help": _Entry(".environment:command", "Print help on a command or topic."),
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
        if os.environ.get("XLA_FLAGS"):
            from snaprt.snapshot.recorder import flags  # imports JAX

            flags.take_over()
        return run(*words, **options)

    settled = copy.copy(command)
    settled.callback = settle_and_run
    return settled


def _print_version(context: click.Context, _: click.Parameter, is_given: bool) -> None:
    if is_given and not context.resilient_parsing:
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
    help="Print the version and exit.",
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
    _open_closed_streams()
    try:
        status = group.main(arguments, prog_name="snaprt", standalone_mode=False)
        return status if isinstance(status, int) else output.EXIT_OK
    except _ReaderGoneError:
        _drop(sys.stdout)
        return output.EXIT_BROKEN_PIPE
    except click.Abort as aborted:
        return _after_abort(aborted)
    except KeyboardInterrupt:
        return output.EXIT_INTERRUPTED
    except Exception as error:
        _explain(error, sys.argv[1:] if arguments is None else arguments)
        _drop_if_full(sys.stdout)  # which has just been told
        return output.EXIT_FAILURE
    finally:
        _drop_if_full(sys.stderr)


def _drop_if_full(stream: TextIO) -> None:
    try:
        stream.flush()
    except output.NO_STREAM:
        pass
    except OSError:
        _drop(stream)


def _drop(stream: TextIO) -> None:
    """Let what a stream still holds not raise again when Python flushes it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _open_closed_streams() -> None:
    """Open the null device for standard streams that were closed when this process started.

    Else other files, and those of child processes, take their numbers.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, null == number)
            setattr(sys, name, os.fdopen(null, "w" if number else "r"))


def _after_abort(aborted: click.Abort) -> int:
    if isinstance(aborted.__cause__ or aborted.__context__, KeyboardInterrupt):
        return output.EXIT_INTERRUPTED
    output.error("the question was not answered", "Where nobody can answer, pass --yes.")
    return output.EXIT_FAILURE


def _explain(error: Exception, arguments: Sequence[str]) -> None:
    no_hint = f"See `snaprt help{_command_in(arguments)}`."
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx is not None else "snaprt"
        output.error(_sentence(error.format_message()), f"See `{path} --help` for usage.")
    elif isinstance(error, click.ClickException):
        output.error(_sentence(error.format_message()))
    elif isinstance(error, SnaprtError | CacheError):
        output.error(error.message, error.hint or no_hint)
    elif isinstance(error, OSError | MemoryError):
        # The system refused. Where our code should have seen it coming, the log has the traceback.
        logging.getLogger("snaprt.cli").debug("the command failed", exc_info=error)
        output.error(*_refusal(error, no_hint))
    elif isinstance(error, ValueError) and _is_of_unimported_jax(error):
        output.error(f"JAX cannot be imported: {error}", "Correct or unset this variable.")
    else:
        traceback.print_exception(error)
        output.error(
            f"internal error ({type(error).__name__})",
            "This is a bug in snaprt, not in your command. Please report it with the lines above.",
        )


def _is_of_unimported_jax(error: Exception) -> bool:
    """Return whether JAX raised an error while it was imported, as over a setting of its own."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return "jax" not in sys.modules and frame.f_globals.get("__name__", "").startswith("jax.")


def _command_in(arguments: Sequence[str]) -> str:
    """Return the command that the user called, after a space; empty where there is none."""
    table: Mapping[str, object] = COMMANDS
    words = ""
    for word in arguments:
        if word in table:
            words += f" {word}"
            table = CACHE_COMMANDS if word == "cache" else {}
    return words


_HINTS: Final[Mapping[int, str]] = {
    errno.EROFS: "Use a directory that can be written to.",
    errno.ENAMETOOLONG: "Use a shorter file name.",
    errno.ENOTDIR: "Part of this path is a file, not a directory.",
    errno.EISDIR: "Name a file, not a directory.",
    errno.ELOOP: "The symbolic links in this path form a loop.",
    errno.ENOENT: "Check the spelling, and that the directory exists.",
}


def _refusal(error: OSError | MemoryError, no_hint: str) -> tuple[str, str]:
    """Return what to say, and what to do, where the system refused what was asked of it."""
    if isinstance(error, MemoryError):
        return "out of memory", "Close other programs, or use a smaller file or fewer at a time."
    is_nowhere = not from_root(Path()).is_absolute()
    if is_nowhere and error.errno == errno.ENOENT and error.filename is None:
        return "the working directory was removed", "Change to a directory that exists."
    where = f": {error.filename}" if error.filename is not None else ""
    reason = error.strerror or str(error) or type(error).__name__
    if error.errno in REMEDIES:
        return f"{reason}{where}", remedy_sentence(error, "use another directory")
    return f"{reason}{where}", _HINTS.get(error.errno or 0, no_hint)


def _sentence(message: str) -> str:
    return message.rstrip(".")


#: Where each command lives, "module:attribute", and its line in ``snaprt cache --help``.
CACHE_COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "stats": (
        "snaprt.cli.cache.stats:stats",
        "Print hits, misses and their reasons, time saved, size.",
    ),
    "ls": ("snaprt.cli.cache.entries:ls", "List the entries."),
    "show": ("snaprt.cli.cache.entries:show", "Print the details of an entry."),
    "du": ("snaprt.cli.cache.entries:du", "Print disk usage."),
    "path": ("snaprt.cli.cache.entries:path", "Print the cache directory in use."),
    "why": ("snaprt.cli.cache.why:why", "Explain why a program was not in the cache."),
    "verify": ("snaprt.cli.cache.upkeep:verify", "Check every entry for damage."),
    "gc": ("snaprt.cli.cache.upkeep:gc", "Remove the least valuable entries to meet a size."),
    "pin": ("snaprt.cli.cache.upkeep:pin", "Protect entries from eviction."),
    "unpin": ("snaprt.cli.cache.upkeep:unpin", "Allow entries to be evicted again."),
    "clear": ("snaprt.cli.cache.upkeep:clear", "Remove every entry."),
    "collect": ("snaprt.cli.cache.warm:collect", "Save the programs that a run would compile."),
    "warm": ("snaprt.cli.cache.warm:warm", "Compile ahead of time, in parallel."),
    "export": ("snaprt.cli.cache.bundle:export", "Write entries to one file."),
    "import": ("snaprt.cli.cache.bundle:import_", "Import entries from such a file."),
}


@click.group("cache", cls=LazyGroup, table=CACHE_COMMANDS)
def cache_group() -> None:
    """Inspect the compile cache and maintain it.

    \b
    Example:
      snaprt cache stats
      snaprt cache ls --sort saved --limit 10
      snaprt cache why --last
    """
