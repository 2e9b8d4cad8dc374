"""What waits for the end of a step runs then, in order, with arrays of that step."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counting
from jax.experimental import io_callback
from programs import run_program
from threads import in_thread

import snaprt

pytestmark = pytest.mark.usefixtures("no_persistent_cache")


def test_closures_run_in_order_at_the_end_of_the_step_and_cut_nothing():
    seen = []
    with snaprt.lazy(), counting() as counts:
        x = jnp.arange(3.0) * 2
        snaprt.add_step_closure(lambda a: seen.append(("first", float(a.sum_))), (_Summed(x),))
        snaprt.add_step_closure(lambda tree: seen.append(np.asarray(tree["x"])), ({"x": x + 1},))
        assert seen == []
        snaprt.mark_step()
    assert seen[0] == ("first", 6.0)
    np.testing.assert_array_equal(seen[1], [1, 3, 5])
    assert counts.graphs == 1
    assert counts.reads == {}


class _Summed:
    """An object that is no pytree, with an array of the step."""

    def __init__(self, array):
        self.sum_ = array.sum()


def test_a_closure_runs_once_and_what_it_adds_belongs_to_the_next_step():
    seen = []

    def again(number):
        seen.append(number)
        if number < 3:
            snaprt.add_step_closure(again, (number + 1,))

    snaprt.add_step_closure(again, (1,))
    snaprt.sync()
    assert seen == [1]
    snaprt.sync()
    snaprt.sync()
    snaprt.sync()
    assert seen == [1, 2, 3]


def test_an_error_of_a_closure_leaves_the_step_after_all_have_run(caplog):
    seen = []
    snaprt.add_step_closure(lambda: 1 / 0)
    snaprt.add_step_closure(seen.append, ("after",))
    snaprt.add_step_closure(lambda: [][1])
    with pytest.raises(ZeroDivisionError):
        snaprt.mark_step()
    assert seen == ["after"]
    assert "IndexError" in caplog.text
    snaprt.mark_step()


def test_closures_in_the_background_run_in_order_while_the_program_goes_on():
    may_go_on = threading.Event()
    seen = []

    def slow(value):
        assert may_go_on.wait(60)
        seen.append((threading.current_thread() is threading.main_thread(), float(value)))

    with snaprt.lazy():
        value = jnp.ones(())
        for _ in range(3):
            value = value * 2
            snaprt.add_step_closure(slow, (value,), run_async=True)
            snaprt.mark_step()
        assert seen == []
        may_go_on.set()
        _wait_for_the_background()
    assert seen == [(False, 2.0), (False, 4.0), (False, 8.0)]


def test_an_error_in_the_background_leaves_a_later_step():
    snaprt.add_step_closure(lambda: 1 / 0, run_async=True)
    snaprt.mark_step()
    with pytest.raises(ZeroDivisionError):
        _wait_for_the_background()
    snaprt.mark_step()


def test_a_step_waits_where_too_many_closures_wait_in_the_background(monkeypatch):
    monkeypatch.setenv("XLA_MAX_ASYNC_QUEUE", "2")
    running = []
    most = []

    def note(number):
        most.append(len(running) - number)

    for number in range(6):
        running.append(number)
        snaprt.add_step_closure(note, (number,), run_async=True)
        snaprt.mark_step()
    _wait_for_the_background()
    assert max(most) <= 3


def test_the_closures_of_a_step_that_fails_wait_but_for_those_without_their_arrays():
    seen = []

    def boom(value):
        raise RuntimeError("the device said no")

    with snaprt.lazy():
        shape = jax.ShapeDtypeStruct((3,), jnp.float32)
        failing = io_callback(boom, shape, jnp.ones(3), ordered=True) + 1
        snaprt.add_step_closure(seen.append, ([failing],))
        snaprt.add_step_closure(seen.append, ("other",))
        with pytest.raises(snaprt.ExecutionError):
            snaprt.mark_step()
        assert seen == []
        snaprt.mark_step()
    assert seen == ["other"]


def test_each_thread_has_its_own_closures_and_may_get_an_array_of_another():
    seen = []
    with snaprt.lazy():
        pending = jnp.ones(3) * 7
        snaprt.add_step_closure(seen.append, ("mine",))

        def work():
            snaprt.add_step_closure(lambda a: seen.append(float(a[0])), (pending,))
            snaprt.mark_step()

        in_thread(work)
        assert seen == [7.0]
        snaprt.mark_step()
    assert seen == [7.0, "mine"]


def test_a_program_that_ends_finishes_the_background_and_tells_of_what_never_ran():
    program = """
import time, jax.numpy as jnp, snaprt
snaprt.enable()
x = jnp.ones(3) * 2
snaprt.add_step_closure(lambda a: (time.sleep(0.2), print("late", float(a.sum()))), (x,), True)
snaprt.add_step_closure(lambda: 1 / 0, (), True)
snaprt.mark_step()
snaprt.add_step_closure(print, ("never",))
"""
    ended = run_program(program)
    assert ended.stdout == "late 6.0\n"
    assert "step closures that never ran because no mark_step followed: 1" in ended.stderr
    assert "ZeroDivisionError" in ended.stderr


def _wait_for_the_background():
    done = threading.Event()
    snaprt.add_step_closure(done.set, run_async=True)
    snaprt.mark_step()
    assert done.wait(60)
    snaprt.mark_step()
