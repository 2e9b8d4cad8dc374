"""Training steps of ten types of models, plain `jax.jit` programs, run once so that XLA dumps them.

XLA_FLAGS="--xla_dump_to=DIR --xla_dump_hlo_snapshots" python xla_models.py [NAME ...]
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import xla_programs
from xla_programs import integers, normal

MODELS = {}


def model(parameters, *arguments):
    """Let a loss be a step of gradient descent; the step is the program."""

    def keep(loss):
        def step(parameters, *arguments):
            value, gradients = jax.value_and_grad(loss)(parameters, *arguments)
            return value, jax.tree.map(lambda p, g: p - g * 0.01, parameters, gradients)

        step.__name__ = loss.__name__
        MODELS[loss.__name__] = step, (parameters, *arguments), {}
        return loss

    return keep


def weights(**shapes):
    return {name: normal(*shape) * 0.2 for name, shape in shapes.items()}


def convolve(x, kernel, strides=(1, 1)):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, strides, "SAME", dimension_numbers=numbers)


def normalized(x, axes):
    return (x - x.mean(axes, keepdims=True)) * jax.lax.rsqrt(x.var(axes, keepdims=True) + 1e-5)


@model(
    weights(stem=(3, 3, 3, 8), one=(3, 3, 8, 8), two=(3, 3, 8, 8), top=(8, 5)), normal(4, 8, 8, 3)
)
def residual_network(p, x):
    x = convolve(x, p["stem"])
    x = jax.nn.relu(
        x + convolve(jax.nn.relu(normalized(convolve(x, p["one"]), (0, 1, 2))), p["two"])
    )
    return -jax.nn.log_softmax(x.mean((1, 2)) @ p["top"])[:, 0].mean()


@model(weights(patch=(48, 16), qkv=(16, 48), out=(16, 16), top=(16, 5)), normal(2, 8, 8, 3))
def vision_transformer(p, x):
    patches = x.reshape(2, 2, 4, 2, 4, 3).transpose(0, 1, 3, 2, 4, 5).reshape(2, 4, 48)
    x = patches @ p["patch"]
    q, k, v = jnp.split(normalized(x, -1) @ p["qkv"], 3, -1)
    x = x + jax.nn.softmax(q @ k.swapaxes(1, 2) / 4) @ v @ p["out"]
    return jax.nn.logsumexp(x.mean(1) @ p["top"], -1).sum()


@model(weights(x=(6, 32), h=(8, 32), top=(8, 3)), normal(7, 4, 6))
def long_short_term_memory(p, xs):
    def cell(state, x):
        h, c = state
        i, f, g, o = jnp.split(x @ p["x"] + h @ p["h"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

    (h, _), _ = jax.lax.scan(cell, (jnp.zeros((4, 8)), jnp.zeros((4, 8))), xs)
    return jnp.sum((h @ p["top"]) ** 2)


@model(
    weights(message=(10, 8), update=(13, 5)),
    normal(9, 5),
    integers(0, 9, 30, np.int32),
    integers(0, 9, 30, np.int32),
)
def graph_network(p, nodes, senders, receivers):
    pairs = jnp.concatenate([nodes[senders], nodes[receivers]], -1)
    summed = jax.ops.segment_sum(jax.nn.silu(pairs @ p["message"]), receivers, 9)
    return jnp.max(jnp.concatenate([nodes, summed], -1) @ p["update"], 0).sum()


@model(weights(encode=(12, 8), decode=(4, 12)), normal(6, 12), np.array([0, 3], np.uint32))
def variational_autoencoder(p, x, key_data):
    mean, spread = jnp.split(x @ p["encode"], 2, -1)
    noise = jax.random.normal(jax.random.wrap_key_data(key_data), mean.shape)
    guess = jax.nn.sigmoid((mean + jnp.exp(spread / 2) * noise) @ p["decode"])
    return jnp.mean((x - guess) ** 2) + jnp.mean(jnp.exp(spread) + mean**2 - 1 - spread) / 2


@model(
    weights(down=(3, 3, 2, 6), middle=(3, 3, 6, 6), up=(3, 3, 2, 6), time=(8, 6)),
    normal(2, 8, 8, 2),
    np.array([3, 17], np.int32),
)
def diffusion_network(p, x, times):
    angles = times[:, None] / 10 ** jnp.arange(4.0)
    time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1) @ p["time"]
    low = jax.nn.silu(convolve(x, p["down"], (2, 2)) + time[:, None, None])
    low = low + jax.nn.silu(convolve(low, p["middle"]))
    guess = jax.image.resize(low, (2, 8, 8, 6), "bilinear")
    return jnp.mean((convolve(guess, p["up"].swapaxes(2, 3)) - x) ** 2)


@model(weights(route=(8, 4), up=(4, 8, 16), down=(4, 16, 8)), normal(10, 8))
def mixture_of_experts(p, x):
    gates, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["route"]), 2)
    routed = jnp.sum(jax.nn.one_hot(chosen, 4) * gates[..., None], 1)
    hidden = jax.nn.gelu(jnp.einsum("te,td,edh->teh", routed, x, p["up"]))
    return jnp.sum(jnp.einsum("teh,ehd->td", hidden, p["down"]) ** 2)


@model(weights(step=(6,), a=(6,), b=(4, 6), c=(6, 4)), normal(16, 4))
def state_space_model(p, x):
    decay = jnp.exp(-jax.nn.softplus(p["step"]) * jnp.exp(p["a"]))
    gains = jnp.broadcast_to(decay, (16, 6)), x @ p["b"]

    def join(one, other):
        return one[0] * other[0], one[1] * other[0] + other[1]

    return jnp.mean((jax.lax.associative_scan(join, gains)[1] @ p["c"] - x) ** 2)


@model(weights(scale=(3, 3), shift=(3, 3), mix=(6, 6)), normal(5, 6))
def normalizing_flow(p, x):
    mix = p["mix"] + jnp.eye(6)
    one, other = jnp.split(x @ mix, 2, -1)
    scale = jnp.tanh(one @ p["scale"])
    other = other * jnp.exp(scale) + one @ p["shift"]
    likelihood = -(one**2 + other**2).sum(-1) / 2 + scale.sum(-1) + jnp.linalg.slogdet(mix)[1]
    return -likelihood.mean()


@model(
    {
        "table": normal(50, 8, dtype=ml_dtypes.bfloat16),
        "top": normal(8, 1, dtype=ml_dtypes.bfloat16),
    },
    integers(0, 50, (6, 5), np.int32),
    integers(0, 2, 6, np.int32),
)
def recommender(p, items, clicked):
    score = (p["table"][items].sum(1) @ p["top"])[:, 0].astype(jnp.float32)
    return jnp.mean(jax.nn.softplus(score) - clicked * score)


if __name__ == "__main__":
    xla_programs.run(MODELS)
