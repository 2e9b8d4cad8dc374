"""One step whose last bits depend on how the compiler orders and fuses floating point."""

import jax
import jax.numpy as jnp

import snaprt


def loss_of(weights, x):
    hidden = jnp.exp(x @ weights)
    return jnp.sum(hidden / hidden.sum(1, keepdims=True) * jnp.log(hidden + 1))


with snaprt.lazy():
    weights = jax.random.normal(jax.random.key(0), (64, 64))
    x = jax.random.normal(jax.random.key(1), (16, 64)) * 0.3
    snaprt.mark_step()
    loss, gradient = jax.value_and_grad(loss_of)(weights, x)
    snaprt.mark_step()
    print(f"loss {float(loss):.4f}")
