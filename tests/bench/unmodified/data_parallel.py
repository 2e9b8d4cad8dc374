"""A data-parallel step on eight devices; the losses are looked at after the last one."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
over_data, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
random = np.random.default_rng(0)
optimizer = optax.adam(1e-2)
params = {
    f"layer{n}": jnp.asarray(random.normal(size=(64, 64)).astype(np.float32) / 8) for n in range(3)
}
params = jax.device_put(params, everywhere)
state = jax.device_put(optimizer.init(params), everywhere)


@jax.jit
def step(params, state, x, y):
    def loss_of(params):
        h = x
        for weights in params.values():
            h = jnp.tanh(h @ weights)
        return jnp.mean((h - y) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, state = optimizer.update(grads, state)
    return optax.apply_updates(params, updates), state, loss


losses = []
for _ in range(150):
    x = random.normal(size=(256, 64)).astype(np.float32)
    x, y = jax.device_put((x, np.tanh(x)), over_data)
    params, state, loss = step(params, state, x, y)
    losses.append(loss)
print(f"{losses[0]:.2f} {losses[-1]:.2f}")
