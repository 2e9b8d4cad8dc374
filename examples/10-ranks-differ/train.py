"""Train on the devices of all processes. Rank 1 was started with another learning rate."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

jax.distributed.initialize()
mesh = Mesh(np.array(jax.devices()), ("data",))
sharding = NamedSharding(mesh, PartitionSpec("data"))
learning_rate = 0.02 if jax.process_index() == 1 else 0.01


@jax.jit
def train_step(weights, batch):
    loss, slopes = jax.value_and_grad(lambda w: jnp.mean((batch @ w - 1) ** 2))(weights)
    return weights - learning_rate * slopes, loss


data = np.random.default_rng(0).normal(size=(jax.process_count() * 4, 8)).astype(np.float32)
batch = jax.make_array_from_callback(data.shape, sharding, lambda at: data[at])
weights = jax.device_put(np.zeros(8, np.float32), NamedSharding(mesh, PartitionSpec()))
for _ in range(10):
    weights, loss = train_step(weights, batch)
print(f"loss {float(loss):.4f}, first weight {float(weights[0]):.4f}")
