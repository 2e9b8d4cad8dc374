"""How every command speaks: data to stdout, the rest to stderr, JSON, errors and exit statuses.

A command leaves with a status other than 0 through ``context.exit(status)``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import shutil
import stat
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, Final, TextIO, TypeVar, cast

import click
from click.core import ParameterSource
from rich.console import Console
from rich.text import Text

from snaprt import shown
from snaprt.errors import UsageError
from snaprt.host import interruptions
from snaprt.host.whole_files import named_path, writing
from snaprt.units import MOST_SECONDS

EXIT_OK: Final = 0
EXIT_MISMATCH: Final = 1
EXIT_FAILURE: Final = 2
EXIT_INTERRUPTED: Final = interruptions.STATUS
EXIT_BROKEN_PIPE: Final = 141

# Lines in a file or a pipe are not cut at a terminal's width, unless COLUMNS asks for it.
_WIDTH_OFF_A_TERMINAL: Final = 240

#: Types of options and arguments that name files and folders.
PATH: Final = click.Path(path_type=Path)
FOLDER: Final = click.Path(path_type=Path, file_okay=False)


class _Seconds(click.FloatRange):
    """A range of seconds; a NaN is in none, and is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return seconds


#: Types of options that take seconds: how long ago, how long at most, and the same but never 0.
AGE: Final = _Seconds(min=0)
LIMIT: Final = _Seconds(min=0, max=MOST_SECONDS)
LIMIT_OVER_0: Final = _Seconds(min=0, min_open=True, max=MOST_SECONDS)
LIMIT_FROM_1: Final = _Seconds(min=1, max=MOST_SECONDS)

_AnyFunction = TypeVar("_AnyFunction", bound=Callable[..., Any])


# A program may have closed a standard stream, set it to None, or replaced it by less than a file.
NO_STREAM: Final = (ValueError, AttributeError)


class _Remarks:
    """What is standard error at the moment. What it does not take is lost, but no status is."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, *NO_STREAM):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, *NO_STREAM):
            sys.stderr.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


class _Results:
    """What is standard output at the moment. What its encoding lacks is spelt out."""

    def write(self, text: str) -> int:
        try:
            return sys.stdout.write(text)
        except UnicodeEncodeError:
            encoding = sys.stdout.encoding
            return sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


def _console(file: object, *, stderr: bool = False) -> Console:
    make = functools.partial(
        Console,
        file=cast("TextIO", file),
        stderr=stderr,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=True,
    )
    console = make()
    # A COLUMNS of 0 says nothing about the width, as for `shutil`; rich would print nothing.
    if console.is_terminal:
        return console if console.width else make(width=shutil.get_terminal_size().columns)
    columns = os.environ.get("COLUMNS", "")
    is_width = columns.isdecimal() and int(columns) > 0
    return console if is_width else make(width=_WIDTH_OFF_A_TERMINAL)


#: For data: what the user asked for.
console: Final = _console(_Results())
#: For progress and logs.
log: Final = _console(_Remarks(), stderr=True)


def error(message: str, hint: str = "") -> None:
    """Print ``error:`` and what happened, and below it ``hint:`` and what to do, to stderr.

    Both may have words from files and from the command line.
    """
    log.print(Text.assemble(("error:", "bold red"), f" {shown.lines(message)}"))
    if hint:
        log.print()
        log.print(Text.assemble(("hint:", "bold cyan"), f" {shown.lines(hint)}"))


def writable(folder: Path, option: str) -> Path:
    """Return a folder as an absolute path, made if it is not there.

    Raises:
        UsageError: It cannot be written to.
    """
    folder = named_path(folder)
    refuse_unwritable(folder, "folder", option)
    with writing(f"write to {folder}", f"name another directory with {option}"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def refuse_unwritable(path: Path, kind: str, named_by: str) -> None:
    """Refuse a path that cannot be written, before a run that may take hours; nothing is made.

    Args:
        path: From the root.
        kind: ``file`` or ``folder``.
        named_by: The option or variable that names it.

    Raises:
        UsageError: It cannot be written to.
    """
    obstacle, hint = _OBSTACLES[kind]
    reason = obstacle(path)
    if reason:
        raise UsageError(f"cannot write to {path}: {reason}", hint=hint.format(named_by))


def _obstacle_to_file(path: Path) -> str:
    """Return why a file cannot be written; empty where nothing speaks against it."""
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            return "it is a directory"
    except FileNotFoundError:
        if not path.parent.is_dir():
            return f"no directory {path.parent}"
    except NotADirectoryError:
        return f"no directory {path.parent}"
    except OSError as error:
        return error.strerror or str(error)
    # Some files are written in place, and others replaced.
    return "" if os.access(path, os.W_OK) else _obstacle_to_entry(path.parent)


def _obstacle_to_folder(path: Path) -> str:
    """Return why a folder cannot be made or written into; empty where nothing speaks against it."""
    try:
        if not stat.S_ISDIR(os.stat(path).st_mode):
            return "not a directory"
    except FileNotFoundError:
        if path.is_symlink():
            return "a symbolic link that leads nowhere"
        path = next(parent for parent in path.parents if parent.exists())
    except OSError as error:
        return error.strerror or str(error)
    return _obstacle_to_entry(path)


def _obstacle_to_entry(folder: Path) -> str:
    is_writable = os.access(folder, os.W_OK | os.X_OK)
    return "" if is_writable else f"the directory {folder} is not writable"


#: For each kind of path: what speaks against it, and what to do.
_OBSTACLES: Final = {
    "file": (_obstacle_to_file, "Name a file in an existing directory with {}."),
    "folder": (
        _obstacle_to_folder,
        "Name a directory with {}; it is created if it does not exist.",
    ),
}


def emit_json(schema: str, data: Mapping[str, Any], version: int = 1) -> None:
    """Print one JSON object to stdout: ``data`` with the name and version of its schema before it.

    Args:
        schema: The full name, such as ``snaprt.replay``.
        data: As for `print_json`.
        version: Goes up when a reader of the older form would misread the new one.
    """
    print_json({"schema": schema, "version": version, **data})


def print_json(data: Mapping[str, Any]) -> None:
    """Print a JSON object to stdout.

    Args:
        data: Also dataclasses, paths, numpy scalars, tuples and sets. Numbers that JSON does not
            have become the strings ``NaN``, ``Infinity`` and ``-Infinity``. It is UTF-8 in every
            locale; bytes of file names and variables that are not are escaped: ``\\udce9``.
    """
    text = json.dumps(_plain(data), indent=2, ensure_ascii=False, allow_nan=False)
    _print(text, text.encode("utf-8", "backslashreplace"))  # whose escapes are JSON's own


def print_line(text: object) -> None:
    """Print a line of data to stdout: bytes of file names that are not UTF-8 as they are."""
    line = str(text)
    try:
        _print(line, os.fsencode(line))
    except UnicodeEncodeError:  # surrogates that stand for no byte
        _print(line, line.encode("utf-8", "backslashreplace"))


def _print(text: str, encoded: bytes) -> None:
    # Who calls us in this process may have put a `StringIO` there, which takes no bytes.
    click.echo(encoded if hasattr(sys.stdout, "buffer") else text)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(item) for item in value), key=str)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, PurePath):
        return str(value)
    item = getattr(value, "item", None)  # numpy's scalars and 0-d arrays
    if callable(item):
        return _plain(item())
    raise TypeError(f"cannot write {type(value).__name__} as JSON")


def given_options(
    context: click.Context, options: Iterable[click.Parameter]
) -> Iterator[tuple[click.Parameter, tuple[str, ...]]]:
    """Yield the options that the user gave, each with the words that give it again."""
    for option in options:
        name = option.name or ""
        if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params.get(name)
        if isinstance(value, bool):
            yield option, ((option.opts if value else option.secondary_opts)[0],)
            continue
        if isinstance(value, dict):
            value = [f"{key}={setting}" for key, setting in value.items()]
        values = value if isinstance(value, list | tuple) else [value]
        yield option, tuple(word for item in values for word in (option.opts[0], str(item)))


def given_words(context: click.Context, without: Collection[str] = ()) -> tuple[str, ...]:
    """Return the options of a command as the user gave them.

    Args:
        context: Of the running command.
        without: Those that are left out, as the command's function calls them.
    """
    options = [
        option
        for option in context.command.params
        if option.name in context.params and option.name not in without
    ]
    return tuple(word for _, words in given_options(context, options) for word in words)


def refuse_options(context: click.Context, names: Collection[str], why: str, hint: str) -> None:
    """Refuse options that would have no effect.

    Args:
        context: Of the running command.
        names: The options, as the command's function calls them.
        why: Follows the option's name in the error.
        hint: What to do.

    Raises:
        UsageError: The user gave one of them.
    """
    named = [option for option in context.command.params if option.name in names]
    for option, _ in given_options(context, named):
        raise UsageError(f"{option.opts[0]} {why}", hint=hint)


def json_option(function: _AnyFunction) -> _AnyFunction:
    """Give a command the option ``--json``, passed to it as ``as_json``."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print the result as JSON with a versioned schema."
    )(function)
