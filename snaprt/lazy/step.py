"""The pipeline on one page: cut the graph, find or compile its programs, run them, keep the values.

A *step* ends with `mark_step`, which runs everything that is pending and still wanted; a *read*
runs what one value needs. Both go through `_run`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax

from snaprt import jaxapi, metrics, settings
from snaprt.errors import CompileError, ExecutionError, SnaprtError
from snaprt.execute import collection, prefetch
from snaprt.execute.compile import Executable, compile_program, uncompiled_program
from snaprt.execute.loaded import Ready, executable_for
from snaprt.execute.run import run
from snaprt.execute.unfinished import unfinished_graph
from snaprt.explain.switches import watchers
from snaprt.explain.watching import Watch, begin_watch
from snaprt.lazy.array import LazyArray, read_to_host
from snaprt.lazy.calls import follow_indexing, follow_jit
from snaprt.lazy.cut import Part, plan
from snaprt.lazy.graph import Program
from snaprt.lazy.paths import Point
from snaprt.lazy.recording import DataHandle, carry_over, is_mostly_dead
from snaprt.lazy.trace import LazyTrace
from snaprt.snapshot import flags, repro
from snaprt.snapshot.failures import is_recorded, mark_recorded
from snaprt.snapshot.plan import current_plan
from snaprt.snapshot.record import process_recorder
from snaprt.snapshot.steps import end_step, steps_ended
from snaprt.snapshot.trace_errors import describe_trace_error

# What a recorded operation shows as its source is the user's line, not ours.
for _part in ("lazy", "execute", "explain", "jaxapi.py"):
    jaxapi.hide_frames_below(Path(__file__).parent.parent / _part)

#: A thread's paths are forgotten once they have so many points; its programs stay loaded.
MAX_POINTS = 200_000

_of_thread = threading.local()


def thread_trace() -> LazyTrace:
    """Return this thread's lazy trace, made at its first use."""
    trace = getattr(_of_thread, "trace", None)
    if trace is None:
        flags.take_over()
        jaxapi.teach_device_get(LazyArray, read_to_host)
        prefetch.start()
        jaxapi.intercept_jit(LazyTrace, follow_jit)
        jaxapi.intercept_indexing(LazyTrace, follow_indexing)
        jaxapi.watch_errors(_left_jax)
        trace = _of_thread.trace = LazyTrace(_read, _grown, _recording_failed)
    return trace


def mark_step(wait: bool = False) -> None:
    """Compile and run everything this thread has recorded whose arrays are still alive.

    All of it runs as one XLA program (one for each set of devices that it is committed to).
    Compiled programs are kept, so a step that repeats compiles nothing. Work whose arrays are
    gone is dropped.

    Args:
        wait: Whether to return only when the devices have finished.

    Raises:
        CompileError: If XLA refuses the program; its arrays stay pending and usable.
        ExecutionError: If it fails while it runs; its arrays raise the same error when read.
    """
    metrics.counter_add("MarkStep")
    trace = thread_trace()
    with trace.lock:
        arrays = trace.recording.live_arrays()
        _run(trace, arrays, arrays, cause="mark_step")
        trace.forget_paths(MAX_POINTS)
    step = end_step()
    collection.step_ended(step)
    for watcher in watchers():
        watcher.step_ended(step)
    if wait:
        with jaxapi.evaluating():
            jax.block_until_ready([a._value for a in arrays if a._value is not None])


def _read(trace: LazyTrace, array: LazyArray, cause: str) -> None:
    """Compute one value: run what it needs, and leave the rest pending."""
    with trace.exclusive():
        if array._value is None and not array.has_failed():  # another thread may be faster
            _run(trace, [array], trace.recording.live_arrays(), cause=cause)
        if array.has_failed():
            raise array._origin


def _grown(trace: LazyTrace) -> None:
    """Look at a recording that has grown: drop what is dead, and cut what is too long."""
    depth = trace.recording.point.depth
    if depth & (depth - 1) == 0 and is_mostly_dead(trace.recording):
        trace.begin(carry_over(trace.recording, trace.root, set(), {}, {}))
    limit = settings.get("SNAPRT_MAX_GRAPH_SIZE")
    if limit and trace.recording.point.depth >= limit:
        metrics.counter_add("cut::graph_size")
        arrays = trace.recording.live_arrays()
        _run(trace, arrays, arrays, cause="graph_size")


def _run(
    trace: LazyTrace, targets: Sequence[LazyArray], alive: Sequence[LazyArray], *, cause: str
) -> None:
    """Compute ``targets`` and run every pending effect; keep what else is alive or needed later."""
    recording = trace.recording
    at_step = targets is alive
    numbers = tuple([array._result.number for array in alive])  # type: ignore[union-attr]
    wanted = numbers if at_step else tuple([a._result.number for a in targets])  # type: ignore[union-attr]
    key = (at_step, wanted, numbers)
    found = recording.point.plans.get(key)
    if found is None:
        found = plan(recording, wanted, numbers)
        recording.point.keep_plan(key, found)
    if not found.parts:
        trace.begin()
        return
    watch = begin_watch(watchers(), cause, steps_ended(), found)
    metrics.metric_add("LazyTracing", trace.recording_time)
    trace.recording_time = 0
    by_number = dict(zip(numbers, alive, strict=True))
    progress = _Progress()
    complete = False
    withheld = _withholds_donation()
    donate = found.complete and len(found.parts) == 1 and not withheld
    try:
        with jaxapi.evaluating():
            for part in found.parts:
                program = part.program(recording, progress.values, donate)
                _run_part(part, program, by_number, progress, cause, withheld, watch)
                if not found.complete or len(found.parts) > 1:
                    progress.done.update(part.nodes)
        complete = found.complete
    finally:
        trace.begin(
            None
            if complete
            else carry_over(recording, trace.root, progress.done, progress.values, progress.failed)
        )
        if watch is not None:
            watch.done()


@dataclass
class _Progress:
    """What a cut has come to.

    Attributes:
        values: What was computed, by the number of the result.
        done: The operations that were run, in vain or not.
        failed: The results that will never be there, and why.
    """

    values: dict[int, tuple[jax.Array, DataHandle]] = field(default_factory=dict)
    done: set[Point] = field(default_factory=set)
    failed: dict[int, BaseException] = field(default_factory=dict)


def _run_part(
    part: Part,
    program: Program,
    arrays: dict[int, LazyArray],
    progress: _Progress,
    cause: str,
    withheld: bool,
    watch: Watch | None,
) -> None:
    """Compile and run one program of a cut, and hand out the results."""
    metrics.metric_add("TensorsGraphSize", len(program.nodes))
    ready = _executable_for(program, withheld, watch)
    executable, arguments = ready.executable, ready.arguments
    if watch is not None:
        watch.ready(program, ready)
    try:
        # Zeros in place of results are not worth recording.
        results = run(
            executable, arguments, None if executable.is_collected else process_recorder()
        )
        repro.wait_for_failure(results)
    except ExecutionError:  # the recorder stops the program: nothing has run
        raise
    except Exception as error:
        failure = ExecutionError(
            f"graph {executable.name}.{executable.graph_id} failed while it ran ({cause}): {error}",
            hint="its arrays cannot be used any more; the error above comes from the device",
        )
        progress.done.update(part.nodes)
        progress.failed.update({one.number: failure for node in part.nodes for one in node.results})
        repro.after_failure("run", executable, arguments, error)
        raise failure from error
    repro.after_run(executable, arguments)
    if watch is not None:
        watch.ran(results)
    metrics.counter_add("CreateDataHandles", len(part.numbers))
    kinds = part.kinds_of(executable.number)
    for index, (number, value) in enumerate(zip(part.numbers, results, strict=True)):
        handle = DataHandle(kinds, index)
        progress.values[number] = value, handle
        array = arrays.get(number)
        if array is not None:
            array.settle(value, handle, executable)


def _executable_for(program: Program, withheld: bool, watch: Watch | None) -> Ready:
    """Return what ``program`` runs; where donation is ``withheld``, it takes no memory."""
    is_watched = process_recorder().wants_flag()

    def compile_it(program: Program, promoted: frozenset[int]) -> Executable:
        if watch is not None:
            watch.compiling(program)
        flags.take_over()  # the script may have set XLA_FLAGS since
        overrides = flags.compiler_overrides()
        try:
            return compile_program(program, promoted, overrides, is_watched=is_watched)
        except CompileError as error:
            _tell_of_uncompiled(program, promoted, error, is_watched=is_watched)
            raise

    ready = executable_for(program, compile_it, is_watched=is_watched, exactly=withheld)
    if not ready.executable.is_collected:
        is_compiled = ready.is_new and not ready.executable.from_cache
        metrics.counter_add("UncachedCompile" if is_compiled else "CachedCompile")
    return ready


def _withholds_donation() -> bool:
    """Say whether what a program is called with may be wanted after it has run."""
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
    """Record an error, if it is asked for and was not recorded yet.

    Args:
        trace: What was recording.
        error: What was raised.
        bound: What was being recorded, where that is known.
    """
    if current_plan() is None or is_recorded(error):
        return
    if isinstance(error, (SnaprtError, jax.errors.JaxRuntimeError)):  # of running, not recording
        return
    recorder = process_recorder()
    try:
        mark_recorded(error)
        operation = jaxapi.failed_operation(error) or bound
        with trace.lock:
            pending, part, program = _program_so_far(trace)
        described = describe_trace_error(error, operation, pending, pending - part)
        graph = unfinished_graph(program, described)
        with jaxapi.evaluating():  # it may copy what it holds
            recorder.compile_failed(graph, program.inputs if program else (), error)
    except Exception as raised:
        recorder.writer.complain(raised)


def _program_so_far(trace: LazyTrace) -> tuple[int, int, Program | None]:
    """Return how many operations are pending, how many can be one program now, and that."""
    recording = trace.recording
    alive = [array._result.number for array in recording.live_arrays()]
    parts = plan(recording, alive, alive).parts
    if not parts:
        return 0, 0, None
    pending = sum(len(part.nodes) for part in parts)
    return pending, len(parts[0].nodes), parts[0].program(recording, {}, donate=False)
