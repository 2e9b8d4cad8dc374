"""Trains a small network without jit, on one row of a table after another, and reads each loss."""

import jax
import jax.numpy as jnp

table = jnp.sin(jnp.arange(200 * 8.0)).reshape(200, 8)
weights = [jnp.ones((8, 32)) / 9, jnp.ones((32, 8)) / 7]


def loss_of(weights, x):
    hidden = jax.nn.softmax(jnp.tanh(x @ weights[0]))
    return jnp.mean((hidden @ weights[1] - x) ** 2)


total = 0.0
for i in range(len(table)):
    loss, gradients = jax.value_and_grad(loss_of)(weights, table[i])
    weights = [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]
    total += float(loss)
print(f"{total:.2f}")
