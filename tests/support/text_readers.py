"""Who reads a value in StableHLO text, beyond calls, functions and the state of loops too."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_CALL = re.compile(r"(?<!custom_)call @(\w+)\((.*?)\)")
_RETURN = re.compile(r"\s*return (.*?) :")
_STATE = re.compile(r"(%\w+) = (%[\w#]+)")
_RESULT = re.compile(r"^\s*(%\w+)(:\d+)? = ")


def users(lines: Sequence[str], index: int) -> list[int]:
    """Return the lines that read the result of one."""
    found = _RESULT.match(lines[index])
    return list(_reading(lines, index, found[1])) if found else []


def readers(lines: Sequence[str], index: int, name: str) -> Iterator[int]:
    """Yield the lines that read what a line names, and those that get it passed on.

    Args:
        lines: The program.
        index: Where the name is made: an operation, a function's or a loop's first line.
        name: Such as ``%3`` for all results of an operation, ``%3#1`` for one, ``%arg2``.
    """
    depth = _depth(lines[index])
    for place in _reading(lines, index, name):
        yield place
        for above in range(place, index, -1):  # a loop or branch around has it as an operand
            if depth <= _depth(lines[above]) < _depth(lines[place]) and _RESULT.match(lines[above]):
                yield above
        passed = [i for i, one in enumerate(passed_on(lines[place])) if _is_of(one, name)]
        yield from passed_readers(lines, place, passed)


def passed_on(line: str) -> list[str]:
    """Return the values that a call, a function's return or a loop's first line passes on."""
    called, returned = _CALL.search(line), _RETURN.match(line)
    if "stablehlo.while(" in line:
        return [one[1] for one in _STATE.findall(line.partition("stablehlo.while(")[2])]
    values = called[2] if called else returned[1] if returned else ""
    return values.split(", ") if values else []


def passed_readers(lines: Sequence[str], index: int, positions: Sequence[int]) -> Iterator[int]:
    """Yield the lines that read what a line passes on at some positions."""
    line = lines[index]
    called = _CALL.search(line)
    for position in positions:
        if "stablehlo.while(" in line:
            state = _STATE.findall(line.partition("stablehlo.while(")[2])
            yield from readers(lines, index, state[position][0])
        elif called:
            yield from readers(lines, start_of(lines, called[1]), f"%arg{position}")
        else:
            function = next(one for one in reversed(lines[:index]) if "func.func" in one)
            for place, one in enumerate(lines):
                found, result = _CALL.search(one), _RESULT.match(one)
                if found and result and f" @{found[1]}(" in function:
                    yield place  # of the tuple of several results
                    several = f"#{position}" if result[2] else ""
                    yield from readers(lines, place, result[1] + several)


def start_of(lines: Sequence[str], function: str) -> int:
    """Return the first line of a function."""
    pattern = f" @{function}("
    return next(i for i, one in enumerate(lines) if "func.func" in one and pattern in one)


def _is_of(one: str, name: str) -> bool:
    return one == name or one.partition("#")[0] == name


def _reading(lines: Sequence[str], index: int, name: str) -> Iterator[int]:
    """Yield the lines that read a name, to the end of where it is known."""
    depth = _depth(lines[index])
    is_inside = "func.func" in lines[index] or (
        "stablehlo.while(" in lines[index] and "Arg" in name
    )
    pattern = re.compile(re.escape(name) + r"(?![\w#])" if "#" in name else re.escape(name) + r"\b")
    for place in range(index + 1, len(lines)):
        line = lines[place]
        if _depth(line) < depth or (
            is_inside
            and _depth(line) == depth
            and not line.strip().startswith("} do")
            and not line.strip().startswith("cond {")
        ):
            return
        if pattern.search(line.partition(" = ")[2] or line):
            yield place


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())
