"""Feeds a training loop from a grain pipeline that shuffles, batches and prefetches in threads."""

import grain
import jax
import jax.numpy as jnp
import numpy as np

data = np.random.default_rng(1).normal(size=(96, 4)).astype(np.float32)
weights = jnp.array([1.0, -2.0, 0.5, 0.0])


def with_target(row):
    return {"row": row, "target": row @ np.array([1.0, -2.0, 0.5, 0.0], np.float32)}


dataset = (
    grain.MapDataset.source(data)
    .shuffle(seed=0)
    .map(with_target)
    .to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4))
    .batch(16)
    .map(lambda batch: jax.tree.map(jnp.asarray, batch))
)


@jax.jit
def step(weights, batch):
    def loss_of(weights):
        return jnp.mean((batch["row"] @ weights - batch["target"]) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(weights)
    return weights - 0.1 * gradient, loss


weights = jnp.zeros(4)
iterator = iter(dataset)
for number, batch in enumerate(iterator):
    weights, loss = step(weights, batch)
    print(number, batch["row"].shape, f"{loss:.4f}")
print(np.round(weights, 2))

stored = grain.MapDataset.range(10).map(lambda i: jnp.float32(i) * 2).batch(5)
print([np.asarray(part).tolist() for part in stored])
