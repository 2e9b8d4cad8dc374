"""JAX makes calls of small jitted functions, once recording them has cost enough."""

import contextlib
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recordings import recorded
from threads import in_thread, lazily_in_thread

import snaprt
from snaprt import jaxapi
from snaprt.runtime.events import Subscriber, subscribe, unsubscribe
from snaprt.runtime.step import thread_trace
from snaprt.snapshot.recorder.progress import tell_of_each
from snaprt.trace import lone_calls
from snaprt.trace.array import LazyArray
from snaprt.trace.lazy_trace import LazyTrace

pytestmark = pytest.mark.usefixtures("no_persistent_cache", "little_optimization", "soon")

X = np.linspace(0.0, 1.0, 16, dtype=np.float32)


@pytest.fixture
def soon(monkeypatch):
    """Let JAX make the calls after a few programs, however long XLA takes."""
    monkeypatch.setattr(lone_calls, "_CALLS", 10)
    monkeypatch.setattr(lone_calls, "_CALLS_AN_EQUATION", 0)


class Loop:
    """A step that is a program of its own; each test has its own functions."""

    def __init__(self):
        self.x = {"w": jnp.asarray(X), "count": jnp.int32(0)}
        self.rate = jnp.float32(0.25) * 2
        self.key = jax.random.key(0)
        self.totals = []

        @jax.jit
        def step(x, rate):
            total = jnp.sum(jnp.sin(x["w"]) ** 2)
            w = x["w"] - rate * jnp.cos(x["w"]) * total / 16
            for _ in range(4):
                w = jnp.tanh(w) + 0.1 * w
            return {"w": w, "count": x["count"] + 1}, total

        self.step = step

    def reading(self, iterations):
        """Run steps of which each total is read."""
        for _ in range(iterations):
            self.x, total = self.step(self.x, self.rate)
            self.totals.append(float(total))

    def unread(self, iterations):
        """Run steps of which nothing is read."""
        for _ in range(iterations):
            self.x, total = self.step(self.x, self.rate)
            self.totals.append(total)

    def between(self, iterations):
        """Run steps, each with a few operations before it, of which each total is read."""
        for _ in range(iterations):
            self.key, now = jax.random.split(self.key)
            self.rate = 0.2 + 0.1 * jax.random.uniform(now)
            self.reading(1)

    def is_left(self):
        """Return whether JAX makes the calls, as their results show."""
        return type(self.x["w"]) is not LazyArray


def left():
    return snaprt.metrics.counter_value("JitLeftToJax") or 0


def assert_as_eager(loop, run):
    other = Loop()
    run(other)
    np.testing.assert_allclose(
        [float(total) for total in loop.totals], [float(t) for t in other.totals], rtol=1e-5
    )
    assert int(loop.x["count"]) == int(other.x["count"]) == len(loop.totals)
    np.testing.assert_allclose(loop.x["w"], other.x["w"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["reading", "unread"])
def test_jax_makes_the_calls_after_a_while(kind):
    loop = Loop()

    def run(loop):
        getattr(loop, kind)(8)
        was_left = loop.is_left()
        getattr(loop, kind)(30)
        return was_left, loop.is_left()

    assert lazily_in_thread(lambda: run(loop)) == (False, True)
    assert left() == 1
    assert_as_eager(loop, run)


def test_a_program_of_a_few_calls_is_left_as_a_whole():
    @jax.jit
    def ask(key, mean):
        key, now = jax.random.split(key)
        return key, mean + 0.1 * jax.random.normal(now, (8, 16))

    @jax.jit
    def tell(x):
        mean = x[jnp.argmin(jnp.sum((x - 1.0) ** 2, axis=1))]
        return mean, mean.sum()

    def run():
        key, mean, read = jax.random.key(0), jnp.zeros(16), []
        for _ in range(60):
            key, x = ask(key, mean)
            mean, total = tell(x)
            read.append(float(total))
        return read, type(mean)

    read, kind = lazily_in_thread(run)
    assert kind is not LazyArray
    assert left() == 2
    np.testing.assert_allclose(read, run()[0], rtol=1e-5, atol=1e-6)


def test_a_small_call_whose_operand_is_pending_is_recorded():
    @jax.jit
    def halve(x):
        return x * 0.5, x.sum()

    def run():
        x, kinds = jnp.asarray(X), []
        for _ in range(20):
            x, total = halve(x)
            float(total)
        kinds.append(type(x))
        x, total = halve(x * 2.0)
        return [*kinds, type(x)]

    was, is_now = lazily_in_thread(run)
    assert was is not LazyArray
    assert is_now is LazyArray


def test_what_a_large_call_needs_runs_before_it(monkeypatch):
    """Where the call is a program of its own, it would be cut before it anyhow."""
    monkeypatch.setattr(lone_calls, "_MOST_BETWEEN", 0)

    @jax.jit
    def step(x, key):
        x = x + 0.01 * jax.random.normal(key, x.shape)
        for _ in range(8):
            x = jnp.cos(x) * 0.5 + 0.1
        return x, x.sum()

    def run():
        x, key, read = jnp.asarray(X), jax.random.key(0), []
        for _ in range(60):
            key, now = jax.random.split(key)
            x, total = step(x, now)
            read.append(float(total))
        return read, type(x), type(now)

    read, *kinds = lazily_in_thread(run)
    assert kinds[0] is not LazyArray
    assert kinds[1] is LazyArray
    np.testing.assert_allclose(read, run()[0], rtol=1e-5)


def test_what_stands_beside_a_large_call_piles_up_no_work():
    loop = Loop()

    def run():
        average, most = loop.x["w"], 0
        for _ in range(60):
            loop.unread(1)
            average = 0.9 * average + 0.1 * loop.x["w"]
            most = max(most, thread_trace().recording.point.depth)
        return loop.is_left(), most

    is_left, most = lazily_in_thread(run)
    assert is_left
    assert most <= 4


@pytest.fixture
def asked(monkeypatch):
    """The functions that C++ has asked Python to call, of those that are left to JAX."""
    calls, leaves_call = [], LazyTrace.leaves_call

    def ask(trace, call, operands):
        calls.append(call)
        return leaves_call(trace, call, operands)

    monkeypatch.setattr(LazyTrace, "leaves_call", ask)
    return calls


@pytest.mark.parametrize(
    ("kind", "asked_at_first"), [("reading", 10), ("unread", 10), ("between", 120)]
)
def test_cpp_makes_the_calls_that_are_left(asked, kind, asked_at_first):
    loop = Loop()

    def run(loop):
        getattr(loop, kind)(120)
        before = len(asked)
        getattr(loop, kind)(60)
        return len(asked) - before

    assert lazily_in_thread(lambda: run(loop)) == 0
    assert 0 < len(asked) < asked_at_first
    assert_as_eager(loop, run)


def test_a_small_call_and_what_it_takes_are_left_together():
    """They have been one program, so JAX makes neither before it makes both."""

    @jax.jit
    def halve(x):
        return x * 0.5, x.sum()

    def run(iterations):
        x, read = jnp.asarray(X), []
        for _ in range(iterations):
            y = jnp.sin(x) + 1.0
            x, total = halve(y)
            read.append(float(total))
        return read, type(y), type(x)

    assert lazily_in_thread(lambda: run(20))[1:] == (LazyArray, LazyArray)
    read, *kinds = lazily_in_thread(lambda: run(60))
    assert LazyArray not in kinds
    np.testing.assert_allclose(read, run(60)[0], rtol=1e-6)


def test_a_sum_that_nobody_reads_between_calls_is_left():
    loop = Loop()

    def run(loop):
        total = jnp.float32(0.0)
        for _ in range(60):
            loop.unread(1)
            total = total + loop.totals[-1]
        return type(total), float(total)

    kind, total = lazily_in_thread(lambda: run(loop))
    assert kind is not LazyArray
    assert total == pytest.approx(run(Loop())[1], rel=1e-5)


def test_a_long_stretch_between_calls_is_recorded(monkeypatch):
    monkeypatch.setattr(lone_calls, "_COST_OF_MANY", 4)
    loop = Loop()

    def long(x, count):
        for _ in range(count):
            x = jnp.sin(x) * 0.9
        return x

    def run(loop):
        loop.between(120)
        kinds, was_left = [], thread_trace().lone_calls.leaves_between
        x = jnp.asarray(X)
        for count in (4, 40):
            x = long(x, count)
            kinds.append(type(x))
        loop.between(2)
        is_left = thread_trace().lone_calls.leaves_between
        for _ in range(8):
            x = long(x, 40)
            loop.between(1)
        kinds.append(type(loop.rate))
        return [was_left, is_left, thread_trace().lone_calls.leaves_between], kinds, np.asarray(x)

    lefts, kinds, x = lazily_in_thread(lambda: run(loop))
    assert lefts == [True, True, False]
    assert [kind is LazyArray for kind in kinds] == [False, True, True]
    np.testing.assert_allclose(x, long(jnp.asarray(X), 4 + 40 * 9), rtol=1e-4)


def test_loops_and_jitted_functions_between_calls_are_recorded():
    loop = Loop()

    @jax.jit
    def other(x):
        return x + 1

    def run():
        loop.between(120)
        x = other(loop.rate)
        loop.between(1)
        y = jax.lax.fori_loop(0, 3, lambda i, x: x + i, loop.rate)
        return type(x), type(y), float(y) - float(loop.rate)

    assert lazily_in_thread(run) == (LazyArray, LazyArray, pytest.approx(3.0))


def test_cpp_makes_calls_with_keys_and_values_that_were_recorded(asked):
    @jax.jit
    def step(key, x, scale):
        key, now = jax.random.split(key)
        x = x + scale * jax.random.normal(now, x.shape)
        return key, x, x.sum()

    def run():
        x, key, scale, read = jnp.asarray(X), jax.random.key(0), jnp.ones(16) * 0.1, []
        for _ in range(60):
            key, x, total = step(key, x, scale)
            read.append(float(total))
        before = len(asked)
        for _ in range(30):
            key, x, total = step(key, x, scale)
            read.append(float(total))
        return read, len(asked) - before, type(scale)

    read, calls, kind = lazily_in_thread(run)
    assert (calls, kind) == (0, LazyArray)
    np.testing.assert_allclose(read, run()[0], rtol=1e-5)


def test_static_arguments_are_what_they_were(asked):
    """JAX knows a static object by its identity, also where its class is a tree."""

    @jax.tree_util.register_pytree_node_class
    class Model:
        def __init__(self, scale):
            self.scale = scale

        def tree_flatten(self):
            return (self.scale,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

        @functools.partial(jax.jit, static_argnums=0)
        def step(self, x, settings):
            traces.append(self)
            return x - settings["rate"] * jnp.sin(x), jnp.sum(x)

    traces = []

    def run(scale):
        model, x, settings = Model(scale), jnp.ones(8), {"rate": jnp.float32(0.1) * 1.0}
        for _ in range(60):
            x, total = model.step(x, settings)
            float(total)
        return type(x)

    assert lazily_in_thread(lambda: run(0.5)) is not LazyArray
    assert len(traces) <= 3
    traces.clear()
    lazily_in_thread(lambda: run(jnp.float32(0.5) * 1))
    assert len(traces) <= 3


def test_what_a_left_call_donates_may_be_pending_in_another_thread():
    @functools.partial(jax.jit, donate_argnums=0)
    def step(x):
        return x * 0.5 + 1, x.sum()

    def record_there(x):
        with snaprt.lazy():
            return jnp.sin(x).sum()

    def run():
        x, sums = jnp.asarray(X), []
        for _ in range(50):
            x, total = step(x)
            float(total)
        for _ in range(4):
            sums.append((in_thread(record_there, x), np.sin(x).sum()))
            x, _ = step(x)
        return [(float(total), expected) for total, expected in sums], type(x)

    sums, kind = lazily_in_thread(run)
    assert kind is not LazyArray
    for total, expected in sums:
        assert total == pytest.approx(expected, rel=1e-6)


def test_work_beside_small_calls_is_as_before(asked):
    """Where something is recorded between two calls, Python is asked for each."""
    loop = Loop()

    def run(loop):
        average = loop.x["w"]
        for _ in range(20):
            loop.reading(5)
            average = 0.9 * average + 0.1 * loop.x["w"]
            loop.reading(1)
        return np.asarray(average)

    average = lazily_in_thread(lambda: run(loop))
    assert loop.is_left()
    np.testing.assert_allclose(average, run(Loop()), rtol=1e-4)
    assert_as_eager(loop, run)


def _tell_of_each():
    tell_of_each(lambda executable: None)
    tell_of_each(None)


#: What may be done to have calls seen, in the thread itself or in another one.
EVENTS = {
    "variable": lambda: os.environ.__setitem__("SNAPRT_TEST_OF_RESTS", "1"),
    "subscriber": lambda: unsubscribe(Subscriber()),
    "eager mode": lambda: snaprt.eager_mode(None),
    "executions told": _tell_of_each,
}


@pytest.mark.parametrize("kind", ["reading", "between"])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
@pytest.mark.parametrize("event", EVENTS)
def test_python_is_asked_about_the_next_call_after_an_event(
    asked, monkeypatch, event, elsewhere, kind
):
    monkeypatch.delenv("SNAPRT_TEST_OF_RESTS", raising=False)
    loop = Loop()

    def run():
        getattr(loop, kind)(120)
        rested, before = jaxapi.rests(), len(asked)
        in_thread(EVENTS[event]) if elsewhere else EVENTS[event]()
        getattr(loop, kind)(1)
        calls = len(asked) - before
        getattr(loop, kind)(3)
        return rested, calls, jaxapi.rests()

    assert lazily_in_thread(run) == (True, 1, True)


@contextlib.contextmanager
def _disabled():
    snaprt.disable()
    yield
    snaprt.enable()


@pytest.mark.parametrize(
    "scope",
    [
        lambda: snaprt.lazy(fullgraph=True),
        lambda: snaprt.no_compile("warn"),
        lambda: snaprt.record("error", "unused"),
        lambda: jax.debug_nans(True),
        _disabled,
    ],
    ids=["fullgraph", "no_compile", "record", "debug_nans", "disable"],
)
def test_python_is_asked_about_the_first_call_in_a_scope(scope):
    loop = Loop()

    def run():
        loop.reading(40)
        rested = jaxapi.rests()
        with scope():
            inside = jaxapi.rests()
        return rested, inside

    assert lazily_in_thread(run) == (True, False)


def test_jax_looks_for_nan_after_calls_that_cpp_has_made():
    @jax.jit
    def step(x):
        return jnp.log(x), x.sum()

    def run():
        x = jnp.ones(16) * 2
        for _ in range(40):
            float(step(x)[1])
        rested = jaxapi.rests()
        with jax.debug_nans(True), pytest.raises(FloatingPointError):
            np.asarray(step(-x)[0])
        return rested

    assert lazily_in_thread(run)


def test_threads_that_are_woken_again_and_again_rest_no_more(monkeypatch):
    monkeypatch.setattr("snaprt.jaxapi.jit.watch._MOST_ENDS", 0)
    loop = Loop()

    def run():
        loop.reading(40)
        return jaxapi.rests()

    assert not lazily_in_thread(run)
    assert loop.is_left()


@pytest.mark.parametrize("kind", ["reading", "between"])
def test_what_is_recorded_from_here_on_is_seen(tmp_path, kind):
    loop = Loop()

    def run():
        getattr(loop, kind)(120)
        was_left = loop.is_left()
        with snaprt.record("all", tmp_path):
            getattr(loop, kind)(3)
        after = loop.is_left(), type(loop.rate) is LazyArray
        getattr(loop, kind)(3)
        return was_left, after, loop.is_left()

    assert lazily_in_thread(run) == (True, (False, kind == "between"), True)
    snaprt.dump_now()
    assert len(recorded(tmp_path)) == 3 * (1 + (kind == "between"))


def test_a_thread_that_marks_a_step_is_lazy_again():
    loop = Loop()

    def run():
        loop.reading(20)
        was_left = loop.is_left()
        getattr(snaprt, "mark" + "_step")()  # by its name, it would be expected to
        loop.unread(1)
        return was_left, loop.is_left()

    assert lazily_in_thread(run) == (True, False)


def test_nothing_is_compiled_again_where_that_is_forbidden():
    @jax.jit
    def step(x):
        return x * 2, x.sum()

    def run():
        x = jnp.asarray(X)
        x, total = step(x)
        read = [float(total)]
        with snaprt.no_compile():
            for _ in range(30):
                x, total = step(x)
                read.append(float(total))
        return type(x), read[-1]

    assert lazily_in_thread(run) == (LazyArray, pytest.approx(2.0**30 * X.sum()))


def test_a_subscriber_is_told_of_each_cut():
    loop, seen = Loop(), []

    class See(Subscriber):
        def cut(self, cut):
            seen.append(cut.cause)

    def run():
        loop.reading(20)
        was_left, see = loop.is_left(), See()
        subscribe(see)
        try:
            loop.reading(3)
        finally:
            unsubscribe(see)
        return was_left

    assert lazily_in_thread(run)
    assert seen == ["float"] * 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SNAPRT_AUTO_EAGER", "0"),
        ("SNAPRT_AUTO_STEP_SIZE", "0"),
        ("XLA_IR_DEBUG", "1"),
        ("XLA_USE_EAGER_DEBUG_MODE", "1"),
    ],
)
def test_a_setting_keeps_the_calls_lazy(monkeypatch, name, value):
    loop = Loop()

    def run():
        loop.reading(20)
        was_left = loop.is_left()
        monkeypatch.setenv(name, value)
        loop.unread(1)
        return was_left, loop.is_left()

    assert lazily_in_thread(run) == (True, False)


@pytest.mark.parametrize(
    ("limit", "value"), [("_MOST_BYTES", 100), ("_MOST_EQUATIONS", 15), ("_MOST_WORK", 100)]
)
def test_what_is_large_stays_lazy(monkeypatch, limit, value):
    monkeypatch.setattr(lone_calls, limit, value)
    loop = Loop()
    lazily_in_thread(lambda: loop.reading(30))
    assert not loop.is_left()


def test_a_function_that_closes_over_much_stays_lazy():
    table = np.zeros(1 << 15, np.float32)

    @jax.jit
    def step(x):
        return x + jnp.sum(jnp.asarray(table) * 2.0)

    def run():
        x = jnp.float32(0.0)
        for _ in range(30):
            x = step(x)
            float(x)
        return type(x)

    assert lazily_in_thread(run) is LazyArray


def test_what_a_call_takes_and_hands_back_is_not_given_away():
    @jax.jit
    def keep(x, y):
        y = jnp.sin(y) + x.sum()
        return x, y, y.sum()

    def run():
        x, y = jnp.arange(16.0) * 0.5, jnp.ones(16)
        for _ in range(20):
            kept, y, total = keep(x, y)
            float(total)
        del x
        z = kept
        for _ in range(5):
            z = z * 2.0
            float(z[0])
        return np.asarray(kept), type(y)

    kept, kind = lazily_in_thread(run)
    assert kind is not LazyArray
    np.testing.assert_array_equal(kept, np.arange(16) * 0.5)


def test_donated_arguments_static_ones_and_other_shapes():
    @functools.partial(jax.jit, donate_argnums=0, static_argnames="times")
    def step(x, *, times):
        for _ in range(times):
            x = jnp.cos(x) + 0.5
        return x, x.sum()

    def run():
        read = []
        for size in (16, 8):
            x = jnp.ones(size)
            for i in range(40):
                before = x
                x, total = step(x, times=1 + i // 20)
                read.append(float(total))
            assert before.is_deleted()
        return read, type(x)

    read, kind = lazily_in_thread(run)
    assert kind is not LazyArray
    np.testing.assert_allclose(read, run()[0], rtol=1e-5)


def test_an_error_of_a_call_is_jaxs_own():
    def fail(x):
        if x > 0.5:
            raise ValueError("not today")
        return x

    @jax.jit
    def step(x):
        y = jax.pure_callback(fail, jax.ShapeDtypeStruct((), jnp.float32), x)
        return y + 0.01

    def run():
        x = jnp.float32(0.0)
        for _ in range(40):
            x = step(x)
            float(x)
        with pytest.raises(jax.errors.JaxRuntimeError, match="not today"):
            float(step(np.float32(1.0)))
        return type(x), x

    kind, x = lazily_in_thread(run)
    assert kind is not LazyArray
    assert float(step(x)) == pytest.approx(0.41)


def test_pending_effects_keep_their_order():
    seen = []
    loop = Loop()

    @jax.jit
    def see(x):
        jax.debug.callback(lambda v: seen.append(int(v)), x, ordered=True)
        return x + 1

    def run():
        loop.reading(20)
        x = jnp.int32(0)
        for _ in range(5):
            x = see(x)
            loop.reading(1)
        jax.effects_barrier()
        return int(x)

    assert lazily_in_thread(run) == 5
    assert seen == list(range(5))
