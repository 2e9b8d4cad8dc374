"""Trains a linear model on eight devices with jit and automatic sharding, and a shard_map mean."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("data",))
over_data, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
random = np.random.default_rng(0)
inputs = jax.device_put(random.normal(size=(64, 5)).astype(np.float32), over_data)
targets = jax.device_put(np.asarray(inputs).sum(1), over_data)
parameters = jax.device_put({"weights": jnp.zeros(5), "offset": jnp.zeros(())}, everywhere)
optimizer = optax.adam(0.1)
state = jax.device_put(optimizer.init(parameters), everywhere)


@partial(jax.jit, out_shardings=(everywhere, everywhere, everywhere))
def step(parameters, state, inputs, targets):
    def loss_of(parameters):
        predicted = inputs @ parameters["weights"] + parameters["offset"]
        return jnp.mean((predicted - targets) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(parameters)
    updates, state = optimizer.update(gradients, state)
    return optax.apply_updates(parameters, updates), state, loss


@jax.jit
@partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P())
def mean_over_devices(part):
    return jax.lax.pmean(part.mean(0), "data")


for number in range(6):
    parameters, state, loss = step(parameters, state, inputs, targets)
    print(number, f"{loss:.4f}")
print(np.round(mean_over_devices(inputs), 3))
print(inputs.sharding.spec, len(parameters["weights"].sharding.device_set))
