"""Trains a transformer of letters in plain JAX with one jitted step, then samples from it."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

TEXT = "the quick brown fox jumps over the lazy dog. " * 20
letters = sorted(set(TEXT))
tokens = np.array([letters.index(letter) for letter in TEXT], np.int32)
WIDTH, HEADS, LENGTH, BATCH = 32, 2, 16, 8


def normal(key, *shape):
    return jax.random.normal(key, shape) / math.sqrt(shape[0])


def new_parameters(key):
    keys = iter(jax.random.split(key, 20))
    block = lambda: {  # noqa: E731
        "qkv": normal(next(keys), WIDTH, 3 * WIDTH),
        "out": normal(next(keys), WIDTH, WIDTH),
        "up": normal(next(keys), WIDTH, 4 * WIDTH),
        "down": normal(next(keys), 4 * WIDTH, WIDTH),
    }
    return {
        "letters": normal(next(keys), len(letters), WIDTH),
        "places": normal(next(keys), LENGTH, WIDTH),
        "blocks": [block() for _ in range(2)],
    }


def norm(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def logits_of(parameters, text):
    x = parameters["letters"][text] + parameters["places"][: text.shape[-1]]
    mask = jnp.tril(jnp.ones((text.shape[-1],) * 2, bool))
    for block in parameters["blocks"]:
        q, k, v = jnp.split((norm(x) @ block["qkv"]).reshape(*x.shape[:-1], HEADS, -1), 3, axis=-1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
        x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ block["out"]
        x = x + jax.nn.gelu(norm(x) @ block["up"]) @ block["down"]
    return norm(x) @ parameters["letters"].T


@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(parameters, momentum, text):
    def loss_of(parameters):
        scores = jax.nn.log_softmax(logits_of(parameters, text[:, :-1]))
        return -jnp.take_along_axis(scores, text[:, 1:, None], axis=-1).mean()

    loss, gradients = jax.value_and_grad(loss_of)(parameters)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return jax.tree.map(lambda p, m: p - 0.05 * m, parameters, momentum), momentum, loss


random = np.random.default_rng(0)
parameters = new_parameters(jax.random.key(0))
momentum = jax.tree.map(jnp.zeros_like, parameters)
for number in range(20):
    starts = random.integers(0, len(tokens) - LENGTH - 1, BATCH)
    text = np.stack([tokens[start : start + LENGTH + 1] for start in starts])
    parameters, momentum, loss = step(parameters, momentum, text)
    if number % 5 == 4:
        print(number, f"{loss:.3f}")

sample = jax.jit(logits_of)
text, key = jnp.array([[letters.index("t")]]), jax.random.key(9)
for _ in range(8):
    scores = sample(parameters, jnp.pad(text, ((0, 0), (0, LENGTH - text.shape[1]))))
    following = jnp.argmax(scores[:, text.shape[1] - 1], axis=-1)
    text = jnp.concatenate([text, following[:, None]], axis=1)
print(repr("".join(letters[token] for token in text[0])))
