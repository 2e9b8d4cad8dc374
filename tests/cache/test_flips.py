"""Random bit flips and truncations, many: each a counted miss that heals, none a wrong hit."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from pathlib import Path

import blake3
import pytest
from snaprt_cache import Cache, Key, KeyPart, file_digest, file_digests

PAYLOAD = b"an executable " * 50 + random.Random(5).randbytes(1200)
METADATA = {"name": "step", "kind": "compiled", "compile_seconds": 1.0}
SIGNING_KEY = bytes(range(32))
HOW_MANY = [300, pytest.param(10_000, marks=pytest.mark.full)]


def _key(number: int) -> Key:
    return Key((KeyPart("module", str(number)), KeyPart("flags", "--xla_a=1")))


def _damaged(whole: bytes, chosen: random.Random) -> bytes:
    if chosen.random() < 0.3:
        return whole[: chosen.randrange(len(whole))]
    content = bytearray(whole)
    content[chosen.randrange(len(content))] ^= 1 << chosen.randrange(8)
    return bytes(content)


@pytest.mark.parametrize("how_many", HOW_MANY)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"signing_key": SIGNING_KEY},
        {"signing_key": SIGNING_KEY, "shared": True},
    ],
    ids=["unsigned", "signed", "shared"],
)
def test_damage_anywhere_in_a_blob_is_a_counted_miss_and_the_next_put_heals_it(
    tmp_path: Path, how_many: int, options: dict
) -> None:
    events: list[str] = []
    cache = Cache.open(tmp_path / "cache", on_event=lambda name, _: events.append(name), **options)
    key = _key(0)
    assert cache.put(key, PAYLOAD, METADATA)
    path = cache.blob_path(key.digest)
    whole = path.read_bytes()
    chosen = random.Random(how_many)
    for _ in range(how_many):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(_damaged(whole, chosen))
        assert cache.get(key) is None
    assert events.count("PersistentCacheMiss") == how_many
    found = events.count("PersistentCacheCorrupt") + events.count("PersistentCacheRefused")
    assert found == how_many
    assert cache.put(key, PAYLOAD, METADATA)
    entry = cache.get(key)
    assert entry is not None
    assert entry.payload == PAYLOAD
    stats = cache.stats()
    assert (stats.entries, stats.hits, stats.misses) == (1, 1, how_many)
    assert cache.stats().set_aside <= 32


@pytest.mark.parametrize("how_many", [40, pytest.param(10_000, marks=pytest.mark.full)])
def test_damage_anywhere_in_the_index_loses_no_blob_and_raises_nothing(
    tmp_path: Path, how_many: int
) -> None:
    cache = Cache.open(tmp_path / "cache", max_bytes=1 << 20)
    keys = [_key(number) for number in range(6)]
    for key in keys:
        cache.put(key, PAYLOAD, METADATA)
    cache.close()
    whole = cache.index_path.read_bytes()
    chosen = random.Random(how_many)
    for number in range(how_many):
        cache.index_path.write_bytes(_damaged(whole, chosen))
        now = Cache.open(cache.path, max_bytes=1 << 20)
        entry = now.get(keys[number % 6])
        assert entry is not None
        assert entry.payload == PAYLOAD
        # A put may evict on what the index says; it is not to believe a sum that is wrong.
        assert now.put(keys[0], PAYLOAD, METADATA)
        assert {row.key for row in now.entries()} == {key.digest for key in keys}
        assert now.gc() == []
        assert sum(now.blob_path(key.digest).is_file() for key in keys) == 6
        now.close()


def test_verify_finds_every_damaged_entry_and_heals_when_told_so(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "cache")
    for number in range(8):
        cache.put(_key(number), PAYLOAD, METADATA)
    chosen = random.Random(8)
    bad = {_key(number).digest for number in (1, 4, 6)}
    for digest in bad:
        path = cache.blob_path(digest)
        path.write_bytes(_damaged(path.read_bytes(), chosen))
    looked_at = list(cache.verify())
    problems = [finding for finding in looked_at if finding.problem]
    assert len([finding for finding in looked_at if finding.subject == "entry"]) == 8
    assert {finding.key for finding in problems if finding.subject == "entry"} == bad
    assert not any(finding.healed for finding in looked_at)
    assert all(cache.blob_path(digest).exists() for digest in bad)
    healed = [finding for finding in cache.verify(heal=True) if finding.problem]
    assert all(finding.healed for finding in healed)
    assert {finding.key for finding in healed if finding.key} == bad
    assert not any(finding.problem for finding in cache.verify())
    assert len(cache.entries()) == 5


def test_verify_brings_an_index_in_line_that_does_not_tell_what_is_there(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "cache")
    for number in range(3):
        cache.put(_key(number), PAYLOAD, METADATA)
    cache.blob_path(_key(0).digest).unlink()
    (finding,) = [finding for finding in cache.verify() if finding.problem]
    assert (finding.subject, finding.healed) == ("index", False)
    (finding,) = [finding for finding in cache.verify(heal=True) if finding.problem]
    assert (finding.subject, finding.healed) == ("index", True)
    assert not any(finding.problem for finding in cache.verify())


def _garbled(whole: bytes, chosen: random.Random) -> bytes:
    """Return a file's content with a bit, some bytes or a page changed, or cut short."""
    content = bytearray(whole)
    place = chosen.randrange(len(content) + 1)
    match chosen.randrange(6):
        case 0:
            return whole[:place]
        case 1:
            page = place // 4096 * 4096
            content[page : page + 4096] = bytes(len(content[page : page + 4096]))
        case 2:
            count = min(chosen.randrange(2, 64), len(content) - place)
            content[place : place + count] = chosen.randbytes(count)
        case 3:
            content[place:place] = chosen.randbytes(chosen.randrange(1, 64))
        case _:
            if content:
                content[place % len(content)] ^= 1 << chosen.randrange(8)
    return bytes(content)


def _run(folder: Path, library: Path) -> int:
    """Do what a program does, and check what it gets; return how many hits it had."""
    file_digests._digests_of_this_process.clear()
    assert file_digest(library, folder / "v1") == blake3.blake3(b"code").hexdigest()
    cache = Cache.open(folder, max_bytes=1 << 20)
    hits = 0
    for number in range(6):
        entry = cache.get(_key(number))
        if entry is None:
            cache.record_miss(_key(number), "step")
            assert cache.put(_key(number), PAYLOAD, METADATA)
        else:
            assert entry.payload == PAYLOAD
            hits += 1
    cache.misses()
    assert {row.key for row in cache.entries()} == {_key(number).digest for number in range(6)}
    cache.close()
    return hits


@pytest.mark.parametrize("how_many", [60, pytest.param(5000, marks=pytest.mark.full)])
def test_damage_anywhere_in_a_cache_folder_is_gone_after_the_next_run(
    tmp_path: Path, how_many: int
) -> None:
    library = tmp_path / "libxla.so"
    library.write_bytes(b"code")
    os.utime(library, (1e9, 1e9))
    whole = tmp_path / "whole"
    assert _run(whole, library) == 0
    Cache.open(whole).pin(_key(1).digest)
    names = sorted(
        path.relative_to(whole)
        for path in whole.rglob("*")
        if path.is_file() and path.stat().st_size
    )
    assert len(names) >= 9  # six blobs, the index, the digests, the misses
    chosen = random.Random(how_many)
    for _ in range(how_many):
        folder = tmp_path / "damaged"
        shutil.copytree(whole, folder)
        # As often in the index as in all blobs together.
        name = chosen.choice([*names, *[name for name in names if "index" in name.name] * 5])
        (folder / name).write_bytes(_garbled((whole / name).read_bytes(), chosen))
        assert _run(folder, library) >= 5
        assert _run(folder, library) == 6
        connection = sqlite3.connect(folder / "v1" / Cache.open(folder).index_path.name)
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        connection.close()
        assert not [finding for finding in Cache.open(folder).verify() if finding.problem]
        shutil.rmtree(folder)
