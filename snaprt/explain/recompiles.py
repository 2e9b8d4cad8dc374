"""Why programs are recompiled: remembers the programs of each place, and warns if they keep coming.

It is called only for compilations, so it is always on. Of each program, it keeps an outline.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from snaprt import jaxapi, settings
from snaprt.explain.reasons import Outline, Reason, name_of, nearest, outline_of, reasons
from snaprt.graph.program import Program
from snaprt.runtime.events import Compilation, Cut, Subscriber
from snaprt.trace import pacing
from snaprt.trace.modes import current_modes
from snaprt.units import counted

_log = logging.getLogger("snaprt.explain")

#: The causes of cuts that run all that is pending; all others read a value.
_AT_STEPS: Final = pacing.CAUSES | {"mark_step"}

#: How many of a place's programs a new one may be compared with.
_MOST_OUTLINES: Final = 8
#: Above so many operations in all outlines, the places that were seen longest ago are forgotten.
_MOST_OPERATIONS: Final = 200_000


@dataclass(frozen=True)
class CompilationEvent:
    """A program that was compiled, or loaded from the compile cache.

    Attributes:
        cause: The cause of the graph break: see `snaprt.explain.cuts.CutRecord`.
        step: How many steps the thread had marked before.
        graph_id: Its id in logs, errors and snapshots.
        number: Counts the programs of its place, from 1.
        reasons: How it differs from the nearest earlier program of its place; empty for the first.
    """

    cause: str
    place: jaxapi.Frame | None
    stack: tuple[jaxapi.Frame, ...]
    step: int
    graph_id: str
    operations: int
    seconds: float
    from_cache: bool
    number: int
    reasons: tuple[Reason, ...]


@dataclass
class _Site:
    """What is known of a place."""

    programs: int = 0
    outlines: list[Outline] = field(default_factory=list)
    # In how many steps it has led to some. The reads of one line, as of a dict of metrics, are
    # programs of their own, which the next step has already.
    rounds: int = 0
    cuts: int = 0
    cut: Cut | None = None  # the last one
    is_told: bool = False  # whether its number of rounds has been warned of

    def add(self, outline: Outline, cut: Cut) -> None:
        """Take note of a program."""
        self.programs += 1
        self.outlines = [*self.outlines[1 - _MOST_OUTLINES :], outline]
        if cut is self.cut:
            return
        self.cuts += 1
        # Where no step has been marked, it cannot be told: only each fourth cut counts.
        is_next = self.cut is None or cut.step != self.cut.step
        if is_next or (cut.step == 0 and self.cuts % 4 == 0):
            self.rounds += 1
        self.cut = cut

    def operations(self) -> int:
        return sum(len(outline.names) for outline in self.outlines)


class _History(Subscriber):
    """The programs of this process by the place whose cut led to them."""

    def __init__(self) -> None:
        self._sites: OrderedDict[Any, _Site] = OrderedDict()
        self._operations = 0
        self._lock = threading.Lock()
        self._listening: tuple[list[CompilationEvent], ...] = ()

    def compiled(self, compilation: Compilation) -> None:
        """Remember a program; tell why it had to be made, if that is wanted."""
        limit, action = settings.get("SNAPRT_RECOMPILE_LIMIT")
        try:
            self._remember(compilation, limit, action)
        except Exception as error:  # no program may fail because it could not be explained
            _log.info("cannot explain a compilation: %r", error)

    def falls_back(self, cut: Cut, program: Program, is_fallen: bool) -> bool:
        """Return whether the place has been warned of, and new programs of it are to be eager."""
        limit, action = settings.get("SNAPRT_RECOMPILE_LIMIT")
        if not limit or action != "eager":
            return False
        with self._lock:
            site = self._sites.get(_key(cut, program, is_fallen))
            return site is not None and site.is_told

    def listen(self, events: list[CompilationEvent]) -> None:
        """Append what happens to ``events`` from here on."""
        with self._lock:
            self._listening = (*self._listening, events)

    def leave(self, events: list[CompilationEvent]) -> None:
        """Append to it no more."""
        with self._lock:
            self._listening = tuple(other for other in self._listening if other is not events)

    def _remember(self, compilation: Compilation, limit: int, action: str) -> None:
        cut, program = compilation.cut, compilation.program
        if current_modes().by_operation(at_step=cut.cause in _AT_STEPS):
            return  # each operation is a program
        key = _key(cut, program, compilation.is_fallen)
        if key is None:
            return
        with self._lock:
            site = self._site(key)
            self._operations -= site.operations()
            earlier = tuple(site.outlines)
            outline = outline_of(
                program, compilation.promoted, is_watched=compilation.executable.is_watched
            )
            site.add(outline, cut)
            self._operations += site.operations()
            self._forget()
            listening = () if compilation.is_fallen else self._listening
            number = site.programs
            is_at_limit = 0 < limit < site.rounds and not site.is_told
            site.is_told = site.is_told or is_at_limit
        if not listening and not is_at_limit:
            return
        event = _event(compilation, outline, earlier, number)
        for events in listening:
            events.append(event)
        if is_at_limit:
            place = f"{jaxapi.place_text(event.place)} ({event.cause})"
            _warn(event, key[0] if compilation.is_fallen else place, _AT_LIMIT[action])

    def reasons_for(
        self, cut: Cut, program: Program, promoted: frozenset[int], *, is_watched: bool
    ) -> list[str]:
        """Return how a program differs from the nearest one of its place, in lines; or nothing."""
        place = jaxapi.users_place(cut.stack)
        with self._lock:
            site = self._sites.get(_key(cut, program))
            # Else those of the same line, called from elsewhere.
            sites = (
                [site]
                if site
                else [
                    other
                    for (cause, stack, _), other in self._sites.items()
                    if cause == cut.cause and jaxapi.users_place(stack) == place
                ]
            )
            earlier = tuple(outline for other in sites for outline in other.outlines)
        outline = outline_of(program, promoted, is_watched=is_watched)
        return _lines(_differences(program, outline, earlier))

    def _site(self, key: Any) -> _Site:
        site = self._sites.setdefault(key, _Site())
        self._sites.move_to_end(key)
        return site

    def _forget(self) -> None:
        while self._operations > _MOST_OPERATIONS and len(self._sites) > 1:
            _, site = self._sites.popitem(last=False)
            self._operations -= site.operations()


def _key(cut: Cut, program: Program, is_fallen: bool = False) -> Any:
    """Return what a program is one of: a place; or where that falls back, a jitted function."""
    if not is_fallen:
        return cut.cause, cut.stack, program.placement
    (node,) = program.nodes
    function = jaxapi.unpackable_function(node.primitive, node.params)
    return None if function is None else (function, (), program.placement)


def _event(
    compilation: Compilation, outline: Outline, earlier: tuple[Outline, ...], number: int
) -> CompilationEvent:
    cut, executable = compilation.cut, compilation.executable
    return CompilationEvent(
        cause=cut.cause,
        place=jaxapi.users_place(cut.stack),
        stack=cut.stack,
        step=cut.step,
        graph_id=executable.graph_id,
        operations=len(outline.names),
        seconds=compilation.seconds,
        from_cache=executable.from_cache,
        number=number,
        reasons=_differences(compilation.program, outline, earlier),
    )


def _differences(
    program: Program, outline: Outline, earlier: Sequence[Outline]
) -> tuple[Reason, ...]:
    """Return how a program differs from the nearest earlier one; nothing if there is none."""
    if not earlier:
        return ()
    before = nearest(earlier, outline)
    return reasons(before, outline, lambda index: name_of(program.inputs[index]))


#: By the action of the limit, what follows from having reached it.
_AT_LIMIT: Final = {
    "warn": "SNAPRT_RECOMPILE_LIMIT=0 disables this warning",
    "eager": "from now on, what would be compiled for it runs op by op",
}


def _warn(event: CompilationEvent, subject: str, consequence: str) -> None:
    _log.warning(
        "%s has caused %d programs; the last differs from the nearest earlier one:%s\n  "
        "snaprt.CompilationProfiler() reports each one; %s",
        subject,
        event.number,
        "".join(f"\n  {line}" for line in _lines(event.reasons)),
        consequence,
    )


#: Remembers the compilations of this process, where it is attached as a watcher.
history: Final = _History()


class CompilationProfiler:
    """Record why programs are compiled: ``with snaprt.CompilationProfiler() as profiler: ...``.

    A program is compared with the nearest earlier one from a graph break at the same place and with
    the same call stack, even if that ran before the profiler began.

    Attributes:
        events: The programs that were compiled, or loaded from the compile cache, in any thread, in
            order.

    Examples:
        >>> with snaprt.CompilationProfiler() as profiler, snaprt.lazy():
        ...     for size in (8, 8, 5):
        ...         total = jnp.ones(size).sum() * 3
        ...         snaprt.mark_step()
        >>> len(profiler.events)  # the second step compiled nothing
        2
    """

    def __init__(self) -> None:
        self.events: list[CompilationEvent] = []

    def __enter__(self) -> CompilationProfiler:
        history.listen(self.events)
        return self

    def __exit__(self, *error: object) -> None:
        history.leave(self.events)

    @property
    def recompilations(self) -> tuple[CompilationEvent, ...]:
        """The programs that were not the first of their place."""
        return tuple(event for event in self.events if event.number > 1)

    def report(self) -> str:
        """Return a text of the programs compiled at each place, with the reasons."""
        by_place: dict[Any, list[CompilationEvent]] = {}
        for event in self.events:
            by_place.setdefault((event.cause, event.stack), []).append(event)
        loaded = sum(event.from_cache for event in self.events)
        lines = [
            f"{counted(len(self.events), 'program')} at {counted(len(by_place), 'place')}, "
            f"{len(self.events) - loaded} compiled, {loaded} loaded from the compile cache, in "
            f"{sum(event.seconds for event in self.events):.2f} s"
        ]
        for events in by_place.values():
            lines += ["", f"{jaxapi.place_text(events[0].place)} ({events[0].cause})"]
            lines += [line for event in events for line in _event_lines(event)]
        return "\n".join(lines)


def _event_lines(event: CompilationEvent) -> list[str]:
    how = "loaded" if event.from_cache else "compiled"
    operations = counted(event.operations, "operation")
    start = f"  step {event.step}: {operations}, {how} in {event.seconds:.2f} s"
    if not event.reasons:
        return [f"{start}, the first here"]
    return [start, *(f"    {line}" for line in _lines(event.reasons))]


def _lines(differences: Sequence[Reason]) -> list[str]:
    advice = dict.fromkeys(reason.advice for reason in differences if reason.advice)
    return [
        *(reason.text for reason in differences),
        *(f"instead: {text}" for text in advice),
    ]
