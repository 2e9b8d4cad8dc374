"""Train a small regression under plain `jax.jit`; a batch with a zero in it produces a NaN."""

import jax
import jax.numpy as jnp
import numpy as np


def loss_of(weights, x, y):
    hidden = jnp.tanh(x @ weights["hidden"])
    scale = jnp.log(jnp.abs(x).max(axis=1, keepdims=True))  # log 0 for a row of zeros
    return jnp.mean((hidden @ weights["out"] * scale - y) ** 2)


@jax.jit
def train_step(weights, x, y):
    loss, slopes = jax.value_and_grad(loss_of)(weights, x, y)
    return jax.tree.map(lambda w, s: w - 0.1 * s, weights, slopes), loss


random = np.random.default_rng(0)
weights = {
    "hidden": jnp.asarray(random.normal(size=(8, 16)), jnp.float32),
    "out": jnp.asarray(random.normal(size=(16, 1)), jnp.float32),
}
for step in range(100):
    x = random.normal(size=(32, 8)).astype(np.float32)
    if step == 60:
        x[7] = 0
    weights, loss = train_step(weights, x, x.sum(axis=1, keepdims=True))
print(f"loss {loss}")
