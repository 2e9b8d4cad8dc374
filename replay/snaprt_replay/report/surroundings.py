"""Cut the surroundings of an instruction out of a program."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from snaprt.hlo.proto import XlaMessage
from snaprt_replay.hlo.hlo_module import shape_text, source_of
from snaprt_replay.localize.findings import InstructionPlace
from snaprt_replay.localize.program import FlatModule
from snaprt_replay.report.model import GraphNode, Neighborhood, SourceExcerpt

_DISTANCE: Final = 2
_MOST_NODES: Final = 16
_LINES_AROUND: Final = 3
_MOST_SOURCE_BYTES: Final = 1 << 22


def surroundings(program: FlatModule, places: Sequence[InstructionPlace]) -> Neighborhood | None:
    """Return what is at most two steps from the instructions found; None if they are not there.

    Args:
        program: The program that was localized.
        places: What was found.
    """
    names = {place.name for place in places}
    for computation in program.module.computations:
        found = [
            instruction.id for instruction in computation.instructions if instruction.name in names
        ]
        if found:
            return _around(program, computation, found)
    return None


def _around(program: FlatModule, computation: XlaMessage, found: Sequence[int]) -> Neighborhood:
    by_id = {instruction.id: instruction for instruction in computation.instructions}
    users: dict[int, list[int]] = {}
    for one in computation.instructions:
        for operand in dict.fromkeys(one.operand_ids):
            users.setdefault(operand, []).append(one.id)
    near = list(dict.fromkeys(found))
    edge = near
    for _ in range(_DISTANCE):
        steps = [itertools.chain(by_id[one].operand_ids, users.get(one, ())) for one in edge]
        edge = [
            fromkey for fromkey in dict.fromkeys(itertools.chain(*steps)) if fromkey not in near
        ]
        near += edge
    kept = near[:_MOST_NODES]
    order = [one for one in by_id if one in kept]  # what is read stands before what reads it
    edges = [
        (operand, one)
        for one in order
        for operand in dict.fromkeys(by_id[one].operand_ids)
        if operand in kept
    ]
    levels = _levels(order, edges)
    order.sort(key=lambda one: levels[one])
    number = {one: index for index, one in enumerate(order)}
    nodes = tuple(
        GraphNode(
            name=by_id[one].name,
            opcode=by_id[one].opcode,
            shape=shape_text(by_id[one].shape),
            source=source_of(program.module, by_id[one]),
            level=levels[one],
            at_fault=one in found,
        )
        for one in order
    )
    drawn = tuple((number[start], number[stop]) for start, stop in edges)
    return Neighborhood(nodes, drawn, hidden=len(near) - len(kept))


def _levels(order: Sequence[int], edges: Sequence[tuple[int, int]]) -> Mapping[int, int]:
    """Return for each instruction the row above the first of those that read it."""
    above = dict.fromkeys(order, 0)
    for start, stop in sorted(edges, key=lambda edge: order.index(edge[1]), reverse=True):
        above[start] = max(above[start], above[stop] + 1)
    most = max(above.values(), default=0)
    return {one: most - height for one, height in above.items()}


def source_excerpts(locations: Sequence[str], root: Path) -> tuple[SourceExcerpt, ...]:
    """Return the lines that instructions come from, of Python files below one folder.

    A snapshot names whatever file it likes, and a report is passed on: nothing outside of the
    folder that the user works in is copied into it.

    Args:
        locations: ``file:line (function)``, the most important first.
        root: The folder.
    """
    excerpts: list[SourceExcerpt] = []
    for location in dict.fromkeys(locations):
        file, line = _file_and_line(location)
        for number, known in enumerate(excerpts):
            stop = known.first_line + len(known.lines)
            if _file_and_line(known.location)[0] == file and known.first_line <= line < stop:
                marked = tuple(dict.fromkeys((*known.marked, line)))
                excerpts[number] = dataclasses.replace(known, marked=marked)
                break
        else:
            lines = _python_lines(file, root.resolve())
            if 1 <= line <= len(lines):
                first = max(1, line - _LINES_AROUND)
                around = tuple(one.expandtabs(4) for one in lines[first - 1 : line + _LINES_AROUND])
                excerpts.append(SourceExcerpt(location, first, (line,), around))
    return tuple(excerpts)


def _file_and_line(location: str) -> tuple[str, int]:
    """Return what ``file:line (function)`` names; line 0 where it names none."""
    found = re.fullmatch(r"(.+):(\d{1,7})(?: \(.*\))?", location, re.DOTALL | re.ASCII)
    return (found[1], int(found[2])) if found else ("", 0)


def _python_lines(file: str, root: Path) -> Sequence[str]:
    try:
        path = (root / file).resolve()
        allowed = path.suffix == ".py" and path.is_relative_to(root) and path.is_file()
        if not allowed or path.stat().st_size > _MOST_SOURCE_BYTES:
            return ()
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError):  # gone, not ours to read, or no name that a file can have
        return ()


def locations(around: Neighborhood | None, places: Sequence[InstructionPlace]) -> list[str]:
    """Return where the instructions found, and then those around them, come from."""
    nodes = around.nodes if around is not None else ()
    both = [place.source for place in places] + [node.source for node in nodes]
    return [fromkey for fromkey in dict.fromkeys(both) if fromkey]
