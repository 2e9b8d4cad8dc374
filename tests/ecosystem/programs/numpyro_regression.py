"""Samples the posterior of a linear regression with numpyro's NUTS, then fits a guide with SVI."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

inputs = jnp.linspace(-1, 1, 40)
targets = 2 * inputs + 1 + 0.1 * jax.random.normal(jax.random.PRNGKey(0), (40,))


def model(inputs, targets=None):
    slope = numpyro.sample("slope", dist.Normal(0, 5))
    offset = numpyro.sample("offset", dist.Normal(0, 5))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    numpyro.sample("targets", dist.Normal(slope * inputs + offset, noise), obs=targets)


sampler = MCMC(NUTS(model), num_warmup=60, num_samples=60, progress_bar=False)
sampler.run(jax.random.PRNGKey(1), inputs, targets)
samples = sampler.get_samples()
print({name: f"{values.mean():.1f}" for name, values in samples.items()})
print("drawn", {name: values.shape for name, values in samples.items()})
predicted = Predictive(model, samples)(jax.random.PRNGKey(2), jnp.array([0.0, 1.0]))["targets"]
print("predicted", [f"{value:.1f}" for value in predicted.mean(0)])

guide = AutoNormal(model)
inference = SVI(model, guide, numpyro.optim.Adam(0.05), Trace_ELBO())
result = inference.run(jax.random.PRNGKey(3), 100, inputs, targets, progress_bar=False)
print("median", {n: f"{v:.1f}" for n, v in guide.median(result.params).items()})
