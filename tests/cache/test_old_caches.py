"""Caches and bundles that an older snaprt made: `tests/support/old-cache.tar.gz`, of d91a62b."""

from __future__ import annotations

import sqlite3
import tarfile
from pathlib import Path

import pytest
from snaprt_cache import Cache, Key, KeyPart
from snaprt_cache.bundle import bundled_blobs, read_bundle

MADE = Path(__file__).parents[1] / "support" / "old-cache.tar.gz"
NAMES = {"forward", "backward", "update"}


def _key(name: str) -> Key:
    parts = {"module": name, "kind": "compiled", "jaxlib": "0.10.2", "flags": "--xla_a=1"}
    return Key(tuple(KeyPart(part, value) for part, value in parts.items()))


def _payload(name: str) -> bytes:
    return f"the bytes of {name} ".encode() * 20


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with tarfile.open(MADE) as archive:
        archive.extractall(tmp_path, filter="tar")  # with the permissions that a cache needs
    return tmp_path


def test_entries_figures_pins_and_misses_of_an_older_cache_are_read(old: Path) -> None:
    index = Cache.open(old / "old-cache").index_path
    before = index.stat().st_ino
    cache = Cache.open(old / "old-cache")
    for name in NAMES:
        entry = cache.get(_key(name))
        assert entry is not None
        assert (entry.payload, entry.metadata["name"]) == (_payload(name), name)
    rows = {row.name: row for row in cache.entries()}
    assert {name: (row.hits, row.pinned) for name, row in rows.items()} == {
        "forward": (4, False),
        "backward": (1, False),
        "update": (1, True),
    }
    assert [miss.key for miss in cache.misses()] == [_key("absent")]
    assert (cache.stats().puts, cache.stats().misses) == (3, 1)
    assert not [finding for finding in cache.verify() if finding.problem]
    assert index.stat().st_ino == before  # used as it is, not made anew


def test_signed_entries_of_an_older_cache_are_read_where_a_signature_is_needed(old: Path) -> None:
    cache = Cache.open(old / "signed", signing_key=bytes(range(32)), shared=True)
    entry = cache.get(_key("signed"))
    assert entry is not None
    assert entry.payload == b"signed bytes"


def test_an_older_bundle_is_imported(old: Path) -> None:
    bundle = read_bundle(old / "old-cache.snapbundle", None)
    cache = Cache.open(old / "new")
    assert all(cache.adopt(digest, content) for digest, content in bundled_blobs(bundle))
    for name in NAMES:
        entry = cache.get(_key(name))
        assert entry is not None
        assert entry.payload == _payload(name)


def test_what_we_write_into_an_older_index_is_what_the_older_one_reads(old: Path) -> None:
    cache = Cache.open(old / "old-cache")
    assert cache.put(_key("new"), b"new", {"name": "new"})
    cache.close()
    connection = sqlite3.connect(cache.index_path)
    query = "SELECT entries.name FROM entries JOIN key_parts USING (key) WHERE value = 'new'"
    assert connection.execute(query).fetchall() == [("new",)]
    connection.close()
