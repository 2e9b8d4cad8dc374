"""Inputs that nothing needs any more give their memory to results, and all others keep it."""

import json
import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counting
from programs import run_program
from threads import in_thread

import snaprt
from snaprt.compile import loaded
from snaprt.errors import GraphBreakError
from snaprt.runtime.step import thread_trace
from snaprt.trace import fallback

pytestmark = pytest.mark.usefixtures("no_persistent_cache", "little_optimization")

SIZE = 1 << 14


def _computed(value=1.0):
    """Return a lazy array with a value that an execution computed."""
    array = jnp.full(SIZE, value) + 0
    snaprt.mark_step(wait=True)
    return array


def test_a_parameter_updated_in_place_is_donated():
    with snaprt.lazy():
        x = _computed()
        before = x._value.unsafe_buffer_pointer()
        x = x * 2
        snaprt.mark_step(wait=True)
        assert x._value.unsafe_buffer_pointer() == before
    np.testing.assert_array_equal(x, np.full(SIZE, 2))


def test_an_array_that_is_still_held_is_not_donated():
    with snaprt.lazy():
        x = _computed()
        y = x * 2
        snaprt.mark_step(wait=True)
        np.testing.assert_array_equal(x, np.ones(SIZE))
        np.testing.assert_array_equal(y, np.full(SIZE, 2))


def test_an_array_of_the_users_own_is_not_donated():
    x = jnp.ones(SIZE)
    view = x.addressable_data(0)
    with snaprt.lazy():
        y = x * 2
        del x
        snaprt.mark_step(wait=True)
    np.testing.assert_array_equal(view, np.ones(SIZE))
    np.testing.assert_array_equal(y, np.full(SIZE, 2))


@pytest.mark.parametrize(
    "look",
    [
        np.asarray,
        lambda x: x.addressable_data(0),
        lambda x: x.addressable_shards[0].data,
        np.from_dlpack,
        lambda x: x._value,
        lambda x: jax.jit(lambda v: v)(x),
    ],
)
def test_an_array_of_which_there_is_a_view_is_not_donated(look):
    with snaprt.lazy():
        x = _computed(3.0)
        snaprt.disable()
        view = look(x)
        snaprt.enable()
        y = x * 2
        del x
        snaprt.mark_step(wait=True)
        snaprt.disable()
        np.testing.assert_array_equal(np.asarray(view), np.full(SIZE, 3))
        np.testing.assert_array_equal(np.asarray(y), np.full(SIZE, 6))


def test_what_another_graph_needs_is_not_donated():
    def use(array):
        with snaprt.lazy():
            return array * 3

    with snaprt.lazy():
        x = _computed()
        other = in_thread(use, x)
        y = x * 2
        del x
        snaprt.mark_step(wait=True)
    np.testing.assert_array_equal(other, np.full(SIZE, 3))
    np.testing.assert_array_equal(y, np.full(SIZE, 2))


def test_what_a_snapshot_records_is_complete(monkeypatch, tmp_path):
    monkeypatch.setenv("SNAPRT_DUMP_DIR", str(tmp_path))
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_hlo_snapshots")
    with snaprt.lazy():
        x = jnp.ones(SIZE) + 0
        for _ in range(4):
            snaprt.mark_step(wait=True)
            x = x * 2
        snaprt.mark_step(wait=True)
    np.testing.assert_array_equal(x, np.full(SIZE, 16))
    assert snaprt.metrics.counter_value("SnapshotFailed") in (None, 0)


def test_an_array_held_by_chance_costs_a_copy_and_no_compilation():
    held = []
    with snaprt.lazy():
        x = jnp.ones((2, SIZE)) + 0  # of a shape of its own: programs are kept between tests
        snaprt.mark_step()
        x = x * 2
        snaprt.mark_step()
        with counting() as counts:
            for number in range(6):
                if number == 3:
                    held.append(x)
                x = x * 2
                snaprt.mark_step()
        assert counts.compiled == 0
    assert snaprt.metrics.counter_value("DonationCopied") == 1
    np.testing.assert_array_equal(held[0], np.full((2, SIZE), 16))
    np.testing.assert_array_equal(x, np.full((2, SIZE), 128))


def test_what_a_first_step_is_given_is_copied_so_that_the_next_donate_without_compiling_anew():
    x = jnp.ones((3, SIZE))  # not ours to give away
    with snaprt.lazy(), counting() as counts:
        for _ in range(6):
            x = x * 2
            snaprt.mark_step()
    assert counts.compiled == 1
    np.testing.assert_array_equal(x, np.full((3, SIZE), 64))


def test_arrays_of_the_host_that_each_step_takes_are_donated_and_not_copied():
    before = snaprt.metrics.counter_value("DonationCopied") or 0
    batch, total = np.empty(SIZE, np.float32), 0
    with snaprt.lazy(), counting() as counts:
        x = jnp.zeros(SIZE)
        for number in range(8):
            batch[:] = number
            x = x + batch * 1  # another array each time, as of a data loader
            x = jnp.tanh(batch) * 0 + x
            batch[:] = -1  # what was sent is a copy
            snaprt.mark_step()
            total += number
    assert counts.compiled <= 2  # of the first step, and of those that follow
    assert (snaprt.metrics.counter_value("DonationCopied") or 0) - before == 0
    np.testing.assert_array_equal(x, np.full(SIZE, total))


@pytest.mark.parametrize(
    ("rows", "worth", "compiled"), [(5, 1 << 40, 1), (6, 0, 2)], ids=["small", "large"]
)
def test_inputs_that_become_free_later_are_worth_a_compilation_where_they_are_large(
    monkeypatch, rows, worth, compiled
):
    monkeypatch.setattr(loaded, "WORTH_COMPILING_BYTES", worth)
    x = held = jnp.ones((rows, SIZE))
    with snaprt.lazy(), counting() as counts:
        for _ in range(6):
            x = x * 2
            snaprt.mark_step()
    assert counts.compiled == compiled
    np.testing.assert_array_equal(x, np.full((rows, SIZE), 64))
    np.testing.assert_array_equal(held, np.ones((rows, SIZE)))


def test_a_read_donates_nothing_that_pending_work_needs():
    with snaprt.lazy():
        x = _computed()
        total, y = (x * 2).sum(), x * 3
        del x
        assert float(total) == 2 * SIZE
        snaprt.mark_step()
    np.testing.assert_array_equal(y, np.full(SIZE, 3))


PROGRAM = """
import json, jax.numpy as jnp, snaprt
with snaprt.lazy():
    x = jnp.ones(1 << 14) + 0
    snaprt.mark_step(wait=True)
    places = set()
    for _ in range(4):
        x = x * 2
        snaprt.mark_step(wait=True)
        places.add(x._value.unsafe_buffer_pointer())
print(json.dumps([len(places), float(x[0]), snaprt.metrics.counter_value("UncachedCompile") or 0]))
"""


def test_an_executable_from_the_cache_donates_as_well(tmp_path, monkeypatch):
    monkeypatch.setenv("SNAPRT_CACHE", "1")
    monkeypatch.setenv("SNAPRT_CACHE_DIR", str(tmp_path / "cache"))
    found = [json.loads(run_program(PROGRAM).stdout) for _ in range(2)]
    assert found[0][:2] == found[1][:2] == [1, 16.0]
    assert found[0][2] > 0
    assert found[1][2] == 0


HELD_BY_CHANCE = """
import json, sys, jax.numpy as jnp, snaprt
from snaprt.compile import loaded

holds, loaded.WORTH_COMPILING_BYTES = sys.argv[1] == "holds", int(sys.argv[2])
with snaprt.lazy():
    x, y = jnp.ones(1 << 14) + 0, jnp.ones(1 << 14) + 1
    snaprt.mark_step(wait=True)
    held = y if holds else None
    x, y = x * 2, y * 3
    snaprt.mark_step(wait=True)
    values = [float(x.sum()), float(y.sum()), float((y if held is None else held).max())]
print(json.dumps([values, snaprt.metrics.counter_value("UncachedCompile") or 0]))
"""


@pytest.mark.parametrize(
    ("order", "worth"),
    [
        (("holds", "lets go"), 1 << 20),
        (("lets go", "holds"), 1 << 20),
        (("lets go", "holds"), 0),
    ],
    ids=["free later", "held later", "large"],
)
def test_what_is_held_by_chance_at_the_second_start_alone_costs_no_compilation(
    tmp_path, monkeypatch, order, worth
):
    monkeypatch.setenv("SNAPRT_CACHE", "1")
    monkeypatch.setenv("SNAPRT_CACHE_DIR", str(tmp_path / "cache"))
    found = {name: json.loads(run_program(HELD_BY_CHANCE, name, worth).stdout) for name in order}
    total = float(1 << 14)
    assert found["holds"][0] == [2 * total, 6 * total, 2.0]
    assert found["lets go"][0] == [2 * total, 6 * total, 6.0]
    assert found[order[0]][1] > 1
    assert found[order[1]][1] == (0 if worth else 1)


LETS_GO = """
import gc
import jax, numpy as np, snaprt

def step():
    data = jax.device_put(np.ones(1 << 20, np.float32))
    return float(jax.jit(lambda: data[0])())

with snaprt.lazy():
    for _ in range(12):
        step()
        snaprt.mark_step()
gc.collect()
print(sum(array.nbytes for array in jax.live_arrays()))
"""


def test_what_functions_that_are_gone_closed_over_is_let_go_of():
    # In a process of its own, as live arrays are those of the whole process.
    assert int(run_program(LETS_GO).stdout) <= 24 << 20  # not 48


def _doubled(x):
    return x * 2


_compiled_ahead = jax.jit(_doubled, donate_argnums=0).lower(jnp.ones(SIZE)).compile()


def _call_compiled(x):
    for _ in range(3):  # from the second call on in C++
        x = _compiled_ahead(x)


def _delete_in_another_thread(x):
    thread = threading.Thread(target=x.delete)
    thread.start()
    thread.join()


def _call_while_eager(x):
    trace = thread_trace()
    trace.fallback._places["place"] = fallback._Place(seconds=1e6)
    trace.fall_back("place")
    try:
        jax.jit(_doubled, donate_argnums=0)(x)
    finally:
        trace.resume()


@partial(jax.jit, donate_argnums=0)
def _left(x):
    return x * 2, x.sum()


def _call_left_to_jax(x):
    y = x + 0
    while not thread_trace().lone_calls.left:
        y, total = _left(y)
        float(total)
    assert type(_left(x)[1]) is type(x)


#: How a program lets go of the memory of an array, which JAX cannot use from then on.
WAYS = {
    "deleted": lambda x: x.delete(),
    "deleted elsewhere": _delete_in_another_thread,
    "compiled ahead": _call_compiled,
    "with options": jax.jit(
        _doubled, donate_argnums=0, compiler_options={"xla_cpu_enable_fast_math": False}
    ),
    "put": lambda x: jax.device_put(x, jax.devices()[0], donate=True),
    "while eager": _call_while_eager,
    "left to JAX": _call_left_to_jax,
}


@pytest.mark.parametrize("way", WAYS)
def test_what_takes_an_array_runs_before_its_memory_goes(way, monkeypatch):
    monkeypatch.setattr("snaprt.trace.lone_calls._CALLS", 10)
    monkeypatch.setattr("snaprt.trace.lone_calls._CALLS_AN_EQUATION", 0)
    data = np.linspace(0.0, 1.0, SIZE, dtype=np.float32)

    def run():
        with snaprt.lazy():
            x = jax.device_put(data)
            y = jnp.sin(x)
            total = y.sum()
            WAYS[way](x)
            np.testing.assert_allclose(y, np.sin(data), rtol=1e-6)
            np.testing.assert_allclose(total, np.sin(data).sum(), rtol=1e-5)
            return x

    assert in_thread(run).is_deleted() or way == "put"  # a CPU may keep it


def test_an_array_with_a_computed_value_is_deleted_after_what_takes_it():
    with snaprt.lazy():
        x = _computed(0.5)
        y = x * 2
        x.delete()
        np.testing.assert_array_equal(y, np.ones(SIZE))
        with pytest.raises(RuntimeError, match="deleted"):
            x + 1


def test_nothing_runs_where_nothing_takes_what_is_deleted():
    with snaprt.lazy():
        x, other = jax.device_put([np.ones(SIZE), np.ones(SIZE)])
        y = x * 2
        other.delete()
        assert y._value is None


def test_deleting_what_pending_operations_take_breaks_a_graph():
    with snaprt.lazy(fullgraph=True):
        x = jax.device_put(np.ones(SIZE, np.float32))
        y = x * 2
        with pytest.raises(GraphBreakError, match="donating or deleting"):
            x.delete()
        snaprt.mark_step()
    np.testing.assert_array_equal(y, np.full(SIZE, 2))
