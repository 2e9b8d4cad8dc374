"""Abstract values, and JAX's own dtypes; must not know arrays or traces."""

from __future__ import annotations

from typing import Any

import jax
from jax._src import core as _core
from jax._src.random import prng as _prng

ShapedArray = _core.ShapedArray


def is_array_aval(aval: Any) -> bool:
    """Return whether ``aval`` describes an ordinary array (no reference, no token)."""
    return isinstance(aval, ShapedArray)


def has_no_values(aval: Any) -> bool:
    """Return whether ``aval`` is of the derivatives of integers, kept by JAX as numpy arrays."""
    return bool(aval.dtype == jax.dtypes.float0)


def is_placed_aval(aval: Any) -> bool:
    """Return whether the type of an array names the axes of a mesh."""
    mesh = getattr(aval.sharding, "mesh", None)
    kind = getattr(aval, "manual_axis_type", None)
    varies = getattr(aval, "vma", None) or getattr(kind, "varying", None)
    return bool(varies) or (mesh is not None and not mesh.empty)


def is_in_default_memory(aval: Any) -> bool:
    """Return whether an array is not in the memory of the host, beside its device's."""
    return bool(aval.memory_space == jax.memory.Space.Device)


def is_extended_dtype(value: Any) -> bool:
    """Return whether ``value`` is a dtype of JAX's own, as that of PRNG keys."""
    return isinstance(value, _prng.KeyTy)


def key_type_text(dtype: Any) -> str:
    """Return what tells a type of PRNG keys from others, those of the user's own included.

    Two implementations may have one tag, which is all that JAX prints.
    """
    return str([(name, _part_text(part)) for name, part in dtype._impl._asdict().items()])


def _part_text(part: Any) -> str:
    return f"{part.__module__}.{part.__qualname__}" if callable(part) else repr(part)


def own_key_type(value: Any) -> str | None:
    """Return the name of a type of PRNG keys, or of what implements one, of JAX's; else None.

    It stands for the functions that the implementation is a tuple of; a user's might stand for
    others.
    """
    implementation = getattr(value, "_impl", value)
    functions = [part for part in implementation if callable(part)]
    is_own = all(function.__module__.partition(".")[0] == "jax" for function in functions)
    return implementation.name if is_own else None


def is_scalar_type(value: Any) -> bool:
    """Return whether ``value`` is one of JAX's own scalar types, such as ``jax.numpy.float32``."""
    return isinstance(value, type(jax.numpy.float32))


def dtype_of_name(name: str) -> Any:
    """Return the dtype, of JAX's own too, that ``str`` calls ``name``.

    Raises:
        ValueError: There is none.
    """
    for implementation in _prng.prngs.values():
        kind = _prng.KeyTy(implementation)
        if str(kind) == name:
            return kind
    try:
        return jax.numpy.dtype(name)
    except TypeError as error:
        raise ValueError(f"no dtype is called {name}") from error
