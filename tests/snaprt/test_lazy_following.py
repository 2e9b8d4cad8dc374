"""A step that repeats is followed, not recorded anew; what differs from last time is noticed."""

import itertools
import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counting
from jax import lax
from threads import in_threads

import snaprt
from snaprt.runtime.step import thread_trace
from snaprt.trace.lazy_trace import LazyTrace

pytestmark = pytest.mark.usefixtures("no_persistent_cache", "little_optimization")

X = jnp.linspace(-1.0, 2.0, 12, dtype=jnp.float32).reshape(3, 4)


@jax.custom_vjp
def _doubled(x):
    return x * 2


_doubled.defvjp(lambda x: (x * 2, None), lambda _, gradient: (gradient * 2,))


def _same_twice(program, *args):
    """Run a program eagerly and three times lazily; the results must be equal in all they are."""
    expected = jax.tree.leaves(program(*args))
    for _ in range(3):
        with snaprt.lazy():
            found = jax.tree.leaves(program(*args))
            snaprt.mark_step()
        for ours, eager in zip(found, expected, strict=True):
            assert type(ours).__name__ == "LazyArray"
            assert (ours.shape, ours.dtype, ours.weak_type) == (
                eager.shape,
                eager.dtype,
                eager.weak_type,
            )
            np.testing.assert_allclose(np.asarray(ours), np.asarray(eager), rtol=1e-5, atol=1e-5)


def _points_made(program):
    """Return how many points the second run of ``program`` adds to the thread's paths."""
    with snaprt.lazy():
        for _ in range(2):
            before = thread_trace()._points
            kept = program()
            snaprt.mark_step()
            del kept
    return thread_trace()._points - before


@pytest.mark.parametrize(
    "program",
    [
        lambda x: (x * 1) + x - 2 * x / 4.0 // 1 % 3,
        lambda x: (x > 0, x <= 1, x == x, x != 2, (x > 0) & (x < 1), ~(x > 0), -x, abs(x)),
        lambda x: (x * 1)[1:] + (x * 1)[:-1] * (x + 0)[0] + (x + 0)[-1, 2],
        lambda x: ((x + 0)[None, :, ::2], (x + 0)[..., 1], (x + 0)[jnp.array([0, 2])]),
        lambda x: (x + 0).reshape(4, 3).T.astype(jnp.bfloat16).sum(axis=0),
        lambda x: ((x + 0).reshape((-1,)), (x * 1).mean(), (x * 1).max(1), (x * 1).transpose(1, 0)),
        lambda x: (x * 1) @ (x.T * 1),
        lambda x: (x.astype(int) << 1, x.astype(int) | 4, 7 - x.astype(jnp.uint8)),
        lambda x: ((x * 1) ** 2, (x * 1) ** 0.5 * 0, 2 ** (x * 1), divmod(x * 1, 2)),
        lambda x: jnp.where(x * 1 > 0, x, 0) + jnp.exp(x * 1) + jnp.clip(x * 2, 0, 1),
        lambda x: jax.grad(lambda y: (jnp.tanh(y @ y.T) * 2).sum())(x * 1),
        lambda x: jax.jit(lambda y, n: {"a": y, "b": (y * n, None)}, static_argnums=1)(x * 1, 3),
        lambda x: jax.random.normal(jax.random.fold_in(jax.random.key(1), 3), (4,)) + x,
    ],
)
def test_a_followed_program_equals_eager(program):
    _same_twice(program, X)


@pytest.mark.parametrize(
    "program",
    [
        lambda: [X * 1 + X],
        lambda: [jnp.exp(X * 2.0)[1:].sum()],
        lambda: jax.grad(lambda y: jnp.tanh(y).sum())(X * 1),
        lambda: jax.jit(lambda y: y * 2)(X),
        lambda: lax.scan(lambda y, _: (jax.nn.relu(y), None), X, length=2)[0],
        lambda: lax.scan(lambda y, _: (_doubled(y), None), X, length=2)[0],
        lambda: jax.checkpoint(lambda y: jnp.sin(y), policy=lambda *_, **__: False)(X),
        lambda: lax.reduce(X, jnp.float32(0), lambda one, other: one + other, (0,)),
    ],
)
def test_a_step_that_repeats_records_nothing_new(program):
    assert _points_made(program) == 0


@pytest.mark.parametrize(
    "scalar",
    [
        *(np.float32(2), np.float32(-0.0), np.float32("nan"), np.float64(0.1), np.float16(1.5)),
        *(np.int32(3), np.int8(-3), np.uint8(200), np.int64(1 << 20), np.bool_(True)),
        *(np.complex64(2j), 3, -0.0, True),
    ],
    ids=repr,
)
def test_scalars_of_the_host_are_followed(monkeypatch, scalar):
    weigh = jax.jit(lambda x, weight: {"x": x * weight + 1})

    def program():
        x = X * 1
        return [x * scalar, scalar - x, x + scalar, x == scalar, weigh(x, scalar)]

    _same_twice(program)
    monkeypatch.setattr(LazyTrace, "_record", lambda *_, **__: pytest.fail("recorded anew"))
    with snaprt.lazy():
        program()
        snaprt.mark_step()


def test_a_static_argument_is_the_object_itself_beside_numpy_arrays():
    @jax.tree_util.register_pytree_node_class
    class Model:
        traces = 0

        def tree_flatten(self):
            return (), None

        @classmethod
        def tree_unflatten(cls, *_):
            return cls()

        @partial(jax.jit, static_argnums=0)
        def step(self, x):
            self.traces += 1
            return x * 2

    model = Model()
    with snaprt.lazy():
        for _ in range(3):
            y = model.step(np.ones(3))
    assert model.traces == 1
    np.testing.assert_array_equal(y, [2, 2, 2])


def test_one_array_given_twice_is_one_more_input_of_a_jitted_call():
    """As parameters and their average, which are one until the first step."""

    @jax.jit
    def step(weights, average):
        weights = weights - 0.1 * jnp.sin(weights)
        return weights, 0.9 * average + 0.1 * weights

    def run(weights):
        average = weights
        for _ in range(3):
            weights, average = step(weights, average)
            snaprt.mark_step()
        return np.asarray(weights), np.asarray(average)

    weights = X * 1
    with snaprt.lazy(), counting() as counts:
        found = run(weights)
    assert counts.compiled == 1
    np.testing.assert_allclose(found, run(weights), rtol=1e-6)


_FUNCTIONS = {
    "jit": jax.jit(lambda a, b, c: a - 2 * b + c * b),
    "inline": jax.jit(lambda a, b, c: (a - b, c), inline=True),
    "hands back": jax.jit(lambda a, b, c: (b, a * c, a)),
    "nested": jax.jit(lambda a, b, c: jax.jit(lambda d, e: d - e * c)(b, a)),
    "gradient": lambda a, b, c: jax.grad(
        lambda d: jax.jit(lambda e, f: (e * f - b).sum())(d, c) * 2.0
    )(a),
    "in a tree": jax.jit(lambda a, b, c: {"d": a / (2 + b), "e": [c, c - a]}),
    "plain": lambda a, b, c: (a - b) * c,
}


@pytest.mark.parametrize("kind", _FUNCTIONS)
@pytest.mark.parametrize("seed", range(2))
def test_calls_with_arrays_that_are_the_same_or_not_equal_eager(kind, seed):
    """What is known of a call with one array twice is not taken for that of two arrays."""
    arrays = jax.block_until_ready([X * 1, X + 2, jnp.cos(X)])
    patterns = list(itertools.product(range(3), repeat=3))
    np.random.default_rng(seed).shuffle(patterns)
    for pattern in patterns * 2:
        given = [arrays[index] for index in pattern]
        with snaprt.lazy():
            found = [_FUNCTIONS[kind](*given), _FUNCTIONS[kind](*reversed(given))]
            snaprt.mark_step()
        expected = [_FUNCTIONS[kind](*given), _FUNCTIONS[kind](*reversed(given))]
        for ours, eager in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(ours, eager, rtol=1e-5, atol=1e-5)


def test_operators_keep_apart_what_python_holds_equal():
    ones = jnp.ones(2, jnp.int32)
    for _ in range(2):
        with snaprt.lazy():
            lazy = ones * 1
            results = [lazy * 1, lazy * 1.0, lazy * True, lazy / 1, lazy + 0.0, lazy + -0.0]
            copies = [jnp.copysign(1.0, (lazy * 0.0) * sign) for sign in (1.0, -1.0)]
            snaprt.mark_step()
        expected = [ones * 1, ones * 1.0, ones * True, ones / 1, ones + 0.0, ones + -0.0]
        assert [(r.dtype, r.weak_type) for r in results] == [
            (e.dtype, e.weak_type) for e in expected
        ]
        assert [float(c[0]) for c in copies] == [1.0, -1.0]


def test_settings_of_jax_are_noticed():
    with snaprt.lazy():
        for _ in range(2):
            x = X * 1
            narrow = x.astype(float)
            with jax.enable_x64(True):
                wide = x.astype(float)
            with jax.numpy_rank_promotion("raise"), pytest.raises(ValueError, match="rank"):
                x + x[0]
            plain = x + x[0]
            snaprt.mark_step()
            assert (narrow.dtype, wide.dtype) == (np.float32, np.float64)
            np.testing.assert_allclose(plain, X + X[0], rtol=1e-6)


def test_another_way_through_the_program_is_recorded():
    with snaprt.lazy():
        for number in range(6):
            y = X * 1
            y = y + 1 if number % 2 else y - 1
            z = y * 2
            snaprt.mark_step()
            np.testing.assert_allclose(z, (X + (1 if number % 2 else -1)) * 2, rtol=1e-6)


def test_a_function_that_reads_a_value_is_not_taken_for_known():
    def double_if_positive(x):
        return x * 2 if x.sum() > 0 else x * 3

    mask = X > 0
    for _ in range(2):
        for sign in (1.0, -1.0):
            value = jnp.ones(3) * sign
            with snaprt.lazy():
                result = double_if_positive(value * 1)
                picked = (X * sign)[mask * 1 > 0]
                snaprt.mark_step()
            np.testing.assert_allclose(result, value * (2 if sign > 0 else 3))
            np.testing.assert_allclose(picked, (X * sign)[mask])


def test_an_index_that_is_a_computed_array_is_not_a_constant():
    with snaprt.lazy():
        for number in range(3):
            index = jnp.asarray(number) * 1
            snaprt.mark_step()
            row = (X * 1)[index]
            snaprt.mark_step()
            np.testing.assert_allclose(row, X[number], rtol=1e-6)


def test_errors_are_those_of_eager_jax_each_time():
    with pytest.raises(TypeError) as eager:
        X + X.T
    for _ in range(3):
        with snaprt.lazy():
            lazy = X * 1
            with pytest.raises(TypeError) as error:
                lazy + X.T
            assert str(error.value) == str(eager.value)


def test_a_jit_whose_function_is_gone_leaves_nothing_to_follow():
    with snaprt.lazy():
        for factor in (2.0, 3.0, 4.0):
            result = jax.jit(lambda y, factor=factor: y * factor)(X * 1)
            snaprt.mark_step()
            np.testing.assert_allclose(result, X * factor, rtol=1e-6)


def test_jits_with_effects_have_them_each_time(capfd):
    @jax.jit
    def show(x):
        jax.debug.print("saw {}", x[0, 0])
        return x + 1

    with snaprt.lazy():
        for _ in range(3):
            y = show(X * 1)
            snaprt.mark_step(wait=True)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("saw -1.0") == 3
    np.testing.assert_allclose(y, X + 1, rtol=1e-6)


def test_lowering_a_jit_inside_the_scope_still_lowers():
    with snaprt.lazy():
        jitted = jax.jit(lambda y: y + 1)
        jitted(X * 1)
        jitted(X * 1)
        assert "stablehlo.add" in jitted.lower(X).as_text()


def test_a_read_in_every_step_is_followed_too():
    with snaprt.lazy(), counting() as counts:
        weights = X * 1
        for _ in range(4):
            loss, gradient = jax.value_and_grad(lambda w: (w**2).sum())(weights)
            weights = weights - 0.1 * gradient
            float(loss)
    np.testing.assert_allclose(weights, X * 0.8**4, rtol=1e-5)
    # Each read runs the update before it as well, and leaves its own for the next.
    assert counts.compiled <= 3


def test_what_outlives_its_use_is_dropped_from_a_recording_that_is_never_cut():
    with snaprt.lazy():
        kept = X * 1
        for _ in range(5000):
            dropped = kept * 2
        del dropped
        assert thread_trace().recording.point.depth < 4096
        snaprt.mark_step()
    np.testing.assert_allclose(kept, X, rtol=1e-6)


def test_a_graph_that_grows_past_the_limit_is_cut_and_counted(monkeypatch):
    monkeypatch.setenv("SNAPRT_MAX_GRAPH_SIZE", "1000")
    with snaprt.lazy(), counting() as counts:
        value = X
        for number in range(5000):
            value = value + X if number % 2 else value - X
        snaprt.mark_step()
    # From the first cut on steps are automatic, and what repeats is cut at its period.
    cuts = (snaprt.metrics.counter_value("cut::graph_size") or 0) + (
        snaprt.metrics.counter_value("cut::repeats") or 0
    )
    assert cuts >= 4
    assert counts.graphs >= 5
    assert counts.compiled <= 6
    np.testing.assert_allclose(value, X, atol=1e-5)


def test_threads_pass_arrays_to_each_other_while_all_record():
    shared = {}
    barrier = threading.Barrier(4)

    def work(seed):
        try:
            with snaprt.lazy():
                for round_number in range(10):
                    mine = jnp.full(4, float(seed)) + round_number
                    shared[seed] = mine
                    barrier.wait(60)
                    other = shared[(seed + 1) % 4]
                    for _ in range(20):
                        mine = mine + 1.0
                    both = mine * 1 + other
                    if round_number % 3 == 0:
                        snaprt.mark_step()
                    np.testing.assert_array_equal(
                        both, seed + (seed + 1) % 4 + 2 * round_number + 20
                    )
                    barrier.wait(60)
        except BaseException:
            barrier.abort()
            raise

    in_threads(4, work)


@pytest.mark.parametrize(
    "clear", [lambda function: function.clear_cache(), lambda _: jax.clear_caches()]
)
def test_a_function_that_jax_has_forgotten_is_traced_again(clear):
    scale = 2.0
    function = jax.jit(lambda x: x * scale)
    with snaprt.lazy():
        assert [float(function(X)[0, 0]) for _ in range(3)] == [-2.0] * 3
        scale = 3.0
        clear(function)
        assert [float(function(X)[0, 0]) for _ in range(3)] == [-3.0] * 3


def test_a_thread_reads_what_another_is_recording():
    stop = threading.Event()
    shared = [X]
    failures = []

    def read():
        try:
            while not stop.is_set():
                assert np.isfinite(np.asarray(shared[0])).all()
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    with snaprt.lazy():
        value = X
        for number in range(300):
            value = value * 0.5 + X
            shared[0] = value
            if number % 50 == 0:
                snaprt.mark_step()
        snaprt.mark_step()
    stop.set()
    reader.join()
    assert failures == []
    np.testing.assert_allclose(value, 2 * X, rtol=1e-5)
