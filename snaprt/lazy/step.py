"""The pipeline on one page: cut the graph, find or compile its programs, run them, keep the values.

A *step* ends with `mark_step`, which runs everything that is pending and still wanted; a *read*
runs what one value needs. Both go through `_run`.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from snaprt import jaxapi, metrics
from snaprt.errors import CompileError, ExecutionError, SnaprtError
from snaprt.execute import collection, prefetch
from snaprt.execute.compile import Executable, compile_program, uncompiled_program
from snaprt.execute.run import run
from snaprt.execute.unfinished import unfinished_graph
from snaprt.lazy.array import LazyArray, read_to_host
from snaprt.lazy.graph import Node, Program, ancestors, build_program
from snaprt.lazy.trace import LazyTrace
from snaprt.snapshot import flags, repro
from snaprt.snapshot.failures import is_recorded, mark_recorded
from snaprt.snapshot.plan import current_plan
from snaprt.snapshot.record import process_recorder
from snaprt.snapshot.steps import end_step
from snaprt.snapshot.trace_errors import describe_trace_error

# What a recorded operation shows as its source is the user's line, not ours.
for _part in ("lazy", "execute", "jaxapi.py"):
    jaxapi.hide_frames_below(Path(__file__).parent.parent / _part)

#: How many programs stay loaded in a process; the least recently used one goes first.
MAX_PROGRAMS = 2048


@dataclass
class _Family:
    """The executables of programs that differ in the values of their literals alone."""

    promoted: frozenset[int] = frozenset()
    literals: tuple[bytes, ...] = ()
    executables: dict[tuple[bytes, ...], Executable] = field(default_factory=dict)


_families: OrderedDict[tuple[Any, ...], _Family] = OrderedDict()
_families_lock = threading.Lock()
_of_thread = threading.local()


def thread_trace() -> LazyTrace:
    """Return this thread's lazy trace, made at its first use."""
    trace = getattr(_of_thread, "trace", None)
    if trace is None:
        flags.take_over()
        jaxapi.teach_device_get(LazyArray, read_to_host)
        prefetch.start()
        trace = _of_thread.trace = LazyTrace(_read, _failed)
        jaxapi.watch_errors(_left_jax)
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
    with trace.graph.lock:
        arrays = trace.graph.live_arrays()
        _run(trace, _nodes_of(arrays), [], cause="mark_step")
    collection.step_ended(end_step())
    if wait:
        with jaxapi.evaluating():
            jax.block_until_ready([a._value for a in arrays if a._value is not None])


def _read(trace: LazyTrace, array: LazyArray, cause: str) -> None:
    """Compute one value: run what it needs, and leave the rest pending."""
    with trace.graph.lock:
        if array._value is not None:  # another thread was faster
            return
        node = array._node
        assert node is not None
        if node.values is None:
            _run(trace, [node], _nodes_of(trace.graph.live_arrays()), cause=cause)
        if node.error is not None:
            raise node.error
        if array._value is None:
            assert node.values is not None
            array.settle(node.values[array._index], None)


def _nodes_of(arrays: Iterable[LazyArray]) -> list[Node]:
    nodes = {array._node.number: array._node for array in arrays if array._node is not None}
    return list(nodes.values())


def _run(trace: LazyTrace, roots: Sequence[Node], later: Sequence[Node], *, cause: str) -> None:
    """Run ``roots``, what they need, and every pending effect; keep what ``later`` will need."""
    graph = trace.graph
    nodes = [n for n in ancestors([*roots, *graph.effectful]) if not n.inherit_failure()]
    if not nodes:
        return
    metrics.metric_add("LazyTracing", trace.recording_time)
    trace.recording_time = 0
    wanted = _wanted_results(nodes, later)
    try:
        with jaxapi.evaluating():
            for part in _split_by_placement(nodes, wanted):
                _run_part(part, wanted, cause)
    finally:
        graph.effectful = [node for node in graph.effectful if node.values is None]


def _wanted_results(nodes: Sequence[Node], later: Sequence[Node]) -> dict[int, set[int]]:
    """Return node number -> results that somebody still needs after ``nodes`` have run.

    That is what the user holds, and what ``later`` will use of them: without the latter, reading
    the loss in the middle of a step would compute the forward pass twice.
    """
    inside = {node.number for node in nodes}
    wanted: dict[int, set[int]] = {number: set() for number in inside}
    for node in nodes:
        for index, reference in enumerate(node.arrays):
            if reference() is not None:
                wanted[node.number].add(index)
    for node in ancestors(later):
        if node.number in inside:
            continue
        for edge in node.pending_edges():
            if edge.node.number in inside:
                wanted[edge.node.number].add(edge.index)
    return wanted


def _split_by_placement(
    nodes: Sequence[Node], wanted: dict[int, set[int]]
) -> Iterable[Sequence[Node]]:
    """Yield ``nodes`` in parts of one placement each, in an order in which they can run.

    Nearly always there is one part. Otherwise uncommitted work that only committed work uses
    joins it, as under `jax.jit`; the rest is layered, so that a part uses earlier parts alone.
    """
    if all(node.placement is nodes[0].placement for node in nodes):
        return [nodes]
    placement = {node.number: node.placement for node in nodes}
    users: dict[int, set[Any]] = {node.number: set() for node in nodes}
    for node in reversed(nodes):
        number = node.number
        uses = users[number]
        if not placement[number].committed and not wanted[number] and len(uses) == 1:
            (only,) = uses
            if only.x64 == placement[number].x64:
                placement[number] = only
        for edge in node.pending_edges():
            users[edge.node.number].add(placement[number])
    levels: dict[int, int] = {}
    parts: dict[tuple[int, int], list[Node]] = {}
    for node in nodes:
        own = placement[node.number]
        level = 0
        for edge in node.pending_edges():
            producer = edge.node.number
            if placement[producer] is own:
                level = max(level, levels[producer])
            else:
                level = max(level, levels[producer] + 1)
                wanted[producer].add(edge.index)
        levels[node.number] = level
        parts.setdefault((level, id(own)), []).append(node)
    return [parts[key] for key in sorted(parts, key=lambda key: key[0])]


def _run_part(nodes: Sequence[Node], wanted: dict[int, set[int]], cause: str) -> None:
    """Compile and run ``nodes`` as one program, and hand out the results."""
    outputs = [(node, index) for node in nodes for index in sorted(wanted[node.number])]
    program = build_program(nodes, outputs, placement=_placement_of(nodes))
    metrics.metric_add("TensorsGraphSize", len(nodes))
    with _saved_if_it_cannot_be_compiled(program):
        executable, arguments = _executable_for(program)
    try:
        # Zeros in place of results are not worth recording.
        results = run(
            executable, arguments, None if executable.is_collected else process_recorder()
        )
    except ExecutionError:  # the recorder stops the program: nothing has run
        raise
    except Exception as error:
        failure = ExecutionError(
            f"graph {executable.name}.{executable.graph_id} failed while it ran ({cause}): {error}",
            hint="its arrays cannot be used any more; the error above comes from the device",
        )
        for node in nodes:
            node.fail(failure)
        repro.after_failure("run", executable, arguments)
        raise failure from error
    repro.after_run(executable, arguments)
    values: dict[int, dict[int, jax.Array]] = {node.number: {} for node in nodes}
    for (node, index), value in zip(outputs, results, strict=True):
        values[node.number][index] = value
    for node in nodes:
        node.settle(values[node.number])
        for index, reference in enumerate(node.arrays):
            array = reference()
            if array is not None and index in values[node.number]:
                array.settle(values[node.number][index], executable)


@contextlib.contextmanager
def _saved_if_it_cannot_be_compiled(program: Program) -> Iterator[None]:
    try:
        yield
    except Exception:
        if repro.level("compile"):
            with contextlib.suppress(
                Exception
            ):  # it cannot be lowered either: there is nothing to save
                arguments = program.arguments(frozenset())
                repro.after_failure("compile", uncompiled_program(program, frozenset()), arguments)
        raise


def _placement_of(nodes: Sequence[Node]) -> Any:
    committed = [node.placement for node in nodes if node.placement.committed]
    return committed[0] if committed else nodes[0].placement


def _executable_for(program: Program) -> tuple[Executable, list[jax.Array]]:
    """Return the executable of ``program`` and the arguments to call it with.

    A literal is compiled in as a constant, which XLA can use, until a program comes that differs
    in its value alone; from then on it is an argument, so that a learning rate that changes at
    every step costs two compilations and not one a step.
    """
    literals = tuple([literal.key for literal in program.literals])
    is_watched = process_recorder().wants_flag()
    key = (is_watched, program.structure)
    with _families_lock:
        family = _families.get(key)
        if family is None:
            family = _families[key] = _Family(literals=literals)
            if len(_families) > MAX_PROGRAMS:
                _families.popitem(last=False)
        else:
            _families.move_to_end(key)
        promoted = family.promoted
        executable = family.executables.get(_constants(literals, promoted))
        if executable is None and family.executables:
            pairs = zip(literals, family.literals, strict=True)
            varied = [i for i, (a, b) in enumerate(pairs) if a != b]
            promoted = family.promoted = promoted | frozenset(varied)
            family.executables.clear()
    if executable is None:
        flags.take_over()  # the script may have set XLA_FLAGS since
        try:
            executable = compile_program(
                program, promoted, flags.compiler_overrides(), is_watched=is_watched
            )
        except CompileError as error:
            _record_uncompiled(program, promoted, error, is_watched=is_watched)
            raise
        if not executable.is_collected:
            metrics.counter_add("CachedCompile" if executable.from_cache else "UncachedCompile")
        with _families_lock:
            if family.promoted == promoted:
                family.executables[_constants(literals, promoted)] = executable
    elif not executable.is_collected:
        metrics.counter_add("CachedCompile")
    return executable, program.arguments(promoted)


def _record_uncompiled(
    program: Program, promoted: frozenset[int], error: CompileError, *, is_watched: bool
) -> None:
    recorder = process_recorder()
    if recorder.waits_for_errors():
        with contextlib.suppress(Exception):  # it cannot be lowered either: nothing would replay
            executable = uncompiled_program(program, promoted, is_watched=is_watched)
            recorder.compile_failed(executable, program.arguments(promoted), error)


def left_with(error: BaseException) -> None:
    """Learn of an exception that leaves a lazy scope.

    JAX's own is one of recording; for any other, what ran last may have to be recorded.
    """
    if isinstance(error, Exception) and jaxapi.raised_inside(error):
        _failed(thread_trace(), error, None)
    process_recorder().program_failed(error)


def _constants(literals: tuple[bytes, ...], promoted: frozenset[int]) -> tuple[bytes, ...]:
    if not promoted:
        return literals
    return tuple([key for i, key in enumerate(literals) if i not in promoted])


def _left_jax(error: BaseException) -> None:
    """See an error leave a function of JAX's, such as a jitted one that was being traced."""
    trace = jaxapi.current_trace()
    if isinstance(trace, LazyTrace) and isinstance(error, Exception):
        _failed(trace, error, None)


def _failed(trace: LazyTrace, error: Exception, bound: jaxapi.BoundOperation | None) -> None:
    """Record an error that was raised while the graph was being recorded, with the graph so far."""
    if current_plan() is None or is_recorded(error):
        return
    if isinstance(error, (SnaprtError, jax.errors.JaxRuntimeError)):  # of running, not recording
        return
    recorder = process_recorder()
    try:
        mark_recorded(error)
        operation = jaxapi.failed_operation(error) or bound
        with trace.graph.lock:
            pending, part, program = _program_so_far(trace)
        described = describe_trace_error(error, operation, pending, pending - part)
        graph = unfinished_graph(program, described)
        recorder.compile_failed(graph, program.inputs if program else (), error)
    except Exception as raised:
        recorder.writer.complain(raised)


def _program_so_far(trace: LazyTrace) -> tuple[int, int, Program | None]:
    """Return how many operations are pending, how many can be one program now, and that."""
    nodes = ancestors(_nodes_of(trace.graph.live_arrays()))
    if not nodes:
        return 0, 0, None
    wanted = _wanted_results(nodes, ())
    part = next(iter(_split_by_placement(nodes, wanted)))
    outputs = [(node, index) for node in part for index in sorted(wanted[node.number])]
    return len(nodes), len(part), build_program(part, outputs, placement=_placement_of(part))
