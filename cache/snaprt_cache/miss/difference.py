"""Says in words how two keys differ, and with which entry a miss is best compared.

Knows the named parts of keys and how their values are written; never what a program does.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from snaprt_cache.key import Key

_Candidate = TypeVar("_Candidate")

#: The part that says what the program computes; all others say with what it was compiled.
MODULE: Final = "module"
# What differs by itself where another part does, which says more.
_FOLLOWS: Final[Mapping[str, str]] = {"signature": MODULE, "parsed flags": "flags"}
# The form in which the executable is stored.
_FORM: Final = "kind"
# What a digest is cut to where a person reads it.
_SHORT_DIGEST: Final = 12


@dataclass(frozen=True)
class PartDifference:
    """One named part in which two keys differ.

    Attributes:
        part: Its name.
        before: Its value in the first key; None where that key has no such part.
        after: Its value in the second.
        words: How they differ, one line each.
    """

    part: str
    before: str | None
    after: str | None
    words: tuple[str, ...]


def explain(before: Key, after: Key) -> list[PartDifference]:
    """Return the parts in which two keys differ, in the order of the second key.

    Args:
        before: The key one has, such as that of an entry.
        after: The key that one asked for.
    """
    return _explain(_values(before), _values(after))


def _explain(old: Mapping[str, str], new: Mapping[str, str]) -> list[PartDifference]:
    names = [*new, *(name for name in old if name not in new)]
    differing = [name for name in names if old.get(name) != new.get(name)]
    return [
        PartDifference(
            name, old.get(name), new.get(name), _words(name, old.get(name), new.get(name))
        )
        for name in differing
        if _FOLLOWS.get(name) not in differing
    ]


def _values(key: Key) -> dict[str, str]:
    """Return the parts by name; a name that occurs again gets its number."""
    values: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for part in key.parts:
        seen[part.name] += 1
        name = part.name if seen[part.name] == 1 else f"{part.name} ({seen[part.name]})"
        values[name] = part.value
    return values


def _words(name: str, old: str | None, new: str | None) -> tuple[str, ...]:
    if old is None:
        return (f"only the second key has it: {_short(new or '')}",)
    if new is None:
        return (f"only the first key has it: {_short(old)}",)
    say = next((say for start, say in _SAYINGS if name.startswith(start)), _as_values)
    if say in _OF_TEXT and (_is_digest(old) or _is_digest(new)):
        say = _as_values
    return say(old, new)


def _as_values(old: str, new: str) -> tuple[str, ...]:
    return (f"{_short(old)} -> {_short(new)}",)


def _as_a_program(old: str, new: str) -> tuple[str, ...]:
    return (f"another program: {_short(old)} -> {_short(new)}",)


def _as_a_file(old: str, new: str) -> tuple[str, ...]:
    return (f"the file has another content: {_short(old)} -> {_short(new)}",)


def _as_options_in_effect(old: str, new: str) -> tuple[str, ...]:
    return (f"XLA parsed other flags, or JAX set other options: {_short(old)} -> {_short(new)}",)


def _as_a_signature(old: str, new: str) -> tuple[str, ...]:
    return (f"called with other types, shardings or donations: {_short(old)} -> {_short(new)}",)


def _as_flags(old: str, new: str) -> tuple[str, ...]:
    return _by_name(_flags(old), _flags(new))


def _as_settings(old: str, new: str) -> tuple[str, ...]:
    return _by_name(_assignments(old.split()), _assignments(new.split()))


def _as_features(old: str, new: str) -> tuple[str, ...]:
    return (f"the CPU has other instructions: {old or 'none'} -> {new or 'none'}",)


#: How the values of a part are told apart: the start of the part's name, and what says it.
_SAYINGS: Final[tuple[tuple[str, Callable[[str, str], tuple[str, ...]]], ...]] = (
    (MODULE, _as_a_program),
    ("binary ", _as_a_file),
    ("file ", _as_a_file),
    ("flags", _as_flags),
    ("parsed flags", _as_options_in_effect),
    ("signature", _as_a_signature),
    ("settings", _as_settings),
    ("topology", _as_settings),
    ("cpu_features", _as_features),
)


#: Those that read a value, where others print it.
_OF_TEXT: Final = (_as_flags, _as_settings)


def _flags(text: str) -> dict[str, tuple[str, ...]]:
    try:
        words = shlex.split(text)
    except ValueError:  # an open quote
        words = text.split()
    return _assignments(words)


def _assignments(words: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the values given to each name, in their order: a flag may be given twice."""
    found: dict[str, tuple[str, ...]] = {}
    for word in words:
        name, _, value = word.partition("=")
        found[name] = (*found.get(name, ()), value)
    return found


def _by_name(
    old: Mapping[str, tuple[str, ...]], new: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    added = [f"added {_given(name, new[name])}" for name in new if name not in old]
    removed = [f"removed {_given(name, old[name])}" for name in old if name not in new]
    changed = [
        f"changed {name}: {' '.join(old[name])} -> {' '.join(new[name])}"
        for name in new
        if name in old and old[name] != new[name]
    ]
    return (*added, *removed, *changed) or ("the same, in another order",)


def _given(name: str, values: Sequence[str]) -> str:
    return " ".join(f"{name}={value}" if value else name for value in values)


def _short(value: str) -> str:
    return value[:_SHORT_DIGEST] if _is_digest(value) else value or "nothing"


def _is_digest(value: str) -> bool:
    return len(value) == 64 and set(value) <= set("0123456789abcdef")


def nearest(
    wanted: Key, name: str, candidates: Iterable[tuple[_Candidate, Key, str]]
) -> list[_Candidate]:
    """Return the candidates that a miss is best compared with, in the order given.

    Candidates of another form of executable are left out. Those of the same module come first,
    then those of the same name, then those whose keys have the most parts in common. What is
    returned is equal by that measure.

    Args:
        wanted: The key that was asked for.
        name: The name of the program that asked.
        candidates: What there is, with its key and the name of its program.
    """
    values = _values(wanted)
    best: list[_Candidate] = []
    best_likeness = (False, False, -1)
    for candidate, key, candidate_name in candidates:
        other = _values(key)
        if other.get(_FORM) != values.get(_FORM):
            continue
        same = sum(other.get(part) == value for part, value in values.items())
        same_module = MODULE in values and other.get(MODULE) == values[MODULE]
        likeness = (same_module, candidate_name == name, same)
        if likeness > best_likeness:
            best, best_likeness = [], likeness
        if likeness == best_likeness:
            best.append(candidate)
    return best


OTHER_MODULE: Final = "changed shape or code"
OTHER_PART: Final = "another part of the key"
#: The start of a part's name, and why a miss missed if that part differs. The first row that
#: applies says it: another compiler may be the very reason for another module.
_REASONS: Final = (
    ("jaxlib", "other jaxlib"),
    ("binary ", "other jaxlib"),
    ("jax", "other JAX"),
    ("plugin ", "other plugin"),
    ("platform", "other device"),
    ("device_kind", "other device"),
    ("cpu_features", "other device"),
    (MODULE, OTHER_MODULE),
    ("signature", "other types, shardings or donations"),
    ("topology", "other devices"),
    ("flags", "other flags"),
    ("file ", "other flags"),
    ("parsed flags", "other flags"),
    ("options", "other options"),
    ("settings", "other settings"),
)


def reason(differences: Sequence[PartDifference]) -> str:
    """Return why a miss missed, from how its key differs from the nearest entry's."""
    for start, words in _REASONS:
        if any(difference.part.startswith(start) for difference in differences):
            return words
    return OTHER_PART
