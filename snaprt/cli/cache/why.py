"""``snaprt cache why``: why a program was not in the cache, which part of its key differs."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click
from rich.padding import Padding
from rich.text import Text
from snaprt_cache import Cache, EntryRow, Key, modes
from snaprt_cache.reports import Miss
from snaprt_cache.why import MODULE, OTHER_MODULE, PartDifference, explain, nearest, reason

from snaprt.cli import output
from snaprt.cli.cache.words import (
    SHORT_KEY,
    cache_command,
    header_of,
    moment_in_words,
    one_entry,
    print_pairs,
)
from snaprt.compile.summaries import (
    OperationDifference,
    Profile,
    ProgramDifference,
    compare,
    likeness,
    profile,
    read_summary,
    summary_text,
)
from snaprt.units import counted

# Which entry a miss is most like.

NEW_PROGRAM: Final = "new program"
CHANGED_SHAPE: Final = "changed shape or constant"
CHANGED_CODE: Final = "changed code"
DAMAGED: Final = "damaged, set aside"
REFRESHED: Final = "made anew, in mode refresh"
REMOVED: Final = "was there, removed since"
AT_THE_SAME_TIME: Final = "another process compiled it"
# Programs with less in common than this are not versions of one another.
_LEAST_LIKENESS: Final = 0.5
# So many of the newest entries with the same module or name are compared by their keys.
_CANDIDATES: Final = 150
# So many of the newest entries, equally near by their keys, are compared by their operations.
_COMPARED: Final = 24
# What a process needs at least between a miss and the entry that it makes.
_LEAST_COMPILE_SECONDS: Final = 1.0


@dataclass(frozen=True)
class Explained:
    """A miss, or an entry, with what it is most like and how they differ."""

    key: Key
    name: str  # the program
    reason: str  # why it missed, in a few words
    neighbor: EntryRow | None  # the entry that is most like it; None where nothing is
    differences: tuple[PartDifference, ...]  # the parts of the key in which they differ


class Neighbors:
    """The entries of a cache as they are now, to compare misses with.

    Args:
        cache: The cache.
    """

    def __init__(self, cache: Cache) -> None:
        rows = {row.key: row for row in cache.entries()}
        self.rows: Final[Mapping[str, EntryRow]] = rows
        self._keys: Final = cache.keys(rows)
        self._damaged: Final = _set_aside(cache)
        self.misses: Final[Sequence[Miss]] = cache.misses()
        self._by_module: Final[dict[str, list[EntryRow]]] = {}
        self._by_name: Final[dict[str, list[EntryRow]]] = {}
        for row in rows.values():
            self._by_name.setdefault(row.name, []).append(row)
            if row.key in self._keys:
                self._by_module.setdefault(_module(self._keys[row.key]), []).append(row)
        self._cache: Final = cache
        self._profiles: Final[dict[str, Profile]] = {}

    def summary(self, digest: str) -> str:
        """Return the text of an entry's summary; empty where it has none."""
        header = self._cache.header(digest)
        return summary_text(header.metadata.get("summary")) if header is not None else ""

    def _profile(self, digest: str) -> Profile:
        if digest not in self._profiles:
            self._profiles[digest] = profile(self.summary(digest))
        return self._profiles[digest]

    def explain_miss(self, miss: Miss) -> Explained:
        """Return why a miss missed."""
        digest = miss.key.digest
        if (digest, miss.process) in self._damaged:
            return Explained(miss.key, miss.name, DAMAGED, None, ())
        if miss.obstacle:
            return Explained(miss.key, miss.name, miss.obstacle, None, ())
        if miss.mode == modes.REFRESH.name:
            return Explained(miss.key, miss.name, REFRESHED, None, ())
        before = [
            earlier.time
            for earlier in self.misses
            if earlier.key.digest == digest and earlier.time < miss.time
        ]
        if before:
            row = self.rows.get(digest)
            seconds = max(_LEAST_COMPILE_SECONDS, 2 * row.compile_seconds if row else 0.0)
            words = AT_THE_SAME_TIME if miss.time - max(before) < seconds else REMOVED
            return Explained(miss.key, miss.name, words, None, ())
        return self.explain_key(miss.key, miss.name, miss.time)

    def explain_key(self, key: Key, name: str, moment: float) -> Explained:
        """Return how a key differs from that of the nearest entry made before ``moment``."""
        likely = {
            row.key: row
            for place in (self._by_module.get(_module(key), []), self._by_name.get(name, []))
            for row in place
        }
        before = (
            row
            for row in likely.values() or self.rows.values()
            if row.key in self._keys and row.created < moment and row.key != key.digest
        )
        newest = itertools.islice(before, _CANDIDATES)
        best = nearest(key, name, [(row, self._keys[row.key], row.name) for row in newest])
        if not best:
            return Explained(key, name, NEW_PROGRAM, None, ())
        missed = self._profile(key.digest)
        alike = functools.partial(self._likeness, missed)
        neighbor = max(best[:_COMPARED], key=alike) if len(best) > 1 else best[0]
        differences = tuple(explain(self._keys[neighbor.key], key))
        words = reason(differences)
        if any(difference.part == MODULE for difference in differences):
            words = self._about_modules(words, missed, neighbor, same_name=neighbor.name == name)
        return Explained(key, name, words, neighbor, differences)

    def _likeness(self, missed: Profile, row: EntryRow) -> tuple[float, float]:
        return likeness(self._profile(row.key), missed)

    def _about_modules(
        self, words: str, missed: Profile, neighbor: EntryRow, *, same_name: bool
    ) -> str:
        """Return the reason where the modules differ, whatever else does."""
        other = self._profile(neighbor.key)
        if not (missed.kinds and other.kinds):
            return words if same_name else NEW_PROGRAM
        if likeness(other, missed)[0] < _LEAST_LIKENESS:
            return NEW_PROGRAM
        if words != OTHER_MODULE:
            return words
        return CHANGED_SHAPE if other.kinds == missed.kinds else CHANGED_CODE


def _module(key: Key) -> str:
    return next((part.value for part in key.parts if part.name == MODULE), "")


def _set_aside(cache: Cache) -> set[tuple[str, int]]:
    """Return the key and the process of each damaged blob in the quarantine, from its name."""
    damaged = set()
    try:
        names = [path.stem for path in (cache.folder / "quarantine").glob("*.bad")]
    except OSError:
        return set()
    for name in names:
        digest, _, rest = name.partition("-")
        process = rest.rpartition("-")[2]
        if process.isdecimal():
            damaged.add((digest, int(process)))
    return damaged


# The command.

_KINDS: Final = {
    "shapes": "Same operations, different shapes",
    "constants": "Same operations, different constants",
    "wiring": "Same operations, different operands",
    "code": "Different operations",
    "nothing": "All operations are identical",
}
#: Parts of a key that say which JAX wrote a module.
_JAX: Final = ("jax", "jaxlib")
#: Attributes of an argument that gives its memory away.
_DONATION: Final = ("tf.aliasing_output", "jax.buffer_donor")
_MOST_ATTRIBUTES: Final = 8


@cache_command("why")
@click.argument("keys", nargs=-1, metavar="[A] [B]")
@click.option("--last", is_flag=True, help="Explain the last miss.")
@click.option(
    "--most",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Maximum number of differing operations to show.",
)
@click.pass_context
def why(
    context: click.Context,
    keys: tuple[str, ...],
    last: bool,
    most: int,
    cache: Cache,
    as_json: bool,
) -> None:
    """Show which parts of the keys of A and B differ, or why the last miss occurred.

    A and B are keys as `snaprt cache ls` prints them, or the starts of keys. A single key is
    compared with the most similar older entry.

    If the programs differ, the first differing operation is printed with its source line.

    \b
    Example:
      snaprt cache why --last
      snaprt cache why 3f9a 71c0 --most 5
    """
    if last == bool(keys) or len(keys) > 2:
        raise click.UsageError("give one or two keys, or --last", context)
    rows = [one_entry(cache, key) for key in keys]
    listed = [header_of(cache, row.key).key for row in rows]
    neighbors = Neighbors(cache)
    miss = neighbors.misses[-1] if last and neighbors.misses else None
    if last and miss is None:
        if as_json:
            output.emit_json("snaprt.cache.why", {"miss": None})
        else:
            output.log.print(f"No miss is recorded in {cache.path}.")
        return
    if len(rows) == 2:
        before, after = rows
        key = listed[1]
        differences: Sequence[PartDifference] = explain(*listed)
        nearby: EntryRow | None = before
        content: dict[str, Any] = {"before": before, "after": after}
        pairs = [
            (letter, f"{row.key[:SHORT_KEY]}, {row.name}, {_ago(row.created)}")
            for letter, row in zip("AB", rows, strict=True)
        ]
    else:
        if miss is not None:
            explained = neighbors.explain_miss(miss)
            moment = miss.time
        else:
            moment = rows[0].created
            explained = neighbors.explain_key(listed[0], rows[0].name, moment)
        key, differences, nearby = explained.key, explained.differences, explained.neighbor
        content = {
            "key": key.digest,
            "name": explained.name,
            "miss": None if miss is None else _miss_as_data(miss),
            "reason": explained.reason,
            "nearest": nearby,
        }
        request = (
            f", requested by {miss.script}, process {miss.process}" if miss is not None else ""
        )
        pairs = [
            ("miss" if miss else "entry", f"{key.digest[:SHORT_KEY]}, {_ago(moment)}"),
            ("program", f"{explained.name}{request}"),
            ("reason", explained.reason),
        ]
        if nearby is not None:
            pairs.append(("nearest", f"{nearby.key[:SHORT_KEY]}, {_ago(nearby.created)}"))
            pairs.append(("", nearby.name))
    program = None
    if nearby is not None and any(difference.part == MODULE for difference in differences):
        old, new = neighbors.summary(nearby.key), neighbors.summary(key.digest)
        if old and new:
            program = compare(read_summary(old), read_summary(new), most=most)
    if as_json:
        content |= {"differences": differences, "program": program}
        output.emit_json("snaprt.cache.why", content)
        return
    print_pairs(pairs)
    if nearby is not None:
        _print_differences(differences, program, len(key.parts))


def _miss_as_data(miss: Miss) -> dict[str, Any]:
    return {
        "time": miss.time,
        "process": miss.process,
        "script": miss.script,
        "key_parts": [{"name": part.name, "value": part.value} for part in miss.key.parts],
    }


def _print_differences(
    differences: Sequence[PartDifference], program: ProgramDifference | None, parts: int
) -> None:
    if not differences:
        _say("\nThe keys are identical.")
        return
    verb = "differs" if len(differences) == 1 else "differ"
    _say(f"\n{len(differences)} of the {counted(parts, 'part')} of the key {verb}:")
    for difference in differences:
        _say(Text(difference.part, style="bold"), indent=2)
        for line in difference.words:
            _say(line, indent=4)
        if difference.part == MODULE:
            _print_program(program, other_jax=any(d.part in _JAX for d in differences))


def _print_program(program: ProgramDifference | None, *, other_jax: bool) -> None:
    if program is None:
        _say("The location is unknown: one of the entries has no list of operations.", indent=4)
        return
    places = counted(program.count, "place")
    _say(f"{_KINDS[program.kind]}{f', in {places}' if program.count else ''}.", indent=4)
    if program.is_partial:
        _say("The list of operations is truncated: its end was not compared.", indent=4)
    for name, before, after in program.arguments:
        _say(f"argument {name}: {before or 'none'} -> {after or 'none'}", indent=4)
    if any(where.endswith(_DONATION) for where, *_ in program.attributes):
        _say("Donation differs: results reuse the memory of different arguments.", indent=4)
    for where, before, after in program.attributes[:_MOST_ATTRIBUTES]:
        _say(f"{where}: {before or 'none'} -> {after or 'none'}", indent=4)
    if (more := len(program.attributes) - _MOST_ATTRIBUTES) > 0:
        _say(f"and {counted(more, 'attribute')} more", indent=4)
    shown = list(program.operations)
    shown += [constant for constant in program.constants if constant not in shown]
    for place in shown:
        _print_place(place)
    if program.kind == "nothing" and not program.attributes:
        _say(
            "Only the form of the module differs: another version of JAX wrote it."
            if other_jax
            else "The difference is in something that these lists omit, such as the values of a "
            "large constant.",
            indent=4,
        )


def _print_place(place: OperationDifference) -> None:
    source = place.after_source or place.before_source or "an unknown line"
    _say(Text(f"operation {place.position}, {source}", style="bold"), indent=4)
    if place.before_source and place.after_source and place.before_source != place.after_source:
        _say(f"(before: {place.before_source})", indent=4)
    _say(f"- {_brief(place.before)}", indent=6)
    _say(f"+ {_brief(place.after)}", indent=6)


def _brief(operation: str) -> str:
    return operation.replace("stablehlo.", "") or "(no such operation)"


def _ago(moment: float) -> str:
    seconds = time.time() - moment
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{moment_in_words(moment)}, {int(seconds / size)} {unit} ago"
    return f"{moment_in_words(moment)}, just now"


def _say(line: str | Text, indent: int = 0) -> None:
    text = Text(line) if isinstance(line, str) else line
    # What is too long goes on below itself, indented; no spaces fill the lines.
    output.console.print(Padding.indent(text, indent), soft_wrap=False, overflow="fold")
