"""Correct programs of several kinds, drawn from a seed, with inputs of a natural size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Program = tuple[Callable[..., Any], tuple[np.ndarray, ...]]

#: Variants of the CPU that change last bits at most.
HARMLESS = (
    "cpu,xla-flags=--xla_cpu_enable_fast_math=false",
    "cpu,optimization=0",
    "cpu,disable-hlo-pass=fusion",
    "cpu,xla-flags=--xla_cpu_enable_fast_min_max=true",
)


def _normal(random: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return random.normal(size=shape).astype(dtype)


def _size(random: np.random.Generator) -> int:
    return int(random.integers(3, 40))


_UNARY = (jnp.sin, jnp.tanh, jnp.abs, jax.nn.sigmoid, jnp.square, jax.nn.softplus, jnp.cos)
_BINARY = (jnp.add, jnp.multiply, jnp.subtract, jnp.maximum, jnp.arctan2, jnp.minimum)


def _elementwise(random: np.random.Generator) -> Program:
    steps = [(random.choice(len(_UNARY)), random.choice(len(_BINARY))) for _ in range(8)]

    def program(x: jax.Array, y: jax.Array) -> Any:
        for unary, binary in steps:
            x, y = _BINARY[binary](_UNARY[unary](x), y), x
        return x, y, jnp.exp(-jnp.abs(x)), x > y

    shape = (_size(random), _size(random))
    return program, (_normal(random, *shape), _normal(random, *shape))


def _mlp(random: np.random.Generator) -> Program:
    width, batch = _size(random), _size(random)

    def loss(w: jax.Array, v: jax.Array, x: jax.Array, t: jax.Array) -> jax.Array:
        logits = jax.nn.gelu(x @ w) @ v
        return -(jax.nn.log_softmax(logits) * jax.nn.one_hot(t, 5)).sum(-1).mean()

    arrays = (
        _normal(random, width, 2 * width) / np.float32(np.sqrt(width)),
        _normal(random, 2 * width, 5) / np.float32(np.sqrt(width)),
        _normal(random, batch, width),
        random.integers(0, 5, batch).astype(np.int32),
    )
    return jax.value_and_grad(loss, argnums=(0, 1)), arrays


def _convolution(random: np.random.Generator) -> Program:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        y = jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        pooled = jax.lax.reduce_window(
            jax.nn.relu(y), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
        )
        return (pooled**2).mean()

    side, channels = int(random.integers(4, 14)), int(random.integers(1, 6))
    arrays = (_normal(random, 3, 3, channels, 4), _normal(random, 2, side, side, channels))
    return jax.value_and_grad(loss), arrays


def _attention(random: np.random.Generator) -> Program:
    def program(q: jax.Array, k: jax.Array, v: jax.Array, scale: jax.Array) -> Any:
        scores = jnp.einsum("hqd,hkd->hqk", q, k) / jnp.sqrt(q.shape[-1])
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
        y = jnp.einsum("hqk,hkd->hqd", weights, v)
        centred = y - y.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale

    shape = (2, _size(random), 8)
    return program, (*(_normal(random, *shape) for _ in range(3)), _normal(random, 8))


def _recurrence(random: np.random.Generator) -> Program:
    def loss(w: jax.Array, xs: jax.Array) -> Any:
        def step(state: jax.Array, x: jax.Array) -> Any:
            state = jnp.tanh(state @ w + x)
            return state, state.sum()

        last, sums = jax.lax.scan(step, jnp.zeros(xs.shape[1:]), xs)
        return (last**2).sum(), sums

    width = _size(random)
    arrays = (
        _normal(random, width, width) / np.float32(2 * np.sqrt(width)),
        _normal(random, 12, 3, width),
    )
    return jax.value_and_grad(loss, has_aux=True), arrays


def _sums(random: np.random.Generator) -> Program:
    def program(x: jax.Array) -> Any:
        return (
            *(jnp.cumsum(x, 1), x.sum(), x.mean(0), x.var(1), jnp.prod(1 + x * 0.01, 0)),
            *(jax.nn.logsumexp(x, 1), jnp.linalg.norm(x, axis=0), x.max(0), jnp.median(x)),
        )

    return program, (_normal(random, _size(random), 40 * _size(random)) * 10,)


def _order(random: np.random.Generator) -> Program:
    def program(x: jax.Array, index: jax.Array) -> Any:
        scores = jnp.sin(3 * x) * x
        values, places = jax.lax.top_k(scores, 3)
        gathered = jnp.take_along_axis(scores, index, 1)
        scattered = jnp.zeros_like(x).at[:, index[0]].add(gathered)
        return jnp.sort(scores), jnp.argsort(scores), values, places, scattered, scores.argmax(1)

    rows, columns = _size(random), _size(random)
    index = random.integers(0, columns, (rows, columns)).astype(np.int32)
    return program, (_normal(random, rows, columns), index)


def _linear_algebra(random: np.random.Generator) -> Program:
    def program(a: jax.Array, b: jax.Array) -> Any:
        spd = a @ a.T + a.shape[0] * jnp.eye(a.shape[0])
        factor = jnp.linalg.cholesky(spd)
        return (
            factor,
            jax.scipy.linalg.solve_triangular(factor, b, lower=True),
            jnp.linalg.solve(spd, b),
            jnp.linalg.det(spd / a.shape[0]),
            jnp.linalg.eigvalsh(spd),
        )

    size = int(random.integers(3, 12))
    return program, (_normal(random, size, size), _normal(random, size, 2))


def _mixed(random: np.random.Generator) -> Program:
    half = jnp.bfloat16 if random.integers(2) else jnp.float16

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        y = jax.nn.silu(x.astype(half) @ w.astype(half))
        return (y.astype(jnp.float32) ** 2).mean() + y.sum().astype(jnp.float32) * 0

    width = _size(random)
    arrays = (_normal(random, width, width) / np.float32(np.sqrt(width)), _normal(random, 8, width))
    return jax.value_and_grad(loss), arrays


def _spectrum(random: np.random.Generator) -> Program:
    def program(x: jax.Array) -> Any:
        spectrum = jnp.fft.rfft(x)
        filtered = spectrum * jnp.exp(-1j * jnp.arange(spectrum.shape[-1]) / 7)
        return spectrum, jnp.fft.irfft(filtered, x.shape[-1]), jnp.abs(filtered)

    return program, (_normal(random, 3, 2 * _size(random)),)


def _random_numbers(random: np.random.Generator) -> Program:
    def program(seed: jax.Array, x: jax.Array) -> Any:
        key = jax.random.key(seed)
        kept = jax.random.bernoulli(key, 0.9, x.shape)
        noise = jax.random.normal(key, x.shape)
        return jnp.where(kept, x / 0.9, 0), noise, jax.random.randint(key, (7,), 0, 100)

    return program, (
        np.asarray(random.integers(1000), np.uint32),
        _normal(random, _size(random), 9),
    )


def _branches(random: np.random.Generator) -> Program:
    def program(x: jax.Array, n: jax.Array) -> Any:
        looped = jax.lax.fori_loop(0, n, lambda i, y: jnp.cos(y) + i * 0.1, x)
        chosen = jax.lax.cond(n % 2 == 0, jnp.exp, jnp.negative, jnp.tanh(x))
        newton = jax.lax.while_loop(
            lambda c: c[1] < 8, lambda c: ((c[0] + 2 / c[0]) / 2, c[1] + 1), (1 + x**2, 0)
        )[0]
        return looped, chosen, newton, jnp.floor(x * 10).astype(jnp.int32), x.astype(jnp.float16)

    return program, (_normal(random, _size(random), 5), np.asarray(random.integers(2, 9), np.int32))


KINDS: Mapping[str, Callable[[np.random.Generator], Program]] = {
    "attention": _attention,
    "branches": _branches,
    "convolution": _convolution,
    "elementwise": _elementwise,
    "linear algebra": _linear_algebra,
    "mixed": _mixed,
    "mlp": _mlp,
    "order": _order,
    "random numbers": _random_numbers,
    "recurrence": _recurrence,
    "spectrum": _spectrum,
    "sums": _sums,
}


def sound_program(kind: str, seed: int) -> Program:
    """Return a program of a kind and its inputs; the same seed gives the same ones."""
    return KINDS[kind](np.random.default_rng([seed, sorted(KINDS).index(kind)]))
