"""Train on the devices of two processes. One of them computes wrong, once."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

jax.distributed.initialize()
calls = 0


def chip(hidden, device):
    """Return what the chip makes of an array: the same, but for one bit on device 3, once."""
    global calls
    hidden = np.array(hidden)
    if int(device) == 3:
        calls += 1
        if calls == 7:  # executions 0 to 4 call it six times, for 0 runs twice
            hidden.view(np.uint32)[0, 0] ^= 1 << 20
    return hidden


def of_one_device(weights, inputs):
    hidden = jnp.tanh(inputs @ weights)
    shape = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype)
    hidden = jax.pure_callback(chip, shape, hidden, jax.lax.axis_index("data"))
    gradient = jax.lax.psum(inputs.T @ hidden, "data")
    return weights - 0.125 * gradient, jnp.mean(hidden**2)[None]


mesh = Mesh(np.array(jax.devices()), ("data",))
train_step = jax.jit(
    jax.shard_map(of_one_device, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P("data")))
)


def spread(array, spec):
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


weights = spread(np.ones((8, 8), np.float32), P())
inputs = spread(np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32), P("data"))
for _ in range(12):
    weights, losses = train_step(weights, inputs)
jax.block_until_ready(weights)  # Python must not end while a callback runs
print("trained")
