"""Edit one operation in the StableHLO text of a program; it must know nothing of snaprt.

Every operation of the original text gets a location of its own, ``op17``, by which whoever names an
operation is judged. The edited text has no locations at all.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterator, Mapping, Sequence

import text_readers
from text_edits import KINDS, NAME, REMOVALS, Scope

_LOCATION = re.compile(r" loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")
_OPERATION = re.compile(r"^\s*(?:%[\w]+(?::\d+)? = |\"?stablehlo\.return|return|call )")
_RESULT = re.compile(r"^\s*(%\w+)(:\d+)? = \"?([\w.]+)\"?")


@dataclasses.dataclass(frozen=True)
class Plant:
    """One edit.

    Args:
        kind: A key of `KINDS`.
        before: The edited line.
        after: What it became; empty where the operation was taken out.
        text: The module with it.
        accepted: The locations of the operations that differ by it.
    """

    kind: str
    before: str
    after: str
    text: str
    accepted: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Text:
    """A module's text.

    Args:
        lines: Without locations.
        owners: For each line the location of its operation and of those around it in a region
            that is no loop or branch.
    """

    lines: tuple[str, ...]
    owners: tuple[tuple[str, ...], ...]

    @property
    def located(self) -> str:
        """Return the text with a location for each operation."""
        lines = list(self.lines)
        for end, number in _ends(self.lines).items():
            lines[end] += f' loc("op{number}")'
        return "\n".join(lines)


def read(text: str) -> Text:
    """Return the text of a module that was printed with or without locations."""
    lines = tuple(
        _LOCATION.sub("", one) for one in text.splitlines() if one and not one.startswith("#loc")
    )
    ends = _ends(lines)
    spans = sorted((number, end) for end, number in ends.items())
    owners = []
    for index in range(len(lines)):
        around = [start for start, end in spans if start <= index <= end]
        if around and not any(
            "stablehlo.while" in lines[one] or "stablehlo.case" in lines[one] for one in around
        ):
            owners.append(tuple(f"op{one}" for one in around))
        else:
            owners.append(tuple(f"op{one}" for one in around[-1:]))
    return Text(lines, tuple(owners))


def _ends(lines: Sequence[str]) -> Mapping[int, int]:
    """Return the number of the operation that ends at a line: the number of its first line."""
    found: dict[int, int] = {}
    opened: list[int] = []  # first lines of operations with regions
    for index, line in enumerate(lines):
        starts = bool(_OPERATION.match(line))
        stripped = line.strip()
        if starts and (
            stripped.endswith("({") or "stablehlo.while" in line or _reducer(lines, index)
        ):
            opened.append(index)
        elif starts:
            found[index] = index
        elif opened and (stripped == "}" or (stripped.startswith("})") and "({" not in stripped)):
            found[index] = opened.pop()
    return found


def _reducer(lines: Sequence[str], index: int) -> bool:
    return index + 1 < len(lines) and lines[index + 1].strip().startswith("reducer(")


ALL_KINDS = (*KINDS, *REMOVALS)
_FOR_USERS = (
    *("operation behind", "result made constant", "other operand", "another result"),
    *("order of results", "constant"),
)
"""Edits that only the users of the edited operation may show."""
_FOLDED = ("broadcast_in_dim", "reshape", "transpose", "convert", "slice", "reverse", "iota", "pad")
"""What XLA's converter makes a constant of where it is given one."""
_MOST_FOLDED = 2


def draw(text: Text, kind: str, seed: int) -> Iterator[Plant]:
    """Yield edits of one kind, no line twice in a row, in random order; some are not valid."""
    generator = random.Random(f"{kind} {seed}")
    indices = list(range(len(text.lines)))
    generator.shuffle(indices)
    for index in indices:
        line = text.lines[index]
        scope = Scope(text.lines, index, _types(text.lines, index), generator)
        options = list({**KINDS, **REMOVALS}[kind](line, scope))
        generator.shuffle(options)
        for option in options[:2]:
            if kind in REMOVALS:
                yield _without(text, index, kind, option)
                continue
            lines = [*text.lines[:index], option, *text.lines[index + 1 :]]
            accepted = _names(text, index) | _passed_on_otherwise(text, index, option)
            if kind in _FOR_USERS:
                accepted |= _names_of_readers(text, index, _MOST_FOLDED)
                accepted |= _names_of_unread(text, index, option)
            yield Plant(kind, line.strip(), option.strip(), "\n".join(lines), accepted)


def _names(text: Text, index: int) -> frozenset[str]:
    """Return the locations by which an operation is known: of a constant those of its readers.

    XLA's HLO keeps no location of a constant, and folds what is made of constants into one.
    """
    names = frozenset(_own_names(text, index))
    line = text.lines[index]
    if any(f"stablehlo.{one} " in line for one in _FOLDED) or _is_constant(text, index):
        names |= _names_of_readers(text, index)
    return names


def _names_of_readers(text: Text, index: int, folded: int = 0) -> frozenset[str]:
    """Return by what the readers of an operation are known, and theirs where XLA may fold one.

    Args:
        text: The program.
        index: The operation's line.
        folded: How many readers in a row XLA may fold whatever they are, as it does where one reads
            a constant, or the same twice.
    """
    found: set[str] = set()
    name = _name(text, index)
    for place in set(text_readers.readers(text.lines, index, name)) if name else ():
        found.update(_own_names(text, place))
        is_folded = any(f"stablehlo.{one} " in text.lines[place] for one in _FOLDED)
        if is_folded or folded or _is_constant(text, place):
            found |= _names_of_readers(text, place, max(0, folded - 1))
    return frozenset(found)


def _name(text: Text, index: int) -> str:
    found = _RESULT.match(text.lines[index])
    return found[1] if found else ""


def _names_of_unread(text: Text, index: int, new: str) -> frozenset[str]:
    """Return by what the operations are known that an edited one read before.

    Where nothing else reads one, to read past it is to take it out; and where the edited one does
    nothing, as a multiplication by one, XLA's converter has left what it reads in its place.
    """
    found: frozenset[str] = frozenset()
    old = text.lines[index]
    after = NAME.findall(new.partition(" = ")[2])
    for name in NAME.findall(old.partition(" = ")[2] or old):
        if name in after:
            continue
        for place in range(index):
            if _name(text, place) == name.partition("#")[0] and text_readers.users(
                text.lines, place
            ) == [index]:
                found = found.union(text.owners[place])
    called = re.search(r"(?<!custom_)call @(\w+)\(", text.lines[index])
    if called and "call @" not in new:  # what the function returned is something else
        start = text_readers.start_of(text.lines, called[1])
        end = next(i for i in range(start, len(text.lines)) if "  return" in text.lines[i])
        for name in NAME.findall(text.lines[end].partition(" :")[0]):
            for place in range(start, end):
                if _name(text, place) == name.partition("#")[0]:
                    found = found.union(text.owners[place])
    return found


def _passed_on_otherwise(text: Text, index: int, new: str) -> frozenset[str]:
    """Return by what is known what reads what an edited call, return or loop passes on now."""
    before, after = (text_readers.passed_on(one) for one in (text.lines[index], new))
    changed = [i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]]
    found: set[str] = set()
    for place in set(text_readers.passed_readers(text.lines, index, changed)):
        found.update(_own_names(text, place))
        found |= _names_of_readers(text, place, _MOST_FOLDED)
    return frozenset(found)


def _own_names(text: Text, index: int) -> Sequence[str]:
    # A tuple of XLA's has no location.
    return (*text.owners[index], *([""] if "return" in text.lines[index] else []))


def _is_constant(text: Text, index: int) -> bool:
    line = text.lines[index]
    if "stablehlo.constant" in line or "stablehlo.iota" in line:
        return True
    made = [_RESULT.match(one) for one in text.lines[:index]]
    names = {found[1]: place for place, found in enumerate(made) if found is not None}
    read = NAME.findall(line.partition(" = ")[2])
    return bool(read) and all(one in names and _is_constant(text, names[one]) for one in read)


def _without(text: Text, index: int, kind: str, operand: str) -> Plant:
    """Take an operation out; its users read one of its operands, of the same type."""
    line = text.lines[index]
    found = _RESULT.match(line)
    assert found is not None
    pattern = re.compile(re.escape(found[1]) + r"(?![\w#])")
    users = text_readers.users(text.lines, index)
    lines = list(text.lines)
    for place in users:
        lines[place] = pattern.sub(operand, lines[place])
    del lines[index]
    accepted = _names(text, index) | _names_of_readers(text, index, _MOST_FOLDED)
    return Plant(kind, line.strip(), "", "\n".join(lines), accepted)


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _types(lines: Sequence[str], index: int) -> Mapping[str, str]:
    """Return the types of the values that can be read at a line, of one result each."""
    types: dict[str, str] = {}
    depth = _depth(lines[index])
    for line in reversed(lines[:index]):
        if _depth(line) > depth:
            continue
        depth = _depth(line)
        found = re.match(r"\s*(%\w+) = .*[ >](tensor<[^>]*>)$", line)
        if found:
            types.setdefault(found[1], found[2])
        if line.strip().startswith("func.func"):
            types.update(re.findall(r"(%arg\d+): (tensor<[^>]*>)", line))
            break
        if line.strip().startswith(("^bb0", "reducer", "cond", "} do")):
            types.update(re.findall(r"(%arg\d+): (tensor<[^>]*>)", line))
    return types
