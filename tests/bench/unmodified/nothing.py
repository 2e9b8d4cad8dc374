"""Imports JAX and adds two numbers: what every program takes to start."""

import jax.numpy as jnp

print(float(jnp.ones(()) + 1))
