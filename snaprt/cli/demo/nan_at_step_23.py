"""Train a small network with plain `jax.jit`: its loss becomes NaN.

It tells ten kinds of signals from each other. One of the signals is flat.
"""

import jax
import jax.numpy as jnp
import numpy as np


def normalized(signals: jax.Array) -> jax.Array:
    """Give each signal of (batch, 64) zero mean and unit variance."""
    centered = signals - signals.mean(axis=1, keepdims=True)
    return centered / signals.std(axis=1, keepdims=True)


def loss_of(weights: dict[str, jax.Array], signals: jax.Array, kinds: jax.Array) -> jax.Array:
    """Return the cross-entropy of the kinds (batch,), a scalar."""
    hidden = jax.nn.relu(normalized(signals) @ weights["hidden"] + weights["bias"])
    scores = jax.nn.log_softmax(hidden @ weights["out"])
    return -jnp.take_along_axis(scores, kinds[:, None], axis=1).mean()


@jax.jit
def train_step(
    weights: dict[str, jax.Array], signals: jax.Array, kinds: jax.Array
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Return the weights after one step of gradient descent, and the loss before it."""
    loss, slopes = jax.value_and_grad(loss_of)(weights, signals, kinds)
    return jax.tree.map(lambda w, s: w - 0.1 * s, weights, slopes), loss


random = np.random.default_rng(0)
patterns = random.normal(size=(10, 64))
kinds = random.integers(10, size=27 * 64)
signals = patterns[kinds] + random.normal(size=(27 * 64, 64))
signals[1500] = 0  # its sensor was off
weights = {
    "hidden": jnp.asarray(random.normal(0, 0.1, (64, 32)), jnp.float32),
    "bias": jnp.zeros(32),
    "out": jnp.asarray(random.normal(0, 0.1, (32, 10)), jnp.float32),
}
for step in range(27):
    batch = slice(64 * step, 64 * (step + 1))
    weights, loss = train_step(weights, signals[batch].astype(np.float32), kinds[batch])
    if step % 6 == 0 or step == 23:
        print(f"step {step:2}  loss {loss:.3f}")
