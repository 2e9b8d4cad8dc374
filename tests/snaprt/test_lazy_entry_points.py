"""Functions of JAX that stage others take what is recorded: what they close over, and operands."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.random import stateful_rng
from pairs import Pair

import snaprt

pytestmark = pytest.mark.usefixtures("no_persistent_cache")


def composite(x, y):
    return functools.partial(jax.lax.composite, name="snaprt.sum")(lambda v: v + y)(x)


def ahead_of_time(x, y):
    jitted = jax.jit(lambda v: v * y)
    return jitted.lower(x).compile()(x), jitted.trace(x).lower().compile()(x), jitted(x)


def exported(x, y):
    return export.export(jax.jit(lambda v: jnp.sin(v) * y))(x).call(x)


def traced_by_a_call_before(x, y):
    inner = jax.jit(lambda v: v + y)
    jitted = jax.jit(lambda v: jax.lax.cond(v[0] > 0, inner, jnp.sin, v) * y)
    called = jitted(x), inner(x)
    made = export.export(jitted)(x)
    slope = jax.jit(jax.grad(lambda v: jitted(v).sum()))
    called += slope(x), made.call(x), jitted.lower(x).compile()(x), jitted.trace(x).out_info.shape
    return called, export.export(slope)(x).call(x), export.export(inner)(x).call(x), jitted(x)


def derivatives_of_integers(x, y):
    nothing = np.zeros((3,), jax.dtypes.float0)
    _, pull_back = jax.vjp(jax.jit(lambda i, v: v * y), jnp.arange(3), x)
    none, slope = pull_back(y)
    made = export.export(jax.jit(lambda i: i + 1), platforms=["cpu"])
    counted = made(jnp.arange(3))
    return (
        slope,
        [leaf.shape for leaf in jax.tree.leaves((jax.jit(lambda n, v: (n, v))(nothing, x), none))],
        jax.jvp(lambda i, v: (i * 2, v * y), (jnp.arange(3), x), (nothing, y))[1][1],
        jax.grad(lambda i: counted.call(i).sum() * 1.0, allow_int=True)(jnp.arange(3)).shape,
    )


def derivative_of_an_exported_function(x, y):
    made = export.export(jax.jit(jnp.sin))(x)
    value, pull_back = jax.vjp(made.call, x * y)
    return value, pull_back(y), jax.grad(lambda v: made.call(v).sum())(x)


def compile_time_evaluation(x, y):
    def scaled(v):
        with jax.ensure_compile_time_eval():
            return v * int(y.sum()) * int(jnp.arange(4).sum())

    with jax.ensure_compile_time_eval():
        number = int(x.sum())
    return jax.jit(scaled)(x), number


def values_that_consist_of_arrays(x, y):
    pair = Pair(x * 2, y)
    closed_over = jax.jit(lambda: pair)()
    compiled = jax.jit(lambda v: v).lower(pair).compile()(pair)
    return closed_over.first, closed_over.second, compiled.first, jax.jit(lambda v: v)(pair).first


def closed_over_function(x, y):
    function, constants = jax.closure_convert(lambda v: (v * y).sum(), x)
    linear, tangent = jax.linearize(lambda v: jnp.sin(v) * y, x)
    return function(x, *constants), constants, linear, tangent(y)


def root_and_linear_solve(x, y):
    def root(a):
        return jax.lax.custom_root(
            lambda v: v**2 - a,
            a,
            lambda f, v: jax.lax.fori_loop(0, 20, lambda _, u: u - f(u) / (2 * u), v),
            lambda g, v: v / g(jnp.ones_like(v)),
        )

    def solve(b):
        return jax.lax.custom_linear_solve(
            lambda v: v * y, b, lambda _, c: c / y, transpose_solve=lambda _, c: c / y
        )

    return root(x), jax.grad(lambda a: root(a).sum())(x), solve(x), jax.jacobian(solve)(x)


def indexed_with_options(x, y):
    index = jnp.array([0, 2, 7]) * 1
    return (
        x.at[index].set(1.0, mode="drop"),
        x.at[index].add(2.0, mode="clip", indices_are_sorted=True),
        x.at[index].get(mode="fill", fill_value=9.0),
        x.at[index].get(mode="clip", unique_indices=True),
        jnp.take(x, index, mode="fill", fill_value=-1.0),
        jnp.take(x, index, mode="wrap"),
        x.take(index, mode="clip"),
        y.at[1:].multiply(x[0]),
    )


@pytest.mark.parametrize(
    "program",
    [
        composite,
        ahead_of_time,
        exported,
        traced_by_a_call_before,
        derivatives_of_integers,
        derivative_of_an_exported_function,
        compile_time_evaluation,
        values_that_consist_of_arrays,
        closed_over_function,
        root_and_linear_solve,
        indexed_with_options,
    ],
)
def test_recorded_arrays_are_taken_as_eager_ones_are(program):
    def run():
        return program(jnp.arange(3.0) + 1, jnp.ones(3) * 2)

    expected = run()
    with snaprt.lazy():
        found = run()
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), found, expected)


def test_a_stateful_generator_without_a_seed_seeds_itself():
    with snaprt.lazy():
        drawn = stateful_rng().uniform()
    assert 0 <= drawn < 1
    with pytest.raises(TypeError, match="explicit seed"), snaprt.lazy():
        jax.jit(lambda: stateful_rng().uniform())()
