"""Cases of flax: models of nnx and linen, forward and through their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from breadth_cases import Case, named_programs, programs
from flax import nnx


def linen(model: Callable[[], nn.Module], given: str, **options: Any) -> Callable[..., Any]:
    """Return a program: the output of a model with new parameters, and the gradient of its size."""

    def run(values: Any, key: Any) -> Any:
        module = model()
        variables = module.init({"params": key, "dropout": key}, values, **options)

        def loss(params: Any) -> Any:
            out, _ = module.apply(
                {**variables, "params": params},
                values,
                rngs={"dropout": key},
                mutable=[name for name in variables if name != "params"],
                **options,
            )
            leaves = jax.tree.leaves(out)
            return sum((leaf**2).mean() for leaf in leaves), out

        (value, out), gradient = jax.value_and_grad(loss, has_aux=True)(variables.get("params", {}))
        return value, out, gradient

    scope: dict[str, Any] = {"run": run}
    return eval(f"lambda {given}, key: run({given}, key)", scope)  # named as the sampled values are


class Cnn(nn.Module):
    @nn.compact
    def __call__(self, values: Any) -> Any:
        values = nn.relu(nn.Conv(4, (3, 3))(values))
        values = nn.avg_pool(values, (2, 2), (2, 2))
        values = nn.max_pool(nn.Conv(2, (3, 3), strides=2)(values), (2, 2))
        return nn.Dense(3)(values.reshape(len(values), -1))


class Recurrent(nn.Module):
    cell: Any

    @nn.compact
    def __call__(self, values: Any) -> Any:
        return nn.RNN(self.cell(5))(values)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, values: Any) -> Any:
        mask = nn.make_causal_mask(values[..., 0])
        attended = nn.MultiHeadDotProductAttention(2)(values, mask=mask)
        return nn.LayerNorm()(values + attended)


class Embedded(nn.Module):
    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        embed = nn.Embed(10, 8)
        return embed.attend(nn.Dense(8)(embed(tokens)))


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, values: Any) -> Any:
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, carry: Any, _: Any) -> Any:
                return nn.tanh(nn.Dense(6)(carry)), None

        layers = nn.scan(nn.remat(Layer), {"params": 0}, split_rngs={"params": True}, length=3)
        return layers()(values, None)[0]


LINEN = {
    "linen.Dense": linen(lambda: nn.Dense(3), "batch"),
    "linen MLP": linen(lambda: nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(3)]), "batch"),
    "linen CNN": linen(Cnn, "image"),
    "linen.ConvTranspose": linen(lambda: nn.ConvTranspose(2, (3, 3), strides=(2, 2)), "image"),
    "linen.BatchNorm": linen(lambda: nn.BatchNorm(use_running_average=False), "batch"),
    "linen.BatchNorm, evaluated": linen(lambda: nn.BatchNorm(use_running_average=True), "batch"),
    "linen.LayerNorm": linen(nn.LayerNorm, "batch"),
    "linen.RMSNorm": linen(nn.RMSNorm, "batch"),
    "linen.GroupNorm": linen(lambda: nn.GroupNorm(3), "batch"),
    "linen.Dropout": linen(lambda: nn.Dropout(0.5, deterministic=False), "batch"),
    "linen.Embed": linen(Embedded, "tokens"),
    "linen attention": linen(Attention, "sequence"),
    "linen.LSTMCell": linen(lambda: Recurrent(nn.LSTMCell), "sequence"),
    "linen.OptimizedLSTMCell": linen(lambda: Recurrent(nn.OptimizedLSTMCell), "sequence"),
    "linen.GRUCell": linen(lambda: Recurrent(nn.GRUCell), "sequence"),
    "linen.SimpleCell": linen(lambda: Recurrent(nn.SimpleCell), "sequence"),
    "linen.DenseGeneral": linen(lambda: nn.DenseGeneral((2, 3)), "batch"),
    "linen.Einsum": linen(lambda: nn.Einsum((6, 2), "bi,ij->bj"), "batch"),
    "linen.WeightNorm": linen(lambda: nn.WeightNorm(nn.Dense(3)), "batch"),
    "linen.scan and remat": linen(Scanned, "batch"),
    "linen.PReLU": linen(nn.PReLU, "batch"),
}


def trained(model: Callable[[nnx.Rngs], Any], given: str) -> Callable[..., Any]:
    """Return a program: two steps of gradient descent of an nnx model, and its state after them."""

    def run(values: Any) -> Any:
        module = model(nnx.Rngs(0, dropout=1))

        def loss(network: Any) -> Any:
            return sum((leaf**2).mean() for leaf in jax.tree.leaves(network(values)))

        losses = []
        for _ in range(2):
            value, gradient = nnx.value_and_grad(loss)(module)
            params = nnx.state(module, nnx.Param)
            nnx.update(module, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient))
            losses.append(value)
        return losses, jax.tree.leaves(nnx.state(module, nnx.Not(nnx.RngState)))

    return eval(f"lambda {given}: run({given})", {"run": run})


class NnxMlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(6, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, values: Any) -> Any:
        return self.last(self.dropout(nnx.gelu(self.norm(self.first(values)))))


class NnxCnn(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.out = nnx.Linear(64, 2, rngs=rngs)

    def __call__(self, values: Any) -> Any:
        values = nnx.max_pool(nnx.relu(self.conv(values)), (2, 2), (2, 2))
        return self.out(values.reshape(len(values), -1))


class NnxAttention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)

    def __call__(self, values: Any) -> Any:
        return self.norm(values + self.attention(values))


class NnxCounter(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(6, 6, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, values: Any) -> Any:
        self.calls[...] += 1
        return self.linear(values)


NNX = {
    "nnx.Linear": trained(lambda rngs: nnx.Linear(6, 3, rngs=rngs), "batch"),
    "nnx MLP, batch norm, dropout": trained(NnxMlp, "batch"),
    "nnx CNN": trained(NnxCnn, "image"),
    "nnx attention": trained(NnxAttention, "sequence"),
    "nnx.LSTMCell": trained(lambda rngs: nnx.RNN(nnx.LSTMCell(8, 5, rngs=rngs)), "sequence"),
    "nnx.GRUCell": trained(lambda rngs: nnx.RNN(nnx.GRUCell(8, 5, rngs=rngs)), "sequence"),
    "nnx.Embed": trained(lambda rngs: nnx.Embed(10, 4, rngs=rngs), "tokens"),
    "nnx.Sequential": trained(
        lambda rngs: nnx.Sequential(nnx.Linear(6, 4, rngs=rngs), nnx.relu), "batch"
    ),
    "nnx.LoRA": trained(lambda rngs: nnx.LoRA(6, 2, 3, rngs=rngs), "batch"),
    "nnx.RMSNorm": trained(lambda rngs: nnx.RMSNorm(6, rngs=rngs), "batch"),
    "nnx counter": trained(NnxCounter, "batch"),
}


def nnx_jit(batch: Any) -> Any:
    model = NnxMlp(nnx.Rngs(0))

    @nnx.jit
    def step(network: Any, values: Any) -> Any:
        value, gradient = nnx.value_and_grad(lambda m: (m(values) ** 2).mean())(network)
        params = nnx.state(network, nnx.Param)
        nnx.update(network, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient))
        return value

    losses = [step(model, batch) for _ in range(3)]
    model.eval()
    return losses, model(batch)


def nnx_vmap_and_scan(batch: Any) -> Any:
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def create(rngs: nnx.Rngs) -> Any:
        return nnx.Linear(6, 6, rngs=rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def forward(layer: Any, values: Any) -> Any:
        return jnp.tanh(layer(values))

    return forward(create(nnx.Rngs(0)), batch)


def nnx_split_and_merge(batch: Any) -> Any:
    graph, params, rest = nnx.split(NnxMlp(nnx.Rngs(0)), nnx.Param, ...)

    @jax.jit
    def forward(p: Any, r: Any, values: Any) -> Any:
        model = nnx.merge(graph, p, r)
        return model(values), nnx.state(model, nnx.BatchStat)

    out, stats = forward(params, rest, batch)
    return out, jax.tree.leaves(stats)


def nnx_optimizer(batch: Any) -> Any:
    import optax

    model = NnxMlp(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(0.01), wrt=nnx.Param)
    losses = []
    for _ in range(3):
        loss, gradient = nnx.value_and_grad(lambda m: (m(batch) ** 2).mean())(model)
        optimizer.update(model, gradient)
        losses.append(loss)
    return losses, jax.tree.leaves(nnx.state(optimizer))


def linen_train_state(batch: Any, labels: Any, key: Any) -> Any:
    import optax
    from flax.training.train_state import TrainState

    model = nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(4)])
    state = TrainState.create(
        apply_fn=model.apply, params=model.init(key, batch), tx=optax.adam(1e-2)
    )

    def loss(params: Any) -> Any:
        logits = state.apply_fn(params, batch)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    losses = []
    for _ in range(3):
        value, gradient = jax.value_and_grad(loss)(state.params)
        state = state.apply_gradients(grads=gradient)
        losses.append(float(value))
    return losses, state.params, state.step


PROGRAMS = [nnx_jit, nnx_vmap_and_scan, nnx_split_and_merge, nnx_optimizer, linen_train_state]


def cases() -> Iterator[Case]:
    """Return the cases of this table."""
    yield from named_programs("flax.linen", LINEN)
    yield from named_programs("flax.nnx", NNX)
    yield from programs("flax.nnx", PROGRAMS)
