"""The recorder: what is written of an execution, when, and what happens where it cannot be."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import finish, run_program, start_program

from snaprt import jaxapi, metrics
from snaprt.compile.executable import Executable, run
from snaprt.host.memory import available_bytes
from snaprt.processes import run_mark
from snaprt.snapshot.format import schema
from snaprt.snapshot.format.read import open_snapshot
from snaprt.snapshot.recorder import plan
from snaprt.snapshot.recorder.record import Recorder
from snaprt.snapshot.recorder.writer import MEMORY_SHARE, QUEUE_BYTES, SnapshotWriter

numbers = itertools.count(1000)


def compiled(function: Callable[..., object], *arguments: object) -> Executable:
    lowered = jax.jit(function, keep_unused=True).lower(*arguments)
    results = len(jax.tree.leaves(lowered.out_info))
    call = lowered.compile()
    return Executable(
        name="train_step",
        graph_id="0123456789abcdef",
        number=next(numbers),
        devices=jaxapi.devices_of_lowered(lowered),
        input_names=tuple(f"arg{i}" for i in range(len(arguments))),
        output_names=tuple(f"out{i}" for i in range(results)),
        donated=(),
        from_cache=False,
        call=lambda *inputs: jax.tree.leaves(call(*inputs)),
        lowered=lambda: lowered,
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SNAPRT_DUMP_DIR", str(tmp_path / "dump"))
    return tmp_path / "dump"


@pytest.fixture(autouse=True)
def default_callback() -> Iterator[None]:
    yield
    plan.register_hlo_snapshot_callback(None)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder(step=lambda: 12)
    yield recorder
    assert recorder.flush(30)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def double(x: jax.Array) -> jax.Array:
    return jnp.sin(x) * 2


def test_an_execution_is_recorded_with_its_inputs_outputs_and_module(
    folder: Path, recorder: Recorder
) -> None:
    x = jnp.arange(12, dtype=jnp.bfloat16).reshape(3, 4)
    executable = compiled(double, x)
    (result,) = run(executable, [x], recorder)
    assert recorder.flush(30)
    stem = f"train_step.0123456789abcdef-process000000-run{run_mark()}"
    stem += f"-executable{executable.number:06d}-device000000-execution000000"
    assert names(folder) == [f"{stem}.inputs.snap", f"{stem}.outputs.snap"]
    inputs = open_snapshot(folder / f"{stem}.inputs.snap")
    outputs = open_snapshot(folder / f"{stem}.outputs.snap")
    assert (inputs.role, outputs.role) == ("inputs", "outputs")
    assert np.array_equal(inputs.array("arg0"), np.asarray(x))
    assert np.array_equal(outputs.array("out0"), np.asarray(result))
    execution = inputs.manifest.execution
    assert execution.step == 12
    assert execution.versions["jax"] == jax.__version__
    assert execution.environment["SNAPRT_DUMP_DIR"] == str(folder)
    assert any("test_snapshot_recorder.py:" in where for where in execution.source_locations)
    artifacts = executable.artifacts()
    assert inputs.module.stablehlo == outputs.module.stablehlo == artifacts.stablehlo
    assert inputs.module.hlo == artifacts.hlo
    assert inputs.module.compile_options == artifacts.compile_options
    assert metrics.counter_value("SnapshotsWritten") == 2


def test_prng_keys_weak_types_and_empty_arrays_are_recorded_as_what_they_are(
    folder: Path, recorder: Recorder
) -> None:
    keys = jax.random.split(jax.random.key(3, impl="rbg"), 2)
    weak = jnp.asarray(2.5)
    inputs = [keys, weak, jnp.zeros((0, 3), jnp.int4)]
    executable = compiled(lambda keys, weak, empty: jax.random.normal(keys[0]) * weak, *inputs)
    run(executable, inputs, recorder)
    assert recorder.flush(30)
    snapshot = open_snapshot(folder / next(n for n in names(folder) if "inputs" in n))
    record = snapshot.record("arg0")
    assert (record.dtype, record.shape, record.key_impl) == ("key<rbg>", (2,), "rbg")
    again = jax.random.wrap_key_data(jnp.asarray(snapshot.array("arg0")), impl=record.key_impl)
    assert jnp.array_equal(jax.random.key_data(again), jax.random.key_data(keys))
    assert snapshot.record("arg1").weak_type
    assert snapshot.array("arg2").shape == (0, 3)


@pytest.mark.parametrize(
    ("answer", "written"),
    [
        ("", []),
        ("inputs", ["inputs"]),
        ("outputs", ["outputs"]),
        ("inputs outputs", ["inputs", "outputs"]),
        (" outputs  inputs ", ["inputs", "outputs"]),
    ],
)
def test_the_callback_says_what_is_written(
    answer: str, written: list[str], folder: Path, recorder: Recorder
) -> None:
    asked: list[tuple[object, ...]] = []

    def callback(name: str, addressable_device_index: int, execution_count: int) -> str:
        asked.append((name, addressable_device_index, execution_count))
        return answer if execution_count == 1 else ""

    plan.register_hlo_snapshot_callback(callback)
    x = jnp.ones(3)
    executable = compiled(double, x)
    for _ in range(3):
        run(executable, [x], recorder)
    assert recorder.flush(30)
    assert asked == [("train_step", 0, 0), ("train_step", 0, 1), ("train_step", 0, 2)]
    assert [name.split(".")[-2] for name in names(folder)] == written
    assert all("execution000001" in name for name in names(folder))


def test_registering_a_callback_returns_the_one_before_and_none_restores_the_default() -> None:
    def mine(name: str, device: int, count: int) -> str:
        return ""

    default = plan.register_hlo_snapshot_callback(mine)
    assert default("g", 0, 0) == "inputs outputs"
    assert plan.register_hlo_snapshot_callback(None) is mine
    assert plan.register_hlo_snapshot_callback(None) is default


def failing(name: str, device: int, count: int) -> str:
    raise RuntimeError("the callback's own mistake")


@pytest.mark.parametrize(
    ("callback", "said"),
    [
        (failing, "the callback's own mistake"),
        (lambda name, device, count: "everything", "'everything'"),
        (lambda name, device, count: None, "None"),
        (lambda name, device, count: ["inputs"], r"\['inputs'\]"),
        (lambda: "inputs", "TypeError"),
    ],
)
def test_a_bad_callback_is_reported_once_and_the_program_goes_on(
    callback: plan.Callback,
    said: str,
    folder: Path,
    recorder: Recorder,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan.register_hlo_snapshot_callback(callback)
    x = jnp.ones(3)
    executable = compiled(double, x)
    with caplog.at_level(logging.ERROR, "snaprt.snapshot"):
        results = [run(executable, [x], recorder)[0] for _ in range(3)]
    assert all(jnp.array_equal(result, double(x)) for result in results)
    (record,) = caplog.records
    assert record.name == "snaprt.snapshot"
    assert __import__("re").search(said, caplog.text)
    assert ("Traceback" in caplog.text) == (callback is failing or said == "TypeError")
    assert metrics.counter_value("SnapshotCallbackError") == 3
    assert names(folder) == []


def test_with_recording_off_or_skipped_nothing_is_kept_or_written(
    folder: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = jnp.ones(3)
    executable = compiled(double, x)
    plan.register_hlo_snapshot_callback(lambda *_: "")
    assert recorder.before(executable, [x]) is None
    monkeypatch.delenv("SNAPRT_DUMP_DIR")
    plan.register_hlo_snapshot_callback(None)
    references = sys.getrefcount(x)
    assert recorder.before(executable, [x]) is None
    assert sys.getrefcount(x) == references
    assert recorder.flush(0)
    assert names(folder) == []


def test_recording_off_calls_next_to_nothing(recorder: Recorder) -> None:
    x = jnp.ones(3)
    executable = compiled(double, x)
    recorder.before(executable, [x])
    called: list[str] = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name + " " + event))
    try:
        recorder.before(executable, [x])
    finally:
        sys.setprofile(None)
    functions = [name for name in called if name.endswith(" call")]
    assert functions == ["before call", "current_plan call", "now call"]


def test_the_script_switches_recording_on_and_off_between_executions(
    tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = jnp.ones(3)
    executable = compiled(double, x)
    run(executable, [x], recorder)
    flags = f"--xla_dump_hlo_snapshots --xla_dump_to={tmp_path}/dump"
    monkeypatch.setenv("XLA_FLAGS", flags)
    run(executable, [x], recorder)
    monkeypatch.setenv("XLA_FLAGS", flags.replace("snapshots ", "snapshots=false "))
    run(executable, [x], recorder)
    assert recorder.flush(30)
    assert len(names(tmp_path / "dump")) == 2
    assert all("execution000001" in name for name in names(tmp_path / "dump"))


def test_flags_that_say_not_where_to_record_are_reported_once(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    x = jnp.ones(3)
    executable = compiled(double, x)
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_hlo_snapshots")
    with caplog.at_level(logging.ERROR, "snaprt.snapshot"):
        run(executable, [x], recorder)
        run(executable, [x], recorder)
    (record,) = caplog.records
    assert "add --xla_dump_to=DIR to XLA_FLAGS" in record.getMessage()


def test_what_cannot_be_written_is_logged_once_for_each_cause_and_counted(
    tmp_path: Path,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SNAPRT_DUMP_DIR", str(tmp_path / "file" / "dump"))
    x = jnp.ones(3)
    executable = compiled(double, x)
    with caplog.at_level(logging.ERROR, "snaprt.snapshot"):
        run(executable, [x], recorder)
        run(executable, [x], recorder)
        assert recorder.flush(30)
        monkeypatch.setenv("SNAPRT_DUMP_DIR", str(tmp_path / ("long" * 100)))
        run(executable, [x], recorder)
        assert recorder.flush(30)
        recorder.writer.sum_up()
    unwritable, too_long, sum_of_all = (record.getMessage() for record in caplog.records)
    assert str(tmp_path / "file" / "dump") in unwritable
    assert "File name too long" in too_long
    assert metrics.counter_value("SnapshotWriteError") == 6
    assert sum_of_all.startswith("6 snapshots were lost")


def test_a_device_that_no_program_runs_on_is_said_once(
    folder: Path,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("SNAPRT_RECORD", "execution=1-, device=99")
    x = jnp.ones(3)
    executable = compiled(double, x)
    for _ in range(3):
        run(executable, [x], recorder)
    assert recorder.flush(30)
    (record,) = caplog.records
    assert "nothing of train_step is recorded for 'execution=1-, device=99'" in record.getMessage()
    assert names(folder) == []


def test_donated_inputs_are_copied_before_they_are_gone(folder: Path, recorder: Recorder) -> None:
    x = jnp.arange(1000.0)
    lowered = jax.jit(lambda x: x + 1, donate_argnums=0).lower(x)
    call = lowered.compile()
    executable = dataclasses.replace(
        compiled(lambda x: x + 1, x), donated=(0,), call=lambda x: [call(x)]
    )
    run(executable, [x], recorder)
    assert x.is_deleted()
    assert recorder.flush(30)
    snapshot = open_snapshot(folder / next(n for n in names(folder) if "inputs" in n))
    assert np.array_equal(snapshot.array("arg0"), np.arange(1000.0))
    assert snapshot.manifest.execution.donated == (0,)


def submit(
    writer: SnapshotWriter, path: Path, contents: Callable[[], schema.Contents], nbytes: int
) -> None:
    writer.call(lambda: writer.write(path, contents), nbytes)


def slow_contents(release: threading.Event) -> Callable[[], schema.Contents]:
    def contents() -> schema.Contents:
        release.wait(30)
        raise OSError(5, "not today")

    return contents


def test_a_full_queue_makes_the_program_wait_and_counts_it(tmp_path: Path) -> None:
    writer = SnapshotWriter(queue_bytes=100)
    release = threading.Event()
    submit(writer, tmp_path / "a.snap", slow_contents(release), 1000)  # alone, whatever its size
    assert not writer.flush(0.05)
    timer = threading.Timer(0.2, release.set)
    timer.start()
    started = time.perf_counter()
    submit(writer, tmp_path / "b.snap", slow_contents(release), 10)
    assert time.perf_counter() - started > 0.1
    assert writer.flush(30)
    waits, nanoseconds, _ = metrics.metric_data("SnapshotQueueWait") or (0, 0, [])
    assert waits == 1
    assert nanoseconds > 1e8


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """What an accelerator says of its memory."""

    statistics: dict[str, int] | None

    def memory_stats(self) -> dict[str, int] | None:
        return self.statistics


def queued_at_once(writer: SnapshotWriter, path: Path, nbytes: int, device: Any = None) -> bool:
    """Return whether the program waits for no other snapshot of ``nbytes`` that it has queued."""
    release = threading.Event()
    submit(writer, path, slow_contents(release), nbytes)
    timer = threading.Timer(0.5, release.set)
    timer.start()
    writer.call(lambda: writer.write(path, slow_contents(release)), nbytes, device)
    is_at_once = not release.is_set()
    release.set()
    assert writer.flush(30)
    return is_at_once


def test_more_waits_where_memory_is_free_unless_a_limit_is_set(tmp_path: Path) -> None:
    share = int(MEMORY_SHARE * available_bytes())
    if share < QUEUE_BYTES:
        pytest.skip("this machine has little memory")
    path = tmp_path / "a.snap"
    assert queued_at_once(SnapshotWriter(), path, share * 2 // 5)  # both: four fifths of the share
    assert not queued_at_once(SnapshotWriter(), path, share)
    assert not queued_at_once(SnapshotWriter(queue_bytes=QUEUE_BYTES), path, share * 2 // 5)
    assert not queued_at_once(SnapshotWriter(queue_bytes=0), path, 1)
    small = {"bytes_limit": 4 * QUEUE_BYTES, "peak_bytes_in_use": QUEUE_BYTES, "bytes_in_use": 0}
    for statistics, is_at_once in (small, False), ({}, True), (None, True):
        device = Accelerator(statistics)
        assert queued_at_once(SnapshotWriter(), path, share * 2 // 5, device) is is_at_once


@pytest.mark.parametrize(("text", "limit"), [("5M", 5 << 20), ("0", 0), ("", None)])
def test_the_environment_limits_what_waits(
    folder: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, text: str, limit: int | None
) -> None:
    monkeypatch.setenv("SNAPRT_RECORD_QUEUE_BYTES", text)
    x = jnp.ones(3)
    run(compiled(double, x), [x], recorder)
    assert recorder.writer.queue_bytes == limit


def test_the_queue_is_full_of_many_small_files_too(tmp_path: Path) -> None:
    writer = SnapshotWriter(queue_files=3)
    release = threading.Event()
    for number in range(4):  # one is being written
        submit(writer, tmp_path / f"{number}.snap", slow_contents(release), 1)
        time.sleep(0.05)
    threading.Timer(0.2, release.set).start()
    submit(writer, tmp_path / "last.snap", slow_contents(release), 1)
    assert release.is_set()
    assert writer.flush(30)


def test_what_there_is_no_time_for_when_the_process_is_told_to_end_is_counted_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = SnapshotWriter()
    release = threading.Event()
    for number in range(4):
        submit(writer, tmp_path / f"{number}.snap", slow_contents(release), 1)
    while len(writer._jobs) > 3:  # one is being written
        time.sleep(0.01)
    writer.end(0.1)
    assert metrics.counter_value("SnapshotDropped") == 3
    assert "dropping 3 snapshots that were waiting to be written" in caplog.text
    release.set()
    assert writer.flush(30)


def test_ctrl_c_at_the_end_of_a_process_drops_what_waits_to_be_written_and_says_so() -> None:
    program = """
    import signal, time
    from snaprt.snapshot.recorder.writer import SnapshotWriter

    writer = SnapshotWriter()
    for _ in range(40):
        writer.call(lambda: time.sleep(1))
    while len(writer._jobs) > 39:
        time.sleep(0.01)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    """
    done = run_program(program, timeout=30, fork=False)
    assert "dropping 39 snapshots that were waiting to be written: Ctrl-C" in done.stderr
    assert "Traceback" not in done.stderr


# Whole processes

PRELUDE = """
import os, sys, time
from pathlib import Path
import numpy as np, jax, jax.numpy as jnp
from snaprt import jaxapi, metrics
from snaprt.compile.executable import Executable
from snaprt.compile.executable import run
from snaprt.snapshot.recorder.record import Recorder

def compiled(function, *arguments):
    lowered = jax.jit(function).lower(*arguments)
    call = lowered.compile()
    return Executable(
        name="step", graph_id="0" * 16, number=3, devices=jaxapi.devices_of_lowered(lowered),
        input_names=("x",), output_names=("y",), donated=(), from_cache=False,
        call=lambda x: [call(x)], lowered=lambda: lowered,
    )
recorder = Recorder()
"""


def start(program: str, folder: Path, **variables: str) -> subprocess.Popen[str]:
    program = PRELUDE + textwrap.dedent(program)
    return start_program(program, SNAPRT_DUMP_DIR=folder, **variables)


def run_alone(program: str, folder: Path, *, status: int = 0, **variables: str) -> tuple[str, str]:
    done = finish(start(program, folder, **variables), status=status)
    return done.stdout, done.stderr


def test_each_device_has_a_file_with_its_own_shards(tmp_path: Path) -> None:
    program = """
        mesh = jax.make_mesh((4,), ("d",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
        x = jax.device_put(jnp.arange(16.0).reshape(8, 2), sharding)
        executable = compiled(lambda x: x.sum(1), x)
        run(executable, [x], recorder)
    """
    flags = "--xla_force_host_platform_device_count=4"
    assert run_alone(program, tmp_path, XLA_FLAGS=flags) == ("", "")
    files = sorted(tmp_path.glob("*.inputs.snap"))
    assert [f"device{i:06d}" in path.name for i, path in enumerate(files)] == [True] * 4
    snapshots = [open_snapshot(path) for path in files]
    parts = [snapshot.array("x") for snapshot in snapshots]
    assert np.array_equal(np.concatenate(parts), np.arange(16.0).reshape(8, 2))
    assert [snapshot.manifest.execution.device.id for snapshot in snapshots] == [0, 1, 2, 3]
    record = snapshots[1].record("x")
    assert (record.shape, record.global_shape) == ((2, 2), (8, 2))
    assert record.sharding.startswith("NamedSharding(mesh=Mesh('d': 4")
    assert len(snapshots[1].manifest.execution.devices) == 4


def test_what_is_queued_is_written_before_the_process_ends(tmp_path: Path) -> None:
    program = """
        x = jnp.asarray(np.random.default_rng(0).normal(size=5_000_000).astype(np.float32))
        executable = compiled(lambda x: x * 2, x)
        for _ in range(3):
            run(executable, [x], recorder)
        sys.exit(7)
    """
    assert run_alone(program, tmp_path, status=7) == ("", "")
    assert len(list(tmp_path.iterdir())) == 6
    for path in tmp_path.iterdir():
        snapshot = open_snapshot(path)
        assert snapshot.array(snapshot.array_names[0]).shape == (5_000_000,)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_that_ends_by_os_exit_has_written_what_it_waited_for(tmp_path: Path) -> None:
    program = """
    import os, sys
    import jax, numpy as np, snaprt

    child = os.fork()
    if child == 0:
        with snaprt.record(folder=sys.argv[1]):
            jax.jit(lambda x: x + 1)(np.ones(400_000, np.float32))
        snaprt.dump_now()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    """
    run_program(program, tmp_path)
    assert len(list(tmp_path.glob("*.snap"))) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_writes_its_own_snapshots_and_not_its_parents(tmp_path: Path) -> None:
    program = """
        def late():
            time.sleep(0.5)
            raise OSError(5, "parent")
        def submit(name):
            path = Path(os.environ["SNAPRT_DUMP_DIR"], name)
            recorder.writer.call(lambda: recorder.writer.write(path, late), 1)
        submit("a.snap")
        child = os.fork()
        if child == 0:
            assert recorder.flush(0)
            submit("b.snap")
            assert not recorder.flush(0) and recorder.flush(10)
            os._exit(0 if metrics.counter_value("SnapshotWriteError") == 1 else 3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert recorder.flush(10)
    """
    run_alone(program, tmp_path)


@pytest.mark.parametrize("dedupe", ["0", "1"])
def test_a_limit_on_the_size_of_files_is_an_error_with_file_and_bytes_and_the_program_goes_on(
    tmp_path: Path, dedupe: str
) -> None:
    program = f"""
        import os, resource
        os.environ["SNAPRT_RECORD_DEDUPE"] = "{dedupe}"
        x = jnp.asarray(np.random.default_rng(0).normal(size=500_000).astype(np.float32))
        executable = compiled(lambda x: x * 2, x)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
        for _ in range(3):
            (y,) = run(executable, [x], recorder)
        assert recorder.flush(30)
        small = jnp.ones(3)
        run(compiled(lambda x: x * 2, small), [small], recorder)
        recorder.flush(30)
        print(float(y[0] / x[0]), metrics.counter_value("SnapshotWriteError"))
    """
    output, errors = run_alone(program, tmp_path)
    assert output == "2.0 6\n"
    assert errors.count("cannot write") == 1
    assert str(tmp_path / "step.0000") in errors
    assert "it needs up to 2,00" in errors
    assert "raise the file size limit (ulimit -f)" in errors
    assert "are free there" not in errors
    assert [path.suffix for path in tmp_path.iterdir() if path.is_file()] == [".snap", ".snap"]


def test_a_killed_process_leaves_no_torn_file_and_the_next_run_cleans_up(tmp_path: Path) -> None:
    program = """
        x = jnp.asarray(np.random.default_rng(0).normal(size=3_000_000).astype(np.float32))
        executable = compiled(lambda x: x * 2, x)
        print("ready", flush=True)
        while True:
            run(executable, [x], recorder)
    """
    generator = random.Random(4)
    left_over = 0
    for attempt in range(4):
        folder = tmp_path / str(attempt % 2)
        process = start(program, folder)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(generator.uniform(0.05, 0.6))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
        for path in folder.glob("*.snap"):
            snapshot = open_snapshot(path)
            assert snapshot.array(snapshot.array_names[0]).shape == (3_000_000,)
            path.unlink()
        left_over += len(list(folder.glob(".*.tmp")))
        assert len(list(folder.glob(".*.tmp"))) <= 1
    assert left_over
