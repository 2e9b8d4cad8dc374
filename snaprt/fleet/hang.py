"""Concludes from the dumps of a hang who waits for whom; reads nothing and prints nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from snaprt.fleet.hang_files import Dump, DumpedExecution, DumpedFrame
from snaprt.snapshot.recorder.states import RankState, place_text
from snaprt.units import format_duration, format_spans

_SHOWN_COLLECTIVES: Final = 3
_SHOWN_RANKS: Final = 8


@dataclass(frozen=True)
class Group:
    """Ranks that do the same.

    Attributes:
        ranks: Which.
        state: ``waiting``, ``compiling``, ``python``, ``stuck`` or ``died``.
        does: What they do, as in ``wait at step 6 in train_step (all-reduce.3)``, for one rank.
    """

    ranks: tuple[int, ...]
    state: str
    does: str


@dataclass(frozen=True)
class MissingRank:
    """A rank that wrote nothing.

    Attributes:
        rank: Which.
        last_seen: What its state says, in words; "" where it left none.
        has_finished: Whether its state says that its program has ended without an error.
    """

    rank: int
    last_seen: str
    has_finished: bool


@dataclass(frozen=True)
class HangRow:
    """What a table shows of a rank.

    Attributes:
        rank: Which.
        host: Its machine.
        state: As in `Group`.
        step: The step of its last execution; -1 where it marks none.
        program: The name of its last program; "" where it has run none.
        execution: The number of that execution.
        seconds: How long it has been so.
        where: The innermost line of its main thread in the user's code.
        note: What could not be seen.
    """

    rank: int
    host: str
    state: str
    step: int
    program: str
    execution: int
    seconds: float
    where: str
    note: str


@dataclass(frozen=True)
class Conclusion:
    """What a hang was.

    Attributes:
        headline: One sentence.
        advice: What that means or what to do; "" where nothing is known.
        groups: What the ranks do: first those for which the others seem to wait.
        missing: The ranks that wrote nothing.
        rows: One for each dump.
    """

    headline: str
    advice: str
    groups: tuple[Group, ...]
    missing: tuple[MissingRank, ...]
    rows: tuple[HangRow, ...]


def conclude(dumps: Sequence[Dump], states: Iterable[RankState] = ()) -> Conclusion:
    """Return who waits for whom.

    Args:
        dumps: One for each rank that wrote one; at least one.
        states: What the ranks last said of themselves.
    """
    counts_steps = any(dump.steps for dump in dumps)
    groups = _groups(dumps, counts_steps=counts_steps)
    known = {state.rank: state for state in states}
    at = min(dump.time for dump in dumps)
    written = {dump.rank for dump in dumps}
    count = max(dump.processes for dump in dumps)
    missing = tuple(
        _missing(rank, known, at, counts_steps=counts_steps)
        for rank in range(count)
        if rank not in written
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
        shown = ", ".join(names[:_SHOWN_COLLECTIVES])
        more = ", ..." if len(names) > _SHOWN_COLLECTIVES else ""
        inside = f" ({shown}{more})" if names else ""
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
