"""Trains a haiku LSTM on a sine wave, with transformed state and a key sequence."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax


def forward(sequence):
    core = hk.LSTM(8)
    outputs, _ = hk.dynamic_unroll(core, sequence, core.initial_state(sequence.shape[1]))
    outputs = hk.dropout(hk.next_rng_key(), 0.1, outputs)
    average = hk.ExponentialMovingAverage(0.9)
    average(outputs.mean())
    return hk.BatchApply(hk.Linear(1))(outputs)


model = hk.transform_with_state(forward)
keys = hk.PRNGSequence(2)
waves = jnp.sin(jnp.arange(11)[:, None, None] / 2 + jnp.arange(4)[None, :, None])
parameters, state = model.init(next(keys), waves[:-1])
optimizer = optax.rmsprop(5e-3)
moments = optimizer.init(parameters)


@jax.jit
def step(parameters, state, moments, key):
    def loss_of(parameters):
        predicted, after = model.apply(parameters, state, key, waves[:-1])
        return jnp.mean((predicted - waves[1:]) ** 2), after

    (loss, state), gradients = jax.value_and_grad(loss_of, has_aux=True)(parameters)
    updates, moments = optimizer.update(gradients, moments)
    return optax.apply_updates(parameters, updates), state, moments, loss


for number in range(8):
    parameters, state, moments, loss = step(parameters, state, moments, next(keys))
    if number % 2:
        print(number, f"{loss:.4f}")
print(hk.data_structures.tree_size(parameters), sorted(parameters))
print("average", f"{jax.tree.leaves(state)[0]:.4f}")
