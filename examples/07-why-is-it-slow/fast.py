"""The same training, one graph per step: no branch on a value, and one shape."""

import jax
import jax.numpy as jnp
import numpy as np

import snaprt

numbers = np.random.default_rng(0)
inputs = numbers.standard_normal((330, 16)).astype(np.float32)
targets = inputs @ numbers.standard_normal((16, 1)).astype(np.float32)


def loss_of(weights, x, y):
    return jnp.mean((x @ weights - y) ** 2)


def log(epoch, loss):
    print(f"epoch {epoch}: first loss {loss:.4f}")


def train(epochs=3, batch_size=64):
    weights = jnp.zeros((16, 1))
    rate = 0.1
    for epoch in range(epochs):
        for start in range(0, len(inputs) - batch_size + 1, batch_size):  # only full batches
            x = jnp.asarray(inputs[start : start + batch_size])
            y = jnp.asarray(targets[start : start + batch_size])
            loss, gradient = jax.value_and_grad(loss_of)(weights, x, y)
            gradient = gradient / jnp.maximum(jnp.linalg.norm(gradient), 1.0)  # no branch
            weights = weights - rate * gradient
            if start == 0:
                snaprt.add_step_closure(log, args=(epoch, loss))  # after the step
            snaprt.mark_step()


with snaprt.lazy():
    train()
