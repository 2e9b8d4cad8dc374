"""One process compiles for all: many at once, killed, interrupted, failing and slow ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from snaprt_cache import Cache, Key, KeyPart
from snaprt_cache.lock import Flight
from threads import in_threads

pytest.importorskip("fcntl")

KEY = Key((KeyPart("module", "the program"),))

# A program that is not in the cache is "compiled": the seconds and the outcome are arguments.
# Every process says what it did: `began` when it compiles, then the payload it ends up with.
_PROCESS = """
import os, sys, time
from snaprt_cache import Cache, Key, KeyPart
from snaprt_cache.lock import Flight

folder, seconds, outcome, wait, report = sys.argv[1:]
key = Key((KeyPart("module", "the program"),))
cache = Cache.open(folder)
flight = Flight(cache.folder, float(wait), report_after_seconds=float(report))
print("ready", flush=True)
sys.stdin.readline()
is_there = cache.blob_path(key.digest).exists
entry = cache.get(key)
if entry is None:
    with flight.lead(key.digest, is_there) as role:
        if not role.leader:
            entry = cache.get(key)
        if entry is None:
            print("began", flush=True)
            time.sleep(float(seconds))
            if outcome == "fails":
                raise ValueError("it cannot be compiled")
            if outcome == "stores":
                role.stored = cache.put(key, b"executable", {"compile_seconds": 1.0})
print("result", (entry.payload if entry else b"executable").decode(), flush=True)
"""


def start(
    folder: Path,
    *,
    seconds: float = 0.0,
    outcome: str = "stores",
    wait: float = 60,
    report: float = 5,
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _PROCESS, *map(str, (folder, seconds, outcome, wait, report))],
        stdin=subprocess.PIPE,  # which `start_program` has not
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def go(*processes: subprocess.Popen[str]) -> None:
    """Let processes that are ready begin, at once."""
    for process in processes:
        assert next(process.stdout).strip() == "ready"  # type: ignore[arg-type]
    for process in processes:
        process.stdin.write("\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]


def outputs(*processes: subprocess.Popen[str]) -> list[list[str]]:
    return [process.communicate(timeout=60)[0].splitlines() for process in processes]


def begin(folder: Path, **how: object) -> subprocess.Popen[str]:
    """Start a process that compiles, and return when it does."""
    process = start(folder, **how)  # type: ignore[arg-type]
    go(process)
    assert next(process.stdout).strip() == "began"  # type: ignore[arg-type]
    return process


def lock_files(folder: Path) -> list[Path]:
    return list(folder.glob("v1/flight/*"))


def test_32_processes_that_start_cold_on_one_key_compile_once_and_all_have_the_result(
    tmp_path: Path,
) -> None:
    processes = [start(tmp_path, seconds=0.3) for _ in range(32)]
    go(*processes)
    found = outputs(*processes)
    assert [lines[-1] for lines in found] == ["result executable"] * 32
    assert sum("began" in lines for lines in found) == 1
    assert lock_files(tmp_path) == []


def test_a_killed_process_frees_its_key_at_once(tmp_path: Path) -> None:
    killed = begin(tmp_path, seconds=60)
    waiting = [start(tmp_path) for _ in range(3)]
    go(*waiting)
    time.sleep(0.3)
    assert all(process.poll() is None for process in waiting)
    killed.kill()
    since = time.monotonic()
    found = outputs(*waiting)
    assert time.monotonic() - since < 10
    assert sum("began" in lines for lines in found) == 1
    killed.communicate()


def test_a_wait_is_bounded_and_reported_once_and_then_the_process_compiles_for_itself(
    tmp_path: Path,
) -> None:
    slow = begin(tmp_path, seconds=60)
    impatient = start(tmp_path, wait=0.6, report=0.2)
    go(impatient)
    out, err = impatient.communicate(timeout=60)
    assert out.splitlines() == ["began", "result executable"]
    reports = err.splitlines()
    assert len(reports) == 2
    assert "Waiting for another process that compiles the same program" in reports[0]
    assert "SNAPRT_CACHE_WAIT" in reports[0]
    assert "Compiling program" in reports[1]
    slow.kill()
    slow.communicate()


def test_those_who_wait_take_an_entry_that_was_stored_without_the_lock(tmp_path: Path) -> None:
    slow = begin(tmp_path, seconds=60)
    waiting = start(tmp_path)
    go(waiting)
    assert Cache.open(tmp_path).put(KEY, b"from elsewhere", {})
    assert outputs(waiting) == [["result from elsewhere"]]
    slow.kill()
    slow.communicate()


def test_ctrl_c_while_compiling_leaves_nothing_and_the_next_one_leads(tmp_path: Path) -> None:
    interrupted = begin(tmp_path, seconds=60)
    waiting = [start(tmp_path, seconds=0.2) for _ in range(3)]
    go(*waiting)
    time.sleep(0.3)
    interrupted.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in interrupted.communicate(timeout=60)[1]
    found = outputs(*waiting)
    assert sum("began" in lines for lines in found) == 1
    assert [lines[-1] for lines in found] == ["result executable"] * 3


def test_ctrl_c_just_after_the_lock_was_taken_releases_it(tmp_path: Path) -> None:
    def interrupted() -> bool:
        raise KeyboardInterrupt

    flight = Flight(tmp_path, 30)
    with pytest.raises(KeyboardInterrupt):
        flight.join(KEY.digest, interrupted)
    with flight.lead(KEY.digest, lambda: False) as role:
        assert role.leader
        assert role.waited_seconds == 0


@pytest.mark.parametrize("outcome", ["fails", "stores nothing"])
def test_those_who_wait_in_vain_compile_side_by_side(tmp_path: Path, outcome: str) -> None:
    first = begin(tmp_path, seconds=1, outcome=outcome)
    waiting = [start(tmp_path, seconds=1, outcome=outcome) for _ in range(8)]
    go(*waiting)
    first.communicate(timeout=60)
    since = time.monotonic()
    assert all(lines[0] == "began" for lines in outputs(*waiting))
    assert time.monotonic() - since < 5  # one after the other it would be 8
    assert lock_files(tmp_path) == []


def test_threads_of_one_process_compile_once(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path)
    flight = Flight(cache.folder)
    compiled: list[int] = []

    def work(number: int) -> None:
        with flight.lead(KEY.digest, cache.blob_path(KEY.digest).exists) as role:
            if role.leader:
                compiled.append(number)
                time.sleep(0.2)
                role.stored = cache.put(KEY, b"executable", {})

    in_threads(8, work)
    assert len(compiled) == 1


def test_a_wait_is_counted(tmp_path: Path) -> None:
    slow = begin(tmp_path, seconds=0.5)
    events: list[tuple[str, float]] = []
    cache = Cache.open(tmp_path)
    flight = Flight(cache.folder, on_event=lambda name, value: events.append((name, value)))
    with flight.lead(KEY.digest, cache.blob_path(KEY.digest).exists) as role:
        assert not role.leader
        assert role.waited_seconds > 0
    assert [name for name, _ in events] == ["PersistentCacheWait", "PersistentCacheWaitSeconds"]
    assert events[1][1] == pytest.approx(role.waited_seconds, abs=0.1)
    slow.communicate(timeout=60)


def test_a_child_that_was_forked_while_its_parent_compiled_does_not_keep_the_key(
    tmp_path: Path,
) -> None:
    cache = Cache.open(tmp_path)
    flight = Flight(cache.folder)
    reading, writing = os.pipe()
    with flight.lead(KEY.digest, lambda: False) as role:
        assert role.leader
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)  # until the parent is done
            os._exit(0)
    with flight.lead(KEY.digest, lambda: False) as role:
        assert role.leader
        assert role.waited_seconds == 0
    os.close(writing)
    os.waitpid(child, 0)
    os.close(reading)


def test_where_no_lock_file_can_be_made_each_compiles_for_itself(tmp_path: Path) -> None:
    (tmp_path / "v1").write_text("no directory")
    with Flight(tmp_path / "v1").lead(KEY.digest, lambda: False) as role:
        assert not role.leader


def test_no_wait_means_no_lock(tmp_path: Path) -> None:
    with Flight(tmp_path / "v1", 0).lead(KEY.digest, lambda: False) as role:
        assert not role.leader
    assert not (tmp_path / "v1").exists()


def test_what_a_leader_left_that_was_killed_as_it_left_holds_nobody_up(tmp_path: Path) -> None:
    folder = tmp_path / "v1" / "flight"
    folder.mkdir(parents=True)
    (folder / KEY.digest).write_bytes(b"nothing stored\n")
    with Flight(tmp_path / "v1").lead(KEY.digest, lambda: False) as role:
        assert role.leader
        assert role.waited_seconds == 0
        role.stored = True
    assert lock_files(tmp_path) == []
