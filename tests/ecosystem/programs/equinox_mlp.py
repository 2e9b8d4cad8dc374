"""Trains an equinox MLP with filter_jit, guards it with error_if, stores and loads its leaves."""

import pathlib
import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

key = jax.random.key(5)
model = eqx.nn.MLP(2, 1, width_size=16, depth=2, key=key)
optimizer = optax.adam(1e-2)
state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
inputs = jax.random.normal(jax.random.key(6), (32, 2))
targets = jnp.prod(inputs, axis=1, keepdims=True)


@eqx.filter_value_and_grad
def loss_of(model, inputs, targets):
    return jnp.mean((jax.vmap(model)(inputs) - targets) ** 2)


@eqx.filter_jit
def step(model, state):
    loss, gradients = loss_of(model, inputs, targets)
    updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_inexact_array))
    loss = eqx.error_if(loss, ~jnp.isfinite(loss), "the loss is not finite")
    return eqx.apply_updates(model, updates), state, loss


for number in range(6):
    model, state, loss = step(model, state)
    print(number, f"{loss:.4f}")

checked = eqx.error_if(loss, loss < 0, "a mean of squares is negative")
print("checked", f"{checked:.4f}")
try:
    eqx.error_if(loss, loss > 0, "a positive loss").block_until_ready()
except Exception as error:
    print("refused", "a positive loss" in str(error))

with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder) / "model.eqx"
    eqx.tree_serialise_leaves(file, model)
    loaded = eqx.tree_deserialise_leaves(file, eqx.nn.MLP(2, 1, 16, 2, key=key))
print("loaded", bool(eqx.tree_equal(model, loaded)))
print(eqx.tree_pformat(model.layers[0]))
arrays, static = eqx.partition(model, eqx.is_array)
print("arrays", len(jax.tree.leaves(arrays)), np.asarray(model(jnp.ones(2))).shape)
