"""A long simulation of small steps under one jit; each draws a number, and its reward is read."""

import jax
import jax.numpy as jnp

STEPS = 20_000


@jax.jit
def step(state, key):
    action = jnp.where(jnp.sin(state).sum() > 0, 1.0, -1.0) + 0.1 * jax.random.normal(key)
    state = 0.99 * state + 0.1 * jnp.cos(state) * action
    return state, jnp.sum(state**2)


key, state, total = jax.random.key(0), jnp.ones(8), 0.0
for _ in range(STEPS):
    key, now = jax.random.split(key)
    state, reward = step(state, now)
    total += float(reward)
print(f"mean reward {total / STEPS:.4f}")
