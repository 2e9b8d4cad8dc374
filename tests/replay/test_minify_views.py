"""The ways to make a program smaller: what they offer is smaller, and computes what it should."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flat_programs import flat_program, normal, opcodes
from snaprt_replay.hlo import hlo_module
from snaprt_replay.minify.candidate import Candidate
from snaprt_replay.minify.cutting import Base, Tap, normalized
from snaprt_replay.minify.shapes import shapes
from snaprt_replay.minify.simpler import (
    dtypes,
    flags,
    instructions,
    loops,
    outputs,
    prefix,
    suffix,
    values,
)
from snaprt_replay.run.variants.variants import parse_variant
from snaprt_replay.run.workers import Workers

CPU = parse_variant("cpu")


def candidate_of(function: Callable, *arguments: np.ndarray) -> Candidate:
    found = normalized([flat_program(function, *arguments).module], arguments)
    assert found is not None
    return found[0]


def chain(x, w):
    return jnp.sin(jnp.cos(jnp.exp(jnp.tanh(x @ w))))


@pytest.fixture(scope="module")
def base(workers: Workers) -> Base:
    taps = [Tap(0, lambda module, inputs: workers.submit(CPU, module, inputs))]
    return Base(candidate_of(chain, normal(4, 6), normal(6, 8)), taps)


@pytest.mark.parametrize("view", [prefix, suffix, instructions])
def test_a_cut_program_is_smaller_and_well_formed(view, base: Base) -> None:
    found = list(view(base, 0))
    assert found
    for one in found:
        assert one.size < base.candidate.size
        hlo_module.verify(one.modules[0])


def test_a_program_started_later_gives_what_the_whole_one_gives(
    base: Base, workers: Workers
) -> None:
    whole = workers.run(CPU, base.candidate.content(0), base.candidate.inputs).outputs
    one = next(suffix(base, 0))
    part = workers.run(CPU, one.content(0), one.inputs).outputs
    assert whole is not None
    assert part is not None
    np.testing.assert_allclose(part[0], whole[0], rtol=1e-6)


def test_a_program_stopped_earlier_returns_what_is_computed_by_then(base: Base) -> None:
    assert opcodes(next(prefix(base, 0))) == ["dot", "tanh", "exponential"]


def test_each_output_is_tried_alone() -> None:
    base = Base(candidate_of(lambda x: (jnp.sin(x), jnp.cos(x), jnp.tan(x)), normal(3)), [])
    alone = [opcodes(one) for one in outputs(base, 0)][:3]
    assert alone == [["sine"], ["cosine"], ["tan"]]


def test_an_output_that_is_left_keeps_its_expected_value() -> None:
    candidate = candidate_of(lambda x: (jnp.sin(x), jnp.cos(x)), normal(3))
    expected = (np.sin(normal(3)), np.cos(normal(3)))
    with_expected = Candidate(candidate.modules, candidate.inputs, expected=expected)
    first, second, *_ = outputs(Base(with_expected, []), 0)
    assert first.expected is not None
    assert second.expected is not None
    np.testing.assert_array_equal(first.expected[0], expected[0])
    np.testing.assert_array_equal(second.expected[0], expected[1])


def test_a_contracting_dimension_is_cut_on_both_sides_of_a_dot(workers: Workers) -> None:
    base = Base(candidate_of(lambda x, w: jnp.tanh(x @ w), normal(4, 6), normal(6, 8)), [])
    cut = {tuple(array.shape for array in one.inputs): one for one in shapes(base, 0)}
    assert {((4, 1), (1, 8)), ((1, 6), (6, 8)), ((4, 6), (6, 1))} <= cut.keys()
    one = cut[(4, 1), (1, 8)]
    got = workers.run(CPU, one.content(0), one.inputs).outputs
    assert got is not None
    wanted = np.tanh(base.candidate.inputs[0][:, :1] @ base.candidate.inputs[1][:1])
    np.testing.assert_allclose(got[0], wanted, rtol=1e-5)


def test_batch_and_features_of_a_convolution_are_cut(workers: Workers) -> None:
    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    x, kernel = normal(2, 5, 5, 3), normal(3, 3, 3, 4)
    base = Base(candidate_of(convolve, x, kernel), [])
    cut = {tuple(array.shape for array in one.inputs): one for one in shapes(base, 0)}
    one = cut[(2, 5, 5, 1), (3, 3, 1, 4)]
    assert ((1, 5, 5, 3), (3, 3, 3, 4)) in cut
    assert ((2, 5, 5, 3), (3, 3, 3, 1)) in cut
    got = workers.run(CPU, one.content(0), one.inputs).outputs
    assert got is not None
    wanted = convolve(x[..., :1], kernel[:, :, :1])
    np.testing.assert_allclose(got[0], np.asarray(wanted), rtol=1e-4, atol=1e-5)


def test_what_a_dynamic_slice_takes_whole_is_cut(workers: Workers) -> None:
    def row(x, index):
        return jax.lax.dynamic_slice(x, (index, 0), (1, 6))

    base = Base(candidate_of(row, normal(4, 6), np.int32(2)), [])
    found = list(shapes(base, 0))
    assert {one.inputs[0].shape for one in found} == {(4, 1), (4, 3), (4, 5)}
    got = workers.run(CPU, found[0].content(0), found[0].inputs).outputs
    assert got is not None
    np.testing.assert_array_equal(got[0], normal(4, 6)[2:3, :1])


def test_a_dimension_that_a_reshape_mixes_keeps_its_length() -> None:
    base = Base(candidate_of(lambda x: jnp.sin(x.reshape(2, 12)), normal(2, 3, 4)), [])
    cut = {one.inputs[0].shape for one in shapes(base, 0)}
    assert cut == {(1, 3, 4)}


def test_a_loop_becomes_one_iteration() -> None:
    def loop(x):
        return jax.lax.fori_loop(0, 5, lambda _, y: jnp.sin(y), x)

    base = Base(candidate_of(loop, normal(3)), [])
    (one,) = loops(base, 0)
    hlo_module.verify(one.modules[0])
    assert "while" not in opcodes(one)
    assert "sine" in opcodes(one)


def test_each_branch_of_a_conditional_is_tried_alone() -> None:
    def branches(x):
        return jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)

    found = [opcodes(one) for one in loops(Base(candidate_of(branches, normal(3)), []), 0)]
    assert ["cosine" in one for one in found] == [True, False]
    assert ["sine" in one for one in found] == [False, True]


def test_bfloat16_becomes_float32_everywhere(workers: Workers) -> None:
    x = normal(3).astype(ml_dtypes.bfloat16)
    base = Base(candidate_of(lambda x: jnp.sin(x) * 2, x), [])
    (one,) = dtypes(base, 0)
    assert one.inputs[0].dtype == np.float32
    outcome = workers.run(CPU, one.content(0), one.inputs)
    assert outcome.outputs is not None
    assert outcome.outputs[0].dtype == np.float32


def test_values_become_simpler_until_nothing_is_left_to_simplify() -> None:
    candidate = candidate_of(jnp.sin, normal(8))
    for _ in range(50):
        found = list(values(Base(candidate, []), 0))
        if not found:
            break
        candidate = found[-1]  # the least that the view offers
    assert not np.any(candidate.inputs[0])


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
def test_a_scalar_is_simplified_as_an_array_without_dimensions(dtype: type) -> None:
    scalar = np.asarray(-0.375, dtype)
    candidate = candidate_of(lambda x, t: x.sum() + t.astype(x.dtype), normal(8), scalar)
    found = list(values(Base(candidate, []), 0))
    assert any(one.inputs[1] != scalar for one in found)
    for one in found:
        assert isinstance(one.inputs[1], np.ndarray)
        assert one.inputs[1].shape == ()
        assert one.inputs[1].dtype == dtype


def test_options_are_left_out_one_by_one_and_the_text_can_be_read_again() -> None:
    variant = parse_variant("cpu,optimization=0,fast-math,matmul-precision=highest")
    plain = candidate_of(jnp.sin, normal(3))
    base = Base(Candidate(plain.modules, plain.inputs, (variant,)), [])
    found = [one.variants[0] for one in flags(base, 0)]
    assert len(found) == 3
    for one in found:
        again = parse_variant(one.text)
        assert (again.options, again.matmul_precision) == (one.options, one.matmul_precision)


def test_a_long_dimension_is_not_shortened_element_by_element() -> None:
    base = Base(candidate_of(jnp.sin, normal(1 << 16)), [])
    sizes = [one.inputs[0].size for one in shapes(base, 0)]
    assert sizes[:3] == [1, 1 << 15, 1 << 15]
    assert max(sizes) == (1 << 16) - (1 << 10)
