"""Checks shapes of arrays at run time with jaxtyping, and dispatches on types with the library."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PyTree


@functools.singledispatch
def describe(value):
    return "other"


@describe.register
def _(value: jax.Array):
    return f"array {value.dtype}{list(value.shape)}"


@describe.register
def _(value: np.ndarray):
    return f"numpy {value.dtype}"


values = jnp.arange(6.0).reshape(2, 3) * 2
key = jax.random.key(0)
print(isinstance(values, Float[Array, "2 3"]), isinstance(values, Int[Array, "..."]))
print(isinstance(values, Float[jax.Array, "a a"]), isinstance(key, Key[Array, ""]))
print(isinstance({"x": values}, PyTree[Float[Array, "..."]]))
print(describe(values), describe(np.ones(2)), describe(3), describe(values > 1))
print(issubclass(type(values), jax.Array), isinstance(values, jax.core.Tracer))


def leaf_kind(value):
    match value:
        case jax.core.Tracer():
            return "tracer"
        case jax.Array():
            return "array"
        case _:
            return "other"


print([leaf_kind(leaf) for leaf in jax.tree.leaves((values, 1, key, values.sum()))])
print(jax.jit(lambda x: print("inside", leaf_kind(x)) or x + 1)(values).sum())
