"""Threads that record, step, read and hand arrays to each other compute what each would alone."""

import queue
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from threads import in_threads

import snaprt

SHAPE = (64, 64)  # large enough for its memory to be given away


@jax.jit
def _mixed(mine, other):
    return mine * 2 - other


SIZES = [
    pytest.param(4, 12, id="small"),
    pytest.param(16, 5000, id="full", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("threads", "rounds"), SIZES)
def test_arrays_go_round_while_every_thread_updates_its_own_in_place(threads, rounds):
    handed = [queue.Queue() for _ in range(threads)]
    wrong = []

    def check(value, expected):
        if not np.array_equal(value, np.full(SHAPE, expected)):
            wrong.append((expected, np.asarray(value)))

    def work(index):
        expected = float(index)
        with snaprt.lazy():
            mine = jnp.full(SHAPE, expected)
            for number in range(rounds):
                mine, expected = mine + 1.0, expected + 1
                if (index + number) % 2:  # handed over pending, or with its value
                    snaprt.mark_step()
                handed[(index + 1) % threads].put((mine, expected))
                other, other_expected = handed[index].get(timeout=60)
                if number % 3 == 0:
                    check(other, other_expected)  # a read of what another thread records
                mine, expected = _mixed(mine, other), expected * 2 - other_expected
                mine, expected = mine % 1024.0, expected % 1024
                snaprt.add_step_closure(check, (mine, expected), run_async=bool(number % 2))
                if number % 4:
                    snaprt.mark_step(wait=number % 5 == 0)
                if number % 7 == 0:
                    check(other, other_expected)  # nobody may have taken its memory
            snaprt.mark_step()
            check(mine, expected)

    in_threads(threads, work)
    _finish_the_background()
    assert wrong == []


@pytest.mark.parametrize(("threads", "rounds"), SIZES)
def test_threads_that_begin_with_one_array_leave_it_alone(threads, rounds):
    with snaprt.lazy():
        shared = jnp.arange(4096.0).reshape(SHAPE) + 1
        snaprt.mark_step()
        pending = shared * 2
        results = {}

        def work(index):
            with snaprt.lazy():
                value = shared
                for number in range(rounds):
                    value = value + index
                    value = jnp.where(pending > 0, value, 0)
                    if number % 3 == 0:
                        snaprt.mark_step()
                results[index] = np.asarray(value)

        in_threads(threads, work)
        expected = np.arange(4096.0).reshape(SHAPE) + 1
        for index in range(threads):
            np.testing.assert_array_equal(results[index], expected + index * rounds)
        np.testing.assert_array_equal(shared, expected)
        np.testing.assert_array_equal(pending, expected * 2)


def test_threads_draw_keys_that_all_differ():
    snaprt.manual_seed(0)
    drawn = []

    def work(index):
        with snaprt.lazy():
            keys = [jax.random.key_data(snaprt.next_key()) for _ in range(4)]
            snaprt.mark_step()
        drawn.extend(tuple(np.asarray(key).tolist()) for key in keys)

    in_threads(4, work)
    assert len(set(drawn)) == 16


def test_threads_that_run_one_program_first_at_once_agree():
    results = []

    def work(index):
        with snaprt.lazy():
            value = jnp.tanh(jnp.linspace(0.0, 1.0, 77) * 3).sum()
            snaprt.mark_step()
        results.append(float(value))

    in_threads(8, work)
    assert len(set(results)) == 1


def test_other_threads_call_a_jitted_function_that_closes_over_a_lazy_array_again_and_again():
    with snaprt.lazy():
        weights = jnp.arange(6.0).reshape(2, 3)
        jitted = jax.jit(lambda x: (x @ weights).sum())
        found = in_threads(2, lambda _: [float(jitted(np.full(2, i, "f"))) for i in range(3)])
        assert found == [[0, 15, 30]] * 2
    assert [float(jitted(np.full(2, i, "f"))) for i in range(3)] == [0, 15, 30]


def _finish_the_background():
    done = threading.Event()
    snaprt.add_step_closure(done.set, run_async=True)
    snaprt.mark_step()
    assert done.wait(120)
