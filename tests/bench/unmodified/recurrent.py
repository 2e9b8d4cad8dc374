"""A recurrent network of a `lax.scan`, trained with a jitted step."""

import jax
import jax.numpy as jnp
import numpy as np

random = np.random.default_rng(0)
params = {
    name: jnp.asarray(random.normal(size=shape).astype(np.float32)) / 8
    for name, shape in (("in", (8, 64)), ("own", (64, 64)), ("out", (64, 8)))
}


@jax.jit
def step(params, sequences):
    def loss_of(params):
        def cell(h, x):
            h = jnp.tanh(x @ params["in"] + h @ params["own"])
            return h, h @ params["out"]

        first = jnp.zeros((sequences.shape[1], 64))
        _, predicted = jax.lax.scan(cell, first, sequences[:-1])
        return jnp.mean((predicted - sequences[1:]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


for number in range(200):
    start = random.random((1, 32, 8)).astype(np.float32)
    sequences = np.sin(start + 0.2 * np.arange(50, dtype=np.float32)[:, None, None])
    params, loss = step(params, sequences)
    if number % 10 == 9:
        last = float(loss)
print(f"{last:.2f}")
