"""``snaprt cache why``: which part of a key differs, and where in the program."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
from rich.padding import Padding
from rich.text import Text
from snaprt_cache import Cache, CacheError, Key
from snaprt_cache.miss.difference import MODULE, PartDifference, explain
from snaprt_cache.miss.journal import Miss

from snaprt.cli import output
from snaprt.cli.cache.misses import Neighbors
from snaprt.cli.cache.words import (
    SCHEMA_VERSION,
    SHORT_KEY,
    counted,
    dir_option,
    moment_in_words,
    one_entry,
    print_pairs,
)
from snaprt.compile.cached.store import open_cache
from snaprt.compile.summaries import (
    OperationDifference,
    ProgramDifference,
    compare,
    read_summary,
)

_KINDS: Final = {
    "shapes": "The same operations, with other shapes",
    "constants": "The same operations, with other constants",
    "wiring": "The same operations, which take other results",
    "code": "Other operations",
    "nothing": "Every operation is the same",
}


#: Parts of a key that say which JAX wrote a module.
_JAX: Final = ("jax", "jaxlib")
#: Attributes of an argument that gives its memory away.
_DONATION: Final = ("tf.aliasing_output", "jax.buffer_donor")
_MOST_ATTRIBUTES: Final = 8


@click.command("why")
@click.argument("keys", nargs=-1, metavar="[A] [B]")
@click.option("--last", is_flag=True, help="Explain the last miss.")
@click.option(
    "--most",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="So many differing operations.",
)
@dir_option
@output.json_option
@click.pass_context
def why(
    context: click.Context,
    keys: tuple[str, ...],
    last: bool,
    most: int,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Say in which part the keys of A and B differ, or why the last miss missed.

    A and B are keys as `snaprt cache ls` prints them, or the starts of them. A alone is compared
    with the entry that was there before it and is most like it.

    If the programs differ, the first operation that differs is printed, with the line of the
    user's code that it comes from.

    \b
    Example:
      snaprt cache why --last
      snaprt cache why 3f9a 71c0 --most 5
    """
    if last == bool(keys) or len(keys) > 2:
        raise click.UsageError("give one or two keys, or --last", context)
    cache = open_cache(folder)
    if len(keys) == 2:
        _explain_two(cache, keys, most, as_json)
    elif keys:
        row = one_entry(cache, keys[0])
        _explain_one(cache, _key_of(cache, row.key), row.name, row.created, None, most, as_json)
    else:
        _explain_last(cache, most, as_json)


def _explain_last(cache: Cache, most: int, as_json: bool) -> None:
    recorded = Neighbors(cache).misses
    if recorded:
        miss = recorded[-1]
        _explain_one(cache, miss.key, miss.name, miss.time, miss, most, as_json)
    elif as_json:
        output.emit_json("snaprt.cache.why", SCHEMA_VERSION, {"miss": None})
    else:
        output.log.print(f"No miss is recorded in {cache.path}.")


def _explain_two(cache: Cache, prefixes: Sequence[str], most: int, as_json: bool) -> None:
    before, after = (one_entry(cache, prefix) for prefix in prefixes)
    old, new = _key_of(cache, before.key), _key_of(cache, after.key)
    differences = explain(old, new)
    program = _compare_programs(Neighbors(cache), before.key, after.key, differences, most)
    if as_json:
        content = {"before": before, "after": after, **_as_data(differences, program)}
        output.emit_json("snaprt.cache.why", SCHEMA_VERSION, content)
        return
    print_pairs(
        [
            (letter, f"{row.key[:SHORT_KEY]}, {row.name}, {_ago(row.created)}")
            for letter, row in (("A", before), ("B", after))
        ]
    )
    _print_differences(differences, program, len(new.parts))


def _explain_one(
    cache: Cache, key: Key, name: str, moment: float, miss: Miss | None, most: int, as_json: bool
) -> None:
    neighbors = Neighbors(cache)
    if miss is not None:
        found = neighbors.explain_miss(miss)
    else:
        found = neighbors.explain_key(key, name, moment)
    nearby = found.neighbor
    program = None
    if nearby is not None:
        program = _compare_programs(neighbors, nearby.key, key.digest, found.differences, most)
    if as_json:
        content = {
            "key": key.digest,
            "name": name,
            "miss": None if miss is None else _miss_as_data(miss),
            "reason": found.reason,
            "nearest": nearby,
            **_as_data(found.differences, program),
        }
        output.emit_json("snaprt.cache.why", SCHEMA_VERSION, content)
        return
    asked = f", asked for by {miss.script}, process {miss.process}" if miss is not None else ""
    pairs = [
        ("miss" if miss else "entry", f"{key.digest[:SHORT_KEY]}, {_ago(moment)}"),
        ("program", f"{name}{asked}"),
        ("reason", found.reason),
    ]
    if nearby is not None:
        pairs.append(("nearest", f"{nearby.key[:SHORT_KEY]}, {_ago(nearby.created)}"))
        pairs.append(("", nearby.name))
    print_pairs(pairs)
    if nearby is not None:
        _print_differences(found.differences, program, len(key.parts))


def _key_of(cache: Cache, digest: str) -> Key:
    header = cache.header(digest)
    if header is None:
        raise CacheError(
            f"the entry {digest[:SHORT_KEY]} is damaged, or was removed just now",
            hint="It is compiled and stored again when a program next needs it.",
        )
    return header.key


def _compare_programs(
    neighbors: Neighbors,
    before: str,
    after: str,
    differences: Sequence[PartDifference],
    most: int,
) -> ProgramDifference | None:
    if not any(difference.part == MODULE for difference in differences):
        return None
    old, new = neighbors.summary(before), neighbors.summary(after)
    if not (old and new):
        return None
    return compare(read_summary(old), read_summary(new), most=most)


def _as_data(
    differences: Sequence[PartDifference], program: ProgramDifference | None
) -> dict[str, Any]:
    return {"differences": differences, "program": program}


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
        _say("\nTheir keys are the same.")
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
        _say("One of them has no list of its operations, so it is not known where.", indent=4)
        return
    places = counted(program.count, "place")
    _say(f"{_KINDS[program.kind]}{f', in {places}' if program.count else ''}.", indent=4)
    if program.is_partial:
        _say("The list of operations is cut: its end was not compared.", indent=4)
    for name, before, after in program.arguments:
        _say(f"argument {name}: {before or 'none'} -> {after or 'none'}", indent=4)
    if any(where.endswith(_DONATION) for where, *_ in program.attributes):
        _say("They donate otherwise: other arguments give their memory to results.", indent=4)
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
            "The module differs in its form: another version of JAX wrote it."
            if other_jax
            else "They differ in what these lists leave out, as that of a large constant's values.",
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
