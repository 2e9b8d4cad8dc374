"""Cases of transformations: derivatives of each kind, `vmap`, custom rules, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from breadth_cases import Case, expressions, programs

FUNCTIONS = {
    "sine": "lambda v: jnp.sin(v) * v",
    "product": "lambda v: v @ v.T",
    "norm": "lambda v: jnp.linalg.norm(v, axis=-1)",
    "softmax": "lambda v: jax.nn.softmax(v)",
    "sorted": "lambda v: jnp.sort(v)",
    "indexed": "lambda v: v[..., ::2] * 3",
    "cumulated": "lambda v: jnp.cumsum(v, axis=0) ** 2",
    "chosen": "lambda v: jnp.where(v > 0, v**2, jnp.exp(v))",
    "jitted": "jax.jit(lambda v: jnp.tanh(v) + v.sum())",
    "checkpointed": "jax.checkpoint(lambda v: jnp.sin(jnp.cos(v)))",
    "scanned": "lambda v: lax.scan(lambda c, w: (c * w, jnp.sin(c)), v[0], v)[1]",
    "looped": "lambda v: lax.fori_loop(0, 3, lambda i, c: c * v + i, v)",
    "branched": "lambda v: lax.cond(v.sum() > 0, jnp.sin, jnp.cos, v)",
    "read": "lambda v: v * 2 if v.sum() > 0 else v * 3",
}

TRANSFORMED = [
    row
    for f in FUNCTIONS.values()
    for row in (
        f"jax.grad(lambda v: ({f})(v).sum())(x)",
        f"jax.value_and_grad(lambda v: (({f})(v) ** 2).sum())(x)",
        f"jax.jvp({f}, (x,), (y,))",
        f"jax.vjp({f}, x)[1](({f})(x))",
        f"jax.linearize({f}, x)[1](y)",
        f"jax.jacfwd({f})(x)",
        f"jax.jacrev({f})(x)",
        f"jax.vmap({f})(cube)",
        f"jax.vmap({f}, in_axes=2, out_axes=1)(cube)",
        f"jax.jit(jax.grad(lambda v: ({f})(v).sum()))(x)",
        f"jax.hessian(lambda v: ({f})(v[None]).sum())(row)",
        f"jax.vmap(jax.grad(lambda v: ({f})(v).sum()))(cube)",
        f"jax.grad(lambda v: jax.vmap({f})(v).sum())(cube)",
    )
]

SHORT = [
    "jax.grad(lambda v, w: (v * w).sum(), argnums=(0, 1))(x, y)",
    "jax.grad(lambda t: sum(v.sum() ** 2 for v in jax.tree.leaves(t)))(tree)",
    "jax.grad(lambda v: (v.sum(), v), has_aux=True)(x)",
    "jax.grad(lambda v: (abs(v) ** 2).sum(), holomorphic=False)(x)",
    "jax.grad(lambda v: v.sum())(index)",
    "jax.grad(lambda v: v)(x)",
    "jax.grad(lambda v, i: v.sum() * i, allow_int=True, argnums=1)(x, 3)",
    "jax.grad(jax.grad(jax.grad(jnp.sin)))(scalar)",
    "jax.linear_transpose(lambda v: v @ square, x)(x)",
    "jax.jacobian(lambda t: t['a'] @ t['b'][0])(tree)",
    "jax.fwd_and_bwd(lambda v: jnp.sin(v), (0,))[0](x)[0]",
    "jax.vmap(lambda v, w: v @ w, in_axes=(0, None))(x, row)",
    "jax.vmap(lambda v: v / jax.lax.psum(v, 'n'), axis_name='n')(x)",
    "jax.vmap(lambda v: jax.lax.pmax(v, 'n') - jax.lax.pmin(v, 'n'), axis_name='n')(x)",
    "jax.vmap(lambda v: jax.lax.pmean(v, 'n') * jax.lax.axis_index('n'), axis_name='n')(x)",
    "jax.vmap(lambda v: jax.lax.ppermute(v, 'n', [(0, 1), (1, 2), (2, 0)]), axis_name='n')(x)",
    "jax.vmap(lambda v: jax.lax.all_gather(v, 'n'), axis_name='n')(x)",
    "jax.vmap(lambda v: jax.lax.all_to_all(v, 'n', 0, 0), axis_name='n')(square)",
    "jax.vmap(lambda v: jax.lax.pshuffle(v, 'n', [2, 0, 1]), axis_name='n')(x)",
    "jax.vmap(lambda v: jax.lax.pswapaxes(v, 'n', 0), axis_name='n')(square)",
    "jax.vmap(lambda v: jax.lax.psum_scatter(v, 'n'), axis_name='n')(square)",
    "jax.vmap(lambda v: v * jax.lax.axis_size('n'), axis_name='n')(x)",
    "jax.vmap(lambda v: v * 2, spmd_axis_name='s')(x)",
    "jax.vmap(lambda v, w: v + w)(x, vec)",
    "jax.vmap(jax.random.uniform)(keys)",
    "jax.vmap(lambda m: jnp.linalg.inv(m @ m.T + jnp.eye(3, dtype=m.dtype)))(cube)",
    "jax.checkpoint(lambda v: jnp.sin(v), policy=jax.checkpoint_policies.dots_saveable)(x)",
    "jax.checkpoint_policies.everything_saveable() and x",
    "jax.closure_convert(lambda v: v * x, y)[0](y, *jax.closure_convert(lambda v: v * x, y)[1])",
    "jax.experimental.jet.jet(jnp.sin, (x,), ([y],)) if hasattr(jax.experimental, 'jet') else x",
]


def custom_jvp(x: Any) -> Any:
    @jax.custom_jvp
    def scaled(v: Any) -> Any:
        return v * 3

    @scaled.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return scaled(*primals), tangents[0] * 10

    return scaled(x), jax.grad(lambda v: scaled(v).sum())(x), jax.jacfwd(scaled)(x[0])


def custom_jvps(x: Any, y: Any) -> Any:
    @jax.custom_jvp
    def product(v: Any, w: Any) -> Any:
        return v * w

    product.defjvps(lambda t, out, v, w: t * w * 2, None)
    return jax.jvp(product, (x, y), (y, x)), jax.vmap(product)(x, y)


def custom_vjp(x: Any) -> Any:
    @jax.custom_vjp
    def clipped(v: Any) -> Any:
        return v * 2

    clipped.defvjp(lambda v: (v * 2, v), lambda v, g: (jnp.clip(g * v, -1, 1),))
    both = jax.value_and_grad(lambda v: clipped(v).sum())
    return clipped(x), both(x), jax.vmap(jax.grad(lambda v: clipped(v).sum()))(x), jax.jit(both)(x)


def custom_vjp_with_static_arguments(x: Any, y: Any) -> Any:
    @partial(jax.custom_vjp, nondiff_argnums=(0, 1))
    def apply(function: Any, times: int, v: Any) -> Any:
        return function(v) * times

    def backward(function: Any, times: int, v: Any, g: Any) -> Any:
        return (g * times * jnp.cos(v),)

    apply.defvjp(lambda function, times, v: (apply(function, times, v), v), backward)
    return jax.grad(lambda v: (apply(jnp.sin, 3, v) * y).sum())(x)


def custom_vjp_that_reads(x: Any) -> Any:
    @jax.custom_vjp
    def normalized(v: Any) -> Any:
        return v / v.max()

    normalized.defvjp(lambda v: (normalized(v), v.max()), lambda top, g: (g * float(top),))
    return jax.grad(lambda v: normalized(v).sum())(x)


def custom_batching(x: Any) -> Any:
    @jax.custom_batching.custom_vmap
    def doubled(v: Any) -> Any:
        return v * 2

    @doubled.def_vmap
    def _(size: Any, batched: Any, v: Any) -> Any:
        return v * 3, batched[0]

    return doubled(x), jax.vmap(doubled)(x)


def checkpoint_of_a_network(batch: Any, x: Any) -> Any:
    weights = [jnp.ones((6, 6), batch.dtype) / 6, jnp.eye(6, dtype=batch.dtype)]

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
    def layer(w: Any, v: Any) -> Any:
        return jnp.tanh(v @ w)

    def loss(ws: Any) -> Any:
        out = batch
        for w in ws:
            out = layer(w, out)
        return (out**2).mean() + x.sum() * 0

    return jax.value_and_grad(loss)(weights)


def hessian_vector_product(vec: Any, other: Any) -> Any:
    def energy(v: Any) -> Any:
        return jnp.sum(v**4) / 4 + jnp.prod(jnp.cos(v))

    return jax.jvp(jax.grad(energy), (vec,), (other,))[1], jax.jacfwd(jax.jacrev(energy))(vec)


def gradient_descent(batch: Any, labels: Any, number: Any) -> Any:
    weights = jnp.zeros((6, 4), batch.dtype)

    def loss(w: Any) -> Any:
        logits = batch @ w
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1).mean()

    losses = []
    for _ in range(3):
        value, gradient = jax.value_and_grad(loss)(weights)
        weights = weights - number * gradient
        losses.append(float(value))
    return weights, losses


def perturbed_gradients(batch: Any, key: Any) -> Any:
    def per_example(w: Any, row: Any, k: Any) -> Any:
        return jnp.tanh(row @ w + jax.random.normal(k, ())) ** 2

    keys = jax.random.split(key, len(batch))
    weights = jnp.ones(6, batch.dtype)
    return jax.vmap(jax.grad(per_example), (None, 0, 0))(weights, batch, keys)


def implicit_differentiation(scalar: Any) -> Any:
    def root(a: Any) -> Any:
        return jax.lax.custom_root(
            lambda v: v**3 - a,
            jnp.ones_like(a),
            lambda f, v: jax.lax.fori_loop(0, 20, lambda i, w: w - f(w) / (3 * w**2), v),
            lambda g, b: b / g(jnp.ones_like(b)),
        )

    return root(abs(scalar) + 1), jax.grad(root)(abs(scalar) + 1)


PROGRAMS = [
    custom_jvp,
    custom_jvps,
    custom_vjp,
    custom_vjp_with_static_arguments,
    custom_vjp_that_reads,
    custom_batching,
    checkpoint_of_a_network,
    hessian_vector_product,
    gradient_descent,
    perturbed_gradients,
    implicit_differentiation,
]


def cases() -> Iterator[Case]:
    """Return the cases of this table."""
    yield from expressions("transformations", {"f": TRANSFORMED, "fc": SHORT})
    yield from programs("transformations", PROGRAMS)
