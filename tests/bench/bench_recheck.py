"""What re-checking costs: a step of 10 ms, each 100th of which runs again, beside the same without.

Run it: python tests/bench/bench_recheck.py [--rounds N] [--steps N]

Blocks of 100 steps with and without `--when "recheck, every=100"` take turns in one process. The
step is as large as this machine needs for 10 ms. It donates its weights, so each re-check copies
them. Printed last: the ratios, which must stay below 1.02, of the fastest blocks, of the median
blocks, and of the processor time of all blocks, which other programs on the machine affect least.
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


def run(step: Callable[..., tuple[jax.Array, jax.Array]], steps: int) -> tuple[float, float]:
    """Take some steps; return the seconds, and those of the processor."""
    weights, inputs = jnp.eye(WIDTH), jnp.ones((WIDTH, WIDTH)) / WIDTH
    jax.block_until_ready((weights, inputs))
    started, used = time.perf_counter(), time.process_time()
    for _ in range(steps):
        weights, loss = step(weights, inputs)
        loss.block_until_ready()  # as a program does that prints its loss
    return time.perf_counter() - started, time.process_time() - used


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100, help="of a block: one of them runs again")
    words = parser.parse_args()
    few = step_of(4)
    run(few, 5)
    each = min(run(few, 20)[0] for _ in range(3)) / 20 / 5
    step = step_of(max(1, round(SECONDS / each) - 1))
    run(step, 5)
    scopes = {
        "without": nullcontext(),
        "re-checked": snaprt.record(f"recheck, every={words.steps}", tempfile.mkdtemp()),
    }
    with scopes["re-checked"]:
        run(step, words.steps)  # compiles what compares
    metrics.clear_all()
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in scopes}
    for _ in range(words.rounds):
        for name, scope in scopes.items():
            with scope:
                taken[name].append(run(step, words.steps))
    count = int(metrics.counter_value("Rechecks") or 0)
    assert count == words.rounds, count
    data = metrics.metric_data("RecheckTime")
    assert data is not None
    print(measuring.machine())
    fastest = [min(seconds for seconds, _ in taken[name]) for name in scopes]
    medians = [statistics.median(seconds for seconds, _ in taken[name]) for name in scopes]
    used = [sum(seconds for _, seconds in taken[name]) for name in scopes]
    print(f"a step takes {1e3 * fastest[0] / words.steps:.2f} ms")
    print(
        f"a re-check takes {data[1] / count / 1e6:.2f} ms, {count} of {count * words.steps} steps"
    )
    for what, (plain, checked) in {
        "the fastest blocks": fastest,
        "the median blocks": medians,
        "processor time": used,
    }.items():
        print(f"{what}: {plain:.3f} s, re-checked {checked:.3f} s: ratio {checked / plain:.4f}")


if __name__ == "__main__":
    main()
