"""``snaprt help``: help on a command, and the table of environment variables from settings.py."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import click
from rich.text import Text

from snaprt import settings
from snaprt.cli import output
from snaprt.cli.main import did_you_mean


@click.command("help")
@click.argument("topic", nargs=-1)
@output.json_option
@click.pass_context
def command(context: click.Context, topic: tuple[str, ...], as_json: bool) -> None:
    """Print help on TOPIC: a command, or `environment` for the environment variables.

    \b
    Example:
      snaprt help replay
      snaprt help cache stats
      snaprt help environment
    """
    if topic == ("environment",):
        _emit_environment() if as_json else _print_environment()
        return
    if as_json:
        raise click.UsageError("--json only works with `snaprt help environment`", context)
    about = context.find_root()
    topics = ["environment"]
    for word in topic:
        group, subject = about.command, None
        if isinstance(group, click.Group):
            topics += group.list_commands(about)
            subject = group.get_command(about, word)
        if subject is None:
            raise click.UsageError(
                f"no such command or topic: {' '.join(topic)!r}.{did_you_mean(word, topics)}",
                context.find_root(),
            )
        about, topics = click.Context(subject, info_name=word, parent=about), []
    click.echo(about.command.get_help(about))


def _print_environment() -> None:
    for row in settings.SETTINGS:
        output.console.print(
            Text.assemble(
                (row.name, "bold"),
                f"\n    {row.help}",
                ("\n    allowed: ", "dim"),
                row.kind.allowed,
                ("\n    default: ", "dim"),
                row.shown_default,
            )
        )


def _emit_environment() -> None:
    rows = [
        {
            "name": row.name,
            "help": row.help,
            "allowed": row.kind.allowed,
            "default": row.shown_default,
            "since": row.since,
            "set_to": os.environ.get(row.name),
        }
        for row in settings.SETTINGS
    ]
    output.emit_json("snaprt.environment", {"variables": rows})


def documented(page: str) -> str:
    """Return docs/reference/environment.md with the rows of the table as they are now."""
    rows = "".join(
        f"| `{row.name}` | {row.help} | {row.kind.allowed} | {row.shown_default} | {row.since} |\n"
        for row in settings.SETTINGS
    )
    return re.sub(r"(?<=\| --- \|\n)(\|.*\n)*", lambda _: rows, page, count=1)


if __name__ == "__main__":  # python -m snaprt.cli.environment docs/reference/environment.md
    _page = Path(sys.argv[1])
    _page.write_text(documented(_page.read_text(encoding="utf-8")), encoding="utf-8")
