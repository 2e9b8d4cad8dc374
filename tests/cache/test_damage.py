"""Damage anywhere: a bad blob is a counted miss that heals, a bad index is made anew."""

from __future__ import annotations

import os
import random
import resource
import shutil
import sqlite3
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import run_program
from snaprt_cache import Cache, Key, KeyPart

KEY = Key((KeyPart("module", "m"), KeyPart("flags", "--xla_a=1")))
PAYLOAD = b"an executable " * 200 + random.Random(5).randbytes(3000)
METADATA = {"name": "step", "compile_seconds": 1.0}


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    cache = Cache.open(tmp_path / "cache")
    cache.put(KEY, PAYLOAD, METADATA)
    return cache


def _keys(count: int) -> list[Key]:
    return [Key((KeyPart("module", str(number)),)) for number in range(count)]


def _payload(cache: Cache, key: Key) -> bytes | None:
    entry = cache.get(key)
    return None if entry is None else entry.payload


def test_a_flipped_bit_anywhere_in_a_blob_is_a_miss_and_never_a_wrong_payload(
    cache: Cache,
) -> None:
    path = cache.blob_path(KEY.digest)
    whole = path.read_bytes()
    chosen = random.Random(1)
    # Every bit of the fixed header, and as many anywhere.
    bits = [*range(128 * 8), *(chosen.randrange(len(whole) * 8) for _ in range(1000))]
    for bit in bits:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert _payload(cache, KEY) is None, bit
    stats = cache.stats()
    assert (stats.corrupt, stats.misses, stats.hits) == (len(bits), len(bits), 0)


def test_a_truncated_blob_is_a_miss_and_is_set_aside(cache: Cache) -> None:
    path = cache.blob_path(KEY.digest)
    whole = path.read_bytes()
    for length in [0, 1, 7, 8, 127, 128, 129, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:length])
        assert _payload(cache, KEY) is None, length
        assert not path.exists()
    assert cache.stats().set_aside == 9


def test_bytes_behind_the_end_of_a_blob_are_damage(cache: Cache) -> None:
    with cache.blob_path(KEY.digest).open("ab") as file:
        file.write(b"\0")
    assert _payload(cache, KEY) is None


def test_the_put_after_damage_heals_the_entry(cache: Cache) -> None:
    cache.blob_path(KEY.digest).write_bytes(b"nonsense")
    assert _payload(cache, KEY) is None
    assert cache.entries() == []
    assert cache.put(KEY, PAYLOAD, METADATA)
    assert _payload(cache, KEY) == PAYLOAD
    assert len(cache.entries()) == 1


def test_a_blob_under_another_keys_name_is_damage(cache: Cache) -> None:
    other = Key((KeyPart("module", "other"),))
    cache.put(other, b"other", METADATA)
    shutil.copy(cache.blob_path(KEY.digest), cache.blob_path(other.digest))
    assert _payload(cache, other) is None
    assert _payload(cache, KEY) == PAYLOAD


@pytest.mark.parametrize("offset", [12, 16, 24], ids=["description", "stored", "payload"])
def test_a_length_gone_wild_allocates_nothing_of_that_length(cache: Cache, offset: int) -> None:
    path = cache.blob_path(KEY.digest)
    content = bytearray(path.read_bytes())
    struct.pack_into("<I", content, offset + (0 if offset == 12 else 4), 0x7FFFFFFF)
    path.write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert _payload(cache, KEY) is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def test_a_directory_in_the_place_of_a_blob_is_a_miss(cache: Cache) -> None:
    path = cache.blob_path(KEY.digest)
    path.unlink()
    path.mkdir()
    assert _payload(cache, KEY) is None
    assert not cache.put(KEY, PAYLOAD, METADATA)


def test_the_quarantine_does_not_grow_without_end(cache: Cache) -> None:
    for _ in range(40):
        cache.blob_path(KEY.digest).write_bytes(b"nonsense")
        cache.get(KEY)
    assert cache.stats().set_aside == 32


# The index.


def _garble_start(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\xff" * 100)


def _garble_pages(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(100)
        file.write(os.urandom(path.stat().st_size - 100))


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 + 100)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _text(path: Path) -> None:
    path.write_text("this is no database\n" * 100)


def _replace(path: Path) -> None:
    path.unlink()
    path.write_bytes(os.urandom(8192))


def _execute(path: Path, statement: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.commit()
    connection.close()


def _drop_table(path: Path) -> None:
    _execute(path, "DROP TABLE entries")


def _wrong_types(path: Path) -> None:
    _execute(path, "UPDATE entries SET hits = 'many'")


def _not_utf8(path: Path) -> None:
    _execute(path, "UPDATE entries SET name = CAST(x'ff00fe' AS TEXT)")


def _other_version(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 513")
    connection.close()


def _newer_format(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(18)
        file.write(b"\x41")


def _delete(path: Path) -> None:
    path.unlink()


DAMAGE = [
    _garble_start,
    _garble_pages,
    _truncate,
    _empty,
    _text,
    _replace,
    _drop_table,
    _wrong_types,
    _not_utf8,
    _other_version,
    _newer_format,
    _delete,
]


@pytest.mark.parametrize("is_open", [True, False], ids=["while open", "between processes"])
@pytest.mark.parametrize("damage", DAMAGE, ids=lambda function: function.__name__[1:])
def test_a_lost_or_garbled_index_is_rebuilt_from_the_blobs(
    tmp_path: Path, damage: Callable[[Path], None], is_open: bool
) -> None:
    cache = Cache.open(tmp_path / "cache")
    for key in _keys(20):
        cache.put(key, PAYLOAD, METADATA)
    if not is_open:
        cache.close()
        cache = Cache.open(tmp_path / "cache")
    damage(cache.index_path)
    assert all(_payload(cache, key) == PAYLOAD for key in _keys(20))
    assert cache.put(KEY, PAYLOAD, METADATA)
    rows = cache.entries()
    assert {row.key for row in rows} == {key.digest for key in [KEY, *_keys(20)]}
    assert {row.name for row in rows} == {"step"}
    assert Cache.open(cache.path).stats().entries == 21


def test_a_garbled_index_leaves_nothing_behind(cache: Cache) -> None:
    cache.close()
    cache.index_path.write_text("this is no database\n" * 100)
    assert len(cache.entries()) == 1
    assert cache.stats().set_aside == 0
    assert sorted(path.name for path in cache.folder.glob("index*")) == [
        cache.index_path.name,
        "index.lock",
    ]


def test_random_damage_to_the_index_never_raises_and_never_loses_a_blob(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "cache")
    for key in _keys(8):
        cache.put(key, PAYLOAD, METADATA)
    cache.close()
    whole = cache.index_path.read_bytes()
    chosen = random.Random(2)
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(chosen.choice([1, 1, 20])):
            damaged[chosen.randrange(len(damaged))] ^= 1 << chosen.randrange(8)
        cut = chosen.choice([len(damaged), len(damaged), chosen.randrange(len(damaged))])
        cache.index_path.write_bytes(damaged[:cut])
        now = Cache.open(cache.path)
        assert _payload(now, _keys(1)[0]) == PAYLOAD
        assert len(now.entries()) == 8
        assert now.stats().entries == 8
        now.close()


def test_rows_of_blobs_that_are_gone_and_blobs_without_a_row_are_brought_in_line(
    tmp_path: Path,
) -> None:
    cache = Cache.open(tmp_path / "cache")
    for key in _keys(4):
        cache.put(key, PAYLOAD, METADATA)
    cache.blob_path(_keys(4)[0].digest).unlink()
    connection = sqlite3.connect(cache.index_path)
    connection.execute("DELETE FROM entries WHERE key = ?", [_keys(4)[1].digest])
    connection.commit()
    connection.close()
    assert {row.key for row in cache.entries()} == {key.digest for key in _keys(4)[1:]}


def test_a_hit_gives_a_blob_without_a_row_its_row_and_counts(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "cache")
    cache.put(KEY, PAYLOAD, METADATA)
    connection = sqlite3.connect(cache.index_path)
    connection.execute("DELETE FROM entries")
    connection.commit()
    assert _payload(cache, KEY) == PAYLOAD
    cache.close()
    assert connection.execute("SELECT name, hits FROM entries").fetchall() == [("step", 1)]
    connection.close()


def test_a_locked_index_delays_no_hit(cache: Cache) -> None:
    connection = sqlite3.connect(cache.index_path)
    connection.execute("BEGIN EXCLUSIVE")
    script = (
        "import sys, time; from snaprt_cache import *\n"
        "key = Key((KeyPart('module', 'm'), KeyPart('flags', '--xla_a=1')))\n"
        "cache = Cache.open(sys.argv[1])\n"
        "start = time.monotonic()\n"
        "assert all(cache.get(key) for _ in range(1000))\n"
        "cache.close()\n"
        "assert time.monotonic() - start < 3\n"
    )
    run_program(script, cache.path, timeout=30)
    connection.close()
