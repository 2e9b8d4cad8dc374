"""A group of commands that are imported when they are asked for, and guesses what was meant."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from typing import Any

import click


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'replay'?`` for a mistyped word; empty if nothing is like it."""
    near = difflib.get_close_matches(word, known, n=1)
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
        command = getattr(importlib.import_module(module, __package__), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands with their lines, and import none of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self._table.items()])
