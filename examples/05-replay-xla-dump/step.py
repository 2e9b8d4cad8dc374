"""A training step in plain JAX, without snaprt."""

import jax
import jax.numpy as jnp
import numpy as np

random = np.random.default_rng(0)
kernel = random.normal(size=(3, 3, 1, 8)).astype(np.float32) * 0.3
weights = random.normal(size=(512, 10)).astype(np.float32) * 0.05
images = random.normal(size=(16, 8, 8, 1)).astype(np.float32)
labels = random.integers(0, 10, 16)


def loss_of(parameters, images, labels):
    kernel, weights = parameters
    maps = jax.lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    scores = jax.nn.relu(maps).reshape(len(images), -1) @ weights
    return -jnp.mean(jax.nn.log_softmax(scores)[jnp.arange(len(labels)), labels])


@jax.jit
def step(parameters, images, labels):
    loss, gradients = jax.value_and_grad(loss_of)(parameters, images, labels)
    return loss, jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients)


parameters = (kernel, weights)
for _ in range(2):
    loss, parameters = step(parameters, images, labels)
    print(f"loss {float(loss):.4f}")
