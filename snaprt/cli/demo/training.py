"""The program that ``snaprt demo`` runs: plain flax and optax on scikit-learn's digits, lazily.

It is started twice in processes of its own, so that the second start finds the compile cache warm.
Prints one JSON object: losses, accuracy, seconds, counters.
"""

from __future__ import annotations

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import snaprt
from snaprt import metrics

STEPS = 40
BATCH = 128
RECORDED_STEP = 5


class Network(nnx.Module):
    """64 pixels in, 10 digits out, one hidden layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(64, 64, rngs=rngs)
        self.last = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """Return logits (batch, 10) of pixels (batch, 64)."""
        return self.last(nnx.relu(self.first(pixels)))


def main() -> None:
    """Train, and print what happened as JSON."""
    images, digits = load_digits(return_X_y=True)
    pixels = np.asarray(images / 16.0, np.float32)
    labels = np.asarray(digits, np.int32)
    shuffled = np.random.default_rng(0).permutation(len(pixels))
    train, test = shuffled[:1500], shuffled[1500:]

    step = 0

    def only_one_step(name: str, device_index: int, execution_count: int) -> str:
        return "inputs outputs" if step == RECORDED_STEP else ""

    snaprt.register_hlo_snapshot_callback(only_one_step)
    started = time.perf_counter()
    first_step = 0.0
    losses = []
    with snaprt.lazy():
        network = Network(nnx.Rngs(0))
        optimizer = nnx.Optimizer(network, optax.adamw(1e-2), wrt=nnx.Param)
        for step in range(STEPS):
            batch = np.random.default_rng(step).choice(train, BATCH)
            x, y = jnp.asarray(pixels[batch]), jnp.asarray(labels[batch])

            def loss_of(network: Network, x: jax.Array = x, y: jax.Array = y) -> jax.Array:
                return optax.softmax_cross_entropy_with_integer_labels(network(x), y).mean()

            loss, gradients = nnx.value_and_grad(loss_of)(network)
            optimizer.update(network, gradients)
            snaprt.mark_step(wait=step == 0)
            if step == 0:
                first_step = time.perf_counter() - started
            losses.append(loss)
        accuracy = float((network(jnp.asarray(pixels[test])).argmax(1) == labels[test]).mean())
    names = (
        "UncachedCompile",
        "CachedCompile",
        "PersistentCacheHit",
        "PersistentCacheMiss",
    )
    report = {
        "steps": STEPS,
        "first_loss": float(losses[0]),
        "last_loss": float(losses[-1]),
        "accuracy": accuracy,
        "first_step_seconds": first_step,
        "seconds": time.perf_counter() - started,
        "compile_seconds": _seconds("CompileTime"),
        "load_seconds": _seconds("LoadTime"),
        "counters": {name: metrics.counter_value(name) or 0 for name in names},
    }
    print(json.dumps(report))


def _seconds(metric: str) -> float:
    data = metrics.metric_data(metric)
    return 0.0 if data is None else data[1] / 1e9


if __name__ == "__main__":
    main()
