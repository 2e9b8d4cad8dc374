"""Host time and memory of whole training steps run lazily, beside make_jaxpr and jax.jit.

Run it: python tests/bench/bench_training_steps.py [--quick]

Host time is the CPU time of Python's thread until everything is on its way to the device: the step
is recorded, cut and started, and not waited for. The peak memory is that of a process of its own;
jax.jit is told to donate what the lazy step finds free by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["SNAPRT_CACHE"] = "off"

import flax.linen as nn
import jax
import jax.numpy as jnp
import measuring
import numpy as np
import optax

import snaprt

Step = Callable[[Any, Any, Any], tuple[Any, Any, Any]]


class Perceptron(nn.Module):
    """784-512-512-10."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for width in (512, 512):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(10)(x)


class Transformer(nn.Module):
    """A causal transformer that predicts the next token."""

    layers: int = 4
    width: int = 64

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(256, self.width)(tokens)
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.layers):
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x), mask=mask)
            x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return nn.Dense(256)(nn.LayerNorm()(x))


def perceptron() -> tuple[nn.Module, Any]:
    """Return the model and a batch of 128."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(128, 784)).astype(np.float32))
    return Perceptron(), (x, jnp.asarray(rng.integers(0, 10, 128)))


def transformer() -> tuple[nn.Module, Any]:
    """Return the model and a batch of 4 sequences of 32 tokens."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (4, 33)))
    return Transformer(), (tokens[:, :-1], tokens[:, 1:])


MODELS = {"MLP 784-512-512-10": perceptron, "4-layer transformer": transformer}


def training(make: Callable[[], tuple[nn.Module, Any]]) -> tuple[Step, Any, Any, Any]:
    """Return the step, the parameters, the optimizer's state and the batch."""
    model, batch = make()
    optimizer = optax.adam(1e-3)
    params = model.init(jax.random.key(0), batch[0])
    state = optimizer.init(params)

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        def loss_of(params: Any) -> Any:
            logits = model.apply(params, batch[0])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step, params, state, batch


def host_times(name: str, rounds: int) -> list[str]:
    """Return a model's row: a lazy step, a steady one, make_jaxpr, and jitted ones."""
    step, params, state, batch = training(MODELS[name])
    lazy, steady, traced, jitted, plain = [], [], [], [], []
    compiled = jax.jit(step)
    settled, settled_state = params, state
    inside, inside_state = params, state
    outside, outside_state = params, state
    for _ in range(rounds + 4):
        with snaprt.lazy():
            started = time.thread_time()
            params, state, loss = step(params, state, batch)
            snaprt.mark_step()
            lazy.append(time.thread_time() - started)
            loss.block_until_ready()
            started = time.thread_time()
            inside, inside_state, loss = compiled(inside, inside_state, batch)
            snaprt.mark_step()
            jitted.append(time.thread_time() - started)
            loss.block_until_ready()
        with snaprt.lazy(steady=True):
            started = time.thread_time()
            settled, settled_state, loss = step(settled, settled_state, batch)
            snaprt.mark_step()
            steady.append(time.thread_time() - started)
            loss.block_until_ready()
        started = time.thread_time()
        outside, outside_state, loss = compiled(outside, outside_state, batch)
        plain.append(time.thread_time() - started)
        loss.block_until_ready()

        def again(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
            return step(params, state, batch)

        started = time.thread_time()
        jax.make_jaxpr(again)(outside, outside_state, batch)
        traced.append(time.thread_time() - started)
    columns = [
        [1e3 * seconds for seconds in times[4:]] for times in (lazy, steady, traced, jitted, plain)
    ]
    middle = [measuring.median(column) for column in columns]
    cells = [f"{min(c):.2f}/{m:.2f}" for c, m in zip(columns, middle, strict=True)]
    ratio = min(columns[0]) / min(columns[2])
    return [name, *cells[:3], f"{ratio:.2f}/{middle[0] / middle[2]:.2f}", *cells[3:]]


def peak_memory(way: str, megabytes: int) -> float:
    """Train with Adam on parameters of this size; return the peak of the process, in MB."""
    optimizer = optax.adam(1e-3)
    x = jnp.ones(8)
    with contextlib.ExitStack() as stack:
        if way == "lazy":
            stack.enter_context(snaprt.lazy())
        shape = (megabytes * 32768, 8)
        params = [jnp.zeros(shape, jnp.float32) + number for number in range(8)]
        state = optimizer.init(params)
        jax.block_until_ready((params, state))

    def step(params: Any, state: Any) -> tuple[Any, Any, Any]:
        def loss_of(params: Any) -> Any:
            return sum(jnp.mean((p @ x) ** 2) for p in params)

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    if way == "jit":
        step = jax.jit(step, donate_argnums=(0, 1))
    _reset_peak()
    for _ in range(6):
        if way == "lazy":
            with snaprt.lazy():
                params, state, loss = step(params, state)
                snaprt.mark_step(wait=True)
        else:
            params, state, loss = step(params, state)
            jax.block_until_ready((params, state, loss))
    return _peak() / 1e6


def _reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _peak() -> int:
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, to try the script")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        print(peak_memory(options.memory, 16))
        return
    print(measuring.machine())
    rounds = 8 if options.quick else 40
    print("Milliseconds a warm step on the host, min/median.")
    rows = [host_times(name, rounds) for name in MODELS]
    measuring.show_table(
        ["", "lazy", "steady", "make_jaxpr", "lazy:make_jaxpr", "jit inside lazy", "jit"], rows
    )
    print("\nPeak memory of the process in 6 steps, MB: 134 MB of parameters, and Adam.")
    peaks = {
        way: float(
            subprocess.run(
                [sys.executable, __file__, "--memory", way],
                check=True,
                capture_output=True,
                text=True,
                # What is freed goes back at once, as it does on a device.
                env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
            ).stdout
        )
        for way in ("lazy", "jit")
    }
    measuring.show_table(
        ["lazy", "jit, donated", "ratio"],
        [[f"{peaks['lazy']:.0f}", f"{peaks['jit']:.0f}", f"{peaks['lazy'] / peaks['jit']:.2f}"]],
    )


if __name__ == "__main__":
    main()
