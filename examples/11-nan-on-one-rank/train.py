"""Train on the devices of all processes; the data of rank 1 have a row of zeros in step 5."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

jax.distributed.initialize()
mesh = Mesh(np.array(jax.devices()), ("data",))
sharding = NamedSharding(mesh, PartitionSpec("data"))
random = np.random.default_rng(0)


def next_batch(step):
    batch = random.normal(size=(jax.process_count() * 4, 8)).astype(np.float32)
    if step == 5:
        batch[6] = 0
    return jax.make_array_from_callback(batch.shape, sharding, lambda at: batch[at])


def loss_of(weights, batch):
    unit = batch / jnp.linalg.norm(batch, axis=1, keepdims=True)  # 0 / 0 for a row of zeros
    return jnp.mean((unit @ weights - 1) ** 2)


@jax.jit
def train_step(weights, batch):
    loss, slopes = jax.value_and_grad(loss_of)(weights, batch)
    return weights - 0.1 * slopes, loss


weights = jax.device_put(np.zeros(8, np.float32), NamedSharding(mesh, PartitionSpec()))
for step in range(10):
    weights, loss = train_step(weights, next_batch(step))
print(f"loss {loss}")
