"""What a report shows, as frozen data that can be saved: the one result of replaying a file.

A `Report` is of one file: of a replay, a trial of variants or a compilation, and of what localizing
found, where it was done. ``from_json(to_json(report))`` is ``report``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from snaprt.errors import UsageError
from snaprt_replay.compare import results
from snaprt_replay.compare.array_statistics import ArrayStatistics
from snaprt_replay.compare.results import IDENTICAL, MISMATCH, Comparison, OutputComparison
from snaprt_replay.localize import findings
from snaprt_replay.localize.findings import Localization

SCHEMA: Final = "snaprt.report"
SCHEMA_VERSION: Final = 1

#: The word of a file that could not be replayed.
FAILED: Final = "FAILED"

Status = Literal["ok", "caution", "bad", "failed"]
"""``ok``: nothing to look at. ``caution``: open, or nothing to compare with. ``bad``: something was
found. ``failed``: it could not be replayed or judged."""


@dataclasses.dataclass(frozen=True)
class Headline:
    """The verdict."""

    status: Status  # what color it has
    word: str  # the same in words: "MATCH", "A IS WRONG", ...
    sentence: str  # for a person


def verdict_word(kind: str) -> str:
    """Return the headline's word for a kind of verdict."""
    return "NON-DETERMINISTIC" if kind == "does not agree with itself" else kind.upper()


@dataclasses.dataclass(frozen=True)
class Fact:
    """One thing about where the file was recorded and where it was replayed."""

    name: str  # what: "jaxlib", "device_kind", ...
    recorded: str = ""  # its value then; empty where unknown
    here: str = ""  # its value now; empty where unknown

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
class RunRecord:
    """How a program ran: the replay, or a side of a trial."""

    device: str = ""  # the device's name, ``cpu:0``; empty where nothing ran
    device_kind: str = ""  # what it calls itself
    compile_seconds: float = 0.0  # to compile the program, or load it from the cache
    execute_seconds: tuple[float, ...] = ()  # of each run
    from_cache: bool = False  # whether the executable came from the persistent cache
    isolated: bool = False  # whether it ran in a process of its own
    # Whether all runs gave the same bits; None where it ran once only.
    agrees_with_itself: bool | None = None
    # Why it gave no outputs: ``kind``, ``signature``, ``message``, ``hint``.
    failure: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class DeviceRow:
    """What one of several devices gave that ran the same."""

    device: str  # its name
    device_kind: str = ""  # what it calls itself
    result: int = 1  # which of the different results it gave; 1 is the most common
    execute_seconds: tuple[float, ...] = ()  # of each run
    # Whether all its runs gave the same bits; None where it ran once only.
    agrees_with_itself: bool | None = None
    agrees_with_run: int | None = None  # as in `Report`
    verdict: str = ""  # on its outputs beside the recorded ones; empty where there are none

    @property
    def cells(self) -> tuple[str, ...]:
        """Return what a table says of it, under `DEVICE_COLUMNS`."""
        count = len(self.execute_seconds)
        runs = {None: f"{count} run", True: f"{count} runs agree", False: f"{count} runs differ"}
        agrees = {
            None: "",
            0: "as neither",
            1: "as run 1",
            2: "as run 2",
        }
        return (
            self.device,
            self.device_kind,
            chr(ord("A") + min(self.result, 26) - 1),
            runs[self.agrees_with_itself],
            self.verdict or "nothing recorded",
            agrees[self.agrees_with_run],
        )


DEVICE_COLUMNS = ("device", "kind", "result", "runs", "vs. recorded", "of two recorded runs")
"""The heads of a table of devices; the last column may be empty."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler said of a program that was compiled only."""

    memory: Mapping[str, float | int]  # bytes, by XLA's names
    cost: Mapping[str, float | int]  # the compiler's cost analysis, by XLA's names
    hlo: str  # where the optimized HLO was saved
    # The largest arrays, as `largest_arrays` gives them.
    largest: Sequence[Mapping[str, str | int]] = ()


@dataclasses.dataclass(frozen=True)
class TrialSide:
    """One side of a trial of variants."""

    letter: str  # "A", "B" or "reference"
    name: str  # the variant
    status: Status  # see `Status`
    word: str  # what is said of it: "within rounding", "wrong", "failed", ...
    # How many times further from the reference than rounding explains; None where unknown.
    score: float | None = None
    device: str = ""  # where it ran; empty where it did not run
    reason: str = ""  # why it failed; empty where it did not


@dataclasses.dataclass(frozen=True)
class ErrorGrid:
    """Where in an array the error sits: the array as a table, and that in few cells.

    The table has the array's last axis as its columns and all others as its rows; an array of one
    axis is broken into rows of equal length.
    """

    rows: int  # rows of cells
    columns: int  # columns of cells
    table_rows: int  # rows of the table
    table_columns: int  # columns of the table
    # The largest absolute error in each cell, row by row; 0 where there is none.
    errors: tuple[float, ...]
    specials: tuple[int, ...]  # a mark for each cell, one of `SPECIALS`
    # First and last index of the elements that differ, for each axis; empty if none does.
    box: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError unless there are as many cells as it says."""
        if not len(self.errors) == len(self.specials) == self.rows * self.columns:
            raise ValueError("a grid does not have as many cells as it declares")


#: What a cell of the NaN and Inf map says, by its mark; a cell has the largest one of its elements.
SPECIALS: Final = (
    "finite on both sides",
    "NaN or Inf, the same on both sides",
    "Inf on one side, or with different signs",
    "NaN on the expected side only",
    "NaN on the actual side only",
)


@dataclasses.dataclass(frozen=True)
class GraphNode:
    """An instruction near the one at fault."""

    name: str  # its name in the HLO module
    opcode: str  # XLA's name of the operation
    shape: str  # element type and dimensions
    source: str  # ``file:line (function)`` of the user's Python; empty where unknown
    level: int  # the row that it is drawn in: below all that it reads
    at_fault: bool = False  # whether it is one of those found


@dataclasses.dataclass(frozen=True)
class Neighborhood:
    """The part of the program around what is at fault."""

    nodes: tuple[GraphNode, ...]  # the instructions, by level
    # Pairs of positions in ``nodes``: from what is read to what reads it.
    edges: tuple[tuple[int, int], ...]
    hidden: int = 0  # how many more are as near

    def __post_init__(self) -> None:
        """Raise ValueError unless it can be drawn, edges leading down."""
        nodes = self.nodes
        if any(not 0 <= node.level <= len(nodes) for node in nodes) or not nodes:
            raise ValueError("a node is in no row")
        for start, stop in self.edges:
            if not (0 <= start < len(nodes) and 0 <= stop < len(nodes)):
                raise ValueError("an edge leads to a missing node")
            if nodes[start].level >= nodes[stop].level:
                raise ValueError("an edge leads upwards")


@dataclasses.dataclass(frozen=True)
class SourceExcerpt:
    """Lines of the user's Python around one that an instruction comes from."""

    location: str  # ``file:line (function)``
    first_line: int  # the number of the first line
    # The numbers of the lines that instructions come from; that of ``location`` first.
    marked: tuple[int, ...]
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Command:
    """A command that shows the same, or more."""

    purpose: str  # what for
    text: str  # as a shell takes it


@dataclasses.dataclass(frozen=True)
class Report:
    """What is known of one file."""

    path: str
    headline: Headline  # the verdict
    hint: str = ""  # what to do about it, where it could not be replayed
    format: str = ""  # the file's format
    module: str = ""  # the module's name
    files: tuple[str, ...] = ()  # all files that it was read from, where there are several
    # How it ran: ``replay``, or the sides ``a``, ``b`` and ``reference``.
    runs: Mapping[str, RunRecord] = dataclasses.field(default_factory=dict)
    # XLA options that it was recorded with beyond the defaults.
    compiler_options: Mapping[str, str | bool | int | float] = dataclasses.field(
        default_factory=dict
    )
    environment: tuple[Fact, ...] = ()  # where it was recorded, and where it was replayed
    warnings: tuple[str, ...] = ()  # what differs between the two, in sentences
    notes: tuple[str, ...] = ()  # what else a reader should know
    sides: tuple[TrialSide, ...] = ()  # of a trial of variants
    # Of a trial: the fields of `compare.verdict.Judgement`.
    judgement: Mapping[str, Any] | None = None
    compiled: Compiled | None = None  # where it was compiled only
    # What the file says of an error that was raised while a graph was recorded.
    trace_error: Mapping[str, Any] | None = None
    raised: Mapping[str, Any] | None = None  # what evaluating the operation that failed gave here
    comparison: Comparison | None = None  # the outputs, compared
    by_device: tuple[Comparison, ...] = ()  # what each device held of them, compared
    repeats: Comparison | None = None  # two runs, compared bit for bit
    # Where the outputs of two runs are recorded, with which of them, 1 or 2, the replayed ones
    # agree bit for bit; 0 for neither.
    agrees_with_run: int | None = None
    all_devices: tuple[DeviceRow, ...] = ()  # what each device gave, where it was replayed on all
    # Of the outputs, where there is nothing to compare them with.
    statistics: tuple[ArrayStatistics, ...] = ()
    # One for each output of the comparison; None where there is none.
    grids: tuple[ErrorGrid | None, ...] = ()
    localization: Localization | None = None  # where it starts; None if that was not looked for
    neighborhood: Neighborhood | None = None  # of the instructions found
    sources: tuple[SourceExcerpt, ...] = ()  # the lines that they come from
    commands: tuple[Command, ...] = ()  # to reproduce it

    @property
    def device(self) -> str:
        """Return where it was replayed, in words."""
        devices = {run.device: run.device_kind for run in self.runs.values() if run.device}
        return ", ".join(f"{name} ({kind})" if kind else name for name, kind in devices.items())

    @property
    def seconds(self) -> tuple[float, float]:
        """Return the time to compile, and of all runs together."""
        runs = self.runs.values()
        return sum(run.compile_seconds for run in runs), sum(
            seconds for run in runs for seconds in run.execute_seconds
        )


def worst_first(outputs: Sequence[OutputComparison]) -> list[int]:
    """Return the positions of outputs, the worst first, equally bad ones in their own order."""
    return sorted(range(len(outputs)), key=lambda number: _badness(outputs[number]), reverse=True)


def _badness(output: OutputComparison) -> tuple[float, ...]:
    return (
        output.verdict == MISMATCH,
        output.verdict != IDENTICAL,
        output.specials.confused > 0,
        output.beyond / max(1, output.elements),
        output.max_ulp or 0,
        output.max_abs_error,
    )


def to_json(report: Report) -> dict[str, Any]:
    """Return a report as JSON data; numbers that JSON does not have become text."""
    bare = dataclasses.replace(
        report, comparison=None, by_device=(), repeats=None, localization=None
    )
    plain: dict[str, Any] = results.json_ready(dataclasses.asdict(bare))
    for name in ("comparison", "repeats"):
        if getattr(report, name) is not None:
            plain[name] = results.to_json(getattr(report, name))
    plain["by_device"] = [results.to_json(comparison) for comparison in report.by_device]
    if report.localization is not None:
        plain["localization"] = findings.to_json(report.localization)
    plain["device"], plain["seconds"] = report.device, list(report.seconds)
    return plain


def from_json(plain: Mapping[str, Any]) -> Report:
    """Undo `to_json`; what a later version added is passed over.

    Raises:
        UsageError: It is not a report.
    """
    if "runs" not in plain and "seconds" in plain:  # as it was written first
        compiling, running = plain["seconds"]
        run = {"device": plain["device"], "compile_seconds": compiling}
        plain = {**plain, "runs": {"replay": {**run, "execute_seconds": [running]}}}
    try:
        return msgspec.convert(plain, Report, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"cannot read this report: {error}",
            hint="it was edited, or written by another version of snaprt",
        ) from error
