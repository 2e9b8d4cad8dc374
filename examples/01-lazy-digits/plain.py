"""A program without snaprt."""

import jax
import jax.numpy as jnp

x = jax.random.normal(jax.random.key(0), (64, 64))
for _ in range(5):
    x = x @ x.T / jnp.linalg.norm(x)
print(f"norm {jnp.linalg.norm(x):.6f}")
