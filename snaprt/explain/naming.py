"""What the user's program calls an array: looks through the variables of the frames that run.

It knows frames and pytrees, nothing of graphs.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Final

import jax
import numpy as np

from snaprt import jaxapi
from snaprt.runtime.graph_breaks import is_installed
from snaprt.trace.array import LazyArray

#: So many arrays are looked at at most.
_MOST_LEAVES: Final = 50_000

_NO_CONTAINERS: Final = (
    *(types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, str, bytes),
    *(int, float, complex, bool, type(None), range),
)


def name_of(array: jax.Array) -> str | None:
    """Return how the user's program calls an array, such as ``batch['x']``; ``None`` if unknown.

    The innermost frame that holds it counts. What no frame holds may have been made of a numpy
    array: it has the name of the only one of its shape and dtype in the innermost frame with any.
    """
    left = _MOST_LEAVES
    alike: dict[int, str] = {}
    for file, variables in jaxapi.user_variables():
        if is_installed(file):
            continue
        has_alike = bool(alike)
        for name, leaf in _leaves(variables):
            left -= 1
            if left < 0:
                break
            if leaf is array or (type(leaf) is LazyArray and leaf._value is array):
                return name
            if not has_alike and isinstance(leaf, np.ndarray) and _is_alike(leaf, array):
                alike.setdefault(id(leaf), name)
    return next(iter(alike.values())) if len(alike) == 1 else None


def _is_alike(leaf: np.ndarray, array: jax.Array) -> bool:
    return leaf.shape == array.shape and jax.dtypes.canonicalize_dtype(leaf.dtype) == array.dtype


def _leaves(variables: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what variables hold: arrays, then those in pytrees and in attributes of objects."""
    containers = {}
    for name, value in variables.items():
        if not name.isidentifier() or isinstance(value, _NO_CONTAINERS):
            continue
        if isinstance(value, (jax.Array, np.ndarray)):
            yield name, value
        else:
            containers[name] = value
    for name, value in containers.items():
        yield from _within(name, value)
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            for attribute, held in list(attributes.items()):
                if not isinstance(held, _NO_CONTAINERS):
                    yield from _within(f"{name}.{attribute}", held)


def _within(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (jax.Array, np.ndarray)):
        yield name, value
        return
    try:
        leaves, _ = jax.tree_util.tree_flatten_with_path(value)
    except Exception:  # keys that cannot be sorted, a node of the user's that fails
        return
    for path, leaf in leaves:
        if path:
            yield f"{name}{jax.tree_util.keystr(path)}", leaf
