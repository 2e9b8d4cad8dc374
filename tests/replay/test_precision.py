"""Programs in another precision: raised to float64, rounded at random, as a TPU multiplies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from snaprt_replay.hlo.hlo_module import instructions, verify
from snaprt_replay.run import devices
from snaprt_replay.run.variants import precision, random_rounding
from snaprt_replay.run.variants.emulate import with_matmul_precision, with_tpu_precision
from snaprt_replay.run.variants.precision import Raised, raise_to_f64, read_module

from snaprt import jaxapi
from snaprt.compile.module import compile_module
from snaprt.errors import UsageError
from snaprt.hlo.proto import XlaMessage


def module_of(function: Callable[..., Any], *arrays: np.ndarray) -> XlaMessage:
    return read_module(jaxapi.hlo_proto(jax.jit(function).lower(*arrays)))


def run(module: XlaMessage, *arrays: np.ndarray) -> list[np.ndarray]:
    verify(module)
    stablehlo = jaxapi.hlo_to_stablehlo(module.SerializeToString())
    return compile_module(stablehlo, device=devices.find_device("cpu")).run(arrays)


def raised_run(
    function: Callable[..., Any], *arrays: np.ndarray
) -> tuple[Raised, list[np.ndarray]]:
    raised = raise_to_f64(module_of(function, *arrays))
    wide = [array.astype(precision.raised_dtype(array.dtype)) for array in arrays]
    return raised, run(raised.module, *wide)


X = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)


def test_inputs_constants_and_arithmetic_are_float64() -> None:
    def function(x: jax.Array) -> Any:
        return jnp.exp(x) @ (x.T * np.float32(0.1)) + jnp.arange(4, dtype=jnp.float32), x > 0

    _, (got, positive) = raised_run(function, X)
    x = X.astype(np.float64)
    wanted = np.exp(x) @ (x.T * np.float64(np.float32(0.1))) + np.arange(4)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, wanted, rtol=1e-14)
    np.testing.assert_array_equal(positive, X > 0)


def test_narrowing_disappears_and_rounding_on_purpose_stays() -> None:
    def function(x: jax.Array) -> Any:
        own = jax.lax.reduce_precision(x, 8, 23)
        return x.astype(jnp.bfloat16).astype(jnp.float32), own, jax.lax.reduce_precision(x, 5, 2)

    _, (narrowed, own, rounded) = raised_run(function, X / 3)
    np.testing.assert_array_equal(narrowed, (X / 3).astype(np.float64))
    np.testing.assert_array_equal(own, (X / 3).astype(np.float64))
    assert np.abs(rounded - X / 3).max() > 1e-2


def test_loops_branches_reductions_sorts_and_complex_numbers_are_raised() -> None:
    def function(x: jax.Array) -> Any:
        looped = jax.lax.fori_loop(0, 3, lambda _, y: jnp.sin(y), x)
        chosen = jax.lax.cond(x[0, 0] > 0, jnp.cos, jnp.tan, x)
        return looped, chosen, jnp.sort(x.sum(0)), jax.lax.top_k(x, 2)[0], jnp.fft.fft(x)

    _, (looped, chosen, ordered, largest, spectrum) = raised_run(function, X)
    x = X.astype(np.float64)
    np.testing.assert_allclose(looped, np.sin(np.sin(np.sin(x))), rtol=1e-14)
    np.testing.assert_allclose(chosen, np.cos(x) if x[0, 0] > 0 else np.tan(x), rtol=1e-13)
    np.testing.assert_allclose(ordered, np.sort(x.sum(0)), rtol=1e-13)
    np.testing.assert_array_equal(largest, np.sort(x)[:, :-3:-1])
    np.testing.assert_allclose(spectrum, np.fft.fft(x), rtol=1e-12)


def test_random_bits_become_the_floats_they_were() -> None:
    def function(seed: jax.Array) -> Any:
        return jax.random.uniform(jax.random.key(seed), (9,)), jax.lax.bitcast_convert_type(
            jnp.float32(1.5) + seed, jnp.int32
        )

    seed = np.asarray(3, np.uint32)
    _, (numbers, bits) = raised_run(function, seed)
    plain = run(module_of(function, seed), seed)
    np.testing.assert_array_equal(numbers, plain[0])
    np.testing.assert_array_equal(bits, plain[1])


def test_lapack_is_called_in_double_precision() -> None:
    _, (q, r) = raised_run(jnp.linalg.qr, X[:, :4])
    np.testing.assert_allclose(q @ r, X[:, :4], rtol=1e-13, atol=1e-14)


def test_a_foreign_custom_call_keeps_its_precision_and_is_named() -> None:
    module = module_of(jnp.linalg.qr, X[:, :4])
    for instruction in instructions(module):
        instruction.custom_call_target = instruction.custom_call_target.replace("lapack", "other")
    raised = raise_to_f64(module)
    verify(raised.module)
    assert any("other_sgeqrf" in note for note in raised.notes)


def test_random_state_has_no_reference() -> None:
    def function(x: jax.Array) -> Any:
        return jax.lax.rng_uniform(np.float32(0), np.float32(1), (3,)) + x[0, :3]

    with pytest.raises(UsageError, match="in each run"):
        raise_to_f64(module_of(function, X))


def test_random_rounding_moves_what_the_type_cannot_hold_and_nothing_else() -> None:
    def function(x: jax.Array, n: jax.Array) -> Any:
        return jnp.sin(x), x @ x.T, n @ n.T, n * 3 + 1

    whole = np.arange(12, dtype=np.float32).reshape(3, 4)
    module = random_rounding.round_at_random(module_of(function, X, whole))
    inputs = [X.astype(np.float64), whole.astype(np.float64)]
    runs = [run(module, *inputs, np.asarray(seed, np.uint64)) for seed in (1, 2)]
    exact = [np.sin(inputs[0]), inputs[0] @ inputs[0].T, inputs[1] @ inputs[1].T, whole * 3 + 1]
    for index in (0, 1):
        error = np.abs(runs[0][index] - exact[index]).max()
        assert 1e-8 < error < 1e-4
        assert (runs[0][index] != runs[1][index]).any()
    for index in (2, 3):
        np.testing.assert_array_equal(runs[0][index], exact[index])


def test_perturbing_moves_fractions_by_one_ulp_and_leaves_whole_numbers() -> None:
    values = np.asarray([0.3, 1.0, -7.0, np.inf, np.nan, 1e-3], np.float32)
    moved = random_rounding.perturb(values, np.random.default_rng(1))
    np.testing.assert_array_equal(moved[1:5], values[1:5])
    np.testing.assert_allclose(moved, values, rtol=3e-7)
    assert random_rounding.perturb(np.arange(3), np.random.default_rng(1)).dtype == np.int64


# --- as a TPU multiplies ---


def matrices() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(2, 32, 32)).astype(np.float32)
    return x, y


def test_default_precision_multiplies_bfloat16_numbers() -> None:
    x, y = matrices()
    (got,) = run(with_tpu_precision(module_of(jnp.matmul, x, y), "default"), x, y)
    rounded = [array.astype(ml_dtypes.bfloat16).astype(np.float64) for array in (x, y)]
    np.testing.assert_allclose(got, rounded[0] @ rounded[1], rtol=1e-5, atol=1e-5)
    assert np.abs(got - x.astype(np.float64) @ y).max() > 1e-3


@pytest.mark.parametrize(("passes", "error"), [("high", 3e-4), ("highest", 1e-5)])
def test_more_passes_come_closer(passes: str, error: float) -> None:
    x, y = matrices()
    (got,) = run(with_tpu_precision(module_of(jnp.matmul, x, y), passes), x, y)
    assert np.abs(got - x.astype(np.float64) @ y).max() < error


def test_an_operation_that_asks_for_more_gets_it() -> None:
    x, y = matrices()

    def exact(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.matmul(x, y, precision="highest")

    (got,) = run(with_tpu_precision(module_of(exact, x, y), "default"), x, y)
    assert np.abs(got - x.astype(np.float64) @ y).max() < 1e-5


def test_infinity_stays_infinity_in_all_passes() -> None:
    x, y = matrices()
    x[0, 0] = np.inf
    (got,) = run(with_tpu_precision(module_of(jnp.matmul, x, y), "highest"), x, y)
    np.testing.assert_array_equal(got[0], np.sign(y[0]) * np.inf)
    assert np.isfinite(got[1:]).all()


def test_bfloat16_operands_are_left_alone() -> None:
    x, y = (array.astype(ml_dtypes.bfloat16) for array in matrices())
    module = module_of(jnp.matmul, x, y)
    assert with_tpu_precision(module, "default") == with_matmul_precision(module, "default")
