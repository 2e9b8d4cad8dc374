from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from snaprt_replay.hlo.hlo_module import verify
from snaprt_replay.run import devices
from snaprt_replay.run.variants.emulate import with_matmul_precision, with_tpu_precision
from snaprt_replay.run.variants.precision import read_module

from snaprt import jaxapi
from snaprt.compile.module import compile_module
from snaprt.hlo.proto import XlaMessage


def module_of(function: Callable[..., Any], *arrays: np.ndarray) -> XlaMessage:
    return read_module(jaxapi.hlo_proto(jax.jit(function).lower(*arrays)))


def run(module: XlaMessage, *arrays: np.ndarray) -> np.ndarray:
    verify(module)
    stablehlo = jaxapi.hlo_to_stablehlo(module.SerializeToString())
    return compile_module(stablehlo, device=devices.find_device("cpu")).run(arrays)[0]


def matrices() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(2, 32, 32)).astype(np.float32)
    return x, y


def test_default_precision_multiplies_bfloat16_numbers() -> None:
    x, y = matrices()
    got = run(with_tpu_precision(module_of(jnp.matmul, x, y), "default"), x, y)
    rounded = [array.astype(ml_dtypes.bfloat16).astype(np.float64) for array in (x, y)]
    np.testing.assert_allclose(got, rounded[0] @ rounded[1], rtol=1e-5, atol=1e-5)
    assert np.abs(got - x.astype(np.float64) @ y).max() > 1e-3


@pytest.mark.parametrize(("precision", "error"), [("high", 3e-4), ("highest", 1e-5)])
def test_more_passes_come_closer(precision: str, error: float) -> None:
    x, y = matrices()
    got = run(with_tpu_precision(module_of(jnp.matmul, x, y), precision), x, y)
    assert np.abs(got - x.astype(np.float64) @ y).max() < error


def test_an_operation_that_asks_for_more_gets_it() -> None:
    x, y = matrices()

    def exact(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.matmul(x, y, precision="highest")

    got = run(with_tpu_precision(module_of(exact, x, y), "default"), x, y)
    assert np.abs(got - x.astype(np.float64) @ y).max() < 1e-5


def test_infinity_stays_infinity_in_all_passes() -> None:
    x, y = matrices()
    x[0, 0] = np.inf
    got = run(with_tpu_precision(module_of(jnp.matmul, x, y), "highest"), x, y)
    np.testing.assert_array_equal(got[0], np.sign(y[0]) * np.inf)
    assert np.isfinite(got[1:]).all()


def test_bfloat16_operands_are_left_alone() -> None:
    x, y = (array.astype(ml_dtypes.bfloat16) for array in matrices())
    module = module_of(jnp.matmul, x, y)
    assert with_tpu_precision(module, "default") == with_matmul_precision(module, "default")
