"""What re-checking costs: a step of 10 ms, each 100th of which runs again, beside the same without.

Run it: python tests/bench/bench_recheck.py [--rounds N] [--steps N] [--width N]

Blocks of 100 steps with and without `--when "recheck, every=100"` take turns in one process. The
step is as large as this machine needs for 10 ms. It donates its weights, so each re-check copies
them. Printed last: the ratios, which must stay below 1.02. The first takes a block as the median
of the first steps, which run again, and 99 times the median of the others: other programs on the
machine affect it least. The second is of the fastest blocks as a whole.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import measuring

import snaprt
from snaprt import metrics

SECONDS = 0.010
WIDTH = 384


def step_of(products: int) -> Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    def step(weights: jax.Array, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden = inputs
        for _ in range(products):
            hidden = jnp.tanh(hidden @ weights)
        return weights - 1e-3 * (inputs.T @ hidden), jnp.sum(hidden)

    return jax.jit(step, donate_argnums=0)


def run(
    step: Callable[..., tuple[jax.Array, jax.Array]], steps: int, width: int = WIDTH
) -> list[float]:
    """Take some steps; return the seconds of each."""
    weights, inputs = jnp.eye(width), jnp.ones((width, width)) / width
    jax.block_until_ready((weights, inputs))
    taken = []
    for _ in range(steps):
        started = time.perf_counter()
        weights, loss = step(weights, inputs)
        loss.block_until_ready()  # as a program does that prints its loss
        taken.append(time.perf_counter() - started)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100, help="of a block: the first runs again")
    parser.add_argument("--width", type=int, default=WIDTH, help="of the weights")
    words = parser.parse_args()
    few = step_of(4)
    run(few, 5, words.width)
    each = statistics.median(run(few, 50, words.width)) / 5
    step = step_of(max(1, round(SECONDS / each) - 1))
    run(step, 5, words.width)
    scopes = {
        "without": nullcontext(),
        "re-checked": snaprt.record(f"recheck, every={words.steps}", tempfile.mkdtemp()),
    }
    with scopes["re-checked"]:
        run(step, words.steps, words.width)  # compiles what compares
    metrics.clear_all()
    taken: dict[str, list[list[float]]] = {name: [] for name in scopes}
    for _ in range(words.rounds):
        for name, scope in scopes.items():
            with scope:
                taken[name].append(run(step, words.steps, words.width))
    count = int(metrics.counter_value("Rechecks") or 0)
    assert count == words.rounds, count
    data = metrics.metric_data("RecheckTime")
    assert data is not None
    print(measuring.machine())
    print(f"a re-check takes {data[1] / count / 1e6:.2f} ms, as the mean of {count}")
    typical, fastest = [], []
    for name, blocks in taken.items():
        first = statistics.median(block[0] for block in blocks)
        other = statistics.median(seconds for block in blocks for seconds in block[1:])
        print(f"{name}: first step {1e3 * first:.2f} ms, others {1e3 * other:.2f} ms")
        typical.append(first + (words.steps - 1) * other)
        fastest.append(min(map(sum, blocks)))
    for what, (plain, checked) in {"typical": typical, "fastest": fastest}.items():
        print(
            f"{what} block: {plain:.3f} s, re-checked {checked:.3f} s, ratio {checked / plain:.4f}"
        )


if __name__ == "__main__":
    main()
