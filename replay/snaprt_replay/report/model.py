"""What a report shows, as frozen data that can be saved; it must not know how it is drawn.

A `Report` is of one file: a replay or a trial of variants, and what localizing found, where it was
done. ``from_json(to_json(report))`` is ``report``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

from snaprt.errors import UsageError
from snaprt_replay.compare import results
from snaprt_replay.compare.results import Comparison
from snaprt_replay.localize import findings
from snaprt_replay.localize.findings import Localization

SCHEMA: Final = "snaprt.report"
SCHEMA_VERSION: Final = 1

Status = Literal["ok", "caution", "bad", "failed"]
"""``ok``: nothing to look at. ``caution``: open, or nothing to compare with. ``bad``: something was
found. ``failed``: it could not be replayed or judged."""


@dataclasses.dataclass(frozen=True)
class Headline:
    """The verdict.

    Args:
        status: What color it has.
        word: The same in words: "MATCH", "A IS WRONG", ...
        sentence: For a person.
    """

    status: Status
    word: str
    sentence: str


@dataclasses.dataclass(frozen=True)
class Fact:
    """One thing about where the file was recorded and where it was replayed.

    Args:
        name: What: "jaxlib", "device_kind", ...
        recorded: Its value then; empty where unknown.
        here: Its value now; empty where unknown.
    """

    name: str
    recorded: str = ""
    here: str = ""

    @property
    def differs(self) -> bool:
        """Return whether both are known and not the same."""
        return bool(self.recorded and self.here) and self.recorded != self.here


def facts(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[Fact, ...]:
    """Return what is known of two environments, in the order of the first."""
    return tuple(
        Fact(name, str(recorded.get(name, "")), str(here.get(name, "")))
        for name in dict.fromkeys([*recorded, *here])
        if recorded.get(name) or here.get(name)
    )


@dataclasses.dataclass(frozen=True)
class Side:
    """One side of a trial of variants.

    Args:
        letter: "A", "B" or "reference".
        name: The variant.
        status: See `Status`.
        word: What is said of it: "within rounding", "wrong", "failed", ...
        score: How many times further from the reference than rounding explains; None where unknown.
        device: Where it ran; empty where it did not run.
        reason: Why it failed; empty where it did not.
    """

    letter: str
    name: str
    status: Status
    word: str
    score: float | None = None
    device: str = ""
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class ErrorGrid:
    """Where in an array the error sits: the array as a table, and that in few cells.

    The table has the array's last axis as its columns and all others as its rows; an array of one
    axis is broken into rows of equal length.

    Args:
        rows: Rows of cells.
        columns: Columns of cells.
        table_rows: Rows of the table.
        table_columns: Columns of the table.
        errors: The largest absolute error in each cell, row by row; 0 where there is none.
        specials: A mark for each cell, one of `SPECIALS`.
        box: First and last index of the elements that differ, for each axis; empty if none does.
    """

    rows: int
    columns: int
    table_rows: int
    table_columns: int
    errors: tuple[float, ...]
    specials: tuple[int, ...]
    box: tuple[tuple[int, int], ...] = ()


#: What a cell of the NaN and Inf map says, by its mark; a cell has the largest one of its elements.
SPECIALS: Final = (
    "finite on both sides",
    "NaN or Inf, the same on both sides",
    "Inf on one side, or of another sign",
    "NaN on the expected side only",
    "NaN on the actual side only",
)


@dataclasses.dataclass(frozen=True)
class GraphNode:
    """An instruction near the one at fault.

    Args:
        name: Its name in the HLO module.
        opcode: XLA's name of the operation.
        shape: Element type and dimensions.
        source: ``file:line (function)`` of the user's Python; empty where unknown.
        level: The row that it is drawn in: below all that it reads.
        at_fault: Whether it is one of those found.
    """

    name: str
    opcode: str
    shape: str
    source: str
    level: int
    at_fault: bool = False


@dataclasses.dataclass(frozen=True)
class Neighborhood:
    """The part of the program around what is at fault.

    Args:
        nodes: The instructions, by level.
        edges: Pairs of positions in ``nodes``: from what is read to what reads it.
        hidden: How many more are as near.
    """

    nodes: tuple[GraphNode, ...]
    edges: tuple[tuple[int, int], ...]
    hidden: int = 0


@dataclasses.dataclass(frozen=True)
class SourceExcerpt:
    """Lines of the user's Python around one that an instruction comes from.

    Args:
        location: ``file:line (function)``.
        first_line: The number of the first line.
        marked: The numbers of the lines that instructions come from; that of ``location`` first.
        lines: The lines.
    """

    location: str
    first_line: int
    marked: tuple[int, ...]
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Command:
    """A command that shows the same, or more.

    Args:
        purpose: What for.
        text: As a shell takes it.
    """

    purpose: str
    text: str


@dataclasses.dataclass(frozen=True)
class Report:
    """What is known of one file.

    Args:
        path: The file.
        headline: The verdict.
        format: The file's format.
        module: The module's name.
        device: Where it was replayed.
        seconds: Time to compile, and of all runs together.
        environment: Where it was recorded, and where it was replayed.
        warnings: What differs between the two, in sentences.
        notes: What else a reader should know.
        sides: Of a trial of variants.
        comparison: The outputs, compared.
        grids: One for each output of the comparison; None where there is none.
        localization: Where it starts; None if that was not looked for.
        neighborhood: Of the instructions found.
        sources: The lines that they come from.
        commands: To reproduce it.
    """

    path: str
    headline: Headline
    format: str = ""
    module: str = ""
    device: str = ""
    seconds: tuple[float, float] = (0.0, 0.0)
    environment: tuple[Fact, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    sides: tuple[Side, ...] = ()
    comparison: Comparison | None = None
    grids: tuple[ErrorGrid | None, ...] = ()
    localization: Localization | None = None
    neighborhood: Neighborhood | None = None
    sources: tuple[SourceExcerpt, ...] = ()
    commands: tuple[Command, ...] = ()


def to_json(report: Report) -> dict[str, Any]:
    """Return a report as JSON data; numbers that JSON does not have become text."""
    bare = dataclasses.replace(report, comparison=None, localization=None)
    plain: dict[str, Any] = results.json_ready(dataclasses.asdict(bare))
    if report.comparison is not None:
        plain["comparison"] = results.to_json(report.comparison)
    if report.localization is not None:
        plain["localization"] = findings.to_json(report.localization)
    return plain


def from_json(plain: Mapping[str, Any]) -> Report:
    """Undo `to_json`.

    Raises:
        UsageError: It is not a report, or what is in it is of another version.
    """
    try:
        return _report(plain)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"this report cannot be read: {type(error).__name__} at {error}",
            hint="it was edited, or written by another version of snaprt",
        ) from error


def _report(plain: Mapping[str, Any]) -> Report:
    fields: dict[str, Any] = dict(plain)
    fields["headline"] = Headline(**_checked(plain["headline"]))
    kinds: tuple[tuple[str, type], ...] = (
        ("environment", Fact),
        ("sides", Side),
        ("commands", Command),
    )
    for field, kind in kinds:
        fields[field] = tuple(kind(**one) for one in plain[field])
    fields["sides"] = tuple(
        dataclasses.replace(side, score=None if side.score is None else float(side.score))
        for side in fields["sides"]
    )
    fields["grids"] = _all(lambda one: None if one is None else _grid(one), plain["grids"])
    fields["sources"] = _all(
        lambda one: SourceExcerpt(
            **{**one, "lines": tuple(one["lines"]), "marked": tuple(one["marked"])}
        ),
        plain["sources"],
    )
    for field in ("warnings", "notes", "seconds"):
        fields[field] = tuple(plain[field])
    for field, read in (
        ("comparison", results.comparison_from_json),
        ("localization", findings.from_json),
        ("neighborhood", _neighborhood),
    ):
        fields[field] = None if plain[field] is None else read(plain[field])
    return Report(**fields)


def _checked(headline: Mapping[str, Any]) -> Mapping[str, Any]:
    if headline["status"] not in ("ok", "caution", "bad", "failed"):
        raise ValueError(f"status {headline['status']!r}")
    return headline


def _all(read: Callable[[Any], Any], values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(read(one) for one in values)


def _grid(plain: Mapping[str, Any]) -> ErrorGrid:
    grid = ErrorGrid(
        **{
            **plain,
            "errors": tuple(map(float, plain["errors"])),
            "specials": tuple(map(int, plain["specials"])),
            "box": tuple((int(first), int(last)) for first, last in plain["box"]),
        }
    )
    if not len(grid.errors) == len(grid.specials) == grid.rows * grid.columns:
        raise ValueError("a grid has not as many cells as it says")
    return grid


def _neighborhood(plain: Mapping[str, Any]) -> Neighborhood:
    nodes = tuple(GraphNode(**one) for one in plain["nodes"])
    edges = tuple((int(start), int(stop)) for start, stop in plain["edges"])
    if any(not 0 <= node.level <= len(nodes) for node in nodes) or not nodes:
        raise ValueError("a node stands in no row")
    for start, stop in edges:
        if not (0 <= start < len(nodes) and 0 <= stop < len(nodes)):
            raise ValueError("an edge leads to a node that is not there")
        if nodes[start].level >= nodes[stop].level:
            raise ValueError("an edge leads upwards")
    return Neighborhood(nodes, edges, int(plain["hidden"]))
