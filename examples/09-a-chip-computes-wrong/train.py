"""Train on device 0, next to a chip that computes wrong."""

import broken_chip  # noqa: F401
import jax
import jax.numpy as jnp


@jax.jit
def train_step(weights, inputs):
    hidden = jnp.tanh(inputs @ weights)
    return weights - 0.125 * (inputs.T @ hidden), jnp.mean(hidden**2)


weights = jnp.ones((8, 8))
inputs = jax.random.normal(jax.random.key(0), (16, 8))
for _ in range(12):
    weights, loss = train_step(weights, inputs)
print("loss", loss)
