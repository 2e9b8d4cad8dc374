"""Train on the devices of all processes. The last batch is smaller, so it needs another program."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import snaprt

jax.distributed.initialize()
mesh = Mesh(np.array(jax.devices()), ("data",))
sharding = NamedSharding(mesh, PartitionSpec("data"))
data = np.random.default_rng(0).normal(size=(36, 8)).astype(np.float32)


@jax.jit
def train_step(weights, batch):
    loss, slopes = jax.value_and_grad(lambda w: jnp.mean((batch @ w - 1) ** 2))(weights)
    return weights - 0.1 * slopes, loss


weights = jax.device_put(np.zeros(8, np.float32), NamedSharding(mesh, PartitionSpec()))
for start in range(0, len(data), 8):
    part = data[start : start + 8]
    batch = jax.make_array_from_callback(part.shape, sharding, lambda at, part=part: part[at])
    weights, loss = train_step(weights, batch)
print(f"loss {float(loss):.4f}")
counter = snaprt.metrics.counter_value
print("from the cache:", counter("PersistentCacheHit") or 0)
print("compiled:", counter("PersistentCacheMiss") or 0)
