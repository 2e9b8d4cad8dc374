"""Runs Adam without jit, of which two powers have another exponent in each round; nobody reads."""

import jax
import jax.numpy as jnp

weights = [jnp.ones((8, 32)) / 9, jnp.ones((32, 8)) / 7]
first, second = ([jnp.zeros_like(w) for w in weights] for _ in range(2))
b1, b2 = jnp.asarray(0.9), jnp.asarray(0.999)
x = jnp.sin(jnp.arange(32 * 8.0)).reshape(32, 8)


def loss_of(weights):
    return jnp.mean((jnp.tanh(x @ weights[0]) @ weights[1] - x) ** 2)


for i in range(200):
    gradients = jax.grad(loss_of)(weights)
    first = [b1 * m + (1 - b1) * g for m, g in zip(first, gradients, strict=True)]
    second = [b2 * v + (1 - b2) * g * g for v, g in zip(second, gradients, strict=True)]
    m_hats = [m / (1 - b1 ** (i + 1)) for m in first]
    v_hats = [v / (1 - b2 ** (i + 1)) for v in second]
    weights = [
        w - 0.01 * m / (jnp.sqrt(v) + 1e-8) for w, m, v in zip(weights, m_hats, v_hats, strict=True)
    ]
print(f"{loss_of(weights):.3f}")
