"""Eviction: a limit that holds, what goes first, what stays, and readers who notice nothing."""

from __future__ import annotations

import logging
import os
import random
import sqlite3
import time
from pathlib import Path

import pytest
from programs import finish, start_program
from snaprt_cache import Cache, CacheError, Key, KeyPart
from snaprt_cache.index import HALF_LIFE_SECONDS, worth_of

KILOBYTE = 1_000


def _key(name: object) -> Key:
    return Key((KeyPart("module", str(name)),))


def _payload(count: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(count)


def _put(cache: Cache, name: object, seconds: float = 1.0, count: int = 10 * KILOBYTE) -> bool:
    return cache.put(_key(name), _payload(count), {"name": str(name), "compile_seconds": seconds})


def _names(cache: Cache) -> set[str]:
    return {row.name for row in cache.entries()}


def _set(cache: Cache, columns: str, *values: float, name: str) -> None:
    """Change what the index says of an entry, as if time had passed."""
    connection = sqlite3.connect(cache.index_path)
    connection.create_function("worth_of", 3, worth_of)
    connection.execute(f"UPDATE entries SET {columns} WHERE name = ?", (*values, name))
    connection.execute(
        "UPDATE entries SET worth = worth_of(compile_seconds + saved_seconds, stored_bytes, "
        "max(created, last_used))"
    )
    connection.commit()
    connection.close()


def test_the_files_never_take_more_than_the_limit(tmp_path: Path) -> None:
    events: list[str] = []
    limit = 100 * KILOBYTE
    cache = Cache.open(
        tmp_path / "cache", max_bytes=limit, on_event=lambda name, _: events.append(name)
    )
    for number in range(40):
        assert _put(cache, number)
        files = cache.folder.glob("blobs/*/*.blob")
        assert sum(path.stat().st_size for path in files) <= limit
    stats = cache.stats()
    assert 8 <= stats.entries < 10
    assert stats.evicted == 40 - stats.entries
    assert "PersistentCacheEvicted" in events
    assert stats.max_bytes == limit


def test_without_a_limit_nothing_is_evicted(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "cache", max_bytes=None)
    for number in range(20):
        _put(cache, number)
    assert cache.stats().entries == 20
    assert cache.gc() == []


def test_what_saves_the_fewest_seconds_for_its_bytes_goes_first(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "cache")
    _put(cache, "slow to compile", seconds=100.0)
    _put(cache, "quick to compile", seconds=0.1)
    _put(cache, "slow and large", seconds=100.0, count=5_000 * KILOBYTE)
    _put(cache, "medium", seconds=5.0)
    assert [row.name for row in cache.gc(25 * KILOBYTE)] == ["quick to compile", "slow and large"]
    assert _names(cache) == {"slow to compile", "medium"}


def test_what_was_not_used_for_long_goes_before_what_saves_a_little_less(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "cache")
    _put(cache, "old", seconds=2.0)
    _put(cache, "new", seconds=1.0)
    _set(cache, "created = ?", time.time() - 3 * HALF_LIFE_SECONDS, name="old")
    assert [row.name for row in cache.gc(15 * KILOBYTE)] == ["old"]


def test_hits_make_an_entry_worth_more(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "cache")
    for name in ("hit", "not hit"):
        _put(cache, name)
    for _ in range(3):
        cache.get(_key("hit"))
    assert [row.name for row in cache.gc(15 * KILOBYTE)] == ["not hit"]


def test_what_was_hit_just_now_goes_after_what_would_save_more(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "cache")
    _put(cache, "in use", seconds=0.01)
    for number in range(3):
        _put(cache, number, seconds=50.0)
    cache.get(_key("in use"))
    gone = [row.name for row in cache.gc(15 * KILOBYTE)]
    assert len(gone) == 3
    assert "in use" not in gone
    assert [row.name for row in cache.gc(0)] == ["in use"]


def test_the_entry_that_was_just_put_is_not_evicted_by_its_own_put(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "cache", max_bytes=35 * KILOBYTE)
    for number in range(3):
        _put(cache, number, seconds=1000.0)
    assert _put(cache, "cheap", seconds=0.0)
    assert "cheap" in _names(cache)


def test_a_pinned_entry_stays_whatever_happens_to_the_index(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "cache", max_bytes=50 * KILOBYTE)
    _put(cache, "pinned", seconds=0.0)
    assert cache.pin(_key("pinned").digest)
    assert not cache.pin(_key("absent").digest)
    assert not cache.pin("../../somewhere")
    for number in range(10):
        _put(cache, number)
    cache.index_path.write_bytes(b"nonsense" * 1000)
    for number in range(10, 20):
        _put(cache, number)
    assert "pinned" in _names(cache)
    assert cache.stats().pinned == 1
    assert all(row.name != "pinned" for row in cache.gc(0))
    assert _names(cache) == {"pinned"}
    assert cache.unpin(_key("pinned").digest)
    assert [row.pinned for row in cache.entries()] == [False]
    assert len(cache.gc(0)) == 1


def test_an_entry_larger_than_the_limit_is_not_stored_and_evicts_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache.open(tmp_path / "cache", max_bytes=50 * KILOBYTE)
    _put(cache, "small")
    with caplog.at_level(logging.WARNING, "snaprt.cache"):
        assert not _put(cache, "large", count=60 * KILOBYTE)
    assert "SNAPRT_CACHE_MAX_SIZE" in caplog.text
    assert _names(cache) == {"small"}


def test_a_clock_that_was_ahead_keeps_no_entry_for_ever(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "cache")
    year = 365 * 86400.0
    _put(cache, "from the future", seconds=1.0)
    _put(cache, "from now", seconds=10.0)
    ahead = time.time() + year
    _set(cache, "created = ?, last_used = ?", ahead, ahead, name="from the future")
    assert [row.name for row in cache.gc(15 * KILOBYTE)] == ["from the future"]


def test_a_clock_that_goes_back_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache.open(tmp_path / "cache", max_bytes=100 * KILOBYTE)
    for number in range(5):
        _put(cache, number)
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    for number in range(5, 12):
        assert _put(cache, number)
        assert cache.get(_key(number)) is not None
    stats = cache.stats()
    assert stats.stored_bytes <= 100 * KILOBYTE
    assert stats.entries >= 8


def test_a_size_gone_wrong_evicts_nothing_that_has_room_and_is_mended(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "cache", max_bytes=1000 * KILOBYTE)
    for number in range(5):
        _put(cache, number)
    connection = sqlite3.connect(cache.index_path)
    connection.execute("UPDATE entries SET stored_bytes = 1 << 50 WHERE name = '3'")
    connection.commit()
    connection.close()
    _put(cache, "another")
    stats = cache.stats()
    assert stats.entries == 6
    assert stats.stored_bytes < 1000 * KILOBYTE


def test_a_foreign_index_removes_no_file_but_blobs(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "cache")
    _put(cache, "a")
    victim = tmp_path / "precious.blob"
    victim.write_text("mine")
    connection = sqlite3.connect(cache.index_path)
    connection.execute("UPDATE entries SET key = '../../../precious', worth = -1e9")
    connection.commit()
    connection.close()
    cache.gc(0)
    assert victim.read_text() == "mine"


_READ = """
import random, sys, time
from snaprt_cache import Cache, Key, KeyPart
cache = Cache.open(sys.argv[1], max_bytes=None)
chosen = random.Random(int(sys.argv[2]))
hits, end = 0, time.monotonic() + 2.0
while time.monotonic() < end:
    number = chosen.randrange(60)
    entry = cache.get(Key((KeyPart("module", str(number)),)))
    if entry is not None:
        assert entry.payload == random.Random(number).randbytes(20_000), number
        hits += 1
assert cache.stats().corrupt == 0
print(hits)
"""


def test_evicting_while_others_read_and_put_loses_nobodys_read(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    cache = Cache.open(path, max_bytes=400 * KILOBYTE)
    readers = [start_program(_READ, path, seed) for seed in range(2)]
    number = 0
    while any(reader.poll() is None for reader in readers):
        name = number % 60
        assert cache.put(_key(name), _payload(20_000, seed=name), {"compile_seconds": 1.0})
        number += 1
    for reader in readers:
        assert int(finish(reader).stdout) > 0
    stats = cache.stats()
    assert stats.evicted > 0
    assert stats.stored_bytes <= 400 * KILOBYTE


def test_a_blob_that_is_open_is_read_to_its_end_after_it_was_evicted(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "cache")
    _put(cache, "a")
    with cache.blob_path(_key("a").digest).open("rb") as file:
        start = file.read(100)
        cache.gc(0)
        assert not cache.blob_path(_key("a").digest).exists()
        assert len(start + file.read()) > 10 * KILOBYTE


def test_collecting_where_the_index_cannot_be_used_says_so(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "cache")
    _put(cache, "a")
    cache.close()
    cache.index_path.unlink()
    cache.index_path.mkdir()
    with pytest.raises(CacheError) as caught:
        cache.gc(0)
    assert caught.value.hint
    assert os.path.isdir(cache.index_path)
