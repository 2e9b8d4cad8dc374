"""The modes that trade speed for knowing which operation, and which line, does what."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import counting
from programs import run_program

import snaprt
from snaprt import jaxapi, metrics
from snaprt.runtime.events import Subscriber, subscribe, unsubscribe
from snaprt.runtime.step import thread_trace
from snaprt.snapshot.format.read import open_snapshot
from snaprt.snapshot.recorder.record import process_recorder

X = jnp.linspace(-1.0, 2.0, 12, dtype=jnp.float32).reshape(3, 4)


@pytest.fixture(autouse=True)
def as_the_environment_says():
    yield
    snaprt.eager_mode(None)


class Runs(Subscriber):
    """Keeps what ran."""

    def __init__(self):
        self.runs = []

    def ran(self, run, results):
        self.runs.append(run)


@pytest.fixture
def watched():
    watcher = Runs()
    subscribe(watcher)
    yield watcher.runs
    unsubscribe(watcher)


def first(x):
    return jnp.tanh(x * 3.5)


def second(x):
    return jnp.tanh(x * 3.5)


def model(x):
    return (jnp.tanh(x @ x.T) * 2).sum()


def boom(x):
    raise ValueError("boom")


def calls_back(x):
    y = x + 1
    return jax.pure_callback(boom, jax.ShapeDtypeStruct(X.shape, X.dtype), y) * 2


def divides(x):
    return (x - x) / (x - x) * 0


def _functions_of(run):
    return {jaxapi.frames_of_operation(node.source)[-1].function for node in run.program.nodes}


@pytest.mark.usefixtures("no_persistent_cache")
def test_with_ir_debug_a_step_that_repeats_elsewhere_has_the_places_of_now(monkeypatch, watched):
    monkeypatch.setenv("XLA_IR_DEBUG", "1")
    with snaprt.lazy(), counting() as counts:
        for step in (first, second, first, second):
            kept = step(X)
            snaprt.mark_step()
            del kept
    assert [_functions_of(run) for run in watched] == [{"first"}, {"second"}] * 2
    assert counts.compiled == 1


@pytest.mark.usefixtures("no_persistent_cache")
def test_with_ir_debug_a_step_that_repeats_in_its_place_adds_nothing_to_the_paths(monkeypatch):
    monkeypatch.setenv("XLA_IR_DEBUG", "1")
    with snaprt.lazy():
        points = []
        for _ in range(4):
            kept = [first(X), model(X)]
            snaprt.mark_step()
            points.append(thread_trace()._points)
            del kept
    assert points[-1] == points[-2]


def test_with_ir_debug_an_error_lists_the_operations_with_their_lines(monkeypatch):
    monkeypatch.setenv("XLA_IR_DEBUG", "1")
    with snaprt.lazy():
        kept = calls_back(X)
        with pytest.raises(snaprt.ExecutionError) as caught:
            kept.block_until_ready()
    line = boom.__code__.co_firstlineno + 6
    assert f"  pure_callback at {__file__}:{line} (calls_back), from " in str(caught.value)


@pytest.mark.parametrize("fails", [calls_back, lambda x: jnp.nanargmin(x * 1j)])
def test_without_ir_debug_an_error_says_how_its_operations_are_listed(fails):
    with snaprt.lazy():
        kept = fails(X)
        with pytest.raises((snaprt.ExecutionError, snaprt.CompileError)) as caught:
            kept.block_until_ready()
    assert "XLA_IR_DEBUG=1 to list its operations" in caught.value.hint


def test_without_modes_what_repeats_is_followed_again(monkeypatch):
    with snaprt.lazy():
        for name in ("XLA_IR_DEBUG", "XLA_USE_EAGER_DEBUG_MODE", "SYNC_TENSORS_OPBYOP"):
            monkeypatch.setenv(name, "1")
            snaprt.mark_step()
            assert thread_trace().claimed == 1
            monkeypatch.delenv(name)
            snaprt.mark_step()
            assert thread_trace().claimed == 0


def test_with_hlo_debug_a_program_from_the_cache_has_the_places_of_now(monkeypatch, watched):
    monkeypatch.setenv("XLA_HLO_DEBUG", "1")
    with snaprt.lazy(), counting() as counts:
        for step in (first, second, second):
            kept = step(X)
            snaprt.mark_step()
            del kept
    hlo = [jaxapi.hlo_text(run.executable.artifacts().hlo) for run in watched]
    assert ['"first"' in text for text in hlo] == [True, False, False]
    assert ['"second"' in text for text in hlo] == [False, True, True]
    assert all('op_name="jit(lazy_graph)/tanh" stack_frame_id=' in text for text in hlo)
    assert counts.compiled <= 1


def test_with_hlo_debug_snapshots_have_the_stack_however_deep_it_is(monkeypatch, tmp_path):
    def deep(x, depth):
        return deep(x, depth - 1) if depth else x * 7.25

    monkeypatch.setenv("XLA_HLO_DEBUG", "1")
    monkeypatch.setenv("SNAPRT_DUMP_DIR", str(tmp_path))
    with snaprt.lazy():
        kept = deep(X, 150)
        snaprt.mark_step()
    del kept
    assert process_recorder().flush(30)
    (path,) = tmp_path.glob("**/*.inputs.snap")
    module = jaxapi.parse_module(open_snapshot(path).module.stablehlo)
    text = module.operation.get_asm(enable_debug_info=True)
    assert text.count("callsite(") >= 150


def scalars(x):
    positive = x + 1.5
    return [x[1:], (x, x / 3.7), positive**0.3, jnp.power(positive, 2.5), x * 0.1 + 0.1]


@pytest.mark.parametrize("program", [model, jax.grad(model), first, scalars])
@pytest.mark.usefixtures("no_persistent_cache")
def test_operation_by_operation_results_are_those_of_eager_jax(monkeypatch, program):
    expected = jax.tree.leaves(program(X))
    monkeypatch.setenv("SYNC_TENSORS_OPBYOP", "1")
    monkeypatch.setenv("GET_TENSORS_OPBYOP", "1")
    with snaprt.lazy():
        at_step = jax.tree.leaves(program(X))
        snaprt.mark_step()
        at_read = jax.tree.leaves(program(X))
        for found in (at_step, at_read):
            for ours, eager in zip(found, expected, strict=True):
                np.testing.assert_array_equal(ours, eager)


@pytest.mark.usefixtures("no_persistent_cache")
def test_each_operation_is_a_program_of_its_own_and_counted(monkeypatch, watched):
    monkeypatch.setenv("SYNC_TENSORS_OPBYOP", "1")
    with snaprt.lazy():
        at_step = (X * 2 + 1) * 3
        snaprt.mark_step()
        at_read = ((X - 1) / 2).block_until_ready()
    assert [len(run.program.nodes) for run in watched] == [1, 1, 1, 2]
    assert metrics.counter_value("SyncTensorsOpByOp") == 3
    monkeypatch.setenv("GET_TENSORS_OPBYOP", "1")
    with snaprt.lazy():
        ((at_step - 1) / 2 + at_read).block_until_ready()
    assert metrics.counter_value("GetTensorsOpByOp") == 3


@pytest.mark.usefixtures("no_persistent_cache")
def test_operation_by_operation_lets_go_of_results_that_nothing_needs_any_more(monkeypatch):
    class MostAtOnce(Subscriber):
        most = 0

        def ran(self, run, results):
            alive = sum(array.shape == (3, 5, 7) for array in jax.live_arrays())
            self.most = max(self.most, alive)

    monkeypatch.setenv("SYNC_TENSORS_OPBYOP", "1")
    value = jnp.ones((3, 5, 7))
    watcher = MostAtOnce()
    subscribe(watcher)
    with snaprt.lazy():
        for _ in range(20):
            value = value * 2
        snaprt.mark_step()
    unsubscribe(watcher)
    assert watcher.most <= 4
    assert float(value[0, 0, 0]) == 2.0**20


@pytest.mark.parametrize("name", ["SYNC_TENSORS_OPBYOP", "XLA_USE_EAGER_DEBUG_MODE"])
def test_an_error_names_the_very_operation_and_the_line(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    line = boom.__code__.co_firstlineno + 6
    with snaprt.lazy():
        fine = X * 2
        with pytest.raises(snaprt.ExecutionError) as caught:
            [calls_back(X), snaprt.mark_step()]
    said = f"pure_callback at {__file__}:{line} (calls_back), from "
    assert caught.value.message.startswith(said)
    np.testing.assert_array_equal(fine, X * 2)


@pytest.mark.parametrize("name", ["SYNC_TENSORS_OPBYOP", "XLA_USE_EAGER_DEBUG_MODE"])
def test_debug_nans_stops_at_the_operation_that_makes_one(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    line = divides.__code__.co_firstlineno + 1
    with jax.debug_nans(True), snaprt.lazy(), pytest.raises(FloatingPointError) as caught:
        [divides(X), snaprt.mark_step()]
    said = f"invalid value (nan) in a result of jit(true_divide) at {__file__}:{line} (divides), "
    assert isinstance(caught.value, snaprt.ExecutionError)
    assert caught.value.message.startswith(said)


def test_debug_nans_looks_at_the_results_of_whole_graphs_too():
    for _ in range(2):
        with snaprt.lazy():
            kept = divides(X)
            snaprt.mark_step()
            assert np.isnan(np.asarray(kept)).all()
            kept = divides(X)
            with jax.debug_nans(True), pytest.raises(FloatingPointError, match="graph lazy_graph"):
                snaprt.mark_step()
            del kept


@pytest.mark.parametrize("setting", ["jax_debug_nans", "jax_debug_infs"])
@pytest.mark.parametrize("how", ["leaves", "turns off", "turns off inside"])
def test_what_was_recorded_while_nans_were_looked_for_is_looked_at(setting, how):
    check = getattr(jax, setting.removeprefix("jax_"))
    numerator = X * 0 if setting == "jax_debug_nans" else X
    with snaprt.lazy():
        if how == "leaves":
            with check(True):
                kept = numerator / (X * 0)
        elif how == "turns off":
            jax.config.update(setting, True)
            kept = numerator / (X * 0)
            jax.config.update(setting, False)
        else:
            with check(True):
                kept = numerator / (X * 0)
                with check(False):
                    unchecked = numerator / (X * 0) + 1
                    snaprt.mark_step()
                assert not np.isfinite(np.asarray(unchecked)).all()
        after = numerator / (X * 0)
        with pytest.raises(FloatingPointError, match="graph lazy_graph"):
            np.asarray(kept)
        assert not np.isfinite(np.asarray(after)).all()


@pytest.mark.parametrize("name", ["XLA_USE_EAGER_DEBUG_MODE", "NEURON_USE_EAGER_DEBUG_MODE"])
@pytest.mark.usefixtures("no_persistent_cache")
def test_in_eager_mode_each_operation_runs_at_once(monkeypatch, watched, name):
    expected = jax.grad(model)(X)
    monkeypatch.setenv(name, "1")
    with snaprt.lazy():
        gradient = jax.grad(model)(X)
        ran = len(watched)
        assert gradient._value is not None
        np.testing.assert_array_equal(gradient, expected)
        assert snaprt.is_eager_mode()
        snaprt.mark_step()
    assert ran == len(watched) == metrics.metric_data("EagerOpExecuteTime")[0] > 5
    assert {len(run.program.nodes) for run in watched} == {1}
    assert {run.cut.cause for run in watched} == {"eager"}


@pytest.mark.usefixtures("no_persistent_cache")
def test_eager_mode_can_be_turned_on_and_off_by_the_program(monkeypatch):
    monkeypatch.setenv("XLA_USE_EAGER_DEBUG_MODE", "1")
    with snaprt.lazy():
        snaprt.eager_mode(False)
        pending = X * 2
        assert pending._value is None
        snaprt.eager_mode()
        at_once = pending + 1
        assert at_once._value is not None
        snaprt.eager_mode(False)
        assert (at_once * 3)._value is None
    np.testing.assert_array_equal(at_once, X * 2 + 1)
    snaprt.eager_mode(None)
    assert snaprt.is_eager_mode()


@pytest.mark.usefixtures("no_persistent_cache")
def test_in_eager_mode_another_scalar_needs_no_other_program(monkeypatch):
    monkeypatch.setenv("XLA_USE_EAGER_DEBUG_MODE", "1")
    ones = jnp.ones((2, 7))
    with snaprt.lazy(), counting() as counts:
        for scale in (0.25, 0.5, 0.75):
            np.testing.assert_array_equal(ones * scale, np.full((2, 7), scale, np.float32))
    assert counts.compiled == 1


EAGER = """
import json, jax, jax.numpy as jnp, snaprt
from snaprt import metrics

with snaprt.lazy():
    x = jnp.arange(12.0).reshape(3, 4) * 1
    for _ in range(2):
        x = x - 0.1 * jax.grad(lambda x: (jnp.tanh(x @ x.T) * 2).sum())(x)
        snaprt.mark_step()
names = ("UncachedCompile", "PersistentCacheMiss", "PersistentCacheHit")
print(json.dumps([float(x.sum()), *[metrics.counter_value(name) or 0 for name in names]]))
"""


def test_in_eager_mode_a_second_process_compiles_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("SNAPRT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("NEURON_USE_EAGER_DEBUG_MODE", "1")
    first_time, again = [json.loads(run_program(EAGER).stdout) for _ in range(2)]
    assert first_time[0] == again[0]
    assert first_time[1] > 5
    assert again[1:3] == [0, 0]
