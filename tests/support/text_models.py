"""Training steps and other programs of many kinds, as functions with their arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import planted_faults


def _normal(seed: int, *shape: int, scale: float = 0.3) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


Step = tuple[Callable[..., Any], tuple[Any, ...]]


def _normalize(x: jax.Array) -> jax.Array:
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def adam_mlp() -> Step:
    """Return a perceptron's step with Adam, clipping and weight decay."""

    def loss(p, x, y):
        for layer in ("a", "b"):
            x = jax.nn.gelu(x @ p[layer] + p[layer + "0"])
        return jnp.mean((x @ p["c"] - y) ** 2)

    def step(p, m, v, count, x, y):
        value, g = jax.value_and_grad(loss)(p, x, y)
        norm = jnp.sqrt(sum(jnp.sum(one * one) for one in jax.tree.leaves(g)))
        g = jax.tree.map(lambda one: one * jnp.minimum(1.0, 0.5 / norm), g)
        m = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, m, g)
        v = jax.tree.map(lambda a, b: 0.99 * a + 0.01 * b * b, v, g)
        count = count + 1

        def update(w, a, b):
            a, b = a / (1 - 0.9**count), b / (1 - 0.99**count)
            return w - 0.1 * (a / (jnp.sqrt(b) + 1e-3) + 0.01 * w)

        return value, jax.tree.map(update, p, m, v), m, v, count

    p = {"a": _normal(0, 6, 8), "b": _normal(1, 8, 8), "c": _normal(2, 8, 3)}
    p |= {"a0": _normal(3, 8), "b0": _normal(4, 8)}
    zeros = jax.tree.map(lambda one: one * 0 + np.float32(0.01), p)
    return step, (p, zeros, zeros, np.float32(3), _normal(5, 5, 6, scale=1), _normal(6, 5, 3))


def experts() -> Step:
    """Return a mixture of experts' step: top-k routing with capacities, and a balance loss."""

    def loss(p, x):
        gates = jax.nn.softmax(x @ p["gate"])
        weight, chosen = jax.lax.top_k(gates, 2)
        weight = weight / weight.sum(-1, keepdims=True)
        mask = jax.nn.one_hot(chosen, 4)
        place = jnp.cumsum(mask.sum(1), axis=0) - 1
        kept = mask * (place < 6)[:, None]
        mixing = (kept * weight[..., None]).sum(1)
        hidden = jax.nn.silu(jnp.einsum("td,edh->teh", x, p["up"]))
        out = jnp.einsum("teh,ehd,te->td", hidden, p["down"], mixing)
        balance = (gates.mean(0) * mask.sum(1).mean(0)).sum() * 4
        return jnp.mean((out - jnp.roll(x, 1, axis=0)) ** 2) + 0.01 * balance

    p = {"gate": _normal(0, 6, 4, scale=1), "up": _normal(1, 4, 6, 8), "down": _normal(2, 4, 8, 6)}
    return jax.value_and_grad(loss), (p, _normal(3, 10, 6, scale=1))


def vision_transformer() -> Step:
    """Return a vision transformer's step: patches, positions, a class token, one block."""

    def loss(p, images, labels):
        n = images.shape[0]
        x = images.reshape(n, 2, 4, 2, 4, 3).transpose(0, 1, 3, 2, 4, 5).reshape(n, 4, 48)
        x = jnp.concatenate([jnp.broadcast_to(p["cls"], (n, 1, 8)), x @ p["patch"]], 1) + p["pos"]
        q, k, v = jnp.split(_normalize(x) @ p["qkv"], 3, -1)
        q, k, v = (one.reshape(n, 5, 2, 4).swapaxes(1, 2) for one in (q, k, v))
        x = x + (jax.nn.softmax(q @ k.swapaxes(-1, -2) / 2) @ v).swapaxes(1, 2).reshape(n, 5, 8)
        x = x + jax.nn.gelu(_normalize(x) @ p["up"]) @ p["down"]
        logits = jax.nn.log_softmax(_normalize(x)[:, 0] @ p["head"])
        return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], 1))

    shapes = {"cls": (1, 1, 8), "pos": (1, 5, 8), "patch": (48, 8), "qkv": (8, 24), "up": (8, 16)}
    shapes |= {"down": (16, 8), "head": (8, 5)}
    p = {name: _normal(index, *shape) for index, (name, shape) in enumerate(shapes.items())}
    return jax.value_and_grad(loss), (p, _normal(9, 3, 8, 8, 3, scale=1), np.arange(3, dtype="i4"))


def batch_norm() -> Step:
    """Return a step of two convolutions with batch normalization, strides, pooling, momentum."""

    def convolve(x, kernel, stride):
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def loss(p, moments, x, y):
        kept = []
        for index, stride in ((0, 1), (1, 2)):
            x = convolve(x, p[f"k{index}"], stride)
            mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
            kept.append(0.9 * moments[index] + 0.1 * jnp.stack([mean, variance]))
            x = (x - mean) * jax.lax.rsqrt(variance + 1e-3) * p[f"s{index}"]
            x = jax.nn.leaky_relu(x)
        x = jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
        return jnp.mean(jnp.abs(x.reshape(x.shape[0], -1) @ p["d"] - y)), kept

    def step(p, speed, moments, x, y):
        (value, moments), g = jax.value_and_grad(loss, has_aux=True)(p, moments, x, y)
        speed = jax.tree.map(lambda a, b: 0.9 * a + b, speed, g)
        return value, jax.tree.map(lambda w, s: w - 0.1 * s, p, speed), speed, moments

    p = {"k0": _normal(0, 3, 3, 3, 4), "k1": _normal(1, 3, 3, 4, 4), "d": _normal(2, 16, 3)}
    p |= {"s0": 1 + _normal(3, 4), "s1": 1 + _normal(4, 4)}
    moments = [1 + _normal(5, 2, 4), 1 + _normal(6, 2, 4)]
    speed = jax.tree.map(lambda one: one * np.float32(0.1), p)
    return step, (p, speed, moments, _normal(7, 3, 8, 8, 3, scale=1), _normal(8, 3, 3))


def blockwise_attention() -> Step:
    """Return attention over blocks of keys in a loop, with a causal mask and a running maximum."""

    def attend(q, keys, values):
        def body(state):
            index, top, total, mixed = state
            k = jax.lax.dynamic_slice_in_dim(keys, index * 4, 4)
            v = jax.lax.dynamic_slice_in_dim(values, index * 4, 4)
            scores = q @ k.T * 0.5
            allowed = jnp.arange(12)[:, None] >= index * 4 + jnp.arange(4)[None]
            scores = jnp.where(allowed, scores, -1e9)
            now = jnp.maximum(top, scores.max(-1))
            weights, scale = jnp.exp(scores - now[:, None]), jnp.exp(top - now)
            total = total * scale + weights.sum(-1)
            return index + 1, now, total, mixed * scale[:, None] + weights @ v

        start = (0, jnp.full(12, -1e9), jnp.zeros(12), jnp.zeros((12, 6)))
        _, top, total, mixed = jax.lax.while_loop(lambda state: state[0] < 3, body, start)
        return mixed / total[:, None], top + jnp.log(total)

    return attend, (_normal(0, 12, 6, scale=1), _normal(1, 12, 6, scale=1), _normal(2, 12, 6))


def diffusion() -> Step:
    """Return a diffusion model's step: noise by a schedule, time embedding, a small U-net."""

    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def loss(p, image, noise, time):
        kept = jnp.cumprod(1 - jnp.linspace(1e-3, 0.2, 10))[time][:, None, None, None]
        x = jnp.sqrt(kept) * image + jnp.sqrt(1 - kept) * noise
        angles = time[:, None] * jnp.exp(-jnp.arange(4) / 2.0)
        embedded = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1) @ p["t"]
        first = jax.nn.silu(convolve(x, p["in"]) + embedded[:, None, None])
        low = first.reshape(first.shape[0], 2, 2, 2, 2, -1).mean((2, 4))
        low = jax.nn.silu(convolve(low, p["mid"]))
        up = jnp.repeat(jnp.repeat(low, 2, 1), 2, 2)
        out = convolve(jnp.concatenate([first, up], -1), p["out"])
        return jnp.mean(jnp.square(out - noise))

    p = {"t": _normal(0, 8, 4), "in": _normal(1, 3, 3, 2, 4), "mid": _normal(2, 3, 3, 4, 4)}
    p["out"] = _normal(3, 3, 3, 8, 2)
    noise = _normal(5, 3, 4, 4, 2, scale=1)
    time = np.array([1, 4, 8], np.int32)
    return jax.value_and_grad(loss), (p, _normal(4, 3, 4, 4, 2, scale=1), noise, time)


def recommendation() -> Step:
    """Return a recommender's step: bags of embeddings by segments, crossings, sparse updates."""

    def loss(p, users, items, bags, clicked):
        user, item = p["user"][users], p["item"][items]
        bag = jax.ops.segment_sum(p["item"][bags % 9], bags // 4, 6) / 4
        crossed = jnp.stack([user, item, bag], 1)
        dots = jnp.einsum("bid,bjd->bij", crossed, crossed)
        pairs = dots[:, np.array([0, 0, 1]), np.array([1, 2, 2])]
        x = jnp.concatenate([user, pairs], -1)
        logit = (jax.nn.relu(x @ p["w"]) @ p["v"])[:, 0]
        return jnp.mean(jnp.maximum(logit, 0) - logit * clicked + jnp.log1p(jnp.exp(-abs(logit))))

    def step(p, *batch):
        value, g = jax.value_and_grad(loss)(p, *batch)
        return value, jax.tree.map(lambda w, one: w - 0.5 * one / (1 + jnp.abs(one)), p, g)

    p = {"user": _normal(0, 7, 5), "item": _normal(1, 9, 5), "w": _normal(2, 8, 6, scale=1)}
    p["v"] = _normal(3, 6, 1, scale=1)
    users, items = np.array([0, 3, 3, 5, 6, 1], "i4"), np.array([8, 2, 0, 2, 7, 4], "i4")
    clicked = np.array([1, 0, 1, 1, 0, 0], "f4")
    return step, (p, users, items, np.arange(24, dtype="i4"), clicked)


def ranking() -> Step:
    """Return sorting, top-k, cumulative sums, a histogram, a median and a quantized copy."""

    def rank(x, weights, key):
        order = jnp.argsort(x, axis=-1)
        ordered = jnp.take_along_axis(x, order, -1)
        cumulative = jnp.cumsum(jnp.take(weights, order), -1)
        median = ordered[:, (cumulative < cumulative[:, -1:] / 2).sum(-1)[0]]
        best, place = jax.lax.top_k(x * weights, 3)
        counts = jnp.zeros(5, jnp.int32).at[jnp.clip(jnp.floor(x * 2 + 2), 0, 4).astype(int)].add(1)
        rounded = jnp.round(x / 0.1).astype(jnp.int8).astype(jnp.float32) * 0.1
        low, _ = jax.lax.sort((weights[::-1], jnp.arange(8)), num_keys=1)
        bits = (key ^ (key >> 3)) * jnp.uint32(2654435761) & jnp.uint32(255)
        return median, best, place, counts, rounded.std(-1), jax.lax.cummax(low), bits, x.argmax(0)

    keys = np.arange(5, dtype=np.uint32) * 77 + 5
    return rank, (_normal(0, 4, 8, scale=1), np.abs(_normal(1, 8, scale=1)), keys)


def branching() -> Step:
    """Return a bfloat16 model with `cond`, `switch`, a convergence loop, and complex numbers."""

    def model(x, w, choice):
        y = (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)
        y = jax.lax.cond(y.sum() > 0, lambda y: jnp.tanh(y) * 2, lambda y: jnp.abs(y) - 1, y)
        branches = [jnp.sin, lambda y: jnp.cos(y) * 3, lambda y: jnp.exp(-y * y)]
        y = jax.lax.switch(choice, branches, y)

        def newton(state):
            guess, count = state
            return guess - (guess * guess - jnp.abs(y) - 1) / (2 * guess), count + 1

        root, count = jax.lax.while_loop(lambda state: state[1] < 5, newton, (y * 0 + 2.0, 0))
        spectrum = jnp.fft.rfft(root, axis=-1)
        filtered = spectrum * jnp.exp(-0.1j * jnp.arange(spectrum.shape[-1]))
        return jnp.fft.irfft(filtered, axis=-1), jnp.abs(spectrum).sum(), count

    return model, (_normal(0, 4, 8, scale=1), _normal(1, 8, 8), np.int32(1))


MODELS: Mapping[str, Callable[[], Step]] = {
    "transformer": planted_faults.transformer,
    "CNN": planted_faults.cnn,
    "GRU": planted_faults.rnn,
    "experts": experts,
    "ViT": vision_transformer,
    "MLP with Adam": adam_mlp,
    "batch norm": batch_norm,
    "blockwise attention": blockwise_attention,
    "diffusion": diffusion,
    "recommendation": recommendation,
    "ranking": ranking,
    "branching": branching,
}
