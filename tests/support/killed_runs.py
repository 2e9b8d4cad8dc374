"""Starts runs that compile, cache and record, and kills each at a random moment.

Usage: killed_runs.py NUMBER SEED. Imports everything once and forks each run, before JAX has
started any thread, so that a run takes a fraction of a second to reach its first compilation.
"""

import logging
import os
import random
import signal
import sys
import time

import jax
import jax.numpy as jnp

import snaprt


def run(width: int) -> None:
    """Train a little; ``width`` makes programs that no earlier run has compiled."""
    logging.basicConfig(level=logging.WARNING)
    with snaprt.lazy():
        weights = jnp.ones((width, width)) * 0.01
        for _ in range(4):
            gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(w @ w.T) ** 2))(weights)
            weights = weights - 0.1 * gradient
            snaprt.mark_step()
    print("finished", float(weights.sum()))


def _undisturbed_run() -> float:
    """Run once to the end and return the seconds it took, by which this machine's moments go."""
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        run(99)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
    return time.monotonic() - started


def main() -> None:
    number, seed = int(sys.argv[1]), int(sys.argv[2])
    chance = random.Random(seed)
    killed = attempt = 0
    whole_run = _undisturbed_run()
    while killed < number and attempt < 4 * number:
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            run(100 + attempt % 20)
            sys.stdout.flush()
            os._exit(0)
        time.sleep(chance.uniform(0, whole_run))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            killed += 1
        else:  # it was faster: programs that it needs are in the cache by now
            whole_run = 0.8 * min(whole_run, time.monotonic() - started)
        attempt += 1
    print("killed", killed)


if __name__ == "__main__":
    main()
