"""Calls that were recorded before: what they lead to is known, and JAX need not be asked again.

An operator of a lazy array, an indexing, or a call of a jitted function records operations that
depend on the function, its static arguments, what its operands are (not their values) and JAX's
settings. Where a recording meets the same call at the same point of its path again, it goes on to
the point where that call had led. Whatever else a call does (it reads a value, runs something at
once, has an effect, meets an array that is not its operand) is never taken for known.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from snaprt import jaxapi, metrics
from snaprt.host.identities import identity
from snaprt.trace.array import LazyArray, send
from snaprt.trace.lazy_trace import give_away, may_record_elsewhere, value_of
from snaprt.trace.recording import CallInputs, DataHandle, Recording
from snaprt.trace.trie import GRANULARITY, InputKind, Point, Result, Shortcut, met_kind

_SCALARS = frozenset(
    {
        bool,
        int,
        float,
        *(np.dtype(code).type for code in "?" + np.typecodes["AllInteger"] + "efdFD"),
    }
)
_NUMBERS = "biufc"  # kinds of numpy dtypes

_current = jaxapi.current_trace_setting
_trace_context = jaxapi.trace_context
_ArrayImpl = jaxapi.ArrayImpl
_CONCRETE = jaxapi.CONCRETE_ARRAYS
_ref = weakref.ref
_refuse_deleted = jaxapi.refuse_deleted


class Attempt:
    """A call that is not known yet, between its beginning and its end."""

    __slots__ = (
        *("before", "has_repeated", "interruptions", "key", "operands", "recording", "sent"),
        "trace",
    )

    def __init__(
        self,
        trace: Any,
        key: Any,
        recording: Recording,
        before: Point,
        operands: Sequence[Any],
        sent: dict[int, Any] | None = None,
        *,
        has_repeated: bool = False,
    ) -> None:
        self.trace = trace
        self.key = key
        self.recording = recording
        self.before = before
        self.operands = operands
        self.sent = sent  # operands that are numpy arrays, on the device, by ``id``
        # Whether an operand comes twice, while the key says that these may be two arrays.
        self.has_repeated = has_repeated
        self.interruptions = trace.interruptions
        trace.cut_for_call = None
        trace.holding = []

    def learn(
        self,
        results: Sequence[Any],
        build: Callable[[Any], Any] | None,
        hidden: Sequence[Any] = (),
    ) -> None:
        """Remember what the call recorded, if that will be the same the next time."""
        trace, before = self.trace, self.before
        with trace.lock:
            target = self.recording.point
            if trace.cut_for_call is before:
                before.alone = {*(before.alone or ()), self.key}
            if (
                trace.recording is not self.recording
                or trace.interruptions != self.interruptions
                or target.inputs != before.inputs
                or target.effectful != before.effectful
                or before.stop is not None
                or target.depth // GRANULARITY != before.depth // GRANULARITY
            ):
                return
            positions = {identity(operand): index for index, operand in enumerate(self.operands)}
            if self.has_repeated:
                # What was recorded has to be the call itself, with an input for each of the two.
                if target.before is not before or not set(target.wires or ()).issuperset(
                    wire for wire in self.key[2:] if type(wire) is int and wire < 0
                ):
                    return
                positions = {}
            sources: list[Result | int] = []
            for array in (*results, *hidden):
                result = self._result(array, positions)
                if result is None:
                    return
                sources.append(result)
            literals = tuple(self.recording.literals[before.literals : target.literals])
            shown, hidden_sources = tuple(sources[: len(results)]), tuple(sources[len(results) :])
            before.keep_shortcut(self.key, Shortcut(target, literals, shown, build, hidden_sources))

    def _result(self, array: Any, positions: dict[int, int]) -> Result | int | None:
        if identity(array) in positions:
            return positions[identity(array)]
        if type(array) is LazyArray and array._recording is self.recording:
            result = array._result
            if result is not None and result.number >= self.before.count:
                return result
        return None


def follow(
    trace: Any,
    function: Any,
    operands: Sequence[Any],
    sent: dict[int, Any] | None = None,
    *,
    is_users_jit: bool = False,
) -> Any:
    """Return what a known call returns; an `Attempt` for one not known, ``None`` if it cannot be.

    Args:
        trace: The lazy trace of this thread.
        function: Stands for the function and its static arguments.
        operands: Its other arguments.
        sent: Those of them that are numpy arrays and were copied to the device already, by ``id``.
        is_users_jit: Whether it is a jitted function of the user's.
    """
    context = _trace_context()
    if context != trace.context:
        trace.enter_context(context)
    if trace.is_resting:
        if not is_users_jit and trace.leaves_operation():
            return None
        trace.wake()
    if trace.recording.point.stop is not None:
        trace.cut_where_due()
    trace.following = True
    try:
        if trace.claimed:
            return None
        recording = trace.recording
        sent = {} if sent is None else sent
        call = CallInputs(recording) if is_users_jit else None
        wires = _wires(trace, recording, operands, sent, call)
        if wires is None:
            return None
        key = (function, trace.context_number, *wires)
        before = recording.point
        shortcut = before.shortcuts.get(key)
        if shortcut is None:
            if before.alone is None or key not in before.alone or not trace.runs_alone():
                has_repeated = call is not None and call.has_repeated
                return Attempt(
                    trace, key, recording, before, operands, sent, has_repeated=has_repeated
                )
            trace.following = False
            trace.cut_before_call()
            return follow(trace, function, operands, sent, is_users_jit=is_users_jit)
        recording.point = shortcut.target
        recording.literals += shortcut.literals
        if shortcut.makes_many:
            arrays: list[Any] = [LazyArray(trace, recording, r) for r in shortcut.results]
            recording.arrays += map(_ref, arrays)
        else:
            arrays = _arrays_of(trace, recording, shortcut.results, operands)
        if shortcut.hidden:
            hidden = Hidden(trace, recording, shortcut, operands)
            recording.hidden.append(_ref(hidden))
            arrays = [*arrays, hidden]
    finally:
        trace.following = False
    return arrays[0] if shortcut.build is None else shortcut.build(arrays)


def _arrays_of(
    trace: Any, recording: Recording, results: Sequence[Any], operands: Sequence[Any]
) -> list[Any]:
    """Return the results of a call, of which an integer is the number of an operand."""
    arrays: list[Any] = []
    for result in results:
        if type(result) is int:
            arrays.append(operands[result])
        else:
            array = LazyArray(trace, recording, result)
            recording.arrays.append(_ref(array))
            arrays.append(array)
    return arrays


class Hidden:
    """Results of a call that stay together until somebody needs them one by one.

    As what a forward pass leaves for the backward pass, which takes all of it as one operand.
    """

    __slots__ = ("__weakref__", "_arrays", "_operands", "recording", "shortcut", "trace")

    def __init__(
        self, trace: Any, recording: Recording, shortcut: Shortcut, operands: Sequence[Any]
    ) -> None:
        self.trace = trace
        self.recording = recording
        self.shortcut = shortcut
        self._operands = operands
        self._arrays: list[Any] | None = None

    def arrays(self) -> list[Any]:
        """Return the arrays, which exist from here on; a cut asks for them before it runs."""
        if self._arrays is None:
            hidden, operands = self.shortcut.hidden, self._operands
            self._arrays = _arrays_of(self.trace, self.recording, hidden, operands)
            self._operands = ()
        return self._arrays


def follow_function(
    key: Any, operands: Sequence[Any], call: Callable[[], tuple[Any, list[Any]]]
) -> tuple[Any, Hidden | list[Any]]:
    """Return what a function without effects returns, recorded in a lazy scope.

    Args:
        key: Stands for the function; all that it depends on besides ``operands``.
        operands: Arrays, and results that an earlier call has hidden.
        call: Calls it; returns a pytree of arrays, and a list of arrays to hide.
    """
    trace: Any = _current.value
    outcome = follow(trace, key, operands) if hasattr(trace, "cut_for_call") else None
    if outcome is None:
        return call()
    if type(outcome) is not Attempt:
        return outcome
    shown, hidden = call()
    structure: Any
    leaves, structure = jax.tree.flatten(shown)
    if hidden:
        outcome.learn(leaves, lambda arrays: (structure.unflatten(arrays[:-1]), arrays[-1]), hidden)
    else:
        outcome.learn(leaves, lambda arrays: (structure.unflatten(arrays), []))
    return shown, hidden


def _wires(
    trace: Any,
    recording: Recording,
    operands: Sequence[Any],
    sent: dict[int, Any],
    call: CallInputs | None,
) -> list[Any] | None:
    """Return the wires of operands, which a recording meets; ``None`` for what it cannot hold.

    A step under one `jax.jit` has hundreds of them: new inputs are met all at once.
    """
    input_wires = recording.input_wires
    kinds: list[InputKind] = []
    handle: Any = None  # of the operand, a `DataHandle` where a lazy array computed it
    wires: list[Any] = []
    try:
        for operand in operands:
            what = type(operand)
            if what is LazyArray:
                if operand._recording is recording:
                    wires.append(operand._result.number)
                    continue
                value = operand._value
                if value is None or operand._trace is not trace:
                    return None
                wire = input_wires.get(identity(value))
                if wire is not None and call is not None:
                    wire = call.wire(value, wire)
                if wire is None:
                    handle = operand._handle
                    if handle.exposed:
                        _refuse_deleted(value)
                    kinds.append(handle._kinds[handle._index] or handle.kind(value))
            elif what in _SCALARS:
                wires.append(_scalar_wire(what, operand))
                continue
            elif what is Hidden:
                if operand.recording is not recording:
                    return None
                wires.append(operand.shortcut)
                continue
            elif what is np.ndarray and operand.ndim and operand.dtype.kind in _NUMBERS:
                value = sent.get(identity(operand))
                if value is None:
                    value = sent[identity(operand)] = send(operand)
                wire = input_wires.get(identity(value))
                if wire is None:
                    kind = met_kind(value)
                    kinds.append(kind)
                    metrics.counter_add("CreateDataHandles")
                    handle = DataHandle([kind], 0)  # nobody else has it: it may be donated
            elif what in _CONCRETE:
                value = operand
                wire = input_wires.get(identity(value))
                if wire is not None and call is not None:
                    wire = call.wire(value, wire)
                if wire is None:
                    _refuse_deleted(value)
                    kinds.append(met_kind(value))
                    handle = None
            else:
                return None
            if wire is None:
                wire = recording.add_input(value, handle)
            wires.append(wire)
    finally:
        if kinds:
            recording.go_on(kinds)
    return wires


def _scalar_wire(kind: type, value: Any) -> Any:
    # 0.0 equals -0.0, and NaN not even itself.
    return (kind, value) if value and value == value else (kind, repr(value))


def _binary(name: str) -> Callable[[Any, Any], Any]:
    """Return the operator of two operands of that name; the body is `follow`, written out."""
    general = getattr(LazyArray, name)

    def operator(self: Any, other: Any) -> Any:
        trace = self._trace
        if _current.value is not trace:
            return general(self, other)
        context = _trace_context()
        if context != trace.context:
            trace.enter_context(context)
        if trace.is_resting:
            if trace.leaves_operation():
                return general(self, other)
            trace.wake()
        attempt = left = right = None
        trace.following = True
        try:
            recording = trace.recording
            kind = type(other)
            if trace.claimed:
                pass
            elif self._recording is recording:
                left = self._result.number
            elif self._value is not None:
                left = recording.input_wire(self._value, self._handle)
            if left is None:
                pass
            elif kind is LazyArray:
                if other._recording is recording:
                    right = other._result.number
                elif other._value is not None and other._trace is trace:
                    right = recording.input_wire(other._value, other._handle)
            elif kind is _ArrayImpl:
                right = recording.input_wires.get(identity(other))
                if right is None:
                    right = recording.input_wire(other, None)
            elif kind in _SCALARS:
                right = (kind, other) if other and other == other else (kind, repr(other))
            if right is not None:
                before = recording.point
                key = (name, trace.context_number, left, right)
                shortcut = before.shortcuts.get(key)
                if shortcut is None:
                    attempt = Attempt(trace, key, recording, before, (self, other))
                elif type(result := shortcut.results[0]) is Result:
                    recording.point = shortcut.target
                    if shortcut.literals:
                        recording.literals += shortcut.literals
                    array = LazyArray(trace, recording, result)
                    recording.arrays.append(_ref(array))
                    return array
        finally:
            trace.following = False
        returned = general(self, other)
        if attempt is not None:
            attempt.learn([returned], None)
        return returned

    operator.__name__ = name
    operator.__doc__ = getattr(general, "__doc__", None)
    return operator


def follow_indexing(trace: Any, array: Any, index: Any, general: Callable[[], Any]) -> Any:
    """Follow the indexing of an array that is not lazy, as `jaxapi.intercept_indexing` asks."""
    statics = _static_key(index)
    return general() if statics is None else _follow(trace, ("index", statics), array, general)


def _follow(trace: Any, function: Any, operand: Any, general: Callable[[], Any]) -> Any:
    """Return what a call of one operand returns, which ``general`` finds where it is not known."""
    outcome = follow(trace, function, (operand,))
    if outcome is None:
        return general()
    if type(outcome) is not Attempt:
        return outcome
    returned = general()
    outcome.learn([returned], None)
    return returned


def _with_statics(name: str, general: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method of that name, of which all arguments but ``self`` are static."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        trace = self._trace
        if _current.value is not trace:
            return general(self, *args, **kwargs)
        statics = _static_key((args, tuple(kwargs.items())))
        if statics is None:
            return general(self, *args, **kwargs)
        call = functools.partial(general, self, *args, **kwargs)
        return _follow(trace, (name, statics), self, call)

    method.__name__ = name
    method.__doc__ = getattr(general, "__doc__", None)
    return method


def _power(self: Any, exponent: Any) -> Any:
    """Return the power; JAX looks at the exponent's value, which a Python scalar's key has."""
    if _current.value is not self._trace or type(exponent) not in _SCALARS:
        return _general_power(self, exponent)
    call = functools.partial(_general_power, self, exponent)
    key = ("__pow__", _scalar_wire(type(exponent), exponent))
    return _follow(self._trace, key, self, call)


_STATIC = frozenset({int, str, type(None), type(Ellipsis), type, np.dtype, type(jax.numpy.float32)})


def _static_key(value: Any) -> Any:
    """Return what stands for a static argument in a key; ``None`` where nothing can."""
    kind = type(value)
    if kind in _STATIC:
        return (kind, value)
    if kind is slice:
        value = (value.start, value.stop, value.step)
    elif kind is not tuple and kind is not list:
        return (kind, value) if isinstance(value, np.dtype) else None
    parts = [_static_key(part) for part in value]
    return None if None in parts else (kind, *parts)


def follow_jit(
    trace: Any, function: Callable[..., Any], info: Any, args: Any, kwargs: Any
) -> tuple[Any, Callable[[Any], None] | None, tuple[Any, Any]]:
    """Follow a call of a jitted function, as `jaxapi.intercept_jit` asks.

    Returns:
        What the call returns, or `jaxapi.NOT_KNOWN`; and what is to be told what JAX's own way
        returned, with the arguments to call it with.
    """
    arguments = (args, kwargs)
    fallback = trace.fallback
    if fallback.is_on:
        if not fallback.looks() and trace.may_fall_back():
            return _evaluated(trace, function, info, args, kwargs), None, arguments
    elif (call := trace.lone_calls.left.get(identity(info))) is not None:
        rested = jaxapi.rests()  # when C++ looked for it
        if trace.leaves_call(call, jax.tree.leaves(arguments)):
            if rested and not (_donates(info) and may_record_elsewhere()):
                return jaxapi.LEFT, None, _with_values(info, args, kwargs)
            return _evaluated(trace, function, info, args, kwargs), None, arguments
    elif trace.is_resting and not jaxapi.is_users_jit(info):
        if trace.leaves_operation():
            return jaxapi.LEFT, None, _with_values(info, args, kwargs)
        trace.wake()
    parsed = jaxapi.parse_call(function, info, args, kwargs)
    if parsed is None:
        return jaxapi.NOT_KNOWN, None, arguments
    key, operands = parsed
    if fallback.is_on and trace.looks_and_runs_eagerly(key, operands):
        return _evaluated(trace, function, info, args, kwargs), None, arguments
    result = follow(trace, key, operands, is_users_jit=jaxapi.is_users_jit(info))
    if result is None:
        return jaxapi.NOT_KNOWN, None, arguments
    if type(result) is not Attempt:
        return result, None, arguments

    def learn(returned: Any) -> None:
        structure: Any
        leaves, structure = jax.tree.flatten(returned)
        result.learn(leaves, structure.unflatten)
        trace.hold_for(function)
        point = trace.recording.point
        if point.wires is not None and point.depth == result.before.depth + 1:
            is_large = trace.pacer.stands_alone(point.primitive, point.params)
            trace.lone_calls.recorded(info, point, is_large=is_large)

    if result.sent:
        sent = result.sent
        arguments = jaxapi.with_leaves(
            info, args, kwargs, lambda leaf: sent.get(identity(leaf), leaf)
        )
    return jaxapi.NOT_KNOWN, learn, arguments


def _donates(info: Any) -> bool:
    return bool(info.donate_argnums or info.donate_argnames)


def _evaluated(trace: Any, function: Callable[..., Any], info: Any, args: Any, kwargs: Any) -> Any:
    """Return what a call returns that JAX makes itself."""
    if _donates(info):
        give_away(jax.tree.leaves((args, kwargs)))
    args, kwargs = _with_values(info, args, kwargs)
    return trace.evaluate(trace.fallback.function(function, info), args, kwargs)


def _with_values(info: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of a call, with values for lazy arrays."""
    return jaxapi.with_leaves(info, args, kwargs, value_of)


_BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "and", "or", "xor"),
    *("lshift", "rshift"),
)
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_UNARY = ("__neg__", "__pos__", "__abs__", "__invert__")
_METHODS = (
    *("astype", "flatten", "max", "mean", "min", "prod", "ravel", "reshape", "squeeze", "sum"),
    *("swapaxes", "transpose"),
)

for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *_COMPARISONS):
    setattr(LazyArray, f"__{_name}__", _binary(f"__{_name}__"))
_general_power: Any = LazyArray.__pow__
LazyArray.__pow__ = _power
for _name in (*_UNARY, "__getitem__", *_METHODS):
    setattr(LazyArray, _name, _with_statics(_name, getattr(LazyArray, _name)))
LazyArray.T = property(_with_statics("T", LazyArray.T.fget))
