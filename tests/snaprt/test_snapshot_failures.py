"""What is recorded when something fails: a NaN, an error of a device, a compiler or the program."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import SNAPRT, run_program
from recordings import recorded

import snaprt
from snaprt import lazy, mark_step, metrics
from snaprt.compile.lower import FLAG_NAME, flag_of, watched
from snaprt.errors import CompileError, ExecutionError
from snaprt.snapshot.format.read import open_snapshot
from snaprt.snapshot.recorder.pending import HeldExecution, about_to_donate, remember
from snaprt.snapshot.recorder.record import process_recorder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SNAPRT_DUMP_DIR", str(tmp_path / "dump"))
    return tmp_path / "dump"


# The flag


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64", "float8_e4m3fn"])
def test_the_flag_tells_nan_and_infinity_from_numbers(dtype: str) -> None:
    flag = jax.jit(lambda x, n: flag_of([n, x]))
    n = jnp.arange(3)
    fine = jnp.asarray([0.0, -3.5, 100.0]).astype(dtype)
    assert not flag(fine, n)
    assert flag(fine.at[1].set(jnp.nan), n)
    if "float8" not in dtype:  # this one has no infinity
        assert flag(fine.at[2].set(-jnp.inf), n)
        assert not flag(jnp.full(3, jnp.finfo(dtype).max, dtype), n)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64", "float8_e4m3fn"])
def test_one_nan_among_many_numbers_raises_the_flag(dtype: str) -> None:
    # Of large arrays, compilers make other code than of small ones.
    flag = jax.jit(lambda x: flag_of([x]))
    fine = jnp.linspace(-90, 90, 64 * 300).reshape(64, 300).astype(dtype)
    assert not flag(fine)
    for place in [(0, 0), (0, 123), (63, 299)]:
        assert flag(fine.at[place].set(jnp.nan))
    assert flag(fine.at[5].set(jnp.nan))


def test_results_that_cannot_hold_a_nan_are_not_flagged() -> None:
    results = [jnp.arange(3), jnp.zeros((0, 2)), jax.random.key(0), jnp.ones(2, bool)]
    assert not jax.jit(lambda: flag_of(results))()
    assert not jax.jit(lambda: flag_of([]))()


def test_a_watched_program_gives_the_same_results_bit_for_bit() -> None:
    def program(x: jax.Array, w: jax.Array) -> list[jax.Array]:
        h = jax.nn.gelu(x @ w) / jnp.sqrt(jnp.var(x) + 1e-6)
        return [h, jnp.exp(h) / jnp.sum(jnp.exp(h), -1, keepdims=True)]

    x, w = (jax.random.normal(jax.random.key(i), (64, 64)) for i in range(2))
    plain, with_flag = jax.jit(program)(x, w), jax.jit(watched(program))(x, w)
    assert len(with_flag) == 3
    for a, b in zip(plain, with_flag[:-1], strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))


# NaN


def test_the_execution_in_which_a_nan_appears_is_recorded_and_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_RECORD", "nan")
    with lazy():
        x = jnp.asarray([4.0, 9.0])
        for _ in range(6):
            x = jnp.log(x)  # 0.79, -0.23, then NaN, which then stays
            mark_step()
    assert np.isnan(np.asarray(x)).all()
    (inputs,) = recorded(folder)
    execution = inputs.manifest.execution
    assert (execution.reason, execution.error) == ("nan", "")
    assert np.isfinite(inputs.array("arg0")).all()
    (outputs,) = recorded(folder, "outputs")
    assert np.isnan(outputs.array("out0")).any()
    assert outputs.array(FLAG_NAME).tolist() is True
    assert execution.output_names == ("out0", FLAG_NAME)


def test_an_infinity_that_was_in_the_inputs_is_none_that_appears_but_a_nan_beside_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_RECORD", "nan")
    mask = jnp.asarray([0.0, -jnp.inf])
    with lazy():
        kept = mask + 1.0
        mark_step()
        assert np.isinf(np.asarray(kept)).any()
        assert recorded(folder) == []
        bad = mask - mask
        mark_step()
    assert np.isnan(np.asarray(bad)).any()
    assert len(recorded(folder)) == 1


def test_first_counts_the_nans_and_not_the_executions(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_RECORD", "nan, first=2, record=inputs")
    with lazy():
        for number in range(5):
            x = jnp.full(3, float(number)) / jnp.zeros(3) * jnp.cos(jnp.full(3, 1.0))
            mark_step()
            del x
        y = jnp.ones(3) + 1.0
        mark_step()
    del y
    by_graph: dict[str, int] = {}
    for one in recorded(folder):
        graph = one.manifest.execution.graph_id
        by_graph[graph] = by_graph.get(graph, 0) + 1
    assert by_graph
    assert max(by_graph.values()) <= 2
    assert recorded(folder, "outputs") == []
    assert (metrics.counter_value("SnapshotNaN") or 0) == 5


def test_watched_programs_are_cached_apart_from_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SNAPRT_CACHE_DIR", str(tmp_path / "cache"))
    x = jnp.arange(5.0)

    def run() -> float:
        with lazy():
            value = jnp.tanh(x) * 7.25
            mark_step()
        return float(value[4])

    plain = run()
    monkeypatch.setenv("SNAPRT_RECORD", "nan")
    compiled = metrics.counter_value("UncachedCompile")
    assert run() == plain
    assert metrics.counter_value("UncachedCompile") == (compiled or 0) + 1
    assert run() == plain
    monkeypatch.delenv("SNAPRT_RECORD")
    assert run() == plain
    assert metrics.counter_value("UncachedCompile") == (compiled or 0) + 1


def test_the_program_stops_where_it_is_asked_to_and_the_snapshot_is_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_RECORD", "nan; error")
    monkeypatch.setenv("SNAPRT_RECORD_STOP", "1")
    stopped = "stopped: execution 0 of lazy_graph"
    with pytest.raises(ExecutionError, match=stopped), lazy():  # noqa: PT012
        x = jnp.log(jnp.asarray([-1.0]))
        mark_step()
        assert process_recorder().flush(30)
        mark_step_of(x)
    assert process_recorder().flush(30)
    assert len(list(folder.glob("*.inputs.snap"))) == 1


def mark_step_of(x: jax.Array) -> jax.Array:
    y = x * 2.0
    mark_step()
    return y


# Errors


def broken(x: np.ndarray) -> np.ndarray:
    raise ValueError("the callback's own mistake")


def test_an_execution_that_fails_is_recorded_with_its_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_RECORD", "error")
    x = jnp.asarray([1.0, 2.0])
    with lazy(), pytest.raises(Exception, match="the callback's own mistake"):  # noqa: PT012
        y = jax.pure_callback(broken, jax.ShapeDtypeStruct((2,), x.dtype), x * 3.0)
        mark_step(wait=True)
        np.asarray(y)
    found = recorded(folder)
    assert len(found) == 1  # however many errors came of it
    execution = found[0].manifest.execution
    assert execution.reason == "error"
    assert "the callback's own mistake" in execution.error
    assert any(np.array_equal(found[0].array(name), x) for name in found[0].array_names)


def test_a_program_that_cannot_be_compiled_is_recorded_with_its_inputs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_RECORD", "error")
    x = jnp.asarray([5.0, 6.0])
    with lazy():
        call = jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct((2,), jnp.float32))
        y = call(x + 1.0)
        with pytest.raises(CompileError):
            mark_step()
        del y
    (inputs,) = recorded(folder)
    assert "no_such_target" in inputs.manifest.execution.error
    assert b"no_such_target" in inputs.module.hlo
    assert any(np.array_equal(inputs.array(name), x) for name in inputs.array_names)


def test_outputs_that_an_execution_out_of_memory_left_out_end_no_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_RECORD", "all; error")
    with lazy():
        slow = jax.lax.fori_loop(0, 100, lambda i, a: a @ a * 0.001, jnp.ones((300, 300)))
        mark_step()  # so that the next is dispatched before it can run
        filled = jax.lax.fori_loop(
            0, 2, lambda i, a: a + slow[0, 0], jnp.zeros((1 << 21, 1 << 20), jnp.float32)
        )
        with pytest.raises(Exception, match=r"(?i)out of memory"):  # noqa: PT012
            mark_step(wait=True)
            filled.block_until_ready()
    errors = [one.manifest.execution.error for one in recorded(folder)]
    assert any("ut of memory" in error for error in errors)
    assert not any("snapshot/recorder" in error for error in errors)


def test_an_exception_that_leaves_a_lazy_scope_records_what_ran_last(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_RECORD", "error")
    with pytest.raises(KeyError), lazy():  # noqa: PT012
        x = jnp.arange(3.0)
        for _ in range(4):
            x = x * 2.0
            mark_step()
        _ = {}["between two steps"]
    (inputs,) = recorded(folder)
    execution = inputs.manifest.execution
    assert execution.step >= 3
    assert "KeyError: 'between two steps'" in execution.error
    assert "test_snapshot_failures.py" in execution.error
    assert recorded(folder, "outputs") == []


def test_an_exception_that_nothing_asks_about_records_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPRT_RECORD", "nan")
    with pytest.raises(KeyError), lazy():  # noqa: PT012
        x = jnp.arange(3.0) * 2.0
        mark_step()
        _ = {}["x"]
    assert recorded(folder) == []
    del x


@dataclasses.dataclass(frozen=True)
class _AnyExecutable:
    name: str = "any"


def test_what_is_held_is_copied_when_another_program_donates_it() -> None:
    x, y = jnp.arange(4.0), jnp.arange(4.0) + 1
    held: Any = HeldExecution(_AnyExecutable(), None, None, (), [x, y], (), math.inf, 0, 0.0)  # type: ignore[arg-type]
    remember(held)
    about_to_donate([y], "device")
    assert held.inputs[0] is x
    assert held.inputs[1] is not y
    jax.jit(lambda a: a * 2, donate_argnums=0)(y).block_until_ready()
    assert y.is_deleted()
    assert held.inputs[1].tolist() == [1.0, 2.0, 3.0, 4.0]


# Whole processes


def run_script(
    folder: Path, script: str, *options: str, status: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(script))
    words = (*SNAPRT, "run", "--lazy", *options, "--")
    return run_program(words, path, folder=folder, status=status, **variables)


def test_a_program_that_ends_by_an_exception_leaves_a_snapshot_of_its_last_step(
    tmp_path: Path,
) -> None:
    script = """
        import jax.numpy as jnp, snaprt
        x = jnp.arange(3.0)
        for _ in range(3):
            x = x * 2.0
            snaprt.mark_step()
        raise RuntimeError("the program's own mistake")
    """
    done = run_script(tmp_path, script, "--when", "error", "--dump", "dump", status=1)
    assert done.stderr.count("the program's own mistake") == 2  # the line and the message, once
    (path,) = (tmp_path / "dump").glob("*.snap")
    execution = open_snapshot(path).manifest.execution
    assert (execution.step, execution.role) == (2, "inputs")
    assert "RuntimeError: the program's own mistake" in execution.error


def test_a_nan_of_the_last_step_is_recorded_before_the_program_ends(tmp_path: Path) -> None:
    script = """
        import jax.numpy as jnp, snaprt
        x = jnp.log(jnp.asarray([-1.0]))
        snaprt.mark_step()
    """
    done = run_script(tmp_path, script, "--when", "nan")
    assert str(tmp_path / "snaprt-dump") in done.stderr
    assert len(list((tmp_path / "snaprt-dump").glob("*.snap"))) == 2


def test_the_program_ends_only_when_no_thread_of_the_recorder_is_inside_jax(
    tmp_path: Path,
) -> None:
    script = """
        import time
        import jax, jax.numpy as jnp, numpy as np, snaprt
        from snaprt.snapshot.recorder import outcomes

        work = jax.jit(lambda x: jax.lax.fori_loop(0, 6, lambda i, y: y @ x, x))
        eye = np.eye(1500, dtype=np.float32)
        compiled = work.lower(eye).compile()
        judge = outcomes.Outcomes.ended

        def judge_slowly(*arguments):
            compiled(eye).block_until_ready()
            judge(*arguments)
            print("judged")

        outcomes.Outcomes.ended = judge_slowly
        x = jnp.ones(3) + 1
        snaprt.mark_step()
        time.sleep(0.15)  # a thread looks at it by then
    """
    done = run_script(tmp_path, script, "--when", "nan", SNAPRT_CACHE="0")
    assert done.stdout == "judged\n"


def test_the_public_name_of_the_flight_recorder_is_there() -> None:
    assert snaprt.dump_now() == []
