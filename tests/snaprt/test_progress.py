"""Which executions are under way is known without holding what the program lets go of."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback

from snaprt.snapshot.recorder.progress import LAST, Progress


@dataclass(frozen=True)
class Program:
    number: int = 0
    name: str = "train_step"
    graph_id: str = "0" * 16
    devices: tuple[Any, ...] = ()
    input_names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()
    donated: tuple[int, ...] = ()

    def artifacts(self) -> Any:
        raise AssertionError("nothing is recorded")


def ran(progress: Progress, results: Any, program: Program | None = None) -> Any:
    running = progress.begin(program or Program(), 0)
    progress.dispatched(running, results)
    return running


def test_an_execution_is_under_way_until_its_output_is_there():
    release = threading.Event()

    def wait(x: Any) -> None:
        release.wait()

    @jax.jit
    def step(x: Any) -> Any:
        io_callback(wait, None, x, ordered=False)
        return x + 1, {"loss": jnp.sum(x)}

    progress = Progress()
    before = progress.progressed
    thread_results: list[Any] = []
    running = progress.begin(Program(), 0)
    thread = threading.Thread(target=lambda: thread_results.append(step(jnp.ones(3))))
    thread.start()
    assert progress.oldest() is running
    assert progress.progressed == before
    release.set()
    thread.join()
    progress.dispatched(running, thread_results[0])
    jax.block_until_ready(thread_results)
    assert progress.oldest() is None
    assert progress.progressed > before


def test_executions_are_counted_by_program_and_the_last_are_remembered():
    progress = Progress()
    for number in range(40):
        ran(progress, jnp.ones(number + 1), Program(number % 2))
    jax.effects_barrier()
    assert len(progress.last) == LAST
    assert [running.execution for running in list(progress.last)[-2:]] == [19, 19]


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_what_the_program_lets_go_of_is_let_go(size: int):
    progress = Progress()
    array = jax.block_until_ready(jnp.ones(size))
    ran(progress, (array,))
    alive = weakref.ref(array)
    del array
    if size == 1:  # a small one is held until somebody looks
        assert progress.oldest() is None
    gc.collect()
    assert alive() is None
    assert progress.oldest() is None


def test_an_output_that_is_donated_or_deleted_ends_the_execution():
    progress = Progress()
    donating = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = jnp.ones(8)
    for _ in range(100):
        running = progress.begin(Program(), 0)
        state = donating(state)
        progress.dispatched(running, state)
    state.block_until_ready()
    assert progress.oldest() is None
    ran(progress, state)
    state.delete()
    assert progress.oldest() is None


def test_an_array_may_be_deleted_while_another_thread_asks_whether_it_is_there():
    progress = Progress()
    arrays = [jnp.ones(2) + number for number in range(2000)]
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            progress.oldest()

    thread = threading.Thread(target=look)
    thread.start()
    for array in arrays:
        ran(progress, array)
        array.delete()
    stop.set()
    thread.join()
    assert progress.oldest() is None


def test_the_smallest_output_is_asked_whatever_holds_it():
    @jax.tree_util.register_pytree_node_class
    class Box:  # its parts have numbers for names
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def tree_flatten(self) -> Any:
            return (self.inner,), None

        @classmethod
        def tree_unflatten(cls, _: Any, children: Any) -> Any:
            return cls(*children)

    progress = Progress()
    for results in (Box((jnp.ones(1 << 20), jnp.ones(2))), [jnp.ones(2)], jnp.ones(3), (), 7):
        program = Program(number=id(results))
        for _ in range(2):
            jax.block_until_ready(results)
            ran(progress, results, program)
            assert progress.oldest() is None


def test_an_execution_that_fails_is_over():
    progress = Progress()
    running = progress.begin(Program(), 0)
    progress.failed(running)
    assert progress.oldest() is None
    assert running.phase == "failed"
