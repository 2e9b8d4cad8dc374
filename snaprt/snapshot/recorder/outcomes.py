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
from snaprt.snapshot.recorder.pending import (
    HeldExecution,
    Trail,
    Trailing,
    bytes_held,
)
from snaprt.snapshot.recorder.ranks.sharing import Sharing
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

    Of those that it only trails, those that have succeeded are forgotten, but the last ones.

    Args:
        ended: Is told; in a thread of this class, or in one that calls it.
        take_up: Adds one that was trailed.
    """

    def __init__(self, ended: Ended, take_up: Callable[[Trailing], None]) -> None:
        self._ended = ended
        self._trail = Trail(take_up)
        self.start_afresh()
        afresh_in_children(self)

    def start_afresh(self) -> None:
        """Watch nothing, with no thread."""
        self._trail.start_afresh()
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

    def add(self, execution: HeldExecution) -> None:
        """Watch an execution that has begun and whose outputs are on their way."""
        if self._is_closed:
            self._tell(execution, is_timed=True)
            return
        is_short = execution.limit < SHORT_NANOSECONDS
        if is_short:
            if len(self._watched) >= MAX_WAITING:
                with metrics.timed("SnapshotWatchWait"), self._fewer:
                    self._waiters += 1
                    self._fewer.wait_for(lambda: len(self._watched) < MAX_WAITING)
                    self._waiters -= 1
        elif execution.limit < time.perf_counter_ns() - execution.began and execution.is_ready():
            self.look()
            with self._telling:  # it ended before the call of it returned
                self._tell(execution, is_timed=True)
            return
        self._watched.append(execution)
        if is_short:
            self._hurry.set()
        elif execution.limit < self._shortest:
            self._shortest = execution.limit
        if not self._something_to_see.is_set():
            self._see_to_it()

    def trail(self, execution: Trailing, keep: int) -> None:
        """Watch an execution whose call has returned, with as little as it takes.

        Args:
            execution: The execution.
            keep: So many are not forgotten, however they end.
        """
        self._trail.add(execution, keep)
        if self._is_closed:
            self._trail.take_up()
        elif not self._something_to_see.is_set():
            self._see_to_it()

    def take_up_trail(self) -> None:
        """Watch those that are trailed as all others are."""
        self._trail.take_up()

    def _see_to_it(self) -> None:
        self._something_to_see.set()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._look_on, name="snaprt-snapshot-look", daemon=True
            )
            self._thread.start()

    def look(self) -> None:
        """Tell of those that have ended, as far as the thread does not wait for them."""
        if self._trail:
            self._trail.take_up()
        watched = self._watched
        # Another thread that tells of one goes on with the others by itself.
        if watched and self._telling.acquire(False):
            try:
                while watched and watched[0].is_ready() and watched[0].limit >= SHORT_NANOSECONDS:
                    self._tell(watched.popleft(), is_timed=False)
            finally:
                self._telling.release()

    def settle(self) -> None:
        """Wait until all that were added or trailed have ended and were told of."""
        self._trail.take_up()
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
        event = self._something_to_see
        while True:
            event.wait()
            self._hurry.wait(self._pause())
            self._hurry.clear()
            self.look()
            self._wait_for_late()
            if not self._watched:
                event.clear()
                if self._watched or self._trail:  # added meanwhile, by who saw that it was set
                    event.set()

    def _pause(self) -> float:
        """Return seconds in which no execution goes past its limit unseen, if any is to."""
        now = time.perf_counter_ns()
        left = [execution.began + execution.limit - now for execution in list(self._watched)]
        return max(0.0, min(LOOK_SECONDS, min([self._shortest, *left]) / 1e9))

    def _wait_for_late(self) -> None:
        """Wait for those with a short limit or past it, and so for those before them."""
        while True:
            now = time.perf_counter_ns()
            awaited = next(
                (
                    execution
                    for execution in list(self._watched)
                    if _is_short(execution) or execution.began + execution.limit < now
                ),
                None,
            )
            if awaited is None:
                return
            with self._telling:
                while awaited in self._watched:
                    self._tell_oldest()

    def _tell_oldest(self) -> None:
        execution = self._watched.popleft()
        self._tell(execution, is_timed=_is_short(execution) or not execution.is_ready())

    def _tell(self, execution: HeldExecution, *, is_timed: bool) -> None:
        error: Exception | None = None
        try:
            execution.wait()
        except Exception as raised:
            error = raised
        now = time.perf_counter_ns()
        # Where executions queue up, one begins when the one before it ends.
        took = now - max(execution.began, self._last_end)
        self._last_end = now
        self._ended(execution, error, took if is_timed and execution.limit < math.inf else 0)
        if self._waiters:
            with self._fewer:
                self._fewer.notify_all()


def _is_short(execution: HeldExecution) -> bool:
    return execution.limit < SHORT_NANOSECONDS


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

    def ended(
        self, execution: HeldExecution, error: BaseException | None, nanoseconds: int
    ) -> None:
        """Judge the conditions that had to wait for the end of an execution."""
        try:
            struck: dict[Trigger, list[Condition]] | None = None
            for condition in execution.watching:  # at each execution: no more than it takes
                trigger = condition.trigger
                if trigger is not None and trigger.strikes(
                    condition.value, execution, error, nanoseconds
                ):
                    struck = struck or {}
                    struck.setdefault(trigger, []).append(condition)
            is_recorded = False
            for trigger, conditions in struck.items() if struck else ():
                strike = functools.partial(
                    self._strike, trigger, conditions, execution, error, nanoseconds
                )
                if trigger.confirms is None:
                    is_recorded |= strike()
                else:
                    self._filing.writer.call(strike, bytes_held(execution.inputs))
            if error is not None and execution.plan.keep_last and not is_recorded:
                mark_recorded(error)
                self.fail(execution, Cause("error", error_text(error)))
        except Exception as raised:
            self._filing.writer.complain(raised)

    def dump_ring(self, cause: Cause) -> list[Path]:
        """Queue what the ring holds to be written, and return the files that it will become."""
        expected: list[Path] = []
        for execution, files in self._ring.take():
            if files is None:
                expected += names_of(execution, cause)
            else:
                expected += [execution.plan.folder / file.name for file in files]
            self._filing.queue_all(execution, files, cause)
        return expected

    def dump_everywhere(self, cause: Cause) -> None:
        """Have what the ring holds written, and what those of the other ranks hold."""
        self.dump_ring(cause)
        self.sharing.dumped()

    def _strike(
        self,
        trigger: Trigger,
        struck: Sequence[Condition],
        execution: HeldExecution,
        error: BaseException | None,
        nanoseconds: int,
    ) -> bool:
        """Record an execution; return whether a condition asks for it."""
        if trigger.confirms is not None and not trigger.confirms(execution, error):
            self.sharing.suspect(execution)
            return False
        if trigger.counter:
            metrics.counter_add(trigger.counter)
        conditions = [
            condition for condition in struck if condition.takes(execution.moment.graph_id)
        ]
        if not conditions:
            return False
        if error is not None:
            mark_recorded(error)
        reason = trigger.reason(conditions[0].text, nanoseconds)
        cause = Cause(reason, "" if error is None else error_text(error))
        outputs = [] if execution.outputs is None or error is not None else execution.outputs
        self._being_recorded.add(id(execution))
        try:
            if self.sharing.claim(execution) and self._filing.admits(
                execution, conditions, runs=bool(outputs)
            ):
                self._filing.queue(execution, "inputs", conditions, cause)
                if outputs:
                    self._filing.queue(execution, "outputs", conditions, cause)
            self.sharing.struck(execution, reason)  # after what is its own: nobody may hear
        finally:
            self._being_recorded.discard(id(execution))
        if trigger.is_failure:
            self.fail(execution, cause)
        return True

    def fail(self, execution: HeldExecution, cause: Cause) -> None:
        """Do what follows from a failure, beside recording it: empty the ring, stop the program."""
        metrics.counter_add("SnapshotFailures")
        if execution.plan.keep_last:
            self.dump_everywhere(Cause(KEEP_LAST, cause.error))
        if execution.plan.stops:
            self.stop_with = (
                f"execution {execution.moment.execution} of {execution.executable.name}."
                f"{execution.executable.graph_id} was recorded for {cause.reason!r} into "
                f"{execution.plan.folder}; stopping the program, as requested"
            )
