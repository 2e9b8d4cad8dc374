"""A step is one program; a read runs what it needs; what repeats compiles nothing."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counting
from jax.experimental.layout import Format, Layout

import snaprt

pytestmark = pytest.mark.usefixtures("no_persistent_cache")


def test_a_step_runs_everything_pending_as_one_program():
    with snaprt.lazy(), counting() as counts:
        x = jnp.arange(6.0).reshape(2, 3)
        y = x * 2
        z = jnp.exp(y).sum()
        snaprt.mark_step()
    assert counts.graphs == 1
    assert counts.reads == {}
    np.testing.assert_array_equal(y, np.arange(6.0).reshape(2, 3) * 2)
    np.testing.assert_allclose(z, np.exp(np.arange(6.0) * 2).sum(), rtol=1e-6)


def test_an_empty_step_runs_nothing():
    with snaprt.lazy(), counting() as counts:
        snaprt.mark_step(wait=True)
    assert counts.graphs == 0


def test_a_step_that_repeats_compiles_once():
    @snaprt.lazy()
    def step(x):
        y = jnp.tanh(x @ x.T) + 1
        snaprt.mark_step()
        return y

    with counting() as counts:
        for seed in range(4):
            step(jnp.full((3, 3), float(seed)))
    assert counts.compiled == 1
    assert counts.graphs == 4


def test_shape_dtype_and_weak_type_are_known_without_a_cut():
    with snaprt.lazy(), counting() as counts:
        x = jnp.ones((4, 5), jnp.bfloat16) * 2
        assert x.shape == (4, 5)
        assert x.dtype == jnp.bfloat16
        assert x.ndim == 2
        assert x.size == 20
        assert x.nbytes == 40
        assert len(x) == 4
        assert not x.weak_type
        assert (jnp.asarray(1.0) * 2).weak_type
        assert not x.committed
        assert x.devices() == {jax.devices()[0]}
        assert x.sharding == jax.device_put(1.0).sharding
        assert isinstance(x, jax.Array)
    assert counts.graphs == 0


def test_reading_one_value_leaves_the_rest_pending():
    with snaprt.lazy():
        x = jnp.ones(3)
        needed = x * 2
        other = x * 3
        with counting() as counts:
            assert float(needed[0]) == 2.0
        assert counts.graphs == 1
        assert counts.reads == {"float": 1}
        assert other._value is None
        with counting() as counts:
            snaprt.mark_step()
        assert counts.graphs == 1
        assert other._value is not None


def test_a_value_that_was_computed_is_read_for_free():
    with snaprt.lazy():
        x = jnp.ones(3) + 1
        snaprt.mark_step()
        with counting() as counts:
            assert float(x[0]._value if x[0]._value is not None else x.sum()) > 0
            np.asarray(x)
            x.tolist()
            repr(x)
    assert "array" not in (counts.reads or {})
    assert "tolist" not in (counts.reads or {})


def test_reading_in_the_middle_of_a_step_computes_nothing_twice():
    executed = []

    def observe(value):
        executed.append(1)
        return value

    with snaprt.lazy():
        x = jnp.ones(3)
        hidden = jax.pure_callback(observe, jax.ShapeDtypeStruct((3,), x.dtype), x)
        loss = hidden.sum()
        update = hidden * 2
        del hidden
        assert float(loss) == 3.0
        snaprt.mark_step(wait=True)
        np.testing.assert_array_equal(update, [2, 2, 2])
    assert len(executed) == 1


def test_dead_work_is_dropped():
    with snaprt.lazy():
        kept = jnp.ones(3) + 1
        dropped = kept * 5
        del dropped
        gc.collect()
        snaprt.mark_step()
    _, _, samples = snaprt.metrics.metric_data("TensorsGraphSize")
    assert samples[-1][1] <= 3


@pytest.mark.parametrize(
    ("read", "cause"),
    [
        (bool, "bool"),
        (float, "float"),
        (int, "int"),
        (complex, "complex"),
        (np.asarray, "array"),
        (jax.device_get, "device_get"),
        (lambda x: x.item(), "item"),
        (lambda x: x.tolist(), "tolist"),
        (lambda x: x.block_until_ready(), "block_until_ready"),
        (jax.block_until_ready, "block_until_ready"),
        (repr, "repr"),
        (str, "repr"),
        (lambda x: f"{x:.1f}", "format"),
        (lambda x: [10, 20, 30][x.astype(int)], "index"),
    ],
)
def test_each_read_cuts_once_and_is_counted_by_its_cause(read, cause):
    with snaprt.lazy():
        x = jnp.ones(()) + 1
        with counting() as counts:
            read(x)
        assert counts.reads == {cause: 1}
        assert counts.graphs == 1


def test_device_get_returns_numpy():
    with snaprt.lazy():
        tree = jax.device_get({"a": jnp.ones(2) * 2})
    assert type(tree["a"]) is np.ndarray


def test_a_function_compiled_ahead_of_time_takes_lazy_arrays():
    tripled = jax.jit(lambda tree: tree["a"] * 3).lower({"a": jnp.ones(2)}).compile()
    with snaprt.lazy(), counting() as counts:
        result = tripled({"a": jnp.ones(2) * 2})
    assert counts.reads == {"compiled": 1}
    np.testing.assert_array_equal(result, [6, 6])


def test_a_scalar_that_varies_costs_two_compilations_and_no_more():
    x = jnp.ones(3)
    with snaprt.lazy(), counting() as counts:
        for step in range(6):
            y = x * (0.1 * step) + 1.5
            snaprt.mark_step()
            np.testing.assert_allclose(y, 0.1 * step + 1.5, rtol=1e-6)
    assert counts.compiled == 2
    assert counts.graphs == 6


def test_scalars_that_are_equal_to_python_and_not_to_xla_are_told_apart():
    with snaprt.lazy():
        x = jnp.zeros(1)
        results = []
        for value in (0.0, -0.0, 0.0):
            y = jnp.copysign(1.0, x + value) * jnp.sign(x - 1)
            z = jnp.copysign(jnp.ones(1), value)
            snaprt.mark_step()
            results.append((float(y[0]), float(z[0])))
    assert [z for _, z in results] == [1.0, -1.0, 1.0]


def test_a_scan_whose_body_is_a_new_lambda_each_step_compiles_once():
    with snaprt.lazy(), counting() as counts:
        for _ in range(3):
            total, _ = jax.lax.scan(lambda c, x: (c + x * 2, c), 0.0, jnp.arange(5.0))
            snaprt.mark_step()
    assert counts.compiled == 1
    assert float(total) == 20.0


def test_a_long_chain_neither_recurses_nor_leaks():
    with snaprt.lazy():
        x = jnp.ones(2)
        for _ in range(3000):
            x = x + 1
        del x
        y = jnp.ones(2)
        for _ in range(500):
            y = y + 1
        snaprt.mark_step()
    np.testing.assert_array_equal(y, [501, 501])


def test_committed_work_that_waits_for_uncommitted_work_in_its_middle_is_right():
    """The first operation runs in an earlier program than the one that uses its result."""
    with snaprt.lazy():
        committed = jax.device_put(jnp.ones(3), jax.devices()[0]) * 2
        uncommitted = jnp.arange(3.0) * 2
        total = committed + uncommitted
        del committed
        kept = uncommitted + 1
        snaprt.mark_step()
    np.testing.assert_array_equal(total, [2, 4, 6])
    np.testing.assert_array_equal(kept, [1, 3, 5])


def test_an_input_that_is_laid_out_otherwise_runs_and_is_right() -> None:
    plain = jnp.arange(12.0).reshape(3, 4)
    other = jax.device_put(plain, Format(Layout((1, 0)), plain.sharding))
    with snaprt.lazy():
        for array in (plain, other, other):
            assert np.array_equal(np.asarray(array * 2 + array.sum(0)), plain * 2 + plain.sum(0))
    assert other.format.layout.major_to_minor == (1, 0)


def test_a_scalar_that_a_large_call_takes_costs_one_compilation():
    @jax.jit
    def step(x, rate, number):
        for _ in range(40):
            x = jnp.tanh(x) * rate + jnp.sin(x * number)
        return x

    expected = x = jnp.linspace(0.0, 1.0, 8)
    for number in range(3):
        expected = step(expected, 0.5, number)
    with snaprt.lazy(), counting() as counts:
        for number in range(3):
            x = step(x, 0.5, number)
            snaprt.mark_step()
    np.testing.assert_allclose(x, expected, rtol=1e-5)
    assert counts.compiled == 1
