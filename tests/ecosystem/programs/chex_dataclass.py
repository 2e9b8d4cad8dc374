"""Checks a jitted update with chex: dataclasses, shapes, finite trees, variants, trace counts."""

import chex
import jax
import jax.numpy as jnp
import numpy as np


@chex.dataclass
class Average:
    mean: jax.Array
    count: jax.Array


@jax.jit
@chex.assert_max_traces(n=2)
def update(average, value):
    chex.assert_rank(value, 1)
    chex.assert_equal_shape([average.mean, value])
    count = average.count + 1
    return average.replace(mean=average.mean + (value - average.mean) / count, count=count)


average = Average(mean=jnp.zeros(3), count=jnp.int32(0))
for number in range(5):
    average = update(average, jnp.arange(3.0) * number)
    chex.assert_tree_all_finite(average)
    chex.assert_trees_all_equal_shapes_and_dtypes(
        average, Average(mean=jnp.ones(3), count=jnp.int32(1))
    )
print(np.asarray(average.mean), int(average.count))
chex.assert_trees_all_close(average.mean, 2 * np.arange(3.0), rtol=1e-5)
chex.assert_scalar_in(float(average.count), 4, 6)
chex.assert_type([average.mean, average.count], [jnp.float32, jnp.int32])
chex.assert_axis_dimension(average.mean, 0, 3)
for wrong in (
    lambda: chex.assert_trees_all_close(average.mean, average.mean + 1),
    lambda: chex.assert_shape(average.mean, (2,)),
    lambda: chex.assert_tree_all_finite(average.mean / 0),
):
    try:
        wrong()
    except AssertionError:
        print("refused")


@chex.chexify
@jax.jit
def root(value):
    chex.assert_tree_all_finite(value)
    return jnp.sqrt(value)


print(f"{root(jnp.float32(4.0)):.2f}")
root(jnp.float32(jnp.inf))
try:
    chex.block_until_chexify_assertions_complete()
except AssertionError:
    print("refused")
print(len(average.to_tuple()))
