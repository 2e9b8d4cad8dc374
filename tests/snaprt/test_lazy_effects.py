"""Effects happen once and in order; errors name the line or the graph, and lose nothing."""

import _thread
import functools
import os
import threading
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counting
from jax.experimental import io_callback
from programs import run_program
from threads import in_thread, in_threads

import snaprt

pytestmark = pytest.mark.usefixtures("no_persistent_cache")


def test_debug_print_happens_once(capfd):
    with snaprt.lazy():
        x = jnp.ones(2) * 3
        jax.debug.print("value {}", x[0])
        snaprt.mark_step(wait=True)
        snaprt.mark_step(wait=True)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("value 3.0") == 1


def test_ordered_callbacks_run_in_order_and_before_a_later_read():
    log = []
    with snaprt.lazy():
        x = jnp.ones(2)
        for number in range(5):
            io_callback(
                lambda v, n=number: log.append((n, float(v[0]))), None, x * number, ordered=True
            )
        assert float((x + 5).sum()) == 12.0
        jax.effects_barrier()
        assert log == [(n, float(n)) for n in range(5)]
        snaprt.mark_step(wait=True)
    jax.effects_barrier()
    assert len(log) == 5


def test_ordered_effects_in_loops_of_a_function_without_arguments_happen_once():
    log = []

    def tell(number):
        jax.debug.callback(lambda n: log.append(int(n)), number, ordered=True)
        return number

    @jax.jit
    def loop():
        return jax.lax.fori_loop(0, 3, lambda i, x: x * 2 + 0 * tell(i), 1)

    @functools.partial(jax.jit, static_argnums=0)
    def branch(count):
        def step(x, i):
            return jax.lax.cond(i % 2 == 0, lambda: x + tell(i), lambda: x), x

        return jax.lax.scan(step, 0, jnp.arange(count))[0]

    with snaprt.lazy():
        assert int(loop()) == 8
        assert int(branch(5)) == 6
    jax.effects_barrier()
    assert log == [0, 1, 2, 0, 2, 4]


def test_an_effect_whose_arrays_are_gone_still_happens():
    log = []
    with snaprt.lazy():
        io_callback(lambda: log.append("ran"), None, ordered=True)
        snaprt.mark_step(wait=True)
    jax.effects_barrier()
    assert log == ["ran"]


def test_references_hold_their_value_across_reads_and_writes():
    with snaprt.lazy():
        ref = jax.new_ref(jnp.zeros(3))
        ref[...] = jnp.ones(3) * 2
        ref[0] = 9.0
        total = jax.jit(lambda r: r[...].sum())(ref)
        assert float(total) == 13.0
        np.testing.assert_array_equal(ref[...], [9, 2, 2])


def test_an_error_while_recording_is_that_of_eager_jax_and_shows_the_users_line():
    def wrong():
        return jnp.ones((2, 3)) @ jnp.ones((2, 3))  # the line to show

    with pytest.raises(TypeError) as eager:
        wrong()
    with snaprt.lazy(), pytest.raises(TypeError) as lazy:
        wrong()
    assert str(lazy.value) == str(eager.value)
    assert any("the line to show" in (frame.line or "") for frame in traceback.extract_tb(lazy.tb))


def test_an_error_while_recording_leaves_earlier_work_usable():
    with snaprt.lazy():
        x = jnp.ones((2, 3)) * 2
        with pytest.raises(TypeError):
            x @ x
        snaprt.mark_step()
    np.testing.assert_array_equal(x, np.full((2, 3), 2))


def _boom(value):
    raise ValueError("boom")


def test_an_error_at_execution_names_the_graph_and_marks_its_arrays():
    with snaprt.lazy():
        x = jnp.ones(3)
        before = x * 2
        snaprt.mark_step()
        failing = io_callback(_boom, jax.ShapeDtypeStruct((3,), x.dtype), x, ordered=True) + 1
        with pytest.raises(snaprt.ExecutionError, match=r"graph lazy_graph\.[0-9a-f]{16} failed"):
            snaprt.mark_step(wait=True)
        with pytest.raises(snaprt.ExecutionError, match="lazy_graph"):
            np.asarray(failing)
        np.testing.assert_array_equal(before, [2, 2, 2])
        after = before + 1
        snaprt.mark_step()
        np.testing.assert_array_equal(after, [3, 3, 3])


def test_work_that_uses_a_failed_array_fails_with_the_same_error():
    with snaprt.lazy():
        failing = io_callback(
            _boom, jax.ShapeDtypeStruct((3,), jnp.float32), jnp.ones(3), ordered=True
        )
        with pytest.raises(snaprt.ExecutionError):
            np.asarray(failing)
        later = failing * 2
        sound = jnp.ones(3) * 2
        snaprt.mark_step()
        np.testing.assert_array_equal(sound, [2, 2, 2])
        with pytest.raises(snaprt.ExecutionError):
            np.asarray(later)


def test_an_error_at_execution_is_caught_by_programs_that_know_only_jax():
    with snaprt.lazy(), pytest.raises(jax.errors.JaxRuntimeError, match="boom"):
        np.asarray(io_callback(_boom, jax.ShapeDtypeStruct((), jnp.float32), 1.0, ordered=True))


def test_an_array_made_in_one_thread_is_read_in_another():
    with snaprt.lazy():
        x = jnp.arange(4.0) * 2

    def work():
        assert np.asarray(x).tolist() == [0, 2, 4, 6]
        with snaprt.lazy():
            assert np.asarray(x + 1).tolist() == [1, 3, 5, 7]

    in_thread(work)


def test_a_pending_array_of_one_thread_is_an_operand_in_another():
    def produce():
        with snaprt.lazy():
            return jnp.ones(3) * 5

    made = in_thread(produce)
    with snaprt.lazy():
        result = made + 1
        snaprt.mark_step()
    np.testing.assert_array_equal(result, [6, 6, 6])


def test_threads_record_on_their_own_at_the_same_time():
    def work(seed):
        with snaprt.lazy():
            x = jnp.full(4, float(seed))
            for step in range(20):
                x = x + step
                if step % 5 == 0:
                    snaprt.mark_step()
            np.testing.assert_array_equal(x, seed + 190)

    in_threads(8, work)


def test_many_threads_may_read_one_pending_array():
    with snaprt.lazy():
        x = jnp.arange(3.0) + 1
    with counting() as counts:
        assert in_threads(8, lambda _: np.asarray(x).sum()) == [6.0] * 8
    assert counts.graphs == 1


_ORDERED_ON_FOUR_DEVICES = """
    import jax
    import jax.numpy as jnp
    from jax._src import effects
    from jax.extend import core
    from jax.interpreters import mlir
    from jax.sharding import PartitionSpec as P

    import snaprt

    class Ordered(effects.Effect):
        pass

    for kinds in (
        effects.lowerable_effects, effects.ordered_effects, effects.control_flow_allowed_effects
    ):
        kinds.add_type(Ordered)
    ordered = core.Primitive("ordered")
    ordered.multiple_results = True
    ordered.def_effectful_abstract_eval(lambda: ([], {Ordered()}))

    def lower(context):
        context.set_tokens_out(context.tokens_in)
        return []

    mlir.register_lowering(ordered, lower)

    def f(x):
        ordered.bind()
        return x

    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False))
    try:
        with snaprt.lazy():
            f(jnp.arange(4.0))  # nobody wants the result
    except snaprt.CompileError as error:
        print(error)
"""


def test_an_ordered_effect_on_several_devices_is_refused_as_in_eager_jax():
    printed = run_program(_ORDERED_ON_FOUR_DEVICES, devices=4).stdout
    assert "ordered effects are not supported for more than 1 device" in printed


_SCOPE_IN_A_GENERATOR = """
import jax, jax.numpy as jnp, snaprt

def values():
    with snaprt.lazy():
        jax.debug.print("printed {}", jnp.ones(2) * 2)
        yield 1

iterator = values()
next(iterator)
"""


def test_a_scope_in_a_generator_may_be_open_when_the_program_ends():
    done = run_program(_SCOPE_IN_A_GENERATOR, fork=False)
    assert (done.stdout, done.stderr) == ("printed [2. 2.]\n", "")


_FORKED = """
import os, warnings
import jax, jax.numpy as jnp, numpy as np, snaprt

warnings.simplefilter("ignore")
snaprt.enable()
x = jnp.arange(4.0) * 2
jax.debug.print("printed {}", x[1])
child = os.fork()
if child == 0:
    os._exit(int(np.asarray(x)[3]))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_reads_what_was_pending_and_repeats_no_effect():
    assert run_program(_FORKED, fork=False, timeout=60).stdout == "printed 2.0\n6\n"


@pytest.mark.parametrize("reads", [lambda array: float(array), lambda array: float(array * 1)])
def test_callbacks_read_arrays_that_are_pending_while_their_program_runs(reads):
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    log = []
    with snaprt.lazy():
        table = jnp.arange(4.0).sum() * 2
        other = table + 1
        for number in range(2):
            io_callback(lambda v: log.append(v + reads(table)), None, table * number, ordered=True)
        io_callback(lambda v: log.append(v + reads(other)), None, table, ordered=True)
        looked_up = jax.pure_callback(lambda v: np.float32(v + reads(table)), scalar, other)
        assert float(looked_up) == 25.0
        snaprt.mark_step()
        assert float(other) == 13.0
    jax.effects_barrier()
    assert log == [12.0, 24.0, 25.0]


def test_a_callback_in_a_thread_of_xla_reads_while_the_program_waits_for_it():
    found = []

    def call_back(value):
        done = threading.Event()

        def read():  # in a thread that Python has not started
            found.append(value + float(table))
            done.set()

        _thread.start_new_thread(read, ())
        assert done.wait(60)

    with snaprt.lazy():
        table = jnp.arange(4.0).sum() * 2
        io_callback(call_back, None, jnp.ones(()) * 3, ordered=True)
        snaprt.mark_step(wait=True)
        assert float(table) == 12.0
    jax.effects_barrier()
    assert found == [15.0]


@pytest.mark.parametrize("call", [functools.partial(io_callback, ordered=True), jax.pure_callback])
def test_a_callback_that_reads_what_it_computes_is_an_error(call):
    held = {}
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    with snaprt.lazy():
        held["sum"] = call(lambda: np.float32(held["sum"]), scalar) + 1
        with pytest.raises(jax.errors.JaxRuntimeError, match="reads float32"):
            float(held["sum"])
        assert float(jnp.ones(()) * 2) == 2.0


def test_a_callback_that_reads_what_overwrites_its_own_inputs_is_an_error():
    held = {"w": jnp.ones((128, 128))}
    log = []

    def call_back(is_last):
        if is_last:
            log.append(float(held["w"][0, 0]))

    @snaprt.lazy()
    def train():
        for number in range(9):
            held["w"] = held["w"] * 0.5
            io_callback(call_back, None, jnp.int32(number) == 8, ordered=True)
            snaprt.mark_step(wait=True)
        jax.effects_barrier()

    with pytest.raises(jax.errors.JaxRuntimeError, match="takes the place"):
        train()
    assert log == []
