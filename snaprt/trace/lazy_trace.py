"""The trace that JAX binds every eager operation on while a thread runs lazily.

It turns each operation into a step along a path and hands back lazy arrays. It decides what cannot
be recorded.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from operator import is_
from typing import Any, Final

import jax

from snaprt import jaxapi, metrics, settings
from snaprt.graph.operation import Evaluation, Operation, is_known, operation
from snaprt.graph.program import Literal, Placement, literal
from snaprt.host.collector import collect_seldom
from snaprt.host.identities import identity
from snaprt.host.interruptions import raise_if_interrupted
from snaprt.trace.array import LazyArray, counted_transfer, send
from snaprt.trace.fallback import Fallback, described
from snaprt.trace.lone_calls import LoneCall, LoneCalls
from snaprt.trace.modes import NONE, Modes, current_modes
from snaprt.trace.pacing import (
    ALONE,
    APART,
    BY_INDICES,
    BYTES,
    GIVEN_AWAY,
    Pacer,
    is_asked_for,
    most_bytes,
)
from snaprt.trace.recording import CallInputs, Recording, carry_over
from snaprt.trace.trie import GRANULARITY, Point, step_key

MOST_DEAD_BYTES = 16 << 20


_traces: weakref.WeakSet[LazyTrace] = weakref.WeakSet()


def give_away(arrays: Sequence[Any]) -> None:
    """Run, in every thread, what is pending that takes arrays whose memory is about to go.

    Args:
        arrays: What is about to be donated or deleted.

    Raises:
        GraphBreakError: In a scope that allows no breaks.
    """
    for trace in tuple(_traces):
        trace.give_away(arrays)


def may_record_elsewhere() -> bool:
    """Return whether there is another trace, which may have something pending."""
    return len(_traces) > 1


class LazyTrace(jaxapi.Trace):
    """Record operations; one instance for each thread that runs lazily.

    Args:
        read: Computes the value of a lazy array of this trace: ``read(trace, array, cause)``.
        grown: Told when a recording has grown by `GRANULARITY` operations, in eager mode by one.
        failed: Is told of an error, and of what was bound, before the error goes on to the user:
            ``failed(trace, error, operation)``.
        at_once: Is told of an operation that no graph can hold, before it runs:
            ``at_once(trace, name, cause, operands)``.
        cut: Runs all that is pending: ``cut(trace, cause)``.
        run: Runs what is pending for what cannot be a part of it: ``run(trace, cause)``.
        is_followed: Returns whether executions are recorded or watched, so that each is to be one
            of ours.
        must_be_ours: Returns whether each program is to be one of ours for another reason.
        effectful: Is told when an operation with effects has been recorded.
    """

    def __init__(
        self,
        read: Callable[[LazyTrace, LazyArray, str], None],
        grown: Callable[[LazyTrace], None],
        failed: Callable[[LazyTrace, Exception, jaxapi.BoundOperation], None],
        at_once: Callable[[LazyTrace, str, str, Sequence[Any]], None],
        cut: Callable[[LazyTrace, str], None],
        run: Callable[[LazyTrace, str], None],
        is_followed: Callable[[], bool],
        must_be_ours: Callable[[], bool],
        effectful: Callable[[LazyTrace], None],
    ) -> None:
        super().__init__()
        self.lock = threading.RLock()
        self.modes = NONE
        self.following = False
        self.claimed = 0  # above 0, no known call is followed
        self._owner = threading.get_ident()
        self._thread = weakref.ref(threading.current_thread())
        self.root = Point(None)
        self.recording = Recording(self.root)
        self.recording_time = 0
        self.context: tuple[Any, ...] | None = None
        self.context_number = -1
        self._points = 0
        # Signatures of operations that close over arrays, and the bytes of those: of the call that
        # is being recorded, and of functions that are gone.
        self.holding: list[tuple[int, int]] = []
        self._dead: list[tuple[int, int]] = []
        self.fullgraph = False  # whether a cut is an error
        self.steady = False  # whether functions that JAX transforms are traced once
        self.unseen_error: tuple[Any, Any] = (None, None)  # and of which array's buffer it was
        self.interruptions = 0  # goes up when what is recorded is not all that happens
        self._contexts: dict[Any, int] = {}
        self._operation_context: Any = None
        self._read = read
        self._grown = grown
        self._failed = failed
        self._at_once = at_once
        self._cut = cut
        self._run = run
        self._is_followed = is_followed
        self._must_be_ours = must_be_ours
        self.pacer = Pacer()
        self.fallback = Fallback()
        self.lone_calls = LoneCalls()
        self._at_last_call: Recording | None = None  # what is recorded, at a call left to JAX
        self.is_resting = False  # whether C++ makes such calls; then nothing is pending
        # By the line that made new callbacks, the number of the recording that holds each.
        self._callbacks: dict[Any, list[int]] = {}
        self._recordings = 0
        self.cut_for_call: Point | None = None  # where a call was not recorded, for it is alone
        self._effectful = effectful
        self.is_running = False  # whether who has the lock runs what was recorded
        self.given: frozenset[int] = frozenset()  # the ids of the inputs that it may overwrite
        # The operations that call back of what runs meanwhile: see `snaprt.runtime.step`.
        self.calling: list[frozenset[Point]] = []
        self.unpacked: set[str] = set()  # the jitted functions of which no call is an operation
        _traces.add(self)
        jaxapi.end_all_rests()  # what a call of another thread donates may be pending here

    def materialize(self, array: LazyArray, cause: str) -> None:
        """Compute the value of ``array``, which this trace recorded."""
        self._read(self, array, cause)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep every other thread from this trace, its own included.

        The lock alone does not keep out its own thread while that follows a known call, which
        takes a third of the time that it took with a lock. So that thread says that it is
        following and then looks for a claim, and who claims says so and then looks whether it is
        following: the interpreter lock makes sure that one sees the other.
        """
        with self.lock:
            if threading.get_ident() == self._owner:
                yield
                return
            self.claimed += 1
            try:
                while self.following:
                    time.sleep(0)
                yield
            finally:
                self.claimed -= 1

    def has_running_owner(self) -> bool:
        """Return whether the thread that this trace records for is still running."""
        thread = self._thread()
        return thread is not None and thread.is_alive()

    def adopt(self, modes: Modes) -> None:
        """Record as ``modes`` say from here on."""
        if modes is self.modes:
            return
        with self.lock:
            self.claimed += modes.sees_each_operation - self.modes.sees_each_operation
            self.modes = modes

    def begin(self, recording: Recording | None = None) -> None:
        """Go on with ``recording``, by default with a new one."""
        self._recordings += 1
        self.recording = Recording(self.root) if recording is None else recording

    def forget_paths(self, most: int) -> set[int]:
        """Begin the paths anew, between two recordings, if they have more than ``most`` points.

        Or if what functions closed over that are gone has more than `MOST_DEAD_BYTES`.

        Returns:
            The signatures of the operations that hold those.
        """
        if self.recording.point.depth:
            return set()
        is_dead = sum(nbytes for _, nbytes in self._dead) > MOST_DEAD_BYTES
        if self._points <= most and not is_dead:
            return set()
        dead = {signature for signature, _ in self._dead}
        self._dead.clear()
        self._points = 0
        self.root = Point(None)
        self.begin()
        return dead

    def hold_for(self, function: Any) -> None:
        """Take note that what was recorded of a call holds constants of ``function``."""
        if self.holding:
            finalizer = weakref.finalize(function, self._dead.extend, self.holding)
            finalizer.atexit = False
            self.holding = []

    def enter_context(self, context: tuple[Any, ...]) -> None:
        """Take note that JAX's settings are now ``context``."""
        self.context = context
        self.context_number = self._contexts.setdefault(context, len(self._contexts))
        self._operation_context = jaxapi.operation_context()

    def cut_where_due(self) -> None:
        """Run what is pending if a recording that has come here is to be cut."""
        cause = self.recording.point.stop
        if cause is not None and not self.fullgraph:
            self._cut(self, cause)

    def cut_before_call(self) -> None:
        """Run what is pending, for what comes is a program of its own."""
        self._cut(self, ALONE)

    def give_away(self, arrays: Sequence[Any]) -> None:
        """Run what is pending where it takes one of ``arrays``: see `give_away`."""
        taken = self.recording.input_wires
        if (
            taken
            and not self.is_running
            and any(identity(_known(array)) in taken for array in arrays)
        ):
            with self.exclusive():
                self._run(self, GIVEN_AWAY)

    def runs_alone(self) -> bool:
        """Return whether calls that are programs of their own cut what is pending."""
        return (
            bool(self.recording.point.depth)
            and self.pacer.cuts_for_calls
            and not self.fullgraph
            and is_asked_for()
        )

    def process_primitive(self, primitive: Any, args: Sequence[Any], params: Any, /) -> Any:
        """Record one operation and return its results as lazy arrays."""
        if self.is_resting:
            if jaxapi.runs_at_once(primitive, params) and self.leaves_operation():
                values = [*map(value_of, args)]
                return jaxapi.evaluate_call("process_primitive", primitive, values, params)
            self.wake()
        if self.fallback.is_on and self._runs_eagerly(primitive, args, params):
            return self.evaluate(partial(primitive.bind, **params), map(value_of, args), {})
        if self.recording.point.stop is not None:
            self.cut_where_due()
        if self.unpacked and jaxapi.unpackable_function(primitive, params) in self.unpacked:
            return jaxapi.run_unpacked(self, params, args)
        if self.pacer.stands_alone(primitive, params) and self.runs_alone():
            self.cut_for_call = self.recording.point
            self.cut_before_call()
        started = time.perf_counter_ns()
        try:
            results = self._record(primitive, args, params)
        except Exception as error:
            self._failed(self, error, jaxapi.BoundOperation(primitive, args, params))
            raise
        if type(results) is str:
            return self._run_otherwise(primitive, args, params, cause=results)
        self.recording_time += time.perf_counter_ns() - started
        if self.modes.eager:
            self._grown(self)
        return results if primitive.multiple_results else results[0]

    def may_fall_back(self) -> bool:
        """Return whether the thread may run eagerly for a while."""
        return (
            current_modes() is NONE
            and not self.fullgraph
            and self.pacer.may_fall_back()
            and not self._is_followed()
        )

    def leaves_call(self, call: LoneCall, operands: Sequence[Any]) -> bool:
        """Return whether JAX makes a call that is left to it: `snaprt.trace.lone_calls`."""
        self.cut_where_due()
        if call.is_large and self.runs_alone():
            self.cut_before_call()
        if self.recording.point.effectful or not self._may_leave():
            return False
        leaves_between = self.lone_calls.leaves_between
        if leaves_between and self.recording.point is not self.root:
            self.cut_before_call()
        for operand in operands:
            if type(operand) is LazyArray and operand._value is None:
                return False
        self.lone_calls.comes(self.recording.point.depth)
        self.interruptions += 1
        self._rest()
        return True

    def leaves_operation(self) -> bool:
        """Return whether JAX runs what comes next, where the thread rests: an operation of JAX's.

        Nothing is pending then.
        """
        if not (self.lone_calls.takes_one_more() and jaxapi.rests()):
            return False
        self.interruptions += 1
        return True

    def _may_leave(self) -> bool:
        return self.may_fall_back() and not self._must_be_ours()

    def _rest(self) -> None:
        """Let C++ make such calls from the next one on, if nothing was recorded since the last.

        Or if what comes between them is left as well.
        """
        recording = self.recording
        if recording.inputs or recording.point is not self.root:
            return
        leaves_between = self.lone_calls.leaves_between
        if not leaves_between and self._at_last_call is not recording:
            self._at_last_call = recording
            return
        self.is_resting = True
        _learn_to_rest()
        jaxapi.rest(self.lone_calls.generation, self._goes_on)
        if leaves_between and not jaxapi.rests():  # as where JAX looks for NaN
            self.lone_calls.record_between()

    def _goes_on(self, function: Any) -> bool:
        """Take note of a call that C++ has made; return whether it may make the next one."""
        self.interruptions += 1
        if self.lone_calls.leaves_between and not self.lone_calls.made(function):
            return False
        if self.interruptions % _LOOK_EACH:
            return self.is_resting
        return self.is_resting and self._may_leave()

    def wake(self) -> None:
        """Be asked about such calls again, for something is about to be recorded."""
        self.is_resting = False
        self._at_last_call = None
        jaxapi.watch_closely()

    def fall_back(self, place: Any) -> None:
        """Run eagerly, because of a place, until operations repeat: `snaprt.trace.fallback`."""
        with self.lock:
            if not self.fallback.is_on:
                self.fallback.begin(place)
                self.claimed += 1

    def resume(self) -> None:
        """Run lazily again."""
        with self.lock:
            if self.fallback.is_on:
                self.fallback.end()
                self.claimed -= 1

    def _runs_eagerly(self, primitive: Any, args: Sequence[Any], params: dict[str, Any]) -> bool:
        if not self.fallback.looks() and self.may_fall_back():
            return True
        return self.looks_and_runs_eagerly(described(primitive, params), args)

    def looks_and_runs_eagerly(self, what: Any, operands: Sequence[Any]) -> bool:
        """Return whether an operation that comes next runs eagerly; look at it."""
        if self.fallback.has_repeated() or not self.may_fall_back():
            self.resume()
            return False
        self.fallback.meet(what, operands)
        return True

    def evaluate(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what a function returns, eagerly; of JAX, or a jitted one."""
        started = time.perf_counter()
        with jaxapi.evaluating():
            returned = function(*args, **kwargs)
        self.fallback.took(time.perf_counter() - started)
        return returned

    def _record(
        self,
        primitive: Any,
        args: Sequence[Any],
        params: dict[str, Any],
        *,
        is_apart: bool = False,
    ) -> list[LazyArray] | str:
        """Record the operation and return its results, or why a graph is not to hold it.

        Where it ``is_apart``, the graph is its own.
        """
        cause = _must_run_at_once(primitive, args, params)
        if cause is not None:
            return cause
        if primitive.name in jaxapi.DEBUG_CALLBACKS and self._makes_callbacks(primitive, params):
            return "callback"
        operands: list[Any] = []
        for arg in args:
            operand = self._operand(arg)
            if type(operand) is str:
                return operand
            operands.append(operand)
        context = jaxapi.trace_context()
        if context != self.context:
            self.enter_context(context)
        with self.lock:
            if self.recording.nbytes > self.recording.prune_at:
                if self.runs_alone() and self.recording.bytes_held_alone() > most_bytes() // 8:
                    self._cut(self, BYTES)
                else:
                    self.begin(carry_over(self.recording, self.root, set(), {}, {}))
            recording = self.recording
            before, nbytes = recording.point, recording.nbytes
            wires: list[Any] = []
            literals: list[Literal] = []
            is_users_jit = jaxapi.is_call_of_users_jit(primitive, params)
            call = CallInputs(recording) if is_users_jit else None
            for operand in operands:
                kind = type(operand)
                if kind is Literal:
                    wires.append(operand.aval)
                    literals.append(operand)
                elif kind is not LazyArray:
                    wires.append(recording.input_wire(operand, None, call))
                elif operand._recording is recording:
                    wires.append(operand._result.number)
                elif operand._value is not None:
                    wires.append(recording.input_wire(operand._value, operand._handle, call))
                else:
                    return self._fail(primitive, operands, params)
            point = self._next(
                recording.point, primitive, params, tuple(wires), operands, is_apart=is_apart
            )
            if isinstance(point, str):
                recording.go_back(before, nbytes)
                return point
            recording.point = point
            if point.effects:
                self._effectful(self)
            recording.literals += literals
            arrays = [LazyArray(self, recording, result) for result in point.results]
            recording.arrays += map(weakref.ref, arrays)
            if point.depth % GRANULARITY == 0:
                self._grown(self)
        return arrays

    def _makes_callbacks(self, primitive: Any, params: dict[str, Any]) -> bool:
        """Return whether a callback is new, at a line that has made many new ones.

        Each would be one more program, where eager JAX just calls it.
        """
        if self.fullgraph or is_known(primitive, params, self._operation_context):
            return False
        place = jaxapi.users_place(jaxapi.frames_of_operation(jaxapi.source_info()))
        holding = self._callbacks.setdefault(place, [])
        if len(holding) >= _MAX_CALLBACKS or len(set(holding)) >= _MAX_GRAPHS_WITH_NEW_ONES:
            return True
        holding.append(self._recordings)
        return False

    def _operand(self, arg: Any) -> LazyArray | Literal | jax.Array | str:
        """Return what of ``arg`` a recording can hold, or why it can hold nothing."""
        kind = type(arg)
        if kind is LazyArray:
            if arg._trace is not self and arg._value is None:
                return arg.materialize("thread")  # its graph is not ours to extend
            if arg._trace is not self:
                arg._handle.exposed = True
            return arg
        if kind is jaxapi.ArrayImpl:
            return arg
        jaxapi.refuse_escaped_tracer(arg)
        aval = jaxapi.typeof(arg)
        if not jaxapi.is_array_aval(aval):
            return "ref"
        if jaxapi.has_no_values(aval):
            return "float0"
        if isinstance(arg, jax.Array):
            return arg
        if jaxapi.is_abstract(arg):
            return "abstract"  # JAX refuses it, and names the argument
        return literal(arg) if jaxapi.host_literal(arg) else send(arg)

    def _next(
        self,
        point: Point,
        primitive: Any,
        params: dict[str, Any],
        wires: tuple[Any, ...],
        operands: Sequence[Any],
        *,
        is_apart: bool,
    ) -> Point | str:
        """Return the point after the operation, or why a graph is not to hold it."""
        number = self.context_number
        notes_places = self.modes.notes_places
        latest = point.latest
        if (
            latest is not None
            and not notes_places
            and latest.primitive is primitive
            and latest.wires == wires
            and latest.context_number == number
            and tuple(latest.params) == tuple(params)
            and (
                all(map(is_, latest.params.values(), params.values()))
                or all(map(_is_same, latest.params.values(), params.values()))
            )
        ):
            return latest
        context = self._operation_context
        what = operation(primitive, params, context)
        place = jaxapi.place_of_operation(jaxapi.source_info()) if notes_places else None
        next_point = point.after.get(step_key(what, wires, number, place))
        if next_point is None:
            avals = _avals(operands)
            evaluation = what.evaluations.get((self.context, *avals))
            if evaluation is None:
                evaluated = _evaluated(what, primitive, operands, avals, params)
                if isinstance(evaluated, str):
                    return evaluated
                evaluation = what.evaluations[self.context, *avals] = evaluated
            if evaluation.refusal is not None:
                return evaluation.refusal
            if not (is_apart or self.fullgraph):
                how = self.pacer.apart(evaluation, primitive, params)
                if how is not None:
                    return how
            placement = _placement_of_pending(operands, what, number)
            if placement is None:
                placement = _placement(operands, what.named)
            devices = 1 if placement is None else len(placement.devices) or 1
            if placement is None or not (
                evaluation.runs_anywhere
                or (
                    jaxapi.is_exported_for(params, devices)
                    and all(jaxapi.has_devices_for(r, devices) for r in evaluation.results)
                )
            ):
                return "devices"
            collect_seldom()  # until the path that is new has ended
            next_point = point.with_operation(
                what,
                primitive,
                params,
                context,
                number,
                wires,
                evaluation,
                placement,
                jaxapi.source_info(),
                place,
            )
            self._points += 1
            if what.constant_bytes:
                self.holding.append((what.signature, what.constant_bytes))
            if not (is_apart or self.fullgraph):
                self.pacer.look(next_point)
        point.latest = next_point
        return next_point

    def _fail(
        self, primitive: Any, operands: Sequence[Any], params: dict[str, Any]
    ) -> list[LazyArray]:
        """Return the results of an operation of which an operand has failed: they have failed."""
        what = operation(primitive, params, self._operation_context)
        evaluation = what.evaluate(primitive, _avals(operands), params)
        error = next(o._origin for o in operands if type(o) is LazyArray and o.has_failed())
        return [LazyArray.failed(self, aval, error) for aval in evaluation.results]

    def _run_otherwise(
        self, primitive: Any, args: Sequence[Any], params: dict[str, Any], cause: str
    ) -> Any:
        """Do an operation that is no part of the graph that is pending."""
        if cause == BY_INDICES:
            by_indices = jaxapi.with_indices_as_operands(primitive, params)
            assert by_indices is not None
            with jaxapi.set_current_trace(self):
                return by_indices(*args)
        if cause == APART and self._is_followed() and not self.is_running:
            return self._run_apart(primitive, args, params)
        return self._run_at_once(primitive, args, params, cause)

    def _run_apart(self, primitive: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
        """Run an operation as a program of its own; what its operands do not need stays pending."""
        self.interruptions += 1
        concrete = [a.materialize(APART) if type(a) is LazyArray else a for a in args]
        with self.lock:
            pending = self.recording
            self.begin()
            try:
                results = self._record(primitive, concrete, params, is_apart=True)
                if not isinstance(results, str):
                    self._run(self, APART)
                    return results if primitive.multiple_results else results[0]
            finally:
                self.recording = pending
        return self._run_at_once(primitive, args, params, results)

    def _run_at_once(self, primitive: Any, args: Sequence[Any], params: Any, cause: str) -> Any:
        """Run an operation that no graph can hold, after the operands it needs."""
        self.interruptions += 1
        if cause == "device_put" and not any(isinstance(a, jax.Array) for a in args):
            return counted_transfer(
                lambda: jaxapi.evaluate_call("process_primitive", primitive, args, params)
            )
        self._at_once(self, primitive.name, cause, args)
        concrete = [a.materialize(cause) if type(a) is LazyArray else a for a in args]
        if jaxapi.donates(params):
            give_away(concrete)
        metrics.counter_add(f"eager::{primitive.name}")
        return jaxapi.evaluate_call("process_primitive", primitive, concrete, params)

    def stage_value(self, val: Any) -> Any:
        """Lift a host value into an array; it is copied to the device at once."""
        if isinstance(val, jax.Array):
            return val
        if jaxapi.concrete_mesh() is None:
            return send(val)
        staged = counted_transfer(lambda: [jaxapi.evaluate_call("stage_value", val)])
        return staged[0]

    def process_custom_jvp_call(
        self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **params: Any
    ) -> Any:
        """Record the function itself: derivatives are taken by the traces inside this one."""
        with jaxapi.set_current_trace(self):
            return fun.call_wrapped(*tracers)

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **params: Any
    ) -> Any:
        """Record the function itself: derivatives are taken by the traces inside this one."""
        with jaxapi.set_current_trace(self):
            return fun.call_wrapped(*tracers)

    def process_call(self, primitive: Any, f: Any, tracers: Any, params: Any, /) -> Any:
        """Record the body of a call."""
        with jaxapi.set_current_trace(self):
            return f.call_wrapped(*tracers)

    def process_shard_map(self, primitive: Any, fun: Any, args: Any, **params: Any) -> Any:
        """Run an eager `shard_map` at once; inside `jit` it is recorded like any operation."""
        self._at_once(self, "shard_map", "shard_map", args)
        concrete = [a.materialize("shard_map") if type(a) is LazyArray else a for a in args]
        return jaxapi.evaluate_call("process_shard_map", primitive, fun, concrete, **params)

    def cur_qdd(self, x: Any) -> Any:
        """Return the quasi-dynamic data of ``x``, as the eager trace does (JAX 0.10)."""
        return jaxapi.evaluate_call("cur_qdd", x)


def _known(operand: Any) -> Any:
    return operand._value if type(operand) is LazyArray else operand


@cache
def _learn_to_rest() -> None:
    jaxapi.take_values_at_rest(LazyArray, _handed_out)
    settings.when_changed(jaxapi.end_all_rests)


def _handed_out(array: LazyArray) -> jax.Array | None:
    if array._value is not None:
        array._handle.exposed = True
    return array._value


def value_of(operand: Any) -> Any:
    """Return the value of a lazy array, and anything else as it is."""
    return operand.materialize("eager") if type(operand) is LazyArray else operand


def _always(_: Mapping[str, Any]) -> bool:
    return True


def _lacks_mesh(params: Mapping[str, Any]) -> bool:
    return jaxapi.takes_mesh_of_operand(params) and jaxapi.concrete_mesh() is None


#: Operations that do another thing when they run than when they are compiled: why, and with which
#: parameters.
_AT_ONCE: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], bool]]] = {
    "debug_callback": ("breakpoint", jaxapi.is_breakpoint),
    "global_array_to_host_local_array": ("processes", _always),
    "host_local_array_to_global_array": ("processes", _always),
    "inspect_sharding": ("sharding", _always),
    "layout_constraint": ("layout", _always),
    "relayout": ("layout", _always),
    "sharding_constraint": ("sharding", _lacks_mesh),
}

_LAYOUTS = ("in_layouts", "out_layouts")

#: Whatever ends a rest says so. Whether one has been forgotten is seen after so many calls.
_LOOK_EACH: Final = 16

#: How many new debug callbacks of a line graphs hold, and how many graphs.
_MAX_CALLBACKS: Final = 16
_MAX_GRAPHS_WITH_NEW_ONES: Final = 4


def _is_same(parameter: Any, other: Any) -> bool:
    """Return whether two parameters are one object, or tuples of the same objects.

    When JAX differentiates a call, it hands over the same things in a new tuple each time.
    """
    return parameter is other or (
        type(parameter) is tuple
        and type(other) is tuple
        and len(parameter) == len(other)
        and all(map(is_, parameter, other))
    )


def _must_run_at_once(primitive: Any, args: Sequence[Any], params: dict[str, Any]) -> str | None:
    """Return the cause for which an operation cannot wait, or ``None``."""
    if primitive.name == "device_put" and (
        any(device is not None for device in params["devices"])
        or not any(type(arg) is LazyArray for arg in args)
    ):
        return "device_put"
    if "jaxpr" in params:  # of jitted functions, say; it is asked of each operation that JAX binds
        if params.get("compiler_options_kvs"):  # XLA takes them for a whole program alone
            return "compiler_options"
        if jaxapi.closes_over_references(params):
            return "ref"
        if any(layout is not None for name in _LAYOUTS for layout in params.get(name) or ()):
            return "layout"  # likewise
    row = _AT_ONCE.get(primitive.name)
    return row[0] if row is not None and row[1](params) else None


def _has_64_bits(operand: LazyArray | Literal | jax.Array) -> bool:
    dtype = operand.aval.dtype if type(operand) is Literal else operand.dtype  # type: ignore[union-attr]
    return dtype in jaxapi.WITH_64_BITS


def _avals(operands: Sequence[Any]) -> list[Any]:
    return [o.aval if type(o) in (LazyArray, Literal) else jaxapi.typeof(o) for o in operands]


def _evaluated(
    what: Operation,
    primitive: Any,
    operands: Sequence[Any],
    avals: Sequence[Any],
    params: dict[str, Any],
) -> Evaluation | str:
    """Return what comes of an operation, or why it must run to know."""
    if not jaxapi.x64_enabled() and any(map(_has_64_bits, operands)):
        return "x64"
    if jaxapi.key_reuse_is_checked() and any(jaxapi.is_extended_dtype(a.dtype) for a in avals):
        return "key_reuse"  # JAX notes in a key itself that it was used
    if not jaxapi.can_be_lowered(primitive, params):
        return "ref" if primitive.ref_primitive else "primitive"
    try:
        return what.evaluate(primitive, avals, params)
    except Exception as error:
        raise_if_interrupted(error)
        if jaxapi.has_own_implementation(primitive):  # which may look at values
            return "shape"
        raise


def _placement_of_pending(
    operands: Sequence[LazyArray | Literal | jax.Array], what: Operation, context_number: int
) -> Placement | None:
    """Return where an operation runs by its pending operands alone; ``None`` where more counts.

    As `_placement` would, which takes five times as long.
    """
    if what.is_placed:
        return None
    placement: Placement | None = None
    for operand in operands:
        value: Any = operand
        if type(operand) is LazyArray:
            value = operand._value
            if value is None:
                point = operand._result.point  # type: ignore[union-attr]
                if point.context_number != context_number or (
                    placement is not None and placement is not point.placement
                ):
                    return None
                placement = point.placement
                continue
        if type(value) is not Literal and value.committed:
            return None
    if placement is None or placement.mesh is not jaxapi.concrete_mesh():
        return None
    return placement


def _placement(
    operands: Sequence[LazyArray | Literal | jax.Array], named: jaxapi.NamedShardings
) -> Placement | None:
    """Return where an operation runs, or ``None`` where it is told two things at once."""
    mesh = named.mesh or jaxapi.concrete_mesh()
    assignments = set(named.devices)
    if mesh is not None:
        assignments.add(tuple(mesh.devices.flat))
    is_plain = not assignments and not named.commits
    for index, operand in enumerate(operands):
        value: Any = operand
        if type(operand) is LazyArray:
            value = operand._value
            if value is None:
                placement = operand._result.point.placement  # type: ignore[union-attr]
                if placement.committed:
                    assignments.add(placement.devices)
                    is_plain = is_plain and placement.sharding is not None
                value = None
        if value is not None and type(value) is not Literal and value.committed:
            assignments.add(jaxapi.devices_of_sharding(value.sharding))
            is_plain = is_plain and jaxapi.is_plain_sharding(value.sharding)
        required = named.operands[index] if named.operands else None
        if required is not None and _contradicts(operand, required):
            return None
    default = jaxapi.default_device()
    if named.commits and not assignments:
        assignments.add(jaxapi.devices_of_sharding(jaxapi.single_device_sharding(default)))
    if len(assignments) > 1:
        return None
    return _interned(next(iter(assignments), None), default, jaxapi.x64_enabled(), mesh, is_plain)


def _contradicts(operand: LazyArray | Literal | jax.Array, required: jax.sharding.Sharding) -> bool:
    """Return whether JAX refuses an operand, which is known to lie otherwise than is asked for."""
    if type(operand) is Literal:
        return False
    aval = jaxapi.typeof(operand)
    if jaxapi.type_with_sharding(aval, required) != aval:
        return True
    sharding: jax.sharding.Sharding | None
    if type(operand) is LazyArray and operand._value is None:
        sharding = operand._result.known_sharding()  # type: ignore[union-attr]
    else:
        sharding = operand.sharding  # type: ignore[union-attr]
    if sharding is None:
        return False
    if sharding.memory_kind != required.memory_kind:
        return True
    return operand.committed and not sharding.is_equivalent_to(required, operand.ndim)  # type: ignore[union-attr]


_placements: dict[Any, Placement] = {}


def _interned(
    pinned: tuple[Any, ...] | None,
    default_device: Any,
    x64: bool,
    mesh: jax.sharding.Mesh | None,
    is_plain: bool,
) -> Placement:
    is_committed = pinned is not None
    key = (pinned, None if is_committed else default_device, x64, mesh, is_plain)
    placement = _placements.get(key)
    if placement is None:
        device = pinned[0] if pinned else default_device
        sharding = jaxapi.single_device_sharding(device) if is_plain else None
        placement = _placements[key] = Placement(
            is_committed, pinned or (), key[1], x64, mesh, sharding
        )
    return placement
