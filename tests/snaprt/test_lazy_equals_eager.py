"""Whatever eager JAX computes, the same code computes lazily: values, dtypes, weak types."""

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import pytest
from counting import counting
from jax.experimental import sparse
from programs import run_program

import snaprt

X = np.linspace(-1.5, 2.0, 12, dtype=np.float32).reshape(3, 4)
KEY = jax.random.key(7)


@jax.custom_vjp
def _clipped(x):
    return x * 2


_clipped.defvjp(lambda x: (x * 2, x), lambda x, g: (jnp.clip(g * x, -1, 1),))


@jax.custom_jvp
def _scaled(x):
    return x * 3


_scaled.defjvp(lambda p, t: (_scaled(p[0]), t[0] * 10))


def _updated(x):
    return x.at[0].set(5.0).at[:, 1].add(1.0).at[1, ::2].multiply(2)


PROGRAMS = {
    "elementwise": lambda x: jnp.exp(x) + jnp.sin(x) * 2 - x / 3,
    "python scalars": lambda x: (1 + x * 2.5) ** 2 - 3 // 2,
    "reductions": lambda x: (x.sum(), x.mean(0), x.max(1), jnp.argmax(x), x.std()),
    "matmul": lambda x: x @ x.T,
    "einsum": lambda x: jnp.einsum("ij,kj->ik", x, x),
    "indexing": lambda x: (x[0], x[:, 1:3], x[jnp.array([0, 2])], x[..., None], x[-1, -1]),
    "boolean mask": lambda x: x[x > 0],
    "update": _updated,
    "where": lambda x: jnp.where(x > 0, x, 0.0),
    "sort": lambda x: (jnp.sort(x), jnp.argsort(-x), jax.lax.top_k(x, 2)),
    "numpy operand": lambda x: x + np.ones(4, np.float32) * np.float32(2),
    "integers": lambda x: (x.astype(int) // 2, x.astype(int) % 3, x.astype(jnp.uint8)),
    "weak types": lambda x: (jnp.asarray(1.0) * 2, jnp.asarray(2) + x.astype(jnp.bfloat16)),
    "complex": lambda x: jnp.abs(jnp.fft.fft(x)),
    "linalg": lambda x: (
        jnp.linalg.svd(x, compute_uv=False),
        jnp.linalg.inv(x @ x.T + jnp.eye(3)),
        jnp.linalg.cholesky(x @ x.T + jnp.eye(3)),
    ),
    "scipy": lambda x: (jsp.special.logsumexp(x), jsp.stats.norm.logpdf(x)),
    "random": lambda x: x + jax.random.normal(KEY, x.shape) * jax.random.uniform(KEY, (4,)),
    "random split": lambda x: jax.random.split(KEY, 3),
    "grad": jax.grad(lambda x: jnp.sum(jax.nn.gelu(x) ** 2)),
    "value_and_grad": jax.value_and_grad(lambda x: jnp.sum(jax.nn.softmax(x) * x)),
    "hessian": lambda x: jax.hessian(lambda v: jnp.sum(v**3))(x[0]),
    "jvp": lambda x: jax.jvp(jnp.tanh, (x,), (jnp.ones_like(x),)),
    "vmap": lambda x: jax.vmap(lambda row: row * row.sum())(x),
    "vmap of grad": lambda x: jax.vmap(jax.grad(lambda r: jnp.sum(jnp.sin(r))))(x),
    "jit inside": lambda x: jax.jit(lambda y: jnp.cumsum(y) * 2)(x),
    "jit closure": lambda x: jax.jit(lambda y: y + x)(jnp.ones(4)),
    "scan": lambda x: jax.lax.scan(lambda c, r: (c + r, c * r), jnp.zeros(4), x),
    "while": lambda x: jax.lax.while_loop(
        lambda c: c[0] < 4, lambda c: (c[0] + 1, c[1] * 2), (0, x)
    ),
    "fori": lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c + i, x),
    "cond": lambda x: jax.lax.cond(x[0, 0] > 0, lambda: x, lambda: -x),
    "switch": lambda x: jax.lax.switch(1, [lambda y: y, lambda y: y * 2], x),
    "map": lambda x: jax.lax.map(lambda r: r.sum(), x),
    "associative scan": lambda x: jax.lax.associative_scan(jnp.add, x),
    "checkpoint": jax.grad(lambda x: jax.checkpoint(lambda y: jnp.sin(jnp.cos(y)))(x).sum()),
    "custom vjp": jax.grad(lambda x: _clipped(x).sum()),
    "custom jvp": jax.grad(lambda x: _scaled(x).sum()),
    "python branch": lambda x: x * 2 if x.sum() > 0 else x * 3,
    "python loop": lambda x: sum(float(v) for v in x[0]),
    "iteration": lambda x: [row.sum() for row in x],
    "unpacking": lambda x: (lambda a, b, c: a * b + c)(*x),
    "mask under grad": jax.grad(lambda x: (x[x.sum(1) > 0] ** 2).sum()),
    "branch under grad": jax.grad(lambda x: (x * 2 if x[0, 0] > 0 else x * 3).sum()),
    "slice by a value": lambda x: x[jnp.argmax(x[:, 0]) :],
    "shape by a value": lambda x: jnp.zeros((jnp.argmax(x[0]), 2)),
    "arange of a value": lambda x: jnp.arange(jnp.argmax(x[0])),
    "nonzero": lambda x: jnp.nonzero(x > 0),
    "unique": lambda x: jnp.unique(jnp.round(x)),
    "tree": lambda x: jax.tree.map(lambda v: v + 1, {"a": x, "b": [x, 2]}),
    "set_mesh": lambda x: _under_a_mesh(x),
    "compiled ahead": lambda x: jax.jit(lambda v, w: v + w).lower(x, w=x).compile()(x * 2, w=x),
    "named scope": lambda x: _in_scope(x),
    "eval_shape": lambda x: np.zeros(jax.eval_shape(lambda v: v.T, x).shape),
    "pure_callback": lambda x: jax.pure_callback(
        lambda v: np.sort(v), jax.ShapeDtypeStruct(x.shape, x.dtype), x
    ),
    "zero size": lambda x: (jnp.zeros((0, 3)) + 1, x[:0].sum()),
    "float8": lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32),
    "convolution": lambda x: jnp.convolve(x[0], x[1], mode="same"),
    "operators": lambda x: (-x, abs(x), x > 1, x == x, ~(x > 0), x @ x[0], 2**x, x.T, x.real),
    "float0": lambda x: jax.grad(lambda v, i: v.sum() * i, allow_int=True, argnums=1)(x, 3),
    "asarray of list": lambda x: jnp.asarray([x.sum(), 1.0, 2]),
    "concatenate": lambda x: jnp.concatenate([x, jnp.stack([x[0], x[1]])]),
    "derivative of a weak type": lambda x: jax.grad(lambda v: v * 3.0)(jnp.asarray(2.0)),
    "attention that tries an algorithm": lambda x: (
        jax.nn.dot_product_attention(*3 * [x.reshape(1, 3, 1, 4).astype(jnp.float16)])
        .astype(jnp.float32)
        .round(2)
    ),
    "sparse without duplicates": lambda x: (
        sparse.BCOO((x[0], jnp.array([[1], [2], [1], [0]])), shape=(4,)).sum_duplicates().todense()
    ),
    "operand without values": lambda x: jax.jit(lambda n, v: v * 2)(
        np.zeros(3, jax.dtypes.float0), x
    ),
    "linear transpose": lambda x: jax.linear_transpose(lambda v: v * 2, x)(x),
    "vjp": lambda x: jax.vjp(lambda v: jnp.sin(v), x)[1](x),
}


def _under_a_mesh(x):
    mesh = jax.make_mesh((1,), ("d",))
    with jax.set_mesh(mesh):
        assert jax.sharding.get_mesh() == mesh
        return jax.device_put(x, jax.sharding.PartitionSpec("d")) * 2


def _in_scope(x):
    with jax.named_scope("layer"):
        return x * 2


def _rules_that_close_over(matrix):
    """Return functions whose derivatives and batches are computed by rules that close over it."""

    @jax.custom_vjp
    def reverse(x):
        return x @ matrix

    reverse.defvjp(lambda x: (x @ matrix, None), lambda _, g: (g @ (matrix * 3),))

    @jax.custom_jvp
    def forward(x):
        return x @ matrix

    forward.defjvp(lambda p, t: (p[0] @ matrix, t[0] @ (matrix * 2)))

    @jax.custom_batching.custom_vmap
    def batched(x):
        return x @ matrix

    batched.def_vmap(lambda size, is_batched, x: (x @ (matrix * 4), True))
    return reverse, forward, batched


#: What has a jaxpr of a function, which its derivatives and batches are transformed from.
_WITH_JAXPR = {
    "jit": jax.jit,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, length=2)[0],
    "cond": lambda f: lambda x: jax.lax.cond(x.sum() < 9.0, f, lambda v: v, x),
    "while_loop": lambda f: lambda x: jax.lax.while_loop(lambda c: c.max() < 9.0, f, x),
    "remat": jax.checkpoint,
}

_CLOSING_OVER = {
    "grad": lambda around, rules: jax.grad(lambda x: around(rules[0])(x).sum()),
    "grad of jvp": lambda around, rules: jax.grad(lambda x: around(rules[1])(x).sum()),
    "jvp": lambda around, rules: lambda x: jax.jvp(around(rules[1]), (x,), (x,))[1],
    "vmap": lambda around, rules: lambda x: jax.vmap(around(rules[2]))(jnp.stack([x, x])),
}

_NO_SUCH_RULE = {("grad", "while_loop"), ("grad of jvp", "while_loop"), ("vmap", "cond")}


@pytest.mark.parametrize(
    ("transform", "around"),
    [(t, a) for t in _CLOSING_OVER for a in _WITH_JAXPR if (t, a) not in _NO_SUCH_RULE],
)
def test_rules_may_close_over_what_is_pending(transform, around):
    def result():
        rules = _rules_that_close_over(jnp.asarray(X[:, :3]) * 0.5 + jnp.eye(3))
        return _CLOSING_OVER[transform](_WITH_JAXPR[around], rules)(jnp.arange(3.0))

    expected = np.asarray(result())
    with snaprt.lazy():
        np.testing.assert_allclose(np.asarray(result()), expected, rtol=1e-5)


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_equals_eager(name):
    program = PROGRAMS[name]
    expected = program(jnp.asarray(X))
    with snaprt.lazy():
        result = program(jnp.asarray(X))
        snaprt.mark_step()
    leaves, structure = jax.tree.flatten(result)
    expected_leaves, expected_structure = jax.tree.flatten(expected)
    assert structure == expected_structure
    for leaf, wanted in zip(leaves, expected_leaves, strict=True):
        assert getattr(leaf, "dtype", None) == getattr(wanted, "dtype", None)
        assert getattr(leaf, "weak_type", False) == getattr(wanted, "weak_type", False)
        assert np.shape(leaf) == np.shape(wanted)
        np.testing.assert_allclose(_comparable(leaf), _comparable(wanted), rtol=1e-5, atol=1e-6)


def _comparable(array):
    if jnp.issubdtype(getattr(array, "dtype", np.float32), jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(array))
    host = np.asarray(array)
    return host if host.dtype.kind in "biufc" else np.zeros(host.shape)


def test_sixty_four_bit_types_are_those_of_the_line_that_recorded():
    with snaprt.lazy():
        with jax.enable_x64(True):
            wide = jnp.arange(3.0) * 2
        narrow = jnp.arange(3.0) * 2
        snaprt.mark_step()
    assert wide.dtype == np.float64
    assert np.asarray(wide).dtype == np.float64
    assert np.asarray(narrow).dtype == np.float32


def test_lazy_arrays_work_after_the_scope_has_ended():
    with snaprt.lazy():
        x = jnp.arange(4.0) * 2
    np.testing.assert_array_equal(x + 1, [1, 3, 5, 7])
    np.testing.assert_array_equal(jax.jit(lambda v: v * 2)(x), [0, 4, 8, 12])
    np.testing.assert_array_equal(jax.jit(lambda v: v + x)(1.0), [1, 3, 5, 7])
    np.testing.assert_array_equal(jax.grad(lambda v: (v**2).sum())(x), [0, 4, 8, 12])
    assert type(x + 1).__name__ == "ArrayImpl"


def test_enable_and_disable_switch_the_thread():
    snaprt.enable()
    x = jnp.ones(2) * 3
    snaprt.disable()
    y = jnp.ones(2) * 3
    assert type(x).__name__ == "LazyArray"
    assert type(y).__name__ == "ArrayImpl"
    np.testing.assert_array_equal(x, y)


def test_a_lazy_array_has_every_public_attribute_of_an_eager_one():
    eager = jnp.ones((2, 3))
    with snaprt.lazy():
        array = eager * 2
        assert np.dtype(array) == np.float32
        public = [name for name in dir(eager) if not name.startswith("_")]
        found = {name: _error_of(array, name) for name in public}
    assert found == {name: _error_of(eager, name) for name in public}


def _error_of(array, name):
    try:
        getattr(array, name)
    except Exception as error:
        return type(error)
    return None


def test_derivatives_of_integers_are_numpy_arrays():
    with snaprt.lazy():
        gradient = jax.grad(lambda v, i: v.sum() * i, allow_int=True, argnums=1)(jnp.ones(3), 3)
    assert gradient.dtype == jax.dtypes.float0
    assert not isinstance(gradient, jax.Array)


def test_an_escaped_tracer_is_refused_as_eagerly():
    escaped = []
    jax.grad(lambda v: escaped.append(v.sum()) or v.sum())(jnp.ones(3))
    with snaprt.lazy(), pytest.raises(jax.errors.UnexpectedTracerError):
        escaped[0] + jnp.ones(3)


def test_set_mesh_is_refused_where_jax_traces():
    with snaprt.lazy(), pytest.raises(ValueError, match="can only be used outside"):
        jax.jit(lambda: jax.set_mesh(jax.make_mesh((1,), ("d",))))()


def test_scopes_nest():
    with snaprt.lazy():
        with snaprt.lazy():
            pass
        assert type(jnp.ones(2) * 3).__name__ == "LazyArray"
    assert type(jnp.ones(2) * 3).__name__ == "ArrayImpl"


def test_committed_arrays_stay_where_they_are():
    device = jax.devices()[0]
    pinned = jax.device_put(jnp.ones(3), device)
    with snaprt.lazy():
        x = pinned * 2
        y = jnp.ones(3) * 2
        assert x.committed
        assert not y.committed
        snaprt.mark_step()
    assert x.committed
    assert not y.committed
    assert x.sharding == (pinned * 2).sharding


def test_64_bit_arrays_are_used_outside_of_x64_as_eager_jax_uses_them() -> None:
    def compute() -> list[jax.Array]:
        with jax.enable_x64(True):
            wide = jnp.arange(4, dtype=jnp.int64) + 1
        single = np.arange(4, dtype=np.float32)
        return [
            wide + 1,
            (wide * 2).sum(),
            wide[1],
            jax.jit(lambda x: x + 1)(wide),
            jax.lax.convert_element_type(wide, np.float32) + single,
            jnp.ones_like(wide),
            jnp.full_like(wide, 2, shape=(2,)),
            jax.lax.full_like(wide, 1),
        ]

    expected = compute()
    with snaprt.lazy():
        for lazily, eagerly in zip(compute(), expected, strict=True):
            assert (lazily.dtype, lazily.weak_type) == (eagerly.dtype, eagerly.weak_type)
            np.testing.assert_array_equal(lazily, eagerly)


@pytest.mark.parametrize("numbers", [(0.1, 0.2, 0.3), (10**12, 2 * 10**12, 3 * 10**12)])
def test_numbers_of_64_bits_keep_them_where_they_are_read_outside_of_x64(numbers) -> None:
    with snaprt.lazy():
        for number in numbers:  # from the second on, it is an argument of the program
            for is_read_inside in (False, True):
                with jax.enable_x64(True):
                    alone, added = jnp.asarray(number), jnp.arange(2) + number
                    read = [np.asarray(alone), np.asarray(added)] if is_read_inside else None
                values = read or [np.asarray(alone), np.asarray(added)]
                assert values[0] == number
                np.testing.assert_array_equal(values[1], np.arange(2) + number)


def test_settings_that_change_what_an_operation_allows_are_heeded_where_it_is_known() -> None:
    with snaprt.lazy():
        x = jnp.ones(3, jnp.bfloat16)
        jax.lax.reduce_sum(x, [0])
        with jax.allow_f16_reductions(False), pytest.raises(ValueError, match="not allowed"):
            jax.lax.reduce_sum(x, [0])


def test_nothing_is_copied_to_a_device_where_a_guard_forbids_it() -> None:
    program = """
import jax, numpy as np, snaprt
x = jax.device_put(np.ones((3, 3), np.float32))
with snaprt.lazy(), jax.transfer_guard("disallow_explicit"):
    y = x @ x + x
    jax.block_until_ready(jax.jit(lambda v: v * v)(y))
"""
    run_program(program)


def test_a_host_scalar_of_64_bits_stays_in_the_graph() -> None:
    with counting() as counts, snaprt.lazy():
        x = jnp.ones(4) * np.float64(2.0) + np.int64(3)
        snaprt.mark_step()
    assert counts.graphs == 1
    assert not [name for name in snaprt.metrics.counter_names() if name.startswith("eager::")]
    np.testing.assert_array_equal(x, [5, 5, 5, 5])
