"""A walk that draws random numbers at each of 2,000 rounds."""

import jax
import jax.numpy as jnp

key = jax.random.key(0)
place, far = jnp.zeros((64, 2)), jnp.zeros(64)
for _ in range(2_000):
    key, first, second = jax.random.split(key, 3)
    place = place + 0.1 * jax.random.normal(first, (64, 2))
    place = jnp.where(jax.random.uniform(second, (64, 1)) < 0.01, 0.0, place)
    far = jnp.maximum(far, jnp.linalg.norm(place, axis=1))
print(f"{far.mean():.2f}")
