"""The contents of a report, as frozen data that can be saved: the one result of replaying a file.

A `Report` describes one file: a replay, a trial of variants or a compilation, and the result of
localizing, if that was done. ``from_json(to_json(report))`` is ``report``.
"""

from __future__ import annotations

import dataclasses
import math
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

#: The headline's word for a file that could not be replayed.
FAILED: Final = "FAILED"

Status = Literal["ok", "caution", "bad", "failed"]
"""``ok``: nothing to look at. ``caution``: open, or nothing to compare with. ``bad``: something was
found. ``failed``: it could not be replayed or judged."""


@dataclasses.dataclass(frozen=True)
class Headline:
    """The verdict."""

    status: Status  # determines the color
    word: str  # the status in words: "MATCH", "A IS WRONG", ...
    sentence: str  # the explanation for the reader


def verdict_word(kind: str) -> str:
    """Return the headline's word for a kind of verdict."""
    return "NON-DETERMINISTIC" if kind == "does not agree with itself" else kind.upper()


@dataclasses.dataclass(frozen=True)
class Fact:
    """A property of the environments in which the file was recorded and replayed."""

    name: str  # "jaxlib", "device_kind", ...
    recorded: str = ""  # its value then; empty if unknown
    here: str = ""  # its value now; empty if unknown

    @property
    def differs(self) -> bool:
        """Return whether both values are known and differ."""
        return bool(self.recorded and self.here) and self.recorded != self.here


def facts(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[Fact, ...]:
    """Return what is known about two environments, in the order of the first."""
    return tuple(
        Fact(name, str(recorded.get(name, "")), str(here.get(name, "")))
        for name in dict.fromkeys([*recorded, *here])
        if recorded.get(name) or here.get(name)
    )


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """How a program ran: the replay, or a side of a trial."""

    device: str = ""  # the device's name, ``cpu:0``; empty if nothing ran
    device_kind: str = ""  # JAX's device_kind
    compile_seconds: float = 0.0  # to compile the program, or load it from the cache
    execute_seconds: tuple[float, ...] = ()  # of each run
    from_cache: bool = False  # whether the executable came from the persistent cache
    isolated: bool = False  # whether it ran in a separate process
    # Whether all runs gave the same bits; None if it ran only once.
    agrees_with_itself: bool | None = None
    # Why it returned no outputs: ``kind``, ``signature``, ``message``, ``hint``.
    failure: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class DeviceRow:
    """The result of one of several devices that ran the same program."""

    device: str  # its name
    device_kind: str = ""  # JAX's device_kind
    result: int = 1  # which of the different results it returned; 1 is the most common
    execute_seconds: tuple[float, ...] = ()  # of each run
    # Whether all its runs gave the same bits; None if it ran only once.
    agrees_with_itself: bool | None = None
    agrees_with_run: int | None = None  # as in `Report`
    verdict: str = ""  # on its outputs and the recorded ones; empty if none are recorded

    @property
    def cells(self) -> tuple[str, ...]:
        """Return its row of a table with the columns `DEVICE_COLUMNS`."""
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
"""The column headers of a table of devices; the last column may be empty."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The compiler's report on a program that was only compiled."""

    memory: Mapping[str, float | int]  # bytes, by XLA's names
    cost: Mapping[str, float | int]  # the compiler's cost analysis, by XLA's names
    hlo: str  # where the optimized HLO was saved
    # The largest arrays, as `largest_arrays` returns them.
    largest: Sequence[Mapping[str, str | int]] = ()


@dataclasses.dataclass(frozen=True)
class TrialSide:
    """One side of a trial of variants."""

    letter: str  # "A", "B" or "reference"
    name: str  # the variant
    status: Status  # see `Status`
    word: str  # the verdict on it: "within rounding", "wrong", "failed", ...
    # How many times further from the reference than rounding explains; None if unknown.
    score: float | None = None
    device: str = ""  # where it ran; empty if it did not run
    reason: str = ""  # why it failed; empty if it did not fail


@dataclasses.dataclass(frozen=True)
class ErrorGrid:
    """Where in an array the error is: the array as a table that is divided into a few cells.

    The table has the array's last axis as its columns and all others as its rows; an array with one
    axis is split into rows of equal length.
    """

    rows: int  # rows of cells
    columns: int  # columns of cells
    table_rows: int  # rows of the table
    table_columns: int  # columns of the table
    # The largest absolute error in each cell, row by row; 0 for no error.
    errors: tuple[float, ...]
    specials: tuple[int, ...]  # a mark for each cell, one of `SPECIALS`
    # First and last index of the differing elements, for each axis; empty if none differ.
    box: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError unless the grid has the cells that it declares, and can be drawn."""
        if not len(self.errors) == len(self.specials) == self.rows * self.columns:
            raise ValueError("a grid does not have as many cells as it declares")
        if min(self.rows, self.columns) < 1:
            raise ValueError("a grid has no cells")
        if not all(math.isfinite(error) and error >= 0 for error in self.errors):
            raise ValueError("an error in a grid is no finite distance")
        if not set(self.specials) <= set(range(len(SPECIALS))):
            raise ValueError("a mark in a grid has no meaning")


#: The meaning of each mark in the NaN and Inf map; a cell has the largest mark of its elements.
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
    opcode: str  # XLA's name for the operation
    shape: str  # element type and dimensions
    source: str  # ``file:line (function)`` of the user's Python; empty if unknown
    level: int  # the row that it is drawn in: below all of its operands
    at_fault: bool = False  # whether it is one of the instructions at fault


@dataclasses.dataclass(frozen=True)
class Neighborhood:
    """The part of the program around the instructions at fault."""

    nodes: tuple[GraphNode, ...]  # the instructions, by level
    # Pairs of positions in ``nodes``: from an operand to the instruction that reads it.
    edges: tuple[tuple[int, int], ...]
    hidden: int = 0  # how many more instructions are as near

    def __post_init__(self) -> None:
        """Raise ValueError unless it can be drawn with all edges leading down."""
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
    """Lines of the user's Python around a line that an instruction comes from."""

    location: str  # ``file:line (function)``
    first_line: int  # the number of the first line
    # The numbers of the lines that instructions come from; that of ``location`` first.
    marked: tuple[int, ...]
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Command:
    """A command that shows the same, or more."""

    purpose: str  # what it is for
    text: str  # in shell syntax


@dataclasses.dataclass(frozen=True)
class Report:
    """What is known about one file."""

    path: str
    headline: Headline  # the verdict
    hint: str = ""  # what to do about it, if it could not be replayed
    format: str = ""  # the file's format
    module: str = ""  # the module's name
    files: tuple[str, ...] = ()  # all files that it was read from, if there are several
    # How it ran: ``replay``, or the sides ``a``, ``b`` and ``reference``.
    runs: Mapping[str, RunRecord] = dataclasses.field(default_factory=dict)
    # The XLA options that it was recorded with, beyond the defaults.
    compiler_options: Mapping[str, str | bool | int | float] = dataclasses.field(
        default_factory=dict
    )
    environment: tuple[Fact, ...] = ()  # where it was recorded, and where it was replayed
    warnings: tuple[str, ...] = ()  # what differs between the two, in sentences
    notes: tuple[str, ...] = ()  # what else a reader should know
    sides: tuple[TrialSide, ...] = ()  # of a trial of variants
    # Of a trial: the fields of `compare.verdict.Judgement`, of which `reference` and
    # `amplification` are shown.
    judgement: Mapping[str, Any] | None = None
    compiled: Compiled | None = None  # if it was only compiled
    # The file's record of an error that was raised while a graph was recorded.
    trace_error: Mapping[str, Any] | None = None
    raised: Mapping[str, Any] | None = None  # the result of evaluating the failed operation here
    comparison: Comparison | None = None  # the outputs, compared
    by_device: tuple[Comparison, ...] = ()  # what each device held of them, compared
    repeats: Comparison | None = None  # two runs, compared bit for bit
    # If the outputs of two runs are recorded, the one, 1 or 2, with which the replayed outputs
    # agree bit for bit; 0 for neither.
    agrees_with_run: int | None = None
    all_devices: tuple[DeviceRow, ...] = ()  # the result of each device, if it was replayed on all
    # Of the outputs, if there is nothing to compare them with.
    statistics: tuple[ArrayStatistics, ...] = ()
    # One for each output of the comparison; None if it has no grid.
    grids: tuple[ErrorGrid | None, ...] = ()
    localization: Localization | None = None  # where the fault starts; None if not localized
    neighborhood: Neighborhood | None = None  # of the instructions at fault
    sources: tuple[SourceExcerpt, ...] = ()  # the source lines that they come from
    commands: tuple[Command, ...] = ()  # to reproduce it

    def __post_init__(self) -> None:
        """Raise ValueError unless the judgement has the fields that are shown."""
        if self.judgement is None:
            return
        if not isinstance(self.judgement.get("reference"), str):
            raise ValueError("a judgement names no reference")
        if not isinstance(self.judgement.get("amplification", ""), float | int | None):
            raise ValueError("the amplification of a judgement is no number")

    @property
    def device(self) -> str:
        """Return where it was replayed, in words."""
        devices = {run.device: run.device_kind for run in self.runs.values() if run.device}
        return ", ".join(f"{name} ({kind})" if kind else name for name, kind in devices.items())

    @property
    def seconds(self) -> tuple[float, float]:
        """Return the total time of compilation and of all runs."""
        runs = self.runs.values()
        return sum(run.compile_seconds for run in runs), sum(
            seconds for run in runs for seconds in run.execute_seconds
        )


def worst_first(outputs: Sequence[OutputComparison]) -> list[int]:
    """Return the positions of outputs, the worst first; equally bad ones keep their order."""
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
    """Return a report as JSON data; numbers that JSON cannot express become text."""
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
    """Return the report from its JSON data; fields added by later versions are ignored.

    Raises:
        UsageError: It is not a report.
    """
    if "runs" not in plain and "seconds" in plain:  # the first format
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
