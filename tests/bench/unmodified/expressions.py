"""A search for the formula behind some data: each candidate is another tree of operations."""

import random

import jax.numpy as jnp
import numpy as np

UNARY = (jnp.sin, jnp.cos, jnp.tanh, jnp.abs, lambda x: x * x, lambda x: 0.5 * x)
BINARY = (jnp.add, jnp.subtract, jnp.multiply, jnp.minimum, jnp.maximum)
choices = random.Random(0)
x = jnp.asarray(np.random.default_rng(0).uniform(-2, 2, size=(2, 4096)).astype(np.float32))
target = jnp.sin(x[0]) * x[1] + 0.5 * x[0]


def tree(depth):
    """Return a formula as nested tuples."""
    if depth == 0:
        return choices.randrange(2)
    if choices.random() < 0.4:
        return choices.choice(UNARY), tree(depth - 1)
    return choices.choice(BINARY), tree(depth - 1), tree(depth - 1)


def value(formula):
    """Return what a formula gives for the data."""
    if isinstance(formula, int):
        return x[formula]
    function, *operands = formula
    return function(*map(value, operands))


best, formula = float("inf"), None
for _ in range(400):
    candidate = tree(6)
    error = float(jnp.mean((value(candidate) - target) ** 2))
    if error < best:
        best, formula = error, candidate
print(f"{best:.4f}")
