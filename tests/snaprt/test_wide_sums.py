"""`jaxapi.adding_widely`: gradients of 16 bits are added up in 32."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from snaprt import jaxapi

ONES = jnp.ones((8, 32, 16, 16), jnp.bfloat16)
COUNT = ONES.size / ONES.shape[1]


def _add(bias: jax.Array) -> jax.Array:
    return ONES * 0 + bias[:, None, None]


WAYS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "plainly": _add,
    "in a jit": jax.jit(_add),
    "in a loop": lambda bias: jax.lax.scan(lambda c, _: (_add(bias), None), ONES, None, 1)[0],
    "in a branch": lambda bias: jax.lax.cond(bias[0] > 9, lambda b: ONES, _add, bias),
    "checkpointed": jax.checkpoint(_add),
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("way", WAYS)
def test_what_was_broadcast_has_the_whole_gradient(way: str, dtype: Any) -> None:
    bias = jnp.zeros(32, jnp.bfloat16)
    result, pull_back = jax.vjp(lambda b: WAYS[way](b.astype(jnp.bfloat16)), bias.astype(dtype))
    (gradient,) = jax.jit(jaxapi.adding_widely(pull_back))(jnp.ones_like(result))
    assert gradient.dtype == dtype
    assert set(gradient.tolist()) == {COUNT}


def test_what_adds_up_nothing_narrow_is_left_as_it_is() -> None:
    def function(x: jax.Array) -> dict[str, jax.Array]:
        return {"sum": jax.jit(lambda x: x.sum(0))(x)}

    before = jax.make_jaxpr(function)(jnp.ones((2, 3)))
    after = jax.make_jaxpr(jaxapi.adding_widely(function))(jnp.ones((2, 3)))
    assert str(after) == str(before)
