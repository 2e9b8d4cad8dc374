"""Train on the devices of all processes. The text of step 3 is too long for attention."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

jax.distributed.initialize()
mesh = Mesh(np.array(jax.devices()), ("data",))
sharding = NamedSharding(mesh, PartitionSpec("data"))


def next_batch(step):
    length = 1 << 23 if step == 3 else 1 << 8
    batch = np.full((jax.process_count(), length), step, np.uint8)
    return jax.make_array_from_callback(batch.shape, sharding, lambda at: batch[at])


def loss_of(table, texts):
    hidden = table[texts]
    scores = jnp.einsum("bqd,bkd->bqk", hidden, hidden)  # length x length
    return jnp.mean(jax.nn.softmax(scores) @ hidden)


@jax.jit
def train_step(table, texts):
    loss, slopes = jax.value_and_grad(loss_of)(table, texts)
    return table - 0.1 * slopes, loss


numbers = np.random.default_rng(0).normal(size=(256, 8)).astype(np.float32)
table = jax.device_put(numbers, NamedSharding(mesh, PartitionSpec()))
for step in range(10):
    table, loss = train_step(table, next_batch(step))
    print(f"step {step}: loss {float(loss):.4f}", flush=True)
