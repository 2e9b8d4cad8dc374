"""Training that records step 5 for a closer look, and nothing else."""

import jax
import jax.numpy as jnp

import snaprt

step = 0


def only_step_five(name, device_index, execution_count):
    return "inputs outputs" if step == 5 else ""


snaprt.register_hlo_snapshot_callback(only_step_five)


def loss_of(weights, x):
    return jnp.mean(jnp.tanh(x @ weights) ** 2)


with snaprt.lazy():
    weights = jax.random.normal(jax.random.key(0), (32, 32))
    x = jax.random.normal(jax.random.key(1), (8, 32))
    for step in range(10):  # noqa: B007 - the callback reads it
        loss, gradient = jax.value_and_grad(loss_of)(weights, x)
        weights = weights - 0.5 * gradient
        snaprt.mark_step()
    print(f"loss {float(loss):.4f}")
