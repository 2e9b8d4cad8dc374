"""Host time of a warm training step of a PyTorch transformer, beside JAX and plain PyTorch.

Run it: python tests/bench/bench_torch.py [--quick] [--layers N ...] [--rounds N]

Every step is forward, cross entropy, backward and AdamW of a causal transformer that is so small
(width 16, 2 sequences of 8 tokens) that the host dominates. Host time is the CPU time of Python's
thread until the step is on its way to the device; it is waited for outside of the clock. The ways
take turns. What a step computes is the same in each: the script compares the losses.

    eager      PyTorch on the CPU, which computes in that thread: its time has the work in it
    jax.jit    the same step written in JAX with optax, one jit in a lazy scope
    lazy       a wrapped module, loss and torch.optim.AdamW in snaprt.torch.lazy()
    torch.jit  the same function compiled by snaprt.torch.jit, in the same scope
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from typing import Any

os.environ["SNAPRT_CACHE"] = "off"

import jax
import jax.numpy as jnp
import measuring
import optax
import torch
from torch import nn
from torch.nn import functional

import snaprt
import snaprt.torch

WIDTH, HEADS, WORDS, LENGTH, BATCH = 16, 2, 32, 8, 2
RATE, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-6, 0.01

PUBLISHED = """PyTorch/XLA 2.8, as its documentation says, traces the forward pass of a decoder of
100 layers in 140.1 ms, and in 24.2 ms with @assume_pure: 1.40 and 0.24 ms a layer, on another
machine (https://docs.pytorch.org/xla/release/r2.8/perf/assume_pure.html)."""


class Block(nn.Module):
    """Attention and a perceptron, each after a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after this block."""
        shape = (BATCH, LENGTH, HEADS, WIDTH // HEADS)
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.view(shape).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A causal transformer that predicts the next token: 12 parameters a layer, and five."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.layers = nn.ModuleList([Block() for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of all positions, one after the other."""
        x = self.embed(tokens) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).flatten(0, 1)


def logits_of(params: dict[str, Any], tokens: Any, layers: int) -> Any:
    """Return what `Transformer` returns, in JAX, of parameters with PyTorch's names."""

    def linear(name: str, x: Any) -> Any:
        return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]

    def norm(name: str, x: Any) -> Any:
        x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * params[f"{name}.weight"] + params[f"{name}.bias"]

    x = params["embed.weight"][tokens] + params["position"]
    for number in range(layers):
        at = f"layers.{number}"
        parts = jnp.split(linear(f"{at}.qkv", norm(f"{at}.norm1", x)), 3, axis=-1)
        q, k, v = (part.reshape(BATCH, LENGTH, HEADS, WIDTH // HEADS) for part in parts)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(f"{at}.out", y.reshape(BATCH, LENGTH, WIDTH))
        up = linear(f"{at}.up", norm(f"{at}.norm2", x))
        x = x + linear(f"{at}.down", jax.nn.gelu(up, approximate=False))
    return (norm("norm", x) @ params["head.weight"].T).reshape(BATCH * LENGTH, WORDS)


Step = Callable[[], Any]
"""Does one step and returns the loss, which may still be on its way."""


def in_jax(layers: int, x: torch.Tensor, y: torch.Tensor) -> Step:
    """Return the step written in JAX, from the same parameters."""
    torch.manual_seed(0)
    named = Transformer(layers).named_parameters()
    params = {name: jnp.asarray(value.detach().numpy().copy()) for name, value in named}
    tokens, targets = jnp.asarray(x.numpy()), jnp.asarray(y.numpy())
    optimizer = optax.adamw(RATE, *BETAS, eps=EPS, weight_decay=DECAY)
    state = optimizer.init(params)

    @jax.jit
    def train(params: Any, state: Any, tokens: Any, targets: Any) -> Any:
        def loss_of(params: Any) -> Any:
            logits = logits_of(params, tokens, layers)
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    def step() -> Any:
        nonlocal params, state
        params, state, loss = train(params, state, tokens, targets)
        snaprt.mark_step()
        return loss

    return step


def in_torch(layers: int, x: torch.Tensor, y: torch.Tensor, *, way: str) -> Step:
    """Return the step in PyTorch: ``eager`` on the CPU, or ``lazy``, or compiled by ``jit``."""
    torch.manual_seed(0)
    model: Any = Transformer(layers)
    loss_of: Any = nn.CrossEntropyLoss()
    if way != "eager":
        model, loss_of = snaprt.torch.wrap(model), snaprt.torch.wrap(loss_of)
        x, y = x.to(snaprt.torch.device()), y.to(snaprt.torch.device())
    optimizer = torch.optim.AdamW(
        model.parameters(), RATE, betas=BETAS, eps=EPS, weight_decay=DECAY
    )

    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if way != "jit":  # where gradients that are left are results
            optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        if way == "jit":
            optimizer.zero_grad()
        return loss.detach()

    if way == "jit":
        train = snaprt.torch.jit(train)

    def step() -> Any:
        loss = train(x, y)
        if way != "eager":
            snaprt.mark_step()
        return loss

    return step


def measure(layers: int, rounds: int, wanted: list[str]) -> tuple[dict[str, list[float]], float]:
    """Return the seconds of each step, by way, and how far the last losses are apart."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator)
    y = torch.randint(0, WORDS, (BATCH * LENGTH,), generator=generator)
    make: dict[str, Callable[[], Step]] = {
        "eager": lambda: in_torch(layers, x, y, way="eager"),
        "jax.jit": lambda: in_jax(layers, x, y),
        "lazy": lambda: in_torch(layers, x, y, way="lazy"),
        "torch.jit": lambda: in_torch(layers, x, y, way="jit"),
    }
    losses: dict[str, float] = {}
    took: dict[str, list[float]] = {name: [] for name in make}
    steps = {name: make[name]() for name in make if name in wanted}
    for number in range(rounds + WARM):
        for name, step in steps.items():
            with snaprt.torch.lazy():
                if number >= WARM:
                    gc.disable()
                started = time.thread_time()
                loss = step()
                took[name].append(time.thread_time() - started)
                gc.enable()
                losses[name] = float(loss)
    apart = max(losses.values()) - min(losses.values())
    return {name: took[name][WARM:] for name in steps}, apart


WARM = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, to try the script")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 6, 12, 24])
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    print(f"{measuring.machine()}, torch {torch.__version__}")
    rounds = 10 if options.quick else options.rounds
    names = ["eager", "jax.jit", "lazy", "torch.jit"]
    print("Milliseconds a warm step on the host, min/median.")
    rows = []
    for layers in options.layers:
        took, apart = measure(layers, rounds, names)
        low = {name: 1e3 * min(times) for name, times in took.items()}
        middle = {name: 1e3 * measuring.median(times) for name, times in took.items()}
        cells = [f"{low[name]:.2f}/{middle[name]:.2f}" for name in names]
        ratios = [
            f"{low[name] / low['jax.jit']:.2f}/{middle[name] / middle['jax.jit']:.2f}"
            for name in ("eager", "lazy", "torch.jit")
        ]
        rows.append([str(layers), *cells, *ratios, f"{apart:.0e}"])
    heads = [*names, "eager : jax.jit", "lazy : jax.jit", "torch.jit : jax.jit", "losses apart"]
    measuring.show_table(["layers", *heads], rows)
    print(f"\n{PUBLISHED}")


if __name__ == "__main__":
    main()
