"""Programs of further kinds: recurrences, caches, graphs, random bits, integers, solvers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def _normal(seed: int, *shape: int, scale: float = 0.3) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


Step = tuple[Callable[..., Any], tuple[Any, ...]]


def state_space() -> Step:
    """Return a selective state space layer's step: a scan over time, and an associative scan."""

    def layer(p, x):
        gate, inner = jnp.split(x @ p["in"], 2, -1)
        padded = jnp.pad(inner, ((2, 0), (0, 0)))
        mixed = sum(padded[i : i + inner.shape[0]] * p["conv"][i] for i in range(3))
        inner = jax.nn.silu(mixed)
        delta = jax.nn.softplus(inner @ p["delta"])
        rates = jnp.exp(delta[..., None] * -jnp.exp(p["rate"]))
        inputs = delta[..., None] * (inner @ p["b"])[:, None, :] * inner[..., None]

        def step(state, now):
            rate, given = now
            state = rate * state + given
            return state, state

        _, states = jax.lax.scan(step, jnp.zeros(rates.shape[1:]), (rates, inputs))

        def combine(one, other):
            return one[0] * other[0], other[0] * one[1] + other[1]

        _, parallel = jax.lax.associative_scan(combine, (rates[::2], inputs[::2]))
        read = (states * (inner @ p["c"])[:, None, :]).sum(-1) + parallel.mean()
        return (read + inner * p["skip"]) * jax.nn.silu(gate) @ p["out"]

    def loss(p, x, y):
        return jnp.mean((layer(p, x) - y) ** 2)

    shapes = {"in": (5, 12), "conv": (3, 6), "delta": (6, 6), "rate": (6, 3), "b": (6, 3)}
    shapes |= {"c": (6, 3), "skip": (6,), "out": (6, 5)}
    p = {name: _normal(i, *shape, scale=0.6) for i, (name, shape) in enumerate(shapes.items())}
    return jax.value_and_grad(loss), (p, _normal(20, 7, 5, scale=1), _normal(21, 7, 5))


def unet_block() -> Step:
    """Return a block of a diffusion U-net: group norm, time, attention, down and up, a skip."""

    def convolve(x, kernel, stride=1):
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def group_norm(x, scale, groups=2):
        n, h, w, c = x.shape
        x = x.reshape(n, h, w, groups, c // groups)
        mean = x.mean((1, 2, 4), keepdims=True)
        variance = x.var((1, 2, 4), keepdims=True)
        return ((x - mean) / jnp.sqrt(variance + 1e-5)).reshape(n, h, w, c) * scale

    def forward(p, x, time):
        n = x.shape[0]
        frequencies = jnp.exp(-np.log(100.0) * jnp.arange(3) / 3)
        angles = time.astype(jnp.float32)[:, None] * frequencies
        when = jax.nn.silu(jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1) @ p["time"])
        shift, scale = jnp.split(when, 2, -1)
        first = convolve(x, p["in"])
        h = jax.nn.silu(group_norm(first, p["g0"])) * (1 + scale[:, None, None])
        h = convolve(h + shift[:, None, None], p["down"], 2)
        flat = group_norm(h, p["g1"]).reshape(n, -1, 4)
        q, k, v = jnp.moveaxis((flat @ p["qkv"]).reshape(n, -1, 3, 4), 2, 0)
        weights = jax.nn.softmax(jnp.einsum("nid,njd->nij", q, k) / 2.0)
        h = h + jnp.einsum("nij,njd->nid", weights, v).reshape(h.shape) @ p["mix"]
        h = jax.image.resize(h, (n, 6, 6, 4), "nearest")
        return convolve(jnp.concatenate([h, first], -1), p["out"])

    shapes = {"in": (3, 3, 2, 4), "down": (3, 3, 4, 4), "out": (3, 3, 8, 2), "time": (6, 8)}
    shapes |= {"qkv": (4, 12), "mix": (4, 4)}
    p = {name: _normal(i, *shape, scale=0.5) for i, (name, shape) in enumerate(shapes.items())}
    p |= {"g0": 1 + _normal(8, 4), "g1": 1 + _normal(9, 4)}
    return forward, (p, _normal(10, 2, 6, 6, 2, scale=1), np.array([3, 41], np.int32))


def decoder() -> Step:
    """Return decoding with rotary embeddings and a cache of keys and values, in a loop."""

    def rotated(x, position):
        half = x.shape[-1] // 2
        angle = position * 1.0 / 50.0 ** (jnp.arange(half) / half)
        sin, cos = jnp.sin(angle), jnp.cos(angle)
        a, b = x[..., :half], x[..., half:]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def norm(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

    def decode(p, prompt):
        def step(position, state):
            keys, values, tokens, scores = state
            x = p["embed"][tokens[position]]
            q, k, v = ((norm(x, p["n0"]) @ p[name]).reshape(2, 4) for name in "qkv")
            k = rotated(k, position)[None].astype(jnp.bfloat16)
            keys = jax.lax.dynamic_update_slice(keys, k, (position, 0, 0))
            values = jax.lax.dynamic_update_slice_in_dim(values, v[None], position, 0)
            logits = jnp.einsum("hd,thd->ht", rotated(q, position), keys.astype(jnp.float32)) / 2
            logits = jnp.where(jnp.arange(8) <= position, logits, -jnp.inf)
            x = x + jnp.einsum("ht,thd->hd", jax.nn.softmax(logits), values).reshape(8) @ p["o"]
            gated = jax.nn.silu(norm(x, p["n1"]) @ p["up"]) * (x @ p["gate"])
            logits = norm(x + gated @ p["down"], p["n2"]) @ p["embed"].T
            chosen = jnp.where(position < 2, tokens[position + 1], logits.argmax()).astype(int)
            return (
                keys,
                values,
                tokens.at[position + 1].set(chosen),
                scores.at[position].set(logits),
            )

        keys, values = jnp.zeros((8, 2, 4), jnp.bfloat16), jnp.zeros((8, 2, 4))
        state = keys, values, jnp.zeros(9, jnp.int32).at[:3].set(prompt), jnp.zeros((8, 11))
        _, values, tokens, scores = jax.lax.fori_loop(0, 8, step, state)
        return tokens, scores, values

    shapes = {"embed": (11, 8), "q": (8, 8), "k": (8, 8), "v": (8, 8), "o": (8, 8)}
    shapes |= {"up": (8, 12), "gate": (8, 12), "down": (12, 8)}
    p = {name: _normal(i, *shape, scale=0.7) for i, (name, shape) in enumerate(shapes.items())}
    p |= {f"n{i}": 1 + _normal(20 + i, 8) for i in range(3)}
    return decode, (p, np.array([4, 7, 1], np.int32))


def graph_attention() -> Step:
    """Return a graph network's step: messages along edges, a softmax by node, a readout."""

    def loss(p, nodes, sources, targets, labels):
        for layer in ("a", "b"):
            hidden = nodes @ p[layer]
            scores = hidden[sources] @ p[layer + "s"] + hidden[targets] @ p[layer + "t"]
            scores = jax.nn.leaky_relu(scores, 0.2)
            top = jax.ops.segment_max(scores, targets, 6)
            weights = jnp.exp(scores - top[targets])
            total = jax.ops.segment_sum(weights, targets, 6)
            messages = hidden[sources] * (weights / total[targets])[:, None]
            nodes = jax.nn.elu(jax.ops.segment_sum(messages, targets, 6)) + hidden
        degrees = jnp.zeros(6).at[targets].add(1.0)
        logits = jnp.concatenate([nodes, jnp.sqrt(degrees)[:, None]], -1) @ p["out"]
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(6), labels])

    shapes = {"a": (4, 5), "as": (5,), "at": (5,), "b": (5, 5), "bs": (5,), "bt": (5,)}
    shapes |= {"out": (6, 3)}
    p = {name: _normal(i, *shape, scale=0.6) for i, (name, shape) in enumerate(shapes.items())}
    sources = np.array([0, 1, 2, 3, 4, 5, 0, 2, 4, 1, 3, 5], np.int32)
    targets = np.array([1, 2, 3, 4, 5, 0, 3, 5, 1, 1, 3, 4], np.int32)
    labels = np.array([0, 2, 1, 1, 0, 2], np.int32)
    return jax.value_and_grad(loss), (p, _normal(9, 6, 4, scale=1), sources, targets, labels)


def dropout() -> Step:
    """Return a step with random bits: dropout, noise, a permutation, a categorical sample."""

    def loss(p, x, key):
        keys = jax.random.split(jax.random.wrap_key_data(key, impl="threefry2x32"), 4)
        kept = jax.random.bernoulli(keys[0], 0.8, x.shape)
        h = jnp.where(kept, x / 0.8, 0.0) @ p["a"]
        h = jnp.tanh(h + 0.1 * jax.random.normal(keys[1], h.shape))
        order = jax.random.permutation(keys[2], 4)
        logits = h[order] @ p["b"]
        sample = jax.random.categorical(keys[3], jax.lax.stop_gradient(logits))
        return (jax.nn.logsumexp(logits, -1) - logits[jnp.arange(4), sample]).mean()

    p = {"a": _normal(0, 5, 6, scale=0.6), "b": _normal(1, 6, 3, scale=0.6)}
    return jax.value_and_grad(loss), (p, _normal(2, 4, 5, scale=1), np.array([3, 9], np.uint32))


def quantized() -> Step:
    """Return inference in integers: scales, int8 products in int32, shifts, a lookup, packing."""

    def quantize(x):
        scale = jnp.max(jnp.abs(x), -1, keepdims=True) / 127.0
        return jnp.clip(jnp.round(x / scale), -127, 127).astype(jnp.int8), scale

    def infer(w0, w1, table, x):
        (q, s), (w, t) = quantize(x), quantize(w0)
        total = jax.lax.dot_general(
            q, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
        )
        h = jnp.maximum(total.astype(jnp.float32) * s * t.T, 0.0)
        index = jnp.minimum((h * 8).astype(jnp.uint8), 15)
        looked = table[index]
        (q, s), (w, t) = quantize(looked), quantize(w1)
        total = jnp.einsum("ij,kj->ik", q.astype(jnp.int32), w.astype(jnp.int32))
        packed = jax.lax.bitcast_convert_type(q.reshape(q.shape[0], -1, 4), jnp.int32)
        hashed = (packed >> 5) ^ (packed << 3) & 0x00FF00FF
        parity = jax.lax.population_count(hashed) % 2
        return total * s * t.T, hashed, parity.sum(-1), (total >> 4).argmin(-1)

    table = np.linspace(-1, 2, 16, dtype=np.float32) ** 3
    return infer, (_normal(0, 8, 6), _normal(1, 5, 8), table, _normal(2, 4, 6, scale=1))


def filtering() -> Step:
    """Return a Kalman filter over a series, with solves, and its log-likelihood."""

    def run(a, h, q, r, series):
        def step(state, seen):
            mean, covariance, total = state
            mean, covariance = a @ mean, a @ covariance @ a.T + q
            spread = h @ covariance @ h.T + r
            gain = jnp.linalg.solve(spread, h @ covariance).T
            error = seen - h @ mean
            factor = jnp.linalg.cholesky(spread)
            white = jax.scipy.linalg.solve_triangular(factor, error, lower=True)
            total = total - 0.5 * white @ white - jnp.log(jnp.diagonal(factor)).sum()
            mean = mean + gain @ error
            covariance = (jnp.eye(3) - gain @ h) @ covariance
            return (mean, covariance, total), mean

        return jax.lax.scan(step, (jnp.zeros(3), jnp.eye(3) * 2, 0.0), series)

    a = np.eye(3, dtype="f4") * 0.9 + _normal(0, 3, 3, scale=0.1)
    q, r = np.eye(3, dtype="f4") * 0.1, np.eye(2, dtype="f4") * 0.3
    return run, (a, _normal(1, 2, 3, scale=1), q, r, _normal(2, 6, 2, scale=1))


def particles() -> Step:
    """Return a simulation: forces, walls, neighbors by sorting, an inner loop, interpolation."""

    def simulate(position, velocity, profile):
        def force(position):
            away = position[:, None] - position[None]
            distance = jnp.sqrt((away**2).sum(-1) + 0.05)
            near = (distance < 1.5) & ~jnp.eye(position.shape[0], dtype=bool)
            return jnp.where(near[..., None], away / distance[..., None] ** 3, 0.0).sum(1)

        def step(count, state):
            position, velocity, energy = state
            field = jnp.interp(position[:, 0], jnp.linspace(-2.0, 2.0, 6), profile)
            velocity = velocity + 0.05 * (force(position) - field[:, None] * position)
            moved = position + 0.05 * velocity
            outside = jnp.abs(moved) > 1.5
            velocity = jnp.where(outside, -velocity, velocity)

            def relax(state):
                moved, tries = state
                return moved * 0.9, tries + 1

            moved, tries = jax.lax.while_loop(
                lambda state: (jnp.abs(state[0]).max() > 1.5) & (state[1] < 9), relax, (moved, 0)
            )
            kinetic = jax.lax.cond(
                count % 2 == 0, lambda: (velocity**2).sum(), lambda: jnp.abs(velocity).max() * 1.0
            )
            return moved, velocity, energy.at[count].set(kinetic + tries)

        state = jax.lax.fori_loop(0, 5, step, (position, velocity, jnp.zeros(5)))
        cells = jnp.floor(state[0] * 2).astype(jnp.int32)
        order = jnp.lexsort((cells[:, 0], cells[:, 1]))
        return *state, order, jnp.diff(jnp.cumsum(cells[order, 0])), jnp.roll(state[1], 2, 0)

    profile = np.array([0.1, 0.5, -0.4, 0.8, 0.3, 1.0], np.float32)
    return simulate, (_normal(0, 6, 2, scale=1), _normal(1, 6, 2, scale=1), profile)


MORE_MODELS: Mapping[str, Callable[[], Step]] = {
    "state space": state_space,
    "U-net block": unet_block,
    "decoder": decoder,
    "graph attention": graph_attention,
    "dropout": dropout,
    "quantized": quantized,
    "filter": filtering,
    "particles": particles,
}
