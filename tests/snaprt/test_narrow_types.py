"""XLA_USE_BF16 and XLA_USE_32BIT_LONG: programs compute in narrower types, and nobody else sees."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from counting import counting
from flax import nnx

import snaprt
from snaprt.compile.downcast import narrowings


@pytest.fixture
def bf16(monkeypatch):
    monkeypatch.setenv("XLA_USE_BF16", "1")


@pytest.fixture
def long(monkeypatch):
    monkeypatch.setenv("XLA_USE_32BIT_LONG", "1")
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def _is_bf16(value):
    value = np.asarray(value)
    return np.array_equal(value.astype(ml_dtypes.bfloat16).astype(value.dtype), value)


def _module(*arrays):
    """Run what is pending; return the module that computed the arrays."""
    snaprt.mark_step()
    (executable,) = {array._origin for array in arrays}
    return executable.lowered().as_text()


X = np.linspace(-3, 3, 32, dtype=np.float32).reshape(4, 8)


def test_arrays_are_computed_in_bfloat16_and_stay_float32_to_the_user(bf16):
    with snaprt.lazy():
        x = jnp.asarray(X)
        y = jnp.tanh(x @ x.T) + x.sum(axis=1)
        assert y.dtype == jnp.float32
        text = _module(y)
    assert y.dtype == jnp.float32
    assert np.asarray(y).dtype == np.float32
    assert _is_bf16(y)
    assert "dot_general" in text
    (dot,) = [line for line in text.splitlines() if "dot_general" in line]
    assert "bf16" in dot
    assert "f32" not in dot.replace("bf16", "")
    expected = np.tanh(X @ X.T) + X.sum(axis=1)
    np.testing.assert_allclose(y, expected, atol=0.1)
    assert not np.array_equal(y, expected)


def test_the_switch_may_change_while_the_program_runs(monkeypatch):
    values = []
    for text in ("0", "1", "0", "1"):
        monkeypatch.setenv("XLA_USE_BF16", text)
        with snaprt.lazy(), counting() as counts:
            values.append(jnp.exp(jnp.asarray(X)) * 1.25)
            snaprt.mark_step()
        assert counts.graphs == 1
    assert [_is_bf16(value) for value in values] == [False, True, False, True]
    np.testing.assert_array_equal(values[0], values[2])
    np.testing.assert_array_equal(values[1], values[3])


def test_the_switch_takes_part_in_the_keys_of_the_cache(monkeypatch, cache_folder):
    from snaprt.compile.loaded import _families

    found = []
    for text in ("1", "0", "1"):
        monkeypatch.setenv("XLA_USE_BF16", text)
        _families.clear()
        with snaprt.lazy():
            value = jnp.sinh(jnp.asarray(X)) * 0.3
            snaprt.mark_step()
        found.append((value._origin.from_cache, value._origin.graph_id, _is_bf16(value)))
    assert [one[2] for one in found] == [True, False, True]
    assert found[2][:2] == (True, found[0][1])
    assert found[1][1] != found[0][1]


def test_scalars_sums_and_random_draws_keep_their_digits(bf16):
    step = jnp.asarray(3)
    with snaprt.lazy():
        decay = 1 - 0.999 ** jnp.asarray(step, jnp.float32)
        total = jnp.full((1000,), 1.0).sum()
        drawn = jax.random.normal(jax.random.key(0), (200_000,))
        snaprt.mark_step()
    np.testing.assert_allclose(decay, 1 - 0.999**3, rtol=1e-4)
    assert float(total) == 1000
    assert np.isfinite(drawn).all()
    assert abs(float(np.std(drawn)) - 1) < 0.01
    assert _is_bf16(drawn)
    eager = jax.random.normal(jax.random.key(0), (200_000,))
    np.testing.assert_allclose(drawn, eager, rtol=2**-8)


CASES = {
    "loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, a: a * 0.5 + i, x),
    "scan": lambda x: jax.lax.scan(lambda c, row: (c + row, c * row), x[0], x),
    "cond": lambda x: jax.lax.cond(x[0, 0] < 0, jnp.sin, jnp.cos, x),
    "sort": lambda x: jnp.sort(x, axis=1),
    "argsort": lambda x: jnp.argsort(-x, axis=0),
    "scatter": lambda x: x.at[jnp.array([0, 0, 2])].add(1.0),
    "gather": lambda x: x[jnp.array([3, 1])],
    "slice": lambda x: jax.lax.dynamic_slice(x, (1, 2), (2, 3)),
    "pad": lambda x: jnp.pad(x, 1, constant_values=0.5),
    "clip": lambda x: jnp.clip(x, -1, 1),
    "cumsum": lambda x: jnp.cumsum(x, axis=0),
    "softmax": jax.nn.softmax,
    "fft": lambda x: jnp.abs(jnp.fft.rfft(x)),
    "eig": lambda x: jnp.abs(jnp.linalg.eigvals(x[:, :4])).sum(),
    "svd": lambda x: jnp.linalg.svd(x)[1],
    "solve": lambda x: jnp.linalg.solve(x[:, :4] @ x[:, :4].T + 5 * jnp.eye(4), x),
    "cholesky": lambda x: jnp.linalg.cholesky(x @ x.T + 5 * jnp.eye(4)),
    "conv": lambda x: jnp.convolve(x[0], x[1, :3]),
    "pool": lambda x: nnx.max_pool(x[None, ..., None], (2, 2)),
    "where": lambda x: jnp.where(x > 0, x, 0).mean(),
    "callback": lambda x: jax.pure_callback(lambda a: a + 1, jax.typeof(x), x),
    "bits": lambda x: jax.lax.bitcast_convert_type(x * 2, jnp.int32) >> 24,
    "int": lambda x: (x * 10).astype(jnp.int32).astype(jnp.float16),
    "grad": jax.grad(lambda x: jnp.log1p(jnp.exp(x) ** 0.5).sum()),
    "gelu": lambda x: jax.nn.gelu(x) + jax.scipy.special.erf(x),
    "dropout": lambda x: x * jax.random.bernoulli(jax.random.key(1), 0.5, x.shape),
    "draws": lambda x: jax.random.uniform(jax.random.key(2), x.shape, minval=x, maxval=x + 1),
    "choice": lambda x: jax.random.permutation(jax.random.key(3), x, axis=1),
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))),
    "map": lambda x: jax.vmap(lambda row: row / jnp.linalg.norm(row))(x),
    "identity": lambda x: (x, x.T),
}


@pytest.mark.parametrize("case", CASES)
def test_what_programs_consist_of_is_computed_in_bfloat16(bf16, case):
    """Compare with the same on numbers that are bfloat16: what differs is rounding on the way."""
    function = CASES[case]
    x = jnp.asarray(X.astype(ml_dtypes.bfloat16).astype(np.float32))
    expected = jax.tree.leaves(jax.jit(function)(x))
    with snaprt.lazy():
        found = jax.tree.leaves(function(jnp.asarray(x)))
        snaprt.mark_step()
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert _is_bf16(one) or not one.ndim or one.dtype != jnp.float32
        scale = max(1.0, float(jnp.abs(other.astype(jnp.float32)).max()))
        np.testing.assert_allclose(
            np.asarray(one, np.float64), np.asarray(other, np.float64), atol=0.03 * scale
        )


def test_a_model_trains_in_bfloat16_and_compiles_once(bf16, no_persistent_cache):
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-1), wrt=nnx.Param)
    labels = np.arange(4) % 4
    losses = []
    with snaprt.lazy(), counting() as counts:
        for _ in range(10):

            def loss_of(model):
                logits = model(jnp.asarray(X))
                return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

            loss, grads = nnx.value_and_grad(loss_of)(model)
            snaprt.optimizer_step(optimizer, model, grads)
            losses.append(loss)
    losses = [float(loss) for loss in losses]
    assert losses[-1] < 0.5 * losses[0]
    assert counts.compiled <= 3
    assert _is_bf16(model.kernel[...])


def test_64_bit_integers_are_computed_with_32_bits(long, no_persistent_cache):
    with snaprt.lazy():
        x = jnp.arange(10)
        assert x.dtype == jnp.int64
        y = jnp.sort(x * x, descending=True)[::2] + jnp.cumsum(x)[:5]
        z = jax.lax.fori_loop(0, 4, lambda i, a: a + i, y).sum()
        u = x.astype(jnp.uint64) << 3
        least, largest = (x - 5).min(), (x - 20).max()  # the folds begin at limits of the type
        text = _module(y, z, u, least, largest)
    assert y.dtype == z.dtype == jnp.int64
    expected = np.sort(np.arange(10) ** 2)[::-1][::2] + np.cumsum(np.arange(10))[:5]
    np.testing.assert_array_equal(y, expected)
    assert int(z) == expected.sum() + 30
    np.testing.assert_array_equal(u, np.arange(10, dtype=np.uint64) << 3)
    assert (int(least), int(largest)) == (-5, -11)
    lines = [re.sub("<{.*?}>", "", line) for line in text.splitlines()]  # without attributes
    wide = [line for line in lines if re.search(r"tensor<(\w+x)?u?i64>", line)]
    allowed = ("stablehlo.constant", "stablehlo.convert", "func.func", "return", "module")
    assert [line for line in wide if not any(word in line for word in allowed)] == []


def test_what_does_not_fit_into_32_bits_wraps(long, no_persistent_cache):
    with snaprt.lazy():
        value = jnp.full((2,), 2**31 - 1) + 1
        snaprt.mark_step()
    assert value.dtype == jnp.int64
    np.testing.assert_array_equal(value, [-(2**31)] * 2)


def test_what_looks_at_bits_sees_all_of_them(long, no_persistent_cache):
    numbers = np.array([0.3, -5.0, 1e100])
    with snaprt.lazy():
        mantissa, exponent = jnp.frexp(jnp.asarray(numbers))
        zeros = jax.lax.clz(jnp.arange(3))
        snaprt.mark_step()
    np.testing.assert_array_equal(mantissa, np.frexp(numbers)[0])
    np.testing.assert_array_equal(exponent, np.frexp(numbers)[1])
    np.testing.assert_array_equal(zeros, [64, 63, 62])


def test_random_draws_are_those_of_64_bits(long, no_persistent_cache):
    eager = jax.random.uniform(jax.random.key(3), (5,), jnp.float64)
    with snaprt.lazy():
        drawn = jax.random.uniform(jax.random.key(3), (5,), jnp.float64)
        snaprt.mark_step()
    np.testing.assert_array_equal(drawn, eager)


def test_downcasting_makes_float64_float32(monkeypatch, long, no_persistent_cache):
    monkeypatch.setenv("XLA_DOWNCAST_BF16", "1")
    with snaprt.lazy():
        double = jnp.linspace(0.0, 1.0, 7, dtype=jnp.float64) / 3
        single = jnp.linspace(0.0, 1.0, 7, dtype=jnp.float32) / 3
        snaprt.mark_step()
    assert double.dtype == jnp.float64
    np.testing.assert_array_equal(np.asarray(double).astype(np.float32), double)
    np.testing.assert_allclose(double, np.linspace(0, 1, 7) / 3, rtol=1e-6)
    assert not _is_bf16(double)
    assert _is_bf16(single)


def test_both_switches_work_together(long, bf16, no_persistent_cache):
    with snaprt.lazy():
        x = jnp.arange(4) * jnp.ones(4)
        assert x.dtype == jnp.float64
        y = x / 3
        snaprt.mark_step()
    assert _is_bf16(y)
    np.testing.assert_allclose(y, np.arange(4) / 3, rtol=2**-8)


def test_nothing_is_narrow_unless_asked_for():
    assert narrowings() == ()
