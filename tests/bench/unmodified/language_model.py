"""A nano language model with a jitted step of its own; the loss is printed each 50 steps."""

import math

import jax
import jax.numpy as jnp
import numpy as np

WIDTH, HEADS, LAYERS, LENGTH, BATCH = 64, 4, 4, 64, 8
text = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 200, np.uint8)
keys = iter(jax.random.split(jax.random.key(0), 64))


def normal(*shape):
    return jax.random.normal(next(keys), shape) / math.sqrt(shape[0])


params = {
    "embed": normal(128, WIDTH),
    "places": normal(LENGTH, WIDTH),
    "blocks": [
        {
            "qkv": normal(WIDTH, 3 * WIDTH),
            "out": normal(WIDTH, WIDTH),
            "up": normal(WIDTH, 4 * WIDTH),
            "down": normal(4 * WIDTH, WIDTH),
        }
        for _ in range(LAYERS)
    ],
}


def norm(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def loss_of(params, tokens):
    x = params["embed"][tokens[:, :-1]] + params["places"]
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    for block in params["blocks"]:
        q, k, v = jnp.split((norm(x) @ block["qkv"]).reshape(BATCH, LENGTH, HEADS, -1), 3, -1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
        x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ block["out"]
        x = x + jax.nn.gelu(norm(x) @ block["up"]) @ block["down"]
    scores = jax.nn.log_softmax(norm(x) @ params["embed"].T)
    return -jnp.take_along_axis(scores, tokens[:, 1:, None], -1).mean()


@jax.jit
def step(params, momentum, tokens):
    loss, grads = jax.value_and_grad(loss_of)(params, tokens)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - 0.01 * m, params, momentum), momentum, loss


random = np.random.default_rng(0)
momentum = jax.tree.map(jnp.zeros_like, params)
for number in range(200):
    starts = random.integers(0, len(text) - LENGTH - 1, BATCH)
    tokens = np.stack([text[s : s + LENGTH + 1] for s in starts]).astype(np.int32)
    params, momentum, loss = step(params, momentum, tokens)
    if number % 50 == 49:
        print(number, f"{loss:.2f}")
