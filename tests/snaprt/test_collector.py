"""Python's garbage collector, held back while objects are made that stay."""

import gc

import jax.numpy as jnp
import pytest

from snaprt import lazy, mark_step
from snaprt.host.collector import collecting_seldom


@pytest.fixture(autouse=True)
def _thresholds():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_collections_are_fewer_meanwhile_and_as_before_afterwards():
    collections = []
    gc.callbacks.append(lambda phase, _: collections.append(phase))
    try:
        with collecting_seldom():
            kept = [[] for _ in range(20_000)]
            assert collections == []
    finally:
        gc.callbacks.pop()
    assert len(kept) == 20_000
    assert gc.get_threshold() == (700, 10, 10)


def test_an_error_and_a_nested_use_restore_them_too():
    with pytest.raises(ValueError, match="no"), collecting_seldom(), collecting_seldom():
        raise ValueError("no")
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("chosen", [(0, 10, 10), (100_000, 5, 5)])
def test_a_program_that_collects_less_often_is_left_alone(chosen):
    gc.set_threshold(*chosen)
    with collecting_seldom():
        assert gc.get_threshold() == chosen
    assert gc.get_threshold() == chosen


def test_what_the_program_chooses_meanwhile_stays():
    with collecting_seldom():
        gc.set_threshold(1000, 20, 20)
    assert gc.get_threshold() == (1000, 20, 20)


def test_garbage_in_cycles_is_still_freed():
    collections = []
    gc.callbacks.append(lambda phase, info: collections.append((phase, info)))
    try:
        with collecting_seldom():
            for _ in range(100_000):
                cycle = []
                cycle.append(cycle)
    finally:
        gc.callbacks.pop()
    assert sum(info["collected"] for phase, info in collections if phase == "stop") > 10_000


def test_collections_are_fewer_while_a_lazy_path_is_new():
    thresholds = []
    with lazy():
        for _ in range(2):
            y = jnp.expm1(jnp.ones(3)) * 41.5
            thresholds.append(gc.get_threshold()[0])
            mark_step()
            thresholds.append(gc.get_threshold()[0])
            del y
    assert thresholds == [50_000, 700, 700, 700]


def test_a_new_path_that_nothing_reads_ends_with_its_scope():
    with lazy():
        jnp.log1p(jnp.ones(5)) * 43.5
        assert gc.get_threshold()[0] == 50_000
    assert gc.get_threshold()[0] == 700
