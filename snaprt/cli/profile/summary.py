"""Sums up a profile: programs, operations, what the host did while devices waited, snaprt itself.

Knows events, and not where they come from.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from snaprt_replay.hlo.hlo_module import source_of

from snaprt.cli.profile.read import HostProfile, ProfileEvent

_SPAN: Final = "snaprt:"
_GRAPH_IN_NAME: Final = re.compile(r"^(?:jit_)?lazy_graph_([0-9a-f]{16})$")
_PROGRAM_IN_NAME: Final = re.compile(r"^(.*)\((\d+)\)$")
_NOT_IN_NAMES: Final = re.compile(r"[^\w.-]")  # of modules: JAX writes "_" for it, or nothing
_NANOSECONDS: Final = 1e9


@dataclass(frozen=True)
class ProgramTime:
    """The time of one program on the devices; a key of ``--json``, as all below."""

    module: str  # the name of its module
    # The id that snapshots and metrics have; None where the profile does not tell it.
    graph_id: str | None
    executions: int  # how often it ran
    seconds: float  # while at least one operation of it ran
    share: float  # of the time in which any operation ran


@dataclass(frozen=True)
class OperationTime:
    """The time of one operation of a program, without the operations inside it."""

    operation: str  # its name in the optimized module
    opcode: str | None  # what it is there; None where the profile does not have the module
    module: str  # the name of its module
    graph_id: str | None  # as for the program
    times: int  # how often it ran, on all devices
    seconds: float  # all of that, also where several ran at once
    share: float  # of the time of all operations
    source: str | None  # ``file:line (function)`` of the user's line, if that is known


@dataclass(frozen=True)
class Gap:
    """A time in which no operation ran, between others."""

    start: float  # when it began, in seconds since the first event
    seconds: float  # how long it was
    # What the thread that starts programs did for the largest part of it; None where the profile
    # has no event of it: it ran Python, or waited.
    host: str | None
    share: float  # how much of it


@dataclass(frozen=True)
class SpanTime:
    """The time that snaprt itself took for one kind of work, without the other kinds inside it."""

    span: str
    times: int
    seconds: float


@dataclass(frozen=True)
class StepTime:
    """The steps of one name."""

    name: str
    steps: int
    mean: float
    shortest: float
    longest: float


@dataclass(frozen=True)
class Summary:
    """What a profile of one process says."""

    host: str  # the name of its machine, with the rank in a job of several processes
    file: str
    seconds: float  # from the first event to the last
    busy: float  # while at least one operation ran
    idle: float  # while none ran, from the first one to the last
    devices: dict[str, float]  # how long each device was busy
    programs: tuple[ProgramTime, ...]  # the programs, the longest first
    operations: tuple[OperationTime, ...]  # the operations, the longest first
    gaps: tuple[Gap, ...]  # the times between operations, the longest first
    # What snaprt itself did, the longest first; from the threads of the host.
    snaprt: tuple[SpanTime, ...]
    steps: tuple[StepTime, ...]  # the steps that the program marked with annotations


@dataclass(frozen=True)
class _Operation:
    """An operation that ran, of a program, which is known by its module's name and number."""

    event: ProfileEvent
    program: str
    alone: float  # nanoseconds, without the operations inside it


def summarize(profile: HostProfile) -> Summary:
    """Sum up what one process has written."""
    operations = list(_operations_of(profile))
    events = [*profile.operations, *profile.host_events]
    began = min((event.start for event in events), default=0.0)
    ended = max((event.end for event in events), default=0.0)
    busy = _union(profile.operations)
    gaps = [(before[1], after[0]) for before, after in itertools.pairwise(busy)]
    graphs = _graphs(profile.host_events, {operation.program for operation in operations})
    by_device: dict[str, list[ProfileEvent]] = defaultdict(list)
    for event in profile.operations:
        by_device[_device_of(event)].append(event)
    return Summary(
        host=profile.host,
        file=str(profile.file),
        seconds=(ended - began) / _NANOSECONDS,
        busy=_length(busy),
        idle=_length(gaps),
        devices={device: _length(_union(events)) for device, events in sorted(by_device.items())},
        programs=tuple(_programs(profile, operations, graphs, _length(busy))),
        operations=tuple(_operation_times(profile, operations, graphs)),
        gaps=tuple(_gaps(gaps, profile.host_events, began)),
        snaprt=tuple(_spans(profile.host_events)),
        steps=tuple(_steps(profile.host_events)),
    )


def _device_of(event: ProfileEvent) -> str:
    plane = str(event.values.get("device", ""))
    return plane.removeprefix("/device:") or f"CPU:{event.values.get('device_ordinal', 0)}"


def _module_of(program: str) -> str:
    named = _PROGRAM_IN_NAME.match(program)
    return named[1] if named else program


def _operations_of(profile: HostProfile) -> Iterator[_Operation]:
    alone = _times_alone(profile.operations)
    running = sorted(profile.executions, key=lambda event: event.start)
    starts = [event.start for event in running]
    for event, nanoseconds in zip(profile.operations, alone, strict=True):
        module, number = event.values.get("hlo_module"), event.values.get("program_id")
        if module is not None:
            program = f"{module}({number})" if number is not None else str(module)
        else:  # of a TPU: the execution during which it began
            at = bisect.bisect_right(starts, event.start) - 1
            program = running[at].name if at >= 0 else "?"
        yield _Operation(event, program, nanoseconds)


def _times_alone(events: Sequence[ProfileEvent]) -> list[float]:
    """Return how long each event took, without those inside it; they are in order of start."""
    alone = [event.end - event.start for event in events]
    open_on_line: dict[int, list[int]] = defaultdict(list)
    for index, event in enumerate(events):
        around = open_on_line[event.line]
        while around and events[around[-1]].end <= event.start:
            around.pop()
        if around:
            alone[around[-1]] -= min(event.end, events[around[-1]].end) - event.start
        around.append(index)
    return alone


def _union(events: Iterable[ProfileEvent]) -> list[tuple[float, float]]:
    """Return when at least one of the events was under way; they are in order of start."""
    spans: list[tuple[float, float]] = []
    for event in events:
        if spans and event.start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], event.end)
        else:
            spans.append((event.start, event.end))
    return spans


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans) / _NANOSECONDS


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _graphs(events: Iterable[ProfileEvent], programs: Iterable[str]) -> dict[str, str | None]:
    """Return the graph id of each program, None where the profile does not tell it.

    The names of modules of lazy graphs have it. Those of jitted functions do not: spans tell it of
    the name, if only one program has that.
    """
    ids_by_name: dict[str, set[str]] = defaultdict(set)
    for event in events:
        graph, name = event.values.get("graph"), event.values.get("program")
        if event.name == f"{_SPAN}execute" and graph and name:
            ids_by_name[_plain(f"jit_{name}")].add(str(graph))
    modules = {program: _module_of(program) for program in programs}
    programs_of = Counter(modules.values())
    graph_ids: dict[str, str | None] = {}
    for program, module in modules.items():
        named = _GRAPH_IN_NAME.match(module)
        ids = ids_by_name[_plain(module)] if programs_of[module] == 1 else set()
        graph_ids[program] = named[1] if named else min(ids) if len(ids) == 1 else None
    return graph_ids


def _plain(name: str) -> str:
    return _NOT_IN_NAMES.sub("_", name).rstrip("_")


def _programs(
    profile: HostProfile,
    operations: Sequence[_Operation],
    graphs: dict[str, str | None],
    busy: float,
) -> list[ProgramTime]:
    by_program: dict[str, list[ProfileEvent]] = defaultdict(list)
    for operation in operations:
        by_program[operation.program].append(operation.event)
    executed = Counter(event.name for event in profile.executions)
    rows = []
    for program, events in by_program.items():
        seconds = _length(_union(events))
        rows.append(
            ProgramTime(
                module=_module_of(program),
                graph_id=graphs[program],
                executions=executed.get(program) or _executions(events),
                seconds=seconds,
                share=_share(seconds, busy),
            )
        )
    return sorted(rows, key=lambda row: -row.seconds)


def _executions(events: Iterable[ProfileEvent]) -> int:
    runs = {event.values.get("run_id") for event in events}
    if None not in runs:
        return len(runs)
    # An operation of a loop runs several times, and all others once in each execution.
    times = Counter((_device_of(event), event.name) for event in events)
    return min(times.values())


def _operation_times(
    profile: HostProfile, operations: Sequence[_Operation], graphs: Mapping[str, str | None]
) -> list[OperationTime]:
    programs = {operation.program for operation in operations}
    times: Counter[tuple[str, str]] = Counter()
    nanoseconds: dict[tuple[str, str], float] = defaultdict(float)
    sources: dict[tuple[str, str], str] = {}
    for operation in operations:
        key = operation.program, str(operation.event.values.get("hlo_op", operation.event.name))
        times[key] += 1
        nanoseconds[key] += operation.alone
        if "source" in operation.event.values:
            sources[key] = str(operation.event.values["source"])
    instructions = {program: _instructions(profile, program) for program in programs}
    total = sum(nanoseconds.values())
    rows = []
    for (program, name), duration in nanoseconds.items():
        opcode, source = instructions[program].get(name, (None, None))
        rows.append(
            OperationTime(
                operation=name,
                opcode=opcode,
                module=_module_of(program),
                graph_id=graphs[program],
                times=times[program, name],
                seconds=duration / _NANOSECONDS,
                share=_share(duration, total),
                source=source or sources.get((program, name)),
            )
        )
    return sorted(rows, key=lambda row: -row.seconds)


def _instructions(profile: HostProfile, program: str) -> dict[str, tuple[str, str | None]]:
    """Return opcode and source line of each instruction of a program, by its name."""
    module = profile.modules.get(program)
    if module is None:
        # Events of an executable that was loaded have another number: 0 on CPUs.
        name = _module_of(program)
        named = [other for key, other in profile.modules.items() if _module_of(key) == name]
        if len(named) != 1:
            return {}
        module = named[0]
    return {
        instruction.name: (instruction.opcode, source_of(module, instruction) or None)
        for computation in module.computations
        for instruction in computation.instructions
    }


def _gaps(
    gaps: Iterable[tuple[float, float]], host_events: Sequence[ProfileEvent], began: float
) -> list[Gap]:
    events = _of_dispatching_thread(host_events)
    pieces = _pieces(events)
    starts = [piece[0] for piece in pieces]
    rows = []
    for start, end in gaps:
        doing: dict[str | None, float] = defaultdict(float)
        at = max(bisect.bisect_right(starts, start) - 1, 0)
        while at < len(pieces) and pieces[at][0] < end:
            piece_start, piece_end, name = pieces[at]
            doing[name] += max(min(piece_end, end) - max(piece_start, start), 0.0)
            at += 1
        doing[None] = end - start - sum(doing.values())
        host = max(doing, key=lambda name: doing[name])
        rows.append(
            Gap(
                start=(start - began) / _NANOSECONDS,
                seconds=(end - start) / _NANOSECONDS,
                host=host,
                share=_share(doing[host], end - start),
            )
        )
    return sorted(rows, key=lambda gap: -gap.seconds)


def _of_dispatching_thread(events: Sequence[ProfileEvent]) -> list[ProfileEvent]:
    """Return the events of the thread that started most programs."""
    counts = Counter(
        event.line
        for event in events
        if event.name.startswith(("PjitFunction(", f"{_SPAN}execute"))
    )
    if not counts:
        return []
    line = max(counts, key=lambda line: counts[line])
    return [event for event in events if event.line == line]


def _pieces(events: Sequence[ProfileEvent]) -> list[tuple[float, float, str]]:
    """Divide a thread's time by its innermost events; what snaprt does is named around them."""
    pieces: list[tuple[float, float, str]] = []
    around: list[tuple[ProfileEvent, str]] = []
    at = 0.0

    def until(time: float) -> None:
        nonlocal at
        while around and around[-1][0].end <= time:
            add(around[-1][0].end)
            around.pop()
        add(time)

    def add(end: float) -> None:
        nonlocal at
        if around and end > at:
            pieces.append((at, end, around[-1][1]))
        at = max(at, end)

    for event in events:
        until(event.start)
        within = next(
            (outer.name for outer, _ in reversed(around) if outer.name.startswith(_SPAN)), ""
        )
        is_named = within and not event.name.startswith(_SPAN)
        around.append((event, f"{within} > {event.name}" if is_named else event.name))
    until(float("inf"))
    return pieces


def _spans(events: Sequence[ProfileEvent]) -> list[SpanTime]:
    ours = [event for event in events if event.name.startswith(_SPAN)]
    times = Counter(event.name for event in ours)
    nanoseconds: dict[str, float] = defaultdict(float)
    for event, alone in zip(ours, _times_alone(ours), strict=True):
        nanoseconds[event.name] += alone
    rows = [
        SpanTime(name, times[name], duration / _NANOSECONDS)
        for name, duration in nanoseconds.items()
    ]
    return sorted(rows, key=lambda row: -row.seconds)


def _steps(events: Iterable[ProfileEvent]) -> list[StepTime]:
    durations: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if "step_num" in event.values and not event.name.startswith(_SPAN):
            durations[event.name].append((event.end - event.start) / _NANOSECONDS)
    return [
        StepTime(name, len(seconds), sum(seconds) / len(seconds), min(seconds), max(seconds))
        for name, seconds in durations.items()
    ]
