"""A training loop with common mistakes that make a lazy program slow."""

import jax
import jax.numpy as jnp
import numpy as np

import snaprt

numbers = np.random.default_rng(0)
inputs = numbers.standard_normal((330, 16)).astype(np.float32)
targets = inputs @ numbers.standard_normal((16, 1)).astype(np.float32)


def loss_of(weights, x, y):
    return jnp.mean((x @ weights - y) ** 2)


def train(epochs=3, batch_size=64):
    weights = jnp.zeros((16, 1))
    rate = 0.1
    for epoch in range(epochs):
        for start in range(0, len(inputs), batch_size):  # the last batch is smaller
            x = jnp.asarray(inputs[start : start + batch_size])
            y = jnp.asarray(targets[start : start + batch_size])
            loss, gradient = jax.value_and_grad(loss_of)(weights, x, y)
            if jnp.linalg.norm(gradient) > 1.0:  # a branch on a value
                gradient = gradient / jnp.linalg.norm(gradient)
            weights = weights - rate * gradient
            snaprt.mark_step()
        print(f"epoch {epoch}: loss {loss:.4f}")


with snaprt.lazy():
    train()
