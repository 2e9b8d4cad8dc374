"""A thread whose programs keep being new runs eagerly until its operations repeat."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counting
from recordings import recorded
from threads import lazily_in_thread

import snaprt
from snaprt.explain.cuts import AtOnceRecord, Collector
from snaprt.runtime.events import subscribe, unsubscribe
from snaprt.trace import fallback
from snaprt.trace.array import LazyArray

pytestmark = pytest.mark.usefixtures("no_persistent_cache", "little_optimization", "soon")

OPERATIONS = (
    jnp.sin,
    jnp.cos,
    jnp.tanh,
    jnp.abs,
    lambda x: x * 0.5,
    lambda x: jnp.roll(x, 1),
    lambda x: x - x.mean(),
    lambda x: x.at[2].add(1.0),
)
X = jnp.linspace(0.0, 1.0, 16)


@pytest.fixture
def soon(monkeypatch):
    """Let a thread fall back however small its programs are."""
    monkeypatch.setattr(fallback, "_MIN_NEW_OPERATIONS", 0)


class Loop:
    """Iterations of ten operations, each of which ends with a read.

    What one test has compiled, others would find, so each has its own ``seed``.
    """

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.x = X

    def differ(self, iterations):
        """Run some that are other operations each; return what was read."""
        totals = []
        for _ in range(iterations):
            for operation in self.random.choices(OPERATIONS, k=10):
                self.x = operation(self.x)
            totals.append(float(self.x.sum()))
        return totals

    def repeat(self, iterations):
        """Run some that are all the same; return what was read."""
        totals = []
        for _ in range(iterations):
            for operation in (*OPERATIONS, jnp.cos, jnp.sin):
                self.x = operation(self.x)
            totals.append(float(self.x.sum()))
        return totals


def fallbacks():
    return snaprt.metrics.counter_value("EagerFallback") or 0


def test_iterations_that_differ_run_eagerly():
    def run():
        loop = Loop(1)
        return loop.differ(60), type(loop.x)

    with counting() as counts:
        totals, kind = lazily_in_thread(run)
    assert kind is not LazyArray
    assert fallbacks() == 1
    assert counts.compiled < 20  # of these, 4 at most are of iterations
    np.testing.assert_allclose(totals, Loop(1).differ(60), rtol=1e-4, atol=1e-5)


def test_a_loop_that_repeats_is_lazy_again():
    loop = Loop(2)

    def run():
        differing = loop.differ(20)
        at_first = loop.repeat(1)
        is_eager = type(loop.x) is not LazyArray
        return [*differing, *at_first, *loop.repeat(1500)], is_eager

    totals, was_eager = lazily_in_thread(run)
    assert was_eager
    assert type(loop.x) is LazyArray
    assert fallbacks() == 1
    other = Loop(2)
    expected = [*other.differ(20), *other.repeat(1501)]
    np.testing.assert_allclose(totals, expected, rtol=1e-3, atol=1e-4)


def run_eagerly(state, what):
    """Let a thread that has fallen back run an operation of 0.1 ms."""
    if state.looks():
        state.meet(what, [X])
    state.took(1e-4)


def test_it_takes_longer_each_time():
    state = fallback.Fallback()

    def rounds_until_repeated():
        for rounds in range(1_000_000):
            if state.has_repeated():
                return rounds
            run_eagerly(state, "sin")
            run_eagerly(state, "cos")
        raise AssertionError("it is never lazy again")

    needed = []
    for _ in range(2):
        for _ in range(4):
            state.compiled("place", 10, 0.5)
        assert state.is_due("place", 10, is_read=True)
        state.begin("place")
        needed.append(rounds_until_repeated())
        state.end()
    assert 7_500 < needed[0] < 15_000  # as long as compiling took
    assert needed[1] > 3 * needed[0]


def test_what_differs_now_and_then_is_not_taken_for_a_loop():
    state = fallback.Fallback()
    state.compiled("place", 10, 0.5)
    state.begin("place")
    for rounds in range(1000):
        for what in (*range(39), 1000 + rounds):
            run_eagerly(state, what)
    assert not state.has_repeated()


def test_known_programs_keep_a_thread_lazy():
    state = fallback.Fallback()
    for _ in range(12):
        state.compiled("a", 10, 1.0)
        state.used(10)
        assert not state.is_due("a", 10, is_read=True)
    for _ in range(8):
        state.compiled("a", 10, 1.0)
        state.used(10)
    assert state.is_due("a", 10, is_read=True)  # what was known has saved less than that took


def test_lines_that_are_each_compiled_once_do_not_count_together():
    state = fallback.Fallback()
    for line in range(50):
        state.compiled(line, 10, 1.0)
    assert not any(state.is_due(line, 10, is_read=True) for line in range(50))


def test_small_programs_do_not_count():
    state = fallback.Fallback()
    for _ in range(50):
        state.compiled("a", 2, 1.0)
    assert not state.is_due("a", 2, is_read=True)


@pytest.mark.parametrize(("operations", "is_due"), [(70, False), (80, True)])
def test_a_few_programs_must_have_many_operations(monkeypatch, operations, is_due):
    monkeypatch.undo()
    state = fallback.Fallback()
    for _ in range(4):
        assert not state.is_due("a", operations, is_read=True)
        state.compiled("a", operations, 1.0)
    assert state.is_due("a", operations, is_read=True) is is_due
    assert not state.is_due("a", operations, is_read=False)
    assert not state.is_due("b", operations, is_read=True)


def test_a_thread_that_is_expected_to_mark_steps_stays_lazy():
    def run():
        loop = Loop(4)
        loop.differ(10)
        if loop.random is None:
            snaprt.mark_step()
        return type(loop.x)

    assert lazily_in_thread(run) is LazyArray
    assert not fallbacks()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SNAPRT_AUTO_EAGER", "0"),
        ("SNAPRT_AUTO_STEP_SIZE", "0"),
        ("XLA_USE_EAGER_DEBUG_MODE", "1"),
        ("SNAPRT_DUMP_DIR", "."),
    ],
)
def test_a_thread_stays_lazy_if_it_is_asked_to(monkeypatch, tmp_path, name, value):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, value)

    def run():
        loop = Loop(name)
        loop.differ(8)
        return type(loop.x)

    assert lazily_in_thread(run) is LazyArray
    assert not fallbacks()


def test_what_is_to_be_recorded_from_here_on_is_lazy_again(monkeypatch, tmp_path):
    loop = Loop(6)

    def run():
        loop.differ(10)
        assert type(loop.x) is not LazyArray
        monkeypatch.setenv("SNAPRT_DUMP_DIR", str(tmp_path))
        loop.differ(1)
        return type(loop.x)

    assert lazily_in_thread(run) is LazyArray
    monkeypatch.delenv("SNAPRT_DUMP_DIR")
    assert recorded(tmp_path)


def test_effects_keep_their_order():
    seen = []

    def see(x):
        seen.append(int(x))

    def run():
        loop = Loop(7)
        for i in range(30):
            jax.debug.callback(see, i, ordered=True)
            loop.differ(1)
        jax.effects_barrier()

    lazily_in_thread(run)
    assert fallbacks() == 1
    assert seen == list(range(30))


def test_what_was_pending_has_its_value_later():
    def run():
        loop = Loop(8)
        kept = []
        for i in range(20):
            kept.append(jnp.cumsum(loop.x) * i)
            loop.differ(1)
        return [np.asarray(x) for x in kept]

    lazy = lazily_in_thread(run)
    assert fallbacks() == 1
    for got, expected in zip(lazy, run(), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_transforms_and_jitted_functions_run_in_between():
    weights = {"a": jnp.eye(16) * 0.5, "b": [jnp.ones(16)]}

    @jax.jit
    def update(weights, gradients):
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    def run():
        loop, own = Loop(9), update(weights, weights)
        for _ in range(30):

            def loss(w):
                return jnp.sum((loop.x @ w["a"] + w["b"][0]) ** 2) / 16

            gradients = jax.grad(loss)(own)
            own = update(own, gradients)
            loop.x = jax.vmap(lambda row: row @ own["b"][0])(own["a"])  # noqa: B023
            loop.differ(1)
        return [np.asarray(leaf) for leaf in jax.tree.leaves(own)]

    lazy = lazily_in_thread(run)
    assert fallbacks() == 1
    for got, expected in zip(lazy, run(), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_it_is_explained():
    events = []
    collector = Collector(events.append)
    subscribe(collector)
    try:
        lazily_in_thread(lambda: Loop(10).differ(20))
    finally:
        unsubscribe(collector)
    (event,) = [event for event in events if isinstance(event, AtOnceRecord)]
    assert event.cause == "new_graphs"
    assert event.place.function.endswith("Loop.differ")
    assert "control flow the same" in event.advice
