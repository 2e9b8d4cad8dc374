"""Microseconds an op, recorded and stepped, beside eager JAX and make_jaxpr.

Run it: python tests/bench/bench_recording.py [--quick] [--long OPERATIONS]

The ways take turns, so that what else the machine does meets all of them. In its turn each runs a
few times in a row, as steps do, and the first time, which finds the processor's caches full of what
the others did, is not counted. Python's garbage collector stays on, as it does for users.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

# Programs are kept in memory; reading them from disk is the matter of bench_start.py.
os.environ["SNAPRT_CACHE"] = "off"

import jax
import jax.numpy as jnp
import measuring

import snaprt

ROUNDS = {10: 150, 100: 50, 1000: 12}
QUICK = {10: 60, 100: 20, 1000: 5}
IN_A_ROW = 3

# Microseconds of a warm step, PyTorch/XLA 2.9 on CPU: another machine of the same kind.
REFERENCE = {
    ("tensor with tensor", 10): 69,
    ("tensor with tensor", 100): 352,
    ("tensor with tensor", 1000): 3541,
    ("Python scalar", 10): 100,
    ("Python scalar", 100): 635,
    ("Python scalar", 1000): 8050,
}

# Seconds of its first sync of so many chained operations.
FIRST_SYNC = {1000: 0.12, 5000: 0.79, 20_000: 4.8, 50_000: 20.8}


@dataclass(frozen=True)
class Chain:
    """Operations that each use the result of the one before.

    Attributes:
        name: What an operation is.
        operation: Takes the value so far, the first value and the operation's number.
        sizes: How many operations to measure.
        shape: Of the first value.
    """

    name: str
    operation: Callable[[jax.Array, jax.Array, int], jax.Array]
    sizes: tuple[int, ...] = (100,)
    shape: tuple[int, ...] = (8, 8)

    def program(self, size: int) -> Callable[[jax.Array], jax.Array]:
        """Return the function that applies ``size`` operations."""
        operation = self.operation

        def chain(first: jax.Array) -> jax.Array:
            value = first
            for number in range(size):
                value = operation(value, first, number)
            return value

        return chain


CHAINS = (
    Chain("tensor with tensor", lambda y, x, i: y + x if i % 2 else y * x, (10, 100, 1000)),
    Chain("Python scalar", lambda y, x, i: y + 1.0 if i % 2 else y * 0.5, (10, 100, 1000)),
    Chain("jnp.exp(y)", lambda y, x, i: jnp.exp(y)),
    Chain("jnp.sum(y, axis=0)", lambda y, x, i: jnp.sum(y, axis=0, keepdims=True)),
    Chain("jnp.matmul(y, x)", lambda y, x, i: jnp.matmul(y, x)),
    Chain("jnp.where(y > x, y, x)", lambda y, x, i: jnp.where(y > x, y, x)),
    Chain("y.reshape(...)", lambda y, x, i: y.reshape((8, 8) if i % 2 else (64,))),
    Chain("y[1:]", lambda y, x, i: y[1:], shape=(128, 8)),
    Chain("y + x[i]", lambda y, x, i: y + x[i], shape=(128, 8)),
)

RECORD, STEP, READY, EAGER, JAXPR = "record", "step", "ready", "eager", "make_jaxpr"


def lazy_round(program: Callable[[jax.Array], jax.Array], first: jax.Array) -> dict[str, float]:
    with snaprt.lazy():
        started = time.perf_counter()
        result = program(first)
        recorded = time.perf_counter()
        snaprt.mark_step()
        stepped = time.perf_counter()
        result.block_until_ready()
        ready = time.perf_counter()
    return {RECORD: recorded - started, STEP: stepped - started, READY: ready - started}


def eager_round(program: Callable[[jax.Array], jax.Array], first: jax.Array) -> dict[str, float]:
    started = time.perf_counter()
    program(first).block_until_ready()
    return {EAGER: time.perf_counter() - started}


def jaxpr_round(program: Callable[[jax.Array], jax.Array], first: jax.Array) -> dict[str, float]:
    def traced(first: jax.Array) -> jax.Array:  # a new function each time: traces are cached by it
        return program(first)

    started = time.perf_counter()
    jax.make_jaxpr(traced)(first)
    return {JAXPR: time.perf_counter() - started}


def measure(chain: Chain, size: int, rounds: int) -> dict[str, list[float]]:
    program = chain.program(size)
    first = jnp.full(chain.shape, 0.5, jnp.float32)
    ways = (lazy_round, eager_round, jaxpr_round)
    for _ in range(3):
        for way in ways:
            way(program, first)
    compiled = snaprt.metrics.counter_value("UncachedCompile")
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for way in ways:
            way(program, first)
            for _ in range(IN_A_ROW):
                for name, seconds in way(program, first).items():
                    found.setdefault(name, []).append(1e6 * seconds)
    if snaprt.metrics.counter_value("UncachedCompile") != compiled:
        raise SystemExit(f"{chain.name} x {size} compiled anew in a warm step")
    return found


def jit_rows(rounds: int) -> list[list[str]]:
    """Return rows on jitted functions of few and of many arguments, called inside the scope."""
    rows = []
    for leaves in (1, 10, 100):
        tree = {str(number): jnp.full((8, 8), 0.5) for number in range(leaves)}
        jitted = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0.5 + 1.0, tree))
        inside, outside = tree, tree
        lazy, plain = [], []
        for _ in range(rounds + 5):
            with snaprt.lazy():
                started = time.perf_counter()
                inside = jitted(inside)
                snaprt.mark_step()
                lazy.append(time.perf_counter() - started)
            jax.block_until_ready(inside)  # both find XLA's threads idle, and wake them
            started = time.perf_counter()
            outside = jitted(outside)
            plain.append(time.perf_counter() - started)
            jax.block_until_ready(outside)
        cells = [[1e6 * seconds for seconds in times[5:]] for times in (lazy, plain)]
        middle = [measuring.median(values) for values in cells]
        rows.append(
            [
                f"{leaves} arrays in, as many out",
                *(f"{min(v):.1f}/{m:.1f}" for v, m in zip(cells, middle, strict=True)),
                f"{min(cells[0]) - min(cells[1]):.1f}/{middle[0] - middle[1]:.1f}",
            ]
        )
    return rows


def long_row(size: int, limit: int) -> list[str]:
    """Return the row of a chain of ``size`` operations, cut after ``limit`` if that is not 0."""
    os.environ["SNAPRT_MAX_GRAPH_SIZE"] = str(limit)
    first = jnp.full((8, 8), 0.5)
    cells = []
    for _ in ("cold", "warm"):
        snaprt.metrics.clear_all()
        started = time.perf_counter()
        with snaprt.lazy():
            value = first
            for number in range(size):
                value = value + first if number % 2 else value * first
            snaprt.mark_step(wait=True)
        whole = time.perf_counter() - started
        others = 0.0
        for name in ("LowerTime", "CompileTime", "ExecuteTime"):
            found = snaprt.metrics.metric_data(name)
            others += 0.0 if found is None else found[1] / 1e9
        cuts = (snaprt.metrics.counter_value("cut::graph_size") or 0) + 1
        cells += [f"{whole:.3f}", f"{1e6 * (whole - others) / size:.2f}"]
    reference = FIRST_SYNC.get(size)
    return [f"{size}", f"{cuts}", *cells, "" if reference is None else f"{reference}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, to try the script")
    parser.add_argument(
        "--long", type=int, default=2000, help="the longest chain that is one graph (XLA is slow)"
    )
    options = parser.parse_args()
    rounds = QUICK if options.quick else ROUNDS
    print(measuring.machine())
    print(
        "Microseconds an operation, min/median. record: lazily, without running. step: record and "
        "mark_step.\nready: until the result is there, which eager's figure includes as well."
    )
    per_op, steps = [], []
    for chain in CHAINS:
        for size in chain.sizes:
            found = measure(chain, size, rounds[size])
            middle = {name: measuring.median(values) for name, values in found.items()}
            per_op.append(
                [
                    f"{chain.name} x {size}",
                    *(
                        f"{min(found[name]) / size:.2f}/{middle[name] / size:.2f}"
                        for name in (RECORD, STEP, READY, EAGER, JAXPR)
                    ),
                    f"{middle[JAXPR] / middle[RECORD]:.2f}",
                    f"{middle[EAGER] / middle[READY]:.2f}",
                ]
            )
            reference = REFERENCE.get((chain.name, size))
            if reference:
                steps.append(
                    [
                        f"{chain.name} x {size}",
                        f"{min(found[STEP]):.0f}/{middle[STEP]:.0f}",
                        f"{reference}",
                        f"{middle[STEP] / reference:.2f}",
                    ]
                )
    print()
    measuring.show_table(
        ["us an op", RECORD, STEP, READY, EAGER, JAXPR, "make_jaxpr:record", "eager:ready"], per_op
    )
    print()
    measuring.show_table(["us a warm step", "snaprt", "PyTorch/XLA, other machine", "ratio"], steps)
    print("\nA step under jax.jit inside the scope, and mark_step; microseconds.")
    measuring.show_table(
        ["jax.jit", "inside lazy()", "plain", "more"], jit_rows(50 if options.quick else 400)
    )
    print(
        "\nLong chains: seconds, and microseconds an operation but for XLA's compiling and running."
    )
    sizes = [1000, 2000, 5000, 20_000, 50_000]
    rows = [long_row(size, 0) for size in sizes if size <= options.long]
    rows += [long_row(size, 1024) for size in sizes if size > 1024]
    measuring.show_table(
        [
            "operations",
            "graphs",
            "cold s",
            "own us/op",
            "warm s",
            "own us/op",
            "PyTorch/XLA first s",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
