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
    """Return the instructions at most two steps from those at fault; None if those are missing.

    Args:
        program: The program that was localized.
        places: The instructions at fault.
    """
    names = {place.name for place in places}
    for computation in program.module.computations:
        at_fault = [
            instruction.id for instruction in computation.instructions if instruction.name in names
        ]
        if at_fault:
            return _around(program, computation, at_fault)
    return None


def _around(program: FlatModule, computation: XlaMessage, at_fault: Sequence[int]) -> Neighborhood:
    by_id = {instruction.id: instruction for instruction in computation.instructions}
    users: dict[int, list[int]] = {}
    for instruction in computation.instructions:
        for operand in dict.fromkeys(instruction.operand_ids):
            users.setdefault(operand, []).append(instruction.id)
    near = list(dict.fromkeys(at_fault))
    edge = near
    for _ in range(_DISTANCE):
        steps = [itertools.chain(by_id[node].operand_ids, users.get(node, ())) for node in edge]
        edge = [node for node in dict.fromkeys(itertools.chain(*steps)) if node not in near]
        near += edge
    shown_nodes = near[:_MOST_NODES]
    # Operands come before the instructions that read them.
    order = [node for node in by_id if node in shown_nodes]
    edges = [
        (operand, node)
        for node in order
        for operand in dict.fromkeys(by_id[node].operand_ids)
        if operand in shown_nodes
    ]
    levels = _levels(order, edges)
    order.sort(key=lambda node: levels[node])
    number = {node: index for index, node in enumerate(order)}
    nodes = tuple(
        GraphNode(
            name=by_id[node].name,
            opcode=by_id[node].opcode,
            shape=shape_text(by_id[node].shape),
            source=source_of(program.module, by_id[node]),
            level=levels[node],
            at_fault=node in at_fault,
        )
        for node in order
    )
    drawn = tuple((number[start], number[stop]) for start, stop in edges)
    return Neighborhood(nodes, drawn, hidden=len(near) - len(shown_nodes))


def _levels(order: Sequence[int], edges: Sequence[tuple[int, int]]) -> Mapping[int, int]:
    """Return the row of each instruction: the one above the first instruction that reads it."""
    above = dict.fromkeys(order, 0)
    for start, stop in sorted(edges, key=lambda edge: order.index(edge[1]), reverse=True):
        above[start] = max(above[start], above[stop] + 1)
    most = max(above.values(), default=0)
    return {node: most - height for node, height in above.items()}


def source_excerpts(locations: Sequence[str], root: Path) -> tuple[SourceExcerpt, ...]:
    """Return the source lines of instructions, from Python files in one folder.

    A snapshot may name any file, and reports are shared, so nothing from outside of the user's
    working folder is copied into them.

    Args:
        locations: ``file:line (function)``, the most important first.
        root: The folder.
    """
    excerpts: list[SourceExcerpt] = []
    for location in dict.fromkeys(locations):
        file, line = _file_and_line(location)
        for number, excerpt in enumerate(excerpts):
            stop = excerpt.first_line + len(excerpt.lines)
            if _file_and_line(excerpt.location)[0] == file and excerpt.first_line <= line < stop:
                marked = tuple(dict.fromkeys((*excerpt.marked, line)))
                excerpts[number] = dataclasses.replace(excerpt, marked=marked)
                break
        else:
            lines = _python_lines(file, root.resolve())
            if 1 <= line <= len(lines):
                first = max(1, line - _LINES_AROUND)
                around = tuple(
                    text.expandtabs(4) for text in lines[first - 1 : line + _LINES_AROUND]
                )
                excerpts.append(SourceExcerpt(location, first, (line,), around))
    return tuple(excerpts)


def _file_and_line(location: str) -> tuple[str, int]:
    """Return the file and line in ``file:line (function)``; line 0 if there is none."""
    match = re.fullmatch(r"(.+):(\d{1,7})(?: \(.*\))?", location, re.DOTALL | re.ASCII)
    return (match[1], int(match[2])) if match else ("", 0)


def _python_lines(file: str, root: Path) -> Sequence[str]:
    try:
        path = (root / file).resolve()
        allowed = path.suffix == ".py" and path.is_relative_to(root) and path.is_file()
        if not allowed or path.stat().st_size > _MOST_SOURCE_BYTES:
            return ()
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError):  # missing, not readable, or not a valid file name
        return ()


def locations(around: Neighborhood | None, places: Sequence[InstructionPlace]) -> list[str]:
    """Return the source locations of the instructions at fault, then of those around them."""
    nodes = around.nodes if around is not None else ()
    both = [place.source for place in places] + [node.source for node in nodes]
    return [location for location in dict.fromkeys(both) if location]
