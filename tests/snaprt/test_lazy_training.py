"""A training step of plain flax and optax is one graph, and compiles nothing once it repeats."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from counting import counting
from flax import nnx

import snaprt

pytestmark = pytest.mark.usefixtures("no_persistent_cache", "little_optimization")

STEPS = 4


def _batches(width):
    rng = np.random.default_rng(0)
    return [
        (rng.normal(size=(16, *width)).astype(np.float32), rng.integers(0, 4, 16))
        for _ in range(STEPS)
    ]


class _NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.last = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def _train_nnx(after_step):
    model = _NnxModel(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    losses = []
    for x, labels in _batches((8,)):

        def loss_of(model, x=x, labels=labels):
            logits = model(jnp.asarray(x))
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        losses.append(after_step(loss))
    return losses


class _LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.Conv(4, (3, 3))(x))
        x = nn.LayerNorm()(x.reshape(x.shape[0], -1))
        return nn.Dense(4)(x)


def _train_linen(after_step):
    model = _LinenModel()
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 100))
    )
    params = model.init(jax.random.key(0), jnp.ones((1, 6, 6, 1)))
    state = optimizer.init(params)
    losses = []
    for x, labels in _batches((6, 6, 1)):

        def loss_of(params, x=x, labels=labels):
            logits = model.apply(params, jnp.asarray(x))
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(after_step(loss))
    return losses


def _check(train):
    expected = jax.jit(lambda: train(lambda loss: loss))()  # takes half the time of eager JAX
    per_step = []

    def mark(loss):
        snaprt.mark_step()
        per_step.append(
            (
                snaprt.metrics.counter_value("UncachedCompile") or 0,
                snaprt.metrics.counter_value("CachedCompile") or 0,
            )
        )
        return loss

    with snaprt.lazy(), counting() as counts:
        lazy = train(mark)
    assert counts.reads == {}
    assert counts.graphs == STEPS
    # The first step also runs the initialization; the second is the step alone; then all repeat.
    assert counts.compiled == 2
    assert per_step[1][0] == per_step[-1][0]
    np.testing.assert_allclose([float(loss) for loss in lazy], expected, rtol=1e-5)


def test_a_step_of_nnx_and_optax_is_one_graph():
    _check(_train_nnx)


def test_a_step_of_linen_and_optax_is_one_graph():
    _check(_train_linen)


def test_a_model_made_eagerly_trains_lazily():
    model = _NnxModel(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)
    with snaprt.lazy(), counting() as counts:
        loss, gradients = nnx.value_and_grad(lambda m: m(jnp.ones((2, 8))).sum())(model)
        optimizer.update(model, gradients)
        snaprt.mark_step()
    assert counts.graphs == 1
    assert np.isfinite(float(loss))
    assert np.isfinite(np.asarray(model.first.kernel[...])).all()
