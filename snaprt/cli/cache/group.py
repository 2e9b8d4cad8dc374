"""``snaprt cache``: the table of its sub-commands, each imported when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import click

from snaprt.cli.lazy_group import LazyGroup

#: Where each command lives, "module:attribute", and its line in ``snaprt cache --help``.
COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
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


@click.group("cache", cls=LazyGroup, table=COMMANDS)
def command() -> None:
    """Inspect the compile cache and maintain it.

    \b
    Example:
      snaprt cache stats
      snaprt cache ls --sort saved --limit 10
      snaprt cache why --last
    """
