"""Concludes from the dumps of a hang who waits for whom; reads nothing and prints nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Final, Literal

from snaprt.errors import UsageError
from snaprt.fleet.bystander import NUMBERED
from snaprt.processes import ProcessPlace
from snaprt.snapshot.recorder.ranks.states import (
    RankState,
    place_text,
    read_files_of_ranks,
    schema_of,
)
from snaprt.units import first_names, format_duration, format_spans

SCHEMA: Final = "snaprt.hang"
VERSION: Final = 1

RankActivity = Literal["waiting", "compiling", "python", "stuck", "died"]
"""``waiting``: an execution has not ended; ``compiling``; ``python``: neither, so the program is in
Python; ``stuck``: its Python does not run; ``died``: a fatal signal ended it."""


@dataclass(frozen=True)
class DumpedFrame:
    """A frame of a stack: of Python, or native with line 0."""

    name: str
    filename: str
    line: int


@dataclass(frozen=True)
class DumpedThread:
    """A thread and its frames, innermost first."""

    frames: tuple[DumpedFrame, ...]
    thread_name: str | None = ""
    os_thread_id: int | None = None
    active: bool | None = None
    owns_gil: bool | None = None


@dataclass(frozen=True)
class DumpedExecution:
    """One of the last executions of a process."""

    name: str
    graph_id: str
    execution: int  # how many of the program came before
    step: int  # how many steps its thread had marked before
    began: float  # seconds since 1970
    phase: Literal["called", "dispatched", "ended", "failed"]


@dataclass(frozen=True)
class Collective:
    """A collective operation, as the HLO of the program names it."""

    name: str
    operation: str


@dataclass(frozen=True)
class Dump(ProcessPlace):
    """What one process wrote of itself, or had written of it."""

    cause: str  # why this was written
    limit: float  # the watchdog's seconds
    time: float  # seconds since 1970 when this was written
    quiet: float  # seconds in which nothing had ended
    state: RankActivity  # what it does
    compiling: str  # the name of the program that is compiled; "" where none is
    since: float  # seconds since 1970 when what it waits for, or compiles, began; else 0
    steps: int  # how many steps it had marked
    where: DumpedFrame | None  # the innermost line of the main thread in the user's code
    executions: tuple[DumpedExecution, ...]  # the last ones, oldest first
    waits_for: DumpedExecution | None  # the oldest execution that has not ended
    threads: tuple[DumpedThread, ...] = ()  # the stacks, with native frames where ``is_native``
    is_native: bool = False
    note: str = ""  # what could not be seen, and why
    # Those of the program of that execution, the first twenty.
    collectives: tuple[Collective, ...] = field(default=())


def is_hang(folder: Path) -> bool:
    """Return whether a folder was made for dumps of a hang, or holds one."""
    if folder.is_dir() and NUMBERED.fullmatch(folder.resolve().name):
        return True
    return any(_is_dump(path) for path in folder.glob("rank-*.json"))


def _is_dump(path: Path) -> bool:
    try:
        return schema_of(path) == SCHEMA
    except (OSError, ValueError, RecursionError):
        return False


def read_dumps(folder: Path) -> tuple[Dump, ...]:
    """Return the dumps of a hang, by rank.

    Raises:
        UsageError: There is none, or one cannot be read.
    """
    dumps = read_files_of_ranks(
        folder, Dump, "dump of a hang", "cannot be read", (SCHEMA,), VERSION
    )
    if not dumps:
        raise UsageError(
            f"no rank has written its stacks into {folder}",
            hint="The output of the program says why they could not be written.",
        )
    return dumps


_SHOWN_COLLECTIVES: Final = 3
_SHOWN_RANKS: Final = 8


@dataclass(frozen=True)
class Group:
    """Ranks that do the same."""

    ranks: tuple[int, ...]
    state: str  # ``waiting``, ``compiling``, ``python``, ``stuck`` or ``died``
    does: str  # what they do, as in ``wait at step 6 in train_step (all-reduce.3)``, for one rank


@dataclass(frozen=True)
class MissingRank:
    """A rank that wrote nothing."""

    rank: int
    last_seen: str  # what its state says, in words; "" where it left none
    has_finished: bool  # whether its state says that its program has ended without an error


@dataclass(frozen=True)
class HangRow:
    """What a table shows of a rank."""

    rank: int
    host: str  # its machine
    state: str  # as in `Group`
    step: int  # the step of its last execution; -1 where it marks none
    program: str  # the name of its last program; "" where it has run none
    execution: int  # the number of that execution
    seconds: float  # how long it has been so
    where: str  # the innermost line of its main thread in the user's code
    note: str  # what could not be seen


@dataclass(frozen=True)
class Conclusion:
    """What a hang was."""

    headline: str  # one sentence
    advice: str  # what that means or what to do; "" where nothing is known
    groups: tuple[Group, ...]  # what the ranks do: first those for which the others seem to wait
    missing: tuple[MissingRank, ...]  # the ranks that wrote nothing
    rows: tuple[HangRow, ...]  # one for each dump


def conclude(dumps: Sequence[Dump], states: Iterable[RankState] = ()) -> Conclusion:
    """Return who waits for whom.

    Args:
        dumps: One for each rank that wrote one; at least one.
        states: What the ranks last said of themselves.
    """
    counts_steps = any(dump.steps for dump in dumps)
    groups = _groups(dumps, counts_steps=counts_steps)
    states_by_rank = {state.rank: state for state in states}
    at = min(dump.time for dump in dumps)
    ranks = {dump.rank for dump in dumps}
    count = max(dump.processes for dump in dumps)
    missing = tuple(
        _missing(rank, states_by_rank, at, counts_steps=counts_steps)
        for rank in range(count)
        if rank not in ranks
    )
    return Conclusion(
        headline=_headline(groups, missing, count),
        advice=_advice(dumps, groups, missing),
        groups=groups,
        missing=missing,
        rows=tuple(_row(dump, counts_steps=counts_steps) for dump in dumps),
    )


def _groups(dumps: Sequence[Dump], *, counts_steps: bool) -> tuple[Group, ...]:
    ranks: dict[tuple[str, str], list[int]] = {}
    for dump in dumps:
        does = _does(dump, counts_steps=counts_steps)
        ranks.setdefault((dump.state, does), []).append(dump.rank)
    groups = [Group(tuple(of), state, does) for (state, does), of in ranks.items()]
    # Who waits, waits for the others; of those who all wait, the fewest are the odd ones.
    return tuple(
        sorted(groups, key=lambda group: (group.state == "waiting", len(group.ranks), group.ranks))
    )


def _does(dump: Dump, *, counts_steps: bool) -> str:
    last = dump.executions[-1] if dump.executions else None
    where = _place(dump.where)
    at = f" at {where}" if where else ""
    after = f", after {_position(last, counts_steps)} of {last.name}" if last else ""
    waits = dump.waits_for
    if waits is not None:
        names = [collective.name for collective in dump.collectives]
        inside = f" ({first_names(names, _SHOWN_COLLECTIVES)})" if names else ""
        after = f" while it waited at {_position(waits, counts_steps)} in {waits.name}{inside}"
        if dump.state == "waiting":
            return f"waits at {_position(waits, counts_steps)} in {waits.name}{inside}{at}"
    if dump.state == "compiling":
        return f"compiles {dump.compiling}{at}"
    if dump.state == "stuck":
        later = " or a later one" if last and waits is None else ""
        return f"is stuck in native code that keeps Python from running{at}{after}{later}"
    if dump.state == "died":
        return f"died{at}{after}"
    if last is None:
        return f"is in Python{at} and has run nothing yet"
    return f"is at {_position(last, counts_steps)} of {last.name}, in Python{at}"


def _position(execution: DumpedExecution, counts_steps: bool) -> str:
    return f"step {execution.step}" if counts_steps else f"execution {execution.execution}"


def _place(frame: DumpedFrame | None) -> str:
    return "" if frame is None else f"{PurePath(frame.filename).name}:{frame.line}"


def _missing(
    rank: int, states: Mapping[int, RankState], time: float, *, counts_steps: bool
) -> MissingRank:
    state = states.get(rank)
    if state is None:
        return MissingRank(rank, "", has_finished=False)
    if state.ended == "finished":
        return MissingRank(rank, "its program has ended", has_finished=True)
    if state.ended:
        return MissingRank(rank, f"its program has ended with {state.ended}", has_finished=False)
    number = f"step {state.step}" if counts_steps else f"execution {state.execution}"
    at = f"{number} of {state.program}" if state.program else "no execution"
    before = format_duration(max(0.0, time - state.time))
    where = f", {PurePath(state.where).name}" if state.where else ""
    return MissingRank(rank, f"{before} before, it was at {at}{where}", has_finished=False)


def _headline(groups: Sequence[Group], missing: Sequence[MissingRank], count: int) -> str:
    parts = []
    for absent in missing:
        has = "has ended its program" if absent.has_finished else "wrote nothing"
        parts.append(f"rank {absent.rank} {has}")
    if len(parts) > _SHOWN_RANKS:
        parts = [f"{len(parts)} ranks wrote nothing"]
    for number, group in enumerate(groups):
        is_last = number == len(groups) - 1
        parts.append(_of_group(group, is_rest=is_last and bool(parts), count=count))
    return ", ".join(parts)


def _of_group(group: Group, *, is_rest: bool, count: int) -> str:
    if len(group.ranks) == 1:
        is_other = is_rest and count == 2
        return f"{'the other' if is_other else f'rank {group.ranks[0]}'} {group.does}"
    verb, _, rest = group.does.partition(" ")
    does = f"{_PLURALS[verb]} {rest}".replace(" while it ", " while they ")
    if is_rest:
        return f"the others {does}"
    if len(group.ranks) == count:
        return f"all {count} ranks {does}"
    return f"ranks {format_spans(group.ranks)} {does}"


_PLURALS: Final = {"waits": "wait", "compiles": "compile", "is": "are", "died": "died"}


def _advice(dumps: Sequence[Dump], groups: Sequence[Group], missing: Sequence[MissingRank]) -> str:
    waiting = [dump for dump in dumps if dump.waits_for is not None and dump.state == "waiting"]
    programs: dict[tuple[str, int], set[str]] = {}
    for dump in waiting:
        assert dump.waits_for is not None
        key = dump.waits_for.name, dump.waits_for.execution
        programs.setdefault(key, set()).add(dump.waits_for.graph_id)
    different = next((name for (name, _), ids in programs.items() if len(ids) > 1), None)
    if different is not None:
        return f"the ranks run different programs under the name {different}"
    if len(waiting) == len(dumps) and not missing and len(dumps) > 1:
        if len(groups) == 1:
            return "no rank is behind: the devices or the network between them are stuck"
        return "each waits for the others in another execution: the ranks have gone different ways"
    if any(dump.state == "stuck" for dump in dumps) and not all(dump.is_native for dump in dumps):
        return "`snaprt stacks PID` shows native frames where py-spy is installed"
    return ""


def _row(dump: Dump, *, counts_steps: bool) -> HangRow:
    last = dump.waits_for or (dump.executions[-1] if dump.executions else None)
    return HangRow(
        rank=dump.rank,
        host=dump.host,
        state=dump.state,
        step=last.step if last and counts_steps else -1,
        program=last.name if last else dump.compiling,
        execution=last.execution if last else 0,
        seconds=dump.time - dump.since if dump.since else dump.quiet,
        where=place_text(None if dump.where is None else vars(dump.where)),
        note=dump.note,
    )
