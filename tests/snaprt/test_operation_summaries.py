"""Summaries of programs: what they keep of real modules, and how two of them are told apart."""

from __future__ import annotations

import base64

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zstandard

from snaprt.compile import summaries
from snaprt.compile.summaries import (
    SummarizedProgram,
    compare,
    likeness,
    profile,
    read_summary,
    summarize,
    summary_text,
)


def _text(function, *arguments) -> str:
    return summary_text(summarize(jax.jit(function).lower(*arguments).compiler_ir("stablehlo")))


def _program(function, *arguments) -> SummarizedProgram:
    return read_summary(_text(function, *arguments))


X = jnp.ones(100)


def test_a_program_keeps_its_arguments_operations_and_the_users_lines() -> None:
    def step(x, y):
        return jnp.tanh(x) @ y

    program = _program(step, jnp.ones((3, 4)), jnp.ones((4, 5)))
    assert program.arguments == (("arg0", "tensor<3x4xf32>"), ("arg1", "tensor<4x5xf32>"))
    assert [one.text.split()[0] for one in program.operations] == [
        "stablehlo.tanh",
        "stablehlo.dot_general",
        "return",
    ]
    line = step.__code__.co_firstlineno + 1
    assert program.operations[0].source.startswith(f"{__file__}:{line} in ")
    assert not program.is_cut


def test_the_values_of_large_constants_are_told_apart_by_their_digests() -> None:
    def adding(values):
        return lambda x: x + values

    values = np.arange(100, dtype=np.float32)
    other = values.copy()
    other[50] = -1
    found = compare(_program(adding(values), X), _program(adding(other), X))
    assert (found.kind, found.count) == ("constants", 1)
    assert "dense<digest " in found.constants[0].after
    assert compare(_program(adding(values), X), _program(adding(values), X)).kind == "nothing"
    half = jnp.asarray(values, jnp.bfloat16)
    other_half = jnp.asarray(other, jnp.bfloat16)
    assert compare(_program(adding(half), X), _program(adding(other_half), X)).count == 1


def test_operations_inside_of_loops_and_functions_are_compared() -> None:
    def counting(limit):
        def step(x):
            return jax.lax.while_loop(lambda c: c.sum() < limit, lambda c: jax.nn.relu(c) + 1, x)

        return step

    found = compare(_program(counting(10), X), _program(counting(20), X))
    assert found.kind == "constants"
    assert "dense<2.000000e+01>" in found.operations[0].after


def test_an_operation_that_comes_in_changes_none_that_follow() -> None:
    def chain(extra):
        def step(x):
            for number in range(20):
                x = jnp.sin(x)
                if number == extra:
                    x = jnp.exp(x)
            return x

        return step

    found = compare(_program(chain(None), X), _program(chain(10), X))
    assert (found.kind, found.count) == ("code", 2)  # the new one, and what takes its result
    assert found.operations[0].after.startswith("stablehlo.exponential %sine")


def test_other_wiring_of_the_same_operations_is_found() -> None:
    def step(swapped):
        def function(x):
            a, b = jnp.sin(x), jnp.sin(x + 1)
            return b - a if swapped else a - b

        return function

    found = compare(_program(step(False), X), _program(step(True), X))
    assert found.kind == "wiring"
    assert found.operations[0].after.startswith("stablehlo.subtract")


def test_other_shapes_alone_are_called_so() -> None:
    found = compare(_program(jnp.cumsum, jnp.ones(8)), _program(jnp.cumsum, jnp.ones(9)))
    assert found.arguments == (("arg0", "tensor<8xf32>", "tensor<9xf32>"),)
    assert found.kind == "shapes"


def test_a_long_program_loses_its_end_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def long(x):
        for number in range(600):
            x = jnp.sin(x) * number
        return x

    whole = _program(long, X)
    monkeypatch.setattr(summaries, "LARGEST_SUMMARY", 3000)
    module = jax.jit(long).lower(X).compiler_ir("stablehlo")
    assert len(summarize(module)) <= 3000
    cut = _program(long, X)
    assert cut.is_cut
    assert 0 < len(cut.operations) < len(whole.operations)
    assert cut.operations[0] == whole.operations[0]
    assert compare(whole, cut).is_partial


def test_the_nearest_program_is_the_one_with_the_same_shapes() -> None:
    texts = [_text(jnp.cumsum, jnp.ones(8)), _text(jnp.cumsum, jnp.ones(9)), _text(jnp.sort, X)]
    one, shape, other = map(profile, texts)
    assert likeness(one, one) == (1.0, 1.0)
    assert likeness(one, shape)[0] > likeness(one, other)[0]
    assert likeness(one, shape)[1] < 1.0


def test_what_cannot_be_summarized_has_an_empty_summary() -> None:
    assert summarize(None) == ""


@pytest.mark.parametrize(
    "content",
    [
        None,
        5,
        "",
        "no base64!",
        "AAAA",
        base64.b64encode(zstandard.compress(b"x" * (1 << 27))).decode(),
        base64.b64encode(zstandard.compress(b"x" * 1000)[:-3]).decode(),
    ],
)
def test_what_is_no_summary_has_no_text(content: object) -> None:
    assert summary_text(content) == ""


def test_text_that_is_no_program_is_an_empty_one() -> None:
    loop = "#loc1 = loc(callsite(#loc1 at #loc1))\n  %0 = stablehlo.add %1 : f32 loc(#loc1)\n"
    assert read_summary("\n)(\n#loc\n").operations == ()
    assert len(read_summary(loop).operations) == 1


def test_programs_that_differ_in_donation_alone_differ_in_an_attribute_of_the_argument() -> None:
    lowered = [
        jax.jit(lambda x, y: (x + y, x * y), donate_argnums=donated).lower(X, X)
        for donated in ((), (1,))
    ]
    programs = [
        read_summary(summary_text(summarize(one.compiler_ir("stablehlo")))) for one in lowered
    ]
    found = compare(*programs)
    assert (found.kind, found.arguments) == ("nothing", ())
    assert found.attributes == (("main %arg1 tf.aliasing_output", "", "0 : i32"),)
