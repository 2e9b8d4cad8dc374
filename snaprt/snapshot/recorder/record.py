"""Sees executions and hands what is to be recorded to the writer.

While recording is off, an execution costs a comparison and a count. While it is on, arrays are not
copied here either: JAX's are immutable, so the writer's thread fetches what it holds references to.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import math
import multiprocessing.util
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax

from snaprt import jaxapi, metrics
from snaprt.errors import ExecutionError
from snaprt.processes import place_in_job
from snaprt.snapshot.recorder.conditions import (
    BOTH_ROLES,
    EVER,
    Condition,
    Moment,
    Prospect,
    Rest,
    prospect,
    rest_of,
    shortest_limit,
)
from snaprt.snapshot.recorder.describe import Cause, error_text
from snaprt.snapshot.recorder.failures import (
    before_replaced,
    before_terminated,
    is_recorded,
    listen_for_uncaught_errors,
    mark_recorded,
    on_user_signal,
    stop_listening,
)
from snaprt.snapshot.recorder.filing import KEEP_LAST, Filing, Ring
from snaprt.snapshot.recorder.outcomes import Outcomes, OutcomeWatch
from snaprt.snapshot.recorder.pending import (
    HeldExecution,
    RecordedExecutable,
    Trail,
    Trailing,
    about_to_delete,
    about_to_donate,
    bytes_on_a_device,
    has_deleted,
    hold_inputs,
    is_anything_held,
    remember,
)
from snaprt.snapshot.recorder.plan import Plan, current_plan, decide, records_all, steps_ended
from snaprt.snapshot.recorder.ranks.states import end_state, keep_state
from snaprt.snapshot.recorder.recheck import Rechecks, spans_processes
from snaprt.snapshot.recorder.writer import SnapshotWriter, afresh_in_children
from snaprt.units import counted, first_names

_ROOM_SECONDS = 0.05  # how often the ring is weighed against its budget
_MOST_NAMES = 8  # of programs that are told
_MOST_LOGGED = 1000  # of lines that are said once
_log = logging.getLogger("snaprt.snapshot")

_UNJUDGED = Prospect((), EVER, EVER, is_left_to_the_end=False, limit=math.inf)


@dataclass
class _History:
    """What is known of an executable that has run."""

    name: str
    counter: itertools.count[int] = field(default_factory=itertools.count)
    devices: tuple[tuple[int, jaxapi.Device, frozenset[str]], ...] | None = None
    nbytes: int | None = None  # of its arrays on a device, once one was recorded
    watched: int = 0  # executions of which it was found out whether a NaN appears
    prospect: tuple[Plan | None, Prospect] = (None, _UNJUDGED)  # of that plan
    never_rests: Plan | None = None  # the plan for which each execution is to be told
    held: tuple[Plan | None, SameEachTime | None] = (None, None)  # under that plan

    @property
    def executions(self) -> int:
        """How many there were."""
        return int(repr(self.counter)[6:-1])  # it shows its next number to nobody else


@dataclass(frozen=True)
class Resting:
    """Counts executions of an executable of which nothing is wanted, unless they fail."""

    counter: itertools.count[int]
    until: Rest
    # Of one whose failures are wanted, what `trail` takes, which then counts instead.
    trailing: SameEachTime | None = None

    def count(self) -> bool:
        """Count one; return whether something may be wanted of the next."""
        wants_next = next(self.counter) + 1 >= self.until.execution
        for condition, graph_id in self.until.passing:
            wants_next |= condition.pass_by(graph_id)
        return wants_next


class SameEachTime(NamedTuple):
    """What is known of an executable of whose executions the same is wanted each time."""

    executable: RecordedExecutable
    plan: Plan
    hopes: Prospect  # of the conditions of which only the end of an execution decides
    history: _History
    recorded_for: tuple[Condition, ...]  # those that want each
    # Whether it is enough to see a call that has returned: each is recorded, or none that succeeds.
    is_trailed: bool


_Begun = tuple[RecordedExecutable, Plan, Prospect, _History, Sequence[Any], int, int, int, float]
"""An execution that has begun, of which nothing is wanted yet: with its inputs, how many came
before, how many steps did, and when it began, as `HeldExecution` says it twice."""


class Recorder:
    """Records executions as the plan says; an observer of ``snaprt.compile.executable``.

    Args:
        writer: Writes the files; by default one of its own.
        step: Returns how many steps came before; called in the thread that executes.
    """

    def __init__(
        self, writer: SnapshotWriter | None = None, step: Callable[[], int] = lambda: -1
    ) -> None:
        self.writer = SnapshotWriter() if writer is None else writer
        self._step = step
        self._histories: dict[int, _History] = {}
        self._plan: Plan | None = None  # the last one that was acted on
        self._began = 0.0  # when the first plan was acted on
        self._process = 0  # of JAX's, once somebody asks to record
        self._rank = 0  # likewise
        self._filing = Filing(self.writer)
        self._ring = Ring(self._filing.write_now, lambda: self._watch.take_up_trail())
        self._outcomes = Outcomes(self._filing, self._ring)
        self._to_record = Trail(self._record_trailed)
        afresh_in_children(self._to_record)
        self._watch = OutcomeWatch(self._outcomes.ended, self._take_up)
        self._rechecks = Rechecks(self._filing, self._outcomes.fail, self._say_once)
        self._last: HeldExecution | None = None  # of those for which errors count
        self._room_made = 0.0
        self._is_flushed_by_signal = False  # SIGTERM
        self._is_flushed_by_worker = False  # of multiprocessing, which ends without `atexit`
        self._listens = False  # to SIGUSR1
        self._has_failed = False  # the program, or a thread or lazy scope of it
        self._has_met = False  # a condition that does not wait for the end
        self._logged: set[str] = set()
        self._untraced: set[str] = set()  # the functions whose calls JAX could not trace

    # What whoever compiles a program asks.

    def wants_flag(self, devices: Sequence[jaxapi.Device]) -> bool:
        """Return whether a program is to be compiled with `snaprt.compile.lower.watched`.

        Args:
            devices: Those that it runs on: either all of their processes compile it so, or none.
        """
        plan = current_plan()
        if plan is None or not plan.wants_flag:
            return False
        return self._outcomes.sharing.wants_flags(plan, jaxapi.processes_of(devices))

    def withholds_donation(self) -> bool:
        """Return whether programs are to be compiled without donation."""
        plan = current_plan()
        return plan is not None and plan.withholds_donation

    def waits_for_errors(self) -> bool:
        """Return whether an error of the program would be recorded."""
        plan = current_plan()
        return plan is not None and plan.waits_for_errors

    def ignores(self, executable: RecordedExecutable) -> bool:
        """Return whether nothing of an executable can be recorded: no condition has its name.

        All ranks that run it get the same answer, for it decides what they compile.
        """
        plan = current_plan()
        if plan is None or plan.keep_last:
            return plan is None
        try:
            self._act_on(plan)
            if self._prospect(plan, executable).conditions:
                return False
            moment = self._moment(plan, executable, 0, 0)
            return not any(
                prospect(plan.conditions, moment._replace(rank=rank)).conditions
                for rank in jaxapi.processes_of(executable.devices)
                if rank != moment.rank
            )
        except Exception as error:
            self.writer.complain(error)
            return True

    def rest(self, executable: RecordedExecutable, *, starts_surely: bool) -> Resting | None:
        """Return what counts the next executions of an executable, of which nothing is wanted.

        Args:
            executable: The executable.
            starts_surely: Whether no call of it fails: if an execution does, its outputs say so.

        Returns:
            None where each is to be told to `before`.
        """
        history = self._histories.get(executable.number) or self._meet(executable)
        plan = current_plan()
        if plan is None:
            return Resting(history.counter, Rest())
        if history.never_rests is plan:
            return None
        known = self.same_each_time(executable) if starts_surely else None
        if known is not None and known.is_trailed and self._outcomes.sharing.is_alone:
            return Resting(history.counter, Rest(), known)
        hopes = self._prospect(plan, executable)
        is_changed = plan.wants_flag or (plan.withholds_donation and executable.donated)
        if (
            plan.keep_last
            or plan.stops
            or any(
                condition.is_judged_each_time or condition.wants_each
                for condition in hopes.conditions
            )
            or (is_changed and not self.ignores(executable))
        ):
            history.never_rests = plan
            return None
        count, step = history.executions, self._step()
        until = rest_of(
            [condition.rest(executable.graph_id, count, step) for condition in hopes.conditions]
        )
        return Resting(history.counter, until) if until.execution > count else None

    def same_each_time(self, executable: RecordedExecutable) -> SameEachTime | None:
        """Return what `hold` needs for the next execution of one that has run.

        Returns:
            None where `before` is to judge each: they may differ in what is wanted, it may be
            changed, or its inputs are copied first.
        """
        history = self._histories.get(executable.number)
        plan = current_plan()
        # `before` gets ready for a plan that is new.
        if history is None or plan is None or plan is not self._plan or not records_all():
            return None
        judged, known = history.held
        if judged is not plan:
            known = self._judge_held(plan, executable, history)
            history.held = plan, known
        return known

    def _judge_held(
        self, plan: Plan, executable: RecordedExecutable, history: _History
    ) -> SameEachTime | None:
        if executable.donated or plan.wants_flag or plan.stops or plan.hold != "device":
            return None
        hopes = self._prospect(plan, executable)
        if not (hopes.conditions or plan.keep_last):
            return None
        wanted = tuple([c for c in hopes.conditions if c.trigger is None and c.wants_each])
        watching = tuple([c for c in hopes.conditions if c.is_left_to_the_end()])
        if len(wanted) + len(watching) < len(hopes.conditions):
            return None
        strikes_success = any(c.trigger is None or c.trigger.strikes_success for c in watching)
        hopes = hopes._replace(conditions=watching)
        is_trailed = not (watching or plan.keep_last) if wanted else not strikes_success
        return SameEachTime(executable, plan, hopes, history, wanted, is_trailed)

    def most_executions(self) -> int:
        """Return how often the executable ran that was run most often."""
        return max((history.executions for history in self._histories.values()), default=0)

    def missed(self, name: str, reason: str) -> None:
        """Learn that an execution ran unseen, and why; say so once if it was to be recorded."""
        plan = current_plan()
        if plan is None:
            return
        moment = Moment(name, "", 0, 0, 0.0, 0)
        if plan.keep_last or prospect(plan.conditions, moment).conditions:
            metrics.counter_add("SnapshotMissed")
            self._say_once(f"an execution of {name} is not recorded: {reason}")

    def trace_failed(self, name: str) -> None:
        """Learn that a call failed while JAX traced it, so that there is nothing to record."""
        self._untraced.add(name)

    def has_no_flag(self, executable: RecordedExecutable, error: Exception) -> None:
        """Learn that a program could not be compiled to say whether it has a NaN; say so once."""
        self._say_once(
            f"{executable.name}.{executable.graph_id} runs as it is, and its results are read to "
            f"find NaN, which takes longer: the test cannot be compiled into it: {error}"
        )

    def _say_once(self, text: str) -> None:
        if text not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(text)
            _log.warning("%s\nThis is said once.", text)

    # What happens to executions, in order.

    def before(
        self, executable: RecordedExecutable, inputs: Sequence[Any]
    ) -> HeldExecution | _Begun | None:
        """See an execution begin: judge the conditions, and queue its inputs if they are wanted.

        Returns:
            None, unless its end is of interest.

        Raises:
            ExecutionError: A failure was recorded, and SNAPRT_RECORD_STOP asks to stop.
        """
        history = self._histories.get(executable.number) or self._meet(executable)
        count = next(history.counter)
        if self._outcomes.stop_with is not None:
            self._stop()
        plan = current_plan()
        if executable.donated and is_anything_held():
            hold = "device" if plan is None else plan.hold
            about_to_donate([inputs[number] for number in executable.donated], hold)
        if plan is None:
            self._last = None
            return None
        try:
            if plan is not self._plan:
                self._act_on(plan)
            judged, hopes = history.prospect
            if judged is not plan:
                hopes = self._prospect(plan, executable)
            if hopes.is_left_to_the_end and records_all():
                self._watch.look()
                self._last = None
                began, now = time.perf_counter_ns(), time.time()
                return executable, plan, hopes, history, inputs, count, self._step(), began, now
            first, last = hopes.executions
            if not first <= count <= last:
                return None
            step = self._step()
            first, last = hopes.steps
            if not first <= step <= last:
                return None
            return self._begin(plan, hopes.conditions, count, step, executable, inputs, history)
        except Exception as error:
            self.writer.complain(error)
            return None

    def hold(self, known: SameEachTime, inputs: list[jax.Array]) -> HeldExecution | None:
        """See an execution begin as `before` does, where `same_each_time` still holds of it.

        Args:
            known: What that has just returned.
            inputs: The arrays that go in, all of JAX's own class.

        Returns:
            None where it could not be held, which is logged, or is about to fail.
        """
        count = next(known.history.counter)
        try:
            self._watch.look()
            if has_deleted(inputs):
                return None
            step, began, now = self._step(), time.perf_counter_ns(), time.time()
            execution = self._held((*known[:4], inputs, count, step, began, now))
            if known.recorded_for and execution.devices:
                self._has_met = True
                self._record(execution, known.recorded_for, Cause(known.recorded_for[0].text))
            return execution
        except Exception as error:
            self.writer.complain(error)
            return None

    def trail(self, known: SameEachTime, inputs: list[Any], outputs: list[Any]) -> None:
        """See an execution whose call has returned, after `rest` gave what is known of it.

        Args:
            known: That.
            inputs: The arrays that went in; they stay as they are unless somebody donates them.
            outputs: The arrays that came out, or are on their way: all where they may be wanted,
                else one that can say whether it is there, if there is any.
        """
        count, step = next(known.history.counter), self._step()
        rest = known, count, step, time.perf_counter_ns(), time.time()
        if not known.recorded_for:
            self._watch.trail((inputs, outputs, rest), max(known.plan.keep_last, 1))
            return
        self._has_met = True
        cause = Cause(known.recorded_for[0].text)  # of this thread's settings
        self._to_record.add((inputs, outputs, (*rest, cause)), math.inf)
        history = known.history
        if history.nbytes is None:
            history.nbytes = bytes_on_a_device([*inputs, *outputs])
        self.writer.call(
            self._to_record.take_up_oldest, history.nbytes, known.executable.devices[0]
        )

    def _record_trailed(self, execution: Trailing) -> None:
        inputs, outputs, (known, count, step, began, now, cause) = execution
        held = self._held((*known[:4], inputs, count, step, began, now))
        if outputs:  # else they are not to be had
            held.take_outputs(outputs, None)
        if held.devices and self._record(held, known.recorded_for, cause) and outputs:
            self._filing.queue(held, "outputs", held.recorded_for, cause)

    def _take_up(self, execution: Trailing) -> None:
        inputs, outputs, (known, count, step, began, now) = execution
        try:
            held = self._held((*known[:4], inputs, count, step, began, now))
            held.take_outputs(outputs, None)
            if held.watching:
                self._watch.add(held)
            self._make_room(held.plan)
        except Exception as error:
            self.writer.complain(error)

    def after(
        self,
        token: HeldExecution | _Begun,
        outputs: Sequence[Any],
        flag: Any = None,
        *,
        has_compiled: bool = False,
    ) -> None:
        """See the outputs of an execution, which may not be computed yet.

        Args:
            token: What ``before`` returned.
            outputs: The outputs, a flag included.
            flag: Whether another output has a NaN or an infinity, of an executable that was
                compiled to say so: a bool scalar.
            has_compiled: Whether the program was compiled on the way, so that nobody knows how
                long it ran.

        Raises:
            ExecutionError: A failure was recorded, and SNAPRT_RECORD_STOP asks to stop.
        """
        try:
            execution = self._held(token)
            execution.take_outputs(outputs, flag)
            if has_compiled:
                execution.limit = math.inf
            if execution.cause is not None:
                self._filing.queue(execution, "outputs", execution.recorded_for, execution.cause)
            if execution.watching:
                if execution.plan.wants_flag:
                    self._histories[execution.executable.number].watched += 1
                self._watch.add(execution)
            self._make_room(execution.plan)
            if execution.plan.stops and execution.watching:
                self._watch.settle()  # whoever is to stop at a failure waits for each execution
                self.writer.flush()
        except Exception as error:
            self.writer.complain(error)
        if isinstance(token, HeldExecution) and token.rechecked_for:
            self._rechecks.check(token)
        if self._outcomes.stop_with is not None:
            self._stop()

    def _make_room(self, plan: Plan) -> None:
        if plan.keep_last and time.monotonic() - self._room_made > _ROOM_SECONDS:
            self._room_made = time.monotonic()
            self.writer.call(lambda: self._ring.make_room(plan.keep_bytes))

    def failed(self, token: HeldExecution | _Begun, error: BaseException) -> None:
        """Learn that an execution failed: there are no outputs; its inputs stay queued."""
        metrics.counter_add("SnapshotFailedExecution")
        try:
            if isinstance(token, HeldExecution) or not has_deleted(token[4]):
                self._outcomes.ended(self._held(token), error, 0)
        except Exception as raised:
            self.writer.complain(raised)

    def compile_failed(
        self, executable: RecordedExecutable, inputs: Sequence[Any], error: BaseException
    ) -> None:
        """Learn that a program could not be compiled; record it with what it would have run on."""
        execution = self.before(executable, inputs)
        if execution is not None:
            self.failed(execution, error)

    def program_failed(self, error: BaseException) -> None:
        """Learn of an exception that ends the program or leaves a scope: record what ran last."""
        self._has_failed = True
        plan = current_plan()
        if plan is None or not plan.waits_for_errors:
            return
        if not isinstance(error, Exception) or is_recorded(error):
            return
        try:
            recorded = metrics.counter_value("SnapshotFailures")
            self._watch.settle()
            last = self._last
            if last is not None and last.plan is not plan:
                last = None  # it ran when something else was asked for
            if metrics.counter_value("SnapshotFailures") != recorded:
                mark_recorded(error)  # an execution had failed, and this came of it
            elif last is not None:
                self._outcomes.ended(last, error, 0)
            elif plan.keep_last:
                self._outcomes.dump_everywhere(Cause(KEEP_LAST, error_text(error)))
                mark_recorded(error)
        except Exception as raised:
            self.writer.complain(raised)

    def look(self) -> None:
        """Learn how those ended that have, and let go of their inputs, but those of the last one.

        For who has waited for some: the next execution finds their memory free.
        """
        self._watch.look()

    def dump_now(self) -> list[Path]:
        """Write what the flight recorder holds, and empty it; return the files that are there."""
        for execution in self._ring.executions():
            with contextlib.suppress(Exception):  # it failed: there are no outputs
                execution.wait()
        files = self._outcomes.dump_ring(Cause(KEEP_LAST))
        self.flush()
        return [file for file in files if file.exists()]

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything recorded so far is on disk, at most ``timeout`` seconds."""
        self._watch.settle()
        return self.writer.flush(timeout)

    def _act_on(self, plan: Plan) -> None:
        """Get ready for what a plan that is new may ask for."""
        if plan is self._plan:
            return
        if self._plan is None:
            self._began = time.monotonic()
            self._process = jax.process_index()
        self._plan = plan
        self.writer.queue_bytes = plan.queue_bytes
        self._rank = place_in_job().rank
        keep_state(plan.folder)
        self._outcomes.sharing.join(plan)
        if not self._is_flushed_by_signal:
            self._is_flushed_by_signal = before_terminated(
                self._terminated, self._outcomes.is_unfinished
            )
        listen_for_uncaught_errors(self)
        if plan.keep_last and not self._listens:
            self._listens = True
            on_user_signal(lambda: self._outcomes.dump_everywhere(Cause(KEEP_LAST)))
        jaxapi.before_deleted(about_to_delete)
        atexit.unregister(self._finish)
        atexit.register(self._finish)
        if not self._is_flushed_by_worker:
            self._is_flushed_by_worker = True
            _flush_as_worker_ends(self)
            before_replaced(self._replaced)
            multiprocessing.util.register_after_fork(self, _flush_as_worker_ends)

    def _terminated(self) -> None:
        end_state("terminated")
        self.writer.end()
        self._outcomes.sharing.leave()

    def _replaced(self) -> None:
        self._watch.look()
        self.writer.end()

    def _meet(self, executable: RecordedExecutable) -> _History:
        return self._histories.setdefault(executable.number, _History(executable.name))

    def _prospect(self, plan: Plan, executable: RecordedExecutable) -> Prospect:
        """Return which conditions of a plan may hold of an executable, and when; judge it once."""
        history = self._histories.get(executable.number) or self._meet(executable)
        judged, hopes = history.prospect
        if judged is not plan:
            hopes = prospect(plan.conditions, self._moment(plan, executable, 0, 0))
            if plan.keep_last:  # the flight recorder holds all, and what hangs in its call too
                hopes = hopes._replace(executions=EVER, steps=EVER, is_left_to_the_end=False)
            if executable.donated or plan.hold != "device":  # what is held is copied first
                hopes = hopes._replace(is_left_to_the_end=False)
            history.prospect = plan, hopes
        return hopes

    def _moment(self, plan: Plan, executable: RecordedExecutable, count: int, step: int) -> Moment:
        seconds = time.monotonic() - self._began
        return Moment(executable.name, executable.graph_id, count, step, seconds, self._rank)

    def _begin(
        self,
        plan: Plan,
        conditions: Sequence[Condition],
        count: int,
        step: int,
        executable: RecordedExecutable,
        inputs: Sequence[Any],
        history: _History,
    ) -> HeldExecution | None:
        """Hold an execution of which something may be wanted, and queue what is already."""
        moment = self._moment(plan, executable, count, step)
        at_once: list[Condition] = []
        watching: list[Condition] = []
        again: list[Condition] = []
        for condition in conditions:
            if condition.holds(moment):
                trigger = condition.trigger
                if trigger and not trigger.runs_again:
                    watching.append(condition)
                    continue
                self._has_met = True
                if condition.takes(executable.graph_id):
                    (again if trigger else at_once).append(condition)
        if again and not self._rechecks.applies(executable, again):
            again = []
        if not at_once and not watching and not again and not plan.keep_last:
            return None
        self._watch.look()
        if has_deleted(inputs):  # the program is about to fail, in JAX's words
            return None
        devices = self._devices(executable, count, history)
        if not devices and not (again and spans_processes(executable)):
            return None
        execution = HeldExecution(
            executable,
            plan,
            moment,
            devices,
            hold_inputs(inputs, executable.donated, "device" if again else plan.hold),
            watching,
            shortest_limit(watching),
            time.perf_counter_ns(),
            time.time(),
        )
        execution.rechecked_for = again
        self._keep(execution)
        if at_once:
            self._record(execution, at_once, Cause(at_once[0].text))
        return execution

    def _record(
        self, execution: HeldExecution, conditions: Sequence[Condition], cause: Cause
    ) -> bool:
        """Queue the inputs of an execution, if the budgets have room for all of it."""
        if not self._filing.admits(execution, conditions):
            return False
        execution.recorded_for, execution.cause = conditions, cause
        self._filing.queue(execution, "inputs", conditions, cause)
        return True

    def _held(self, token: HeldExecution | _Begun) -> HeldExecution:
        """Return an execution under way with all that is to be known of it.

        After a call, the device is busy with it: what this takes, the program does not wait for.
        """
        if isinstance(token, HeldExecution):
            return token
        executable, plan, hopes, history, inputs, count, step, began, now = token
        execution = HeldExecution(
            executable,
            plan,
            self._moment(plan, executable, count, step),
            self._devices(executable, count, history),
            hold_inputs(inputs, (), plan.hold),
            hopes.conditions,
            hopes.limit,
            began,
            now,
        )
        self._keep(execution)
        return execution

    def _keep(self, execution: HeldExecution) -> None:
        """Hold an execution for what may be asked of it later."""
        remember(execution)
        if execution.plan.keep_last:
            self._ring.add(execution)
        if execution.watching:
            self._outcomes.sharing.hold(execution)
        if execution.watching and execution.plan.waits_for_errors:
            self._last = execution

    def _devices(
        self, executable: RecordedExecutable, count: int, history: _History
    ) -> tuple[tuple[int, jaxapi.Device, frozenset[str]], ...]:
        """Return this process's devices of which the callback lets something be recorded."""
        if history.devices is None:
            local_devices = [
                device for device in executable.devices if device.process_index == self._process
            ]
            history.devices = tuple(
                (index, device, BOTH_ROLES) for index, device in enumerate(local_devices)
            )
        if records_all():
            return history.devices
        return tuple(
            (index, device, words)
            for index, device, _ in history.devices
            if (words := decide(executable.name, index, count))
        )

    # The end.

    def _finish(self) -> None:
        """Record what the last executions turn out to be, before the process ends."""
        stop_listening()
        self._watch.close()
        self._outcomes.sharing.finish(has_failed=self._has_failed)
        self.writer.flush()
        self.writer.sum_up()
        self._ring.close()
        if self._plan is not None:
            self._sum_up(self._plan)

    def say_if_nothing_runs(self) -> None:
        """Say at the end of the process that no execution has begun, where that is so.

        A process that only starts others does nothing with JAX.
        """
        atexit.register(self._say_if_nothing_ran)

    def _say_if_nothing_ran(self) -> None:
        plan = current_plan()
        is_said = self._plan is not None or self._logged  # what ran, or why it was not seen
        is_of_jax = self._untraced or jaxapi.backends_are_initialized()
        if plan is not None and not is_said and is_of_jax and records_all():
            why = (
                f"no jitted function ran; JAX could not trace {_few(self._untraced)}"
                if self._untraced
                else "no jitted function was called; operations outside of jax.jit are executions "
                "in a lazy program only (--lazy)"
            )
            _log.warning("nothing was recorded in this process: %s", why)

    def _sum_up(self, plan: Plan) -> None:
        """Say what was watched where no NaN appeared, and that no condition has ever held.

        A misspelt name would explain the latter. Of several processes, those of other ranks are to
        record nothing.
        """
        texts = [
            condition.text
            for condition in plan.conditions
            if condition.trigger is None or not condition.trigger.wants_flag  # else see below
        ]
        has_met = self._has_met or metrics.counter_value("SnapshotsWritten")
        if texts and not any("rank" in text for text in texts) and not has_met and records_all():
            _log.warning(
                "nothing was recorded: no execution met %s; what ran was %s",
                "; ".join(texts),
                _few({history.name for history in self._histories.values()}),
            )
        is_found = any(map(metrics.counter_value, ("SnapshotNaN", "SnapshotForOtherRank")))
        if plan.wants_flag and not is_found:
            watched = [history for history in self._histories.values() if history.watched]
            missed = int(metrics.counter_value("SnapshotMissed") or 0)
            _log.warning(
                "no NaN and no infinity appeared; watched: %s, of programs: %s%s",
                counted(sum(history.watched for history in watched), "execution"),
                _few({history.name for history in watched}) or "none ran",
                f"; {missed} could not be" if missed else "",
            )

    def _stop(self) -> None:
        self.flush()
        reason, self._outcomes.stop_with = self._outcomes.stop_with, None
        error = ExecutionError(
            f"stopped: {reason}",
            hint="SNAPRT_RECORD_STOP=0 lets it go on; `snaprt replay` runs what was recorded",
        )
        mark_recorded(error)  # it is no failure of its own
        raise error


def _flush_as_worker_ends(recorder: Recorder) -> None:
    multiprocessing.util.Finalize(None, recorder.flush, exitpriority=0)


def _few(names: Collection[str]) -> str:
    return first_names(sorted(names), _MOST_NAMES)


@functools.cache
def process_recorder() -> Recorder:
    """Return the recorder of this process, made at its first use: every program shares it."""
    return Recorder(step=steps_ended)


def dump_now() -> list[Path]:
    """Write what the flight recorder holds (``--keep-last``), and begin afresh.

    Returns:
        The snapshots, oldest execution first; empty where none is held.

    Examples:
        >>> import os
        >>> os.environ["SNAPRT_RECORD_KEEP_LAST"] = "2"
        >>> with snaprt.record(when="error", folder="ring"):
        ...     for step in range(5):
        ...         y = jax.jit(jnp.cos)(jnp.ones(3) * step)
        ...     files = snaprt.dump_now()  # the last two executions
        >>> del os.environ["SNAPRT_RECORD_KEEP_LAST"]
        >>> len([path for path in files if path.name.endswith(".inputs.snap")])
        2
    """
    return process_recorder().dump_now()
