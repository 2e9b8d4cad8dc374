"""Why a program is compiled again is said in words, with the user's names and lines."""

import logging
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import snaprt
from snaprt.explain.reasons import ADVICE, name_of

pytestmark = pytest.mark.usefixtures("no_persistent_cache")

# Of a shape of its own: what begins alike on arrays of one kind keeps its first place.
X = jnp.linspace(-1.0, 2.0, 14, dtype=jnp.float32).reshape(2, 7)


def reasons_of(*steps):
    """Return the reasons for which the last of some steps is compiled."""
    with snaprt.CompilationProfiler() as profiler, snaprt.lazy():
        for step in steps:
            kept = step()
            snaprt.mark_step()
            del kept
    assert len(profiler.events) == len(steps)
    assert profiler.events[-1].cause == "mark_step"
    return profiler.events[-1].reasons


def add_up(batch):
    return (batch["x"] * 3).sum() + batch["y"]


def batch_of(size):
    return {"x": jnp.ones((size, 5)), "y": jnp.ones(())}


def branch(flag):
    return jnp.sinh(X) if flag else jnp.cosh(X)


def loop(count):
    y = X
    for _ in range(count):
        y = jnp.arctan(y)
    return y


def closure(constant):
    return jax.jit(lambda x: x - constant)(X)


def one_or_two(two):
    y = X * 11
    z = y + 11
    return (y, z) if two else z


def precise(precision):
    with jax.default_matmul_precision(precision):
        return X @ X.T


def looped(length):
    return jax.lax.scan(lambda carry, _: (carry * 5, None), X, None, length=length)[0]


CASES = [
    (lambda: loop(3), lambda: loop(4), "longer", r"1 operation \(jit\(arctan\)\) more than last"),
    (lambda: loop(7), lambda: loop(5), "shorter", r"2 operations .* fewer than last"),
    (
        lambda: branch(True),
        lambda: branch(False),
        "branch",
        r"jit\(sinh\) at .* in branch became jit\(cosh\) at .* in branch",
    ),
    (lambda: X - 0.125, lambda: X - 0.25, "constant", r"changed: 0.125, then 0.25, at .*:\d+ in"),
    (lambda: closure(1.5), lambda: closure(2.5), "parameter", r"changed: 1.5, then 2.5, of sub"),
    (
        lambda: jax.lax.integer_pow(X, 5),
        lambda: jax.lax.integer_pow(X, 6),
        "parameter",
        r"integer_pow has a different y: 5, then 6",
    ),
    (lambda: looped(4), lambda: looped(6), "parameter", r"scan has a different length: 4, then 6"),
    (
        lambda: jnp.ones(21) + X[0, 0],
        lambda: jnp.ones(22) + X[0, 0],
        "shape",
        r"\(21,\), then \(22",
    ),
    (
        lambda: one_or_two(False),
        lambda: one_or_two(True),
        "outputs",
        r"array is alive at the graph break: the result of jit\(multiply\) at .* in one_or_two",
    ),
    (lambda: precise("default"), lambda: precise("float32"), "settings", "precision"),
]


@pytest.mark.parametrize(("first", "second", "kind", "words"), CASES)
def test_a_difference_is_said_in_words(first, second, kind, words):
    (reason,) = reasons_of(first, second)
    assert reason.kind == kind
    assert re.search(words, reason.text), reason.text
    assert reason.place.file == __file__
    assert reason.advice


def test_an_argument_has_the_name_that_the_program_calls_it():
    with snaprt.CompilationProfiler() as profiler, snaprt.lazy():
        for size in (128, 37):
            batch = batch_of(size)
            snaprt.mark_step()
            total = add_up(batch)
            snaprt.mark_step()
    assert total.shape == ()
    (reason,) = profiler.events[-1].reasons
    assert reason.text.startswith("argument `batch['x']` changed shape (128, 5) to (37, 5) at ")
    assert reason.text.endswith("in add_up")
    assert reason.text in profiler.report()
    assert "pad" in reason.advice
    assert [event.number for event in profiler.recompilations] == [2, 2]


@pytest.mark.parametrize(
    ("arrays", "kind", "words"),
    [
        ((jnp.ones(23), jnp.ones(23, int)), "dtype", "changed dtype float32 to int32"),
        (
            (np.ones(24, "f"), np.ones(25, "f")),
            "shape",
            r"`array` changed shape \(24,\) to \(25,\)",
        ),
    ],
)
def test_other_arguments_are_other_reasons(arrays, kind, words):
    with snaprt.CompilationProfiler() as profiler, snaprt.lazy():
        for array in arrays:
            (jnp.asarray(array) + array).sum().block_until_ready()
    (reason,) = profiler.events[-1].reasons
    assert reason.kind == kind
    assert re.search(words, reason.text), reason.text


def test_an_input_without_a_name_is_said_by_its_number_and_first_use():
    with snaprt.CompilationProfiler() as profiler, snaprt.lazy():
        for size in (31, 32):
            total = (jnp.zeros(size) + 1).sum()  # the sum's input is held by nothing else
            _read_in_the_middle(total)
    texts = [reason.text for event in profiler.events for reason in event.reasons]
    assert texts
    assert not any("argument" in text for text in texts)


def _read_in_the_middle(value):
    return float(value) + 1


def test_the_nearest_of_the_earlier_programs_is_compared_with():
    (reason,) = reasons_of(lambda: loop(2), lambda: branch(True) + 19, lambda: loop(11))
    assert reason.kind == "longer"


def test_arrays_in_attributes_lists_and_lazy_arrays_have_names():
    class Model:
        def __init__(self):
            self.weights = [X + 1, X + 2]

    model = Model()
    assert name_of(model.weights[1]) == "model.weights[1]"
    with snaprt.lazy():
        lazy = X * 2
    lazy.block_until_ready()
    assert name_of(lazy._value) == "lazy"
    assert name_of(jnp.zeros(29)) is None


def test_a_place_that_goes_on_compiling_is_warned_of_once(monkeypatch, caplog):
    monkeypatch.setenv("SNAPRT_RECOMPILE_LIMIT", "3")

    def compile_some(count, start):
        with snaprt.lazy():
            snaprt.mark_step()
            for number in range(count):
                y = loop(start + number)
                snaprt.mark_step()
        return y

    with caplog.at_level(logging.WARNING, "snaprt.explain"):
        for start in (20, 23, 26):
            compile_some(3, start)
    (record,) = caplog.records
    text = record.getMessage()
    assert "compile_some (mark_step) has caused 4 programs" in text
    assert "1 operation (jit(arctan)) more than last time at " in text
    assert f"instead: {ADVICE['longer']}" in text


def many_steps(function, counts):
    """Return what some steps compute, and how many of them fell back."""
    before = snaprt.metrics.counter_value("RecompileFallback") or 0
    with snaprt.lazy():
        snaprt.mark_step()
        results = []
        for count in counts:
            results.append(function(count))
            snaprt.mark_step()
    return results, (snaprt.metrics.counter_value("RecompileFallback") or 0) - before


def test_a_place_at_the_limit_runs_new_graphs_op_by_op_if_asked_to(monkeypatch, caplog):
    monkeypatch.setenv("SNAPRT_RECOMPILE_LIMIT", "2:eager")
    counts = (30, 31, 32, 33, 34, 31)
    with (
        caplog.at_level(logging.WARNING, "snaprt.explain"),
        snaprt.CompilationProfiler() as profiler,
    ):
        results, fallen = many_steps(loop, counts)
    assert fallen == 2  # of 33 and 34; the graph of 31 was compiled before the limit
    assert [event.number for event in profiler.events if event.cause == "mark_step"] == [1, 2, 3]
    (record,) = caplog.records
    assert "many_steps (mark_step) has caused 3 programs" in record.getMessage()
    assert "runs op by op" in record.getMessage()
    for result, count in zip(results, counts, strict=True):
        np.testing.assert_allclose(result, loop(count), rtol=1e-6)


def test_a_read_that_falls_back_runs_what_it_needs_alone(monkeypatch):
    monkeypatch.setenv("SNAPRT_RECOMPILE_LIMIT", "1:eager")
    before = snaprt.metrics.counter_value("RecompileFallback") or 0
    with snaprt.lazy():
        for count in (5, 6, 7):
            snaprt.mark_step()
            other = jnp.sinh(X)
            assert float(loop(count).sum() + 41) == pytest.approx(float(np.sum(chain(count)) + 41))
            assert other._value is None
    assert (snaprt.metrics.counter_value("RecompileFallback") or 0) - before == 1
    np.testing.assert_allclose(other, np.sinh(X), rtol=1e-6)


def test_an_operation_that_fails_in_a_graph_that_falls_back_is_named(monkeypatch):
    monkeypatch.setenv("SNAPRT_RECOMPILE_LIMIT", "1:eager")
    counts = []

    def read_three():
        for count, total in ((8, 1e6), (9, 1e6), (10, -1e6)):
            snaprt.mark_step()
            counts.append(count)
            float(jnp.log(loop(count).sum() + total))

    named = r"in a result of jit\(log\) at .*recompiles"
    with (
        snaprt.lazy(),
        jax.debug_nans(True),
        pytest.raises(FloatingPointError, match=named) as raised,
    ):
        read_three()
    assert "OPBYOP" not in str(raised.value)
    assert counts == [8, 9, 10]


def chain(count):
    y = np.asarray(X)
    for _ in range(count):
        y = np.arctan(y)
    return y


@partial(jax.jit, static_argnums=1)
def jitted_loop(x, count):
    for _ in range(count):
        x = jnp.arctan(x)
    return x * 43


def test_a_jitted_function_at_the_limit_runs_op_by_op_as_well(monkeypatch, caplog):
    monkeypatch.setenv("SNAPRT_RECOMPILE_LIMIT", "1:eager")
    with caplog.at_level(logging.WARNING, "snaprt.explain"):
        results, fallen = many_steps(lambda count: jitted_loop(X, count), range(1, 8))
    assert fallen == 5
    of_place, of_function = (record.getMessage() for record in caplog.records)
    assert "many_steps (mark_step) has caused 2 programs" in of_place
    assert of_function.startswith(f"jitted_loop at {__file__}:")
    assert "has caused 2 programs" in of_function
    for count, result in enumerate(results, 1):
        np.testing.assert_allclose(result, 43 * chain(count), rtol=1e-5)


def test_a_scope_of_full_graphs_never_falls_back(monkeypatch):
    monkeypatch.setenv("SNAPRT_RECOMPILE_LIMIT", "1:eager")

    def whole(count):
        with snaprt.lazy(fullgraph=True):
            return steps_of(count)

    def steps_of(count):
        y = loop(count)
        snaprt.mark_step()
        return y

    _, fallen = many_steps(whole, (44, 45, 46, 47))
    assert fallen == 0


def test_different_reads_of_one_line_are_not_taken_for_recompilations(monkeypatch, caplog):
    monkeypatch.setenv("SNAPRT_RECOMPILE_LIMIT", "1")
    with caplog.at_level(logging.WARNING, "snaprt.explain"), snaprt.lazy():
        snaprt.mark_step()
        metrics = {"mean": X.mean(), "most": X.max(), "least": X.min(), "sum": X.sum()}
        assert len({name: float(value) for name, value in metrics.items()}) == 4
    assert caplog.records == []


def test_nobody_is_warned_where_the_limit_is_0(monkeypatch, caplog):
    monkeypatch.setenv("SNAPRT_RECOMPILE_LIMIT", "0")
    with caplog.at_level(logging.WARNING, "snaprt.explain"), snaprt.lazy():
        for size in range(40, 52):
            (jnp.ones(size) + 1).block_until_ready()
    assert caplog.records == []


def test_programs_of_single_operations_are_not_taken_for_recompilations(monkeypatch, caplog):
    monkeypatch.setenv("SNAPRT_RECOMPILE_LIMIT", "1")
    monkeypatch.setenv("SYNC_TENSORS_OPBYOP", "1")
    with caplog.at_level(logging.WARNING, "snaprt.explain"), snaprt.lazy():
        y = jnp.sinh(X) + jnp.cosh(X) * jnp.tan(X)
        snaprt.mark_step()
    assert y.shape == (2, 7)
    assert caplog.records == []
