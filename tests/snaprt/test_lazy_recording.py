"""A lazy training loop that donates its parameters while it is recorded: nothing recorded is lost,
and what is recorded is what ran."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counting
from recordings import recorded
from threads import in_thread

import snaprt
from snaprt import jaxapi, metrics
from snaprt.cli.main import main
from snaprt.compile.lower import FLAG_NAME
from snaprt.runtime.step import thread_trace
from snaprt.snapshot.format.read import SnapshotFile, open_snapshot
from snaprt.snapshot.format.schema import Role
from snaprt.snapshot.recorder.record import process_recorder

pytestmark = pytest.mark.usefixtures("no_persistent_cache")

STEPS = 6
SHAPE = (64, 128)  # large enough to be donated

Params = dict[str, jax.Array]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SNAPRT_DUMP_DIR", str(tmp_path / "dump"))
    monkeypatch.setenv("SNAPRT_RECORD", "execution=1000")  # that never comes
    return tmp_path / "dump"


def batch(number: int, *, bad: int | None = None) -> jax.Array:
    values = np.random.default_rng(number).normal(size=(16, SHAPE[0])).astype(np.float32)
    if number == bad:
        values[0, 0] = -np.inf
    return jnp.asarray(values)


def update(params: Params, x: jax.Array) -> Params:
    """Take one step of gradient descent with momentum."""
    gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(params["w"])
    momentum = params["m"] * 0.9 + gradient
    return {"w": params["w"] - momentum * 0.1, "m": momentum}


def train(
    before: Callable[[int], None] = lambda number: None,
    after: Callable[[Params], None] = lambda params: None,
    bad: int | None = None,
) -> list[np.ndarray]:
    """Train lazily, and return the parameters at the end.

    Args:
        before: Called before each step with its number.
        after: Called after each step with the parameters.
        bad: The step whose batch has an infinity.
    """
    with snaprt.lazy():
        params = {"w": jnp.linspace(-1, 1, SHAPE[0] * SHAPE[1]).reshape(SHAPE) + 0}
        params["m"] = params["w"] * 0
        snaprt.mark_step(wait=True)
        for number in range(STEPS):
            before(number)
            params = update(params, batch(number, bad=bad))
            snaprt.mark_step(wait=True)
            after(params)
    return [np.asarray(params[name]) for name in ("w", "m")]


def every_parameter(bad: int | None = None) -> list[list[np.ndarray]]:
    """Return the parameters after each step, of a training that donates nothing."""
    seen: list[list[np.ndarray]] = []
    train(after=lambda params: seen.append([np.array(params["w"]), np.array(params["m"])]), bad=bad)
    return seen


def steps_recorded(folder: Path, role: Role = "inputs") -> list[SnapshotFile]:
    """Return the recorded steps of the training, oldest first."""
    return [one for one in recorded(folder, role) if len(big_arrays(one)) == 2]


def big_arrays(file: SnapshotFile) -> list[np.ndarray]:
    return [file.array(name) for name in file.array_names if file.array(name).shape == SHAPE]


def as_bytes(arrays: list[np.ndarray]) -> set[bytes]:
    return {array.tobytes() for array in arrays}


@pytest.fixture(scope="module")
def expected() -> list[list[np.ndarray]]:
    """The parameters after each step; nothing is donated, for they are read."""
    return every_parameter()


def assert_recorded_as_it_was(
    files: list[SnapshotFile], steps: range, expected: list[list[np.ndarray]]
) -> None:
    """Fail unless these are the inputs of those steps of a training, bit for bit."""
    found = [as_bytes(big_arrays(file)) for file in files]
    assert found == [as_bytes(expected[step - 1]) for step in steps]


def replay(folder: Path) -> int:
    return main(["replay", *map(str, folder.glob("*.inputs.snap"))])


def donations(files: list[SnapshotFile]) -> list[bool]:
    return [bool(file.manifest.execution.donated) for file in files]


def test_a_step_that_donates_is_recorded_with_its_inputs_as_they_were(
    folder: Path, monkeypatch: pytest.MonkeyPatch, expected: list[list[np.ndarray]]
) -> None:
    def before(number: int) -> None:
        monkeypatch.setenv("SNAPRT_RECORD", "all" if number == 3 else "execution=1000")

    end = train(before)
    files = steps_recorded(folder)
    assert donations(files) == [True]
    assert_recorded_as_it_was(files, range(3, 4), expected)
    assert as_bytes(big_arrays(steps_recorded(folder, "outputs")[0])) == as_bytes(expected[3])
    assert as_bytes(end) == as_bytes(expected[-1])
    monkeypatch.delenv("SNAPRT_RECORD")
    assert replay(folder) == 0


@pytest.mark.parametrize("hold", ["device", "hybrid", "host"])
@pytest.mark.parametrize("is_written_at_once", [True, False])
def test_every_step_is_recorded_whether_the_writer_is_faster_than_the_training_or_not(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    expected: list[list[np.ndarray]],
    hold: str,
    is_written_at_once: bool,
) -> None:
    monkeypatch.setenv("SNAPRT_RECORD", "all")
    monkeypatch.setenv("SNAPRT_RECORD_HOLD", hold)
    end = train(after=lambda _: is_written_at_once and process_recorder().flush(60))
    files = steps_recorded(folder)
    assert len(files) == STEPS
    if is_written_at_once:  # nothing else holds the parameters then
        assert all(donations(files)[2:])
    assert_recorded_as_it_was(files[1:], range(1, STEPS), expected)
    assert as_bytes(end) == as_bytes(expected[-1])
    assert metrics.counter_value("SnapshotWriteError") is None
    monkeypatch.delenv("SNAPRT_RECORD")
    assert replay(folder) == 0


@pytest.mark.parametrize("hold", ["device", "hybrid", "host"])
def test_the_step_in_which_a_nan_appears_is_recorded_with_finite_parameters(
    folder: Path, monkeypatch: pytest.MonkeyPatch, hold: str
) -> None:
    monkeypatch.setenv("SNAPRT_RECORD", "nan")
    monkeypatch.setenv("SNAPRT_RECORD_HOLD", hold)
    train(bad=4)
    files = steps_recorded(folder)
    monkeypatch.delenv("SNAPRT_RECORD")
    assert_recorded_as_it_was(files, range(4, 5), every_parameter(bad=4))
    assert np.isfinite(big_arrays(files[0])).all()
    assert steps_recorded(folder, "outputs")[0].array(FLAG_NAME)
    if hold == "device":
        assert donations(files) == [False]
    assert replay(folder) == 0


@pytest.mark.parametrize("hold", ["device", "hybrid", "host"])
def test_the_flight_recorder_has_the_last_steps_as_they_were(
    folder: Path, monkeypatch: pytest.MonkeyPatch, expected: list[list[np.ndarray]], hold: str
) -> None:
    monkeypatch.setenv("SNAPRT_RECORD_KEEP_LAST", "2")
    monkeypatch.setenv("SNAPRT_RECORD_HOLD", hold)
    end = train()
    snaprt.dump_now()
    files = steps_recorded(folder)
    assert_recorded_as_it_was(files, range(STEPS - 2, STEPS), expected)
    assert as_bytes(end) == as_bytes(expected[-1])
    monkeypatch.delenv("SNAPRT_RECORD_KEEP_LAST")
    assert replay(folder) == 0


def test_conditions_switched_between_steps_that_are_followed_compile_once_for_each_need(
    folder: Path, monkeypatch: pytest.MonkeyPatch, expected: list[list[np.ndarray]]
) -> None:
    points: list[int] = []

    def switch(number: int) -> None:
        points.append(thread_trace()._points)
        if number in (2, 4):
            monkeypatch.setenv("SNAPRT_RECORD", "nan")
        else:
            monkeypatch.setenv("SNAPRT_RECORD", "execution=1000")

    train(switch)
    with counting() as counts:
        end = train(switch)
    assert counts.compiled == 0
    assert len(set(points[STEPS:])) == 1  # the path is the same, with a flag and without
    assert as_bytes(end) == as_bytes(expected[-1])
    assert steps_recorded(folder) == []


def test_an_error_while_recording_after_steps_that_were_followed_leaves_the_graph_so_far(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_RECORD", "error")
    step = jax.jit(lambda a: jnp.sin(a) * 2)
    with snaprt.lazy():
        h = jnp.ones((3, 4)) + 0
        snaprt.mark_step()
        for number in range(4):
            h = step(h) + 1.0
            if number == 3:
                with pytest.raises(TypeError, match="incompatible shapes"):
                    h + jnp.ones((4, 3))
            snaprt.mark_step()
    assert process_recorder().flush(60)
    (path,) = folder.glob("*.snap")
    file = open_snapshot(path)
    error = file.manifest.trace_error
    assert error is not None
    assert error.primitive == "add"
    module = jaxapi.stablehlo_text(jaxapi.parse_module(file.module.stablehlo))
    assert "stablehlo.sine" in module
    assert np.isfinite(np.asarray(h)).all()


def test_an_execution_that_the_recorder_stops_leaves_its_arrays_pending(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_RECORD", "nan")
    monkeypatch.setenv("SNAPRT_RECORD_STOP", "1")
    with snaprt.lazy():
        x = jnp.log(jnp.full(SHAPE, -1.0))
        with pytest.raises(snaprt.ExecutionError, match="stopped"):
            snaprt.mark_step()
        assert list(folder.glob("*.outputs.snap"))  # what failed is written by then
        monkeypatch.delenv("SNAPRT_RECORD_STOP")
        assert np.isnan(float(x[0, 0]))


def test_inputs_have_the_names_of_the_jitted_function_that_takes_them(folder: Path) -> None:
    @jax.jit
    def update_of(params: Params, _state: Params, x: jax.Array) -> Params:
        return {"w": params["w"] - _state["w.m"] * x.mean()}

    w, m, x, other = (jnp.full((3,), value) for value in (1.0, 2.0, 3.0, 4.0))
    with snaprt.record("all", folder), snaprt.lazy():
        result = update_of({"w": w}, {"w.m": m}, jnp.sin(x) + other)
        snaprt.mark_step()
        del result
    assert process_recorder().flush(60)
    (path,) = folder.glob("*.inputs.snap")
    file = open_snapshot(path)
    assert set(file.array_names) == {"params['w']", "w.m", "arg0", "arg1"}
    np.testing.assert_array_equal(file.array("w.m"), np.full((3,), 2.0))
    assert replay(folder) == 0


@pytest.mark.parametrize("is_recorded", [True, False])
def test_what_differs_in_each_iteration_is_recorded_as_a_program_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_recorded: bool
) -> None:
    monkeypatch.setenv("SNAPRT_RECORD", "all")
    if not is_recorded:
        monkeypatch.delenv("SNAPRT_DUMP_DIR")
        monkeypatch.delenv("SNAPRT_RECORD")

    def loop() -> float:
        with snaprt.lazy():
            x = jnp.full(8, 0.5)
            for power in range(2, 12):
                y = jax.lax.integer_pow(x, power)
                for _ in range(6):
                    y = jnp.sin(y) * 2 + 1
                x = x * 0.9 + y / 100
                float(x[0])
        return float(x[0])

    def immediately() -> int:
        return metrics.counter_value("eager::integer_pow") or 0

    before = immediately()
    with counting() as counts:
        value = in_thread(loop)
    process_recorder().flush()
    assert (immediately() == before) == is_recorded
    assert len(recorded(folder, "inputs")) == (counts.graphs if is_recorded else 0)
    assert value == pytest.approx(0.36840, abs=1e-4)
