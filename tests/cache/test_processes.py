"""Many processes and threads at once, forks, and processes killed at any moment."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from programs import finish, start_program
from snaprt_cache import Cache, Key, KeyPart
from snaprt_cache import index as index_module
from threads import in_threads

# A payload that says which key it belongs to, so that a mix-up shows; its length varies.
_COMMON = """
import hashlib, logging, os, sys, time
from snaprt_cache import Cache, Key, KeyPart

def key_of(number):
    return Key((KeyPart("module", str(number)),))

def payload_of(number, version=0):
    seed = f"{number} {version}".encode()
    return seed + b" " + hashlib.shake_256(seed).digest(20_000 + number * 997)

def is_right(number, payload):
    label, _, rest = payload.partition(b" ")
    version = rest.partition(b" ")[0]
    return payload == payload_of(number, int(version)) and label == str(number).encode()

cache = Cache.open(sys.argv[1])
"""

_WORK = (
    _COMMON
    + """
import random
chosen = random.Random(int(sys.argv[2]))
end = time.monotonic() + float(sys.argv[3])
rounds = 0
while time.monotonic() < end or rounds < 5:
    number = chosen.randrange(8)
    entry = cache.get(key_of(number))
    if entry is not None:
        assert is_right(number, entry.payload), number
    if entry is None or chosen.random() < 0.4:
        put = cache.put(key_of(number), payload_of(number, rounds), {"name": f"p{number}"})
        assert put
    rounds += 1
print(rounds)
"""
)

_CHECK = (
    _COMMON
    + """
rows = cache.entries()
for number in range(8):
    entry = cache.get(key_of(number))
    assert entry is None or is_right(number, entry.payload)
stats = cache.stats()
assert stats.corrupt == 0, stats
assert stats.set_aside == 0, stats
numbers = [*range(8), 99]
assert {row.key for row in rows} == {
    key_of(number).digest for number in numbers if cache.get(key_of(number)) is not None
}
assert cache.put(key_of(99), b"still usable", {})
assert cache.get(key_of(99)).payload == b"still usable"
"""
)


def _finish(process: subprocess.Popen[str]) -> str:
    done = finish(process, timeout=60)
    assert done.stderr == ""
    return done.stdout


def _key(name: str) -> Key:
    return Key((KeyPart("module", name),))


def test_processes_that_get_and_put_the_same_keys_never_see_a_wrong_or_torn_entry(
    tmp_path: Path,
) -> None:
    workers = [start_program(_WORK, tmp_path / "cache", seed, 2.0) for seed in range(6)]
    assert all(int(_finish(worker)) >= 5 for worker in workers)
    _finish(start_program(_CHECK, tmp_path / "cache"))


def test_an_index_that_another_process_makes_at_the_same_moment_is_not_taken_for_a_garbled_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = index_module._schema

    def overtaken(connection: sqlite3.Connection) -> list:
        found = schema(connection)
        if not found and not connection.in_transaction:
            monkeypatch.setattr(index_module, "_schema", schema)
            Cache.open(tmp_path / "cache").put(_key("other"), b"payload", {})
        return found

    monkeypatch.setattr(index_module, "_schema", overtaken)
    cache = Cache.open(tmp_path / "cache")
    assert cache.put(_key("own"), b"payload", {})
    assert cache.stats().set_aside == 0
    assert {row.key for row in cache.entries()} == {_key("own").digest, _key("other").digest}


def test_processes_survive_the_index_being_deleted_and_garbled_under_them(tmp_path: Path) -> None:
    workers = [start_program(_WORK, tmp_path / "cache", seed, 3.0) for seed in range(4)]
    index = Cache.open(tmp_path / "cache").index_path
    chosen = random.Random(3)
    while any(worker.poll() is None for worker in workers):
        time.sleep(0.1)
        if index.exists():
            if chosen.random() < 0.5:
                index.unlink(missing_ok=True)
            else:
                index.write_bytes(chosen.randbytes(4096))
    for worker in workers:
        _finish(worker)
    cache = Cache.open(tmp_path / "cache")
    assert len(cache.entries()) == len(list(cache.folder.glob("blobs/*/*.blob"))) > 0


def test_threads_share_one_cache(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "cache")

    def work(number: int) -> None:
        name = str(number % 5)
        cache.put(_key(name), name.encode() * 10_000, {})
        entry = cache.get(_key(name))
        assert entry is not None
        assert entry.payload == name.encode() * 10_000

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(100)))
    stats = cache.stats()
    assert (stats.entries, stats.puts, stats.hits) == (5, 100, 100)


@pytest.mark.slow
def test_writers_killed_at_random_moments_leave_a_usable_cache(tmp_path: Path) -> None:
    chosen = random.Random(4)
    endless = _WORK.replace("cache = Cache", 'print("ready", flush=True)\ncache = Cache')
    for _ in range(8):
        pair = [
            start_program(endless, tmp_path / "cache", chosen.randrange(1000), 60) for _ in range(2)
        ]
        for process in pair:
            assert process.stdout is not None
            process.stdout.readline()
        time.sleep(chosen.uniform(0.0, 0.25))
        for process in pair:
            process.send_signal(signal.SIGKILL)
        for process in pair:
            assert process.wait() == -signal.SIGKILL
            process.communicate()
        _finish(start_program(_CHECK, tmp_path / "cache"))


def test_what_killed_writers_left_is_removed_when_it_is_old(tmp_path: Path) -> None:
    first = Cache.open(tmp_path / "cache")
    first.put(_key("a"), b"payload", {})
    temporary = first.folder / "temporary"
    names = [f"{'a' * 12}-{str(number) * 16}.tmp" for number in range(4)]
    old, young, held, far_future = (temporary / name for name in names)
    foreign = temporary / "notes.txt"
    for path in (old, young, held, far_future, foreign):
        path.write_bytes(b"half a blob")
    hour = 3600.0
    for path, age in ((old, hour), (held, hour), (foreign, hour), (far_future, -hour)):
        os.utime(path, (time.time() - age, time.time() - age))
    script = (
        "import fcntl, sys, time\n"
        "file = open(sys.argv[1], 'r+b')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "time.sleep(60)\n"
    )
    holder = start_program(script, held)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        Cache.open(tmp_path / "cache").put(_key("b"), b"payload", {})
        assert sorted(temporary.iterdir()) == sorted([young, held, foreign])
    finally:
        holder.kill()
        holder.communicate()
    Cache.open(tmp_path / "cache").put(_key("b"), b"payload", {})
    assert sorted(temporary.iterdir()) == sorted([young, foreign])


def test_a_forked_child_uses_the_cache_with_a_connection_of_its_own(tmp_path: Path) -> None:
    script = (
        _COMMON
        + """
import threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)
cache.put(key_of(1), payload_of(1), {})
cache.get(key_of(1))
# A thread keeps taking the locks, so that a fork happens while they are held.
stop = threading.Event()
def keep_busy():
    while not stop.is_set():
        cache.put(key_of(2), payload_of(2), {})
        cache.get(key_of(2))
thread = threading.Thread(target=keep_busy)
thread.start()
for _ in range(12):
    child = os.fork()
    if not child:
        ok = cache.put(key_of(3), payload_of(3), {}) and cache.get(key_of(3)) is not None
        ok = ok and len(cache.entries()) >= 2
        os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
thread.join()
assert {row.key for row in cache.entries()} == {key_of(n).digest for n in (1, 2, 3)}
row = cache.find(key_of(1).digest)[0]
assert row.hits == 1, row
"""
    )
    _finish(start_program(script, tmp_path / "cache"))


def test_two_cache_objects_in_one_process_do_not_lock_each_other_out(tmp_path: Path) -> None:
    caches = [Cache.open(tmp_path / "cache") for _ in range(2)]

    def work(number: int) -> list[bool]:
        return [caches[number].put(_key(str(n)), b"payload", {}) for n in range(20)]

    assert in_threads(2, work) == [[True] * 20] * 2
    assert caches[0].stats().puts == 40
