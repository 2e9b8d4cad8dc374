"""Arrays that several snapshots hold: stored once, shared by processes, read like any other."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from damage import flip_bit
from recordings import record

from snaprt import metrics
from snaprt.cli.main import main
from snaprt.errors import SnapshotError
from snaprt.snapshot.format import schema
from snaprt.snapshot.format.read import open_snapshot
from snaprt.snapshot.format.store import ArrayStore
from snaprt.snapshot.share import prune
from snaprt.snapshot.share.pack import pack


def model(weights: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ weights)


@pytest.fixture
def store(tmp_path: Path) -> ArrayStore:
    return ArrayStore(tmp_path)


WEIGHTS = jax.random.normal(jax.random.key(0), (64, 256), jnp.bfloat16)
X = jnp.ones((2, 64), jnp.bfloat16)


def arguments(scale: float = 1.0) -> dict[str, jax.Array]:
    return {"weights": WEIGHTS, "x": X * scale}


def stored(folder: Path) -> list[Path]:
    return prune.stored_arrays(folder)


def damage_array(path: Path, damage: str) -> None:
    size = path.stat().st_size
    flip_bit(path, size // 2) if damage == "flip" else os.truncate(path, size - 7)


def test_an_array_of_many_executions_is_stored_once_and_read_from_each(
    tmp_path: Path, store: ArrayStore
) -> None:
    paths = [
        record(tmp_path, model, arguments(i), store=store, execution_count=i) for i in range(4)
    ]
    assert len(stored(tmp_path)) == 1
    for number, path in enumerate(paths):
        file = open_snapshot(path)
        assert np.array_equal(file.array("weights"), WEIGHTS)
        assert np.array_equal(file.array("x"), X * number)
        assert (file.record("weights").in_store, file.record("x").in_store) == (True, False)


def test_the_name_of_a_stored_array_is_the_blake3_of_its_npy(
    tmp_path: Path, store: ArrayStore
) -> None:
    import blake3

    noise = jax.random.bits(jax.random.key(1), (8192,), jnp.uint32)
    record(tmp_path, lambda noise: noise[0], {"noise": noise}, store=store)
    (path,) = stored(tmp_path)
    assert path.name == f"{blake3.blake3(path.read_bytes()).hexdigest()}.npy"
    assert np.array_equal(np.load(path), noise)


def test_the_same_bytes_under_another_shape_are_another_array(
    tmp_path: Path, store: ArrayStore
) -> None:
    flat = jnp.zeros(4096)
    path = record(
        tmp_path, lambda a, b: a[0], {"flat": flat, "square": flat.reshape(64, 64)}, store=store
    )
    assert len(stored(tmp_path)) == 2
    assert open_snapshot(path).array("square").shape == (64, 64)


def test_an_immutable_array_seen_again_is_not_fetched_again(
    tmp_path: Path, store: ArrayStore
) -> None:
    for number in range(3):
        record(tmp_path, model, arguments(), store=store, execution_count=number)
    assert metrics.counter_value("SnapshotArrayNotFetched") == 2
    equal = {"weights": WEIGHTS + 0, "x": X}
    record(tmp_path, model, equal, store=store, execution_count=3)
    assert metrics.counter_value("SnapshotArrayNotFetched") == 2
    assert metrics.counter_value("SnapshotArrayReused") == 1
    assert len(stored(tmp_path)) == 1


def test_what_was_seen_is_forgotten_with_the_array(tmp_path: Path, store: ArrayStore) -> None:
    record(tmp_path, model, {"weights": WEIGHTS * 2, "x": X}, store=store)
    assert len(store._seen) == 0
    record(tmp_path, model, arguments(), store=store)
    assert len(store._seen) == 1


def test_an_array_whose_file_was_removed_is_stored_again(tmp_path: Path, store: ArrayStore) -> None:
    record(tmp_path, model, arguments(), store=store)
    stored(tmp_path)[0].unlink()
    path = record(tmp_path, model, arguments(), store=store)
    assert np.array_equal(open_snapshot(path).array("weights"), WEIGHTS)


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_array_is_written_anew_before_it_is_used_again(
    damage: str, tmp_path: Path, store: ArrayStore
) -> None:
    first = record(tmp_path, model, arguments(), store=store)
    (path,) = stored(tmp_path)
    damage_array(path, damage)
    second = record(tmp_path, model, arguments(), store=ArrayStore(tmp_path), execution_count=1)
    for snapshot in (first, second):
        assert np.array_equal(open_snapshot(snapshot).array("weights"), WEIGHTS)
    assert metrics.counter_value("SnapshotArrayMended") == 1
    assert stored(tmp_path) == [path]


def test_listing_and_packing_notice_a_damaged_stored_array(
    tmp_path: Path, store: ArrayStore, capfd: pytest.CaptureFixture[str]
) -> None:
    snapshot = record(tmp_path, model, arguments(), store=store)
    assert main(["ls", str(tmp_path)]) == 0
    (path,) = stored(tmp_path)
    flip_bit(path, -1)
    capfd.readouterr()
    assert main(["ls", str(tmp_path)]) == 1
    assert path.name in capfd.readouterr().err
    with pytest.raises(SnapshotError, match=path.name):
        pack([snapshot], tmp_path / "one.pack")


def test_a_missing_stored_array_is_an_error_that_names_it(
    tmp_path: Path, store: ArrayStore
) -> None:
    path = record(tmp_path, model, arguments(), store=store)
    (array,) = stored(tmp_path)
    array.unlink()
    with pytest.raises(SnapshotError, match="which does not exist") as raised:
        open_snapshot(path).array("weights")
    assert str(array) in raised.value.message
    assert "snaprt pack" in raised.value.hint
    assert np.array_equal(open_snapshot(path).array("x"), X)


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_stored_array_is_an_error_that_names_it(
    damage: str, tmp_path: Path, store: ArrayStore
) -> None:
    path = record(tmp_path, model, arguments(), store=store)
    (array,) = stored(tmp_path)
    damage_array(array, damage)
    with pytest.raises(SnapshotError, match="is damaged: array weights") as raised:
        open_snapshot(path).array("weights")
    assert str(array) in raised.value.message


def test_a_record_that_leads_out_of_the_store_is_refused(
    tmp_path: Path, store: ArrayStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = record(tmp_path, model, arguments(), store=store)
    file = open_snapshot(path)
    object.__setattr__(file.record("weights"), "member", "arrays/../../etc/passwd")
    with pytest.raises(SnapshotError, match="is damaged: it refers to an array in"):
        file.array("weights")


def test_only_files_that_need_it_ask_for_a_reader_of_format_2(
    tmp_path: Path, store: ArrayStore
) -> None:
    (tmp_path / "plain").mkdir()
    for path, version in (
        (record(tmp_path / "plain", model, arguments()), b"snaprt-snapshot 1."),
        (record(tmp_path, model, arguments(), store=store), b"snaprt-snapshot 2."),
    ):
        assert version in path.read_bytes()[-200:]


def test_the_setting_dedupes_what_the_recorder_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import snaprt
    from snaprt.snapshot.recorder.record import process_recorder

    monkeypatch.setenv("SNAPRT_DUMP_DIR", str(tmp_path))
    monkeypatch.setenv("SNAPRT_RECORD_DEDUPE", "on")
    with snaprt.lazy():
        x = X
        for _ in range(3):
            x = model(WEIGHTS, x)[:, :64]
            snaprt.mark_step(wait=True)
    assert process_recorder().flush(30)
    snapshots = list(tmp_path.glob("*.inputs.snap"))
    assert len(snapshots) == 3
    assert len(stored(tmp_path)) == 1
    for path in snapshots:
        file = open_snapshot(path)
        assert [np.array_equal(file.array(n), WEIGHTS) for n in file.array_names].count(True) == 1


PROCESS = """
import sys
from pathlib import Path
import numpy as np
from snaprt.snapshot.format import schema
from snaprt.snapshot.format.store import ArrayStore
store = ArrayStore(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for number in range(60):
    value = np.random.default_rng(number).integers(0, 9, 40_000)
    record = store.put(schema.ArrayContent("a", lambda: value, value.nbytes))
    print(record.member, record.stored_bytes, flush=True)
"""


def processes(folder: Path, count: int) -> list[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROCESS), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in range(count)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    return started


def test_processes_that_store_the_same_arrays_at_once_agree_and_leave_whole_files(
    tmp_path: Path,
) -> None:
    answers = [process.communicate("go\n")[0] for process in processes(tmp_path, 3)]
    assert answers[0] == answers[1] == answers[2]
    lines = [line.split() for line in answers[0].splitlines()]
    assert len(lines) == len(stored(tmp_path)) == 60
    assert all((tmp_path / member).stat().st_size == int(size) for member, size in lines)
    assert list((tmp_path / "arrays").glob(".*")) == []


def test_a_killed_process_leaves_no_half_array_and_its_leftovers_go(tmp_path: Path) -> None:
    (process,) = processes(tmp_path, 1)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    for _ in range(5):
        process.stdout.readline()
    process.kill()
    process.communicate()
    store = ArrayStore(tmp_path)
    assert list((tmp_path / "arrays").glob(".*")) == []
    for number in range(60):
        value = np.random.default_rng(number).integers(0, 9, 40_000)
        found = store.put(schema.ArrayContent("a", lambda value=value: value, value.nbytes))
        assert (tmp_path / found.member).stat().st_size == found.stored_bytes


def test_pruning_removes_what_no_snapshot_refers_to(tmp_path: Path, store: ArrayStore) -> None:
    kept = record(tmp_path, model, arguments(), store=store)
    gone = record(tmp_path, model, {"weights": WEIGHTS * 3, "x": X}, store=store, executable=1)
    gone.unlink()
    assert len(prune.orphans(tmp_path, age=0)) == 1
    assert len(stored(tmp_path)) == 2
    assert prune.prune(tmp_path) == []  # too young
    (removed,) = prune.prune(tmp_path, age=0)
    assert not removed.path.exists()
    assert np.array_equal(open_snapshot(kept).array("weights"), WEIGHTS)


def test_pruning_leaves_an_old_array_that_was_reused_just_now(
    tmp_path: Path, store: ArrayStore
) -> None:
    record(tmp_path, model, arguments(), store=store).unlink()
    (array,) = stored(tmp_path)
    os.utime(array, (time.time() - 7200,) * 2)
    assert len(prune.orphans(tmp_path)) == 1
    store.put(schema.ArrayContent("w", lambda: np.asarray(WEIGHTS), WEIGHTS.nbytes))
    assert prune.prune(tmp_path) == []
    assert array.exists()


def test_nothing_is_pruned_while_a_snapshot_is_a_link_to_nowhere(
    tmp_path: Path, store: ArrayStore
) -> None:
    path = record(tmp_path, model, arguments(), store=store)
    path.unlink()
    path.symlink_to("not mounted")
    with pytest.raises(SnapshotError, match="nothing was removed"):
        prune.prune(tmp_path, age=0)
    assert len(stored(tmp_path)) == 1


def test_nothing_is_pruned_while_a_snapshot_is_damaged(tmp_path: Path, store: ArrayStore) -> None:
    path = record(tmp_path, model, arguments(), store=store)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(SnapshotError, match="nothing was removed") as raised:
        prune.prune(tmp_path, age=0)
    assert str(path) in raised.value.message
    assert len(stored(tmp_path)) == 1
