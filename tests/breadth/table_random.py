"""Cases of `jax.random`: every distribution, of keys old and new."""

from __future__ import annotations

from collections.abc import Iterator

from breadth_cases import Case, expressions

OF_A_SHAPE = """
cauchy double_sided_maxwell exponential gumbel laplace logistic lognormal maxwell normal rademacher
uniform bits
""".split()

DISTRIBUTIONS = [
    "random.ball(key, 3, shape=(2,))",
    "random.bernoulli(key, unit)",
    "random.bernoulli(key, number / 3, (5,))",
    "random.beta(key, positive, above)",
    "random.binomial(key, counts * 3, unit)",
    "random.categorical(key, x)",
    "random.categorical(key, x, axis=0, shape=(2, 4))",
    "random.cauchy(key, (3,))",
    "random.chisquare(key, above)",
    "random.choice(key, vec, (4,))",
    "random.choice(key, vec, (4,), replace=False)",
    "random.choice(key, row, (5,), p=rates / rates.sum())",
    "random.choice(key, 7)",
    "random.dirichlet(key, rates, (2,))",
    "random.double_sided_maxwell(key, 1.0, scalar, (3,))",
    "random.exponential(key, (3,))",
    "random.f(key, above, positive)",
    "random.gamma(key, positive)",
    "random.generalized_normal(key, 1.5, (3,))",
    "random.geometric(key, unit)",
    "random.gumbel(key, (3,))",
    "random.laplace(key, (3,), jnp.bfloat16)",
    "random.loggamma(key, positive)",
    "random.logistic(key, (3,))",
    "random.lognormal(key, 0.7, (3,))",
    "random.maxwell(key, (3,))",
    "random.multinomial(key, 9, rates / rates.sum())",
    "random.multivariate_normal(key, row, spd)",
    "random.normal(key, (3, 4))",
    "random.normal(key, (3,), jnp.complex64)",
    "random.normal(key, (3,), jnp.bfloat16)",
    "random.normal(raw_key, (3,))",
    "random.orthogonal(key, 3)",
    "random.pareto(key, positive)",
    "random.permutation(key, 7)",
    "random.permutation(key, x)",
    "random.permutation(key, x, axis=1, independent=True)",
    "random.poisson(key, positive)",
    "random.poisson(raw_key, positive * 9)",
    "random.rademacher(key, (3,))",
    "random.randint(key, (4,), 0, counts[0])",
    "random.randint(key, (3,), -5, 5, jnp.int8)",
    "random.rayleigh(key, positive)",
    "random.t(key, positive)",
    "random.triangular(key, row, row + 1, row + 2)",
    "random.truncated_normal(key, -1, row + 3)",
    "random.uniform(key, (3,), minval=-1, maxval=2)",
    "random.uniform(key, (3,), jnp.float16)",
    "random.uniform(raw_key, (3,))",
    "random.wald(key, positive)",
    "random.weibull_min(key, positive, above)",
    "random.bits(key, (3,), jnp.uint8)",
]

KEYS = [
    "random.PRNGKey(at)",
    "random.PRNGKey(3)",
    "random.key(at)",
    "random.key(3, impl='rbg')",
    "random.normal(random.key(3, impl='rbg'), (4,)) * scalar",
    "random.key(3, impl='unsafe_rbg')",
    "random.clone(key)",
    "random.fold_in(key, at)",
    "random.fold_in(raw_key, 5)",
    "random.key_data(key)",
    "random.key_impl(key)",
    "random.key_dtype('threefry2x32')",
    "random.split(key)",
    "random.split(key, (2, 3))",
    "random.split(raw_key, 3)",
    "random.wrap_key_data(random.key_data(key) + 1)",
    "[random.normal(k, (2,)) for k in random.split(key)]",
    "(lambda one, two: random.uniform(one) + random.uniform(two))(*random.split(key))",
    "jax.vmap(lambda k: random.normal(k, (3,)))(keys)",
    "jax.lax.scan(lambda k, v: (random.split(k)[0], random.uniform(k) * v), key, x)",
    "jax.jit(lambda k: random.split(k, 4)[1:])(key)",
    "keys[0]",
    "keys[at]",
    "keys[::-1].reshape(3, 1)",
    "jnp.where(flag, keys[0], keys[1])",
    "jnp.concatenate([keys, keys])",
    "keys == keys[0]",
    "key + 1",
    "(key.dtype, keys.shape)",
    "jnp.stack([key, random.fold_in(key, 1)])",
    "str(key.dtype)",
    "random.fold_in(random.fold_in(key, 1), 2)",
    "jax.tree.map(lambda k: random.uniform(k), [key, keys[1]])",
    "np.asarray(random.key_data(random.split(key)))",
    "jax.checkpoint(lambda v: v * random.normal(key, v.shape))(x)",
    "jax.grad(lambda v: (v * random.normal(key, v.shape)).sum())(x)",
    "jax.grad(lambda v: random.gamma(key, v).sum())(positive)",
]


def cases() -> Iterator[Case]:
    """Return the cases of this table."""
    yield from expressions(
        "jax.random",
        {
            "f": [*DISTRIBUTIONS, *KEYS, *(f"random.{name}(keys[0])" for name in OF_A_SHAPE)],
            "h": [row for row in DISTRIBUTIONS if "unit" in row or "positive" in row],
        },
    )
