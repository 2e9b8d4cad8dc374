"""The pipeline on one page: cut the graph, find or compile its programs, run them, keep the values.

A *step* ends with `mark_step`, which runs everything that is pending and still wanted; a *read*
runs what one value needs. Both go through `_run`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from snaprt import jaxapi, metrics, settings
from snaprt.compile.cached import prefetch
from snaprt.compile.executable import Executable, run
from snaprt.compile.loaded import Ready, executable_for, forget_programs, literals_vary
from snaprt.compile.lower import calling_back, refused
from snaprt.compile.program import compile_program, uncompiled_program, unfinished_program
from snaprt.errors import CompileError, ExecutionError, SnaprtError
from snaprt.graph.program import INPUT, Literal, Node, Program
from snaprt.host.collector import collect_again
from snaprt.host.identities import identity
from snaprt.host.interruptions import is_interruption, raise_if_interrupted
from snaprt.runtime import repro
from snaprt.runtime.closures import drop_failed_closures, run_step_closures
from snaprt.runtime.events import (
    Compilation,
    Cut,
    Execution,
    Listeners,
    cut_here,
    listeners,
    run_followed,
)
from snaprt.runtime.graph_breaks import graph_break, told_when_slow
from snaprt.snapshot.format.trace_errors import describe_trace_error
from snaprt.snapshot.recorder import flags
from snaprt.snapshot.recorder.failures import is_recorded, mark_recorded
from snaprt.snapshot.recorder.plan import current_plan, end_step, steps_ended
from snaprt.snapshot.recorder.progress import is_anyone_told
from snaprt.snapshot.recorder.record import process_recorder
from snaprt.trace import pacing
from snaprt.trace.array import (
    LazyArray,
    answer_for_exact_types,
    read_for_executable,
    read_to_host,
    wait_for,
)
from snaprt.trace.cut import CutPlan, Part, plan_cut
from snaprt.trace.failures import failed_run, uncompiled
from snaprt.trace.fast_path import follow_indexing, follow_jit
from snaprt.trace.lazy_trace import LazyTrace, give_away
from snaprt.trace.modes import NONE, current_modes
from snaprt.trace.recording import DataHandle, carry_over, is_mostly_dead
from snaprt.trace.trie import Point

#: A thread's paths are forgotten once they have so many points; its programs stay loaded.
MAX_POINTS = 200_000

_log = logging.getLogger("snaprt.lazy")

_of_thread = threading.local()

# Held while arrays get their values and while a trace goes on with another recording.
_changing = threading.RLock()

_SECONDS_BETWEEN_TRIES = 0.01

# The traces that effects are pending in; a thread that ends may leave some.
_effects: set[LazyTrace] = set()


def thread_trace() -> LazyTrace:
    """Return this thread's lazy trace, made at its first use."""
    trace = getattr(_of_thread, "trace", None)
    if trace is None:
        flags.take_over()
        _watch_waiting()
        jaxapi.teach_device_get(LazyArray, read_to_host)
        jaxapi.teach_full(LazyArray)
        jaxapi.teach_keys(LazyTrace)
        jaxapi.teach_opaque_state(LazyTrace)
        jaxapi.teach_trace_state(LazyTrace)
        jaxapi.teach_compiled(LazyArray, LazyTrace, read_for_executable, give_away)
        jaxapi.before_deleted(_about_to_delete)
        jaxapi.teach_error_check(LazyTrace)
        _watch_checks()
        _watch_forks()
        jaxapi.own_constants()
        jaxapi.own_what_is_put()
        jaxapi.own_what_is_exchanged(LazyTrace)
        jaxapi.teach_values(LazyArray, LazyArray.materialize)
        prefetch.start()
        jaxapi.intercept_jit(LazyTrace, follow_jit)
        jaxapi.intercept_indexing(LazyTrace, follow_indexing)
        jaxapi.watch_errors(_left_jax)
        answer_for_exact_types()
        trace = _of_thread.trace = LazyTrace(
            _read,
            _grown,
            _recording_failed,
            _at_once,
            _cut,
            _run_pending,
            lambda: current_plan() is not None or is_anyone_told(),
            lambda: _must_be_ours(listeners()),
            _effects.add,
        )
    return trace


def mark_step(wait: bool = False, reset_scope: bool = True) -> None:
    """Compile and run everything this thread has recorded whose arrays are still alive.

    All of it runs as one XLA program (one for each set of devices that it is committed to).
    Compiled programs are kept, so a repeated step compiles nothing. Work whose arrays are gone is
    dropped. At the end, the step's closures run, see `add_step_closure`. ``snaprt.sync`` is the
    same function.

    Args:
        wait: Whether to return only when the devices have finished, as with XLA_SYNC_WAIT=1 for
            every step.
        reset_scope: Whether names of `jax.named_scope` end with the step: if a scope is open,
            later operations are recorded without its name. The names appear in profiles and in the
            metadata of modules, and do not change programs.

    Raises:
        CompileError: JAX or XLA rejects the program. The rejected operations have failed: arrays
            that depend on them raise the same error when read, all others stay pending.
        ExecutionError: The program fails to run; its arrays raise the same error when read.
        Exception: The error of a closure, raised after all closures have run.

    Examples:
        >>> x = jnp.ones(3)
        >>> with snaprt.lazy():
        ...     for step in range(3):
        ...         x = x + jnp.sin(x)
        ...         snaprt.mark_step()  # one program, compiled once
        >>> x.shape
        (3,)
    """
    metrics.counter_add("MarkStep")
    trace = thread_trace()
    trace.wake()
    callbacks = listeners()
    with trace.lock:
        arrays = trace.recording.live_arrays()
        try:
            _run(trace, arrays, arrays, "mark_step", callbacks)
        except (CompileError, ExecutionError):
            drop_failed_closures()
            raise
        _forget(trace, -1 if trace.pacer.step_marked() else MAX_POINTS)
    step = end_step()
    for tell in callbacks.step_ended:
        tell(step)
    if wait or trace.modes.waits:
        with jaxapi.evaluating():
            wait_for(arrays)
        process_recorder().look()
    if reset_scope:
        jaxapi.leave_name_scopes()
    run_step_closures()


#: As PyTorch/XLA calls it since 2.8.
sync = mark_step


def run_effects(cause: str) -> None:
    """Run this thread's pending effects, and what they need; the rest stays pending.

    Those that other threads left when they ended run first.

    Raises:
        CompileError: If XLA refuses the program that has them.
        ExecutionError: If an effect, such as a callback, fails; it is not run again.
    """
    own = getattr(_of_thread, "trace", None)
    for trace in sorted(_effects.copy(), key=lambda other: other is own):
        if trace is own or not trace.has_running_owner():
            with trace.exclusive():
                _run_effects(trace, cause)


def _run_effects(trace: LazyTrace, cause: str) -> None:
    if trace.recording.point.effectful:
        _run(trace, [], trace.recording.live_arrays(), cause, listeners())
    else:
        _effects.discard(trace)


@functools.cache
def _watch_waiting() -> None:
    """Run pending effects where JAX waits for effects, as it does when the process ends."""

    def start() -> None:
        trace = jaxapi.current_trace()
        if isinstance(trace, LazyTrace) and trace.fullgraph and trace.recording.point.effectful:
            raise graph_break("effects_barrier")
        run_effects("effects_barrier")

    jaxapi.before_waiting_for_effects(start)
    # Once where threads can still be started, as the recorder may; once for what threads left then.
    threading._register_atexit(_run_all_effects)  # type: ignore[attr-defined]
    atexit.register(_run_all_effects)


@functools.cache
def _watch_checks() -> None:
    """Run all that is pending where JAX is to look for NaNs no longer, so that it still does."""

    def run_checked() -> None:
        trace = jaxapi.current_trace()
        if isinstance(trace, LazyTrace) and not trace.fullgraph:
            _run_all_of_thread(trace, "debug_nans")

    jaxapi.before_checks_end(run_checked)


@functools.cache
def _watch_forks() -> None:
    """Run what is pending before the process forks, as eager JAX would have run it by then.

    A child can only read values: what is compiled or run in it may wait for threads of its parent.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_run_before_fork, after_in_child=_effects.clear)


def _run_before_fork() -> None:
    trace: LazyTrace | None = getattr(_of_thread, "trace", None)
    if trace is None or trace.is_running or trace.fullgraph:
        return
    try:
        arrays = _run_all_of_thread(trace, "fork")
        with jaxapi.evaluating():
            wait_for(arrays)
    except (CompileError, ExecutionError):  # Python ignores what is raised here
        _log.exception("effects that were pending when the process forked failed")


def _run_all_of_thread(trace: LazyTrace, cause: str) -> Sequence[LazyArray]:
    """Run all that is pending, because of something that is no operation; return its arrays."""
    with trace.lock:
        arrays = trace.recording.live_arrays()
        _run_all_that_can(trace, arrays, cause, listeners())
        _forget(trace, MAX_POINTS)
    return arrays


def _run_all_effects() -> None:
    for trace in list(_effects):
        with trace.exclusive():
            _run_effects(trace, "end")


def _read(trace: LazyTrace, array: LazyArray, cause: str) -> None:
    """Compute one value: run what it needs, and leave the rest pending."""
    # XLA calls back in threads of its own, for which what has the lock may be waiting.
    is_xlas = isinstance(threading.current_thread(), threading._DummyThread)
    while not trace.lock.acquire(timeout=_SECONDS_BETWEEN_TRIES if is_xlas else -1):
        if _run_meanwhile(trace, array, cause, listeners()):
            break
    else:
        try:
            _read_alone(trace, array, cause)
        finally:
            trace.lock.release()
    if array.has_failed():
        raise array._origin


def _read_alone(trace: LazyTrace, array: LazyArray, cause: str) -> None:
    with trace.exclusive():
        if array._value is None and not array.has_failed():  # another thread may be faster
            if trace.fullgraph:
                raise graph_break(cause)
            _run(trace, [array], trace.recording.live_arrays(), cause, listeners())
            _forget(trace, MAX_POINTS)


def _at_once(trace: LazyTrace, name: str, cause: str, operands: Sequence[object]) -> None:
    """Tell of an operation that runs at once, before it does."""
    if trace.fullgraph and (cause != "device_put" or any(map(_is_pending, operands))):
        raise graph_break(cause, name)
    if cause not in ("device_put", pacing.APART):  # it may have effects of its own, after those
        with trace.lock:
            _run_effects(trace, cause)
    for tell in listeners().at_once:
        tell(name, cause)


def _is_pending(operand: object) -> bool:
    return type(operand) is LazyArray and operand._value is None


def _grown(trace: LazyTrace) -> None:
    """Look at a recording that has grown: drop what is dead; in eager mode, run it."""
    if trace.modes.eager:
        with trace.lock, metrics.timed("EagerOpExecuteTime"):
            arrays = trace.recording.live_arrays()
            _run(trace, arrays, arrays, "eager", listeners())
            _forget(trace, MAX_POINTS)
        return
    depth = trace.recording.point.depth
    if depth & (depth - 1) == 0 and is_mostly_dead(trace.recording):
        trace.begin(carry_over(trace.recording, trace.root, set(), {}, {}))
    limit = settings.get("SNAPRT_MAX_GRAPH_SIZE")
    if trace.fullgraph and limit and trace.recording.point.weight >= limit:
        raise graph_break("graph_size")


def _forget(trace: LazyTrace, most: int) -> None:
    if trace.is_running:
        return
    dead = trace.forget_paths(most)
    if dead:
        forget_programs(dead)


def _cut(trace: LazyTrace, cause: str) -> None:
    """Run all that is pending, where nobody asked for it: an automatic step."""
    with trace.lock:
        metrics.counter_add(f"cut::{cause}")
        arrays = trace.recording.live_arrays()
        begins_anew = trace.pacer.begins(cause, trace.recording.point, len(arrays))
        _run_all_that_can(trace, arrays, cause, listeners())
        _forget(trace, -1 if begins_anew else MAX_POINTS)


def _run_pending(trace: LazyTrace, cause: str) -> None:
    """Run all that is pending, because of an operation that cannot be part of it."""
    if trace.fullgraph and cause != pacing.APART:
        raise graph_break(cause)
    _run_all_that_can(trace, trace.recording.live_arrays(), cause, listeners())


def _about_to_delete(array: Any) -> None:
    give_away([array])


def _run_all_that_can(
    trace: LazyTrace, arrays: Sequence[LazyArray], cause: str, callbacks: Listeners
) -> None:
    """Run all that is pending, where nobody asked for all: errors wait for reads of their arrays.

    Raises:
        CompileError: An effect cannot be compiled, of which no array would tell.
        ExecutionError: The same where it runs; or the recorder stops the program.
    """
    while True:
        try:
            return _run(trace, arrays, arrays, cause, callbacks)
        except (CompileError, ExecutionError) as error:
            if not any(array.has_failed() and array._origin is error for array in arrays):
                raise
            error.__traceback__ = None  # it holds the arrays of this cut
            arrays = trace.recording.live_arrays()


def _run(
    trace: LazyTrace,
    targets: Sequence[LazyArray],
    alive: Sequence[LazyArray],
    cause: str,
    callbacks: Listeners,
) -> None:
    """Compute ``targets`` and run every pending effect; keep what else is alive or needed later."""
    if trace.is_running:  # this is a callback, or a handler of a signal
        for array in () if targets is alive else targets:
            _run_meanwhile(trace, array, cause, callbacks)
        return
    modes = current_modes()
    trace.adopt(modes)
    recording = trace.recording
    at_step = targets is alive
    numbers = tuple([array._result.number for array in alive])  # type: ignore[union-attr]
    target_numbers = numbers if at_step else tuple([a._result.number for a in targets])  # type: ignore[union-attr]
    by_operation = modes is not NONE and modes.by_operation(at_step=at_step)
    is_automatic = cause in pacing.CAUSES and pacing.is_asked_for()
    key = (at_step, is_automatic, target_numbers, numbers, modes)
    plan = recording.point.plans.get(key)
    new: list[Point] | None = None
    if plan is None and targets and not at_step:
        automatic = trace.pacer.begins_at_read(recording.point)
        if automatic:
            _cut(trace, automatic)
            return
    if plan is None or plan.in_pieces:
        collect_again()  # the path is new, and ends here
        new = path = recording.point.operations()
        ends = trace.pacer.ends_of(path) if is_automatic else []
        wanted, pieces = target_numbers, []
        is_read = not (is_automatic or by_operation or cause == "mark_step")
        step = _automatic_step(path, numbers) if is_read else None
        if step is not None:
            ends, new = [step.depth], [point for point in path if point.depth > step.depth]
            wanted += tuple([number for number in numbers if number < step.count])
        elif not (at_step or plan):
            # What is read once is not worth compiling whole, where its pieces are there.
            pieces = trace.pacer.ends_of_pieces(path)
        places = modes.places_in_modules
        with jaxapi.span("trace", operations=len(path)):
            plan = plan_cut(
                recording,
                wanted,
                numbers,
                by_operation=by_operation,
                places=places,
                ends=pieces or ends,
            )
        if pieces:
            plan = replace(plan, in_pieces=True)
        recording.point.keep_plan(key, plan)
        if is_automatic and path:
            path[-1].keep_step(numbers)
            _note_what_varies(plan.parts, recording.literals)
    if targets and not at_step and trace.pacer.runs_all(plan.left, recording.is_carried):
        _run_all_that_can(trace, alive, cause, callbacks)
        return
    trace.pacer.was_cut(cause, None if plan.in_pieces else new, recording.point.weight)
    if not plan.parts:
        trace.begin()
        return
    cut = cut_here(cause, steps_ended(), plan.operations) if callbacks.sees_cuts else None
    for tell in callbacks.cut:
        tell(cut)
    metrics.metric_add("LazyTracing", trace.recording_time)
    progress = _Progress(
        cause, callbacks, cut, plan.is_all, by_operation, names_operations=modes.notes_places
    )
    if trace.recording_time:
        progress.recording_time = trace.recording_time / plan.operations
        trace.recording_time = 0
    if by_operation and cause != "eager":
        counter = "SyncTensorsOpByOp" if at_step else "GetTensorsOpByOp"
        metrics.counter_add(counter, len(plan.parts))
    progress.may_fall_back = not by_operation and not trace.fullgraph
    if cause != "mark_step" and trace.may_fall_back():
        progress.trace = trace
    try:
        fallen = None
        try:
            _run_parts(trace, plan, alive, progress)
        except _FallsBackError as fallback:
            fallen = fallback
        if fallen is not None:
            _run_fallen(trace, None if at_step else targets, cause, callbacks, fallen)
    finally:
        for tell in callbacks.cut_done:
            tell(cut)


def _note_what_varies(parts: Sequence[Part], literals: Sequence[Literal]) -> None:
    """Take note of the literals that differ in parts of a plan that are else one program."""
    first: dict[Any, Part] = {}
    for part in parts:
        if part.literals:
            symbols = tuple([node.symbol for node in part.nodes])
            alike = first.setdefault((symbols, part.wiring, part.outputs), part)
            pairs = zip(alike.literals, part.literals, strict=True)
            varied = [i for i, (a, b) in enumerate(pairs) if literals[a].key != literals[b].key]
            if varied:
                literals_vary(part.nodes, part.wiring, varied)


def _automatic_step(path: Sequence[Point], alive: Sequence[int]) -> Point | None:
    """Return the operation of a path after which an automatic step last ended; ``None`` if none.

    A read after a loop is to run the program of an iteration, which is there, and not one more that
    has only what is read. So what is alive of the step must be what was alive then.
    """
    for point in reversed(path):
        if tuple([number for number in alive if number < point.count]) in point.steps:
            return point
    return None


def _run_meanwhile(trace: LazyTrace, array: LazyArray, cause: str, callbacks: Listeners) -> bool:
    """Compute ``array`` while other operations of ``trace`` run, as for a callback of theirs.

    Returns:
        Whether they still ran.

    Raises:
        ExecutionError: It is the result of an effect, which is not run twice, or of the callback;
            or what runs may have overwritten what it is computed from.
    """
    with _changing:
        if not trace.is_running:
            return False
        recording, result = trace.recording, array._result
        if result is None:
            return True
        plan = plan_cut(recording, [result.number], [result.number], effects=False)
    nodes = [node for part in plan.parts for node in part.nodes]
    calling = frozenset(filter(_calls_back, nodes))
    if any(node.effects or any(node in outer for outer in trace.calling) for node in calling):
        raise _unreadable(array, "an effect that is running computes")
    progress = _Progress(
        cause, callbacks, None, is_all=False, by_operation=False, names_operations=False
    )
    trace.calling.append(calling)
    try:
        with jaxapi.evaluating_compiled():
            for part in plan.parts:
                program = part.program(recording, progress.values, donate=False)
                if any(identity(value) in trace.given for value in program.inputs):
                    raise _unreadable(array, "takes the place of what it is computed from")
                _run_part(part, program, [array], progress)
    finally:
        trace.calling.remove(calling)
    return True


def _unreadable(array: LazyArray, reason: str) -> ExecutionError:
    return ExecutionError(
        f"a callback reads {array.aval.str_short()}, which {reason}",
        hint="hand the array to the callback, or read it before the callback is called",
    )


def _run_parts(
    trace: LazyTrace, plan: CutPlan, alive: Sequence[LazyArray], progress: _Progress
) -> None:
    """Run what a cut is to run; whatever has not run by the end stays pending."""
    recording = trace.recording
    complete = False
    progress.withheld = plan.may_donate and _withholds_donation()
    donate = progress.is_all and not progress.withheld
    trace.is_running = True
    try:
        with jaxapi.evaluating_compiled():
            for part in plan.parts:
                program = part.program(recording, progress.values, donate)
                trace.given = frozenset([identity(program.inputs[index]) for index in program.free])
                _run_part(part, program, alive, progress)
                for number in part.spent:
                    del progress.values[number]
                if not progress.is_all:
                    progress.done.update(part.nodes)
        complete = plan.complete
    finally:
        _effects.discard(trace)
        with _changing:
            trace.is_running, trace.given = False, frozenset()
            trace.begin(
                None
                if complete
                else carry_over(
                    recording, trace.root, progress.done, progress.values, progress.failed
                )
            )


class _FallsBackError(Exception):
    """A program is not compiled, for its place has done that too often: see `Subscriber`."""

    def __init__(self, cut: Cut, *, unpacks: bool) -> None:
        super().__init__()
        self.cut = cut
        self.unpacks = unpacks  # whether what its jitted functions do is recorded from here on


def _run_fallen(
    trace: LazyTrace,
    targets: Sequence[LazyArray] | None,
    cause: str,
    callbacks: Listeners,
    fallen: _FallsBackError,
) -> None:
    """Run op by op what is left of a cut: of ``targets``, or of all that is pending."""
    recording = trace.recording
    alive = recording.live_arrays()
    pending = alive if targets is None else [array for array in targets if array._value is None]
    numbers = [[array._result.number for array in arrays] for arrays in (pending, alive)]  # type: ignore[union-attr]
    plan = plan_cut(recording, *numbers, by_operation=True)
    progress = _Progress(
        cause,
        callbacks,
        fallen.cut,
        plan.is_all,
        by_operation=True,
        names_operations=True,
        unpacked=trace.unpacked if fallen.unpacks else None,
    )
    _run_parts(trace, plan, alive, progress)


@dataclass
class _Progress:
    """How a cut runs, and what it has come to."""

    cause: str
    callbacks: Listeners
    cut: Cut | None  # ``None`` if nobody looks at cuts
    is_all: bool
    by_operation: bool  # whether each program is one operation, which is waited for
    names_operations: bool  # whether errors name the operations of the program that failed
    withheld: bool = False  # whether its programs take no memory that they could take
    may_fall_back: bool = False  # whether a program may run op by op rather than be compiled
    trace: LazyTrace | None = None  # what records, if that may fall back rather than compile one
    # Where it has, the jitted functions that do as well, to which more may be added.
    unpacked: set[str] | None = None
    # What was computed, by the number of the result, for what runs later.
    values: dict[int, tuple[jax.Array, DataHandle]] = field(default_factory=dict)
    done: set[Point] = field(default_factory=set)
    # The results that will never be there, and why.
    failed: dict[int, BaseException] = field(default_factory=dict)
    recording_time: float = 0.0  # nanoseconds that recording took for each operation that is run
    compiled: Cut | None = None  # that of its programs which are compiled; `cut`, if somebody looks

    def fail(self, nodes: Iterable[Any], error: BaseException) -> None:
        """Take note that operations have failed; what needs their results fails with them."""
        for node in nodes:
            self.done.add(node)
            self.failed.update({result.number: error for result in node.results})


def _calls_back(point: Point) -> bool:
    names = jaxapi.names_within(point.primitive, point.params)
    return bool(point.effects) or any("callback" in name for name in names)


def _failed_alone(part: Part, program: Program, executable: Executable) -> Sequence[Node]:
    """Return the operations that a run failed of, if it is known of which; else all or none.

    What does not need their results runs again: callbacks apart, that cannot be seen.
    """
    deleted = {index for index, array in enumerate(program.inputs) if array.is_deleted()}
    if deleted.isdisjoint(executable.donated):
        pairs = zip(part.nodes, part.wiring, strict=True)
        used = [node for node, wires in pairs if any((INPUT, index) in wires for index in deleted)]
        if used:
            return used
    if executable.donated:
        return ()
    named = [node for node in part.nodes if _calls_back(node)]
    if named or executable.from_cache:  # from where nothing comes that calls back
        return named
    return calling_back(program)  # as a primitive of a library, by what it is lowered to


def _run_part(
    part: Part, program: Program, alive: Sequence[LazyArray], progress: _Progress
) -> None:
    """Compile and run one program of a cut, and hand out the results.

    Raises:
        _FallsBackError: It is to run op by op instead.
    """
    metrics.metric_add("TensorsGraphSize", len(program.nodes))
    metrics.counters_add(part.primitives())
    try:
        ready = _executable_for(part, program, progress)
    except CompileError as error:
        progress.fail(refused(program, error.__cause__ or error), error)
        raise
    executable, arguments = ready.executable, ready.arguments
    if progress.recording_time:
        executable.times.recorded(progress.recording_time * len(program.nodes))
    is_repro_asked_for = repro.is_asked_for()
    run_of_cut = progress.cut and Execution(
        progress.cut, program, executable, arguments, ready.is_new, ready.promoted
    )
    for tell in progress.callbacks.ready:
        tell(run_of_cut)
    try:
        # Zeros in place of results are not worth recording.
        results = (
            run(executable, arguments, None)
            if executable.is_collected
            else run_followed(executable, run, (executable, arguments, process_recorder()), {})
        )
        if progress.names_operations:  # errors are to name them
            jax.block_until_ready(results)
        if is_repro_asked_for:
            repro.wait_for_failure(results)
    except ExecutionError:  # the recorder stops the program; its arrays stay pending
        raise
    except Exception as error:
        raise_if_interrupted(error)
        failure = failed_run(
            error,
            f"{executable.name}.{executable.graph_id}",
            part.nodes if progress.names_operations else (),
            progress.cause,
            by_operation=progress.by_operation,
        )
        alone = _failed_alone(part, program, executable)
        progress.fail(alone or part.nodes, failure)
        repro.after_failure("run", executable, arguments, error)
        raise failure from error
    if is_repro_asked_for:
        repro.after_run(executable, arguments)
    for tell in progress.callbacks.ran:
        tell(run_of_cut, results)
    if progress.trace is not None and not (
        executable.is_collected or _must_be_ours(progress.callbacks)
    ):
        progress.trace.lone_calls.ran(
            part.nodes, (*arguments, *results), functools.partial(_may_leave, progress.trace)
        )
    if part.typed_within:
        results = list(results)
        for index, aval in part.typed_within:
            results[index] = jaxapi.with_axes_of_type(results[index], aval)
    metrics.counter_add("CreateDataHandles", len(part.numbers))
    kinds = part.kinds_of(executable.number)
    with _changing:
        for index, (taker, value) in enumerate(zip(part.takers, results, strict=True)):
            handle = DataHandle(kinds, index)
            if taker >= 0 and alive[taker]._value is None:  # else a callback has read it
                alive[taker].settle(value, handle, executable)
            if not progress.is_all:
                progress.values[part.numbers[index]] = value, handle


def _executable_for(part: Part, program: Program, progress: _Progress) -> Ready:
    """Return what ``program`` runs."""
    cause, callbacks = progress.cause, progress.callbacks
    # XLA turns a loop that starts at a constant and holds an ordered callback into one without end.
    constants = not (progress.by_operation or part.has_effects)
    is_watched = process_recorder().wants_flag(program.placement.devices)

    def compile_it(program: Program, promoted: frozenset[int]) -> Executable:
        at = progress.cut or progress.compiled or cut_here(cause, steps_ended(), len(program.nodes))
        progress.compiled = at
        if not (constants and promoted):  # now that its constants are arguments, this is the last
            _fall_back_where_due(program, progress, at)
        for tell in callbacks.compiling:
            tell(at, program, promoted)
        flags.take_over()  # the script may have set XLA_FLAGS since
        overrides = flags.compiler_overrides()
        started = time.perf_counter()
        try:
            with told_when_slow(len(program.nodes), cause):
                executable = compile_program(program, promoted, overrides, is_watched=is_watched)
        except CompileError as error:
            _tell_of_uncompiled(program, promoted, error, is_watched=is_watched)
            named = program.nodes if current_modes().notes_places else ()
            raise uncompiled(error, named) from error.__cause__
        seconds = time.perf_counter() - started
        is_fallen = progress.unpacked is not None
        compilation = Compilation(at, program, promoted, executable, seconds, is_fallen)
        for tell in callbacks.compiled:
            tell(compilation)
        if progress.trace is not None and not executable.from_cache:
            progress.trace.fallback.compiled(_place_of(at), len(program.nodes), seconds)
        if cause == "eager":
            metrics.metric_add("EagerOpCompileTime", 1e9 * seconds)
        return executable

    ready = executable_for(
        program, compile_it, is_watched=is_watched, exactly=progress.withheld, constants=constants
    )
    if progress.trace is not None and not ready.is_new:
        progress.trace.fallback.used(len(program.nodes))
    if not ready.executable.is_collected:
        is_compiled = ready.is_new and not ready.executable.from_cache
        metrics.counter_add("UncachedCompile" if is_compiled else "CachedCompile")
    return ready


def _fall_back_where_due(program: Program, progress: _Progress, at: Cut) -> None:
    """Look whether a new program is to run op by op; of a jitted function, the next one does.

    Raises:
        _FallsBackError: The program is.
    """
    if _runs_eagerly(program, progress, at):
        raise _FallsBackError(at, unpacks=False)
    is_fallen = progress.unpacked is not None
    if not (is_fallen or progress.may_fall_back):
        return
    if any(falls_back(at, program, is_fallen) for falls_back in progress.callbacks.falls_back):
        if progress.unpacked is None:
            metrics.counter_add("RecompileFallback")
            raise _FallsBackError(at, unpacks=True)
        (node,) = program.nodes
        function = jaxapi.unpackable_function(node.primitive, node.params)
        if function is not None:
            progress.unpacked.add(function)


def _runs_eagerly(program: Program, progress: _Progress, at: Cut) -> bool:
    """Return whether a thread runs eagerly for a while, from a program on that is new."""
    trace = progress.trace
    if trace is None:
        return False
    if trace.fallback.is_on:  # what is still pending
        return True
    place, is_read = _place_of(at), at.cause not in pacing.CAUSES
    if not (
        trace.fallback.is_due(place, len(program.nodes), is_read=is_read) and _may_leave(trace)
    ):
        return False
    metrics.counter_add("EagerFallback")
    for tell in progress.callbacks.at_once:
        tell("all that follows, until it repeats", "new_graphs")
    trace.fall_back(place)
    return True


def _must_be_ours(callbacks: Listeners) -> bool:
    """Return whether JAX may make no call: somebody follows what runs, or nothing is compiled."""
    return callbacks.sees_cuts or any(forbids() for forbids in callbacks.forbids_compiling)


def _may_leave(trace: LazyTrace) -> bool:
    """Return whether a thread may leave work to JAX that it has recorded so far.

    Not where it is expected to mark steps; nor where others do what it does, for processes that
    communicate must run the same programs, and each decides for itself.
    """
    return jax.process_count() == 1 and not trace.pacer.is_expected_to_mark()


def _place_of(cut: Cut) -> Any:
    """Return what of a cut stays the same where it comes again."""
    if cut.cause in pacing.CAUSES:
        return pacing.SIZE
    place = jaxapi.users_place(cut.stack)
    return place and (place.file, place.line)


def _withholds_donation() -> bool:
    """Return whether what a program is called with may be wanted after it has run."""
    return process_recorder().withholds_donation() or repro.needs_inputs()


def _tell_of_uncompiled(
    program: Program, promoted: frozenset[int], error: CompileError, *, is_watched: bool
) -> None:
    """Hand a program that cannot be compiled to whoever wants to save it."""
    recorder = process_recorder()
    if not recorder.waits_for_errors() and not repro.level("compile"):
        return
    with contextlib.suppress(Exception):  # it cannot be lowered either: nothing would replay
        executable = uncompiled_program(program, promoted, is_watched=is_watched)
        arguments = program.arguments(promoted)
        if recorder.waits_for_errors():
            recorder.compile_failed(executable, arguments, error)
        repro.after_failure("compile", executable, arguments, error)


def left_with(error: BaseException) -> None:
    """Learn of an exception that leaves a lazy scope.

    JAX's own is one of recording; for any other, what ran last may have to be recorded.
    """
    if isinstance(error, Exception) and jaxapi.raised_inside(error):
        _recording_failed(thread_trace(), error, None)
    process_recorder().program_failed(error)


def _left_jax(error: BaseException) -> None:
    """See an error leave a function of JAX's, such as a jitted one that was being traced."""
    trace = jaxapi.current_trace()
    if isinstance(trace, LazyTrace) and isinstance(error, Exception):
        _recording_failed(trace, error, None)


def _recording_failed(
    trace: LazyTrace, error: Exception, bound: jaxapi.BoundOperation | None
) -> None:
    """Record an error, if it is asked for and was not recorded yet."""
    if current_plan() is None or is_recorded(error):
        return
    if isinstance(error, (SnaprtError, jax.errors.JaxRuntimeError)):  # of running, not recording
        return
    if is_interruption(error):  # no operation failed
        return
    recorder = process_recorder()
    try:
        mark_recorded(error)
        operation = jaxapi.failed_operation(error) or bound
        with trace.lock:
            pending, part, program = _program_so_far(trace)
        described = describe_trace_error(error, operation, pending, pending - part)
        graph = unfinished_program(program, described)
        with jaxapi.evaluating():  # it may copy what it holds
            recorder.compile_failed(graph, program.inputs if program else (), error)
    except Exception as raised:
        recorder.writer.complain(raised)


def _program_so_far(trace: LazyTrace) -> tuple[int, int, Program | None]:
    """Return how many operations are pending, how many can be one program now, and that."""
    recording = trace.recording
    alive = [array._result.number for array in recording.live_arrays()]
    parts = plan_cut(recording, alive, alive).parts
    if not parts:
        return 0, 0, None
    pending = sum(len(part.nodes) for part in parts)
    return pending, len(parts[0].nodes), parts[0].program(recording, {}, donate=False)
