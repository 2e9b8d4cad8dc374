"""Memory of NumPy's that JAX would share: whoever computes later must not see what is written then.

Plain JAX lowers or runs an operation before the user's next line, which may write to the array.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import is_
from typing import Any, Final
from weakref import WeakValueDictionary

import jax
import numpy as np
from jax._src import dispatch as _dispatch
from jax._src import dlpack as _dlpack
from jax._src import tree_util as _tree_util
from jax._src import xla_bridge as _bridge
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.literals import TypedNdArray as _TypedNdArray

from snaprt.jaxapi.settings import default_device
from snaprt.jaxapi.tracing.arrays import ArrayImpl, copy_array
from snaprt.jaxapi.tracing.traces import current_trace, once

#: XLA on the CPU takes memory that begins at a multiple of this as it is.
_ALIGNMENT = 64


def own(value: np.ndarray) -> np.ndarray:
    """Return a copy of an array of the host, of the same type to JAX."""
    copy = np.array(value)
    return _TypedNdArray(copy, value.aval) if type(value) is _TypedNdArray else copy


def own_arguments(
    info: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with copies of NumPy arrays, which XLA may read after it.

    Args:
        info: What JAX knows of the jit; None where there are no static arguments.
        args: The arguments by position.
        kwargs: The others.
    """
    return with_leaves(info, args, kwargs, _owned)


def _owned(leaf: Any) -> Any:
    # A subclass stays one: JAX refuses arrays with a mask.
    return np.array(leaf, subok=True) if isinstance(leaf, np.ndarray) else leaf


def with_leaves(
    info: Any, args: tuple[Any, ...], kwargs: dict[str, Any], replace: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with other leaves.

    Args:
        info: What JAX knows of the jit, whose static arguments stay as they are; None without any.
        args: The arguments by position.
        kwargs: The others.
        replace: Returns what stands in the place of a leaf. An argument of which that is each leaf
            itself stays the same object.
    """
    last = len(args)  # -1 is the last one
    numbers = {n + last if n < 0 else n for n in getattr(info, "static_argnums", ())}
    names = getattr(info, "static_argnames", ())

    def changed(argument: Any) -> Any:
        if type(argument) is ArrayImpl:
            return argument
        leaves, structure = _tree_util.tracing_registry.flatten(argument)
        replaced = list(map(replace, leaves))
        return argument if all(map(is_, leaves, replaced)) else structure.unflatten(replaced)

    return (
        tuple(
            [value if number in numbers else changed(value) for number, value in enumerate(args)]
        ),
        {name: value if name in names else changed(value) for name, value in kwargs.items()},
    )


@once
def own_constants() -> None:
    """Let what is traced hold copies of the NumPy arrays that it closes over.

    Checked with jax 0.10.2 and 0.12.0: all of them come by this method, those without dimensions,
    which become literals, too. What it gets of one array is one constant, by its identity.
    """
    staging: Any = _partial_eval.DynamicJaxprTrace
    new_const = staging.new_const

    def new_constant(trace: Any, constant: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(constant, np.ndarray):
            constant = _shared_copy(constant)
        return new_const(trace, constant, *args, **kwargs)

    staging.new_const = staging.pure = staging.lift = new_constant


#: The copies that are alive, by how they lie in memory, and by how their originals do.
_copies: Final[WeakValueDictionary[Any, np.ndarray]] = WeakValueDictionary()


def _shared_copy(value: np.ndarray) -> np.ndarray:
    """Return a copy of an array of the host, the same one until somebody writes to the array."""

    def layout(array: np.ndarray) -> Any:
        aval = getattr(array, "aval", None)  # of JAX's own, with the mesh that it was made under
        return (type(array), aval, array.dtype, array.ctypes.data, array.shape, array.strides)

    original = layout(value)
    copy = _copies.get(original)
    if copy is None or not (copy is value or _has_same_bytes(copy, value)):
        copy = own(value)
        _copies[original] = _copies[layout(copy)] = copy
    return copy


def _has_same_bytes(one: np.ndarray, other: np.ndarray) -> bool:
    if not one.dtype.itemsize:
        return True
    one, other = (np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in (one, other))
    return np.array_equal(one, other)


@once
def own_what_is_put() -> None:
    """Let `jax.device_put` copy NumPy arrays whose memory a CPU device would share.

    Checked with jax 0.10.2 and 0.12.0: it comes by this function, traced or not.
    """
    put: Any = _dispatch._batched_device_put_impl

    @functools.wraps(put)
    def put_copies(*values: Any, devices: Any, **params: Any) -> Any:
        copied = map(_unshared, values, devices)
        return put(*copied, devices=devices, **params)

    _dispatch._batched_device_put_impl = put_copies


def _unshared(value: Any, place: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    place = getattr(place, "sharding", place)  # of a `Format`
    devices = getattr(place, "device_set", (place or default_device(),))
    is_whole = len(devices) == 1  # a part of an array begins elsewhere
    if is_whole and value.ctypes.data % _ALIGNMENT:
        return value
    first = next(iter(devices), None)
    platform = first or _bridge.get_backend()
    return own(value) if getattr(platform, "platform", platform) == "cpu" else value


@once
def own_what_is_exchanged(kind: Any) -> None:
    """Let `from_dlpack` copy memory of the host, unless told not to, under a trace of ``kind``."""
    original = _dlpack.from_dlpack

    @functools.wraps(original)
    def from_dlpack(external_array: Any, device: Any = None, copy: bool | None = None) -> Any:
        array = original(external_array, device, copy)
        if copy is False or isinstance(external_array, jax.Array):
            return array
        is_lazy = type(current_trace()) is kind
        # JAX 0.10.2 and 0.12.0 share memory even if asked for a copy.
        if not is_lazy or array.platform() != "cpu":
            return array
        return copy_array(array).block_until_ready()

    for module in (_dlpack, jax.dlpack):
        module.from_dlpack = from_dlpack  # type: ignore[attr-defined]


def owning(callback: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function whose NumPy results are copies."""

    def called(index: Any) -> Any:
        value = callback(index)
        return own(value) if isinstance(value, np.ndarray) else value

    return called
