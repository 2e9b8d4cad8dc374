"""Tells which calls of jitted functions run the same program; must not run any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax._src import array as _array

from snaprt.jaxapi.jit.calls import FlatCall
from snaprt.jaxapi.jit.entry import parse_jit_call
from snaprt.jaxapi.meshes import trace_context


def kind_of_jit_call(info: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return what tells calls of a jitted function that run different programs.

    Returns:
        A key, equal for calls of one kind as long as what stands beside it is alive; the same
        call may have more than one.
    """
    signature, leaves = parse_jit_call(info, args, kwargs)
    parts, alive = _kinds_of(leaves)
    return (signature, parts, trace_context()), alive


def kind_of_flat_call(call: FlatCall) -> tuple[Any, Any]:
    """Return what tells calls of one traced function that run different programs.

    Returns:
        As `kind_of_jit_call`.
    """
    params = call.params
    chosen = (params["in_shardings"], params["out_shardings"], params["donated_invars"])
    parts, alive = _kinds_of(call.args)
    return (parts, chosen, trace_context()), alive


def _kinds_of(leaves: Sequence[Any]) -> tuple[tuple[Any, ...], list[Any]]:
    parts: list[Any] = []
    alive: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, _array.ArrayImpl):
            aval, sharding = leaf.aval, leaf.sharding
            parts += (id(aval), id(sharding), leaf._committed)
            alive += (aval, sharding)
        else:
            parts += (type(leaf), getattr(leaf, "dtype", None), np.shape(leaf))
    return tuple(parts), alive
