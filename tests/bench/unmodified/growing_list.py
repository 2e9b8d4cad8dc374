"""Keeps what each of 3,000 rounds of small operations computes, and stacks it at the end."""

import jax.numpy as jnp

x, kept = jnp.linspace(0.1, 1.0, 32), []
for _ in range(3_000):
    x = 3.7 * x * (1 - x)
    kept.append(x.mean())
print(f"{jnp.stack(kept)[:10].sum():.3f}")
