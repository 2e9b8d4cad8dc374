"""Hands the values of arrays of another kind to those of JAX's functions that refuse tracers.

It must not know what those arrays are. Checked with jax 0.10.2 and 0.12.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from jax._src import array as _array
from jax._src import config as _config
from jax._src import pjit as _pjit
from jax._src import shard_map as _shard_map
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax import lax as _lax

from snaprt.jaxapi.tracing.traces import (
    current_trace,
    evaluating,
    is_staging,
    read_as_constants,
    set_current_trace,
    staging_for_constants,
)
from snaprt.jaxapi.tracing.traces import staging as _staging

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
)

Read = Callable[[Any, str], Any]

_is_taught = False


def teach_values(kind: type, read: Read) -> None:
    """Let functions that need values find those of instances of ``kind``.

    Args:
        kind: The type of the arrays.
        read: Returns the value of one, and is told what needs it.
    """
    global _is_taught
    if _is_taught:
        return

    def value(leaf: Any, cause: str) -> Any:
        return read(leaf, cause) if type(leaf) is kind else leaf

    for name, modules in _OF_VALUES:
        _replace(name, modules, _of_values(getattr(modules[0], name), name, value))
    callback = "make_array_from_callback"
    _replace(callback, (_array, jax), _of_callback(_array.make_array_from_callback, value))
    for name, module in _OF_CONSTANTS:
        _replace(name, (module,), staging_for_constants(name.strip("_"))(getattr(module, name)))
    _teach_traces(value)
    read_as_constants.add(kind)
    _is_taught = True


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


def _of_callback(function: Callable[..., Any], value: Read) -> Callable[..., Any]:
    @functools.wraps(function)
    def with_values(shape: Any, sharding: Any, callback: Any, *args: Any, **kwargs: Any) -> Any:
        outer = current_trace()

        def data(index: Any) -> Any:
            with set_current_trace(outer):
                return value(callback(index), "make_array_from_callback")

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
