"""Why something was a miss: how two keys differ, and which entry a miss is best compared with."""

from __future__ import annotations

import itertools
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from snaprt_cache.errors import CacheError
from snaprt_cache.frame import BlobHeader
from snaprt_cache.key import Key

_Candidate = TypeVar("_Candidate")
_Lines = tuple[str, ...]

#: The part that says what the program computes; all others say with what it was compiled.
MODULE: Final = "module"
OTHER_MODULE: Final = "changed shape or code"
OTHER_PART: Final = "another part of the key"
# The form in which the executable is stored.
_FORM: Final = "kind"
# What a digest is cut to where a person reads it.
_SHORT_DIGEST: Final = 12
# Where nothing may compile: how many entries are looked into, and how many parts are named.
_CANDIDATES: Final = 2000
_NAMED_PARTS: Final = 4


@dataclass(frozen=True)
class PartDifference:
    """One named part in which two keys differ."""

    part: str  # its name
    before: str | None  # its value in the first key; None where that key has no such part
    after: str | None  # its value in the second
    words: tuple[str, ...]  # how they differ, one line each


# How two values of a part are told apart.


def _saying(words: str) -> Callable[[str, str], _Lines]:
    return lambda old, new: (f"{words}{_short(old)} -> {_short(new)}",)


def _by_name(split: Callable[[str], Iterable[str]]) -> Callable[[str, str], _Lines]:
    """Tell lists of ``name=value`` apart name by name; digests of such lists cannot be."""

    def tell(old: str, new: str) -> _Lines:
        if _is_digest(old) or _is_digest(new):
            return _VALUES(old, new)
        before, after = _assignments(split(old)), _assignments(split(new))
        added = [f"added {_given(name, after[name])}" for name in after if name not in before]
        removed = [f"removed {_given(name, before[name])}" for name in before if name not in after]
        changed = [
            f"changed {name}: {' '.join(before[name])} -> {' '.join(values)}"
            for name, values in after.items()
            if before.get(name, values) != values
        ]
        return (*added, *removed, *changed) or ("the same, in a different order",)

    return tell


def _words_of_a_shell(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # an open quote
        return text.split()


def _assignments(words: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the values given to each name, in their order: a flag may be given twice."""
    values: dict[str, tuple[str, ...]] = {}
    for word in words:
        name, _, value = word.partition("=")
        values[name] = (*values.get(name, ()), value)
    return values


def _given(name: str, values: Sequence[str]) -> str:
    return " ".join(f"{name}={value}" if value else name for value in values)


def _short(value: str) -> str:
    return value[:_SHORT_DIGEST] if _is_digest(value) else value or "nothing"


def _is_digest(value: str) -> bool:
    return len(value) == 64 and set(value) <= set("0123456789abcdef")


_VALUES: Final = _saying("")
_FILE: Final = _saying("the contents of the file differ: ")
_FLAGS: Final = _by_name(_words_of_a_shell)
_SETTINGS: Final = _by_name(str.split)


@dataclass(frozen=True)
class _Part:
    """What a difference in a part of the key means."""

    start: str  # how the part's name starts
    reason: str  # why a miss missed if this part differs
    tell: Callable[[str, str], _Lines] = _VALUES  # how two values are told apart
    follows: str = ""  # the part that says more where it differs, too


#: The first row that applies says why a miss missed: another compiler may be the very reason for
#: another module.
PARTS: Final = (
    _Part("jaxlib", "other jaxlib"),
    _Part("binary ", "other jaxlib", _FILE),
    _Part("jax", "other JAX"),
    _Part("plugin ", "other plugin"),
    _Part("platform", "other device"),
    _Part("device_kind", "other device"),
    _Part("cpu_features", "other device", _saying("different CPU features: ")),
    _Part(MODULE, OTHER_MODULE, _saying("another program: ")),
    _Part(
        "signature",
        "different types, shardings or donations",
        _saying("called with different types, shardings or donations: "),
        follows=MODULE,
    ),
    _Part("topology", "other devices", _SETTINGS),
    _Part("flags", "other flags", _FLAGS),
    _Part("file ", "other flags", _FILE),
    _Part(
        "parsed flags",
        "other flags",
        _saying("different XLA flags or JAX options: "),
        follows="flags",
    ),
    _Part("options", "other options"),
    _Part("settings", "other settings", _SETTINGS),
    _Part("", OTHER_PART),
)


def _part(name: str) -> _Part:
    return next(part for part in PARTS if name.startswith(part.start))


def explain(before: Key, after: Key) -> list[PartDifference]:
    """Return the parts in which two keys differ, in the order of the second key.

    Args:
        before: The key one has, such as that of an entry.
        after: The key that one asked for.
    """
    old, new = _values(before), _values(after)
    names = [*new, *(name for name in old if name not in new)]
    differing = [name for name in names if old.get(name) != new.get(name)]
    return [
        PartDifference(
            name, old.get(name), new.get(name), _tell(name, old.get(name), new.get(name))
        )
        for name in differing
        if _part(name).follows not in differing
    ]


def reason(differences: Sequence[PartDifference]) -> str:
    """Return why a miss missed, from how its key differs from the nearest entry's."""
    rows = [_part(difference.part) for difference in differences]
    return min(rows, key=PARTS.index).reason if rows else OTHER_PART


def _values(key: Key) -> dict[str, str]:
    """Return the parts by name; a name that occurs again gets its number."""
    values: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for part in key.parts:
        counts[part.name] += 1
        name = part.name if counts[part.name] == 1 else f"{part.name} ({counts[part.name]})"
        values[name] = part.value
    return values


def _tell(name: str, old: str | None, new: str | None) -> _Lines:
    if old is None:
        return (f"only in the second key: {_short(new or '')}",)
    if new is None:
        return (f"only in the first key: {_short(old)}",)
    return _part(name).tell(old, new)


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


def missing(path: Path, headers: Iterable[BlobHeader], key: Key, name: str) -> CacheError:
    """Return the error where nothing may compile and an entry is missing.

    Args:
        path: The cache directory.
        headers: What the entries say about themselves.
        key: What was looked for.
        name: The program, as its maker calls it.
    """
    program = f"the program {name!r}" if name else "a program"
    return CacheError(
        f"{program} ({key.digest[:12]}) is not in the compile cache in {path}, and "
        f"SNAPRT_CACHE_MODE forbids compiling; {_compared(headers, key, name)}",
        hint="Fill the cache with the same program, versions and flags, or set "
        "SNAPRT_CACHE_MODE=read-write to compile it here.",
    )


def _compared(headers: Iterable[BlobHeader], key: Key, name: str) -> str:
    candidates = [
        (header, header.key, str(header.metadata.get("name", "")))
        for header in itertools.islice(headers, _CANDIDATES)
    ]
    best = nearest(key, name, candidates)
    if not best:
        return "no entry is similar enough to compare"
    newest = max(best, key=lambda header: header.created)
    differences = explain(newest.key, key)
    parts = ", ".join(
        f"{difference.part} ({'; '.join(difference.words)})"
        for difference in differences[:_NAMED_PARTS]
    )
    more = len(differences) - _NAMED_PARTS
    return (
        f"the nearest entry, {newest.metadata.get('name', '')!r} ({newest.key.digest[:12]}), "
        f"differs in {parts}{f' and {more} more' if more > 0 else ''}"
    )
