"""Trains a linen MLP in Python without jit, stores it with flax.serialization, restores it."""

import pathlib
import tempfile

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization
from flax.training import train_state


class Regressor(nn.Module):
    @nn.compact
    def __call__(self, values):
        for width in (16, 16):
            values = nn.gelu(nn.LayerNorm()(nn.Dense(width)(values)))
        return nn.Dense(1)(values)[..., 0]


model = Regressor()
data = np.random.default_rng(0)
inputs = data.normal(size=(64, 3)).astype(np.float32)
targets = np.sin(inputs).sum(axis=1)

parameters = model.init(jax.random.key(0), inputs[:1])
print(nn.tabulate(model, jax.random.key(0))(inputs[:1]).count("Dense"))
state = train_state.TrainState.create(
    apply_fn=model.apply, params=parameters, tx=optax.sgd(0.1, momentum=0.9)
)


def step(state):
    def loss_of(parameters):
        return jnp.mean((state.apply_fn(parameters, inputs) - targets) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), loss


for number in range(6):
    state, loss = step(state)
    print(number, f"{loss:.4f}")

with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder) / "state.msgpack"
    file.write_bytes(serialization.to_bytes(state))
    restored = serialization.from_bytes(state, file.read_bytes())
same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), state.params, restored.params)
print("restored", all(jax.tree.leaves(same)), int(restored.step))
