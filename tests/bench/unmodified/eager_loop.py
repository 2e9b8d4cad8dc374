"""A loop of small eager operations, 50,000 rounds of it."""

import jax.numpy as jnp

x = jnp.ones((8, 8))
for _ in range(50_000):
    x = x * 0.9 + 1
print(f"{x[0, 0]:.3f}")
