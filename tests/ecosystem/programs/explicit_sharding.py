"""Trains on eight devices with explicit sharding: the types say where everything lies."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
jax.set_mesh(mesh)


def put(value, *spec):
    return jax.device_put(value, NamedSharding(mesh, P(*spec)))


random = np.random.default_rng(0)
parameters = {
    "up": put(random.normal(size=(8, 16)).astype(np.float32) / 3, None, "model"),
    "down": put(random.normal(size=(16, 4)).astype(np.float32) / 4, "model", None),
}
inputs = put(random.normal(size=(16, 8)).astype(np.float32), "data", None)
targets = put(random.normal(size=(16, 4)).astype(np.float32), "data", None)


def predict(parameters, inputs):
    hidden = jax.nn.relu(inputs @ parameters["up"])
    return jnp.einsum("bh,ho->bo", hidden, parameters["down"], out_sharding=P("data", None))


@jax.jit
def step(parameters):
    def loss_of(parameters):
        return jnp.mean((predict(parameters, inputs) - targets) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(parameters)
    return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients), loss


for number in range(5):
    parameters, loss = step(parameters)
    print(number, f"{loss:.4f}")
print({name: str(jax.typeof(value)) for name, value in parameters.items()})
print(jax.typeof(predict(parameters, inputs)), len(parameters["up"].addressable_shards))
