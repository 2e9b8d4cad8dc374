"""Calls of jitted functions of which nothing is wanted: C++ makes them, and they still count."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from threads import in_thread

import snaprt
from snaprt import jaxapi, metrics
from snaprt.snapshot.format.read import open_snapshot
from snaprt.snapshot.recorder.record import process_recorder

ARMED = "SNAPRT_RECORD"


def recorded(folder: Path) -> list[tuple[str, int, float]]:
    """Return the name, the number and the first input of each execution that was recorded."""
    assert process_recorder().flush(30)
    snapshots = map(open_snapshot, folder.glob("*.inputs.snap"))
    return sorted(
        (
            snapshot.manifest.execution.name,
            snapshot.manifest.execution.execution_count,
            float(np.asarray(snapshot.array(snapshot.manifest.arrays[0].name)).ravel()[0]),
        )
        for snapshot in snapshots
    )


def numbers(folder: Path) -> list[int]:
    return [number for _, number, _ in recorded(folder)]


def new_step(name: str = "step", **options: Any) -> Callable[..., Any]:
    def step(x: jax.Array) -> jax.Array:
        return x + 1

    step.__name__ = name
    return jax.jit(step, **options)


def calls_of_jax(call: Callable[[], Any]) -> int:
    """Return how often C++ asks Python to make a call."""
    asked = 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal asked
        asked += event == "call" and frame.f_code.co_name == "cache_miss"

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return asked


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ("execution=5|12|30-", [5, 12, *range(30, 40)]),
        ("every=7", [0, 7, 14, 21, 28, 35]),
        ("every=10, first=3", [0, 10, 20]),
        ("first=2", [0, 1]),
        ("execution=8-, every=5", [8, 13, 18, 23, 28, 33, 38]),
        ("every=9; execution=10", [0, 9, 10, 18, 27, 36]),
        ("name=other", []),
        ("step=3-4", [*range(12, 20)]),
        ("step=4-, every=10", [16, 26, 36]),
    ],
)
def test_executions_are_counted_that_nobody_sees(
    tmp_path: Path, when: str, expected: list[int]
) -> None:
    def run() -> None:
        step, x = new_step(), jnp.zeros(3)
        with snaprt.record(when, tmp_path):
            for number in range(40):
                x = step(x)
                if number % 4 == 3:
                    snaprt.mark_step()

    in_thread(run)
    assert [(number, value) for _, number, value in recorded(tmp_path)] == [
        (number, float(number)) for number in expected
    ]


def test_cpp_makes_the_calls_between(tmp_path: Path) -> None:
    step, x = new_step(), jnp.zeros(3)

    def run() -> None:
        for _ in range(100):
            step(x)

    with snaprt.record("every=50", tmp_path):
        run()
        assert calls_of_jax(run) <= 6
    assert numbers(tmp_path) == [0, 50, 100, 150]
    for when in ("error", "name=^step$"):
        with snaprt.record(when, tmp_path / "name"):
            run()
            assert calls_of_jax(run) <= 6
    assert numbers(tmp_path / "name") == list(range(400, 600))


def test_each_call_is_recorded_with_its_settings_step_and_outputs(tmp_path: Path) -> None:
    step, x = new_step(), jnp.zeros(3)

    def run() -> None:
        with snaprt.record("name=^step$", tmp_path):
            for number in range(12):
                with jax.default_matmul_precision("highest" if number % 4 == 3 else "default"):
                    step(x + number)
                if number % 2:
                    snaprt.mark_step()

    in_thread(run)
    assert process_recorder().flush(30)
    for role in ("inputs", "outputs"):
        seen = []
        for snapshot in map(open_snapshot, tmp_path.glob(f"*.{role}.snap")):
            execution = snapshot.manifest.execution
            precision = execution.jax_config["jax_default_matmul_precision"]
            (array,) = snapshot.manifest.arrays
            number = int(snapshot.array(array.name)[0]) - (role == "outputs")
            seen.append((number, execution.step, precision))
        assert sorted(seen) == [
            (number, number // 2, "highest" if number % 4 == 3 else "default")
            for number in range(12)
        ]


def fails(_: Any) -> Any:
    raise ValueError


@pytest.mark.parametrize(
    ("function", "may_fail"),
    [
        (lambda x: x + 1, False),
        (lambda x: {"x": jax.random.key(0), "y": [x, x.sum()]}, False),
        (lambda x: jax.random.key(0), False),
        (lambda x: (jax.debug.callback(lambda: None), x + 1)[1], True),
        (lambda x: jax.pure_callback(np.sin, x, x), True),
        (lambda x: jnp.linalg.cholesky(jnp.eye(3) + x), True),
        (lambda x: jnp.zeros(1 << 26).at[0].add(x[0]), True),  # it needs much memory
    ],
)
def test_cpp_makes_the_calls_that_cannot_fail(
    tmp_path: Path, function: Callable[..., Any], may_fail: bool
) -> None:
    function, x = jax.jit(function), jnp.zeros(3)

    def run() -> None:
        for _ in range(5):
            function(x)

    with snaprt.record("error", tmp_path):
        run()
        assert (calls_of_jax(run) >= 5) == may_fail


def test_an_error_finds_the_last_call_as_it_was_made(tmp_path: Path) -> None:
    @functools.partial(jax.jit, static_argnames=("power", "mode"))
    def step(tree: Any, unused: Any, power: int, *, key: Any, scale: float, mode: str) -> Any:
        assert mode == "sum"
        return {"result": tree["w"] ** power + scale + jax.random.uniform(key), "b": [tree["b"]]}

    tree: dict[str, Any] = {"b": np.zeros(2, np.float32)}

    def run() -> None:
        for number in range(20):
            tree["w"] = jnp.full(2, float(number))
            tree["b"][:] = number
            key, scale = jax.random.key(number), float(number)
            step(tree, jnp.ones(3), 3, key=key, scale=scale, mode="sum")
            if number % 2:
                snaprt.mark_step()
        tree["w"].delete()
        tree["w"], tree["b"][:] = None, -1
        raise ValueError

    def run_in_scope() -> None:
        with contextlib.suppress(ValueError), snaprt.record("error", tmp_path):
            run()

    in_thread(run_in_scope)
    assert process_recorder().flush(30)
    (path,) = tmp_path.glob("*.inputs.snap")
    snapshot = open_snapshot(path)
    execution = snapshot.manifest.execution
    assert (execution.name, execution.execution_count, execution.step) == ("step", 19, 9)
    arrays = {
        array.name: np.asarray(snapshot.array(array.name)).tolist()
        for array in snapshot.manifest.arrays
    }
    assert arrays == {
        "tree['b']": [19.0, 19.0],
        "tree['w']": [19.0, 19.0],
        "key": [0, 19],
        "scale": 19.0,
    }


def test_what_fails_while_its_call_has_returned_is_recorded(tmp_path: Path) -> None:
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 40, lambda _, x: jnp.sin(x @ x), x)[0])
    failing = jax.jit(lambda x: jax.pure_callback(fails, x, x))
    step, x = new_step(), slow(jnp.zeros((400, 400)))
    before = metrics.counter_value("SnapshotFailures")
    with contextlib.suppress(Exception), snaprt.record("name=step, error", tmp_path):
        for _ in range(5):
            step(x)
        step(failing(slow(jnp.zeros((400, 400)))))
        for _ in range(5):
            step(x)
    assert process_recorder().flush(30)
    assert metrics.counter_value("SnapshotFailures") == (before or 0) + 1


def test_a_change_of_the_environment_counts_from_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, x = new_step(), jnp.zeros(3)
    monkeypatch.setenv("SNAPRT_DUMP_DIR", str(tmp_path))
    monkeypatch.setenv(ARMED, "execution=1000")
    with snaprt.record():
        for _ in range(5):
            x = step(x)
        monkeypatch.setenv(ARMED, "all")
        x = step(x)
        monkeypatch.setenv(ARMED, "execution=8")
        for _ in range(10):
            x = step(x)
        monkeypatch.delenv(ARMED)
        monkeypatch.delenv("SNAPRT_DUMP_DIR")
        for _ in range(10):
            x = step(x)
    assert numbers(tmp_path) == [5, 8]


def test_a_change_in_another_thread_counts_from_the_next_call_but_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, x = new_step(), jnp.zeros(3)
    monkeypatch.setenv("SNAPRT_DUMP_DIR", str(tmp_path))
    monkeypatch.setenv(ARMED, "execution=1000")
    with snaprt.record():
        for _ in range(5):
            x = step(x)
        in_thread(monkeypatch.setenv, ARMED, "all")
        for _ in range(3):
            x = step(x)
    assert numbers(tmp_path) == [6, 7]


def test_a_scope_inside_records_all_and_the_one_around_goes_on_counting(tmp_path: Path) -> None:
    step, x = new_step(), jnp.zeros(3)
    with snaprt.record("execution=20", tmp_path / "outer"):
        for number in range(24):
            if number in (7, 8, 15):
                with snaprt.record("all", tmp_path / "inner"):
                    x = step(x)
            else:
                x = step(x)
    assert numbers(tmp_path / "inner") == [7, 8, 15]
    assert numbers(tmp_path / "outer") == [20]


def test_another_kind_of_call_is_seen_while_the_first_rests(tmp_path: Path) -> None:
    step, small, large = new_step(), jnp.zeros(3), jnp.zeros(5)
    with snaprt.record("execution=10", tmp_path):
        for number in range(30):
            small = step(small)
            if number % 2:
                large = step(large)
    assert recorded(tmp_path) == [("step", 10, 10.0)] * 2


def test_two_threads_that_call_one_function_count_together(tmp_path: Path) -> None:
    step = new_step()

    def run(times: int) -> None:
        with snaprt.record("execution=1000", tmp_path):
            for _ in range(times):
                step(jnp.zeros(3))

    run(10)
    in_thread(run, 10)
    run(10)
    with snaprt.record("execution=30-", tmp_path):
        step(jnp.zeros(3))
    assert numbers(tmp_path) == [30]


def test_what_is_held_is_not_donated_by_a_call_that_nobody_sees(tmp_path: Path) -> None:
    donating, keeping = new_step("donating", donate_argnums=0), new_step("keeping")
    x = jnp.zeros(1 << 20)
    with snaprt.record("name=keeping, execution=10-", tmp_path):
        for _ in range(20):
            x = donating(x)
            keeping(x)  # held while the next call donates it
    assert recorded(tmp_path) == [("keeping", n, n + 1.0) for n in range(10, 20)]


def test_what_another_thread_holds_is_not_donated_either(tmp_path: Path) -> None:
    donating, keeping = new_step("donating", donate_argnums=0), new_step("keeping")
    turns: list[Any] = [threading.Semaphore(0), threading.Semaphore(0)]
    handed: list[Any] = []

    def keep() -> None:
        with snaprt.record("name=keeping", tmp_path):
            for _ in range(10):
                turns[0].acquire()
                keeping(handed[-1])
                turns[1].release()

    other = threading.Thread(target=keep)
    other.start()
    x = jnp.zeros(1 << 20)
    with snaprt.record("name=nobody", tmp_path):
        for _ in range(10):
            x = donating(x)
            handed.append(x)
            turns[0].release()
            turns[1].acquire()
    other.join()
    assert recorded(tmp_path) == [("keeping", n, n + 1.0) for n in range(10)]


def look_in_a_scope() -> Any:
    return jax.debug_nans(True)


@contextlib.contextmanager
def look_everywhere() -> Iterator[None]:
    jax.config.update("jax_debug_nans", True)
    try:
        yield
    finally:
        jax.config.update("jax_debug_nans", False)


@pytest.mark.parametrize("look", [look_in_a_scope, look_everywhere])
def test_jax_still_looks_for_nan_after_each_call(tmp_path: Path, look: Callable[[], Any]) -> None:
    raised = []

    def run() -> None:  # in a thread: JAX does not look everywhere after a scope has ended
        log = jax.jit(lambda x: jnp.log(x))
        with snaprt.record("execution=5-", tmp_path):
            for _ in range(3):
                log(np.ones(3))
            with look():
                try:
                    log(-np.ones(3))
                except FloatingPointError:
                    raised.append(True)
            for _ in range(4):
                log(-np.ones(3))

    in_thread(run)
    assert raised == [True]
    assert numbers(tmp_path) == [5, 6, 7]


@pytest.fixture
def closely(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Choose whether a thread is ever relaxed."""
    relax = jaxapi.relax_watch

    def choose(is_close: bool) -> None:
        monkeypatch.setattr(jaxapi, "relax_watch", (lambda _: False) if is_close else relax)

    return choose


CONDITIONS = (
    *("every=3", "execution=4|9", "name=^a, first=3", "name=^[bc]$, every=5", "all"),
    "name=^[ac]$",
    *("name=nobody", "step=2-3", "step=2-, every=4", "recheck, every=6", "nan; every=7"),
    *("error", "name=^[ac]$, error", "name=^b$; error", "error, first=1"),
    "error; step=3-, every=2",
)


def run_program(seed: int, folder: Path) -> list[float]:
    """Run calls, scopes and steps that a number chooses, of functions of its own."""
    chosen = random.Random(seed)
    functions = {
        "a": new_step("a"),
        "b": new_step("b", donate_argnums=0),
        "c": new_step("c"),
    }
    values = {name: jnp.zeros(3) for name in functions}

    def some(depth: int) -> None:
        for _ in range(chosen.randrange(5, 60)):
            kind = chosen.random()
            name = chosen.choice("aaabbc")
            if kind < 0.86:
                values[name] = functions[name](values[name])
            elif kind < 0.89:
                functions[name](jnp.zeros(chosen.randrange(1, 4)))
            elif kind < 0.91:
                jax.vmap(functions["a"])(values["a"])
            elif kind < 0.93:
                functions["c"](values["b"])
            elif kind < 0.95:
                snaprt.mark_step()
            elif kind < 0.96:
                snaprt.dump_now()
            elif depth < 3:
                when = chosen.choice(CONDITIONS)
                with contextlib.suppress(ValueError), snaprt.record(when, folder / str(depth)):
                    some(depth + 1)
                    if chosen.random() < 0.5:
                        raise ValueError

    with snaprt.record(chosen.choice(CONDITIONS), folder):
        for _ in range(4):
            some(1)
        snaprt.dump_now()
    return [float(value[0]) for value in values.values()]


@pytest.mark.parametrize("keep_last", [0, 3])
@pytest.mark.parametrize("seed", range(8))
def test_the_same_is_recorded_whoever_makes_the_calls(
    tmp_path: Path,
    closely: Callable[[bool], None],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    keep_last: int,
) -> None:
    monkeypatch.setenv("SNAPRT_RECORD_KEEP_LAST", str(keep_last))
    seen = []
    for is_close in (True, False):
        closely(is_close)
        folder = tmp_path / str(is_close)

        results: list[float] = []
        in_thread(lambda folder=folder, results=results: results.extend(run_program(seed, folder)))
        seen.append((results, *(recorded(folder / name) for name in (".", "1", "2", "3"))))
    assert seen[0] == seen[1]
