"""Teaches JAX's functions arrays and traces of other kinds, and finds out who demands values."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import CodeType
from typing import Any

import jax
from jax._src import api as _api
from jax._src import array as _array
from jax._src import compute_on as _compute_on
from jax._src import config as _config
from jax._src import core as _core
from jax._src import pjit as _pjit
from jax._src import pmap as _pmap
from jax._src import shard_map as _shard_map
from jax._src import sharding_impls as _shardings
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax import lax as _lax
from jax._src.lax.control_flow import conditionals as _conditionals
from jax._src.lax.control_flow import loops as _loops
from jax._src.random import stateful_rng as _stateful_rng

from snaprt.jaxapi.settings import WITH_64_BITS, under_mesh, x64_enabled
from snaprt.jaxapi.tracing.arrays import PRNGKeyArray
from snaprt.jaxapi.tracing.host_memory import owning
from snaprt.jaxapi.tracing.traces import (
    current_trace,
    current_trace_setting,
    evaluating,
    is_staging,
    once,
    read_as_constants,
    set_current_trace,
    staging_for_constants,
    staging_for_shapes,
)
from snaprt.jaxapi.tracing.traces import staging as _staging


@once
def teach_device_get(kind: Any, read: Callable[[Any], Any]) -> None:
    """Make `jax.device_get` read instances of ``kind``, which it would hand back as tracers."""
    original = _api._device_get

    @functools.wraps(original)
    def device_get_leaf(x: Any) -> Any:
        return read(x) if type(x) is kind else original(x)

    _api._device_get = device_get_leaf


@once
def teach_compiled(
    kind: Any,
    trace: Any,
    read: Callable[[Any], jax.Array],
    give_away: Callable[[Sequence[Any]], None],
) -> None:
    """Let what `jax.stages.Lowered.compile` returns take the values of instances of ``kind``.

    JAX takes them for tracers, to which it refuses to apply a compiled function. Checked with jax
    0.10.2 and 0.12.0: whatever is no plain array comes by this method. Under a trace of type
    ``trace``, too, its parts for several devices have to be values, and ``give_away`` is told which
    arguments the compiled function donates, before it does.
    """
    original: Any = jax.stages.Compiled.call
    call_compiled = jax.stages.Compiled.__call__

    def value(leaf: Any) -> Any:
        return read(leaf) if type(leaf) is kind else leaf

    @functools.wraps(original)
    def call(params: Any, /, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(value, (args, kwargs))
        is_lazy = type(current_trace_setting.value) is trace
        with evaluating() if is_lazy else nullcontext():
            return original(params, *args, **kwargs)

    @functools.wraps(call_compiled)
    def give_away_and_call(*args: Any, **kwargs: Any) -> Any:
        if type(current_trace_setting.value) is trace:
            kinds = jax.tree.leaves(args[0].args_info)
            if any(kind.donated for kind in kinds):
                pairs = zip(jax.tree.leaves((args[1:], kwargs)), kinds, strict=False)
                give_away([leaf for leaf, kind in pairs if kind.donated])
        return call_compiled(*args, **kwargs)

    compiled: Any = jax.stages.Compiled
    compiled.call = staticmethod(call)
    compiled.__call__ = give_away_and_call


@once
def teach_trace_state(kind: Any) -> None:
    """Let those of JAX's functions work as ever that do otherwise where JAX traces.

    They ask `trace_state_clean`, and recording lazily under a trace of type ``kind`` is not tracing
    to them. `jax.set_mesh`, `jax.sharding.get_mesh` and compiled functions refuse to work there,
    and `jax.pmap` leaves its operands where they lie; `stateful_rng`, which asks the context,
    demands a seed. Whoever else asks gets the old answer.
    """
    original = _core.trace_state_clean
    compiled: Any = inspect.unwrap(jax.stages.Compiled.call)
    pmap: Any = inspect.unwrap(_pmap.pmap)
    asked_by = {
        _shardings.set_mesh.__init__.__code__,
        _shardings.get_mesh.__code__,
        compiled.__code__,
        *(code for code in pmap.__code__.co_consts if isinstance(code, CodeType)),
    }

    @functools.wraps(original)
    def trace_state_clean() -> bool:
        return original() or (
            type(current_trace_setting.value) is kind and sys._getframe(1).f_code in asked_by
        )

    _core.trace_state_clean = trace_state_clean
    context: Any = type(_core.trace_ctx)
    is_top = context.is_top_level
    seeds_itself = _stateful_rng.stateful_rng.__code__

    @functools.wraps(is_top)
    def is_top_level(self: Any) -> bool:
        return is_top(self) or (
            type(self.trace) is kind and sys._getframe(1).f_code is seeds_itself
        )

    context.is_top_level = is_top_level


@once
def teach_keys(kind: Any) -> None:
    """Let PRNG keys that have their values be iterated and copied under a trace of type ``kind``.

    Checked with jax 0.10.2 and 0.12.0: they make other keys of what comes of their words, which has
    to be a value.
    """
    keys_with_values: Any = PRNGKeyArray
    iterate, copy = keys_with_values.__iter__, keys_with_values.copy

    @functools.wraps(iterate)
    def each(keys: Any) -> Any:
        if type(current_trace_setting.value) is not kind:
            return iterate(keys)
        with evaluating():
            return iter([*iterate(keys)])

    @functools.wraps(copy)
    def copied(keys: Any) -> Any:
        is_lazy = type(current_trace_setting.value) is kind
        with evaluating() if is_lazy else nullcontext():
            return copy(keys)

    keys_with_values.__iter__, keys_with_values.copy = each, copied


@once
def teach_full(kind: Any) -> None:
    """Let what fills arrays (`jnp.zeros`, `jnp.ones_like`, ...) follow shardings lazily too.

    JAX 0.10.2 and 0.12.0 heed a sharding only where the value to fill with is an array of their
    own, and take an instance of ``kind`` that is to be resembled for a tracer, which has none.
    """
    original = _lax.full

    @functools.wraps(original)
    def full(shape: Any, fill_value: Any, dtype: Any = None, *, sharding: Any = None) -> Any:
        if sharding is None or not sharding._is_concrete:
            return original(shape, fill_value, dtype, sharding=sharding)
        with under_mesh(None):  # the sharding alone says where
            value: Any = original((), fill_value, dtype)
            if type(value) is not kind:
                return original(shape, fill_value, dtype, sharding=sharding)
            if value.committed:
                with evaluating():
                    return original(shape, value.full_lower(), dtype, sharding=sharding)
            return _broadcast_over(sharding)(value, _core.canonicalize_shape(shape))

    _replace_in_lax("full", full)
    for name in ("full_like", "empty_like"):  # the second in JAX 0.12 alone
        if hasattr(_lax, name):
            _replace_in_lax(name, _of_described(getattr(_lax, name), kind))


class _Description(jax.ShapeDtypeStruct):
    """Describes an array; JAX asks its abstract value alone whether the type is weak."""

    def __init__(self, array: Any) -> None:
        self.aval = array.aval
        is_weak = getattr(self.aval, "weak_type", False)
        sharding = array.sharding if array.committed and not is_weak else None
        super().__init__(array.shape, array.dtype, sharding=sharding, weak_type=is_weak)


def _of_described(like: Callable[..., Any], kind: Any) -> Callable[..., Any]:
    """Return ``like`` for an array that may be of ``kind``, whose description is then used.

    Where 64-bit types are off, JAX narrows what is described with one, but not what has a value.
    """

    @functools.wraps(like)
    def described(x: Any, *args: Any, **kwargs: Any) -> Any:
        if type(x) is kind:
            is_narrowed = not x64_enabled() and x.dtype in WITH_64_BITS
            x = x.full_lower() if is_narrowed else _Description(x)
        return like(x, *args, **kwargs)

    return described


@functools.lru_cache(maxsize=64)
def _broadcast_over(sharding: jax.sharding.Sharding) -> Callable[..., Any]:
    return jax.jit(jax.lax.broadcast, static_argnums=1, out_shardings=sharding)


def _replace_in_lax(name: str, function: Callable[..., Any]) -> None:
    for module in (_lax, jax.lax):
        if hasattr(module, name):
            setattr(module, name, function)


#: Functions whose arguments are arrays that exist, and modules that have them under that name.
_OF_VALUES: Any = (
    ("make_array_from_single_device_arrays", (_array, jax)),
    ("convert_to_metaty", (_pjit,)),  # describes the arguments of `jit(f).lower`
)

#: Functions that trace others, whose closures may hold no tracers, and the modules that have them.
_OF_CONSTANTS: Any = (
    ("_trace_composite_to_jaxpr", _lax),
    ("_reduction_jaxpr", _lax),
    ("_variadic_reduction_jaxpr", _lax),
    ("lower_jaxpr", _partial_eval),  # where a value that consists of arrays was closed over
    ("lower_jaxpr2", _partial_eval),
    # What rules of functions close over: JAX makes operands of tracers where it traces a function,
    # but not where it transforms the jaxpr that it has of one.
    ("_jvp_jaxpr", _ad),
    ("_linearize_jaxpr", _ad),
    ("_batch_jaxpr2", _batching),
    ("_batch_jaxpr_axes", _batching),
    ("_transpose_jaxpr_fancy", _pjit),
    ("_transpose_jaxpr_fancy", _conditionals),
    ("_transpose_scan_jaxpr_fancy", _loops),
    ("_transpose_jaxpr", _compute_on),
)

Read = Callable[[Any, str], Any]


@once
def teach_values(kind: Any, read: Read) -> None:
    """Let functions that need values find those of instances of ``kind``."""

    def value(leaf: Any, cause: str) -> Any:
        return read(leaf, cause) if type(leaf) is kind else leaf

    for name, modules in _OF_VALUES:
        _replace(name, modules, _of_values(getattr(modules[0], name), name, value))
    _replace("convert_to_metaty", (_pjit,), _describing(kind, _pjit.convert_to_metaty))
    _replace("eval_shape", (_api, jax), staging_for_shapes()(_api.eval_shape))
    callback = "make_array_from_callback"
    _replace(callback, (_array, jax), _of_callback(_array.make_array_from_callback, value))
    for name, module in _OF_CONSTANTS:
        _replace(name, (module,), staging_for_constants(name.strip("_"))(getattr(module, name)))
    _teach_traces(value)
    read_as_constants.add(kind)


def _replace(name: str, modules: Any, function: Callable[..., Any]) -> None:
    for module in modules:
        setattr(module, name, function)


def _of_values(function: Callable[..., Any], name: str, value: Read) -> Callable[..., Any]:
    @functools.wraps(function)
    def with_values(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(lambda leaf: value(leaf, name), (args, kwargs))
        with _evaluating_values():
            return function(*args, **kwargs)

    return with_values


def _describing(kind: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def describe(argument: Any) -> Any:
        if _staging.only_shapes and type(argument) is kind:  # as JAX does with its tracers
            return _pjit.create_meta_ty(argument.aval, None, None, True, False)
        return function(argument)

    return describe


def _of_callback(function: Callable[..., Any], value: Read) -> Callable[..., Any]:
    @functools.wraps(function)
    def with_values(shape: Any, sharding: Any, callback: Any, *args: Any, **kwargs: Any) -> Any:
        outer, owned = current_trace(), owning(callback)

        def data(index: Any) -> Any:
            with set_current_trace(outer):
                return value(owned(index), "make_array_from_callback")

        with _evaluating_values():
            return function(shape, sharding, data, *args, **kwargs)

    return with_values


def _evaluating_values() -> AbstractContextManager[Any]:
    """Return a context in which what is computed of values, as the words of keys, is one too."""
    return nullcontext() if is_staging() else evaluating()


def _teach_traces(value: Read) -> None:
    """Let eager `shard_map`, and what is traced for constants or folds them, take the arrays."""
    staging: Any = _partial_eval.DynamicJaxprTrace
    mapping: Any = _shard_map.ShardMapTrace
    new_const, to_pair = staging.new_const, mapping.to_val_mat_pair
    process_primitive = staging.process_primitive

    def new_constant(trace: Any, constant: Any, *args: Any, **kwargs: Any) -> Any:
        if _staging.for_constants:
            constant = value(constant, _staging.for_constants)
        return new_const(trace, constant, *args, **kwargs)

    def process(trace: Any, primitive: Any, operands: Any, params: Any, /) -> Any:
        if _config.eager_constant_folding.value:  # inside of `jax.ensure_compile_time_eval`
            operands = [value(operand, "ensure_compile_time_eval") for operand in operands]
        return process_primitive(trace, primitive, operands, params)

    def to_val_mat_pair(trace: Any, operand: Any) -> Any:
        return to_pair(trace, value(operand, "shard_map"))

    staging.new_const = staging.pure = staging.lift = new_constant
    staging.process_primitive = process
    mapping.to_val_mat_pair = to_val_mat_pair


@once
def teach_opaque_state(kind: type) -> None:
    """Let the opaque states of traces of type ``kind`` equal that of the eager trace.

    Libraries (flax) compare `get_opaque_trace_state()` to find out whether an object was made at
    another trace level. Recording lazily is no other level. In the key of jit's fast path, the
    traces themselves are compared, which differ.
    """
    state: Any = _core.OpaqueTraceState
    is_same = state.__eq__

    @functools.wraps(is_same)
    def equals(one: Any, other: Any) -> bool:
        if is_same(one, other):
            return True
        return isinstance(other, state) and all(
            trace is _core.eval_trace or type(trace) is kind
            for trace in (one._trace_ref(), other._trace_ref())
        )

    state.__eq__ = equals


# Functions that only pass the question "is this concrete?" on.
_ASKS_ON = frozenset({"is_concrete", "to_concrete_value"})

# Functions of JAX that demand a value on behalf of their caller, which gives the cause its name.
_DEMANDS_FOR = frozenset({"concrete_dim_or_error", "_ensure_index_tuple", "<genexpr>"})

# Functions that fail, or behave differently from eager JAX, without the value: what they stand for.
_DEMANDS = {
    "__bool__": "bool",
    "__hex__": "hex",
    "__index__": "index",
    "__int__": "int",
    "__oct__": "oct",
    "_is_slice_element_none_or_constant_or_symbolic": "slice",
    "concrete_or_error": "",  # named after its caller: `nonzero`, `arange`, ...
    "expand_bool_indices": "bool_mask",
    "is_constant_dim": "shape",
}

# Under `jax.disable_jit` they take a branch in Python, where the value is there to choose it.
_BRANCHES = frozenset({"_cond", "_switch_internal", "cond", "switch"})


def demanded_by() -> str | None:
    """Return what needs the value that the caller was asked for, or ``None`` for a mere probe.

    `Tracer.to_concrete_value` serves code that needs a value (`concrete_or_error`, a boolean
    mask) and mere probes (in `asarray`, `ad`, `power`); only the first may cut a graph. The
    question may come through the tracers of `grad` and `vmap`, hence the walk up the stack.
    """
    frame = sys._getframe(2)
    while frame.f_code.co_name in _ASKS_ON and frame.f_back is not None:
        frame = frame.f_back
    if frame.f_code.co_name in _BRANCHES and _config.disable_jit.value:
        return "bool"
    cause = _DEMANDS.get(frame.f_code.co_name)
    if cause == "" and frame.f_back is not None:
        frame = frame.f_back
        while frame.f_code.co_name in _DEMANDS_FOR and frame.f_back is not None:
            frame = frame.f_back
        return frame.f_code.co_name.strip("_<>")
    return cause
