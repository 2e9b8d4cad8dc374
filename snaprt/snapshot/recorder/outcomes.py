"""Learns how executions end, without making them wait, and records them for how they ended.

An execution is looked at when a later one begins, which takes 2 us and wakes nobody, and every now
and then by a thread, for the program may not run another. Where it matters how long it takes, that
thread looks when it has taken so long, and waits for it if it has not ended by then: what ends
sooner wakes nobody either. Where that time is too short for looking, it waits for each.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from snaprt import metrics
from snaprt.snapshot.recorder.conditions import Condition
from snaprt.snapshot.recorder.describe import Cause, error_text
from snaprt.snapshot.recorder.failures import mark_recorded
from snaprt.snapshot.recorder.filing import KEEP_LAST, Filing, Ring, names_of
from snaprt.snapshot.recorder.pending import HeldExecution
from snaprt.snapshot.recorder.sharing import Sharing
from snaprt.snapshot.recorder.triggers import Trigger
from snaprt.snapshot.recorder.writer import afresh_in_children

MAX_WAITING: Final = 64
"""How many executions may be under way before the program waits for the oldest."""

LOOK_SECONDS: Final = 0.05
"""How often the thread looks."""

SHORT_NANOSECONDS: Final = 10e6
"""What a thread cannot look in time for: another may keep Python to itself for 5 ms."""


Ended = Callable[[HeldExecution, BaseException | None, int], None]
"""``ended(execution, error, nanoseconds)`` is told how an execution ended, as `Strikes` is."""


class OutcomeWatch:
    """Tells how each execution ended, once, in the order in which they began.

    Args:
        ended: Is told; in a thread of this class, or in one that calls it.
    """

    def __init__(self, ended: Ended) -> None:
        self._ended = ended
        self.start_afresh()
        afresh_in_children(self)

    def start_afresh(self) -> None:
        """Watch nothing, with no thread."""
        self._watched: deque[HeldExecution] = deque()
        self._telling = threading.RLock()  # held by who tells of one of them
        self._fewer = threading.Condition()
        self._waiters = 0  # for fewer
        self._thread: threading.Thread | None = None
        self._something_to_see = threading.Event()
        self._hurry = threading.Event()  # one is there whose limit is short
        self._shortest = math.inf  # of the limits that are not
        self._last_end = 0
        self._is_closed = False

    def add(self, held: HeldExecution) -> None:
        """Watch an execution that has begun and whose outputs are on their way."""
        if self._is_closed:
            self._tell(held, is_timed=True)
            return
        is_short = held.limit < SHORT_NANOSECONDS
        if is_short:
            if len(self._watched) >= MAX_WAITING:
                with metrics.timed("SnapshotWatchWait"), self._fewer:
                    self._waiters += 1
                    self._fewer.wait_for(lambda: len(self._watched) < MAX_WAITING)
                    self._waiters -= 1
        elif held.limit < time.perf_counter_ns() - held.began and held.is_ready():
            self.look()
            with self._telling:  # it ended before the call of it returned
                self._tell(held, is_timed=True)
            return
        self._watched.append(held)
        if is_short:
            self._hurry.set()
        elif held.limit < self._shortest:
            self._shortest = held.limit
        if not self._something_to_see.is_set():
            self._something_to_see.set()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._look_on, name="snaprt-snapshot-look", daemon=True
                )
                self._thread.start()

    def look(self) -> None:
        """Tell of those that have ended, as far as the thread does not wait for them."""
        watched = self._watched
        # Another thread that tells of one goes on with the others by itself.
        if watched and self._telling.acquire(False):
            try:
                while watched and watched[0].is_ready() and watched[0].limit >= SHORT_NANOSECONDS:
                    self._tell(watched.popleft(), is_timed=False)
            finally:
                self._telling.release()

    def settle(self) -> None:
        """Wait until all that were added have ended and were told of."""
        with self._telling:
            while self._watched:
                self._tell_oldest()

    def close(self) -> None:
        """Settle, and leave nothing to a thread from here on.

        A thread that is inside JAX when Python ends takes the whole process down.
        """
        self._is_closed = True
        self.settle()

    def _look_on(self) -> None:
        seen = self._something_to_see
        while True:
            seen.wait()
            self._hurry.wait(self._pause())
            self._hurry.clear()
            self.look()
            self._wait_for_late()
            if not self._watched:
                seen.clear()
                if self._watched:  # added meanwhile, by who saw that it was set
                    seen.set()

    def _pause(self) -> float:
        """Return seconds in which no execution goes past its limit unseen, if any is to."""
        now = time.perf_counter_ns()
        left = [held.began + held.limit - now for held in list(self._watched)]
        return max(0.0, min(LOOK_SECONDS, min([self._shortest, *left]) / 1e9))

    def _wait_for_late(self) -> None:
        """Wait for those with a short limit or past it, and so for those before them."""
        while True:
            now = time.perf_counter_ns()
            awaited = next(
                (
                    held
                    for held in list(self._watched)
                    if _is_short(held) or held.began + held.limit < now
                ),
                None,
            )
            if awaited is None:
                return
            with self._telling:
                while awaited in self._watched:
                    self._tell_oldest()

    def _tell_oldest(self) -> None:
        held = self._watched.popleft()
        self._tell(held, is_timed=_is_short(held) or not held.is_ready())

    def _tell(self, held: HeldExecution, *, is_timed: bool) -> None:
        error: Exception | None = None
        try:
            held.wait()
        except Exception as raised:
            error = raised
        now = time.perf_counter_ns()
        # Where executions queue up, one begins when the one before it ends.
        took = now - max(held.began, self._last_end)
        self._last_end = now
        self._ended(held, error, took if is_timed and held.limit < math.inf else 0)
        if self._waiters:
            with self._fewer:
                self._fewer.notify_all()


def _is_short(held: HeldExecution) -> bool:
    return held.limit < SHORT_NANOSECONDS


class Outcomes:
    """Judges the triggers of executions that have ended, and records what they ask for.

    Args:
        filing: Writes what is recorded.
        ring: What the flight recorder holds; a failure empties it onto the disk.

    Attributes:
        sharing: What it tells the other ranks of a job, and they tell it.
        stop_with: Why the program is to be stopped, once a failure asks for that.
    """

    def __init__(self, filing: Filing, ring: Ring) -> None:
        self._filing = filing
        self._ring = ring
        self.sharing = Sharing(filing, self.dump_ring)
        self.stop_with: str | None = None
        self._being_recorded: set[int] = set()  # by id

    def is_unfinished(self) -> bool:
        """Return whether an execution is about to be recorded, here or for another rank."""
        return bool(self._being_recorded) or self.sharing.awaits_execution()

    def ended(self, held: HeldExecution, error: BaseException | None, nanoseconds: int) -> None:
        """Judge the conditions that had to wait for the end of an execution."""
        try:
            struck: dict[Trigger, list[Condition]] | None = None
            for condition in held.watching:  # at each execution: no more than it takes
                trigger = condition.trigger
                if trigger is not None and trigger.strikes(
                    condition.value, held, error, nanoseconds
                ):
                    struck = struck or {}
                    struck.setdefault(trigger, []).append(condition)
            is_recorded = False
            for trigger, conditions in struck.items() if struck else ():
                strike = functools.partial(
                    self._strike, trigger, conditions, held, error, nanoseconds
                )
                if trigger.confirms is None:
                    is_recorded |= strike()
                else:
                    self._filing.writer.call(strike, sum(array.nbytes for array in held.inputs))
            if error is not None and held.plan.keep_last and not is_recorded:
                mark_recorded(error)
                self.fail(held, Cause("error", error_text(error)))
        except Exception as raised:
            self._filing.writer.complain(raised)

    def dump_ring(self, cause: Cause) -> list[Path]:
        """Queue what the ring holds to be written, and return the files that it will become."""
        expected: list[Path] = []
        for held, files in self._ring.take():
            if files is None:
                expected += names_of(held, cause)
            else:
                expected += [held.plan.folder / file.name for file in files]
            self._filing.queue_all(held, files, cause)
        return expected

    def dump_everywhere(self, cause: Cause) -> None:
        """Have what the ring holds written, and what those of the other ranks hold."""
        self.dump_ring(cause)
        self.sharing.dumped()

    def _strike(
        self,
        trigger: Trigger,
        struck: Sequence[Condition],
        held: HeldExecution,
        error: BaseException | None,
        nanoseconds: int,
    ) -> bool:
        """Record an execution; return whether a condition asks for it."""
        if trigger.confirms is not None and not trigger.confirms(held, error):
            self.sharing.suspect(held)
            return False
        if trigger.counter:
            metrics.counter_add(trigger.counter)
        conditions = [condition for condition in struck if condition.takes(held.moment.graph_id)]
        if not conditions:
            return False
        if error is not None:
            mark_recorded(error)
        reason = trigger.reason(conditions[0].text, nanoseconds)
        cause = Cause(reason, "" if error is None else error_text(error))
        outputs = [] if held.outputs is None or error is not None else held.outputs
        self._being_recorded.add(id(held))
        try:
            if self.sharing.claim(held) and self._filing.admits(
                held, conditions, sum(array.nbytes for array in outputs)
            ):
                self._filing.queue(held, "inputs", conditions, cause)
                if outputs:
                    self._filing.queue(held, "outputs", conditions, cause)
            self.sharing.struck(held, reason)  # after what is its own: nobody may hear
        finally:
            self._being_recorded.discard(id(held))
        if trigger.is_failure:
            self.fail(held, cause)
        return True

    def fail(self, held: HeldExecution, cause: Cause) -> None:
        """Do what follows from a failure, beside recording it: empty the ring, stop the program."""
        metrics.counter_add("SnapshotFailures")
        if held.plan.keep_last:
            self.dump_everywhere(Cause(KEEP_LAST, cause.error))
        if held.plan.stops:
            self.stop_with = (
                f"execution {held.moment.execution} of {held.executable.name}."
                f"{held.executable.graph_id} was recorded for {cause.reason!r} into "
                f"{held.plan.folder}, and the program is to stop then"
            )
