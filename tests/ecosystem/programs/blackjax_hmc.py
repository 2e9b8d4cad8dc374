"""Samples a correlated Gaussian with blackjax's HMC, in a Python loop and in a scan."""

import blackjax
import jax
import jax.numpy as jnp
import jax.scipy.stats as stats
import numpy as np

covariance = jnp.array([[1.0, 0.6], [0.6, 2.0]])


def logdensity(position):
    return stats.multivariate_normal.logpdf(position, jnp.array([1.0, -1.0]), covariance)


sampler = blackjax.hmc(
    logdensity, step_size=0.4, inverse_mass_matrix=jnp.ones(2), num_integration_steps=5
)
state = sampler.init(jnp.zeros(2))
step = jax.jit(sampler.step)
key = jax.random.key(4)
for number in range(5):
    key, key_of_step = jax.random.split(key)
    state, info = step(key_of_step, state)
    print(
        number, np.round(state.position, 3), f"{info.acceptance_rate:.3f}", bool(info.is_accepted)
    )


def one_step(state, key):
    state, info = sampler.step(key, state)
    return state, (state.position, info.is_divergent)


_, (positions, divergent) = jax.lax.scan(one_step, state, jax.random.split(key, 400))
print("mean", np.round(positions[100:].mean(0), 0), "divergent", int(divergent.sum()))
