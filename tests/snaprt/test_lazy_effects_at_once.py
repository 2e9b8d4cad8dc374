"""Effects that no graph can hold happen at once; those that are pending are never lost."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counting
from jax._src import error_check
from jax.experimental import checkify, io_callback
from jax.extend import core as jex_core
from programs import run_program
from threads import in_thread, lazily_in_thread

import snaprt
from snaprt.graph.operation import is_same_program, operation

pytestmark = pytest.mark.usefixtures("no_persistent_cache", "little_optimization")


def written_in_a_jitted_function():
    ref = jax.new_ref(jnp.zeros(2))

    @jax.jit
    def add(x):
        ref[...] += x
        return ref[0] * 2

    return add(1.0), add(2.0), ref[...], jax.freeze(ref)


def written_under_grad():
    ref = jax.new_ref(jnp.zeros(()))

    def loss(x):
        ref[...] += jax.lax.stop_gradient(x).sum()
        return (x**2).sum()

    return jax.jit(jax.grad(loss))(jnp.ones(3) * 2), jax.grad(loss)(jnp.ones(3)), ref[...]


def written_in_loops_and_branches():
    ref = jax.new_ref(jnp.zeros(()))

    def body(number, carry):
        ref[...] += number
        return carry

    def branch():
        ref[...] *= 10.0

    jax.lax.fori_loop(0, 4, body, 0)
    jax.lax.cond(jnp.array(True), branch, lambda: None)
    return jax.lax.scan(lambda c, x: (c + ref[...], x), 0.0, jnp.arange(3.0)), ref[...]


def written_through_a_pytree_and_a_batch():
    tree = {"sum": jax.new_ref(jnp.zeros(3)), "x": jnp.arange(3.0)}

    @jax.jit
    def add(tree):
        tree["sum"][...] += tree["x"]

    add(tree)
    jax.vmap(lambda ref, x: ref.__setitem__(..., ref[...] + x))(tree["sum"], tree["x"])
    return tree["sum"][...]


def written_by_a_derivative_rule():
    ref = jax.new_ref(jnp.zeros(()))

    @jax.custom_vjp
    def sine(x, ref):
        return jnp.sin(x)

    def backward(residuals, cotangent):
        x, ref = residuals
        ref[...] += cotangent
        return cotangent * jnp.cos(x), None

    sine.defvjp(lambda x, ref: (sine(x, ref), (x, ref)), backward)
    return jax.grad(lambda x: sine(x, ref))(jnp.ones(()) * 2), ref[...]


@pytest.mark.parametrize(
    "program",
    [
        written_in_a_jitted_function,
        written_under_grad,
        written_in_loops_and_branches,
        written_through_a_pytree_and_a_batch,
        written_by_a_derivative_rule,
    ],
)
def test_references_hold_what_eager_jax_leaves_in_them(program):
    expected = program()
    with snaprt.lazy():
        found = program()
    jax.tree.map(np.testing.assert_allclose, found, expected)


def positive(x):
    checkify.check(x > 0, "{x} is not positive", x=x)
    return x


@pytest.mark.parametrize(
    "function", [checkify.checkify(positive), jax.jit(checkify.checkify(positive))]
)
@pytest.mark.parametrize("throw", [lambda error: error.throw(), checkify.check_error])
def test_the_error_of_a_check_is_thrown_where_it_is_asked_for(function, throw):
    with snaprt.lazy():
        error, result = function(jnp.ones(()) * -2)
        other = result * 3
        with pytest.raises(checkify.JaxRuntimeError, match=r"-2\.0 is not positive"):
            throw(error)
        assert float(other) == -6.0
        throw(function(jnp.ones(()))[0])


def test_a_check_outside_of_any_function_raises_at_once():
    with snaprt.lazy(), pytest.raises(checkify.JaxRuntimeError, match="is not positive"):
        positive(jnp.zeros(()) * 2)


def test_the_error_state_of_jax_is_raised_and_cleared():
    with snaprt.lazy():
        error_check.set_error_if(jnp.ones(()) * 2 > 1, "too large")
        with pytest.raises(error_check.JaxValueError, match="too large"):
            error_check.raise_if_error()
        error_check.raise_if_error()


def draw_twice(key):
    jax.random.normal(key)
    return jax.random.uniform(key)


def split_what_was_drawn_from(key):
    jax.jit(lambda key: jax.random.bits(key))(key)
    return [*jax.random.split(key)]


def use_one_of_several_twice(key):
    keys = jax.random.split(key)
    return [jax.random.normal(keys[index]) for index in (0, 1, 0)]


def use_each_once(key):
    first, second = jax.random.split(key)
    return jax.random.normal(first) + jax.random.normal(second)


@pytest.mark.parametrize(
    "function", [draw_twice, split_what_was_drawn_from, use_one_of_several_twice, use_each_once]
)
def test_keys_that_are_used_twice_are_found_where_jax_looks_for_them(function):
    def outcome():
        try:
            return repr(function(jax.random.key(0)))
        except jax.errors.KeyReuseError as error:
            return str(error)

    with jax.debug_key_reuse(True):
        expected = outcome()
        with snaprt.lazy():
            assert outcome() == expected
    with snaprt.lazy():
        function(jax.random.key(0))


def test_unordered_callbacks_of_one_program_run_in_the_order_of_the_program(capfd):
    with snaprt.lazy():
        x = jnp.arange(4.0) * 2
        for number in range(4):
            jax.debug.print("value {}", x[number])
        snaprt.mark_step(wait=True)
    assert capfd.readouterr().out.split() == [
        "value",
        "0.0",
        "value",
        "2.0",
        "value",
        "4.0",
        "value",
        "6.0",
    ]


def test_callbacks_that_are_new_each_time_run_at_once_after_a_few():
    seen = []

    def loop(rounds):
        x = jnp.ones(3)
        for number in range(rounds):
            x = x * 0.9
            jax.debug.callback(lambda value, number=number: seen.append((number, value)), x[0])
        return float(x[0])

    expected = loop(60)
    eager, seen = seen, []
    with counting() as counts, snaprt.lazy():
        assert loop(60) == pytest.approx(expected)
    assert [(number, pytest.approx(value)) for number, value in seen] == eager
    assert counts.compiled <= 3  # those before, and what one of the others takes


def test_callbacks_that_are_new_in_each_graph_soon_run_at_once():
    seen, reads = [], []

    def loop(rounds):
        x = jnp.ones(3)
        for number in range(rounds):
            x = jnp.tanh(x * 0.9 + 0.1)
            jax.debug.callback(lambda value, number=number: seen.append((number, value)), x[0])
            reads.append(float(x.sum()))

    loop(12)
    (expected, seen), (expected_reads, reads) = (seen, []), (reads, [])
    with counting() as counts:
        lazily_in_thread(lambda: loop(12))
    jax.effects_barrier()
    assert [(number, pytest.approx(value)) for number, value in seen] == expected
    assert reads == pytest.approx(expected_reads)
    assert counts.compiled <= 7  # four with a callback, and what precedes and follows the others


def test_many_callbacks_that_nobody_reads_compile_a_few_of_them(capfd):
    def loop(rounds):
        with snaprt.lazy():
            x = jnp.ones(3)
            for _ in range(rounds):
                x = x * 0.9
                jax.debug.print("{}", x[0])

    with counting() as counts:
        in_thread(loop, 300)  # a new one: where it is cut depends on what the thread did before
    jax.effects_barrier()
    assert len(capfd.readouterr().out.split()) == 300
    assert counts.graphs > 50  # a graph of all takes XLA minutes


@pytest.mark.parametrize("ordered", [True, False])
def test_callbacks_of_different_kinds_run_in_the_order_of_the_program(ordered):
    log = []
    with snaprt.lazy():
        x = jnp.arange(4.0).sum()
        for number in range(3):
            io_callback(lambda v, n=number: log.append(("io", n)), None, x, ordered=ordered)
            jax.debug.callback(lambda v, n=number: log.append(("debug", n)), x, ordered=ordered)
        snaprt.mark_step(wait=True)
    jax.effects_barrier()
    assert log == [(kind, number) for number in range(3) for kind in ("io", "debug")]


def test_a_loop_from_a_constant_with_an_ordered_callback_ends():
    def body(x):
        return io_callback(lambda v: v + 1, jax.ShapeDtypeStruct((), x.dtype), x, ordered=True)

    with snaprt.lazy():
        last = jax.jit(lambda x: jax.lax.while_loop(lambda x: x < 3, body, x))(0.0)
        assert float(last) == 3.0


def test_a_breakpoint_stops_where_it_stands():
    said = io.StringIO()

    def stop(commands):
        y = jnp.ones(()) * 2
        stdin = io.StringIO(commands)
        jax.debug.breakpoint(backend="cli", stdin=stdin, stdout=said, num_frames=1)
        return y * 3

    with snaprt.lazy():
        result = stop("p y\nc\n")
        assert "(jdb) Array(2." in said.getvalue()
        with pytest.raises(SystemExit):
            stop("q\n")
        assert float(result) == 6.0


def test_a_sharding_is_inspected_inside_of_a_jitted_function_when_that_is_called():
    seen = []

    @jax.jit
    def inspecting(x):
        jax.debug.inspect_array_sharding(x, callback=seen.append)
        return x * 2

    with snaprt.lazy():
        inspecting(jnp.ones(3) * 2)
        assert len(seen) == 1


def test_an_operation_that_jax_can_only_run_runs_at_once():
    twice = jex_core.Primitive("twice")
    twice.def_impl(lambda x: x * 2)
    twice.def_abstract_eval(lambda x: x)
    with snaprt.lazy():
        np.testing.assert_array_equal(twice.bind(jnp.ones(3) * 2) + 1, [5, 5, 5])
        np.testing.assert_array_equal(jax.checkpoint(twice.bind)(jnp.ones(3) * 2), [4, 4, 4])
        traced = jax.jit(twice.bind).trace(jnp.ones(3))
        np.testing.assert_array_equal(traced(jnp.ones(3) * 2), [4, 4, 4])


def note(log, value):
    """Record a callback that appends what ``value`` is when it runs."""
    jax.debug.callback(lambda v: log.append(float(v)), value)


def test_waiting_for_effects_runs_those_that_are_pending_and_nothing_else():
    log = []
    with snaprt.lazy():
        x = jnp.ones(()) * 2
        other = jnp.ones(3) * 5
        note(log, x)
        jax.effects_barrier()
        assert log == [2.0]
        assert other._value is None
        note(log, x + 1)
        jax.effects_barrier()
    assert log == [2.0, 3.0]


def test_waiting_for_effects_is_a_cut_where_none_may_be():
    log = []
    with snaprt.lazy(fullgraph=True):
        jax.effects_barrier()  # nothing is pending
        note(log, jnp.ones(()))
        with pytest.raises(snaprt.GraphBreakError, match="effects_barrier"):
            jax.effects_barrier()
    assert log == [1.0]


def test_pending_effects_run_when_the_outermost_scope_ends():
    log = []
    with snaprt.lazy():
        with snaprt.lazy():
            note(log, jnp.ones(()))
        assert log == []
    assert log == [1.0]
    snaprt.enable()
    note(log, jnp.ones(()) * 2)
    snaprt.disable()
    assert log == [1.0, 2.0]


def test_pending_effects_run_before_an_error_leaves_the_scope(caplog):
    log = []

    @snaprt.lazy()
    def program():
        note(log, jnp.ones(()))
        jax.debug.callback(lambda: 1 / 0)
        raise KeyError("the user's")

    with pytest.raises(KeyError, match="the user's"):
        program()
    assert log == [1.0]
    assert "effects that were pending" in caplog.text


def test_an_effect_runs_before_an_operation_that_runs_at_once():
    log = []
    with snaprt.lazy():
        ref = jax.new_ref(jnp.zeros(()))
        note(log, jnp.ones(()))
        ref[...] = 2.0
        assert log == [1.0]


def test_effects_that_a_thread_left_run_at_the_next_wait():
    log = []

    def work():
        snaprt.enable()
        note(log, jnp.ones(()) * 7)

    in_thread(work)
    assert log == []
    jax.effects_barrier()
    assert log == [7.0]


def test_effects_that_are_pending_when_the_process_ends_run():
    program = """
        import threading, jax, jax.numpy as jnp, snaprt
        def work(name):
            snaprt.enable()
            jax.debug.print("{} {}", name, jnp.ones(()) * 2)
        thread = threading.Thread(target=work, args=(1,))
        thread.start()
        thread.join()
        work(2)
    """
    ended = run_program(program)
    assert sorted(ended.stdout.split("\n")) == ["", "1 2.0", "2 2.0"]
    assert "Traceback" not in ended.stderr


def test_nothing_is_lost_where_jit_is_disabled():
    def program():
        seen = []

        def body(number, carry):
            seen.append(float(carry))
            return carry + number

        with jax.disable_jit():
            x = jnp.ones(3) * 2
            total = jax.jit(lambda v: v.sum())(x)
            last = jax.lax.fori_loop(0, 3, body, total)
            chosen = jax.lax.cond(last > 1, lambda: seen.append("more"), lambda: None)
            return float(total), float(last), seen, chosen, np.asarray(x + 1).tolist()

    expected = program()
    with snaprt.lazy():
        assert program() == expected
        with jax.disable_jit():
            y = jnp.ones(3) * 3
            snaprt.mark_step()
        np.testing.assert_array_equal(y, [3, 3, 3])


def test_kernels_that_close_over_a_traced_reference_are_equal_if_they_do_the_same():
    @jax.jit
    def read(ref):
        kernel, equal, other = (
            jax.make_jaxpr(function)()
            for function in (lambda: ref[...], lambda: ref[...], lambda: ref[...] * 2)
        )
        assert is_same_program(kernel, equal)
        assert not is_same_program(kernel, other)
        first, second, third = (
            operation(jax.lax.sin_p, {"jaxpr": jaxpr}, None).signature
            for jaxpr in (kernel, equal, other)
        )
        assert first == second != third
        return ref[...]

    assert read(jax.new_ref(jnp.float32(3))) == 3
