"""Lets a program say that a NaN or an infinity is among its results; knows no recorder."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

FLAG_NAME = "snaprt_not_finite"
"""The name of the result that says so: the last one, a bool scalar."""


def watched(function: Callable[..., Sequence[Any]]) -> Callable[..., list[Any]]:
    """Return ``function`` with one more result: whether another one has a NaN or an infinity.

    Args:
        function: Takes and returns flat arrays; to be compiled.
    """

    @functools.wraps(function)
    def with_flag(*arguments: Any) -> list[Any]:
        results = list(function(*arguments))
        return [*results, flag_of(results)]

    return with_flag


def flag_of(results: Sequence[Any]) -> jax.Array:
    """Return a bool scalar: whether one of the arrays has a NaN or an infinity; to be traced."""
    # The barrier keeps XLA from computing a result a second time inside the test, and so from
    # computing it in another way: what is tested is what is handed out.
    inexact = [one for one in results if jnp.issubdtype(one.dtype, jnp.inexact)]
    tested = [_is_finite(one) for one in jax.lax.optimization_barrier(inexact)]
    return ~functools.reduce(jnp.logical_and, tested, jnp.ones((), jnp.bool_))


def _is_finite(array: jax.Array) -> jax.Array:
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return _is_finite(array.real) & _is_finite(array.imag)
    if jnp.finfo(array.dtype).bits < 16:  # these cannot all say that a sum is not finite
        array = array.astype(jnp.float32)
    # Only what is not finite has another difference from itself than zero. A sum runs as fast as
    # memory allows, and NaN stays in it; not so in a maximum, from which XLA's CPU code loses it.
    return jnp.sum(array - array) == 0
