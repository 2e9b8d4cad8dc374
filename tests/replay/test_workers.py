from __future__ import annotations

import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from snaprt_replay.run.jobs import STABLEHLO
from snaprt_replay.run.trial import RANDOM_ROUNDING
from snaprt_replay.run.variants.precision import read_module
from snaprt_replay.run.variants.variants import parse_variant
from snaprt_replay.run.workers import Workers

from snaprt import jaxapi

X = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)


def function(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    looped = jax.lax.fori_loop(0, 3, lambda i, y: jnp.where(i > 1, jnp.tanh(y), y @ x), x)
    chosen = jax.lax.cond(x[0, 0] > 0, jnp.cos, jnp.sin, x)
    return looped, chosen.astype(jnp.bfloat16), x.sum(0) > 0


LOWERED = jax.jit(function).lower(X)
HLO_PROTO = jaxapi.hlo_proto(LOWERED)
ENDLESS = jax.jit(lambda x: jax.lax.while_loop(lambda y: y.sum() < jnp.inf, jnp.sin, x)).lower(X)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(1, 100) as processes:
        yield processes


@pytest.mark.parametrize(
    "text", ["cpu", "cpu,optimization=0", "f64", "op-by-op", "interpreter", "tpu-precision=highest"]
)
def test_every_kind_of_variant_gives_the_programs_results(text: str, workers: Workers) -> None:
    outcome = workers.run(parse_variant(text), HLO_PROTO, [X])
    assert outcome.failure is None
    assert outcome.outputs is not None
    for got, wanted in zip(outcome.outputs, function(jnp.asarray(X)), strict=True):
        np.testing.assert_allclose(
            np.asarray(got, np.float64), np.asarray(wanted, np.float64), rtol=1e-2, atol=1e-4
        )


def test_stablehlo_will_do_as_well(workers: Workers) -> None:
    variant = parse_variant("cpu")
    outcome = workers.run(variant, LOWERED.as_text().encode(), [X], form=STABLEHLO, repeat=3)
    assert outcome.outputs is not None
    assert len(outcome.execute_seconds) == 3
    assert outcome.agrees_with_itself
    assert outcome.device == "cpu:0"


def test_an_unknown_flag_and_an_absent_device_are_results(workers: Workers) -> None:
    outcome = workers.run(parse_variant("cpu,xla-flags=--xla_nope=1"), HLO_PROTO, [X])
    assert outcome.failure is not None
    assert outcome.failure.kind == "compile error"
    assert "xla_nope" in outcome.failure.message
    outcome = workers.run(parse_variant("cpu:99"), HLO_PROTO, [X])
    assert outcome.failure is not None
    assert outcome.failure.kind == "missing device"


def test_inputs_that_the_module_does_not_take_are_a_result(workers: Workers) -> None:
    outcome = workers.run(parse_variant("cpu"), HLO_PROTO, [X[0]])
    assert outcome.failure is not None
    assert outcome.failure.kind == "run error"


def test_a_failed_check_is_a_result_and_the_next_job_runs(workers: Workers) -> None:
    module = read_module(HLO_PROTO)
    for computation in module.computations:
        for instruction in computation.instructions:
            if instruction.opcode == "dot":
                instruction.dot_dimension_numbers.lhs_contracting_dimensions[:] = [7]
    broken = module.SerializeToString()
    failures = [workers.run(parse_variant("cpu"), broken, [X]).failure for _ in range(2)]
    assert failures[0] is not None
    assert failures[0].kind in ("compile crash", "compile error")
    assert failures[1] is not None
    assert failures[0].signature == failures[1].signature
    assert workers.run(parse_variant("cpu"), HLO_PROTO, [X]).failure is None


def test_a_hang_is_a_result_and_the_next_job_runs(workers: Workers) -> None:
    endless = ENDLESS.as_text().encode()
    outcome = workers.run(parse_variant("cpu"), endless, [X], form=STABLEHLO, timeout=1)
    assert outcome.failure is not None
    assert outcome.failure.kind == "timeout"
    assert "--timeout" in outcome.failure.hint
    assert workers.run(parse_variant("cpu"), HLO_PROTO, [X]).failure is None


def test_a_long_chain_of_random_roundings_compiles_in_time(workers: Workers) -> None:
    # LLVM did not end on a complex square root, which is 16 such operations in a row.
    def root(x: jax.Array) -> jax.Array:
        return jnp.abs(jnp.sqrt(jax.lax.complex(x, 2 * x)))

    text = jax.jit(root).lower(X).as_text().encode()
    outcome = workers.run(RANDOM_ROUNDING, text, [X], form=STABLEHLO, timeout=60)
    assert outcome.failure is None
    assert outcome.outputs is not None
    np.testing.assert_allclose(outcome.outputs[0], root(jnp.asarray(X)), rtol=1e-4)


def test_another_interpreter_is_another_process(workers: Workers) -> None:
    variant = parse_variant(f"cpu,python={sys.executable}")
    outcome = workers.run(variant, HLO_PROTO, [X])
    assert outcome.failure is None
    assert outcome.environment["python"].startswith(f"{sys.version_info.major}.")


def test_an_interpreter_that_is_none_is_a_result(workers: Workers) -> None:
    outcome = workers.run(parse_variant("cpu,python=/no/such/python"), HLO_PROTO, [X])
    assert outcome.failure is not None
    assert outcome.failure.kind == "missing device"
    assert "/no/such/python" in outcome.failure.message


def test_jobs_wait_for_a_free_process(workers: Workers) -> None:
    running = [workers.submit(parse_variant("cpu"), HLO_PROTO, [X]) for _ in range(3)]
    assert all(one.result().failure is None for one in running)
