"""``snaprt cache``: the table of its sub-commands, each imported when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import click

from snaprt.cli.lazy_group import LazyGroup

#: Where each command lives, "module:attribute", and its line in ``snaprt cache --help``.
COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "stats": ("snaprt.cli.cache.stats:stats", "Print hits, misses and why, seconds saved, bytes."),
    "ls": ("snaprt.cli.cache.entries:ls", "List the entries."),
    "show": ("snaprt.cli.cache.entries:show", "Print what is known about an entry."),
    "du": ("snaprt.cli.cache.entries:du", "Print what takes the space."),
    "path": ("snaprt.cli.cache.entries:path", "Print the cache directory in use."),
    "why": ("snaprt.cli.cache.why:why", "Say why a program was not in the cache."),
    "verify": ("snaprt.cli.cache.upkeep:verify", "Check every entry for damage."),
    "gc": ("snaprt.cli.cache.upkeep:gc", "Remove what is worth least until the rest fits."),
    "pin": ("snaprt.cli.cache.upkeep:pin", "Never evict an entry."),
    "unpin": ("snaprt.cli.cache.upkeep:unpin", "Let an entry be evicted again."),
    "clear": ("snaprt.cli.cache.upkeep:clear", "Remove every entry."),
    "collect": ("snaprt.cli.cache.warm:collect", "Write down what a run would compile."),
    "warm": ("snaprt.cli.cache.warm:warm", "Compile ahead of time, in parallel."),
    "export": ("snaprt.cli.cache.bundle:export", "Write entries into one file."),
    "import": ("snaprt.cli.cache.bundle:import_", "Take the entries of such a file."),
}


@click.group("cache", cls=LazyGroup, table=COMMANDS)
def command() -> None:
    """Look into the compile cache, and keep it in order.

    \b
    Example:
      snaprt cache stats
      snaprt cache ls --sort saved --limit 10
      snaprt cache why --last
    """
