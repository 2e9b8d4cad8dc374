"""Train a small network on handwritten digits with plain `jax.jit`: its loss becomes NaN."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits


def normalized(pixels: jax.Array) -> jax.Array:
    """Give each image of (batch, 64) zero mean and unit variance."""
    centered = pixels - pixels.mean(axis=1, keepdims=True)
    return centered / pixels.std(axis=1, keepdims=True)


def loss_of(weights: dict[str, jax.Array], pixels: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the cross-entropy of the labels (batch,), a scalar."""
    hidden = jax.nn.relu(normalized(pixels) @ weights["hidden"] + weights["bias"])
    scores = jax.nn.log_softmax(hidden @ weights["out"])
    return -jnp.take_along_axis(scores, labels[:, None], axis=1).mean()


@jax.jit
def train_step(
    weights: dict[str, jax.Array], pixels: jax.Array, labels: jax.Array
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Return the weights after one step of gradient descent, and the loss before it."""
    loss, slopes = jax.value_and_grad(loss_of)(weights, pixels, labels)
    return jax.tree.map(lambda w, s: w - 0.1 * s, weights, slopes), loss


random = np.random.default_rng(0)
images, digits = load_digits(return_X_y=True)
images[1500] = 0  # a blank scan
weights = {
    "hidden": jnp.asarray(random.normal(0, 0.1, (64, 32)), jnp.float32),
    "bias": jnp.zeros(32),
    "out": jnp.asarray(random.normal(0, 0.1, (32, 10)), jnp.float32),
}
for step in range(27):
    batch = slice(64 * step, 64 * (step + 1))
    weights, loss = train_step(weights, images[batch].astype(np.float32), digits[batch])
    if step % 6 == 0 or step == 23:
        print(f"step {step:2}  loss {loss:.3f}")
