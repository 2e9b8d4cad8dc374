"""Tells arrays and host scalars apart, describes and copies them; must not know programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import layout as _layout
from jax._src.interpreters import pxla as _pxla
from jax._src.lib import xla_client as _xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax._src.random import prng as _prng
from jaxlib import _jax as _jaxlib  # pyright: ignore[reportAttributeAccessIssue]

from snaprt.jaxapi.devices import Device
from snaprt.jaxapi.meshes import under_mesh
from snaprt.jaxapi.settings import x64
from snaprt.jaxapi.tracing.abstract_values import ShapedArray
from snaprt.jaxapi.tracing.traces import evaluating

ArrayImpl: Any = _jaxlib.ArrayImpl

#: The types of arrays that hold their values: ordinary ones, and those of PRNG keys.
CONCRETE_ARRAYS = frozenset({ArrayImpl, _prng.PRNGKeyArray})
typeof = jax.typeof


def host_literal(value: Any) -> bool:
    """Return whether ``value`` is a scalar that lives on the host (Python or numpy)."""
    return not isinstance(value, jax.Array) and np.ndim(value) == 0


def literal_bytes(value: Any) -> bytes:
    """Return the bits of a host scalar: equal for equal NaNs, different for 0.0 and -0.0."""
    return np.asarray(value).tobytes()


def describe_input(array: jax.Array) -> tuple[Any, ...]:
    """Return what a compiled program depends on in an input beside its values."""
    return typeof(array), array.sharding, array.committed


def shapes_of(arrays: Sequence[jax.Array]) -> list[jax.ShapeDtypeStruct]:
    """Return what lowering needs of ``arrays``, without the arrays."""
    return [
        jax.ShapeDtypeStruct(
            array.shape,
            array.dtype,
            sharding=array.sharding if array.committed else None,
            weak_type=getattr(typeof(array), "weak_type", False),
        )
        for array in arrays
    ]


def to_device(value: Any) -> jax.Array:
    """Copy a host value to the default device, keeping its dtype and weak type.

    The copy is committed to no mesh, for the program may want it to lie otherwise.
    """
    aval = typeof(value)
    with evaluating(), under_mesh(None):
        array = jax.numpy.array(np.asarray(value), dtype=aval.dtype, copy=True)
        if getattr(aval, "weak_type", False):
            return jax.lax.convert_element_type_p.bind(
                array, new_dtype=aval.dtype, weak_type=True, sharding=None
            )
        return array


def before_deleted(ask: Callable[[Any], None]) -> None:
    """Call ``ask`` with each array that is deleted, before that (JAX 0.10.2 and 0.12.0)."""
    if ask in _asked_before_deleted:
        return
    _asked_before_deleted.append(ask)
    if len(_asked_before_deleted) > 1:
        return
    for kind in CONCRETE_ARRAYS:
        _ask_before(kind)


def _ask_before(kind: Any) -> None:
    delete_array = kind.delete

    def delete(array: Any) -> None:
        for one in _asked_before_deleted:
            one(array)
        delete_array(array)

    delete.__doc__ = delete_array.__doc__
    kind.delete = delete


_asked_before_deleted: list[Callable[[Any], None]] = []


def refuse_deleted(array: Any) -> None:
    """Raise the `RuntimeError` of eager JAX if ``array`` was deleted (JAX 0.10.2 and 0.12.0)."""
    getattr(array, "_base_array", array)._check_if_deleted()


def copy_array(array: jax.Array) -> jax.Array:
    """Return a copy in memory of its own, where ``array`` lies; compiles nothing."""
    with evaluating():
        where = array.sharding if array.committed else None
        return jax.device_put(array, where, may_alias=False)


def with_default_layouts(arrays: Sequence[jax.Array]) -> list[jax.Array] | None:
    """Return the arrays, those laid out otherwise than the compiler lays out arguments as copies.

    Returns:
        None where no array is laid out otherwise.
    """
    others = [place for place, array in enumerate(arrays) if _is_laid_out_otherwise(array)]
    if not others:
        return None
    found = list(arrays)
    with evaluating():
        for place in others:
            found[place] = jax.device_put(found[place], _default_format(found[place]))
    return found


def _is_laid_out_otherwise(array: Any) -> bool:
    if type(array) is not ArrayImpl:
        return False
    return not _pxla.is_default_layout(array.format.layout, array.sharding, array.aval)


def _default_format(array: Any) -> Any:
    device = next(iter(array.sharding.device_set))
    shape = array.sharding.shard_shape(array.shape)
    layout = device.client.get_default_layout(array.dtype, shape, device)
    return _layout.Format(_layout.Layout.from_pjrt_layout(layout), array.sharding)


def put_on(device: Device, value: np.ndarray) -> jax.Array:
    """Return an array on a device of any client; it may share the memory of ``value``.

    Checked with JAX 0.10.2 and 0.12.0.
    """
    with x64(True):  # or 64-bit values would be narrowed
        array: jax.Array = _xla_client.batched_device_put(
            ShapedArray(value.shape, value.dtype),
            jax.sharding.SingleDeviceSharding(device),
            [value],
            [device],
        )
    return array
