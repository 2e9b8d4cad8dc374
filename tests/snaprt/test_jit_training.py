"""A training loop of flax's nnx.jit and optax, recorded and not: the same bits, and replayed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import snaprt
from snaprt.cli.main import main
from snaprt.snapshot.format.read import open_snapshot
from snaprt.snapshot.recorder.record import process_recorder

STEPS = 3


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.drop(jax.nn.relu(self.norm(self.first(x)))))


def with_nnx() -> list[Any]:
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def train_step(model: Model, optimizer: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        def loss_of(model: Model) -> jax.Array:
            losses = optax.softmax_cross_entropy_with_integer_labels(model(x), labels)
            return losses.mean()

        loss, gradient = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradient)
        return loss

    losses = [train_step(model, optimizer, *batch(number)) for number in range(STEPS)]
    return [losses, jax.tree.map(key_bits, nnx.state(model))]


def key_bits(leaf: Any) -> Any:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def with_donation_and_a_scan() -> list[Any]:
    optimizer = optax.sgd(0.1, momentum=0.9)
    params = {"w": jnp.linspace(-1, 1, 32).reshape(8, 4)}
    state = optimizer.init(params)

    def train_step(params: Any, state: Any, x: jax.Array) -> Any:
        def micro_step(carry: Any, row: jax.Array) -> Any:
            loss, gradient = jax.value_and_grad(lambda p: jnp.tanh(row @ p["w"]).sum())(carry[0])
            updates, state = optimizer.update(gradient, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), loss

        carry, losses = jax.lax.scan(micro_step, (params, state), x)
        return *carry, losses.mean()

    jitted = jax.jit(train_step, donate_argnums=(0, 1))
    losses = []
    for number in range(STEPS):
        params, state, loss = jitted(params, state, batch(number)[0])
        losses.append(loss)
    return [losses, params, state]


def batch(number: int) -> tuple[jax.Array, jax.Array]:
    draw = np.random.default_rng(number)
    x = draw.normal(size=(16, 8)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(draw.integers(0, 4, 16))


@pytest.mark.parametrize(
    ("train", "when"),
    [
        (with_nnx, "all"),
        (with_nnx, "nan"),
        (with_donation_and_a_scan, "all"),
        (with_donation_and_a_scan, "error"),
    ],
)
def test_training_gives_the_same_bits_and_replays_bit_for_bit(
    tmp_path: Path, train: Callable[[], list[Any]], when: str
) -> None:
    expected = train()
    with snaprt.record(when=when, folder=tmp_path):
        found = train()
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    assert process_recorder().flush(30)
    inputs = sorted(tmp_path.glob("train_step.*.inputs.snap"))
    assert len(inputs) == (STEPS if when == "all" else 0)
    if inputs:
        assert len(open_snapshot(inputs[-1]).manifest.arrays) >= 3
        assert main(["replay", str(inputs[0]), str(inputs[-1])]) == 0
