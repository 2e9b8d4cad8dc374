"""Plain jitted functions in `snaprt.record`: results as without it, and a file for each call."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, io_callback
from jax.sharding import NamedSharding, PartitionSpec
from pairs import Pair
from threads import in_threads

import snaprt
from snaprt import jaxapi, metrics
from snaprt.errors import UsageError
from snaprt.runtime.step import thread_trace
from snaprt.snapshot.format.read import SnapshotFile, open_snapshot
from snaprt.snapshot.recorder import plan
from snaprt.snapshot.recorder.record import process_recorder
from snaprt.snapshot.recorder.writer import SnapshotWriter

x = jnp.arange(8.0)


@pytest.fixture
def dump(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "dump"
    plan.register_hlo_snapshot_callback(None)


def recorded(folder: Path, role: str = "inputs") -> list[SnapshotFile]:
    """Return what was recorded, oldest first."""
    assert process_recorder().flush(30)
    files = folder.glob(f"*.{role}.snap") if folder.exists() else ()
    return sorted(
        map(open_snapshot, files),
        key=lambda one: (
            one.manifest.execution.executable,
            one.manifest.execution.execution_count,
        ),
    )


def array_names(snapshot: SnapshotFile) -> list[str]:
    return [record.name for record in snapshot.manifest.arrays]


def names(folder: Path) -> list[str]:
    return [snapshot.manifest.execution.name for snapshot in recorded(folder)]


def assert_same(found: Any, expected: Any) -> None:
    """Fail unless two trees of arrays are the same, bit for bit, and lie in the same places."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
        for trait in ("dtype", "weak_type", "sharding", "committed"):
            assert getattr(one, trait, None) == getattr(other, trait, None)


def test_each_call_is_recorded_under_the_functions_name_with_the_users_argument_names(
    dump: Path,
) -> None:
    @jax.jit
    def train_step(params: dict[str, Any], batch: Any) -> dict[str, Any]:
        loss = jnp.sum(params["dense"]["kernel"] @ batch)
        return {"loss": loss, "params": jax.tree.map(lambda w: w * 0.5, params)}

    params = {"dense": {"kernel": jnp.ones((2, 8))}}
    expected = [train_step(params, x), train_step(params, x + 1)]
    with snaprt.record(folder=dump):
        found = [train_step(params, x), train_step(params, x + 1)]
    train_step(params, x)
    assert_same(found, expected)
    inputs, outputs = recorded(dump), recorded(dump, "outputs")
    assert names(dump) == ["train_step", "train_step"]
    assert [one.manifest.execution.execution_count for one in inputs] == [0, 1]
    assert inputs[0].manifest.execution.input_names == ("params['dense']['kernel']", "batch")
    assert np.array_equal(inputs[1].array("batch"), np.asarray(x + 1))
    assert outputs[0].manifest.execution.output_names == (
        "result['loss']",
        "result['params']['dense']['kernel']",
    )
    assert np.array_equal(outputs[1].array("result['loss']"), expected[1]["loss"])
    assert any(
        "test_jit_recording.py" in at for at in inputs[0].manifest.execution.source_locations
    )


def double(value: Any) -> Any:
    return jnp.sin(value) * 2


def named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return another function that does the same under a name of its own."""

    def other(*args: Any) -> Any:
        return function(*args)

    other.__name__ = other.__qualname__ = name
    return other


def new_double() -> Any:
    """Return a jitted function of its own: those of `double` share what JAX has compiled."""

    def double(value: Any) -> Any:
        return jnp.sin(value) * 2

    return jax.jit(double)


PROGRAMS: dict[str, Callable[[], Any]] = {
    "static arguments": lambda: jax.jit(
        lambda a, n, flag=True: a * n if flag else a, static_argnums=1, static_argnames="flag"
    )(x, 3, flag=False),
    "arguments from NumPy and Python": lambda: jax.jit(lambda a, b: a * b)(np.arange(4.0), 3),
    "arguments without use": lambda: jax.jit(lambda a, b: a * 2)(x, x + 1),
    "captured arrays": lambda: jax.jit(lambda a: a + x + np.arange(8.0))(x),
    "keys": lambda: jax.random.key_data(
        jax.jit(lambda key: jax.random.split(key))(jax.random.key(1))
    ),
    "several shapes": lambda: [jax.jit(double)(a) for a in (x, x[:3], x, x[:3], x)],
    "grad around": lambda: jax.grad(lambda a: jax.jit(double)(a).sum())(x),
    "vmap around": lambda: jax.vmap(jax.jit(double))(x),
    "scan inside": lambda: jax.jit(lambda a: jax.lax.scan(lambda c, b: (c + b, c), 0.0, a))(x),
    "jit inside": lambda: jax.jit(lambda a: jax.jit(double)(a) + 1)(x),
    "trees with None": lambda: jax.jit(lambda p: {"a": p["w"][0], "b": None})({"w": [x]}),
    "64 bits": lambda: with_x64(lambda: jax.jit(lambda a: a * 2)(np.arange(3.0))),
    "donation": lambda: jax.jit(lambda a: a + 1, donate_argnums=0)(x + 0),
    "compiler options": lambda: jax.jit(
        double, compiler_options={"xla_cpu_enable_fast_math": False}
    )(x),
}


def with_x64(call: Callable[[], Any]) -> Any:
    with jax.enable_x64(True):
        return call()


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_results_are_those_of_plain_jax_and_each_call_from_python_is_an_execution(
    dump: Path, program: Callable[[], Any]
) -> None:
    expected = program()
    with snaprt.record(folder=dump):
        found = program()
    assert_same(found, expected)
    inputs, outputs = recorded(dump), recorded(dump, "outputs")
    assert len(inputs) == len(outputs) >= 1
    for snapshot in [*inputs, *outputs]:
        for name in array_names(snapshot):
            snapshot.array(name)


def test_arguments_are_recorded_as_they_were_whatever_numpy_writes_to_their_memory(
    dump: Path,
) -> None:
    memory = np.zeros((1 << 20) + 64, np.uint8)
    start = -memory.ctypes.data % 64  # where XLA on the CPU takes it as it is
    host = memory[start : start + (1 << 20)]
    with snaprt.record(folder=dump):
        for _ in range(4):
            host[:] = 1
            jax.block_until_ready(jax.jit(lambda batch: batch + 1)(jax.device_put(host)))
            host[:] = 9
    for snapshot in recorded(dump):
        assert np.unique(snapshot.array("batch")).tolist() == [1]


@pytest.mark.parametrize("condition", ["all", "error", "nan", "slower=1h", "recheck"])
def test_arguments_are_deleted_as_by_jax_whatever_is_watched(
    dump: Path, caplog: pytest.LogCaptureFixture, condition: str
) -> None:
    def run(times: int) -> list[Any]:
        @functools.partial(jax.jit, donate_argnums=(0, 1, 3, 4))
        def step(a: Any, key: Any, b: Any, c: Any, unused: Any) -> Any:
            return a + jax.random.normal(key) + b.sum(), key, c[:2]

        args = [jnp.zeros(4), jax.random.key(0), jnp.ones(3), jnp.ones(7), jnp.ones(5)]
        for _ in range(times):
            results = step(*args)
        assert isinstance(results[0], jax.Array)
        return [
            [array.is_deleted() for array in args],
            [array.committed for array in results],
            np.asarray(results[0]).tolist(),
        ]

    plainly = run(1)
    assert any(plainly[0])
    with snaprt.record(condition, dump):
        assert run(1) == plainly
        with pytest.raises((RuntimeError, ValueError), match="deleted"):
            run(2)
    assert "lost a snapshot" not in caplog.text


@pytest.mark.parametrize("condition", ["all", "error", "nan", "slower=1h", "recheck"])
def test_an_argument_that_is_given_twice_and_donated_is_refused_as_by_jax(
    dump: Path, condition: str
) -> None:
    def run() -> list[Any]:
        found: list[Any] = []
        for donated in ((0,), (0, 1)):
            step = jax.jit(lambda a, b: (a + b, a - b), donate_argnums=donated)
            array = jnp.ones(3)
            with pytest.raises(jax.errors.JaxRuntimeError) as raised:
                step(array, array)
            found += str(raised.value), array.is_deleted()
            step(array, jnp.ones(3))
            found.append(array.is_deleted())
        return found

    plainly = run()
    lost = metrics.counter_value("SnapshotWriteError")
    with snaprt.record(condition, dump):
        assert run() == plainly
    assert len(recorded(dump)) == {"all": 4, "error": 2}.get(condition, 0)
    assert metrics.counter_value("SnapshotWriteError") == lost


@pytest.mark.parametrize("condition", ["all", "error", "nan", "slower=1h", "recheck"])
def test_a_deleted_argument_is_jax_s_error_and_no_lost_snapshot(dump: Path, condition: str) -> None:
    double, deleted = jax.jit(lambda a: a * 2), jnp.ones(3)
    deleted.delete()
    lost = metrics.counter_value("SnapshotWriteError")
    with snaprt.record(condition, dump):
        for _ in range(3):
            with pytest.raises((RuntimeError, ValueError), match="deleted"):
                double(deleted)
            double(x)
    assert all(snapshot.array("a").size == x.size for snapshot in recorded(dump))
    assert metrics.counter_value("SnapshotWriteError") == lost


@pytest.mark.parametrize("condition", ["all", "error", "nan", "slower=1h", "recheck"])
def test_an_integer_that_is_too_large_is_jax_s_error_and_no_lost_snapshot(
    dump: Path, condition: str
) -> None:
    def run() -> list[str]:
        step = jax.jit(lambda n, kwargs: n + kwargs["m"])
        compiled = jax.jit(lambda n: n + 1).lower(1).compile()
        found = []
        for number in (1, 2**31, 2, -(2**40), 2**31):
            for call in (lambda n: step(1, {"m": n}), lambda n: step(n, {"m": 1}), compiled):
                try:
                    found.append(str(call(number)))
                except OverflowError as error:
                    found.append(str(error))
        return found

    plainly = run()
    lost = metrics.counter_value("SnapshotWriteError")
    with snaprt.record(condition, dump):
        assert run() == plainly
    assert len(recorded(dump)) == (6 if condition == "all" else 0)
    assert metrics.counter_value("SnapshotWriteError") == lost


def test_donated_arguments_are_deleted_as_without_and_recorded_as_they_were(dump: Path) -> None:
    step = jax.jit(lambda state, grad: state - grad, donate_argnums=0)
    state = x + 0
    with snaprt.record(folder=dump):
        for _ in range(3):
            before = state
            state = step(state, x)
            assert before.is_deleted()
    wanted = [np.asarray(x - n * x) for n in range(3)]
    assert [one.array("state").tolist() for one in recorded(dump)] == [w.tolist() for w in wanted]


def test_references_are_recorded_before_and_after(dump: Path) -> None:
    def run() -> Any:
        counter, closed = jax.new_ref(jnp.zeros(2)), jax.new_ref(jnp.ones(2))

        @jax.jit
        def add(counter: Any, value: Any) -> Any:
            counter[...] += value
            closed[...] *= 2
            return counter[...].sum()

        return [add(counter, 2.0), add(counter, 3.0), counter[...], closed[...]]

    expected = run()
    with snaprt.record(folder=dump):
        assert_same(run(), expected)
    _, second = recorded(dump)
    assert second.array("counter").tolist() == [2.0, 2.0]
    assert recorded(dump, "outputs")[1].array("counter").tolist() == [5.0, 5.0]


def test_calls_are_told_apart_by_the_type_of_a_reference_and_where_it_and_keys_lie(
    dump: Path,
) -> None:
    read = jax.jit(lambda ref: ref[0] * 2)
    draw = jax.jit(lambda key: jax.random.normal(key))
    somewhere = NamedSharding(jax.make_mesh((1,), ("all",)), PartitionSpec())
    arrays = [x, x, x.astype(int), jax.device_put(x, somewhere), x]
    keys = [jax.random.key(0), jax.random.key(1), jax.device_put(jax.random.key(2), somewhere)]
    with snaprt.record(folder=dump):
        for array in arrays:
            read(jax.new_ref(array))
        for key in keys:
            draw(key)
    programs = [one.manifest.execution.executable for one in recorded(dump)]
    assert [programs.count(program) for program in dict.fromkeys(programs)] == [3, 1, 1, 2, 1]


@pytest.mark.parametrize("when", ["all", "nan"])
def test_a_key_that_is_used_twice_is_found_where_jax_looks_for_it(dump: Path, when: str) -> None:
    draw = jax.jit(lambda key: jax.random.normal(key))
    with jax.debug_key_reuse(True), snaprt.record(when=when, folder=dump):
        keys = jax.random.split(jax.random.key(0))
        assert_same([draw(key) for key in keys], [draw(keys[0]), draw(keys[1])])
        key = jax.random.key(1)
        draw(key)
        with pytest.raises(jax.errors.KeyReuseError, match="passed to jit-compiled function"):
            draw(key)


def test_calls_with_float0_are_told_apart_by_their_static_arguments(dump: Path) -> None:
    scale = jax.jit(lambda no_bytes, value, by: value * by, static_argnums=2)
    with snaprt.record(folder=dump):
        for by in (2, 2, 3):
            scale(np.zeros(2, jax.dtypes.float0), x, by)
    programs = [one.manifest.execution.executable for one in recorded(dump)]
    assert [programs.count(program) for program in dict.fromkeys(programs)] == [2, 1]


@pytest.mark.parametrize(
    "unlike", [lambda: jax.new_ref(jnp.ones(2)), lambda: np.zeros(2, jax.dtypes.float0)]
)
def test_what_jax_has_no_entry_for_is_no_call_of_the_program_of_arrays(
    dump: Path, unlike: Callable[[], Any]
) -> None:
    scale = jax.jit(lambda first, value, by: value * by, static_argnums=2)
    with snaprt.record(folder=dump):
        for first, by in ((x, 2), (x, 2), (unlike(), 3), (unlike(), 4), (x, 2)):
            scale(first, x, by)
    programs = [one.manifest.execution.executable for one in recorded(dump)]
    assert [programs.count(program) for program in dict.fromkeys(programs)] == [3, 1, 1]


def test_callbacks_happen_once_and_in_order(dump: Path, capfd: pytest.CaptureFixture[str]) -> None:
    heard: list[float] = []

    def hear(value: Any) -> Any:
        heard.append(float(value))
        return np.float32(value * 2)

    scalar = jax.ShapeDtypeStruct((), jnp.float32)

    @jax.jit
    def step(a: Any) -> Any:
        jax.debug.print("total {}", a.sum(), ordered=True)
        first = io_callback(hear, scalar, a.sum(), ordered=True)
        return jax.pure_callback(lambda v: np.float32(v + 1), scalar, first)

    with snaprt.record(folder=dump):
        results = [step(x + n) for n in range(4)]
        jax.effects_barrier()
    assert heard == [28.0, 36.0, 44.0, 52.0]
    assert [float(one) for one in results] == [57.0, 73.0, 89.0, 105.0]
    assert capfd.readouterr().out == "total 28.0\ntotal 36.0\ntotal 44.0\ntotal 52.0\n"
    assert len(recorded(dump)) == 4


def wrong_shape(a: Any) -> Any:
    return a @ jnp.ones((3, 3))


def wrong_place(a: Any) -> Any:
    return 1 // 0


def not_an_array(a: Any) -> Any:
    return a


@pytest.mark.parametrize(
    ("function", "argument"), [(wrong_shape, x), (wrong_place, x), (not_an_array, "text")]
)
def test_errors_are_those_of_plain_jax_and_their_traceback_has_the_users_lines_alone(
    dump: Path, function: Callable[[Any], Any], argument: Any
) -> None:
    jitted = jax.jit(function)

    def failure() -> pytest.ExceptionInfo[Exception]:
        with pytest.raises(Exception) as raised:  # noqa: PT011
            jitted(argument)
        return raised

    expected = failure()
    with snaprt.record(folder=dump):
        found = failure()
    assert type(found.value) is type(expected.value)
    assert str(found.value) == str(expected.value)
    lines = [[entry.frame.code.path for entry in one.traceback] for one in (found, expected)]
    assert lines[0] == lines[1]
    with snaprt.record(folder=dump):
        assert_same(jax.jit(double)(x), jax.jit(double)(x))


def test_an_error_of_the_device_is_raised_and_the_inputs_are_recorded(dump: Path) -> None:
    def fail(_: Any) -> Any:
        raise RuntimeError("broken sensor")

    step = jax.jit(lambda a: jax.pure_callback(fail, jax.ShapeDtypeStruct((), jnp.float32), a[0]))
    with snaprt.record(folder=dump), pytest.raises(jax.errors.JaxRuntimeError, match="sensor"):
        jax.block_until_ready(step(x))
    assert np.array_equal(recorded(dump)[0].array("a"), np.asarray(x))


def test_eager_operations_and_functions_of_jax_itself_are_not_recorded(dump: Path) -> None:
    with snaprt.record(folder=dump):
        y = jnp.where(x > 2, x, 0) + jax.random.normal(jax.random.key(0), (8,)) + jax.nn.relu(x)
        jax.block_until_ready(y)
    assert names(dump) == []


def test_functions_of_jax_itself_are_recorded_where_a_condition_names_them(dump: Path) -> None:
    with snaprt.record(when="name=^_?where$", folder=dump):
        jnp.where(x > 2, x, 0)
        jnp.cumsum(x)
        jax.jit(double)(x)
    assert names(dump) == ["_where"]


def test_functions_of_jax_itself_that_the_user_jits_are_executions(dump: Path) -> None:
    with snaprt.record(folder=dump):
        dot = jax.jit(jnp.dot)
        assert_same(dot(x, x), jnp.dot(x, x))
        jax.vmap(dot)(x, x)
        jax.vmap(jnp.dot)(x, x)
        jax.jit(jax.vjp(jnp.sin, x)[1])(x)
        jax.jit(checkify.checkify(lambda x: x + 1))(x)
    assert names(dump) == ["dot", "dot", "<unnamed function>", "checked_fun"]


def test_control_flow_and_exported_functions_outside_of_jit_are_executions(dump: Path) -> None:
    inside = jax.jit(lambda x: x + 1)
    exported = jax.export.export(inside)(x)
    with snaprt.record(folder=dump):
        jax.lax.scan(lambda c, y: (inside(c), y), x, x)
        jax.lax.while_loop(lambda y: y[0] < 3, inside, x)
        jax.lax.cond(x[0] < 1, inside, inside, x)
        exported.call(x)
    assert names(dump) == ["scan", "while", "cond", "call_exported"]


def test_exported_functions_of_symbolic_shapes_are_recorded_with_those_of_each_call(
    dump: Path,
) -> None:
    (size,) = jax.export.symbolic_shape("size")
    exported = jax.export.export(jax.jit(jax.nn.softmax))(
        jax.ShapeDtypeStruct((size, 2), jnp.float32)
    )
    with snaprt.record(folder=dump):
        jitted = jax.jit(exported.call)
        jitted(x[:2].reshape(1, 2))
        expected = jitted(three := x[:6].reshape(3, 2))
        with snaprt.lazy():
            np.testing.assert_array_equal(exported.call(three) + 0, expected)
    files = recorded(dump)
    inputs = [file.array(array_names(file)[0]) for file in files]
    assert [array.shape for array in inputs] == [(1, 2), (3, 2), (3, 2)]
    modules = [jaxapi.stablehlo_text(jaxapi.parse_module(file.module.stablehlo)) for file in files]
    assert not any("dynamic" in module or "tensor<?" in module for module in modules)


def test_what_a_callback_calls_is_an_execution(dump: Path) -> None:
    called_back = jax.jit(named(double, "called_back"))

    def outer(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda y: jax.block_until_ready(called_back(y)), x)
        shape = jax.ShapeDtypeStruct((8,), np.float32)
        return jax.pure_callback(lambda y: np.asarray(called_back(y)), shape, x)

    expected = called_back(x)  # now JAX would call it without asking, were it not watched
    with snaprt.record(folder=dump):
        assert_same(jax.jit(outer)(x), expected)
        jax.effects_barrier()
    assert sorted(names(dump)) == ["called_back", "called_back", "outer"]


def test_what_is_called_for_a_constant_while_another_is_traced_is_an_execution(dump: Path) -> None:
    constant = jax.jit(named(double, "constant"))

    def outer(y: jax.Array) -> jax.Array:
        with jax.ensure_compile_time_eval():
            return y + constant(x)

    with snaprt.record(folder=dump):
        jax.jit(outer)(x)
    assert sorted(names(dump)) == ["constant", "outer"]


def test_derivatives_of_integers_are_recorded_as_the_booleans_that_stand_for_them(
    dump: Path,
) -> None:
    counts = jnp.arange(3)
    derivative = jax.jit(jax.grad(lambda n: jnp.float32(n.sum()), allow_int=True))
    with snaprt.record(folder=dump):
        zeros = derivative(counts)
        jax.jit(lambda tangent: tangent)(zeros)
    assert [file.array(array_names(file)[0]).dtype for file in recorded(dump, "outputs")] == [
        bool,
        bool,
    ]


def test_packages_whose_names_begin_like_jax_are_not_jax_itself() -> None:
    folder = Path(jax.__file__).parent
    assert jaxapi.is_source_of_jax(f"_where at {folder / 'numpy' / 'util.py'}:1")
    assert not jaxapi.is_source_of_jax(f"solve at {folder}opt/solver.py:1")
    assert not jaxapi.is_source_of_jax("<unknown>")


def test_inside_disable_jit_there_are_no_executions(dump: Path) -> None:
    with snaprt.record(folder=dump), jax.disable_jit():
        assert_same(jax.jit(double)(x), double(x))
    assert names(dump) == []


def test_lowering_and_looking_at_shapes_work_inside(dump: Path) -> None:
    step = new_double()
    with snaprt.record(folder=dump):
        assert step.eval_shape(x).shape == (8,)
        assert "stablehlo" in step.lower(x).as_text()
    assert names(dump) == []


def test_conditions_choose_and_are_kept_from_call_to_call_of_a_decorated_function(
    dump: Path,
) -> None:
    step = new_double()

    @snaprt.record(when="name=double, first=2", folder=dump)
    def work() -> None:
        for _ in range(3):
            step(x)
            jax.jit(lambda a: a + 1)(x)

    work()
    work()
    assert names(dump) == ["double", "double"]


def test_a_condition_that_cannot_be_understood_is_an_error_at_once() -> None:
    with pytest.raises(UsageError, match="nme"):
        snaprt.record(when="nme=double")


def test_scopes_nest_and_the_outer_one_holds_again_afterwards(dump: Path) -> None:
    step = new_double()
    with snaprt.record(folder=dump / "outer"):
        step(x)
        with snaprt.record(folder=dump / "inner"):
            step(x + 1)
        step(x + 2)
    step(x + 3)
    assert [one.array("value")[0] for one in recorded(dump / "outer")] == [0, 2]
    assert [one.array("value")[0] for one in recorded(dump / "inner")] == [1]


def test_without_arguments_the_environment_says_what_is_recorded(
    dump: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_DUMP_DIR", str(dump))
    monkeypatch.setenv("SNAPRT_RECORD", "execution=1")
    step = new_double()
    with snaprt.record():
        for number in range(3):
            step(x + number)
    assert [one.array("value")[0] for one in recorded(dump)] == [1]


def test_the_callback_is_asked_about_each_call(dump: Path) -> None:
    asked: list[tuple[str, int, int]] = []

    def choose(name: str, device: int, count: int) -> str:
        asked.append((name, device, count))
        return "outputs" if count == 1 else ""

    plan.register_hlo_snapshot_callback(choose)
    step = new_double()
    with snaprt.record(folder=dump):
        for _ in range(3):
            step(x)
    assert asked == [("double", 0, 0), ("double", 0, 1), ("double", 0, 2)]
    assert names(dump) == []
    assert len(recorded(dump, "outputs")) == 1


@pytest.mark.parametrize("when", ["all", "nan"])
def test_first_calls_of_several_threads_leave_no_program_to_the_others(
    dump: Path, when: str
) -> None:
    together = threading.Barrier(3, timeout=20)
    traced: list[int] = []

    def scaled(x: jax.Array, factor: int) -> jax.Array:
        traced.append(factor)
        if len(traced) <= 3:
            together.wait()  # each has its first call traced before another one has ended
        return x * factor

    function = jax.jit(scaled, static_argnums=1)
    values: dict[int, list[float]] = {}

    def work(factor: int) -> None:
        with snaprt.record(when=when, folder=dump):
            values[factor] = [float(function(jnp.ones(()), factor)) for _ in range(2)]

    threads = [threading.Thread(target=work, args=(factor,)) for factor in (2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with snaprt.record(when=when, folder=dump):
        later = [float(function(jnp.ones(()), factor)) for factor in (2, 3, 4, 2, 3, 4)]
    assert values == {factor: [factor, factor] for factor in (2, 3, 4)}
    assert later == [2, 3, 4, 2, 3, 4]
    if when == "all":
        files = recorded(dump, "outputs")
        pairs = [(f.manifest.execution.executable, f.array("result").item()) for f in files]
        assert len(pairs) == 12
        assert len(set(pairs)) == 3  # each program has results of its own


@pytest.mark.parametrize(
    "clear", [lambda function: function.clear_cache(), lambda _: jax.clear_caches()]
)
@pytest.mark.parametrize("when", ["all", "nan"])
def test_a_function_that_is_traced_anew_leaves_its_program(
    dump: Path, when: str, clear: Callable[[Any], None]
) -> None:
    scale = 2.0

    def scaled(x: jax.Array, power: int) -> jax.Array:
        return scale * x**power

    function = jax.jit(scaled, static_argnums=1)
    with snaprt.record(when=when, folder=dump):
        assert [float(function(jnp.ones(()), 1)) for _ in range(3)] == [2, 2, 2]
        clear(function)
        assert [float(function(jnp.full((), 3.0), 2)) for _ in range(3)] == [18, 18, 18]
        scale = 5.0
        clear(function)
        assert [float(function(jnp.ones(()), 1)) for _ in range(3)] == [5, 5, 5]
    if when == "all":
        files = recorded(dump, "outputs")
        pairs = {(f.manifest.execution.executable, f.array("result").item()) for f in files}
        assert len(files) == 9
        assert len(pairs) == len({executable for executable, _ in pairs}) == 3


@pytest.mark.parametrize("when", ["all", "nan"])
def test_calls_that_fail_leave_no_program_to_others_like_them(dump: Path, when: str) -> None:
    @jax.jit
    def counted(*arrays: jax.Array) -> jax.Array:
        if len(arrays) == 2:
            raise ValueError("two")
        return jnp.stack(arrays).sum()

    with snaprt.record(when=when, folder=dump):
        for _ in range(4):
            assert float(counted(jnp.ones(()))) == 1
            with pytest.raises(ValueError, match="two"):
                counted(jnp.ones(()), jnp.ones(()))
            assert float(counted(*[jnp.ones(())] * 3)) == 3


@pytest.mark.parametrize("when", ["all", "nan", "error"])
def test_a_value_that_has_escaped_from_a_trace_is_jax_s_error_and_no_lost_snapshot(
    when: str, dump: Path
) -> None:
    escaped: list[jax.Array] = []
    jax.jit(escaped.append)(x)
    taking, reading = jax.jit(lambda a: a + 1), jax.jit(lambda a: a + escaped[0])
    lost = metrics.counter_value("SnapshotWriteError")
    with snaprt.record(when=when, folder=dump):
        compiled = taking.lower(x).compile()
        for _ in range(2):
            assert_same(taking(x), x + 1)
            with pytest.raises(jax.errors.UnexpectedTracerError):
                taking(escaped[0])
            with pytest.raises(jax.errors.UnexpectedTracerError):
                reading(x)
            with pytest.raises(Exception, match="not a valid JAX type"):
                compiled(escaped[0])
    assert recorded(dump) or when != "all"
    assert metrics.counter_value("SnapshotWriteError") == lost


def test_each_thread_records_in_its_own_scope(dump: Path) -> None:
    step = new_double()

    def work(number: int) -> None:
        if number == 3:
            for _ in range(5):
                step(x)
            return
        with snaprt.record(folder=dump / str(number)):
            for turn in range(5):
                step(x + 10 * number + turn)

    in_threads(4, work)
    for number in range(3):
        found = [one.array("value")[0] for one in recorded(dump / str(number))]
        assert found == [10 * number + turn for turn in range(5)]
    assert not (dump / "3").exists()


@pytest.mark.parametrize("other", ["recorded", "first", "plain"])
def test_a_call_is_recorded_after_another_thread_has_called_the_function(
    dump: Path, other: str
) -> None:
    step = new_double()
    scopes = {
        "recorded": lambda: snaprt.record(folder=dump / "other"),
        "first": lambda: snaprt.record(when="first=1", folder=dump / "other"),
        "plain": contextlib.nullcontext,
    }

    def call_elsewhere() -> None:
        with scopes[other]():
            step(x)

    with snaprt.record(folder=dump / "here"):
        for turn in range(9):
            step(x + turn)  # C++ makes such calls after a few
            if turn % 3 == 2:
                in_threads(1, lambda _: call_elsewhere())
    assert [one.array("value")[0] for one in recorded(dump / "here")] == list(range(9))


def test_lazy_work_inside_is_recorded_as_graphs_and_record_inside_lazy_changes_nothing(
    dump: Path,
) -> None:
    step = new_double()
    with snaprt.record(folder=dump):
        step(x)
        with snaprt.lazy():
            y = step(x) + 1
            snaprt.mark_step()
        step(y)
    with snaprt.lazy(), snaprt.record(folder=dump / "inside"):
        z = step(x) + 1
        snaprt.mark_step()
    assert np.allclose(np.asarray(y), np.asarray(double(x) + 1))
    assert_same(np.asarray(z), np.asarray(y))
    assert sorted(names(dump)) == ["double", "double", "lazy_graph"]
    assert names(dump / "inside") == ["lazy_graph"]


@pytest.mark.parametrize("lazy_outside", [True, False])
def test_calls_that_a_lazy_scope_follows_are_parts_of_its_graphs_in_either_nesting(
    dump: Path, lazy_outside: bool
) -> None:
    step = new_double()
    recording = snaprt.record(folder=dump)
    scopes = (snaprt.lazy(), recording) if lazy_outside else (recording, snaprt.lazy())
    points = []
    for _ in range(4):
        with scopes[0], scopes[1]:
            y = step(x) + step(x + 1)
            snaprt.mark_step()
        points.append(thread_trace()._points)
    with recording:
        step(x)
    assert len(set(points[1:])) == 1
    assert np.allclose(y, double(x) + double(x + 1))
    assert sorted(names(dump)) == ["double", *["lazy_graph"] * 4]


def test_a_lazy_array_that_a_recorded_function_donates_is_recorded_as_it_was(dump: Path) -> None:
    step = jax.jit(lambda state: state * 2, donate_argnums=0)
    with snaprt.record(folder=dump):
        with snaprt.lazy():
            state = jnp.full((64, 128), 3.0) + 0
        state = step(state)
        with snaprt.lazy():
            state = state + 1
            snaprt.mark_step()
        state = step(state)
    assert np.array_equal(state, np.full((64, 128), 14))
    inputs = [one for one in recorded(dump) if "lazy" not in one.manifest.execution.name]
    assert [one.array("state")[0, 0] for one in inputs] == [3, 7]


def test_a_call_that_no_lazy_graph_can_hold_is_an_execution_of_its_own(dump: Path) -> None:
    step = jax.jit(double, compiler_options={"xla_cpu_enable_fast_math": False})
    with snaprt.record(folder=dump), snaprt.lazy():
        y = step(x + 1) + 1
        snaprt.mark_step()
    assert np.allclose(y, double(x + 1) + 1)
    assert sorted(names(dump)) == ["double", "lazy_graph", "lazy_graph"]


def test_nan_is_found_by_a_flag_in_the_program_and_results_stay_the_same(dump: Path) -> None:
    step = jax.jit(
        lambda state, a: {"state": state + 1, "loss": jnp.log(a).sum()}, donate_argnums=0
    )
    values = [x + 1, x, x - 1, x + 2]
    expected = [step(x + 0, value) for value in values]
    with snaprt.record(when="nan", folder=dump):
        found = [step(x + 0, value) for value in values]
    assert_same(found, expected)
    (one, two) = recorded(dump)
    assert [one.array("a")[0], two.array("a")[0]] == [0, -1]
    assert "snaprt_not_finite" in array_names(recorded(dump, "outputs")[0])


def test_a_function_that_no_condition_names_runs_the_program_that_it_has(dump: Path) -> None:
    def named(state: Any) -> Any:
        return state + 1

    def other(state: Any) -> Any:
        return state + 1

    kept, taken = x + 0, x + 0
    places = [array.unsafe_buffer_pointer() for array in (kept, taken)]
    with snaprt.record(when="nan, name=named", folder=dump):
        results = [
            jax.jit(named, donate_argnums=0)(kept),
            jax.jit(other, donate_argnums=0)(taken),
        ]
    assert kept.is_deleted()
    assert taken.is_deleted()
    assert results[0].unsafe_buffer_pointer() != places[0]  # what was there may be recorded
    assert results[1].unsafe_buffer_pointer() == places[1]


def test_a_function_that_is_made_and_called_once_is_not_kept_alive(dump: Path) -> None:
    import gc
    import weakref

    def call() -> weakref.ref[Any]:
        def once(a: Any) -> Any:
            return a + 1

        jax.jit(once)(x)
        return weakref.ref(once)

    with snaprt.record(when="execution=5", folder=dump):
        made = [call() for _ in range(3)]
    gc.collect()
    assert [reference() for reference in made] == [None] * 3


@pytest.mark.parametrize("is_looked_at_early", [False, True])
def test_a_recorded_program_is_compiled_once(
    dump: Path, monkeypatch: pytest.MonkeyPatch, is_looked_at_early: bool
) -> None:
    compiled = []
    is_compiled = threading.Event()

    def count(event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)
            is_compiled.set()

    def before(*arguments: Any) -> Any:
        token = queue(*arguments)
        if is_looked_at_early:
            is_compiled.wait(1)  # by the recorder's thread, if it goes ahead
        return token

    @jax.jit
    def slow_to_compile(a: jax.Array) -> jax.Array:
        for _ in range(150):
            a = jnp.sort(jnp.sin(a @ a), axis=0)
        return a

    values = jnp.eye(8)
    queue = process_recorder().before
    monkeypatch.setattr(process_recorder(), "before", before)
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        # Under a setting of this thread's JAX does not find what another thread compiles.
        with jax.default_matmul_precision("highest"), snaprt.record(folder=dump):
            slow_to_compile(values)
        assert len(recorded(dump, "outputs")) == 1  # waits for the recorder's thread
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert len(compiled) == 1


def test_every_kind_of_call_of_a_function_is_counted_as_a_program_of_its_own(dump: Path) -> None:
    step = new_double()
    values = [x, x[:3], x + 1, x[:3] + 1, np.arange(3.0), 2.0, x, 3.0]
    with snaprt.record(folder=dump):
        for value in values:
            step(value)
    executions = [one.manifest.execution for one in recorded(dump)]
    shapes = [one.array("value").shape for one in recorded(dump)]
    counts = [one.execution_count for one in executions]
    assert shapes == [(8,)] * 3 + [(3,)] * 3 + [()] * 2
    # Python scalars and arrays from NumPy run what arrays of JAX's run.
    assert counts == [0, 1, 2, 0, 1, 2, 0, 1]


def test_functions_that_jax_takes_apart_when_it_lowers_them_are_recorded(dump: Path) -> None:
    @jax.jit
    def searched(ordered: jax.Array, wanted: jax.Array) -> jax.Array:
        return jnp.searchsorted(ordered, wanted)

    @jax.jit
    def rooted(square: jax.Array) -> jax.Array:
        def solve(function: Any, guess: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, 20, lambda _, y: y - function(y) / (2 * y), guess)

        return jax.lax.custom_root(
            lambda y: y * y - square, square, solve, lambda g, y: y / g(jnp.ones_like(y))
        )

    expected = searched(x, x[:2] + 0.5), rooted(jnp.float32(2.0))
    with snaprt.record(folder=dump):
        assert_same((searched(x, x[:2] + 0.5), rooted(jnp.float32(2.0))), expected)
    assert names(dump) == ["searched", "rooted"]
    assert array_names(recorded(dump)[0]) == ["ordered", "wanted"]


def test_what_was_compiled_ahead_of_time_is_recorded_when_it_is_called(dump: Path) -> None:
    def ahead(state: dict[str, jax.Array], scale: jax.Array) -> dict[str, jax.Array]:
        return {"w": state["w"] * scale}

    lower = jax.jit(ahead, donate_argnums=0).lower
    with snaprt.record(folder=dump):
        compiled = lower({"w": x}, x).compile()
        with_options = lower({"w": x}, x).compile({"xla_cpu_enable_fast_math": True})
        assert_same(compiled({"w": x + 0}, x), {"w": x * x})
        assert_same(with_options({"w": x + 0}, x), {"w": x * x})
    first, second = recorded(dump)
    assert array_names(first) == ["state['w']", "scale"]
    assert array_names(recorded(dump, "outputs")[0]) == ["result['w']"]
    assert first.module.compile_options != second.module.compile_options


@pytest.mark.parametrize("wrong", [(x[:4],), (x.astype(int),), (x, x), ([x],)])
def test_a_wrong_call_of_what_was_compiled_ahead_of_time_is_jax_s_error_and_no_lost_snapshot(
    wrong: tuple[Any, ...], dump: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with snaprt.record(folder=dump):
        compiled = jax.jit(lambda x: x + 1).lower(x).compile()
        with pytest.raises(TypeError, match="compiled"):
            compiled(*wrong)
        assert_same(compiled(x), x + 1)
    assert len(names(dump)) == 1
    assert caplog.messages == []


def test_what_was_compiled_for_values_made_of_arrays_is_recorded_with_the_arrays(
    dump: Path,
) -> None:
    pair = Pair(x, x[:4])
    with snaprt.record(folder=dump):
        compiled = jax.jit(lambda pair, scale: pair).lower(pair, 2.0).compile()
        with pytest.raises(TypeError, match="compiled"):
            compiled(Pair(x, x), 2.0)
        assert_same(vars(compiled(pair, 2.0)), vars(pair))
    (inputs,), (outputs,) = recorded(dump), recorded(dump, "outputs")
    assert [array.shape for array in inputs.manifest.arrays] == [(8,), (4,)]
    assert [array.shape for array in outputs.manifest.arrays] == [(8,), (4,)]


def test_what_was_compiled_for_devices_that_were_chosen_last_is_recorded(dump: Path) -> None:
    mesh = jax.make_mesh((1,), ("x",))
    kind = jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh.abstract_mesh, PartitionSpec("x"))
    )
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("x")))
    with snaprt.record(folder=dump):
        lowered = jax.jit(lambda x: x * 2).trace(kind).lower(lowering_platforms=("cpu",))
        compiled = lowered.compile(device_assignment=tuple(mesh.devices.flat))
        assert_same(compiled(placed), jax.device_put(x * 2, placed.sharding))
    assert len(names(dump)) == 1


def test_a_call_that_cannot_be_seen_is_told_once(
    dump: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = jax.jit(lambda x: x + 1).lower(x).compile()
    if hasattr(compiled, "snaprt_ahead"):  # another test has recorded in this process
        del compiled.snaprt_ahead
    with snaprt.record(folder=dump):
        compiled(x)
        compiled(x)
    assert names(dump) == []
    assert [line for line in caplog.messages if "is not recorded" in line] == [
        "an execution of a compiled program is not recorded: it was compiled before recording "
        "started, or loaded; only calls through jax.jit are seen\nThis is said once."
    ]


def test_what_pmap_makes_is_an_execution(dump: Path) -> None:
    with snaprt.record(folder=dump):
        jax.pmap(lambda x: x * 2)(x[None])
    assert len(names(dump)) == 1


@pytest.mark.parametrize(
    "function", [jax.nn.logsumexp, jax.grad(lambda x: jax.nn.softmax(x).max())]
)
def test_nan_is_found_under_a_mesh_of_explicit_axes(
    function: Callable[[jax.Array], jax.Array], dump: Path
) -> None:
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,))
    placed = jax.device_put(x, jax.NamedSharding(mesh, jax.P("rows")))
    jitted = jax.jit(lambda x, lowest: function(jnp.sqrt(x - lowest)))
    with jax.set_mesh(mesh):
        expected = jitted(placed, 0.0)
        with snaprt.record("nan", folder=dump):
            assert_same(jitted(placed, 0.0), expected)
            jitted(placed, 1.0)
    assert [file.manifest.execution.execution_count for file in recorded(dump)] == [1]


def test_an_array_that_the_program_deletes_is_recorded_as_it_was(dump: Path) -> None:
    jitted = jax.jit(lambda x, key: x * 2)
    with snaprt.record(folder=dump):
        for number in range(8):
            given, key = x + number, jax.random.key(number)
            result = jitted(given, key)
            for array in (given, key, result):
                array.delete()
    for number, file in enumerate(recorded(dump)):
        assert np.array_equal(file.array("x"), np.arange(8.0) + number)
    for number, file in enumerate(recorded(dump, "outputs")):
        assert np.array_equal(file.array("result"), 2 * (np.arange(8.0) + number))
    assert len(recorded(dump, "outputs")) == 8


def test_jitted_functions_can_be_pickled_copied_and_asked_as_ever(dump: Path) -> None:
    def scaled(x: jax.Array, by: float = 2.0) -> jax.Array:
        return x * by

    jitted = jax.jit(scaled)
    with snaprt.record("error", folder=dump):
        jitted(x)
        restored = pickle.loads(cloudpickle.dumps(jitted))
        assert_same(restored(x), x * 2)
        assert_same(copy.deepcopy(jitted)(x), x * 2)
        assert str(inspect.signature(jitted)) == str(inspect.signature(scaled))
        assert weakref.ref(jitted)() is jitted
    assert_same(pickle.loads(cloudpickle.dumps(jitted))(x), x * 2)


def test_a_program_that_is_to_stop_does_so_at_the_execution_that_failed(
    dump: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_RECORD_STOP", "1")
    own = jax.jit(lambda x: jnp.log(x))
    with snaprt.record("nan", folder=dump):
        own(jnp.float32(1.0))
        with pytest.raises(snaprt.ExecutionError, match="execution 1 of"):
            own(jnp.float32(-1.0))
    assert [file.manifest.execution.execution_count for file in recorded(dump)] == [1]


@pytest.mark.parametrize("donated", [(), (0,)])
def test_where_jax_debug_nans_is_set_its_error_is_raised_and_the_nan_recorded(
    dump: Path, donated: tuple[int, ...]
) -> None:
    @functools.partial(jax.jit, donate_argnums=donated)
    def twice_log(v: jax.Array) -> jax.Array:
        return jnp.log(v) * 2

    with jax.debug_nans(True), snaprt.record(when="nan", folder=dump):
        assert twice_log(jnp.ones(2)).sum() == 0.0
        with pytest.raises(FloatingPointError, match="encountered in log"):
            twice_log(jnp.full(2, -1.0))
    (found,) = recorded(dump)
    assert found.manifest.execution.reason == "nan"
    assert np.array_equal(found.array("v"), [-1.0, -1.0])


def test_what_the_device_could_not_compute_is_told_without_a_traceback_of_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer = SnapshotWriter()
    for error in (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory"), KeyError("bug")):
        writer.complain(error)
    told, bug = caplog.records
    assert "RESOURCE_EXHAUSTED: no memory" in told.message
    assert not told.exc_info
    assert bug.exc_info


def shared_memory() -> Any:
    """Return a NumPy array whose memory XLA on the CPU takes as it is."""
    memory = np.zeros(4 * 64 * 64 + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + 4 * 64 * 64].view(np.float32).reshape(64, 64)


def long_sum(value: Any, number: int = 20) -> Any:
    def body(_: Any, value: Any) -> Any:
        return jnp.tanh(value @ value.T) @ value / 64

    return jax.lax.fori_loop(0, number, body, value).sum() + value[0]


CALLS: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "of a jitted function": lambda array: jax.jit(long_sum),
    "with a static argument": lambda array: functools.partial(
        jax.jit(long_sum, static_argnums=1), number=30
    ),
    "with the last argument static": lambda array: (
        lambda a: jax.jit(long_sum, static_argnums=-1)(a, 30)
    ),
    "that donates": lambda array: jax.jit(long_sum, donate_argnums=0),
    "of what is transformed": lambda array: jax.vmap(jax.jit(long_sum), axis_size=2, in_axes=None),
    "of what is compiled": lambda array: jax.jit(long_sum).lower(array).compile(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_recorded_call_does_not_see_what_is_written_to_its_arguments_afterwards(
    dump: Path, call: Callable[[Any], Callable[[Any], Any]]
) -> None:
    array = shared_memory()
    array[:] = 0.5
    with snaprt.record(folder=dump):
        function = call(array)
        expected = np.asarray(function(array))
        for _ in range(20):
            array[:] = 0.5
            found = function(array)
            array[:] = -1
            np.testing.assert_array_equal(found, expected)
    for snapshot in recorded(dump):
        assert np.array_equal(snapshot.array(array_names(snapshot)[0]), np.full((64, 64), 0.5))


@pytest.mark.parametrize("keep_last", [0, 2])
def test_a_call_that_fails_after_others_is_recorded_with_what_it_was_called_with(
    dump: Path, monkeypatch: pytest.MonkeyPatch, keep_last: int
) -> None:
    monkeypatch.setenv("SNAPRT_RECORD_KEEP_LAST", str(keep_last))

    def refuse(value: Any) -> Any:
        if value[0] > 3:
            raise ValueError("too large")
        return value

    @jax.jit
    def step(unused: Any, state: Any) -> Any:
        return {"state": jax.pure_callback(refuse, state["state"], state["state"]) + 1}

    def train() -> None:
        state = {"state": jnp.zeros(2)}
        for _ in range(9):
            state = jax.block_until_ready(step(x, state))

    errors = (ValueError, jax.errors.JaxRuntimeError)
    with snaprt.record(when="error", folder=dump), pytest.raises(errors, match="too large"):
        train()
    inputs = {one.manifest.execution.execution_count: one for one in recorded(dump)}
    assert sorted(inputs) == list(range(5 - max(keep_last, 1), 5))
    for count, snapshot in inputs.items():
        assert snapshot.array("state['state']").tolist() == [count, count]
    assert "too large" in inputs[4].manifest.execution.error


def test_what_the_flight_recorder_holds_of_calls_outlives_donation_and_deletion(
    dump: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_RECORD_KEEP_LAST", "3")
    step, take = (
        jax.jit(lambda state: state + 1),
        jax.jit(lambda state: state * 2, donate_argnums=0),
    )
    states = [jnp.zeros(8)]
    with snaprt.record(when="error", folder=dump):
        for _ in range(6):
            states.append(step(states[-1]))
        jax.block_until_ready(take(states[4]))
        states[5].delete()
        snaprt.dump_now()
    held = [one.array(array_names(one)[0])[0] for one in recorded(dump)]
    assert held == [4.0, 5.0, 4.0]


def test_the_recorder_gets_ready_for_a_new_plan_though_it_knows_the_function(dump: Path) -> None:
    step = jax.jit(lambda state: state + 1)
    for folder in ("first", "second"):
        with snaprt.record(when="error", folder=dump / folder):
            for _ in range(3):
                step(x)
                assert process_recorder()._plan is plan.current_plan()
