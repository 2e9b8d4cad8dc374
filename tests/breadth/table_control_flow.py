"""Cases of control flow: loops and branches of `jax.lax`, Python's own, and both together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from breadth_cases import Case, expressions, programs
from jax import lax

SHORT = [
    "lax.scan(lambda c, v: (c + v, c * v), row, x)",
    "lax.scan(lambda c, v: (c + v, None), row, x, reverse=True)",
    "lax.scan(lambda c, _: (c * 2, c), x, None, length=3)",
    "lax.scan(lambda c, v: (c + v, v), row, x, unroll=2)",
    "lax.scan(lambda c, v: (c + v['a'], c), row, {'a': x, 'b': y})",
    "lax.scan(lambda c, v: (c + x[0], v), row, x)",
    "lax.scan(lambda c, v: (c.astype(jnp.int8), v), row, x)",
    "lax.scan(lambda c, v: c, row, x)",
    "lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, c[1] * 2), (0, x))",
    "lax.while_loop(lambda c: c.sum() < 100, lambda c: c + 3, x)",
    "lax.while_loop(lambda c: c[0] < at, lambda c: (c[0] + 1, c[1] + y), (0, x))",
    "lax.fori_loop(0, 3, lambda i, c: c + i, x)",
    "lax.fori_loop(0, at, lambda i, c: c + row[i], x)",
    "lax.fori_loop(at, 5, lambda i, c: c.at[i % 3].add(1), x)",
    "lax.cond(flag, lambda: x, lambda: -x)",
    "lax.cond(scalar > 0, jnp.sin, jnp.cos, x)",
    "lax.cond(True, lambda v: v * 2, lambda v: v, x)",
    "lax.cond(flag, lambda v: v, lambda v: v[0], x)",
    "lax.cond(x, lambda: 1, lambda: 2)",
    "lax.switch(at, [jnp.sin, jnp.cos, lambda v: v * 2], x)",
    "lax.switch(9, [jnp.sin, jnp.cos], x)",
    "lax.map(lambda v: v.sum() * v, x)",
    "lax.map(lambda v: v * 2, x, batch_size=2)",
    "lax.associative_scan(jnp.add, x)",
    "lax.associative_scan(jnp.matmul, jnp.stack([square, square * 2, square]))",
    "lax.associative_scan(jnp.maximum, x, reverse=True, axis=1)",
    "lax.custom_root(lambda v: v * v - 2.0, 1.0, lambda f, v: v - f(v) / 2,"
    " lambda g, y: y / g(1.0))",
    "lax.custom_linear_solve(lambda v: spd @ v, row, lambda mv, b: jnp.linalg.solve(spd, b))",
    "[lax.cond(v > 0, lambda a: a * 2, lambda a: a, v) for v in row]",
    "jax.vmap(lambda v: lax.while_loop(lambda c: c < 9, lambda c: c + 2, v))(row)",
    "jax.vmap(lambda p, v: lax.cond(p, jnp.sin, jnp.cos, v))(mask[:, 0], x)",
    "jax.grad(lambda v: lax.scan(lambda c, w: (c * w, c), 1.0, v)[0])(row)",
    "jax.grad(lambda v: lax.fori_loop(0, 3, lambda i, c: c * v[0], 1.0))(row)",
    "jax.grad(lambda v: lax.cond(flag, lambda: v, lambda: v * 3))(scalar)",
    "jax.jit(lambda v: lax.scan(lambda c, w: (c + w, c), v[0], v))(x)",
    "jax.jit(lambda v, n: v * n, static_argnums=1)(x, 3)",
    "jax.jit(lambda v, flip=False: -v if flip else v, static_argnames='flip')(x, flip=True)",
    "jax.jit(lambda v: v * 2 if v.sum() > 0 else v)(x)",
    "jax.jit(lambda v, w: {'a': v + w, 'b': None})(x, w=row)",
    "jax.jit(lambda v: v + x)(y)",
    "jax.jit(jax.jit(lambda v: v * 2, inline=True))(x)",
    "jax.jit(lambda v: v, donate_argnums=0)(x * 2)",
    "jax.jit(lambda v: (v, v, v * 2))(x)",
    "jax.jit(lambda v: v * number)(x)",
    "jax.jit(lambda v, n: v * n)(x, number)",
    "jax.jit(lambda: jnp.arange(3))()",
    "jax.jit(lambda v: jnp.nonzero(v, size=3))(x)",
    "jax.jit(lambda v: jnp.nonzero(v))(x)",
    "jax.jit(lambda v: np.asarray(v))(x)",
    "jax.jit(lambda v: float(v[0]))(row)",
    "jax.jit(jnp.sin).lower(x).compile()(x * 2)",
    "jax.make_jaxpr(lambda v: v * 2)(x).out_avals[0].str_short()",
    "jax.eval_shape(lambda v: v.T, x * 2).shape",
    "jax.named_call(lambda v: v * 2, name='a')(x)",
    "jax.ensure_compile_time_eval().__enter__() or x * 2",
]


def python_branches(x: Any, scalar: Any) -> Any:
    if scalar > 0:
        x = x * 2
    elif scalar < -1:
        x = x - 1
    return x if x.sum() > 0 else -x


def python_loop_until_converged(spd: Any, row: Any) -> Any:
    found, steps = jnp.zeros_like(row), 0
    while jnp.linalg.norm(spd @ found - row) > 1e-3 and steps < 50:
        found = found - (spd @ found - row) / 40
        steps += 1
    return found, steps


def python_state_machine(index: Any, x: Any) -> Any:
    actions = {0: jnp.sin, 1: jnp.cos, 2: jnp.tanh}
    for i in index:
        x = actions[int(i)](x)
    return x


def rows_by_value(x: Any) -> Any:
    return {round(float(row.max()), 4): row * 2 for row in x}


def read_in_the_middle(x: Any, number: Any) -> Any:
    first = x * number
    total = float(first.sum())
    second = first + total
    return second, np.asarray(second) * 2, second - first


def numpy_between(x: Any) -> Any:
    host = np.sort(np.asarray(x * 2), axis=None)
    return jnp.asarray(host) + x.sum(), host.sum()


def nested_loops(x: Any, row: Any) -> Any:
    def outer(carry: Any, value: Any) -> Any:
        def inner(i: Any, c: Any) -> Any:
            return lax.cond(c.sum() > i, lambda: c + value, lambda: c - value)

        return lax.fori_loop(0, 3, inner, carry), carry.sum()

    return lax.scan(outer, row, x)


def newton_under_jit(scalar: Any) -> Any:
    @jax.jit
    def root(target: Any) -> Any:
        def step(state: Any) -> Any:
            guess, _ = state
            return guess - (guess**3 - target) / (3 * guess**2), guess

        def going(state: Any) -> Any:
            return jnp.abs(state[0] - state[1]) > 1e-3

        return lax.while_loop(going, step, (jnp.float32(2), jnp.float32(0)))[0]

    return root(abs(scalar) + 1), [root(n) for n in (2.0, 3.0)]


def generator_of_arrays(x: Any) -> Any:
    def powers(value: Any) -> Iterator[Any]:
        for exponent in range(1, 4):
            yield value**exponent

    return sum(powers(x)), tuple(powers(x[0]))


def dictionary_of_arrays(x: Any, y: Any) -> Any:
    state = {"x": x, "y": y}
    for step in range(3):
        state |= {"x": state["x"] + state["y"] * step, "y": jnp.flip(state["y"])}
    del state["y"]
    return state


def exception_in_the_middle(x: Any, vec: Any) -> Any:
    y = x * 2
    try:
        y = y + vec
    except (TypeError, ValueError) as error:
        y = y + len(type(error).__name__)
    return y


def game_of_life(mask: Any) -> Any:
    board = jnp.pad(mask, 1)

    @jax.jit
    def step(cells: Any) -> Any:
        near = sum(
            jnp.roll(cells.astype(int), (i, j), (0, 1))
            for i in (-1, 0, 1)
            for j in (-1, 0, 1)
            if (i, j) != (0, 0)
        )
        return (near == 3) | (cells & (near == 2))

    for _ in range(4):
        board = step(board)
    return board


PROGRAMS = [
    python_branches,
    python_loop_until_converged,
    python_state_machine,
    rows_by_value,
    read_in_the_middle,
    numpy_between,
    nested_loops,
    newton_under_jit,
    generator_of_arrays,
    dictionary_of_arrays,
    exception_in_the_middle,
    game_of_life,
]


def cases() -> Iterator[Case]:
    """Return the cases of this table."""
    yield from expressions("control flow", {"fi": SHORT})
    yield from programs("control flow", PROGRAMS, "f")
