"""The cache as its callers see it: get, put, discard, listings, figures, refusals."""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
from collections.abc import Mapping
from pathlib import Path

import pytest
import sqlite_utils
from programs import run_program
from snaprt_cache import Cache, CacheError, Key, KeyPart, default_path

METADATA = {
    "name": "train_step",
    "kind": "compiled",
    "compile_seconds": 2.5,
    "platform": "cpu",
    "device_kind": "cpu",
    "jax_version": "0.10.2",
    "jaxlib_version": "0.10.2",
}


def _key(name: str) -> Key:
    return Key((KeyPart("module", name), KeyPart("jax", "0.10.2")))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache.open(tmp_path / "cache")


@pytest.mark.parametrize("payload", [b"", b"x", b"\0" * 5_000_000, os.urandom(200_000)])
def test_what_was_put_is_what_is_got(cache: Cache, payload: bytes) -> None:
    assert cache.put(_key("a"), payload, METADATA)
    entry = cache.get(_key("a"))
    assert entry is not None
    assert entry.payload == payload
    assert entry.metadata == METADATA


def test_an_entry_is_found_by_another_cache_object_on_the_directory(cache: Cache) -> None:
    cache.put(_key("a"), b"payload", METADATA)
    entry = Cache.open(cache.path).get(_key("a"))
    assert entry is not None
    assert entry.payload == b"payload"


def test_a_directory_whose_name_is_not_utf_8_has_an_index(tmp_path: Path) -> None:
    cache = Cache.open(os.fsdecode(os.fsencode(tmp_path) + b"/cache-\xff"))
    assert cache.put(_key("a"), b"payload", METADATA)
    assert [entry.name for entry in cache.entries()] == ["train_step"]
    assert [finding for finding in cache.verify() if finding.problem] == []


def test_a_key_that_was_never_put_is_a_miss(cache: Cache) -> None:
    assert cache.get(_key("a")) is None


def test_a_later_put_replaces_the_entry_and_keeps_its_hits(cache: Cache) -> None:
    cache.put(_key("a"), b"one", METADATA)
    cache.get(_key("a"))
    cache.put(_key("a"), b"two", {**METADATA, "name": "renamed"})
    entry = cache.get(_key("a"))
    assert entry is not None
    assert entry.payload == b"two"
    (row,) = cache.entries()
    assert (row.name, row.hits) == ("renamed", 2)


def test_looking_and_missing_makes_no_directory(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "cache")
    cache.get(_key("a"))
    assert cache.entries() == []
    assert cache.stats().entries == 0
    cache.clear()
    cache.close()
    assert not cache.path.exists()


def test_every_event_is_told_with_its_value(tmp_path: Path) -> None:
    events: list[tuple[str, float]] = []
    cache = Cache.open(
        tmp_path / "cache", on_event=lambda name, value: events.append((name, value))
    )
    cache.get(_key("a"))
    cache.put(_key("a"), b"payload", METADATA)
    cache.get(_key("a"))
    names = [name for name, _ in events]
    assert names == [
        "PersistentCacheMiss",
        "PersistentCachePut",
        "PersistentCacheHit",
        "PersistentCacheSavedSeconds",
    ]
    assert 2.0 < events[-1][1] <= 2.5


def test_an_entry_without_compile_time_saves_nothing(tmp_path: Path) -> None:
    events: list[str] = []
    cache = Cache.open(tmp_path / "cache", on_event=lambda name, _: events.append(name))
    cache.put(_key("a"), b"payload", {"compile_seconds": "much"})
    cache.get(_key("a"))
    assert "PersistentCacheSavedSeconds" not in events


def test_a_discarded_entry_is_a_miss_and_counted_as_damaged(cache: Cache) -> None:
    cache.put(_key("a"), b"payload", METADATA)
    cache.discard(_key("a"), "XLA cannot load it")
    assert cache.get(_key("a")) is None
    stats = cache.stats()
    assert (stats.entries, stats.corrupt, stats.misses, stats.set_aside) == (0, 1, 1, 1)


def test_rows_tell_what_the_metadata_said(cache: Cache) -> None:
    cache.put(_key("a"), b"p" * 1000, METADATA)
    (row,) = cache.entries()
    assert row.key == _key("a").digest
    assert (row.name, row.kind, row.platform) == ("train_step", "compiled", "cpu")
    assert (row.compile_seconds, row.payload_bytes) == (2.5, 1000)
    assert row.stored_bytes == cache.blob_path(row.key).stat().st_size
    assert row.hits == 0


def test_metadata_that_no_column_can_hold_does_not_spoil_the_index(cache: Cache) -> None:
    strange = {"name": "half a pair \ud800", "compile_seconds": float("nan")}
    key = Key((KeyPart("module \ud800", "x"),))
    assert cache.put(key, b"payload", strange)
    entry = cache.get(key)
    assert entry is not None
    assert entry.metadata["name"] == "half a pair \ud800"
    assert [row.compile_seconds for row in cache.entries()] == [0.0]
    assert cache.stats().set_aside == 0


def test_an_entry_is_found_by_the_start_of_its_key(cache: Cache) -> None:
    for name in "abc":
        cache.put(_key(name), b"payload", METADATA)
    digest = _key("b").digest
    assert [row.key for row in cache.find(digest[:10].upper())] == [digest]
    assert len(cache.find("")) == 3
    assert cache.find("*") == []


def test_the_parts_of_a_key_are_kept_in_the_blob_and_in_the_index(cache: Cache) -> None:
    cache.put(_key("a"), b"payload", METADATA)
    header = cache.header(_key("a").digest)
    assert header is not None
    assert header.key == _key("a")
    rows = sqlite_utils.Database(cache.index_path).query(
        "SELECT value FROM key_parts WHERE name = 'module'"
    )
    assert [row["value"] for row in rows] == ["a"]


def test_figures_add_up_over_processes(cache: Cache) -> None:
    cache.put(_key("a"), b"payload", METADATA)
    script = (
        "import sys; from snaprt_cache import *\n"
        "key = Key((KeyPart('module', 'a'), KeyPart('jax', '0.10.2')))\n"
        "cache = Cache.open(sys.argv[1])\n"
        "assert cache.get(key).payload == b'payload'\n"
        "assert cache.get(Key(())) is None\n"
    )
    for _ in range(2):
        run_program(script, cache.path)
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.puts) == (2, 2, 1)
    assert 4.0 < stats.saved_seconds <= 5.0
    (row,) = cache.entries()
    assert row.hits == 2
    assert row.last_used > row.created


def test_a_process_that_only_has_hits_does_not_import_sqlite_utils(cache: Cache) -> None:
    cache.put(_key("a"), b"payload", METADATA)
    script = (
        "import sys; from snaprt_cache import *\n"
        "key = Key((KeyPart('module', 'a'), KeyPart('jax', '0.10.2')))\n"
        "cache = Cache.open(sys.argv[1])\n"
        "assert cache.get(key)\n"
        "cache.close()\n"
        "assert 'sqlite_utils' not in sys.modules\n"
    )
    run_program(script, cache.path)
    assert cache.stats().hits == 1


def test_clearing_removes_entries_and_figures_but_no_file_of_others(cache: Cache) -> None:
    for name in "abc":
        cache.put(_key(name), b"payload", METADATA)
    cache.get(_key("a"))
    cache.discard(_key("c"), "for the quarantine")
    kept = [cache.path / "notes.txt", cache.folder / "blobs" / "README", cache.path / "sub" / "x"]
    kept.append(cache.blob_path(_key("a").digest).with_name("mine.blob"))
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    assert cache.clear() == 2
    assert cache.get(_key("a")) is None
    assert [path.read_text() for path in kept] == ["mine"] * 4
    stats = cache.stats()
    assert (stats.entries, stats.hits, stats.misses, stats.set_aside) == (0, 0, 1, 0)
    assert cache.put(_key("a"), b"again", METADATA)


def test_files_and_folders_are_for_their_user_alone(cache: Cache) -> None:
    previous = os.umask(0)
    try:
        cache.put(_key("a"), b"payload", METADATA)
    finally:
        os.umask(previous)
    for path in [cache.path, *cache.path.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    with pytest.raises(CacheError, match="other users can write") as caught:
        Cache.open(tmp_path / "cache")
    assert "chmod -R go-w" in caught.value.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    os.chown(tmp_path / "cache", 12345, -1)
    with pytest.raises(CacheError, match="belongs to user 12345"):
        Cache.open(tmp_path / "cache")


def test_a_directory_that_becomes_unsafe_after_opening_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = Cache.open(tmp_path / "good")
    good.put(_key("a"), b"payload", METADATA)
    cache = Cache.open(tmp_path / "cache")
    good.path.rename(cache.path)
    cache.path.chmod(0o777)
    with caplog.at_level(logging.WARNING, "snaprt.cache"):
        assert cache.get(_key("a")) is None
        assert not cache.offers(_key("a").digest)
        assert not cache.put(_key("a"), b"payload", METADATA)
    assert len(caplog.records) == 1
    assert "chmod -R go-w" in caplog.text


def test_ctrl_c_between_two_folders_is_no_trouble_of_the_cache(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.put(_key("a"), b"payload", METADATA)
    close = os.close

    def interrupted(descriptor: int) -> None:
        monkeypatch.setattr(os, "close", close)
        close(descriptor)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "close", interrupted)
    with caplog.at_level(logging.WARNING, "snaprt.cache"), pytest.raises(KeyboardInterrupt):
        cache.get(_key("a"))
    assert not caplog.records


def test_pins_that_others_may_write_to_end_no_program(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "cache", max_bytes=4_000)
    cache.put(_key("a"), os.urandom(2_000), METADATA)
    cache.pin(_key("a").digest)
    (cache.folder / "pins").chmod(0o777)
    assert cache.put(_key("b"), os.urandom(2_000), METADATA)
    assert cache.get(_key("b")) is not None


def test_an_entry_whose_key_is_too_long_to_store_is_refused_with_a_warning(
    cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "snaprt.cache"):
        assert not cache.put(Key((KeyPart("module", "x" * 2_000_000),)), b"", METADATA)
    assert "too large" in caplog.text


def test_the_directory_comes_from_the_environment_else_from_the_users_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SNAPRT_CACHE_DIR", str(tmp_path / "chosen"))
    assert Cache.open().path == tmp_path / "chosen"
    monkeypatch.delenv("SNAPRT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert default_path().name == "snaprt"


def test_a_home_directory_in_the_path_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert Cache.open("~/cache").path == Path("/somewhere/cache")


def test_the_index_is_an_ordinary_sqlite_database(cache: Cache) -> None:
    cache.put(_key("a"), b"payload", METADATA)
    cache.close()
    connection = sqlite3.connect(cache.index_path)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


def test_an_entry_that_this_process_cannot_use_is_a_miss_and_stays(cache: Cache) -> None:
    cache.put(_key("a"), b"payload", METADATA)

    def obstacle(metadata: Mapping[str, str | int | float]) -> str:
        return f"{metadata['name']} needs what is not here"

    events: list[str] = []
    other = Cache.open(cache.path, on_event=lambda event, _: events.append(event))
    assert other.get(_key("a"), obstacle=obstacle) is None
    assert events == ["PersistentCacheMiss"]
    assert not other.offers(_key("a").digest)  # nobody need wait for it
    other.record_miss(_key("a"), "train_step")
    assert other.misses()[-1].obstacle == "train_step needs what is not here"
    assert other.get(_key("a"), obstacle=lambda _: "") is not None
    assert other.offers(_key("a").digest)


def test_an_entry_that_cannot_be_used_is_an_error_where_nothing_may_miss(cache: Cache) -> None:
    cache.put(_key("a"), b"payload", METADATA)
    strict = Cache.open(cache.path, mode="fail-on-miss")
    with pytest.raises(CacheError, match=r"cannot use the entry .*: it is not for us"):
        strict.get(_key("a"), obstacle=lambda _: "it is not for us")
