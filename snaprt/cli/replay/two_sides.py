"""Options of the commands that look at two sides of a program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from snaprt_replay import batch
from snaprt_replay.run.variants.variants import Variant, parse_variant

from snaprt.cli import output
from snaprt.errors import UsageError

_AnyFunction = TypeVar("_AnyFunction", bound=Callable[..., Any])


def _variant(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> Variant | None:
    return None if value is None else parse_variant(value)


def variant_option(flag: str, name: str, help: str) -> Callable[[_AnyFunction], _AnyFunction]:  # noqa: A002 (click's word)
    """Return the option of one side, passed to the command as a `Variant` called ``name``."""
    return click.option(flag, name, metavar="VARIANT", callback=_variant, help=help)


def one_execution(path: Path) -> Path:
    """Return the file that a folder stands for which holds one recorded execution.

    Raises:
        UsageError: It holds none, or several.
    """
    if not path.is_dir():
        return path
    files = batch.executions([path])
    files = [file for file in files if file.parent == path] or files  # not those of `minify`
    if len(files) > 1:
        raise UsageError(
            f"{path} holds {len(files)} recorded executions", hint=f"name one, such as {files[0]}"
        )
    return files[0]


def against_option(function: _AnyFunction) -> _AnyFunction:
    """Give a command ``--against OTHER``."""
    return click.option(
        "--against",
        type=output.PATH,
        metavar="OTHER",
        help="Program of side B: an edited version of FILE, or the same program recorded "
        "elsewhere.",
    )(function)


def search_options(function: _AnyFunction) -> _AnyFunction:
    """Give a command ``--budget``, ``--timeout``, ``--inputs`` and ``--random`` (``seed``)."""
    for option in reversed(_SEARCH_OPTIONS):
        function = option(function)
    return function


_SEARCH_OPTIONS: Final = (
    click.option(
        "--budget",
        type=output.LIMIT,
        metavar="SECONDS",
        help="Time limit for the search.",
    ),
    click.option(
        "--timeout",
        type=output.LIMIT_FROM_1,
        default=120.0,
        metavar="SECONDS",
        help="Time limit for compiling and running each program.",
        show_default=True,
    ),
    click.option("--inputs", type=output.PATH, metavar="FILE.npz", help="Run on these inputs."),
    click.option(
        "--random", "seed", type=click.IntRange(min=0), help="Run on random inputs with this seed."
    ),
)
